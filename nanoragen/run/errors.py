"""Errors that end a run and that a setting cures: out of memory, out of disk, numbers that are none. One line says what to change.

The newest whole checkpoint stays as it is.
"""

import errno
import shlex

from nanoragen.run.checkpoint import CannotSave, is_complete
from nanoragen.run.memory import out_of_memory


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
