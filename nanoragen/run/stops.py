"""When a run ends before its last step: it is asked to, there is nothing left to learn from, or it cannot go on.

It is asked by Ctrl-C, SIGTERM and SIGHUP, or by a reader of its output that ends (`| head`). Then, or with nothing to learn, it
loses nothing: the step is finished and saved, and `--resume` goes on from there.
Out of memory or of disk, it says in one line what to change, and the newest whole checkpoint stays as it is.
Left out: stopping in the middle of a step, which would have nothing whole to save.
"""

import contextlib
import errno
import os
import shlex
import signal
import sys
import threading

from nanoragen.run.checkpoint import CannotSave, is_complete
from nanoragen.run.faults import Leave
from nanoragen.run.memory import out_of_memory

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
    """`with Stop() as stop:` notes the first Ctrl-C, SIGTERM or SIGHUP in stop.asked (its name, else None).

    A second leaves at once: SystemExit(128 + its number), and stop.left is its name. A reader that closes standard output
    (`| head`) asks too, as SIGPIPE; what is printed then goes nowhere.
    """

    def __enter__(self):
        self.asked, self.left, self.old = None, None, {}
        if threading.current_thread() is threading.main_thread():  # Python allows signal handlers nowhere else
            self.old = {s: signal.signal(s, self._ask) for s in _signals()}
        self.streams = sys.stdout, sys.stderr
        sys.stdout, sys.stderr = _Unbroken(sys.stdout, self._unread), _Unbroken(sys.stderr, lambda: None)
        return self

    def _unread(self):
        if not self.asked:
            self.asked = "SIGPIPE"
            _tell("nobody reads the output any more: this step is finished and saved, then the run ends; --resume goes on")

    def _ask(self, number, frame):
        if self.asked:
            self.left = signal.Signals(number).name
            raise Leave(128 + number)
        self.asked = signal.Signals(number).name
        _tell(f"{self.asked}: this step is finished and saved, then the run ends; a second one ends it at once")

    def __exit__(self, *error):
        sys.stdout.flush()
        sys.stdout, sys.stderr = self.streams
        for s, handler in self.old.items():
            signal.signal(s, handler)


class _Unbroken:
    """A stream whose reader may go away: that is told once, and the rest goes nowhere. Each line is sent as it is written."""

    def __init__(self, file, broken):
        self.file, self.broken = file, broken

    def __getattr__(self, name):
        return getattr(self.file, name)

    def write(self, text):
        self._try(self.file.write, text)
        if "\n" in text:
            self.flush()
        return len(text)

    def flush(self):
        self._try(self.file.flush)

    def _try(self, act, *args):
        try:
            act(*args)
        except OSError as e:
            if e.errno not in (errno.EPIPE, errno.EIO):  # the reader has ended; the terminal is closed
                raise
            with contextlib.suppress(OSError):  # also what is still in its buffer
                os.dup2(os.open(os.devnull, os.O_WRONLY), self.file.fileno())
            self.broken()


def _signals() -> list:
    """Those that ask a run to end. SIGHUP (the terminal closes) is one, but not under nohup."""
    hangup = getattr(signal, "SIGHUP", None)  # not on Windows
    heard = hangup is not None and signal.getsignal(hangup) is not signal.SIG_IGN
    return [signal.SIGINT, signal.SIGTERM] + [hangup] * heard


def leave_on_signals():
    """Ctrl-C, SIGTERM and SIGHUP end the process with one line: for programs that lose nothing by it, and while others still load."""

    def leave(number, frame):
        _tell(f"ended by {signal.Signals(number).name}; what is saved stays as it is")
        os._exit(128 + number)  # an exception could be caught by whatever is being imported

    for number in _signals():
        signal.signal(number, leave)


def _tell(text: str):
    with contextlib.suppress(OSError):  # the terminal may be closed
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
