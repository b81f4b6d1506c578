"""Figures of a step's episodes and of the process, and the interval of a proportion.

Names are TRL's for what every trainer has (`reward`, `kl`, `grad_norm`, ...) and RAGEN's for its own ideas (`rollout/...`,
`collapse_first_turn_sample/...`, `<env>/success`).
"""

import importlib.util
import math
import os
import sys
from pathlib import Path

Z95 = 1.959963984540054  # two-sided 95% quantile of the normal distribution


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
    mean = mean_of(rewards)
    spread = math.sqrt(sum((r - mean) ** 2 for r in rewards) / (len(rewards) - 1)) if len(rewards) > 1 else 0.0
    return {
        "reward": mean,
        "reward_std": spread,
        f"{env}/success": mean_of([e.success for e in episodes]),
        "num_tokens": sum(len(e.ids) for e in episodes),
        "completions/mean_length": mean_of([e.num_tokens for e in episodes]),
        "completions/max_length": max((t.end - t.start for t in turns), default=0),
        "completions/clipped_ratio": mean_of([t.cut for t in turns]),
        "rollout/turns": mean_of([len(e.turns) for e in episodes]),
        "rollout/actions": mean_of([sum(len(t.actions) for t in e.turns) for e in episodes]),
        "rollout/parse_rate": mean_of([t.parsed for t in turns]),
        "rollout/truncated_by_turns": mean_of([e.truncated == "turns" for e in episodes]),
        "rollout/truncated_by_context": mean_of([e.truncated == "context" for e in episodes]),
        "valid_thinking_rate": mean_of([t.think_end > t.start for t in turns]),
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


def mean_of(values) -> float:
    values = list(values)
    return sum(values) / len(values) if values else 0.0


def scores(prefix: str, result: dict) -> dict:
    """What of an evaluation goes into the log."""
    return {f"{prefix}/{k}": result[k] for k in ("success", "success_low", "success_high", "episodes")}
