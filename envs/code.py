"""Programming tasks: the answer is a Python function or program, and running it on hidden tests decides.

Every test must be passed. As in math_qa there are several tries, each worth half of the one before: 1, 1/2, 1/4. After a wrong
one the model is told how the shown tests went; of the hidden ones only that one failed, never which or how.

What is compared never meets the program: it runs in the sandbox (sandbox.py), gets inputs only, and what it prints is compared
here, as text or plain JSON. Ending early, changed comparisons, replaced library functions and the like therefore gain nothing.
A hidden test's input is given to a program only after it has passed the shown ones, and nothing it prints then is shown.

Left out: partial credit for a part of the tests (a program that always prints NO passes half of many a task).
"""

import json
import math
import re
from collections.abc import Iterator

from nanoragen.envs.base import CHARSET, Game, check_whole, held_out
from nanoragen.envs.code_data import Task, own_tasks, tasks_from
from nanoragen.envs.data import read_both
from nanoragen.envs.sandbox import isolation, run

MAX_LENGTH = 20_000  # characters of a program
SHOWN = 300  # characters of what is shown of an input, or an output
PROCESSES = 4
# Runs in the sandbox. What the program prints goes to standard error, so that only the results are on standard output.
HARNESS = """\
import json, os, sys
calls, out = json.load(sys.stdin), os.fdopen(os.dup(1), "w")
os.dup2(2, 1)
space = {{"__name__": "answer"}}
exec("from typing import *", space)
exec(compile({program!r}, "answer", "exec"), space)
function = space[{name!r}] if {name!r} in space else getattr(space["Solution"](), {name!r})
json.dump([function(*arguments) for arguments in calls], out)
out.flush()
"""


class Code(Game):
    """
    allow_code_execution  must be true: the model's programs are run (what is isolated: see README.md and sandbox.py)
    level       of our own tasks, 1 to 3; 0: all. Every third task is for evaluation seeds only
    data        file of tasks instead (JSON or JSONL): rows of DeepCoder, TACO or LiveCodeBench
    eval_data   file that evaluation seeds draw from, so that no task of `data` is evaluated on; "": the same file
    max_tests   of one task of a file, the longest ones
    seconds     of one run; memory: MiB
    """

    max_turns = 3
    max_actions_per_turn = 1
    instruction = (
        "Write the Python function or program that is asked for, standard library only. Hidden tests decide. "
        "A wrong one may be corrected, for half the reward. "
        "Reply <think>your reasoning</think><answer>print(int(input()) + 1)</answer>"
    )

    def __init__(self, allow_code_execution=False, level=0, data="", eval_data="", max_tests=16, seconds=4.0, memory=512):
        super().__init__()
        if allow_code_execution is not True:
            raise ValueError(
                "allow_code_execution: code runs programs that the model writes, in a sandbox (envs/README.md says what it "
                "isolates); valid: --allow_code_execution"
            )
        check_whole("code", 0, 3, level=level)
        for key, value in (("max_tests", max_tests), ("seconds", seconds), ("memory", memory)):
            if not (isinstance(value, int | float) and value > 0):
                raise ValueError(f"{key}: {value!r}; valid: a number above 0")
        self.limits = {"seconds": seconds, "memory": int(memory) << 20, "processes": PROCESSES}
        self.own = not data
        self.tasks, self.eval_tasks = read_both(data, eval_data, lambda path: tasks_from(path, max_tests))
        if self.own:
            tasks = own_tasks()
            self.tasks = [t for n, t in enumerate(tasks) if n % 3 != 2 and level in (0, t.level)]
            self.eval_tasks = [t for n, t in enumerate(tasks) if n % 3 == 2 and level in (0, t.level)]
        isolation()  # says so, once, where programs are not isolated; RuntimeError where they cannot be run

    def _start(self, seed):
        tasks = self.eval_tasks if held_out(seed) else self.tasks
        self.task = task = tasks[self.np_random.integers(len(tasks))]
        self.shown, self.hidden = task.tests[: task.public], task.tests[task.public :]
        if self.own:  # one more, so that a task is not always the same prompt
            self.shown.append(self.hidden.pop(self.np_random.integers(len(self.hidden))))
        self.wrong, self.right, self.remark = 0, False, ""

    def step(self, action):
        program = unfenced(str(action))
        valid = not self.right and worth_running(program, self.task)
        reward = 0.0
        if valid:
            self.remark = first_failure(program, self.task, self.shown, self.limits)
            if not self.remark and first_failure(program, self.task, self.hidden, self.limits):
                self.remark = "The shown tests pass, a hidden one does not."
            self.right = not self.remark
            reward = 0.5**self.wrong if self.right else 0.0
            self.wrong += not self.right
        return self._result(reward, self.right, self.right, valid)

    def render(self):
        tests = [f"{call_text(self.task, i)} -> {short(o[0])}" if self.task.call else io_text(i, o[0]) for i, o in self.shown]
        return "\n".join([self.task.text, *tests, *([self.remark] if self.remark else [])])

    def random_action(self, rng) -> str:
        """Always the result of one of the shown tests; None where none is shown."""
        if not self.shown:
            return f"def {self.task.call}(*_): return None" if self.task.call else "print(None)"
        output = self.shown[rng.integers(len(self.shown))][1][0]
        return f"def {self.task.call}(*_): return {output!r}" if self.task.call else f"print({output!r})"

    def best_actions(self) -> list[str]:
        """The reference solution, where there is one."""
        return [self.task.solution] if self.task.solution and not self.right else []

    def demonstrate(self) -> Iterator[str]:
        yield from self.best_actions()


def unfenced(text: str) -> str:
    """A program without the ``` around it."""
    fenced = re.fullmatch(r"\s*```\w*\n(.*?)\n?```\s*", text, re.DOTALL)
    return fenced[1] if fenced else text


def worth_running(program: str, task: Task) -> bool:
    """False for what cannot be right: it never names the function, or has nothing that prints."""
    words = [task.call.lower()] if task.call else ["print", "write"]
    return len(program) <= MAX_LENGTH and any(w in program.lower() for w in words)


def first_failure(program: str, task: Task, tests, limits) -> str:
    """How the first test that fails did fail, "" when all pass."""
    if task.call:
        return _function_failure(program, task, tests, limits)
    for given, accepted in tests:
        result = run(program, given, **limits)
        if result.status != "ok":
            return _remark(f"With the input {short(given)} it {how(result, limits)}.")
        if not any(same_text(result.stdout, a, task.tolerance) for a in accepted):
            return _remark(f"With the input {short(given)} it printed {short(result.stdout)}, not {short(accepted[0])}.")
    return ""


def _function_failure(program, task, tests, limits):
    """All calls in one run."""
    if not tests:
        return ""
    code = HARNESS.format(program=program.encode(errors="replace").decode(), name=task.call)
    result = run(code, json.dumps([given for given, _ in tests]), **limits)
    if result.status != "ok":
        return _remark(f"It {how(result, limits)}.")
    try:
        results = json.loads(result.stdout)
    except (ValueError, RecursionError):
        results = None
    if not isinstance(results, list) or len(results) != len(tests):
        return "It ended before it had returned."
    for (given, accepted), got in zip(tests, results):
        if not any(same_value(got, a, task.tolerance) for a in accepted):
            return _remark(f"{call_text(task, given)} returned {short(got)}, not {short(accepted[0])}.")
    return ""


def how(result, limits) -> str:
    """A run that did not end well, in words."""
    if result.status == "timeout":
        return f"took longer than {limits['seconds']:g} s"
    if result.status in ("output", "processes"):
        return {"output": "printed too much", "processes": "started too many processes"}[result.status]
    return f"failed: {(result.stderr.strip().splitlines() or ['it was ended'])[-1][-SHOWN:]}"


def same_value(got, expected, tolerance=None) -> bool:
    """Equality of JSON values: true is not 1, 1 is not 1.0. With a tolerance any two numbers that are close are equal."""
    if tolerance is None:
        return json.dumps(got, sort_keys=True) == json.dumps(expected, sort_keys=True)
    if isinstance(got, list) and isinstance(expected, list):
        return len(got) == len(expected) and all(same_value(g, e, tolerance) for g, e in zip(got, expected))
    numbers = all(isinstance(v, int | float) and not isinstance(v, bool) for v in (got, expected))
    return close(got, expected, tolerance) if numbers else same_value(got, expected)


def same_text(got: str, expected: str, tolerance=None) -> bool:
    """Equality of outputs but for white space at the ends of lines and empty lines at the end. With a tolerance word by word."""
    got, expected = ([line.rstrip() for line in text.rstrip().splitlines()] for text in (got, expected))
    if tolerance is None or got == expected:
        return got == expected
    pairs = [(g.split(), e.split()) for g, e in zip(got, expected)]
    if len(got) != len(expected) or any(len(g) != len(e) for g, e in pairs):
        return False
    return all(a == b or close(a, b, tolerance) for g, e in pairs for a, b in zip(g, e))


def close(got, expected, tolerance) -> bool:
    """Whether two finite numbers, or texts of them, are close."""
    try:
        got, expected = float(got), float(expected)
    except (ValueError, OverflowError):
        return False
    return math.isfinite(got) and abs(got - expected) <= tolerance * max(1.0, abs(expected))


def short(value) -> str:
    """A value as Python writes it, in one line that is not too long."""
    text = ascii(value)
    return text if len(text) <= SHOWN else text[:SHOWN] + "..."


def call_text(task: Task, arguments) -> str:
    return f"{task.call}({', '.join(short(a) for a in arguments)})"


def io_text(given: str, output: str) -> str:
    return f"Input:\n{given.rstrip() or '(empty)'}\nOutput:\n{output.rstrip() or '(nothing)'}"


def _remark(text: str) -> str:
    """Text that a program had a hand in: printable, and no tag or special token of a chat template in it."""
    return "".join(c if c in CHARSET else "?" for c in text).replace("<", "< ")
