"""Countdown: every instance can be solved, those of files too, and what no instance can be made from is refused."""

import itertools
import random
from fractions import Fraction

import numpy as np
import pytest

import nanoragen.envs.countdown as module
from nanoragen.envs.base import EVAL_SEEDS, TRAIN_SEEDS
from nanoragen.envs.countdown import Countdown, evaluate, makes

# -- instances ---------------------------------------------------------------------------------------------------------


def reachable(values):
    """All values that combine the fractions given, by an independent recursion over splits."""
    if len(values) == 1:
        return {values[0]}
    found = set()
    for mask in range(1, 2 ** len(values) - 1):
        one = [v for i, v in enumerate(values) if mask >> i & 1]
        two = [v for i, v in enumerate(values) if not mask >> i & 1]
        for a, b in itertools.product(reachable(one), reachable(two)):
            found |= {a + b, a - b, a * b} | ({a / b} if b else set())
    return found


@pytest.mark.parametrize("count", [2, 3, 4])
def test_every_instance_is_solvable_and_in_range(count):
    env = Countdown(numbers=count, low=2, high=12, max_target=60)
    for seed in range(60 if count < 4 else 8):
        text, _ = env.reset(seed=seed)
        words = text.split()
        numbers, target = [int(w) for w in words[1:-2]], int(words[-1])
        assert words[0] == "numbers" and words[-2] == "target" and len(numbers) == count
        assert all(2 <= n <= 12 for n in numbers) and 1 <= target <= 60
        assert Fraction(target) in reachable([Fraction(n) for n in numbers])
        best = env.best_actions()
        assert best and all(evaluate(b)[0] == target and sorted(evaluate(b)[1]) == sorted(numbers) for b in best)


def test_random_action_is_well_formed_and_mostly_wrong():
    env, right = Countdown(), 0
    rng = np.random.default_rng(0)
    for seed in range(400):
        env.reset(seed=seed)
        reward, info = [env.step(env.random_action(rng))[i] for i in (1, 4)]
        assert reward in (0.1, 1.0)
        right += info["success"]
    assert 0.02 < right / 400 < 0.35


@pytest.mark.parametrize(
    "key, options",
    [
        ("numbers", {"numbers": 1}),
        ("numbers", {"numbers": 5}),
        ("numbers", {"numbers": "3"}),
        ("low", {"low": 0}),
        ("low", {"low": 9, "high": 2}),
        ("low", {"high": 1e9}),
        ("max_target", {"max_target": 0}),
        ("max_target", {"max_target": "x"}),
    ],
)
def test_impossible_options(key, options):
    with pytest.raises(ValueError, match=f"^{key}.*valid: "):
        Countdown(**options)


def test_options_without_any_instance_are_an_error_not_a_hang(monkeypatch):
    monkeypatch.setattr(module, "MAX_DRAWS", 200)
    with pytest.raises(ValueError, match="^max_target: 3 numbers from 1000 to 1000 make no target"):
        Countdown(low=1000, high=1000, max_target=1).reset(seed=0)


def test_instances_do_not_depend_on_the_order_of_play():
    env, order = Countdown(), list(range(30))
    want = {s: env.reset(seed=s)[0] for s in order}
    random.Random(0).shuffle(order)
    for s in order:
        assert env.reset(seed=s)[0] == want[s]
        env.step("1 + 1")


# -- data files --------------------------------------------------------------------------------------------------------


def write(path, text):
    path.write_text(text)
    return str(path)


def test_instances_from_a_file(tmp_path):
    train = write(tmp_path / "a.jsonl", '{"target": 98, "nums": [44, 19, 35]}\n{"nums": [1, 2, 3, 4], "target": 24, "id": 7}\n')
    test = write(tmp_path / "b.json", '[{"nums": [5, 6], "target": 30}]')
    env = Countdown(data=train, eval_data=test)
    assert {env.reset(seed=s)[0] for s in EVAL_SEEDS[:20]} == {"numbers 5 6 target 30"}
    seen = {env.reset(seed=s)[0] for s in TRAIN_SEEDS[:20]}
    assert seen == {"numbers 44 19 35 target 98", "numbers 1 2 3 4 target 24"}
    assert {Countdown(data=train).reset(seed=s)[0] for s in EVAL_SEEDS[:20]} == seen
    for action in env.demonstrate():
        assert env.step(action)[1] == 1.0
    env.reset(seed=0)
    assert env.step("5 + 6")[1] == 0.1 and env.step("5 * 6")[1] == 0.0


@pytest.mark.parametrize(
    "row",
    [
        "{}",
        "3",
        '{"nums": [1, 2]}',
        '{"nums": 12, "target": 3}',
        '{"nums": [1], "target": 1}',
        '{"nums": [1, 2, 3, 4, 5], "target": 15}',
        '{"nums": [1, 2.5], "target": 3}',
        '{"nums": [1, true], "target": 2}',
        '{"nums": [0, 2], "target": 2}',
        '{"nums": [1, 2], "target": "3"}',
        '{"nums": [1, 2], "target": 4}',
        '{"nums": [1, 1, 2, 1], "target": 9}',
        '{"nums": [1, 1000000000000], "target": 1000000000001}',
        '{"nums": [1, 2], "target": %s}' % ("3" * 5000),
        '{"nums": [1, 2], "target": 3',
    ],
)
def test_rows_that_cannot_be_played_are_skipped(row, tmp_path, capsys):
    path = write(tmp_path / "d", '{"nums": [1, 2], "target": 3}\n' + row)
    assert Countdown(data=path).rows == [([1, 2], 3)]
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and f"{path}: 1 of 2 rows cannot be used and are skipped; row 2: " in said
    with pytest.raises(ValueError, match="^data: .*no row that can be used .of 1., row 1: .*valid: ") as error:
        Countdown(data=write(tmp_path / "e", row))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("count", [2, 3, 4])
def test_what_numbers_make(count):
    rng = random.Random(count)
    for _ in range(40 if count < 4 else 4):
        numbers = [rng.randint(1, 12) for _ in range(count)]
        want = reachable([Fraction(n) for n in numbers])
        assert [makes(numbers, t) for t in range(1, 40)] == [Fraction(t) in want for t in range(1, 40)]


def test_an_evaluation_file_alone_is_refused():
    with pytest.raises(ValueError, match="^eval_data: .*valid: "):
        Countdown(eval_data="x")
