"""Mathematics questions: generated word problems of chosen difficulty, or MetaMathQA, GSM8K and MATH from files.

An answer is judged by math_judge.py. As in RAGEN there are several tries, each worth half of the one before: 1, 1/2, 1/4.

A generated problem follows one quantity through `level` events (found, given away, bought in bags, shared, multiplied); from
level 4 on it also mentions another quantity that has nothing to do with it. All amounts are whole numbers.

Left out: problems with more than one unknown. Answers that are no numbers come only from files, and need the extra `envs`.
"""

import re

from nanoragen.envs.base import Game, check_whole, held_out
from nanoragen.envs.data import read_both, read_rows
from nanoragen.envs.math_judge import MAX_LENGTH, boxed, installed, number, same, without_unit

NAMES = ("Ann", "Ben", "Cleo", "Dan", "Eva", "Finn", "Gus", "Hana", "Ivo", "Jun", "Kim", "Leo", "Mia", "Nils", "Omar", "Pia")
THINGS = ("apples", "beads", "books", "buttons", "cards", "coins", "eggs", "marbles", "pencils", "shells", "stamps", "stones")


class MathQA(Game):
    """
    level       events of a generated problem, 1 to 5
    data        file of questions instead (JSON or JSONL): rows of MetaMathQA, GSM8K or MATH
    eval_data   file that evaluation seeds draw from, so that no question of `data` is evaluated on; "": the same file
    """

    max_turns = 3
    max_actions_per_turn = 1
    instruction = (
        "Answer the question with a number or an expression, nothing else. A wrong answer may be corrected, for half the reward. "
        "Reply <think>your reasoning</think><answer>42</answer>"
    )

    def __init__(self, level=2, data="", eval_data=""):
        super().__init__()
        check_whole("math_qa", 1, 5, level=level)
        self.level = level
        self.rows, self.eval_rows = read_both(data, eval_data, lambda path: read_rows(path, question_and_answer))
        if not installed() and any(number(without_unit(a, "")) is None for _, a in self.rows + self.eval_rows):
            raise ValueError(
                "math_qa: data with answers that are no numbers needs math-verify; valid: pip install 'nanoragen[envs]'"
            )

    def _start(self, seed):
        rows = self.eval_rows if held_out(seed) else self.rows
        if rows:
            self.question, self.answer = rows[self.np_random.integers(len(rows))]
        else:
            self.question, self.answer = word_problem(self.np_random, self.level)
        self.wrong, self.right = 0, False

    def step(self, action):
        text = str(action).strip()
        right = not self.right and same(text, self.answer)
        a_number = number(text) is not None
        expected = a_number or number(self.answer) is None
        valid = right or (not self.right and expected and 0 < len(text) <= MAX_LENGTH)
        reward = 0.5**self.wrong if right else 0.0
        self.right = self.right or right
        self.wrong += valid and not right
        return self._result(reward, self.right, self.right, valid)

    def render(self):
        return self.question if self.right or not self.wrong else f"{self.question}\nNot right, think again."

    def random_action(self, rng) -> str:
        return str(rng.integers(100))

    def best_actions(self) -> list[str]:
        """The answer."""
        return [] if self.right else [self.answer]


def word_problem(rng, level: int) -> tuple[str, str]:
    """(question, answer) of a problem with `level` events after the first sentence."""
    who, friend, other = rng.choice(NAMES, size=3, replace=False).tolist()
    thing, unlike = rng.choice(THINGS, size=2, replace=False).tolist()

    def some(low, high):
        return int(rng.integers(low, high + 1))

    amount = some(5, 20)
    said = [f"{who} has {amount} {thing}."]
    for _ in range(level):
        sharers = [n for n in range(2, 7) if amount % n == 0 and amount > n]
        kinds = ["find", "bags"] + ["give"] * (amount > 2) + ["share"] * bool(sharers) + ["times"] * (amount <= 60)
        kind = rng.choice(kinds)
        if kind == "find":
            n = some(2, 20)
            amount, event = amount + n, f"{who} finds {n} more."
        elif kind == "bags":
            bags, each = some(2, 6), some(2, 9)
            amount, event = amount + bags * each, f"{who} buys {bags} bags of {each} {thing} each."
        elif kind == "give":
            n = some(1, min(amount - 1, 20))
            amount, event = amount - n, f"{who} gives {n} to {friend}."
        elif kind == "share":
            n = int(rng.choice(sharers))
            amount, event = amount // n, f"{who} puts them into {n} equal heaps and keeps one heap."
        else:
            n = some(2, 4)
            amount, event = amount * n, f"A game leaves {who} with {n} times as many."
        said.append(event)
    if level >= 4:
        said.insert(some(1, level), f"{other} has {some(2, 30)} {unlike}.")
    return " ".join([*said, f"How many {thing} does {who} have now?"]), str(amount)


def _with_braces(solution: str) -> str:
    r"""A solution of MATH with every box as \boxed{...}: some rows have \fbox{...}, or \boxed 9 up to the next dollar sign."""
    return re.sub(r"\\boxed ([^$]*)", r"\\boxed{\1}", re.sub(r"\\(?:fbox|boxed)\s*\{", r"\\boxed{", solution))


def question_and_answer(row: dict) -> tuple[str, str]:
    """(question, answer) of a row of GSM8K, MetaMathQA or MATH. ValueError where the answer cannot be found."""
    formats = (  # question, solution, how the solution ends
        ("question", "answer", lambda text: re.findall(r"####(.*)", text)),
        ("query", "response", lambda text: re.findall(r"The answer is:?(.*)", text)),
        ("problem", "solution", lambda text: boxed(_with_braces(text))),
    )
    for question, solution, find in formats:
        if question in row and solution in row:
            if not (isinstance(row[question], str) and row[question].strip()):
                raise ValueError(f"{question!r} is {row[question]!r:.80}; valid: text")
            found = find(str(row[solution]))
            if not (found and found[-1].strip()):
                raise ValueError(
                    f"no answer in its {solution!r}; valid: '#### 42', 'The answer is: 42' or \\boxed{{42}}, by format"
                )
            answer = found[-1].strip()
            if not same(answer, answer):
                raise ValueError(f"the answer {answer!r:.80} could never be found right; valid: at most {MAX_LENGTH} characters")
            return row[question].strip(), answer
    raise ValueError(
        "neither question/answer (GSM8K), query/response (MetaMathQA) nor problem/solution (MATH); valid: one of these"
    )
