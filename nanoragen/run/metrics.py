"""What a run leaves behind and shows: metrics.jsonl, rollouts.jsonl, one console line a step, and why nothing is learned.

Names are TRL's for what every trainer has (`reward`, `kl`, `grad_norm`, ...) and RAGEN's for its own ideas (`rollout/...`,
`collapse_first_turn_sample/...`, `<env>/success`). JSON has no NaN and no infinity: such values are written as null.

A disk that is full or gone costs the record, never the training: the first failed write of a file warns, and each later
write is tried again. Left out: images, tables, remote storage; `Log(trackers="wandb")` hands the numbers to who has those.
"""

import importlib.util
import json
import math
import os
import sys
import warnings
from pathlib import Path

from nanoragen.run.checkpoint import write_whole

FILES = ("metrics.jsonl", "rollouts.jsonl", "cross.jsonl", "errors.jsonl")  # a run's records, a line each a step or more
TRACKERS = ("wandb", "tensorboard", "trackio")
Z95 = 1.959963984540054  # two-sided 95% quantile of the normal distribution


# -- files -------------------------------------------------------------------------------------------------------------


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


# -- figures of episodes -----------------------------------------------------------------------------------------------


def wilson(successes: float, n: float) -> tuple[float, float]:
    """95% interval of a proportion (Wilson 1927): right for few episodes too, and never outside 0 to 1."""
    if n <= 0:
        return 0.0, 1.0
    p, z2 = successes / n, Z95 * Z95
    middle = (p + z2 / (2 * n)) / (1 + z2 / n)
    half = Z95 / (1 + z2 / n) * math.sqrt(p * (1 - p) / n + z2 / (4 * n * n))
    return max(0.0, min(p, middle - half)), min(1.0, max(p, middle + half))  # rounding must not exclude p


def rollout_metrics(episodes, env: str) -> dict:
    """The figures of a step's episodes, before any filter.

    num_tokens: all ids of all episodes of the step (prompts, observations and replies); completions/mean_length: sampled
    ids of an episode, max_length: of the longest reply, clipped_ratio: replies that were cut at max_tokens; reward_std: over all
    episodes, sample (n-1).
    """
    rewards = [e.reward for e in episodes]
    turns = [t for e in episodes for t in e.turns]
    mean = _mean(rewards)
    spread = math.sqrt(sum((r - mean) ** 2 for r in rewards) / (len(rewards) - 1)) if len(rewards) > 1 else 0.0
    return {
        "reward": mean,
        "reward_std": spread,
        f"{env}/success": _mean([e.success for e in episodes]),
        "num_tokens": sum(len(e.ids) for e in episodes),
        "completions/mean_length": _mean([e.num_tokens for e in episodes]),
        "completions/max_length": max((t.end - t.start for t in turns), default=0),
        "completions/clipped_ratio": _mean([t.cut for t in turns]),
        "rollout/turns": _mean([len(e.turns) for e in episodes]),
        "rollout/actions": _mean([sum(len(t.actions) for t in e.turns) for e in episodes]),
        "rollout/parse_rate": _mean([t.parsed for t in turns]),
        "rollout/truncated_by_turns": _mean([e.truncated == "turns" for e in episodes]),
        "rollout/truncated_by_context": _mean([e.truncated == "context" for e in episodes]),
        "valid_thinking_rate": _mean([t.think_end > t.start for t in turns]),
    }


def process_metrics() -> dict:
    """What this process holds now, so that a leak shows in a long run's log: resident memory in MiB, and open handles.

    From /proc (Linux). Elsewhere memory is the peak so far (getrusage), handles are counted where there is a /dev/fd, and what
    the system does not tell is left out.
    """
    found = {}
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        found["memory/rss_mb"] = pages * os.sysconf("SC_PAGE_SIZE") / 2**20
    except OSError:
        if importlib.util.find_spec("resource"):  # not on Windows
            import resource

            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # KiB, but bytes on macOS
            found["memory/rss_mb"] = peak / (2**20 if sys.platform == "darwin" else 2**10)
    if os.path.isdir("/dev/fd"):
        found["memory/open_files"] = len(os.listdir("/dev/fd")) - 1  # without the one that lists them
    return found


def _mean(values) -> float:
    values = list(values)
    return sum(values) / len(values) if values else 0.0


# -- words for the runner ----------------------------------------------------------------------------------------------


def console_line(m: dict) -> str:
    """One step on one line; what was not measured is left out."""
    sample = "collapse_first_turn_sample/"
    parts = [f"step {m['step']:>4}"]

    def add(key, text):
        value = m.get(key)
        if value is not None:
            parts.append(text(value))

    def of(key):
        return m[key] if m.get(key) is not None else math.nan

    success = next((k for k in m if k.endswith("/success") and not k.startswith("eval/")), "success")
    add("reward", lambda v: f"reward {v:6.2f}")
    add(success, lambda v: f"success {v:6.1%}")
    add("rollout/in_group_reward_std", lambda v: f"in-group std {v:5.2f}")
    add("rollout/kept_groups", lambda v: f"kept {v}/{m['rollout/groups']}" if m.get("rollout/groups") else f"kept {v}")
    add(sample + "conditional_entropy_est", lambda v: f"H(Z|X) {v:.2f}")
    add(sample + "mi_seq_estimate", lambda v: f"MI {v:.2f} of {of(sample + 'mi_upper_bound'):.2f}")
    add(
        sample + "retrieval_accuracy",
        lambda v: f"retrieval {v:4.0%} (chance {of(sample + 'retrieval_chance_level'):.0%})",
    )
    add("tokens_per_second", lambda v: f"{v:,.0f} tokens/s")
    add("regime", str)
    add("eval/" + success, lambda v: f"held-out success {v:.1%}")
    if m.get("rollout/faults"):
        parts.append(f"{m['rollout/faults']} episodes lost to environment errors (errors.jsonl)")
    if m.get("skipped"):
        parts.append("no update: every group was filtered out")
    if m.get("nonfinite_updates"):
        parts.append(f"updates left out: {m['nonfinite_updates']:.0f}, not finite: {m.get('nonfinite', 'loss or gradient')}")
    if m.get("critic/nonfinite_updates"):
        parts.append(f"updates of the critic left out: {m['critic/nonfinite_updates']:.0f}, not finite")
    return " | ".join(parts)


def diagnosis(history: list[dict], before: dict, after: dict, env: str) -> list[str]:
    """Why nothing was learned, in plain words; an empty list when held-out success rose beyond chance.

    history: the steps' metrics. before, after: what `evaluate` returned. The last half of the run is looked at, and the
    signals in the order in which each needs the one before: replies that parse, groups that differ, groups that are
    kept, updates that happen, and only then a reward that does not move.
    """
    if after["success_low"] > before["success_high"]:
        return []
    fell = after["success_high"] < before["success_low"]
    late = history[len(history) // 2 :]

    def mean(key, default=0.0):
        values = [m[key] for m in late if m.get(key) is not None]
        return _mean(values) if values else default

    parse, flat, std = (
        mean("rollout/parse_rate", 1.0),
        mean("rollout/zero_variance_ratio"),
        mean("rollout/in_group_reward_std"),
    )
    skipped, nonfinite = mean("skipped"), mean("nonfinite_updates")
    success, clipped = mean(f"{env}/success"), mean("rollout/truncated_by_context")
    out = []
    if parse < 0.7 and mean("rollout/turns", 1.0) > 0:  # without any turn, all ran out of context
        out.append(
            f"Replies do not parse: only {parse:.0%} of the turns are <think>...</think><answer>...</answer>. "
            + ("S" if clipped > 0.3 else "Raise --max_tokens if they are cut, or s")
            + "tart from a model that knows the format."
        )
    if clipped > 0.3:
        out.append(f"{clipped:.0%} of the episodes ran out of context. Lower --max_turns or --max_tokens, or raise --max_context.")
    if flat > 0.7:
        if success < 0.1:
            why = "almost all fail, so make it easier (--env_options) or start from a better model"
        elif success > 0.9:
            why = "almost all succeed, so make it harder (--env_options)"
        else:
            why = "episodes of a group end alike, so raise --temperature or --group_size"
        out.append(
            f"No variance in groups: in {flat:.0%} of them all episodes earn the same, so there is no task gradient ({why})."
        )
    if skipped > 0.3:
        out.append(
            f"Everything is filtered: {skipped:.0%} of the steps kept no group and updated nothing. "
            + ("The groups have no variance to keep." if flat > 0.7 else "Loosen --filter_value, or use --filter none.")
        )
    if nonfinite > 0:
        out.append("Some updates were not finite and were left out. Lower --lr.")
    if not out and fell:
        out.append("The signals are there, but success fell: the steps are too large. Lower --lr, or add --beta 0.01.")
    if not out:
        rewards = [m["reward"] for m in history if m.get("reward") is not None]
        few = max(1, min(3, len(rewards) // 2))  # no step is both
        first, last = _mean(rewards[:few]), _mean(rewards[-few:])
        out.append(
            f"The signals are there (in-group reward std {std:.2f}, {parse:.0%} of replies parse, {1 - flat:.0%} of groups vary), "
            f"but the reward is flat ({first:.2f} in the first steps, {last:.2f} in the last). "
            + (
                "A few steps prove little: raise --steps."
                if len(history) < 20
                else "Try another --lr, more --steps, or more --groups."
            )
        )
    head = "Held-out success fell." if fell else "Nothing was learned beyond chance (the intervals before and after overlap)."
    return [head, *out]


def interval(result: dict) -> str:
    return f"{result['success']:.1%} (95%: {result['success_low']:.1%} to {result['success_high']:.1%})"


def scores(prefix: str, result: dict) -> dict:
    """What of an evaluation goes into the log."""
    return {f"{prefix}/{k}": result[k] for k in ("success", "success_low", "success_high", "episodes")}
