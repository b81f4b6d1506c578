r"""The judge of mathematical answers: E6, E13, E14, guesses, spellings, and answers written to hang, fill or break it."""

import os
import random
import subprocess
import sys
import time
from fractions import Fraction
from pathlib import Path

import pytest

from nanoragen.envs import math_judge
from nanoragen.envs.math_judge import MAX_LENGTH, boxed, number, same

ROOT = Path(__file__).resolve().parents[2]
verify = pytest.mark.skipif(not math_judge.installed(), reason="math-verify is not installed (extra envs)")


@pytest.mark.parametrize(
    "text, value",
    [
        ("42", 42),
        ("+7", 7),
        ("-7", -7),
        ("− 7", -7),
        ("007", 7),
        ("42.", 42),
        ("42.50", Fraction(85, 2)),
        (".5", Fraction(1, 2)),
        ("1,234", 1234),
        ("1,234,567.5", Fraction(2469135, 2)),
        ("1{,}234", 1234),
        ("1\\,234", 1234),
        ("$1,234", 1234),
        ("\\$5", 5),
        ("-$5", -5),
        ("42%", 42),
        ("42\\%", 42),
        ("2/3", Fraction(2, 3)),
        ("-2/3", Fraction(-2, 3)),
        ("2 2/3", Fraction(8, 3)),
        ("-2 2/3", Fraction(-8, 3)),
        ("\\frac{2}{3}", Fraction(2, 3)),
        ("\\dfrac12", Fraction(1, 2)),
        ("2\\frac{2}{3}", Fraction(8, 3)),
        ("-\\frac{1}{2}", Fraction(-1, 2)),
        ("\\frac{-1}{2}", Fraction(-1, 2)),
        ("4.2e1", 42),
        ("4.2 \\times 10^{1}", 42),
        ("42 * 10^-1", Fraction(21, 5)),
        ("**73**", 73),
        ("\\text{13}", 13),
        ("$42$", 42),
        ("\\(42\\)", 42),
        ("\\boxed{42}", 42),
        ("(42)", 42),
        ("x = 42", 42),
        ("The answer is 42.", 42),
        ("Answer: **42**", 42),
        ("Final answer: $\\boxed{42}$", 42),
        ("0.\\overline{3}", Fraction(1, 3)),
        ("-1.2\\overline{34}", Fraction(-611, 495)),
        ("0.\\overline{01}", Fraction(1, 99)),
    ],
)
def test_numbers_are_read_exactly(text, value):
    assert number(text) == value


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "4 10/3",
        "+-2021",
        "--7",
        "1,2",
        "12,34",
        "1,2345",
        "1.2.3",
        "4 2",
        "42 43",
        "42 or 43",
        "42, 43",
        "42/0",
        "1/2/3",
        "6*7",
        "6 7/8 9",
        "40 + 2",
        "41 = 42",
        "2^3",
        "x",
        "NaN",
        "inf",
        "-inf",
        "Infinity",
        "1e400",
        "1e-999",
        "0x2a",
        "4_2",
        "٤٢",
        "４２",
        "²",
        "\\boxed{42",
        "\\frac{1}{0}",
        "\\boxed{41} \\boxed{42}",
        "42!",
        "> 41",
        "\\pm 42",
        "~42",
        "42...",
        "42 apples",
        "10**10**10",
        "\\frac{1}{\\frac{1}{2}}",
        "9" * 50 + "x",
    ],
)
def test_what_is_no_plain_number(text):
    assert number(text) is None


def test_boxes_count_their_braces():
    assert boxed(r"so \boxed{\frac{1}{2}} or \boxed{\{1,2\}} or \boxed{3") == [r"\frac{1}{2}", r"\{1,2\}", ""]
    assert boxed("}{") == [] and boxed("\\boxed{}") == [""] and boxed("\\boxed{{{7}}}") == ["{{7}}"]


@pytest.mark.parametrize(
    "answer, gold, right",
    [  # E13
        ("\\text{13}", "13", True),
        ("\\boxed{840} so \\boxed{840}", "840", True),
        ("**73**", "73", True),
        ("2/3", "\\frac{2}{3}", True),
        ("2 2/3", "2", False),
        ("2 2/3", "8/3", True),
        ("4 10/3", "10", False),
        ("+-2021", "2021", False),
        ("1,234", "1234", True),
        # E14
        ("7", "-7", False),
        ("-7", "7", False),
        ("+7", "7", True),
        # guesses
        ("42 or 43", "42", False),
        ("42, 43", "42", False),
        ("\\boxed{42} or \\boxed{43}", "42", False),
        ("\\boxed{43} \\boxed{42}", "42", False),
        ("42 \\text{ or } 43", "42", False),
        ("\\pm 42", "42", False),
        ("\\leq 42", "42", False),
        ("41 = 42", "42", False),
        ("\\boxed{}", "42", False),
        ("\\boxed{\\boxed{42}}", "42", True),
        ("6*7", "42", False),
        ("\\frac{84}{2}", "42", True),
        ("How many? 12 and 30, so 42", "42", False),
        # exactness
        ("0.3333333", "1/3", False),
        ("0.5", "1/2", True),
        ("42.0000001", "42", False),
        ("10000000000000000000001", "10000000000000000000000", False),
        # percents and units that the right answer has
        ("42%", "42", True),
        ("0.42", "42%", True),
        ("0.42", "42", False),
        ("12 cm", "12\\text{ cm}", True),
        ("12", "12\\text{ cm}", True),
        ("12 m", "12\\text{ cm}", False),
        ("90", "90^\\circ", True),
        ("90^{\\circ}", "90^\\circ", True),
        ("3 dozen", "3", False),
        ("42 apples", "42", False),  # a number is asked for, nothing else
        ("4200%", "42", False),
        ("150%", "1.5", True),
        ("50%", "\\frac{1}{2}", True),
        ("100%", "1", True),
        # endings and braces
        ("#### 42", "42", True),
        ("####42", "42", True),
        ("#### 41", "42", False),
        ("#### 41 #### 42", "42", False),
        ("so 41, no #### 42", "42", False),
        ("{42}", "42", True),
        ("${42}$", "42", True),
        ("{41}", "42", False),
        ("\\{42\\}", "42", False),
        ("{42,43}", "42", False),
        # several values
        ("-1 and 2", "-1,2", True),
        ("-1, and 2", "-1, 2", True),
        ("-1 and 3", "-1,2", False),
        ("42 and 43", "42", False),
        ("10\\text{ cm}^2", "10\\text{ cm}^2", True),
        ("10 cm^2", "10\\text{ cm}^2", True),
        ("10", "10\\text{ cm}^2", True),
        ("10\\text{ cm}^3", "10\\text{ cm}^2", False),
        ("10\\text{ cm}", "10\\text{ cm}^2", False),
        # white space that divides two numbers
        ("11/2", "1 1/2", False),
        ("2 2/3", "22/3", False),
        ("4 2", "42", False),
        ("1 1/2", "1 1/2", True),
        ("( 1 , 2 )", "(1,2)", True),
        # repeating decimals
        ("0.\\overline{4}", "0.\\overline{3}", False),
        ("0", "0.\\overline{3}", False),
        ("1/3", "0.\\overline{3}", True),
        # words
        ("monday", "\\text{Monday}", True),
        ("Monday or Tuesday", "\\text{Monday}", False),
        ("", "\\text{Monday}", False),
    ],
)
def test_verdicts(answer, gold, right):
    assert same(answer, gold) is right


@verify
@pytest.mark.parametrize(
    "answer, gold, right",
    [
        ("1/2^{98}", "1/2^{99}", False),
        ("2^{-99}", "1/2^{99}", True),
        ("1.4142135623", "\\sqrt{2}", False),
        ("2\\sqrt2", "\\sqrt{8}", True),
        ("9.42477796", "3\\pi", False),
        ("3\\pi", "\\pi\\cdot 3", True),
        ("1+x", "x+1", True),
        ("x-1", "x+1", False),
        ("y = 1+x", "x+1", True),
        ("(2,1)", "(1,2)", False),
        ("2,1", "(1,2)", False),
        ("(1, 2)", "(1,2)", True),
        ("[1,2]", "(1,2)", False),
        ("x \\in [1,2]", "[1,2]", True),
        ("C", "\\text{(C)}", True),
        ("D", "\\text{(C)}", False),
        ("\\frac{1}{1+\\frac{1}{2x}}", "\\frac{2x}{2x+1}", True),
        ("\\sqrt{2} or \\sqrt{3}", "\\sqrt{2}", False),
        ("\\pm\\sqrt{2}", "\\sqrt{2}", False),
        ("\\sqrt{2}, \\sqrt{3}", "\\sqrt{2}", False),
        ("NaN", "\\sqrt{2}", False),
        ("\\infty", "\\sqrt{2}", False),
        ("3 = \\sqrt{2}", "\\sqrt{2}", False),
        # what math-verify passes over
        ("2516_7", "2516_8", False),
        ("2516_{8}", "2516_8", True),
        ("2516", "2516_8", False),
        ("2516_8", "2516", False),
        # as in a program
        ("x**2+1", "x^2+1", True),
        ("x**2+2", "x^2+1", False),
        ("2*x**10", "2x^{10}", True),
        ("2*x**10", "2x", False),
        ("x**(1/2)", "\\sqrt{x}", True),
        ("sqrt(2)/2", "\\frac{\\sqrt{2}}{2}", True),
        ("pi/4", "\\frac{\\pi}{4}", True),
        ("pi/3", "\\frac{\\pi}{4}", False),
        ("3*pi", "3\\pi", True),
        ("2 and -1", "-1,2", True),
        ("2 and 1", "-1,2", False),
        ("x'", "x", False),
        ("x=2,y=3", "x=3,y=2", False),
        ("y = 2 , x = 3", "x=3,y=2", True),
        ("\\sqrt{3}$ $\\sqrt{2}", "\\sqrt{2}", False),
        ("\\(\\sqrt{3}\\) \\(\\sqrt{2}\\)", "\\sqrt{2}", False),
        ("11:30 \\text{ a.m.}", "11:30 \\text{ p.m.}", False),
        ("11:30 \\text{ p.m.}", "11:30 \\text{ p.m.}", True),
    ],
)
def test_verdicts_of_math_verify(answer, gold, right):
    assert same(answer, gold) is right


def spellings(value: Fraction, rng) -> str:
    """A text of a value, in one of many ways, made without the code under test."""
    sign, size = ("-" if value < 0 else rng.choice(["", "+", ""])), abs(value)
    top, bottom = size.numerator, size.denominator
    if bottom == 1:
        text = rng.choice(
            [f"{top}", f"{top:,}", f"{top}.0", f"0{top}", f"{2 * top}/2", f"\\frac{{{3 * top}}}{{3}}", f"{top}e0", f"{10 * top}e-1"]
        )
    else:
        whole, rest = divmod(top, bottom)
        text = rng.choice([f"{top}/{bottom}", f"\\frac{{{top}}}{{{bottom}}}", f"\\dfrac {{{2 * top}}} {{{2 * bottom}}}"]
                          + [f"{whole} {rest}/{bottom}", f"{whole}\\frac{{{rest}}}{{{bottom}}}"] * (whole > 0))  # fmt: skip
    wrap = rng.choice(
        ["{}", " {} ", "${}$", "\\({}\\)", "\\boxed{{{}}}", "**{}**", "{}.", "The answer is {}", "n = {}", "$\\boxed{{{}}}$."]
    )
    return wrap.format(sign + text)


def test_ten_thousand_answers_right_and_wrong():
    rng, verdicts = random.Random(0), [0, 0]
    for _ in range(5_000):
        gold = Fraction(rng.randint(-50, 2_000), rng.choice([1, 1, 1, 2, 3, 7]))
        written = f"{gold.numerator}" if gold.denominator == 1 else f"\\frac{{{gold.numerator}}}{{{gold.denominator}}}"
        given = gold if rng.random() < 0.5 else rng.choice([-gold, gold + 1, 1 / (gold or 1), gold * 10, gold + Fraction(1, 1000)])
        answer = spellings(given, rng)
        assert same(answer, written) is (given == gold), (answer, written)
        verdicts[given == gold] += 1
        # two claims at once, one of them right
        first, second = spellings(gold, rng), spellings(gold + rng.randint(1, 9), rng)
        both = rng.choice(
            ["{} or {}", "{}, {}", "{} {}", "{} and {}", "{}/{}x", "{}={}", "not {} but {}", "{};{}", "{}\n{}", "{} ({})"]
        )
        for pair in ((first, second), (second, first)):
            text = both.format(*pair)
            boxes = boxed(text)
            if len(boxes) != 1:  # one box among other words is the answer, by convention
                assert not same(text, written), (text, written)
    assert min(verdicts) > 2_000


@verify
@pytest.mark.parametrize("attack", ["10^{10^{10}}", "10000000000!"])
def test_nothing_hangs_and_the_next_answer_is_judged(attack, monkeypatch):
    monkeypatch.setattr(math_judge, "TIME_LIMIT", 0.5)
    assert same("2\\sqrt2", "\\sqrt{8}")
    worker = math_judge._worker()
    assert not same(attack, "\\sqrt{2}")
    assert worker.poll() is not None  # ended by its timer, and collected
    monkeypatch.setattr(math_judge, "TIME_LIMIT", 3.0)
    assert same("2\\sqrt2", "\\sqrt{8}")


@verify
@pytest.mark.parametrize(
    "attack",
    [
        "__import__('os').system('touch pwned')",
        "().__class__.__base__.__subclasses__()",
        "open('pwned','w')",
        "exec('1')",
        "\\input{/etc/passwd}",
        "\\sqrt{2}; import os",
        "{" * 150,
        "}" * 150,
        "\\frac{" * 30,
        "\\boxed{" * 25,
        "(" * 190,
        "\x00",
        "\ud800",
        "\\sqrt{2}\n\\sqrt{2}x",
        "²√2",
    ],
)
def test_e6_no_code_runs_and_nothing_is_written(attack, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert not same(attack, "\\sqrt{2}") and not same(attack, "42")
    assert os.listdir(tmp_path) == []


def test_the_judging_process_may_not_write_connect_or_start(tmp_path):
    code = "import os, socket, subprocess, sys\nfrom nanoragen.envs.math_judge import refuse\nsys.addaudithook(refuse)\nprint(len(open(sys.argv[1]).read()))\n"
    for attempt in ("open('f', 'w')", "open('f', 'x')", "open('f', 'r+')", "os.open('f', os.O_CREAT)", "socket.socket()", "os.system('true')",
                    "subprocess.run(['true'])", "os.fork()", "os.execv('/bin/true', ['true'])"):  # fmt: skip
        code += f"try: {attempt}; print({attempt!r})\nexcept PermissionError as e: assert 'judge of mathematics' in str(e)\n"
    (tmp_path / "readable").write_text("abc")
    command = [sys.executable, "-c", code, "readable"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert done.stdout == "3\n" and done.returncode == 0, done
    assert os.listdir(tmp_path) == ["readable"]


def test_long_answers_are_not_looked_at():
    assert not same("4" + " " * MAX_LENGTH + "2", "42") and not same("42" + " " * MAX_LENGTH, "42")


def test_a_long_text_is_no_number_and_is_not_taken_apart():
    start = time.process_time()
    for text in ("the answer is " * 70_000 + "42", "x = " * 200_000 + "42", "**" * 300_000, "$" * 300_000, "\\boxed{" * 100_000):
        assert number(text) is None
    assert time.process_time() - start < 1
