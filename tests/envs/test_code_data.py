"""Programming tasks from files: the formats as published, rows that cannot be used, and what a pickle may not do."""

import base64
import json
import os
import pickle
import sys
import zlib

import numpy as np
import pytest

from nanoragen.envs import code_data
from nanoragen.envs.base import TRAIN_SEEDS
from nanoragen.envs.code_data import task_of
from nanoragen.envs.registry import make
from test_code import failure

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="programs are run on Linux only")


# -- files -------------------------------------------------------------------------------------------------------------

PACKED = base64.b64encode(
    zlib.compress(pickle.dumps(json.dumps([{"input": "9\n", "output": "18\n", "testtype": "stdin"}])))
).decode()
ROWS = {
    "LiveCodeBench, program": (
        {"question_content": "Double it.", "starter_code": "", "metadata": "{}", "private_test_cases": PACKED,
         "public_test_cases": json.dumps([{"input": "1\n", "output": "2\n", "testtype": "stdin"}])},
        [("1\n", ["2\n"]), ("9\n", ["18\n"])], "", "print(2 * int(input()))",
    ),
    "LiveCodeBench, function": (
        {"question_content": "Scale.", "starter_code": "class Solution:\n    def scale(self, xs: List[int], k: int) -> List[int]:\n        ",
         "metadata": json.dumps({"func_name": "scale"}), "private_test_cases": "[]",
         "public_test_cases": json.dumps([{"input": "[1, 2]\n3", "output": "[3, 6]", "testtype": "functional"}])},
        [([[1, 2], 3], [[3, 6]])], "scale", "class Solution:\n  def scale(self, xs: List[int], k: int):\n    return [x * k for x in xs]",
    ),
    "TACO, program": (
        {"question": "Add.", "input_output": json.dumps({"inputs": ["1 2\n", ["3", "4"]], "outputs": ["3\n", ["7"]]}), "starter_code": ""},
        [("1 2\n", ["3\n"]), ("3\n4", ["7"])], "", "import sys\nprint(sum(map(int, sys.stdin.read().split())))",
    ),
    "TACO, function": (
        {"question": "rev reverses.", "input_output": {"fn_name": "rev", "inputs": [["ab"], ["x"]], "outputs": [["ba"], "x"]},
         "solutions": json.dumps(["def rev(s):\n  return s[::-1]"])},
        [(["ab"], [["ba"], "ba"]), (["x"], ["x"])], "rev", "def rev(s): return s[::-1]",
    ),
    "DeepCoder, primeintellect": (
        {"problem": "Next.", "solutions": ["def nxt(n): return n + 1"],
         "tests": json.dumps([{"fn_name": "nxt", "type": "function_call", "input": [4], "output": [5]}])},
        [([4], [[5], 5])], "nxt", "def nxt(n): return n + 1",
    ),
    "DeepCoder, primeintellect program": (
        {"problem": "Echo.", "tests": json.dumps([{"type": "stdin_stdout", "input": "hi\n", "output": "hi\n"}])},
        [("hi\n", ["hi\n"])], "", "print(input())",
    ),
    "DeepCoder, lcbv5": (
        {"problem": "Half.", "starter_code": "class Solution:\n    def half(self, n: int) -> int:\n        ", "metadata": {},
         "tests": json.dumps([{"input": "8", "output": "4", "testtype": "functional", "metadata": {"func_name": "half"}}])},
        [([8], [4])], "half", "class Solution:\n  def half(self, n): return n // 2",
    ),
    "DeepCoder, taco": (
        {"problem": "Sum.", "tests": json.dumps({"inputs": ["2\n1 1\n"], "outputs": ["2\n"]})},
        [("2\n1 1\n", ["2\n"])], "", "input()\nprint(sum(map(int, input().split())))",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ROWS)
def test_formats(name):
    row, tests, call, right = ROWS[name]
    task = task_of(json.loads(json.dumps(row)))
    assert (task.tests, task.call) == (tests, call) and (not call or call in task.text)
    assert failure(right, task) == ""
    if task.solution:
        assert failure(task.solution, task) == ""
    wrong = f"def {call}(*a): return 'no'" if call else "print('no')"
    assert failure(wrong, task)


def test_files(tmp_path):
    rows = [ROWS[n][0] for n in ("TACO, function", "DeepCoder, primeintellect")]
    (tmp_path / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "eval.json").write_text(json.dumps([ROWS["DeepCoder, taco"][0]]))
    env = make("code", allow_code_execution=True, data=f"{tmp_path}/train.jsonl", eval_data=f"{tmp_path}/eval.json", seconds=20.0)
    assert env.reset(seed=0)[0].startswith("Sum.")
    text = env.reset(seed=TRAIN_SEEDS.start)[0]
    assert "rev('ab') -> ['ba']" in text or ("nxt" in text and "->" not in text)  # its only test is hidden
    assert env.step(next(env.demonstrate()))[1] == 1.0
    (tmp_path / "bad.jsonl").write_text('{"problem": "x"}')
    with pytest.raises(ValueError, match="bad.jsonl has no row that can be used .of 1., row 1: no text with tests; valid: "):
        make("code", allow_code_execution=True, data=f"{tmp_path}/bad.jsonl")


def test_rows_of_taco_as_published(tmp_path, capsys):
    """Some have no tests, and some numbers with more digits than Python reads."""
    row = ROWS["TACO, function"][0]
    long = '{"fn_name": "f", "inputs": [[%s]], "outputs": [[1]]}' % ("7" * 5000)
    tests = ["", "{}", None, '{"inputs": [], "outputs": []}', '{"inputs": ["1"], "outputs": []}', long, "[" * 100_000,
             '{"inputs": 3, "outputs": 4}']  # fmt: skip
    rows = [*({**row, "input_output": t} for t in tests), row]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert [t.text for t in code_data.tasks_from(tmp_path / "a.jsonl", 4)] == [task_of(row).text]
    said = capsys.readouterr().err
    assert f"a.jsonl: {len(tests)} of {len(rows)} rows cannot be used and are skipped; row 1: no text with tests" in said
    assert said.count("\n") == 1


def test_the_longest_tests_are_kept(tmp_path):
    tests = {"inputs": [str(10**n) for n in range(9)], "outputs": [str(n) for n in range(9)]}
    (tmp_path / "a.json").write_text(json.dumps([{"problem": "Zeros.", "tests": tests}]))
    (task,) = code_data.tasks_from(tmp_path / "a.json", 3)
    assert [i for i, _ in task.tests] == ["1", "100000000", "10000000"]


@pytest.mark.parametrize("name, options", [("DeepCoder, taco", {}), ("two", {"max_tests": 1}), ("public", {})])
def test_no_task_of_a_file_is_won_by_the_outputs_that_are_shown(tmp_path, name, options):
    two = {"inputs": ["2\n1 1\n", "3\n1 2 3\n"], "outputs": ["2\n", "6\n"]}
    shown = [{"input": i, "output": o, "testtype": "stdin"} for i, o in zip(two["inputs"], two["outputs"])]
    rows = {
        **{n: r[0] for n, r in ROWS.items()},
        "two": {"problem": "Sum.", "tests": two},
        "public": {
            "question_content": "Sum.",
            "public_test_cases": json.dumps(shown),
            "private_test_cases": "[]",
            "metadata": "{}",
        },
    }
    (tmp_path / "a.json").write_text(json.dumps([rows[name]]))
    env = make("code", allow_code_execution=True, data=f"{tmp_path}/a.json", seconds=20.0, **options)
    text, _ = env.reset(seed=0)
    assert env.hidden and env.hidden[-1][0].strip() not in text
    assert isinstance(env.random_action(np.random.default_rng(0)), str)


@pytest.mark.parametrize("packed", [b"Pabc\n.", b"\x8e" + b"\xff" * 7 + b"\x7f"])
def test_what_a_pickle_is_not_is_said_in_one_line_with_its_row(tmp_path, packed):
    tests = base64.b64encode(zlib.compress(packed)).decode()
    (tmp_path / "a.json").write_text(json.dumps([{**ROWS["LiveCodeBench, program"][0], "private_test_cases": tests}]))
    with pytest.raises(ValueError, match="^data: .*a.json has no row that can be used .of 1., row 1: .*valid: ") as error:
        make("code", allow_code_execution=True, data=f"{tmp_path}/a.json")
    assert "\n" not in str(error.value)


def test_inputs_without_outputs_are_refused():
    with pytest.raises(ValueError, match="2 inputs and 1 outputs; valid: "):
        task_of({"question": "Sum.", "input_output": json.dumps({"inputs": ["1", "2"], "outputs": ["1"]})})
    with pytest.raises(ValueError, match="0 inputs and 0 outputs; valid: "):
        task_of({"question": "Sum.", "input_output": json.dumps({"inputs": [], "outputs": []})})


def test_a_pickle_that_would_run_something_is_refused(tmp_path):
    class Bad:
        def __reduce__(self):
            return os.system, (f"touch {tmp_path}/pwned",)

    row = {**ROWS["LiveCodeBench, program"][0], "private_test_cases": base64.b64encode(zlib.compress(pickle.dumps(Bad()))).decode()}
    with pytest.raises(ValueError, match="would run"):
        task_of(row)
    assert not (tmp_path / "pwned").exists()
