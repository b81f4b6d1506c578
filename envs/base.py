"""What an environment is: a gymnasium.Env whose observations and actions are text.

    env = Sokoban()
    text, info = env.reset(seed=7)          # the seed alone decides the instance
    text, reward, terminated, truncated, info = env.step("Up")

One `step` is one action ("Up"), not one reply: the rollout parses a reply, and calls `step` for at most
`max_actions_per_turn` actions of it. Turn limits belong to the rollout too; an environment only says when *it* is over.

`info` always has
    success               bool, solved for good (the figure that is reported; never derived from the reward)
    action_is_valid       bool, the text names an action
    action_is_effective   bool, the action changed something
An action that is not understood changes nothing, and is answered, never raised.
"""

import math
import numbers
import string
from collections.abc import Iterator

import gymnasium
import numpy as np

from nanoragen.envs.limits import MAX_REWARD

# Evaluation, training and warm-up draw from ranges that do not meet, so no room of an evaluation was trained on.
EVAL_SEEDS = range(0, 1_000_000)
TRAIN_SEEDS = range(1_000_000, 1_000_000_000)
WARMUP_SEEDS = range(1_000_000_000, 2_000_000_000)


CHARSET = "".join(c for c in string.printable if c not in "\r\x0b\x0c") + "√"


class TextEnv(gymnasium.Env):
    """Base of all environments. Subclasses set the class attributes, `reset`, `step`, and `demonstrate` if they can.

    instruction           the system prompt: the rules, and the actions there are
    max_turns             replies an episode has at most
    max_actions_per_turn  actions of one reply that are executed at most
    step_reward           what a step costs (<= 0). An episode that runs out of turns is charged this for every action it
                          left unused, so that standing still is never cheaper than trying.
    """

    metadata = {"render_modes": ["ansi"]}
    instruction: str = ""
    max_turns: int = 1
    max_actions_per_turn: int = 1
    step_reward: float = 0.0

    def __init__(self):
        self.observation_space = gymnasium.spaces.Text(max_length=20_000, charset=CHARSET)
        self.action_space = gymnasium.spaces.Text(max_length=2_000, charset=CHARSET)
        self.render_mode = "ansi"

    def render(self):
        """The observation text, where an environment can give it at any time (gymnasium's checker asks for it)."""

    def random_action(self, rng) -> str:
        """What a player says who understands nothing but the rules: one of `actions`. For other games, to be overridden."""
        if not hasattr(self, "actions"):
            raise ValueError(f"policy: {type(self).__name__} has neither `actions` nor `random_action`; valid: model, demonstrate")
        return str(self.actions[rng.integers(len(self.actions))])

    def demonstrate(self) -> Iterator[str]:
        """Yield good actions, one a time, each from the state as it is then (the caller steps in between)."""
        raise NotImplementedError(f"{type(self).__name__} has no solver")


class Game(TextEnv):
    """What the environments of this folder share. They write `_start(seed)`, `step`, `render`, and:

    best_actions()   all good actions from here; [] where the episode is over, or nothing leads anywhere
    """

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self._start(seed)
        return self.render(), {"success": False, "action_is_valid": True, "action_is_effective": False}

    def demonstrate(self) -> Iterator[str]:
        while best := self.best_actions():
            yield best[0]

    def _result(self, reward, over: bool, success: bool, valid: bool, effective: bool | None = None):
        """What `step` returns. effective: None where every valid action is."""
        info = {"success": success, "action_is_valid": valid, "action_is_effective": valid if effective is None else effective}
        return self.render(), float(reward), over, False, info


def check_whole(env: str, low: int, high: float = math.inf, **options):
    """ValueError for the first option that is no whole number from low to high."""
    for key, value in options.items():
        if not (isinstance(value, int) and low <= value <= high):
            valid = f"{low} to {high}" if high < math.inf else f"a whole number, {low} or more"
            raise ValueError(f"{key}: {value!r} is not possible in {env}; valid: {valid}")


def check_attributes(env, name: str):
    """ValueError where an environment's class attributes, which may be anybody's, are not what TextEnv says."""
    own = {key: getattr(env, key, None) for key in ("instruction", "max_turns", "max_actions_per_turn", "step_reward")}
    if not isinstance(own["instruction"], str):
        raise ValueError(f"env: {name} has the instruction {own['instruction']!r:.80}; valid: text")
    for key in ("max_turns", "max_actions_per_turn"):
        if not isinstance(own[key], numbers.Integral) or own[key] < 1:
            raise ValueError(f"env: {name} has {key} {own[key]!r:.80}; valid: a whole number, 1 or more")
    cost = own["step_reward"]
    if not isinstance(cost, numbers.Real) or not abs(cost) < MAX_REWARD:  # NaN compares false
        raise ValueError(f"env: {name} has the step_reward {cost!r:.80}; valid: a finite number, below {MAX_REWARD:g}")


def eval_seeds(n: int) -> list[int]:
    """The first n evaluation seeds: the same instances for every run and every checkpoint."""
    return list(EVAL_SEEDS[:n])


def held_out(seed) -> bool:
    """Whether a seed given to `reset` is one that evaluations draw from."""
    return seed is not None and int(seed) in EVAL_SEEDS


def train_seeds(run_seed: int, step: int, n: int) -> list[int]:
    """The n instance seeds of one training step; a function of its arguments only, so a resumed run sees the same."""
    rng = np.random.default_rng([run_seed, step])
    return [int(s) for s in rng.integers(TRAIN_SEEDS.start, TRAIN_SEEDS.stop, size=n)]
