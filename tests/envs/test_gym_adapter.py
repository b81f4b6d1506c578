"""gym:ID: the same game as gymnasium's own, move for move; text in, text out; one line for what cannot be played."""

import random

import gymnasium
import numpy as np
import pytest

from nanoragen.envs.base import TextEnv
from nanoragen.envs.gym_adapter import GymText
from nanoragen.envs.registry import make
from nanoragen.evaluate import evaluate
from nanoragen.rollout.chat import find_placeholders, parse_reply
from nanoragen.rollout.episodes import Sampling

LAKE = {"is_slippery": False, "actions": "Left/Down/Right/Up"}


class Door(gymnasium.Env):
    """Text in, text out, and an `info` that says success itself; actions counted from 3 in `Steps`."""

    observation_space = gymnasium.spaces.Text(100)
    action_space = gymnasium.spaces.Text(20)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return f"room {self.np_random.integers(1000)}", {}

    def step(self, action):
        return "a wall" if action != "knock" else "open", -1.0, action == "knock", False, {"is_success": action == "knock"}


class Steps(gymnasium.Env):
    observation_space = gymnasium.spaces.MultiDiscrete([5, 5])
    action_space = gymnasium.spaces.Discrete(2, start=3)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.array([1, 4]), {}

    def step(self, action):
        assert self.action_space.contains(action)
        return np.array([2, action]), -1.0, False, True, {}


@pytest.fixture
def registered():
    for cls in (Door, Steps):
        gymnasium.register(id=f"Test{cls.__name__}-v0", entry_point=cls)
    yield
    for cls in (Door, Steps):
        gymnasium.registry.pop(f"Test{cls.__name__}-v0")


@pytest.mark.parametrize("id", ["FrozenLake-v1", "Blackjack-v1"])
def test_the_same_game_as_gymnasiums_own(id):
    ours, theirs, rng = make(f"gym:{id}"), gymnasium.make(id), random.Random(0)
    for seed in range(20):
        seen, (shown, _) = theirs.reset(seed=seed)[0], ours.reset(seed=seed)
        for _ in range(30):
            numbers = " ".join(map(str, seen)) if isinstance(seen, tuple) else str(seen)
            assert shown.split("\n")[0] == numbers and isinstance(ours, TextEnv)
            action = rng.randrange(theirs.action_space.n)
            seen, reward, terminated, truncated, _ = theirs.step(action)
            shown, *rest, info = ours.step(f" {action}\n")
            assert rest == [reward, terminated, truncated] and info["action_is_valid"]
            assert info["success"] is (terminated and reward > 0)
            if terminated:
                assert ours.step("0") == (shown, 0.0, True, False, {**info, "action_is_valid": False, "action_is_effective": False})
                break


def test_named_actions_and_the_drawing():
    env = make("gym:FrozenLake-v1", **LAKE)
    assert env.reset(seed=0)[0] == "0\n[S]FFF\nFHFH\nFFFH\nHFFG"
    assert "Actions: Left, Down, Right, Up." in env.instruction
    text, reward, terminated, _, info = env.step("down")
    assert text.startswith("4\n") and "[F]HFH" in text and info["action_is_effective"]
    assert not env.step("LEFT")[4]["action_is_effective"]  # a wall; that the drawing names the move is no effect
    for action in ("down", "right", "down", "right", "right"):
        text, reward, terminated, _, info = env.step(action)
    assert (reward, terminated, info["success"]) == (1.0, True, True)


@pytest.mark.parametrize("action", ["", "4", "-1", "1.0", "０", "0 1", "None", "\x00", "left"])
def test_unknown_actions_do_not_reach_the_environment(action):
    env = make("gym:FrozenLake-v1", is_slippery=False)
    before = env.reset(seed=0)[0]
    after, reward, terminated, _, info = env.step(action)
    assert (after, reward, terminated) == (before, 0.0, False) and not info["action_is_valid"]


def test_text_spaces_and_success_by_info(registered):
    env = make("gym:TestDoor-v0")
    first = env.reset(seed=5)[0]
    assert first.startswith("room ") and env.reset(seed=5)[0] == first != env.reset(seed=6)[0]
    placeholders = find_placeholders(env.instruction)  # an instruction copied word for word is no action
    assert not parse_reply("so</think><answer>your action</answer>", placeholders).parsed
    assert env.step("push")[:3] == ("a wall", -1.0, False)
    assert not env.step("é" * 30)[4]["action_is_valid"]  # outside its space
    text, reward, terminated, _, info = env.step("knock")
    assert (text, reward, terminated, info["success"]) == ("open", -1.0, True, True)
    assert env.env.action_space.contains(env.random_action(np.random.default_rng(0)))


def test_arrays_and_actions_that_do_not_start_at_zero(registered):
    env = make("gym:TestSteps-v0", actions="a/b")
    assert env.reset(seed=0)[0] == "1 4"
    text, _, terminated, truncated, info = env.step("B")
    assert (text, terminated, truncated, info["success"]) == ("2 4", False, True, False)


def test_where_no_reward_is_positive_the_threshold_is_a_setting():
    env = GymText("Blackjack-v1", success_above=-2)
    env.reset(seed=0)
    while not (result := env.step("1"))[2]:
        pass
    assert result[1] == -1.0 and result[4]["success"]


def test_our_own_environments_keep_their_rules():
    env, own = make("gym:nanoragen/Sokoban-v0", boxes=2), make("sokoban", boxes=2)
    assert env.reset(seed=1)[0] == own.reset(seed=1)[0]
    assert (env.instruction, env.max_turns, env.step_reward) == (own.instruction, own.max_turns, own.step_reward)
    for action in own.demonstrate():
        assert env.step(action) == own.step(action)


def test_the_global_random_state_is_left_alone():
    random.seed(1), np.random.seed(1)
    before = random.getstate(), np.random.get_state()[1].tobytes()
    env = make("gym:Blackjack-v1")
    for seed in range(5):
        env.reset(seed=seed)
        env.step("1")
    assert (random.getstate(), np.random.get_state()[1].tobytes()) == before


def test_it_is_played_like_any_other():
    found, episodes = evaluate(None, None, "gym:FrozenLake-v1", range(30), Sampling(), policy="random", env_options=LAKE)
    assert 0 <= found["success"] < 0.3 and found["turns"] > 3 and episodes[0].turns[0].actions[0] in LAKE["actions"].split("/")
    again, _ = evaluate(None, None, "gym:FrozenLake-v1", range(30), Sampling(), policy="random", env_options=LAKE)
    assert again == found


@pytest.mark.parametrize(
    "name, options, message",
    [
        ("gym:Nope-v0", {}, "env: gym:Nope-v0 cannot be made"),
        ("gym:", {}, "env: gym: cannot be made"),
        ("gym:no_such_module:Foo-v0", {}, "env: gym:no_such_module:Foo-v0 cannot be made"),
        ("gym:FrozenLake-v1", {"zzz": 1}, "env: gym:FrozenLake-v1 cannot be made .*zzz"),
        ("gym:CartPole-v1", {}, "env: gym:CartPole-v1 shows Box observations"),
        ("gym:FrozenLake-v1", {"actions": "a/b"}, "actions: 'a/b'"),
        ("gym:FrozenLake-v1", {"actions": "a/b/c/A"}, "actions: 'a/b/c/A'"),
        ("gym:FrozenLake-v1", {"actions": 5}, "actions: 5"),
        ("gym:FrozenLake-v1", {"actions": "a/b/c/"}, "actions: 'a/b/c/'"),
        ("gym:FrozenLake-v1", {"actions": "a/b/c/d||e"}, "actions: 'a/b/c/d"),
        ("gym:FrozenLake-v1", {"success_above": "x"}, "success_above: 'x'"),
        ("gym:FrozenLake-v1", {"success_above": float("nan")}, "success_above: nan"),
        ("gym:nanoragen/Bandit-v0", {"actions": "a/b"}, "actions: 'a/b', but"),
    ],
)
def test_what_cannot_be_played(name, options, message):
    with pytest.raises(ValueError, match=f"^{message}.*; valid: ") as error:
        make(name, **options)
    assert "\n" not in str(error.value)
