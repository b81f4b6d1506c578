"""What holds for every registered environment: gymnasium's checker, seeds, random state, fuzzed actions, solvers."""

import json
import math
import os
import random
import subprocess
import sys
import warnings
from pathlib import Path

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.utils.env_checker import check_env
from hypothesis import given, settings
from hypothesis import strategies as st
from playable import make, options

from nanoragen.envs import registry
from nanoragen.envs.base import CHARSET, EVAL_SEEDS, TRAIN_SEEDS, WARMUP_SEEDS, eval_seeds, train_seeds
from nanoragen.envs.registry import env_class, names

ROOT = Path(__file__).resolve().parents[2]
ALL = pytest.mark.parametrize("name", names())
PLAY = """
import json, random, sys
sys.path[:0] = [sys.argv[1], sys.argv[1] + "/tests/envs"]
from nanoragen.envs.registry import names
from playable import make
logs = {}
for name in names():
    env, rng, log = make(name), random.Random(0), logs.setdefault(name, [])
    for seed in range(25):
        log.append(env.reset(seed=seed))
        actions = [rng.choice(env.actions) for _ in range(6)] if hasattr(env, "actions") else env.best_actions()
        for action in actions:
            log.append(env.step(action))
print(json.dumps(logs))
"""


def first(name, seed):
    return make(name).reset(seed=seed)[0]


@ALL
def test_gymnasium_checker(name):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it recommends bounded Box spaces, which text has not
        check_env(make(name))


@ALL
def test_registered_with_gymnasium(name):
    env = gymnasium.make(f"nanoragen/{env_class(name).__name__}-v0", **options(name))
    assert env.reset(seed=3)[0] == first(name, 3)
    assert type(env.unwrapped) is env_class(name)


@ALL
def test_seed_alone_decides(name):
    """The same in one environment again, in another, and after other play."""
    env = make(name)
    seen = [env.reset(seed=s)[0] for s in range(25)]
    assert [env.reset(seed=s)[0] for s in reversed(range(25))] == seen[::-1]
    assert [first(name, s) for s in range(25)] == seen
    assert len(set(seen)) >= 20


def test_the_same_in_processes_that_hash_differently():
    logs = []
    for salt in ("1", "2"):
        run = subprocess.run(
            [sys.executable, "-c", PLAY, str(ROOT)],
            capture_output=True, text=True, check=True, cwd=ROOT, env={**os.environ, "PYTHONHASHSEED": salt},
        )  # fmt: skip
        logs.append(json.loads(run.stdout))
    assert logs[0] == logs[1] and list(logs[0]) == names()
    for name, log in logs[0].items():
        assert [entry[0] for entry in log if len(entry) == 2] == [first(name, s) for s in range(25)]


@ALL
def test_reset_without_a_seed_goes_on(name):
    env = make(name)
    env.reset(seed=0)
    texts = [env.reset()[0] for _ in range(10)]
    assert len(set(texts)) > 1
    env.reset(seed=0)
    assert [env.reset()[0] for _ in range(10)] == texts


@ALL
def test_global_random_state_is_neither_read_nor_changed(name):
    def play():
        env = make(name)
        text = [env.reset(seed=5)[0]]
        return text + [env.step(a)[0] for a in env.demonstrate()]

    results = []
    for seed in (1, 2):
        random.seed(seed), np.random.seed(seed), torch.manual_seed(seed)
        before = random.getstate(), np.random.get_state()[1].tobytes(), torch.get_rng_state().numpy().tobytes()
        results.append(play())
        after = random.getstate(), np.random.get_state()[1].tobytes(), torch.get_rng_state().numpy().tobytes()
        assert before == after
    assert results[0] == results[1]


@ALL
def test_instruction_is_complete_and_short(name):
    env = make(name)
    text = env.instruction
    assert 5 < len(text.split()) <= 60
    assert all(tag in text for tag in ("<think>", "</think>", "<answer>", "</answer>"))
    if isinstance(getattr(type(env), "actions", None), tuple):  # fixed names: all of them, and how many there may be
        assert all(action in text for action in env.actions)
        assert f"at most {env.max_actions_per_turn}" in text and "||" in text
    assert type(env.max_turns) is int and env.max_turns >= 1
    assert type(env.max_actions_per_turn) is int and env.max_actions_per_turn >= 1
    assert env.step_reward <= 0


def check_step(env, result):
    text, reward, terminated, truncated, info = result
    assert env.observation_space.contains(text)
    assert type(reward) is float and math.isfinite(reward)
    assert type(terminated) is bool and type(truncated) is bool
    assert all(type(info[k]) is bool for k in ("success", "action_is_valid", "action_is_effective"))
    assert terminated or not info["success"]


@ALL
def test_solver_solves_within_the_turn_limit(name):
    env = make(name)
    for seed in range(100):
        _, info = env.reset(seed=seed)
        assert info["success"] is False
        count = 0
        for action in env.demonstrate():
            result = env.step(action)
            check_step(env, result)
            assert result[4]["action_is_valid"] and result[4]["action_is_effective"]
            count += 1
        assert count and result[2] and result[4]["success"], seed
        assert count <= env.max_turns * env.max_actions_per_turn, seed
        assert env.best_actions() == [] and list(env.demonstrate()) == []


@ALL
def test_solved_stays_solved(name):
    env = make(name)
    env.reset(seed=2)
    for action in env.demonstrate():
        env.step(action)
    _, reward, terminated, _, info = env.step("nonsense")
    assert info["success"] and terminated and reward <= 0


@ALL
def test_optimal_actions_lead_to_optimal_actions(name):
    """Whichever of `best_actions` is taken, the game is won in as many steps."""
    env, rng = make(name), random.Random(0)
    for seed in range(40):
        lengths = set()
        for _ in range(3):
            env.reset(seed=seed)
            count = 0
            while best := env.best_actions():
                terminated = env.step(rng.choice(best))[2]
                count += 1
            assert terminated
            lengths.add(count)
        assert len(lengths) == 1, seed


UNKNOWN = ["", " ", "\n", "(" * 10_000, "Up" * 5_000, "\x00", "\ud800", "𝓤𝓹", "١٢", "None", "{}", "%s", "up; down"]


def fuzzed(n, seed):
    """Texts from nothing, from the charset, and from pieces of real actions."""
    rng = random.Random(seed)
    pieces = ["Up", "down", "LEFT", "Right", "Gold", "Mud", "||", ".", "e9", "3", "12", *"()+-*/= "]
    for i in range(n):
        k = rng.randrange(30)
        yield "".join(rng.choice(CHARSET) for _ in range(k)) if i % 2 else "".join(rng.choice(pieces) for _ in range(k))


@ALL
def test_fuzzed_actions_never_raise(name):
    env = make(name)
    for i, action in enumerate([*UNKNOWN, *fuzzed(1_000, 0)]):
        if i % 7 == 0:
            env.reset(seed=i)
        check_step(env, env.step(action))


@ALL
@settings(max_examples=30, deadline=None, derandomize=True, database=None)
@given(st.lists(st.text(), min_size=1, max_size=5))
def test_any_text_never_raises(name, actions):
    env = make(name)
    env.reset(seed=0)
    for action in actions:
        check_step(env, env.step(action))


@ALL
@pytest.mark.parametrize("action", UNKNOWN)
def test_unknown_action_changes_nothing(name, action):
    env = make(name)
    before, _ = env.reset(seed=1)
    after, reward, _, _, info = env.step(action)
    assert after == before and reward == env.step_reward
    assert not info["action_is_valid"] and not info["action_is_effective"] and not info["success"]


@ALL
def test_action_names_in_any_case(name):
    env = make(name)
    for change in (str.upper, str.lower, lambda a: f"  {a}\n"):
        env.reset(seed=4)
        assert env.step(change(env.best_actions()[0]))[4]["action_is_valid"]


# -- seeds and names ---------------------------------------------------------------------------------------------------


def test_e1_train_evaluation_and_warm_up_seeds_do_not_meet():
    train = [s for step in range(100) for s in train_seeds(run_seed=0, step=step, n=100)]
    assert len(train) == 10_000 and len(set(train)) > 9_900
    assert not set(train) & set(EVAL_SEEDS) and all(s in TRAIN_SEEDS for s in train)
    spans = sorted([EVAL_SEEDS, TRAIN_SEEDS, WARMUP_SEEDS], key=lambda r: r.start)
    assert all(a.stop <= b.start for a, b in zip(spans, spans[1:]))
    assert set(eval_seeds(512)) <= set(EVAL_SEEDS) and len(set(eval_seeds(512))) == 512


def test_e1_same_arguments_same_seeds():
    assert train_seeds(3, 7, 50) == train_seeds(3, 7, 50)
    assert eval_seeds(50) == eval_seeds(50)
    assert train_seeds(3, 7, 50) != train_seeds(3, 8, 50) and train_seeds(3, 7, 50) != train_seeds(4, 7, 50)


@pytest.mark.parametrize("wrong, near", [("sokobann", "sokoban"), ("frozenlake", "frozen_lake"), ("countdwn", "countdown")])
def test_unknown_name_gives_the_nearest(wrong, near):
    with pytest.raises(ValueError, match=f"^env: .*did you mean '{near}'.*valid: ") as error:
        registry.make(wrong)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "name, key, value, valid",
    [("frozen_lake", "is_slippery", "maybe", "true, false"), ("frozen_lake", "random_start", 0, "true, false"),
     ("sokoban", "boxes", True, "no true or false"), ("countdown", "low", True, "no true or false")],
)  # fmt: skip
def test_switches_are_true_or_false_and_numbers_are_not(name, key, value, valid):
    with pytest.raises(ValueError, match=f"^{key}: {value!r} is not possible in {name}; valid: {valid}$"):
        registry.make(name, **{key: value})
    assert registry.make("frozen_lake", is_slippery=True).reset(seed=0)


@pytest.mark.parametrize("wrong, near", [("boxs", "boxes"), ("hieght", "height")])
def test_unknown_option_gives_the_nearest(wrong, near):
    with pytest.raises(ValueError, match=f"^env: sokoban has no option '{wrong}'; did you mean '{near}'"):
        registry.make("sokoban", **{wrong: 1})
    with pytest.raises(ValueError, match="valid: numbers, low, high, max_target"):
        registry.make("countdown", zzz=1)
