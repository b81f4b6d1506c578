"""The folder of a run: a new one is claimed, an old one is resumed, and no two processes write in the same one.

A folder is locked for as long as its process lives; the system frees the lock however the process ends.
"""

import json
import os
import re
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

from nanoragen.run import cli
from nanoragen.run.checkpoint import newest
from nanoragen.run.files import write_whole
from nanoragen.run.settings import file_name


def run_folder(c) -> Path:
    """Make the folder of a run of these settings. An explicit --out that already holds a run is refused; the default name is numbered.

    A folder is taken when there is a log or a checkpoint in it, or another process is about to make one. Settings alone are of a
    run that never finished a step: they are written over.
    """
    name = f"{file_name(c.env)}-{c.algo}-{c.seed}"
    out = Path(c.out or f"runs/{name}")
    number = 1
    try:
        while not claim_folder(out):
            if c.out:
                raise ValueError(f"out: {out} already holds a run; valid: a new folder")
            number += 1
            out = Path(f"runs/{name}.{number}")
        write_whole(out / "config.json", json.dumps(asdict(c), indent=1, ensure_ascii=False) + "\n")
    except OSError as e:
        raise ValueError(f"out: {out} cannot be written ({e.strerror}); valid: a folder that can") from e
    return out


_LOCKS = []  # the folders that this process holds: open files, each with a lock that the system frees however the process ends


def claim_folder(out: Path) -> bool:
    """Make a folder if it is not there, and lock it; False if a run is in it, or another process has locked it."""
    out.mkdir(parents=True, exist_ok=True)
    lock = acquire_lock(out)
    settings_only = lock is None and (out / "config.json").exists()  # without locks the settings must do
    taken = lock is False or settings_only or (out / "metrics.jsonl").exists() or any(out.glob("step_*"))
    if taken and lock:
        os.close(_LOCKS.pop())
    return not taken


def acquire_lock(out: Path) -> bool | None:
    """Whether this process alone may write in the folder now; None where the system or the disk has no such locks."""
    try:
        import fcntl

        file = os.open(out, os.O_RDONLY)  # the folder itself: no file of ours lies about
    except (ImportError, OSError):
        return None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as e:
        os.close(file)
        return False if isinstance(e, BlockingIOError) else None
    _LOCKS.append(file)
    return True


@contextmanager
def release_locks():
    """Around a program: the folders that it locked are free again at its end."""
    try:
        yield
    finally:
        while _LOCKS:
            os.close(_LOCKS.pop())


def _check_recorded(out: Path):
    """ValueError where config.json of a run was cut or damaged: defaults must not stand in for it."""
    try:
        found = json.loads((out / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        found = None
    if not isinstance(found, dict) or not {"env", "algo", "baseline", "steps"} <= found.keys():
        raise ValueError(f"resume: {out / 'config.json'} is damaged; valid: the settings of the run, as it wrote them")


def resumed(c, argv) -> tuple:
    """(settings, run folder, checkpoint) of the run that --resume names: its own settings, but what stands beside it wins."""
    out = Path(c.resume)
    whole = out.resolve()
    if re.fullmatch(r"step_\d+(\.old)?", whole.name) and (whole.parent / "config.json").is_file():
        raise ValueError(f"resume: {out} is a checkpoint; valid: its run, {whole.parent}")
    if not (out / "config.json").is_file():
        raise ValueError(f"resume: {out} holds no run; valid: a run folder, as in runs/sokoban-grpo-0")
    if c.out:
        raise ValueError(f"out: {c.out} with --resume {out}; valid: one of them, a run goes on in its own folder")
    _check_recorded(out)
    if os.environ.get("RANK", "0") == "0" and acquire_lock(out) is False:  # under torchrun the first process holds it for all
        raise ValueError(f"resume: {out} is being written by another process; valid: a run that has ended")
    saved = newest(out)
    if saved is None:
        raise ValueError(f"resume: {out} has no whole checkpoint; valid: a run that has saved (see --save_every)")
    c = cli.parse(type(c), ["--config", str(out / "config.json"), *argv], "train.py", "")
    began = cli.parse(type(c), ["--config", str(out / "config.json")], "train.py", "")
    # what there is to restore, and to compare with, depends on them
    for key in ("env", "env_options", "data", "model", "algo", "baseline", "lora", "lora_alpha"):
        own, asked = getattr(began, key), getattr(c, key)
        if asked != own:
            raise ValueError(f"{key}: {asked} with --resume of a run of {own}; valid: {own}, or a run of its own")
    done = int(re.search(r"\d+", saved.name)[0])  # step_000003, or step_000003.old
    if done >= c.steps:
        raise ValueError(f"resume: {out} has done {done} steps already; valid: --steps above {done}")
    return c, out, saved
