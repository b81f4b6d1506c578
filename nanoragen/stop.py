"""When a run ends before its last step: it is asked to (Ctrl-C, SIGTERM), there is nothing left to learn from, or it cannot go on.

Asked to, or with nothing to learn, it loses nothing: the step is finished and saved, and `--resume` goes on from there.
Out of memory or of disk, it says in one line what to change, and the newest whole checkpoint stays as it is.
Left out: stopping in the middle of a step, which would have nothing whole to save.
"""

import errno
import os
import shlex
import signal
import threading

from nanoragen.checkpoint import CannotSave, is_complete

EARLY = ("variance", "filtered", "success")
FIRST, LAST, LOW = 10, 10, 0.1  # in-group reward std: at most 10% of the mean of the first 10 steps, for 10 steps running
EMPTY = 5  # steps running whose every group was filtered out
NONFINITE = 3  # steps running with an update that was not finite; cannot be switched off
EVALUATIONS, HOPELESS = 5, 0.01  # evaluations running with a success under 1%
WHY = {
    "variance": f"episodes of a group earn the same: in-group reward std at most {LOW:.0%} of its start for {LAST} steps; what is left "
    "of the gradient is noise",
    "filtered": f"every group was filtered out in {EMPTY} steps running; nothing is being trained",
    "nonfinite": f"not finite in {NONFINITE} steps running: loss or gradient; those updates were left out. Lower --lr or "
    "--max_grad_norm, or try --dtype float32",
    "success": f"held-out success under {HOPELESS:.0%} in {EVALUATIONS} evaluations running",
}


class Stop:
    """`with Stop() as stop:` notes the first Ctrl-C or SIGTERM in stop.asked (its name, else None).

    A second leaves at once: SystemExit(128 + its number), and stop.left is its name.
    """

    def __enter__(self):
        self.asked, self.left, self.old = None, None, {}
        if threading.current_thread() is threading.main_thread():  # Python allows signal handlers nowhere else
            self.old = {s: signal.signal(s, self._ask) for s in (signal.SIGINT, signal.SIGTERM)}
        return self

    def _ask(self, number, frame):
        if self.asked:
            self.left = signal.Signals(number).name
            raise SystemExit(128 + number)
        self.asked = signal.Signals(number).name
        _tell(f"{self.asked}: this step is finished and saved, then the run ends; a second one ends it at once")

    def __exit__(self, *error):
        for s, handler in self.old.items():
            signal.signal(s, handler)


def leave_on_signals():
    """Ctrl-C and SIGTERM end the process with one line: for programs that lose nothing by it, and while others still load."""

    def leave(number, frame):
        _tell(f"ended by {signal.Signals(number).name}; what is saved stays as it is")
        os._exit(128 + number)  # an exception could be caught by whatever is being imported

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, leave)


def _tell(text: str):
    os.write(2, f"\n{text}\n".encode())  # print() within a signal handler may meet itself in mid-print


class CannotGoOn(RuntimeError):
    """A run was ended by an error that `reason` has words for."""


def reason(error: Exception, phase: str, c) -> str | None:
    """What happened in which phase of a run, and what to change, in one line; None for an error that no setting cures.

    phase: as on the progress bar, "" before the first; c: the settings.
    """
    if out_of_memory(error):
        advice = next(advice for start, advice in MEMORY if phase.startswith(start)).format(c=c)
        return f"out of memory in {phase or 'the start'} ({' '.join(str(error).split())[:100]}); {advice}"
    if isinstance(error, FloatingPointError):
        cure = "take another --model" if phase == "evaluation (before)" else f"updates were too large: lower --lr (now {c.lr:g})"
        return f"{phase}: {error}; {cure}"
    if isinstance(error, CannotSave):
        return f"out: {error}; make room there, or lower --keep (now {c.keep})"
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO):
        where = f"{error.filename or 'a file'} cannot be written in {phase or 'the start'}"
        return f"out: {where} ({error.strerror}); make room on that disk"
    return None


ROLLOUT = "lower --rollout_batch (now {c.rollout_batch}; 0: all at a time), else --groups or --max_tokens"
MEMORY = (  # start of a phase's name, what to lower there; the first that fits
    ("turn", ROLLOUT),
    ("rollout", ROLLOUT),
    ("evaluation", ROLLOUT),
    ("diagnosis", "lower --max_tokens, or do without: --mi_every 0"),
    ("save", "the machine needs more memory"),
    (
        "",
        "lower --micro_batch (now {c.micro_batch}), else --max_tokens; or take a smaller --model",
    ),  # score, update, reference, critic
)


def how_to_go_on(out) -> str:
    """What there is to resume of the run in a folder."""
    if any(is_complete(folder) for folder in out.glob("step_*[0-9]")):
        return f"what was saved is whole; go on with: {resume_command(out)}"
    return "no checkpoint was saved yet"


def resume_command(out) -> str:
    return f"python train.py --resume {shlex.quote(str(out))}"


def out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out: of a GPU (torch.OutOfMemoryError is a RuntimeError), of torch's CPU allocator, or of Python."""
    said = str(error)
    words = ("out of memory", "can't allocate memory", "not enough memory")
    return isinstance(error, MemoryError) or isinstance(error, RuntimeError) and any(w in said for w in words)


def check(names: str) -> list[str]:
    """The names in "variance,filtered". ValueError for one that does not exist."""
    found = [n.strip() for n in names.split(",") if n.strip() and n.strip() != "none"]
    for name in found:
        if name not in EARLY:
            raise ValueError(f"early_stop: there is no {name!r}; valid: {', '.join(EARLY)}, or none")
    return found


def early_stop(history: list[dict], env: str, names: str) -> tuple[str, str] | None:
    """(name, reason in words) of an early stop (RAGEN-2's) that is due after these steps, else None.

    history: the lines of metrics.jsonl, so that a resumed run stops where the uninterrupted one would have. A line of which a
    bit has flipped may lack a key; it does not count then.
    """
    wanted = check(names)
    std = [line["rollout/in_group_reward_std"] for line in history if line.get("rollout/in_group_reward_std") is not None]
    if "variance" in wanted and len(std) >= FIRST + LAST:
        first = sum(std[:FIRST]) / FIRST
        if first > 0 and all(s <= LOW * first for s in std[-LAST:]):
            return "variance", WHY["variance"]
    if "filtered" in wanted and len(history) >= EMPTY and all(line.get("skipped") for line in history[-EMPTY:]):
        return "filtered", WHY["filtered"]
    if len(history) >= NONFINITE and all(line.get("nonfinite_updates") for line in history[-NONFINITE:]):
        return "nonfinite", WHY["nonfinite"].replace("loss or gradient", str(history[-1].get("nonfinite", "loss or gradient")))
    found = [line[f"eval/{env}/success"] for line in history if line.get(f"eval/{env}/success") is not None]
    if "success" in wanted and len(found) >= EVALUATIONS and all(s < HOPELESS for s in found[-EVALUATIONS:]):
        return "success", WHY["success"]
    return None
