"""Programming tasks: our own (code_tasks.yaml), and those of DeepCoder, TACO and LiveCodeBench from files.

A test is an input and the outputs that are accepted. Of a function (`call`), the input is the list of its arguments and the
output what it returns, both as JSON has them; of a program, both are text.

Left out: checkers for tasks with several right outputs, which these data sets do not come with, and tasks in other languages.
"""

import base64
import functools
import io
import json
import pickle
import re
import zlib
from dataclasses import dataclass

from nanoragen.envs.data import bundled, read_rows


@dataclass
class Task:
    text: str
    tests: list[tuple]  # (input, [accepted outputs])
    call: str = ""  # name of the function asked for; "": a program
    public: int = 1  # how many tests, from the first, may be shown
    tolerance: float | None = None  # numbers may differ by this times max(1, number); None: not at all
    solution: str = ""
    level: int = 0


@functools.cache
def own_tasks() -> tuple[Task, ...]:
    """Our own, all levels, in the order of the file."""
    return tuple(
        Task(r["text"], [(i, [o]) for i, o in r["tests"]], r.get("call", ""), 1, r.get("tolerance"), r["solution"], r["level"])
        for r in bundled("code_tasks")
    )


def tasks_from(path, max_tests: int) -> list[Task]:
    """The tasks of a file of one of the formats; of each the public tests, and of the others the longest up to max_tests in all."""
    return read_rows(path, _trimmed, max_tests)


def _trimmed(row: dict, max_tests: int) -> Task:
    task = task_of(row)
    hidden = sorted(task.tests[task.public :], key=lambda t: -len(json.dumps(t[0])))
    task.tests = task.tests[: task.public] + hidden[: max(0, int(max_tests) - task.public)]
    task.public = min(task.public, len(task.tests) - 1)  # one stays hidden: all shown, printing the outputs would be right
    return task


def task_of(row: dict) -> Task:
    """A row of LiveCodeBench, TACO or DeepCoder. ValueError for any other."""
    text = next((str(row[k]) for k in ("question_content", "problem", "question") if row.get(k)), "")
    starter = str(row.get("starter_code") or "")
    metadata = _json(row.get("metadata") or {})
    name = (metadata.get("func_name") if isinstance(metadata, dict) else "") or ""
    public = 1
    if "public_test_cases" in row:
        shown = _json(row["public_test_cases"])
        tests, public = shown + _private(row.get("private_test_cases") or "[]"), max(1, len(shown))
    else:
        tests = _json(row.get("tests") or row.get("input_output") or "[]")
    if not (text and tests):
        raise ValueError(
            "no text with tests; valid: question_content/public_test_cases (LiveCodeBench), "
            "question/input_output (TACO), problem/tests (DeepCoder)"
        )
    if isinstance(tests, dict):
        name = tests.get("fn_name") or name
        if len(tests["inputs"]) != len(tests["outputs"]) or not tests["inputs"]:
            raise ValueError(f"{len(tests['inputs'])} inputs and {len(tests['outputs'])} outputs; valid: as many, at least one")
        tests = [{"input": i, "output": o} for i, o in zip(tests["inputs"], tests["outputs"])]
    first = tests[0]
    kind = first.get("testtype") or first.get("type") or ("function_call" if name else "stdin")
    if kind in ("functional", "function_call"):
        name = name or first.get("fn_name") or _json(first.get("metadata") or {}).get("func_name") or _defined(starter)
        if not name:
            raise ValueError("tests of a function without its name; valid: fn_name, metadata with func_name, or starter_code")
    else:
        name = ""
    found = [_function_test(t, kind) if name else (_lines(t["input"]), [_lines(t["output"])]) for t in tests]
    if name and name not in text + starter:
        text += f"\nThe function's name is {name}."
    solutions = _json(row.get("solutions") or "[]")
    return Task(f"{text}\n{starter}".strip(), found, name, public, None, solutions[0] if solutions else "")


def _function_test(test: dict, kind: str):
    """LiveCodeBench writes each argument and the result as JSON on a line; the others have lists, the result mostly in one."""
    given, output = test["input"], test["output"]
    if kind == "functional":
        return [json.loads(line) for line in given.split("\n") if line.strip()], [json.loads(output)]
    given = _json(given)
    wrapped = isinstance(output, list) and len(output) == 1
    return (given if isinstance(given, list) else [given]), [output, output[0]] if wrapped else [output]


def _lines(value) -> str:
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)


def _json(value):
    return json.loads(value) if isinstance(value, str) else value


def _defined(starter: str) -> str:
    found = re.findall(r"def\s+(\w+)\s*\(", starter)
    return found[-1] if found else ""


def _private(text: str) -> list:
    """LiveCodeBench packs its private tests: JSON, pickled as a string, compressed, in base 64."""
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        try:
            return json.loads(_StringOnly(io.BytesIO(zlib.decompress(base64.b64decode(text)))).load())
        except (zlib.error, pickle.UnpicklingError, EOFError) as e:
            raise ValueError(f"private_test_cases cannot be unpacked ({e})") from e


class _StringOnly(pickle.Unpickler):
    """A pickle can name any function to be called; a string needs none."""

    def find_class(self, module, name):
        raise ValueError(f"private_test_cases would run {module}.{name}; valid: a pickled string")
