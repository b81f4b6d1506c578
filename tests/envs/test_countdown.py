"""Countdown: the parser against Python's own arithmetic, and answers that try to gain too much (E6, E8-E10, E14)."""

import ast
import operator
import os
import re
import sys
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import nanoragen.envs.countdown as module
from nanoragen.envs.countdown import MAX_LENGTH, MAX_OPEN, Countdown, evaluate
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


def test_a_second_answer_pays_nothing():
    env = game((3, 5, 8), 23)
    assert env.step("3 * 5 + 8")[1] == 1.0
    _, reward, over, _, info = env.step("3 * 5 + 8")
    assert (reward, over, info["success"], info["action_is_valid"]) == (0.0, True, True, False)
    env = game((3, 5, 8), 23)
    env.step("3 + 5 + 8")
    _, reward, over, _, info = env.step("3 * 5 + 8")
    assert (reward, over, info["success"]) == (0.0, True, False)
