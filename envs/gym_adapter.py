"""Any registered gymnasium environment with text or discrete spaces: `--env gym:Blackjack-v1`.

An observation is its value; under it stands the environment's own drawing, where it has the render mode "ansi" (what is
coloured there stands in brackets). An action is its number, or its name where `actions` gives names, or any text where the
environment takes text.

Success is what the environment's `info` says (`success` or `is_success`), otherwise an end with a reward above `success_above`.
Left out: continuous spaces and images, which a language model cannot read, and solvers.
"""

import re

import gymnasium
from gymnasium import spaces

from nanoragen.envs.base import TextEnv, check_attributes

COLOURED = re.compile(r"\x1b\[[0-9;]*m(.*?)\x1b\[0?m", re.DOTALL)


class GymText(TextEnv):
    """
    id              the environment's id, as gymnasium.make takes it
    actions         names of the actions in their order, as in "left/down/right/up"; "": their numbers
    success_above   a last reward above this is a success
    options         what else gymnasium.make takes for it (is_slippery=False)

    An environment that has an instruction, turns and a step reward of its own (see TextEnv) keeps them.
    """

    max_turns = 20
    max_actions_per_turn = 1

    def __init__(self, id, actions="", success_above=0, **options):
        super().__init__()
        if not isinstance(success_above, (int, float)) or success_above != success_above:
            raise ValueError(f"success_above: {success_above!r}; valid: a number")
        try:
            self.env = gymnasium.make(id, disable_env_checker=True, **options)
            plain = isinstance(self.env.observation_space, spaces.Text)
            self.draws = not plain and "ansi" in self.env.unwrapped.metadata.get("render_modes", ())
            if self.draws:
                self.env = gymnasium.make(id, disable_env_checker=True, **{"render_mode": "ansi", **options})
        except (Exception, SystemExit) as e:
            why = f"{type(e).__name__}: {e}"
            raise ValueError(f"env: gym:{id} cannot be made ({why}); valid: a registered gymnasium id and its own options") from e
        seen, taken = self.env.observation_space, self.env.action_space
        if not _readable(seen):
            raise ValueError(f"env: gym:{id} shows {type(seen).__name__} observations; valid: text or discrete ones")
        if not isinstance(taken, (spaces.Discrete, spaces.Text)):
            raise ValueError(f"env: gym:{id} takes {type(taken).__name__} actions; valid: text or discrete ones")
        if isinstance(taken, spaces.Discrete):
            self.actions = tuple(str(actions).split("/")) if actions else tuple(map(str, range(int(taken.n))))
            said = {a.strip().lower() for a in self.actions} - {""}
            if len(self.actions) != taken.n or len(said) != taken.n or any("||" in a for a in said):  # || divides two actions
                raise ValueError(f"actions: {actions!r} for gym:{id}; valid: {taken.n} different names with / between them")
            ways = f"Actions: {', '.join(self.actions)}."
        elif actions:
            raise ValueError(f"actions: {actions!r}, but gym:{id} takes any text; valid: none")
        else:
            ways = "Answer with an action."
        example = self.actions[0] if hasattr(self, "actions") else "your action"  # the latter is refused when it is copied
        self.instruction = f"You play {id}. {ways} Reply <think>your reasoning</think><answer>{example}</answer>"
        self.success_above = success_above
        for name in ("instruction", "max_turns", "max_actions_per_turn", "step_reward"):
            setattr(self, name, getattr(self.env.unwrapped, name, getattr(self, name)))
        check_attributes(self, f"gym:{id}")

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        observation, _ = self.env.reset(seed=seed, options=options)
        self.success = self.over = False
        self.seen, self.text = _plain(observation), self._text(observation)
        return self.text, {"success": False, "action_is_valid": True, "action_is_effective": False}

    def step(self, action):
        action, before = self._read(str(action)), self.seen
        if action is None or self.over:
            info = {"success": self.success, "action_is_valid": False, "action_is_effective": False}
            return self.text, 0.0, self.over, False, info
        observation, reward, terminated, truncated, info = self.env.step(action)
        said = info.get("success", info.get("is_success"))
        self.success = bool(terminated and reward > self.success_above) if said is None else bool(said)
        self.over, self.seen, self.text = bool(terminated), _plain(observation), self._text(observation)
        effective = bool(info.get("action_is_effective", self.seen != before or terminated))
        valid = bool(info.get("action_is_valid", True))
        info = {"success": self.success, "action_is_valid": valid, "action_is_effective": effective}
        return self.text, float(reward), self.over, bool(truncated), info

    def render(self):
        return self.text

    def random_action(self, rng) -> str:
        if hasattr(self, "actions"):
            return str(rng.choice(self.actions))
        space = self.env.action_space
        space.seed(int(rng.integers(2**31)))
        return space.sample()

    def close(self):
        self.env.close()

    def _read(self, text: str):
        """The environment's action of a text, None where it names none."""
        space = self.env.action_space
        if isinstance(space, spaces.Text):
            return text if space.contains(text) else None
        names = [a.lower() for a in self.actions]
        name = text.strip().lower()
        return space.start + names.index(name) if name in names else None

    def _text(self, observation) -> str:
        text = _plain(observation)
        return text + "\n" + COLOURED.sub(r"[\1]", self.env.render()).strip() if self.draws else text


def _readable(space) -> bool:
    if isinstance(space, spaces.Tuple):
        return all(map(_readable, space.spaces))
    return isinstance(space, (spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary, spaces.Text))


def _plain(value) -> str:
    """A text as it is; a number, or numbers with spaces between them."""
    if isinstance(value, tuple):
        return " ".join(map(_plain, value))
    return value if isinstance(value, str) else " ".join(str(int(n)) for n in getattr(value, "flat", [value]))
