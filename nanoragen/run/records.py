"""Reading what a run logged: JSON lines of which any may be torn by a kill or damaged. Imports nothing heavy: the report reads too."""

import json
from pathlib import Path

FILES = ("metrics.jsonl", "rollouts.jsonl", "cross.jsonl", "errors.jsonl")  # a run's records, a line each a step or more


def rewind(folder, step: int) -> list[dict]:
    """Cut the records of a run back to a step, so that a resumed run logs no step twice, and mends a line torn by a kill.

    Returns the lines of metrics.jsonl that stay.
    """
    history = []
    for name in FILES:
        path, position, end = Path(folder) / name, 0, 0
        if not path.is_file():
            continue
        with open(path, "rb+") as file:
            for text in file:
                line, position = whole_record(text), position + len(text)
                if line is not None and line["step"] <= step:  # a later step before an earlier one is damage: cuts nothing off
                    end = position  # after the last whole line that stays
                    history += [line] if name == "metrics.jsonl" else []
            file.truncate(end)
    return history


def whole_record(text: bytes) -> dict | None:
    """A whole line of one of our logs as a dict; None for a torn or damaged one."""
    try:
        line = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return line if text.endswith(b"\n") and isinstance(line, dict) and isinstance(line.get("step"), int) else None
