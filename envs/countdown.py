"""Countdown: combine the numbers, each exactly once, with + - * / and parentheses, to hit the target.

Reward 1 for a right expression, 0.1 for one that uses the numbers but misses the target, 0 otherwise (RAGEN's).
Expressions are read by the small parser below, in exact fractions. Nothing the model writes is ever evaluated as code.
Targets are values of random expressions of the numbers, so every instance can be solved; `data` takes instances from a file.

Left out: using only some of the numbers, as in the television game. There is one answer, right or not.
"""

import functools
import itertools
import operator
import re
from collections import Counter
from fractions import Fraction

import numpy as np

from nanoragen.envs.base import Game, check_whole, held_out
from nanoragen.envs.data import read_both, read_rows

MAX_LENGTH = 120  # characters of an expression
MAX_OPEN = 20  # opening parentheses: bounds the recursion of the parser, whatever stack it is called from
MAX_NUMBER = 1_000_000  # of a file
CHECKED = 1_000  # up to here it is checked that the numbers of a row make its target: larger values are not exact in floats
MAX_DRAWS = 10_000  # of an instance; a few are enough for any setting that can be met
OPERATORS = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv}
WRAPPERS = ((r"\boxed{", "}"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]"))
LATEX = {r"\times": "*", r"\cdot": "*", r"\div": "/"}
SPELLINGS = str.maketrans({"×": "*", "·": "*", "÷": "/", "−": "-", "–": "-", "[": "(", "]": ")"})


class Countdown(Game):
    """
    numbers     how many, 2 to 4
    low, high   their range
    max_target  targets are whole numbers from 1 to this
    data        file of instances instead (JSON or JSONL), {"nums": [44, 19, 35], "target": 98} a row, 2 to 4 numbers each
    eval_data   file that evaluation seeds draw from, so that no instance of `data` is evaluated on; "": the same file
    """

    max_turns = 1
    max_actions_per_turn = 1
    instruction = (
        "Use each number exactly once with + - * / and parentheses to make the target. "
        "Reply <think>your reasoning</think><answer>(3 + 5) * 2</answer>"
    )

    def __init__(self, numbers=3, low=1, high=9, max_target=50, data="", eval_data=""):
        super().__init__()
        check_whole("countdown", 2, 4, numbers=numbers)
        if not (isinstance(low, int) and isinstance(high, int) and 1 <= low <= high <= 1000):
            raise ValueError(f"low, high: {low}, {high}; valid: 1 <= low <= high <= 1000")
        check_whole("countdown", 1, max_target=max_target)
        self.count, self.low, self.high, self.max_target = numbers, low, high, max_target
        self.rows, self.eval_rows = read_both(data, eval_data, lambda path: read_rows(path, numbers_and_target))

    def _start(self, seed):
        rows = self.eval_rows if held_out(seed) else self.rows
        self.numbers, self.target = rows[self.np_random.integers(len(rows))] if rows else self._draw()
        self.answered, self.right = False, False

    def _draw(self) -> tuple[list[int], int]:
        """Numbers, and a target that some expression of them makes."""
        for _ in range(MAX_DRAWS):
            self.numbers = [int(n) for n in self.np_random.integers(self.low, self.high + 1, size=self.count)]
            value = evaluate(self.random_action(self.np_random))[0]
            if 1 <= value <= self.max_target and value.denominator == 1:
                return self.numbers, int(value)
        raise ValueError(
            f"max_target: {self.count} numbers from {self.low} to {self.high} make no target in "
            f"{MAX_DRAWS} tries; valid: a larger max_target, or a wider range"
        )

    def step(self, action):
        try:
            expression, claim = read(str(action))
            value, used = evaluate(expression)
        except ValueError:
            value, used, claim = None, [], None
        valid = value is not None and Counter(used) == Counter(self.numbers) and not self.answered
        right = valid and value == self.target and claim in (None, value)
        self.answered, self.right = True, self.right or right
        return self._result(1.0 if right else 0.1 if valid else 0.0, True, self.right, valid)

    def render(self):
        return f"numbers {' '.join(map(str, self.numbers))} target {self.target}"

    def random_action(self, rng) -> str:
        """Some expression of the numbers, any value (redrawn where it would divide by zero)."""
        while True:
            parts = [(Fraction(n), str(n)) for n in self.numbers]
            while len(parts) > 1:
                a, b = (parts.pop(int(rng.integers(len(parts)))) for _ in range(2))
                op = "+-*/"[int(rng.integers(4))]
                if op == "/" and b[0] == 0:
                    break
                parts.append(join(a, op, b))
            else:
                return _bare(parts[0][1])

    def best_actions(self) -> list[str]:
        """All right expressions (each way of combining once), shortest first."""
        if self.answered:
            return []
        ways = _all([(Fraction(n), str(n)) for n in self.numbers])
        return sorted({_bare(text) for value, text in ways if value == self.target}, key=lambda t: (len(t), t))


def numbers_and_target(row: dict) -> tuple[list[int], int]:
    """(numbers, target) of a row of a data set. ValueError where they are not what the game is played with."""
    numbers, target = row.get("nums"), row.get("target")
    if not (
        isinstance(numbers, list)
        and 2 <= len(numbers) <= 4
        and all(type(n) is int and 1 <= n <= MAX_NUMBER for n in [*numbers, target])
    ):
        raise ValueError('valid: {"nums": [44, 19, 35], "target": 98}, with 2 to 4 whole numbers from 1 to a million')
    if max(*numbers, target) <= CHECKED and not makes(numbers, target):
        raise ValueError(f"{numbers} do not make {target}; valid: a target that some expression of them makes")
    return numbers, target


def makes(numbers: list[int], target: int) -> bool:
    """Whether some expression of 2 to 4 numbers is the target, in floats: a file may have half a million rows."""

    def combine(a, b):
        return np.concatenate([a + b, a - b, b - a, a * b, a / b, b / a])

    first, *others = np.array(list(itertools.permutations(numbers)), float).T[:, None]
    with np.errstate(divide="ignore", invalid="ignore"):
        values = [functools.reduce(combine, others, first)]
        if len(numbers) == 4:
            values.append(combine(combine(first, others[0])[:, None], combine(others[1], others[2])[None]))
        return any((abs(v - target) < 1e-6).any() for v in values)


def read(text: str) -> tuple[str, int | None]:
    r"""(expression, n or None) of an answer: "= n" may follow, $ $, \boxed{} and the like be around it, a full stop behind."""
    if len(text) > MAX_LENGTH:
        raise ValueError("expression too long")
    text = _unwrapped(text)
    claim = re.search(r"=\s*([-−–]?[0-9]+)$", text)
    if not claim:
        return text, None
    return _unwrapped(text[: claim.start()]), int(claim[1].translate(SPELLINGS))


def _unwrapped(text: str) -> str:
    before = None
    while text != before:
        before, text = text, text.strip()
        text = text.removesuffix(".") if not text.endswith("..") else text
        for start, end in WRAPPERS:
            if text.startswith(start) and text.endswith(end) and len(text) >= len(start + end):
                text = text[len(start) : -len(end)]
    return text


def evaluate(text: str) -> tuple[Fraction, list[int]]:
    """Value of an expression, and the numbers it uses. ValueError for anything that is not one.

    Grammar: sum = product {(+|-) product}; product = atom {(*|/) atom}; atom = number | ( sum ). Leading zeros are ignored;
    there are no signs, powers, decimals or names.
    """
    if len(text) > MAX_LENGTH:
        raise ValueError("expression too long")
    for name, sign in LATEX.items():
        text = text.replace(name, sign)
    text = text.translate(SPELLINGS).strip()
    if text.count("(") > MAX_OPEN:
        raise ValueError("too many parentheses")
    tokens = re.findall(r"[0-9]+|[-+*/()]", text)
    if "".join(tokens) != re.sub(r"\s+", "", text):
        raise ValueError("not an expression")
    tokens.append("end")
    used, at = [], 0

    def atom():
        nonlocal at
        token, at = tokens[at], at + 1
        if token == "(":
            value = operation("+-", lambda: operation("*/", atom))
            if tokens[at] != ")":
                raise ValueError("unbalanced parentheses")
            at += 1
            return value
        if not token.isdecimal():
            raise ValueError("not an expression")
        used.append(int(token))
        return Fraction(used[-1])

    def operation(ops, operand):
        nonlocal at
        value = operand()
        while tokens[at] in ops:
            op, at = tokens[at], at + 1
            right = operand()
            if op == "/" and right == 0:
                raise ValueError("division by zero")
            value = OPERATORS[op](value, right)
        return value

    value = operation("+-", lambda: operation("*/", atom))
    if tokens[at] != "end":
        raise ValueError("not an expression")
    return value, used


def join(a, op, b):
    """(value, text) of two parts combined; compound parts carry their parentheses."""
    return OPERATORS[op](a[0], b[0]), f"({a[1]} {op} {b[1]})"


def _bare(text: str) -> str:
    return text[1:-1] if text.startswith("(") else text


def _all(parts):
    """Every (value, text) that combines all parts; sums and products in one order only."""
    if len(parts) == 1:
        yield parts[0]
    for i in range(len(parts)):
        for j in range(len(parts)):
            if i == j:
                continue
            rest = [p for k, p in enumerate(parts) if k not in (i, j)]
            for op in "+-*/":
                if (op in "+*" and i > j) or (op == "/" and parts[j][0] == 0):
                    continue
                yield from _all(rest + [join(parts[i], op, parts[j])])
