"""A run's folder read back: its settings, its log, and where in the large files the lines of each step stand.

The log of a run that was killed, is still being written, or went through a full disk has torn lines, missing keys and nulls.
None of that is an error here: what cannot be read is left out and counted. `read` goes on from where it stopped, so that a
running trainer pays for the new lines only; of the large files it keeps the places of the lines, not the lines.
"""

import json
import math
import re
from pathlib import Path

STEP = re.compile(rb'\s*\{"step": ?(\d{1,9}),')  # what a trainer's line starts with: no need to parse the rest
FILES = ("metrics.jsonl", "cross.jsonl", "rollouts.jsonl")
HIDDEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff\ufffe\uffff\ud800-\udfff]")


def number(x) -> float | int | None:
    """x if it is a finite number that can be drawn, else None."""
    ok = isinstance(x, (int, float)) and not isinstance(x, bool) and math.isfinite(x) and abs(x) < 1e15
    return x if ok else None


def visible(text) -> str:
    """Any text as one sees it: control characters, bidirectional ones and lone surrogates by their code points."""
    return HIDDEN.sub(lambda c: f"\u27e8U+{ord(c[0]):04X}\u27e9", str(text))


def spread(items, n: int) -> list:
    """The first, the last and evenly chosen ones between: at most n (2 or more) of the items, in order."""
    items = list(items)
    if len(items) <= n:
        return items
    return [items[round(i * (len(items) - 1) / (n - 1))] for i in range(n)]


def parse(line: bytes) -> dict | None:
    """The JSON object of a line, or None."""
    try:
        found = json.loads(line.decode("utf-8", errors="replace"))
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


class Run:
    """What is known of the run in `folder`. steps: {step: its metrics}; a step that was logged twice counts as it was last.

    config: config.json. about: run.json, what the run was made with; both are {} where there is none.
    """

    def __init__(self, folder):
        self.folder = Path(folder)
        self.name = visible(self.folder.resolve().name)
        self._tokenizer = None, None  # path, what it holds
        self._forget()

    def _forget(self):
        self.config, self.about, self.steps, self.unreadable, self.torn = {}, {}, {}, dict.fromkeys(FILES, 0), set()
        self._at = dict.fromkeys(FILES, 0)
        self._places = {name: {} for name in FILES[1:]}  # file -> step -> {offset: bytes}

    def read(self) -> "Run":
        """Take in what is new. Returns itself."""
        sizes = {name: (self.folder / name).stat().st_size if (self.folder / name).is_file() else 0 for name in FILES}
        if any(sizes[name] < self._at[name] for name in FILES):
            self._forget()  # a file is shorter than it was: another run's, or one that was cut back
        self.torn = set()
        settings = [self.folder / name for name in ("config.json", "run.json")]
        self.config, self.about = ((parse(path.read_bytes()) if path.is_file() else None) or {} for path in settings)
        for name in (name for name in FILES if sizes[name]):
            with open(self.folder / name, "rb") as file:
                file.seek(self._at[name])
                for line in file:
                    at, whole = self._at[name], line.endswith(b"\n")
                    self._at[name] += len(line) if whole else 0  # a last line without its end is read again when there is more
                    if line.strip():
                        self._take(name, at, line, whole)
        return self

    def _take(self, name, at, line, whole):
        start = STEP.match(line) if name != "metrics.jsonl" and whole else None
        record = None if start else parse(line)
        step = number(int(start[1])) if start else number((record or {}).get("step"))
        if step is None or step < 0:
            self.unreadable[name] += whole
            self.torn |= set() if whole else {name}
        elif name == "metrics.jsonl":
            self.steps[int(step)] = {k: bool(v) if k.startswith("early_stopped/") else number(v) for k, v in record.items()}
        else:
            self._places[name].setdefault(int(step), {})[at] = len(line)

    def history(self) -> list[dict]:
        """The steps' metrics in order; values are finite numbers (early stops: bool), or None for all else."""
        return [self.steps[s] for s in sorted(self.steps)]

    def series(self, key) -> tuple[list, list]:
        """(steps, values) of the steps that have the key; None where the value is no finite number."""
        found = [(s, number(m[key])) for s, m in sorted(self.steps.items()) if key in m]
        return [s for s, _ in found], [v for _, v in found]

    def values(self, key) -> list:
        return [v for v in self.series(key)[1] if v is not None]

    def has(self, name) -> list[int]:
        """Steps of which cross.jsonl or rollouts.jsonl has lines."""
        return sorted(self._places[name])

    def count(self, name, step) -> int:
        """Lines that cross.jsonl or rollouts.jsonl has of a step."""
        return len(self._places[name][step])

    def records(self, name, step):
        """The parsed lines of a step, one after the other; unreadable ones are left out."""
        with open(self.folder / name, "rb") as file:
            for at, size in sorted(self._places[name][step].items()):
                file.seek(at)
                if record := parse(file.read(size)):
                    yield record

    def tokenizer(self):
        """The `tokenizers` one of the newest checkpoint, or None."""
        found = sorted(self.folder.glob("step_*/tokenizer.json"))
        if not found:
            return None
        from tokenizers import Tokenizer

        if self._tokenizer[0] != found[-1]:
            self._tokenizer = found[-1], Tokenizer.from_file(str(found[-1]))
        return self._tokenizer[1]


MAX_SIDE = 32  # rows and columns of a posterior that is logged


def posterior_record(step: int, found) -> dict:
    """A line of cross.jsonl: the posterior p(x_j | z_i) = w_j p(z_i | x_j) / p_mix(z_i) of a Measurement of
    nanoragen/collapse/estimator.py.

    posterior: at most MAX_SIDE rows and columns, rows by their own column, 3 digits; own: the column of each row; size: [M, N].
    A row sums to 1 over all N columns, also over those that were cut off.
    """
    M, N = found.sums.shape
    weight = found.sums.new_tensor([found.own.count(j) / M for j in range(N)]).double()
    rows = sorted((j, i) for i, j in enumerate(found.own) if j < MAX_SIDE)[:MAX_SIDE]
    posterior = (found.sums.double() + weight.log()).softmax(dim=1).tolist()
    return {
        "step": step, "size": [M, N], "own": [j for j, _ in rows],
        "posterior": [[round(p, 3) for p in posterior[i][:MAX_SIDE]] for _, i in rows],
    }  # fmt: skip
