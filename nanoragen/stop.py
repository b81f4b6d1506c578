"""When a run ends before its last step: it is asked to (Ctrl-C, SIGTERM), or there is nothing left to learn from.

Ending early is never losing: the step is finished, a checkpoint is saved, and `--resume` goes on from there.
Left out: stopping in the middle of a step, which would have nothing whole to save.
"""

import signal
import threading

EARLY = ("variance", "filtered", "success")
FIRST, LAST, LOW = 10, 10, 0.1  # in-group reward std: under 10% of the mean of the first 10 steps, for 10 steps running
EMPTY = 5  # steps running whose every group was filtered out
NONFINITE = 3  # steps running with an update that was not finite; cannot be switched off
EVALUATIONS, HOPELESS = 5, 0.01  # evaluations running with a success under 1%


class Stop:
    """`with Stop() as stop:` notes the first Ctrl-C or SIGTERM in stop.asked (its name, else None); a second leaves at once."""

    def __enter__(self):
        self.asked, self.old = None, {}
        if threading.current_thread() is threading.main_thread():  # Python allows signal handlers nowhere else
            self.old = {s: signal.signal(s, self._ask) for s in (signal.SIGINT, signal.SIGTERM)}
        return self

    def _ask(self, number, frame):
        if self.asked:
            raise SystemExit(128 + number)
        self.asked = signal.Signals(number).name

    def __exit__(self, *error):
        for s, handler in self.old.items():
            signal.signal(s, handler)


def check(names: str) -> list[str]:
    """The names in "variance,filtered". ValueError for one that does not exist."""
    found = [n.strip() for n in names.split(",") if n.strip() and n.strip() != "none"]
    for name in found:
        if name not in EARLY:
            raise ValueError(f"early_stop: there is no {name!r}; valid: {', '.join(EARLY)}, or none")
    return found


def early_stop(history: list[dict], env: str, names: str) -> tuple[str, str] | None:
    """(name, reason in words) of an early stop (RAGEN-2's) that is due after these steps, else None.

    history: the lines of metrics.jsonl, so that a resumed run stops where the uninterrupted one would have.
    """
    wanted = check(names)
    if "variance" in wanted and len(history) >= FIRST + LAST:
        std = [line["rollout/in_group_reward_std"] for line in history]
        first = sum(std[:FIRST]) / FIRST
        if all(s < LOW * first for s in std[-LAST:]):
            return "variance", (
                f"episodes of a group earn the same: in-group reward std under {LOW * first:.3g}, 10% of its start, for {LAST} "
                "steps; what is left of the gradient is noise"
            )
    if "filtered" in wanted and len(history) >= EMPTY and all(line["skipped"] for line in history[-EMPTY:]):
        return "filtered", f"every group was filtered out in {EMPTY} steps running; nothing is being trained"
    if len(history) >= NONFINITE and all(line.get("nonfinite_updates") for line in history[-NONFINITE:]):
        return "nonfinite", (
            f"loss or gradient was not finite in {NONFINITE} steps running; those updates were left out. Lower --lr or "
            "--max_grad_norm, or try --dtype float32"
        )
    found = [line[f"eval/{env}/success"] for line in history if line.get(f"eval/{env}/success") is not None]
    if "success" in wanted and len(found) >= EVALUATIONS and all(s < HOPELESS for s in found[-EVALUATIONS:]):
        return "success", f"held-out success under {HOPELESS:.0%} in {EVALUATIONS} evaluations running"
    return None
