"""Data sets from files that the user has: JSON (one list) or JSON Lines (one object a line).

Data sets as they are published have rows that cannot be used: no tests, no answer, numbers of 5,000 digits. Such a row is skipped,
and one line on standard error says how many were, and why the first.
"""

import functools
import json
import re
import sys
from pathlib import Path

import yaml

# what a row raises that is not in the form that is known: a list where a text belongs, and the like
ODD = (TypeError, AttributeError, LookupError, RecursionError, OverflowError, MemoryError)


def bundled(name: str):
    """The contents of name.yaml, which lies in this folder."""
    text = Path(__file__).with_name(f"{name}.yaml").read_text(encoding="utf-8")
    return yaml.load(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader))


def read_both(data, eval_data, load) -> tuple[list, list]:
    """(for training, for evaluation): what load(path) makes of two files; [] without data, the same without eval_data."""
    if eval_data and not data:
        raise ValueError(f"eval_data: {eval_data} without data; valid: with data=FILE")
    rows = load(data) if data else []
    return rows, load(eval_data) if eval_data else rows


def read_rows(path, read, *arguments) -> list:
    """`read(row, *arguments)` of every row of a file that can be used; `read` raises ValueError for the others, or trips.

    Read once a process, as every episode has an environment of its own, and again when the file has changed. Not to be changed by
    the caller. ValueError names the file, where it cannot be read or none of its rows can be used.
    """
    return _read_rows(str(path), stamp(path), read, arguments)  # a name like 7 came as a number


def stamp(path) -> tuple | None:
    """What is another when a file has changed; None for a file that is not there."""
    try:
        status = Path(str(path)).stat()
    except (OSError, ValueError):
        return None
    return status.st_mtime_ns, status.st_size


def usable(path, rows, read) -> list:
    """read(row) of the rows of a file that can be used, in their order; one line about the others. ValueError where none can."""
    found, skipped, why = [], 0, ""
    for n, row in enumerate(rows, 1):
        try:
            found.append(read(row))
        except (ValueError, *ODD) as e:
            skipped += 1
            said = f"no {e.args[0]!r}" if type(e) is KeyError else " ".join(str(e).split())[:400]
            why = why or f"row {n}: {said if isinstance(e, ValueError | KeyError) else f'is not in a form that is known ({said})'}"
    if skipped and not found:
        valid = "" if "valid: " in why else "; valid: rows as envs/README.md has them"
        raise ValueError(f"data: {path} has no row that can be used (of {skipped}), {why}{valid}")
    if skipped:
        print(f"data: {path}: {skipped} of {skipped + len(found)} rows cannot be used and are skipped; {why}", file=sys.stderr)
    return found


@functools.lru_cache(maxsize=4)
def _read_rows(path: str, _stamp, read, arguments) -> list:
    try:
        content = Path(path).read_bytes().removeprefix(b"\xef\xbb\xbf")
    except (OSError, ValueError) as e:
        raise ValueError(f"data: {path} cannot be read ({getattr(e, 'strerror', None) or e}); valid: a JSON or JSONL file") from e
    one_list = content.lstrip()[:1] == b"["
    rows = _json(path, content) if one_list else [line for line in content.split(b"\n") if line.strip()]
    if not rows:
        raise ValueError(f"data: {path} has no rows; valid: at least one")
    if not one_list and len(rows) > 1 and not rows[0].rstrip().endswith(b"}") and _is_object(content):
        raise ValueError(f"data: {path} is one JSON object over several lines; valid: a list of objects, or one object a line")
    halves = re.search(rb"\\u[dD][89a-fA-F]", content)  # halves of a character outside the first 65,536

    long = one_list and re.search(rb"\d{640}", content)  # the fewest digits that Python can be told to refuse

    def used(row):
        row = row if one_list else _row(row)
        if long:
            json.dumps(row, default=_refuse)
        found = read(row if isinstance(row, dict) else {}, *arguments)
        if halves:
            json.dumps(found, ensure_ascii=False, default=vars).encode()  # ValueError for one without the other: it is no text
        return found

    return usable(path, rows, used)


def _json(path, content: bytes):
    try:
        return json.loads(content.decode(), parse_int=_whole)
    except (ValueError, RecursionError) as e:
        raise ValueError(f"data: {path} is neither JSON nor JSONL ({e}); valid: one list, or one object a line") from e


def _whole(digits: str):
    """The number; of more digits than Python reads the error, so that it costs its own row and not the whole list."""
    try:
        return int(digits)
    except ValueError as e:
        return e


def _refuse(error):
    raise error


def _is_object(content: bytes) -> bool:
    try:
        return isinstance(json.loads(content), dict)
    except (ValueError, RecursionError):
        return False


def _row(line: bytes):
    try:
        return json.loads(line.decode())
    except (ValueError, RecursionError) as e:
        raise ValueError(f"is neither JSON nor JSONL ({e}); valid: one object a line, or one list") from e
