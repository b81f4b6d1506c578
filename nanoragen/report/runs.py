"""A run's folder read back: its settings, its log, and as much of its episodes and cross matrices as one wants to look at.

The log of a run that was killed, is still being written, or went through a full disk has torn lines, missing keys and nulls.
None of that is an error here: what cannot be read is left out and counted. `read` goes on from where it stopped, so that a
running trainer pays for the new lines only; of the large files it keeps the places of the lines, not the lines.
"""

import json
import math
import re
from pathlib import Path

STEP = re.compile(rb'\s*\{"step": ?(\d{1,9}),')  # what a trainer's line starts with: no need to parse the rest
MAX_EPISODES = 16  # shown of a step
MAX_TEXT = 20_000  # characters of an episode
FILES = ("metrics.jsonl", "cross.jsonl", "rollouts.jsonl")
HIDDEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff\ud800-\udfff]")


def number(x) -> float | int | None:
    """x if it is a finite number that can be drawn, else None."""
    ok = isinstance(x, (int, float)) and not isinstance(x, bool) and math.isfinite(x) and abs(x) < 1e15
    return x if ok else None


def tidy(x):
    """A float to 6 digits."""
    return float(f"{x:.6g}") if isinstance(x, float) else x


def visible(text) -> str:
    """Any text as one sees it: control characters, bidirectional ones and lone surrogates by their code points."""
    return HIDDEN.sub(lambda c: f"\u27e8U+{ord(c[0]):04X}\u27e9", str(text))


def spread(items, n: int) -> list:
    """The first, the last and evenly chosen ones between: at most n (2 or more) of the items, in order."""
    items = list(items)
    if len(items) <= n:
        return items
    return [items[round(i * (len(items) - 1) / (n - 1))] for i in range(n)]


def parse(line: bytes):
    """The JSON object of a line, or None."""
    try:
        found = json.loads(line.decode("utf-8", errors="replace"))
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def step_of(record) -> int | None:
    step = number(record.get("step")) if record else None
    return int(step) if step is not None and step >= 0 else None


class Run:
    """What is known of the run in `folder`. steps: {step: its metrics}; a step that was logged twice counts as it was last."""

    def __init__(self, folder):
        self.folder = Path(folder)
        self.name = visible(self.folder.resolve().name)
        self._tokenizer = None, None  # path, what it holds
        self._forget()

    def _forget(self):
        self.config, self.steps, self.unreadable, self.torn = {}, {}, dict.fromkeys(FILES, 0), set()
        self._at = dict.fromkeys(FILES, 0)
        self._places = {name: {} for name in FILES[1:]}  # file -> step -> {offset: bytes}

    def read(self) -> "Run":
        """Take in what is new. Returns itself."""
        sizes = {name: (self.folder / name).stat().st_size if (self.folder / name).is_file() else 0 for name in FILES}
        if any(sizes[name] < self._at[name] for name in FILES):
            self._forget()  # a file is shorter than it was: another run's, or one that was cut back
        self.torn = set()
        path = self.folder / "config.json"
        self.config = (parse(path.read_bytes()) if path.is_file() else None) or {}
        for name in FILES:
            for at, line in self._new_lines(name):
                self._take(name, at, line)
        return self

    def _new_lines(self, name):
        """(offset, line) of what was added; a last line without its end comes too, and again when there is more of it."""
        if not (self.folder / name).is_file():
            return
        with open(self.folder / name, "rb") as file:
            file.seek(self._at[name])
            for line in file:
                at = self._at[name]
                if line.endswith(b"\n"):
                    self._at[name] += len(line)
                if line.strip():
                    yield at, line

    def _take(self, name, at, line):
        start = STEP.match(line) if name != "metrics.jsonl" and line.endswith(b"\n") else None
        record = None if start else parse(line)
        step = int(start[1]) if start else step_of(record)
        if step is None:
            if line.endswith(b"\n"):
                self.unreadable[name] += 1
            else:
                self.torn.add(name)
        elif name == "metrics.jsonl":
            self.steps[step] = {k: bool(v) if k.startswith("early_stopped/") else number(v) for k, v in record.items()}
        else:
            self._places[name].setdefault(step, {})[at] = len(line)

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

    def records(self, name, step):
        """The parsed lines of a step, one after the other; unreadable ones are left out."""
        with open(self.folder / name, "rb") as file:
            for at, size in sorted(self._places[name][step].items()):
                file.seek(at)
                record = parse(file.read(size))
                if record:
                    yield record

    def count(self, step) -> int:
        return len(self._places["rollouts.jsonl"].get(step, ()))

    def tokenizer(self):
        """The `tokenizers` one of the newest checkpoint, or None."""
        found = sorted(self.folder.glob("step_*/tokenizer.json"))
        if not found:
            return None
        from tokenizers import Tokenizer

        if self._tokenizer[0] != found[-1]:
            self._tokenizer = found[-1], Tokenizer.from_file(str(found[-1]))
        return self._tokenizer[1]


# -- its episodes, as the report's viewer shows them ---------------------------------------------------------------------


def episodes(run: Run, steps, budget: int) -> list[dict]:
    """Episodes of the steps for the page: the first MAX_EPISODES of each, fewer where they are long (budget: bytes in all)."""
    out = []
    for step in steps:
        left = budget // len(steps)
        for record in run.records("rollouts.jsonl", step):
            found = episode(step, record, run)
            left -= len(json.dumps(found))
            if left < 0 and out and out[-1]["step"] == step:
                break
            out.append(found)
            if sum(e["step"] == step for e in out[-MAX_EPISODES:]) == MAX_EPISODES:
                break
    return out


def episode(step, record, run) -> dict:
    """A line of rollouts.jsonl for the page. parts: what was read (prompt) and sampled (reasoning, answer), turn by turn."""
    keys = ("env", "seed", "group", "success", "reward", "advantage", "kept", "terminated", "truncated")
    turns = [t for t in as_list(record.get("turns")) if isinstance(t, dict)][:100]
    found = {k: v if isinstance(v, bool) else n if (n := number(v)) is not None else visible(v)[:60] for k in keys
             if (v := record.get(k)) is not None}  # fmt: skip
    shown = [
        {
            "reward": number(t.get("reward")), "advantage": number(t.get("advantage")), "parsed": t.get("parsed") is not False,
            "actions": [clip(visible(a), 200) for a in as_list(t.get("actions"))[:20]],
        }
        for t in turns
    ]  # fmt: skip
    return {"step": step, **found, "turns": shown, **(by_token(record, turns, run) or by_message(record, turns))}


def by_message(record, turns) -> dict:
    """The parts of an episode from its messages; the reply is cut where its reasoning ends."""
    parts, n = [], 0
    for message in as_list(record.get("messages")):
        role, text = (message.get("role"), message.get("content")) if isinstance(message, dict) else (None, message)
        if role != "assistant" or n >= len(turns):
            parts.append([n, "prompt", f"{role}: {text}"])
            continue
        reply = str(turns[n].get("reply", text))
        reasoning, tag, answer = reply.partition("</think>")
        parts += [[n, "prompt", "<think>"], [n, "reasoning", reasoning]] if tag else []
        parts.append([n, "answer", tag + answer if tag else reply])
        n += 1
    left = MAX_TEXT
    for part in parts:
        part[2] = clip(visible(part[2]), left)
        left = max(0, left - len(part[2]))
    return {"parts": [p for p in parts if p[2]]}


def by_token(record, turns, run) -> dict | None:
    """The same from the ids, token by token, where log-probs or entropies of the sampled ids were recorded.

    A part is [turn, kind, [text of each token], {"logprobs": [...], "entropies": [...]}], or as in by_message for a prompt.
    None without such values or without a tokenizer (the newest step_*/tokenizer.json of the run).
    """
    ids, mask = as_list(record.get("ids")), as_list(record.get("mask"))
    sampled = [i for i, m in enumerate(mask[: len(ids)]) if m]
    values = {}
    for key in ("logprobs", "entropies"):
        found = as_list(record.get(key))
        if found and len(found) in (len(sampled), len(ids)):
            values[key] = dict(zip(sampled if len(found) == len(sampled) else range(len(ids)), map(number, found)))
    if not values or not all(type(i) is int and i >= 0 for i in ids) or not (tokenizer := run.tokenizer()):
        return None
    spans = [(number(t.get("start")) or 0, number(t.get("end")) or 0, number(t.get("think_end")) or 0) for t in turns]
    decode = lambda some: visible(tokenizer.decode(some, skip_special_tokens=False))
    parts, left, at, turn = [], MAX_TEXT, 0, 0
    while at < len(ids) and left > 0:
        while turn < len(spans) and at >= spans[turn][1]:
            turn += 1
        start, end, think_end = spans[turn] if turn < len(spans) else (len(ids),) * 3
        stop = int(min(len(ids), next((edge for edge in (start, think_end, end) if edge > at), len(ids))))
        if at < start:
            parts.append([turn, "prompt", clip(decode(ids[at:stop]), left)])
        else:
            tokens = pieces(ids[at:stop], decode)
            parts.append([turn, "reasoning" if at < think_end else "answer", tokens,
                          {k: [tidy(v.get(i)) for i in range(at, stop)] for k, v in values.items()}])  # fmt: skip
        left -= sum(map(len, parts[-1][2])) + 8 * (stop - at)
        at = stop
    return {"parts": parts, "values": list(values)}


def pieces(ids, decode) -> list[str]:
    """The text of each id. Where several ids make one character, the last of them has it and the others are empty."""
    out, open_ids = [], []
    for n, i in enumerate(ids):
        open_ids.append(i)
        text = decode(open_ids)
        done = not text.endswith("\ufffd") or n == len(ids) - 1 or len(open_ids) == 4  # a character is at most 4 bytes
        out.append(text if done else "")
        open_ids = [] if done else open_ids
    return out


def as_list(x) -> list:
    return x if isinstance(x, list) else []


def clip(text, n) -> str:
    return text if len(text) <= n else f"{text[:n]} \u2026 ({len(text) - n} more characters)"
