"""Data sets from files that the user has: JSON (one list) or JSON Lines (one object a line)."""

import json
from pathlib import Path


def read_both(data, eval_data, load) -> tuple[list, list]:
    """(for training, for evaluation): what load(path) makes of two files; [] without data, the same without eval_data."""
    if eval_data and not data:
        raise ValueError(f"eval_data: {eval_data} without data; valid: with data=FILE")
    rows = load(data) if data else []
    return rows, load(eval_data) if eval_data else rows


def read_rows(path, read) -> list:
    """`read(row)` of every row of a file, where `read` raises ValueError for a row it cannot use, or trips over it.

    ValueError names the file and the first row (from 1) that cannot be used.
    """
    try:
        text = Path(str(path)).read_text(encoding="utf-8-sig")  # a name like 7 came as a number
        rows = json.loads(text) if text.lstrip()[:1] == "[" else [json.loads(line) for line in text.split("\n") if line.strip()]
    except (OSError, UnicodeDecodeError) as e:
        raise ValueError(f"data: {path} cannot be read ({getattr(e, 'strerror', None) or e}); valid: a JSON or JSONL file") from e
    except (ValueError, RecursionError) as e:
        raise ValueError(f"data: {path} is neither JSON nor JSONL ({e}); valid: one list, or one object a line") from e
    if not rows:
        raise ValueError(f"data: {path} has no rows; valid: at least one")
    found = []
    for n, row in enumerate(rows, 1):
        try:
            found.append(read(row if isinstance(row, dict) else {}))
        except KeyError as e:
            raise ValueError(f"data: {path}, row {n}: no {e.args[0]!r}") from e
        except ValueError as e:
            raise ValueError(f"data: {path}, row {n}: {' '.join(str(e).split())}") from e
        # a list where a text belongs, and the like
        except (TypeError, AttributeError, LookupError, RecursionError, OverflowError, MemoryError) as e:
            raise ValueError(f"data: {path}, row {n}: is not in a form that is known ({e})") from e
    return found
