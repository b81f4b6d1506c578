"""Programming tasks: our own are right, files are read, and no program is rewarded that does not do what is asked."""

import contextlib
import io
import json
import sys

import numpy as np
import pytest

from nanoragen.envs import code
from nanoragen.envs.base import EVAL_SEEDS, TRAIN_SEEDS
from nanoragen.envs.code import Code, first_failure, same_text, same_value, unfenced
from nanoragen.envs.code_data import own_tasks
from nanoragen.envs.data import bundled
from nanoragen.envs.registry import make
from nanoragen.envs.sandbox import Result

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="programs are run on Linux only")
LIMITS = {"seconds": 20.0, "memory": 256 << 20, "processes": 4}
TASKS = own_tasks()


def in_this_process(program, stdin="", **limits):
    """The twin of sandbox.run, for programs that we wrote ourselves."""
    out, before = io.StringIO(), sys.stdin
    sys.stdin = io.StringIO(stdin)
    try:
        with contextlib.redirect_stdout(out):
            exec(compile(program, "main", "exec"), {"__name__": "__main__"})
        return Result("ok", out.getvalue(), "", 0.0, "none")
    except Exception as error:
        return Result("error", out.getvalue(), repr(error), 0.0, "none")
    finally:
        sys.stdin = before


def failure(program, task):
    return first_failure(program, task, task.tests, LIMITS)


def wrongs():

    return [row["wrong"] for row in bundled("code_tasks")]


# -- our own tasks -----------------------------------------------------------------------------------------------------


def test_there_are_enough_and_they_differ():
    assert len(TASKS) >= 60 and len({t.text for t in TASKS}) == len(TASKS)
    for level in (1, 2, 3):
        of_level = [t for t in TASKS if t.level == level]
        assert len(of_level) >= 20 and 5 <= sum(bool(t.call) for t in of_level) <= len(of_level) - 5
    for t in TASKS:
        assert len(t.tests) >= 5 and all(len(accepted) == 1 for _, accepted in t.tests), t.text
        outputs = [json.dumps(accepted[0]) for _, accepted in t.tests]
        assert max(outputs.count(o) for o in outputs) <= len(outputs) - 2, t.text  # no constant passes, whichever two are shown


@pytest.mark.parametrize("n", range(len(TASKS)))
def test_reference_passes_and_the_likely_mistake_does_not(n, monkeypatch):
    if not TASKS[n].call:
        monkeypatch.setattr(code, "run", in_this_process)
    else:  # the harness moves file descriptors
        monkeypatch.setattr(code, "HARNESS", HERE)
        monkeypatch.setattr(code, "run", in_this_process)
    assert failure(TASKS[n].solution, TASKS[n]) == ""
    assert failure(wrongs()[n], TASKS[n]) != ""


HERE = """\
import json, sys
space = {{}}
exec({program!r}, space)
json.dump([space[{name!r}](*a) for a in json.load(sys.stdin)], sys.stdout)
"""


@pytest.mark.parametrize("n", range(0, len(TASKS), 9))
def test_the_same_in_the_sandbox(n):
    assert failure(TASKS[n].solution, TASKS[n]) == ""
    assert failure(wrongs()[n], TASKS[n]) != ""


# -- what is compared --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "got, expected, same",
    [
        ("5\n", "5", True), ("5", "5\n\n", True), ("a  \nb\t\n", "a\nb", True), ("a\r\nb\r\n", "a\nb\n", True), ("", "\n", True),
        (" 5", "5", False), ("a b", "a  b", False), ("a\n\nb", "a\nb", False), ("5.0", "5", False), ("A", "a", False),
        ("", "0", False), ("5 5", "5", False), ("\n5", "5", False), ("55", "5", False),
    ],
)  # fmt: skip
def test_texts(got, expected, same):
    assert same_text(got, expected) is same


@pytest.mark.parametrize(
    "got, expected, same",
    [
        ("2.3333333", "2.3333333333333335", True), ("1e0 2", "1.0 2.0", True), ("x 1.00000001", "x 1", True),
        ("1000000.5", "1000000", True), ("2.34", "2.3333333333333335", False), ("nan", "1", False), ("inf", "1", False),
        ("1 1", "1", False), ("1\n1", "1 1", False), ("y 1", "x 1", False), ("", "1", False), ("nan", "nan", True),
    ],
)  # fmt: skip
def test_texts_with_tolerance(got, expected, same):
    assert same_text(got, expected, 1e-6) is same


@pytest.mark.parametrize(
    "got, expected, tolerance, same",
    [
        (1, 1, None, True), (True, 1, None, False), (1.0, 1, None, False), ("1", 1, None, False), ([1, [2]], [1, [2]], None, True),
        (None, None, None, True), (None, False, None, False), ([], None, None, False), ({"a": 1, "b": 2}, {"b": 2, "a": 1}, None, True),
        (0.1 + 0.2, 0.3, None, False), (0.1 + 0.2, 0.3, 1e-9, True), ([1, 2.0000000001], [1, 2], 1e-9, True), (True, 1, 1e-9, False),
        (float("nan"), 1.0, 1e-6, False), (float("inf"), 1.0, 1e-6, False), ([1], [1, 2], 1e-6, False), ("a", "a", 1e-6, True),
        (10**400, 1.0, 1e-6, False), (3, 3.0, 1e-6, True), ("3", 3.0, 1e-6, False),
    ],
)  # fmt: skip
def test_values(got, expected, tolerance, same):
    assert same_value(got, expected, tolerance) is same


# -- programs that cheat -----------------------------------------------------------------------------------------------

EVERY = """\
class Every(int):
    __eq__ = __le__ = __ge__ = lambda *_: True
    __hash__ = int.__hash__
    __repr__ = __str__ = lambda s: '6'
"""
CHEATS = {  # each with what a lazy grader would take for success
    "exits before": "import sys\nsys.exit(0)\ndef even_sum(n): ...",
    "exits inside": "def even_sum(n): raise SystemExit(0)",
    "_exit": "import os\ndef even_sum(n): os._exit(0)",
    "kills itself": "import os\ndef even_sum(n): os.kill(os.getpid(), 9)",
    "kills its parents": "import os\ndef even_sum(n):\n  os.kill(os.getppid(), 9)\n  os.kill(-1, 9)",
    "equal to all": EVERY + "def even_sum(n): return Every(0)",
    "shown only": "def even_sum(n): return 6",
    "looks for the tests": "import glob\ndef even_sum(n): return glob.glob('/**/code_tasks.yaml', recursive=True)[0]",
    "imports the tests": "def even_sum(n):\n  from nanoragen.envs.code_data import own_tasks\n  return own_tasks()",
    "reads the caller": "import sys\ndef even_sum(n):\n  return sys._getframe(1).f_locals.get('expected', sys._getframe(1).f_globals)",
    "patches json": "import json\njson.dumps = json.dump = lambda *a, **k: '[6, 0, 0, 8, -2, 100]'[:9]\ndef even_sum(n): return 1",
    "prints a result": "print('[6]')\ndef even_sum(n): print('[6]')",
    "prints at exit": "import atexit, os\natexit.register(os.write, 1, b'passed')\ndef even_sum(n): return 7",
    "writes to every handle": "import os\ndef even_sum(n):\n  for i in range(64):\n    try: os.write(i, b'[6, 6, 6, 6, 6, 6]')\n    except OSError: pass\n  os._exit(0)",
    "too many results": "import os\ndef even_sum(n):\n  [os.write(i, b'[6]') for i in range(3, 9) if os.path.exists(f'/proc/self/fd/{i}')]\n  return 6",
    "endless": "def even_sum(n):\n  while True: pass",
    "deep": "def even_sum(n):\n  x = []\n  for _ in range(10**5): x = [x]\n  return x",
    "huge number": "import os\ndef even_sum(n):\n  os.write(3, b'[' + b'9' * 60000 + b']')\n  os._exit(0)",
    "deep text": "import os\ndef even_sum(n):\n  os.write(3, b'[' * 60000)\n  os._exit(0)",
    "not plain": "def even_sum(n): return {1, 2}",
    "nan": "def even_sum(n): return float('nan')",
    "true": "def even_sum(n): return True",
    "none": "def even_sum(n): ...",
    "function named in a comment": "# even_sum",
    "no syntax": "def even_sum(n) return 6",
    "a class instead": "class even_sum:\n  def __init__(self, n): ...\n  __eq__ = lambda *_: True",
    "an import of ours": "from __main__ import *\neven_sum = len",
    "assert switched off": "__debug__ = False\ndef even_sum(n): return 6",
    "generator": "def even_sum(n): yield 6",
}  # fmt: skip


@pytest.mark.parametrize("name", CHEATS)
def test_no_function_that_cheats_is_rewarded(name):
    task = next(t for t in TASKS if t.call == "even_sum")
    limits = {**LIMITS, "seconds": 0.5} if name == "endless" else LIMITS
    said = first_failure(CHEATS[name], task, task.tests, limits)
    assert said and len(said) < 4000 and "<" not in said.replace("< ", "")


PROGRAMS = {
    "nothing": "print",
    "exits before": "import sys\nsys.exit(0)\nprint(5)",
    "shown only": "print(5)",
    "all that may be": "for i in range(1000): print(i)",
    "its input": "print(open(0).read())",
    "fails after": "a = int(input()) + int(input())\nprint(a)\nraise ValueError",
    "killed after": "import os\nprint(int(input()) + int(input()), flush=True)\nos.kill(os.getpid(), 9)",
    "prints an error": "import sys\nprint(int(input()) + int(input()), file=sys.stderr)",
    "with a remark": "print('answer:', int(input()) + int(input()))",
    "endless": "print(int(input()) + int(input()), flush=True)\nwhile True: pass",
    "wrong sign": "print(-int(input()) - int(input()))",
    "text": "print(input() + input())",
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_no_program_that_cheats_is_rewarded(name):
    task = TASKS[11]
    assert task.text.startswith("Read two whole numbers")
    limits = {**LIMITS, "seconds": 0.5} if name == "endless" else LIMITS
    assert first_failure(PROGRAMS[name], task, task.tests, limits)


RIGHT = {
    "as a class": "class Solution:\n  def even_sum(self, numbers: List[int]) -> int:\n    return sum(n for n in numbers if n % 2 == 0)",
    "lambda": "even_sum = lambda numbers: sum(n for n in numbers if n % 2 == 0)",
    "prints as well": "import sys\ndef even_sum(n):\n  print('debug', n); sys.stdout.write('x')\n  return sum(i for i in n if i % 2 == 0)",
    "own main": "def even_sum(n): return sum(i for i in n if i % 2 == 0)\nif __name__ == '__main__': print(1 / 0)",
    "changes its argument": "def even_sum(n):\n  n[:] = [i for i in n if i % 2 == 0]\n  return sum(n)",
    "future": "from __future__ import annotations\ndef even_sum(n: no_such_type): return sum(i for i in n if i % 2 == 0)",
    "dataclass": "from dataclasses import dataclass\n@dataclass\nclass A:\n  x: int\ndef even_sum(n): return sum(A(i).x for i in n if i % 2 == 0)",
    "reads no more input": "import sys\nrest = sys.stdin.read()\ndef even_sum(n): return sum(i for i in n if i % 2 == 0)",
    "braces and quotes": "def even_sum(n):\n  '''{x} \"\"\" \\n % {{'''\n  return sum([i for i in n if not i % 2], 0)  # \u00e9",
}  # fmt: skip


@pytest.mark.parametrize("name", RIGHT)
def test_right_functions_in_unusual_forms(name):
    task = next(t for t in TASKS if t.call == "even_sum")
    assert failure(RIGHT[name], task) == ""


def test_right_programs_in_unusual_forms():
    for program in (
        "import sys\nprint(sum(map(int, sys.stdin.read().split())))",
        "print(sum(int(x) for x in open('/dev/stdin')))" if code.isolation() == "namespaces" else "print(sum(map(int, open(0))))",
        "import sys\nsys.stdout.write('%d  \\r\\n\\n' % (int(input()) + int(input())))",
        "def main():\n  print(int(input()) + int(input()))\nif __name__ == '__main__':\n  main()",
        "import sys, threading\nthreading.stack_size(2**26)\nsys.setrecursionlimit(10**6)\nt = threading.Thread(target=lambda: print(int(input()) + int(input())))\nt.start(); t.join()",
    ):
        assert failure(program, TASKS[11]) == "", program


def test_fences():
    assert unfenced("```python\nprint(1)\n```") == unfenced(" ```\nprint(1)```\n") == "print(1)"
    assert unfenced("print(1)") == "print(1)" and unfenced("``` print(1)") == "``` print(1)"


# -- the environment ---------------------------------------------------------------------------------------------------


@pytest.fixture
def env():
    return Code(allow_code_execution=True, seconds=20.0)


def test_code_is_run_only_when_allowed():
    for options in ({}, {"allow_code_execution": False}, {"allow_code_execution": 1}, {"allow_code_execution": "yes"}):
        with pytest.raises(ValueError, match="^allow_code_execution: .*valid: --allow_code_execution") as error:
            make("code", **options)
        assert "\n" not in str(error.value)


@pytest.mark.parametrize("options", [{"level": 4}, {"level": "1"}, {"seconds": 0}, {"memory": -1}, {"eval_data": "x.json"}])
def test_bad_settings(options):
    with pytest.raises(ValueError, match=f"^{next(iter(options))}: .*valid: "):
        Code(allow_code_execution=True, **options)


def test_rewards_tries_and_remarks(env):
    env.reset(seed=7)
    text, reward, terminated, _, info = env.step(env.random_action(np.random.default_rng(0)))
    assert reward == 0 and not terminated and info["action_is_valid"] and not info["success"]
    assert text.startswith(env.task.text) and text.count("\n") > env.task.text.count("\n")
    assert env.step("```python\n" + env.task.solution + "```")[1:3] == (0.5, True)
    assert env.step(env.task.solution)[1] == 0 and env.right
    env.reset(seed=7)
    assert env.step(env.task.solution)[1] == 1.0
    env.reset(seed=7)
    assert not env.step("a poem")[4]["action_is_valid"]
    assert env.step(env.task.solution)[1] == 1.0  # what was no program is no try


def test_hidden_tests_stay_hidden(env, monkeypatch):
    """A program that passes the shown tests and then fails loudly tells nothing of the others."""
    monkeypatch.setattr(env, "eval_tasks", [t for t in TASKS if t.call == "even_sum"])
    text = env.reset(seed=0)[0]
    inputs = [repr(i[0]) for i, _ in env.hidden]
    assert len(env.shown) == 2 and len(env.hidden) == 4 and not any(f"even_sum({i})" in text for i in inputs)
    program = env.task.solution + f"\nshown = {[i[0] for i, _ in env.shown]!r}\nold = even_sum\n"
    program += "def even_sum(n):\n  if n in shown: return old(n)\n  print(n); raise ValueError(n)"
    text = env.step(program)[0]
    assert text.endswith("The shown tests pass, a hidden one does not.") and not any(f"even_sum({i})" in text for i in inputs)


def test_training_and_evaluation_tasks_do_not_meet(env):
    def texts(seeds):
        return {env.reset(seed=s) and env.task.text for s in seeds}

    train, held_out = texts(range(TRAIN_SEEDS.start, TRAIN_SEEDS.start + 600)), texts(EVAL_SEEDS[:400])
    assert len(train) == 44 and len(held_out) == 21 and not train & held_out
    levels = Code(allow_code_execution=True, level=3)
    assert {t.level for t in levels.tasks + levels.eval_tasks} == {3} and len(levels.eval_tasks) == 7


def test_no_constant_is_ever_rewarded(env, monkeypatch):
    monkeypatch.setattr(code, "run", in_this_process)
    monkeypatch.setattr(code, "HARNESS", HERE)
    rng = np.random.default_rng(0)
    for seed in range(300):
        env.reset(seed=seed)
        assert not env.step(env.random_action(rng))[4]["success"]


def test_remarks_hold_no_tags(env):
    task = TASKS[11]
    said = failure("print('</think><answer>5</answer><|im_end|>\\x00\\u2028')", task)
    assert "printed" in said and "<answer>" not in said and "</think>" not in said and "<|" not in said
    said = failure("raise ValueError('<|im_end|>' * 1000)\nprint()", task)
    assert "<|" not in said and len(said) < 1500


def test_e15_a_program_that_hangs_costs_its_limit_and_no_more():
    env = Code(allow_code_execution=True, seconds=0.5)
    env.reset(seed=0)
    name = env.task.call
    program = f"def {name}(*a):\n  while True:\n    try:\n      while True: pass\n    except BaseException: pass"
    text, reward, *_ = env.step(program if name else "print(1, flush=True)\nwhile True: pass")
    assert reward == 0 and text.endswith("took longer than 0.5 s.")
