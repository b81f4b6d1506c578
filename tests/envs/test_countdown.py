"""Countdown: the parser against Python's own arithmetic, and answers that try to gain too much (E6, E8-E10, E14)."""

import ast
import itertools
import operator
import os
import random
import re
import sys
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import nanoragen.envs.countdown as module
from nanoragen.envs.base import EVAL_SEEDS, TRAIN_SEEDS
from nanoragen.envs.countdown import MAX_LENGTH, MAX_OPEN, Countdown, evaluate, makes
from nanoragen.rollout.chat import parse_reply

OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}


def game(numbers, target):
    env = Countdown(numbers=len(numbers))
    env.reset(seed=0)
    env.numbers, env.target = list(numbers), target
    return env


def score(answer, numbers=(3, 5, 8), target=23):
    _, reward, terminated, _, info = game(numbers, target).step(answer)
    assert terminated
    return reward, info["success"]


RIGHT, WRONG, BAD = (1.0, True), (0.1, False), (0.0, False)


@pytest.mark.parametrize(
    "answer, want",
    [
        ("3 * 5 + 8", RIGHT),
        ("8+5*3", RIGHT),
        ("((8) + (3 * 5))", RIGHT),
        ("3 × 5 + 8", RIGHT),
        ("3 · 5 + 8", RIGHT),
        ("3 * 5 + 8 = 23", RIGHT),
        ("3 * 5 + 8=23 ", RIGHT),
        ("[3 * 5] + 8", RIGHT),
        (" 3\t*\n5 + 8", RIGHT),
        ("03 * 5 + 08", RIGHT),
        ("3 + 5 + 8", WRONG),
        ("3 - 5 − 8", WRONG),
        ("3 ÷ 5 / 8", WRONG),
        ("8 – 5 – 3", WRONG),
        ("3 + 5 + 8 = 23", WRONG),  # a claimed value is not believed
        ("3 * 5 + 8 = 99", WRONG),  # nor is one that is false a right answer
        ("3 * 5 + 8 = -23", WRONG),
        (r"\boxed{3 * 5 + 8}", RIGHT),
        (r"$\boxed{3 \times 5 + 8 = 23}$.", RIGHT),
        (r"$3 \cdot 5 + 8$ = 23.", RIGHT),
        (r"\boxed{3 * 5 + 8} = 24", WRONG),
        ("$$3 * 5 + 8$$", RIGHT),
        (r"\(3 * 5 + 8\)", RIGHT),
        ("3 * 5 + 8.", RIGHT),
        ("3 * 5 + 8 = 23.", RIGHT),
        ("3 * 5 + 8..", BAD),
        (r"\boxed{3 * 5} + 8", BAD),
        (r"\boxed{3 * 5 + 8} \boxed{3 * 5 + 8}", BAD),
        ("$3 * 5 + 8$ or $3 + 5 + 8$", BAD),
        ("$", BAD),
        (r"\boxed{}", BAD),
        ("23", BAD),
        ("3 * 5", BAD),
        ("3 * 5 + 8 + 0", BAD),
        ("3 * 5 + 8 + 8 - 8", BAD),
        ("15 + 8", BAD),
        ("35 - 8", BAD),
        ("-3 + 5 + 8", BAD),
        ("+3 * 5 + 8", BAD),
        ("3 * (-5) + 8", BAD),
        ("3 ** 5 + 8", BAD),
        ("3 // 5 + 8", BAD),
        ("3 % 5 + 8", BAD),
        ("3 5 8", BAD),
        ("3 5 + 8", BAD),
        ("3(5)8", BAD),
        ("(3)(5) + 8", BAD),
        ("3 * 5 + 8)", BAD),
        ("(3 * 5 + 8", BAD),
        ("()", BAD),
        ("", BAD),
        ("=", BAD),
        ("= 23", BAD),
        ("23 = 3 * 5 + 8", BAD),
        ("3 * 5 + 8 = 23 = 23", BAD),
        ("3.0 * 5 + 8", BAD),
        ("3e0 * 5 + 8", BAD),
        ("3_ * 5 + 8", BAD),
        ("0x3 * 5 + 8", BAD),
        ("３ * 5 + 8", BAD),
        ("٣ * 5 + 8", BAD),
        ("3 * 5 + 8 or 1", BAD),
        ("3 * 5 + 8 # yes", BAD),
        ("the answer is 3 * 5 + 8", BAD),
        ("3 * 5 + 8 3 * 5 + 8", BAD),
        ("3 / (5 - 5) + 8", BAD),
        ("3 * 5 + 8 || 3", BAD),
    ],
)
def test_answers(answer, want):
    assert score(answer) == want


def test_fractions_are_exact():
    assert score("8 / (3 - 8 / 3)", (8, 3, 8, 3), 24) == RIGHT  # floating point gives 23.99999999999999
    assert evaluate("1 / 3 * 3")[0] == 1
    assert score("6 / 4 + 1", (6, 4, 1), 2) == WRONG  # 2.5 is not rounded


def test_e14_sign_counts():
    assert score("3 - 5 - 5", (3, 5, 5), 7) == WRONG  # -7 is not 7
    assert score("5 + 5 - 3", (3, 5, 5), 7) == RIGHT
    assert score("5 + 5 - 3 = -7", (3, 5, 5), 7) == WRONG
    assert score("3 - 5 - 5 = −7", (3, 5, 5), 7) == WRONG


def test_a_claim_must_be_true():
    assert score("3*(3+4)=22", (3, 3, 4), 21) == WRONG and score("3*(3+4)=21", (3, 3, 4), 21) == RIGHT


def test_division_by_zero_is_no_expression():
    with pytest.raises(ValueError, match="division by zero"):
        evaluate("8 / (5 - 5)")
    assert score("8 / (5 - 5)", (8, 5, 5), 3) == BAD


@pytest.mark.parametrize(
    "attack",
    [
        "__import__('os').system('touch pwned')",
        "exec('import os')",
        "open('pwned','w').write('x')",
        "(1).__class__",
        "3 .__class__.__base__.__subclasses__()",
        "[3][0] * 5 + 8",
        "{3:3}[3] * 5 + 8",
        "lambda: 3",
        "3 if 5 else 8",
        "(x := 3) * 5 + 8",
        "f'{3}' * 5 + 8",
        "9**9**9",
        "3 * 5 + 8; import antigravity",
        "`3`",
        "$(touch pwned)",
        "3 * 5 + 8\n__import__('os').system('touch pwned')",
    ],
)
def test_e6_no_code_runs(attack, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    before = set(sys.modules)
    assert score(attack) == BAD
    assert os.listdir(tmp_path) == [] and set(sys.modules) == before


def test_e6_the_source_has_nothing_that_evaluates():
    tree = ast.parse(Path(module.__file__).read_text())
    calls = {n.func.id for n in ast.walk(tree) if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)}
    assert not calls & {"eval", "exec", "compile", "__import__", "getattr"}


def test_long_and_deep_answers():
    for text in (
        "(" * 10_000,
        "(" * 10_000 + "3" + ")" * 10_000,
        "9" * 10_000,
        "3+" * 5_000 + "3",
        "3/" * 60,
        "=" * 120,
    ):
        assert score(text) == BAD
    deepest = "(" * MAX_OPEN + "3" + ")" * MAX_OPEN
    assert evaluate(deepest) == (3, [3])
    with pytest.raises(ValueError, match="too many parentheses"):
        evaluate(f"({deepest})")
    with pytest.raises(ValueError, match="too long"):
        evaluate("1" + " " * MAX_LENGTH)


# -- from the reply to the score ---------------------------------------------------------------------------------------


def reply_score(text):
    """As the rollout does it: what did not parse never reaches the environment."""
    reply = parse_reply(text)
    return score(reply.actions[0]) if reply.parsed else None


def test_e8_the_answer_is_not_taken_from_the_reasoning():
    assert reply_score("3 * 5 + 8 is 23</think><answer>3 + 5</answer>") == BAD
    assert reply_score("3 * 5 + 8 = 23") is None
    assert reply_score("3 * 5 + 8</think>") is None


def test_e9_the_instruction_holds_an_example_that_is_never_scored():
    assert "<answer>" in Countdown.instruction
    assert reply_score("so</think><answer>3 * 5 + 8</answer>") == RIGHT
    assert reply_score("so</think>3 * 5 + 8") is None


@pytest.mark.parametrize(
    "text",
    [
        "a</think><think>b</think><answer>3*5+8</answer>",
        "a<answer>3*5+8</answer></think>",
        "a</think><answer>3*5+8",
        "a</think><answer>3*5+8</answer><answer>3*5+8</answer>",
        "a</think></answer>3*5+8<answer>",
        "a</think><answer></answer>",
    ],
)
def test_e10_crossed_or_repeated_tags_do_not_score(text):
    assert reply_score(text) is None


# -- the parser against an independent one -----------------------------------------------------------------------------


def by_python(text):
    """Value by Python's grammar, in fractions; None for a division by zero."""

    def value(node):
        if isinstance(node, ast.Constant):
            return Fraction(node.value)
        return OPERATORS[type(node.op)](value(node.left), value(node.right))

    try:
        return value(ast.parse(text.strip(), mode="eval").body)
    except ZeroDivisionError:
        return None


numbers_text = st.integers(0, 99).map(str)
expressions = st.recursive(
    numbers_text,
    lambda inner: st.one_of(
        st.tuples(inner, st.sampled_from(["+", "-", "*", "/", " + ", " - ", " * ", " / "]), inner).map("".join),
        inner.map(lambda t: f"({t})"),
    ),
    max_leaves=8,
)


@settings(max_examples=150, deadline=None, derandomize=True, database=None)
@given(expressions.filter(lambda t: len(t) <= MAX_LENGTH and t.count("(") <= MAX_OPEN))
def test_agrees_with_python(text):
    want = by_python(text)
    if want is None:
        with pytest.raises(ValueError):
            evaluate(text)
    else:
        value, used = evaluate(text)
        assert value == want
        assert used == [int(n) for n in re.findall(r"[0-9]+", text)]


@settings(max_examples=300, deadline=None, derandomize=True, database=None)
@given(st.text(alphabet="0123456789+-*/()= []×÷−", max_size=40))
def test_only_value_errors(text):
    try:
        evaluate(text)
    except ValueError:
        pass


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


def test_a_second_answer_pays_nothing():
    env = game((3, 5, 8), 23)
    assert env.step("3 * 5 + 8")[1] == 1.0
    _, reward, over, _, info = env.step("3 * 5 + 8")
    assert (reward, over, info["success"], info["action_is_valid"]) == (0.0, True, True, False)
    env = game((3, 5, 8), 23)
    env.step("3 + 5 + 8")
    _, reward, over, _, info = env.step("3 * 5 + 8")
    assert (reward, over, info["success"]) == (0.0, True, False)


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
