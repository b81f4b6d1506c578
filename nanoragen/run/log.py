"""What a run leaves behind: config.json, run.json, metrics.jsonl, rollouts.jsonl, cross.jsonl, errors.jsonl, and numbers for trackers.

JSON has no NaN and no infinity: such values are written as null. A disk that is full or gone costs the record, never the training:
the first failed write of a file warns, and each later write is tried again. Left out: images, tables, remote storage;
`Log(trackers="wandb")` hands the numbers to who has those.
"""

import importlib.util
import json
import math
import warnings
from pathlib import Path

from nanoragen.run.files import write_whole

TRACKERS = ("wandb", "tensorboard", "trackio")


def dumps(record) -> str:
    """One line of JSON; floats that are no finite number become null."""
    return json.dumps(_finite(record), ensure_ascii=False, allow_nan=False)


def _finite(x):
    if isinstance(x, float):
        return x if math.isfinite(x) else None
    if isinstance(x, dict):
        return {k: _finite(v) for k, v in x.items()}
    return [_finite(v) for v in x] if isinstance(x, (list, tuple)) else x


class Lines:
    """A file of JSON lines that is only ever appended to."""

    def __init__(self, path):
        self.path, self.torn, self.warned = Path(path), False, False

    def write(self, records):
        try:
            with open(self.path, "a", encoding="utf-8", errors="backslashreplace") as file:  # half a character: JSON's own escape
                file.write(("\n" if self.torn else "") + "".join(dumps(r) + "\n" for r in records))
            self.torn = False
        except OSError as e:
            self.torn = self.path.is_file()  # half a line may be there: the next record begins a new one
            if not self.warned:
                warnings.warn(f"{self.path} cannot be written ({e.strerror}); the run goes on without", stacklevel=3)
            self.warned = True


def episode_record(episode, **more) -> dict:
    """An episode for a JSON line: ids[i] was sampled where mask[i] is 1; turns say where each reply lies in ids.

    logprobs, entropies: of each sampled id in order, nats, 3 digits; not there if sampling was not watched.
    """
    turns = ("start", "end", "think_end", "reply", "actions", "parsed", "reward", "advantage")
    return {
        "env": episode.env, "seed": episode.seed, "group": episode.group, "success": episode.success,
        "reward": episode.reward, "terminated": episode.terminated, "truncated": episode.truncated, **more,
        "messages": episode.messages, "turns": [{k: getattr(t, k) for k in turns} for t in episode.turns],
        "ids": episode.ids, "mask": episode.mask,
        **{k: [round(x, 3) + 0.0 for x in v] for k in ("logprobs", "entropies") if (v := getattr(episode, k))},
    }  # fmt: skip


class Log:
    """The records of one run: folder/config.json, metrics.jsonl, rollouts.jsonl, and the trackers that were asked for."""

    def __init__(self, folder, config: dict, *, trackers: str = ""):
        self.folder = Path(folder)
        names = check_trackers(trackers)
        self.folder.mkdir(parents=True, exist_ok=True)
        write_whole(self.folder / "config.json", json.dumps(config, indent=1, ensure_ascii=False) + "\n")
        self._metrics, self._rollouts = Lines(self.folder / "metrics.jsonl"), Lines(self.folder / "rollouts.jsonl")
        self._errors = Lines(self.folder / "errors.jsonl")
        self.trackers = [_start(name, self.folder, config) for name in names]

    def step(self, metrics: dict):
        """One line of metrics.jsonl; `metrics` has "step"."""
        self._metrics.write([metrics])
        numbers = {k: v for k, v in metrics.items() if isinstance(v, (int, float)) and k != "step"}
        for log, _ in self.trackers:
            log(numbers, metrics["step"])

    def rollouts(self, step: int, episodes, advantages, kept):
        """One line of rollouts.jsonl for each episode. advantages, kept: one each an episode."""
        rows = zip(episodes, advantages, kept)
        self._rollouts.write([{"step": step, **episode_record(e, advantage=a, kept=bool(k))} for e, a, k in rows])

    def errors(self, step: int, episodes):
        """One line of errors.jsonl for each episode whose environment failed."""
        failed = [e for e in episodes if e.error]
        if failed:
            self._errors.write([{"step": step, **episode_record(e), "error": e.error} for e in failed])

    def close(self):
        for _, finish in self.trackers:
            finish()


def check_trackers(text: str) -> list[str]:
    """The names in "wandb,tensorboard". ValueError for one that does not exist or is not installed."""
    names = [n.strip() for n in text.split(",") if n.strip()]
    for name in names:
        if name not in TRACKERS:
            raise ValueError(f"log: there is no {name!r}; valid: {', '.join(TRACKERS)}")
        if importlib.util.find_spec(name) is None:
            raise ValueError(f"log: {name} is not installed; valid: pip install {name}, or leave it out")
    return names


def _start(name: str, folder: Path, config: dict):
    """(log(numbers, step), finish()) of a tracker."""
    if name == "tensorboard":
        from torch.utils.tensorboard import SummaryWriter

        writer = SummaryWriter(str(folder))
        return lambda numbers, step: [writer.add_scalar(k, v, step) for k, v in numbers.items()], writer.close
    tracker = importlib.import_module(name)  # wandb, and trackio, which has the same calls
    tracker.init(project="nanoragen", name=folder.name, config=config)
    return lambda numbers, step: tracker.log(numbers, step=step), tracker.finish
