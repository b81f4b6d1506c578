"""Checkpoints: a plain Hugging Face folder with the trainer's state beside the weights; whole, or not there.

    save(run, 100, model, tokenizer, optimizer=..., scheduler=..., state={...}, keep=2)  -> run/step_000100/
    folder = newest(run)                    # the newest complete one, whatever was killed when
    AutoModelForCausalLM.from_pretrained(folder);  load_state(folder)

A checkpoint is written as `step_000100.tmp`, every file is synced to disk, then `complete.json` with the size of each,
and only then is the folder renamed. A kill leaves a `.tmp`, which nobody reads and the next save removes. Sizes are checked when
the newest is looked for, so a file cut short later is noticed too.

Left out: sharded and asynchronous saving.
"""

import json
import os
import random
import re
import shutil
import warnings
from pathlib import Path

MARKER = "complete.json"


def save(run_dir, step: int, model, tokenizer, *, optimizer=None, scheduler=None, critic=None, state=None, keep: int = 2) -> Path:
    """Write run_dir/step_<step>/ and return it, then delete all but the newest `keep` complete ones.

    state: what JSON can hold, and comes back equal. The files: config, safetensors, tokenizer and chat template
    (save_pretrained), adapter/ (if there is one; the weights have it merged in), optimizer.pt, scheduler.pt, critic.pt (if there is
    one), random.pt, trainer_state.json, complete.json.
    """
    import torch

    from nanoragen import lora

    run_dir = Path(run_dir)
    folder = run_dir / folder_name(step)
    temporary = run_dir / f"{folder.name}.tmp"
    for left in run_dir.glob("step_*.tmp"):  # of an earlier process, killed while it saved
        shutil.rmtree(left)
    temporary.mkdir(parents=True)
    lora.save(model, temporary)
    tokenizer.save_pretrained(temporary)
    for name, part in (("optimizer", optimizer), ("scheduler", scheduler), ("critic", critic)):
        if part is not None:
            torch.save(part.state_dict(), temporary / f"{name}.pt")
    torch.save(random_state(), temporary / "random.pt")
    (temporary / "trainer_state.json").write_text(json.dumps({"step": step, **(state or {})}, indent=1) + "\n")
    sizes = {str(p.relative_to(temporary)): p.stat().st_size for p in sorted(temporary.rglob("*")) if p.is_file()}
    for name in sizes:
        _sync(temporary / name)
    (temporary / MARKER).write_text(json.dumps(sizes, indent=1) + "\n")
    _sync(temporary / MARKER)
    _sync(temporary)
    if (
        folder.exists()
    ):  # saved again at the same step; a kill between the two renames leaves .old, which newest() reads
        old = run_dir / f"{folder.name}.old"
        shutil.rmtree(old, ignore_errors=True)
        folder.rename(old)
    temporary.rename(folder)
    _sync(run_dir)
    shutil.rmtree(run_dir / f"{folder.name}.old", ignore_errors=True)
    for old in [f for f in _folders(run_dir) if is_complete(f)][keep:]:
        (old / MARKER).unlink()  # first, so that a kill in mid-deletion leaves nothing that looks whole
        shutil.rmtree(old)
    return folder


def folder_name(step: int) -> str:
    """Of the folder of a step, within the run's."""
    return f"step_{step:06d}"


def newest(run_dir) -> Path | None:
    """The newest complete checkpoint of a run, None if there is none. Warns about newer ones that are not complete."""
    for folder in _folders(Path(run_dir)):
        if is_complete(folder):
            return folder
        warnings.warn(f"{folder} is not complete and is passed over", stacklevel=2)
    return None


def is_complete(folder) -> bool:
    """Whether every file that was saved is there in its full size."""
    folder = Path(folder)
    try:
        sizes = json.loads((folder / MARKER).read_text())
    except (OSError, ValueError):
        return False
    return all((folder / name).is_file() and (folder / name).stat().st_size == size for name, size in sizes.items())


def load_state(folder) -> dict:
    """What was saved beside the model: {"state": dict, "optimizer", "scheduler", "critic": state dicts or None, "random": dict}."""
    import torch

    folder = Path(folder)
    if not is_complete(folder):
        raise ValueError(f"resume: {folder} is not a complete checkpoint; valid: a step_... folder of a run")
    parts = {}
    for name in ("optimizer", "scheduler", "critic", "random"):
        file = folder / f"{name}.pt"
        parts[name] = torch.load(file, map_location="cpu", weights_only=True) if file.is_file() else None
    return {"state": json.loads((folder / "trainer_state.json").read_text()), **parts}


def restore(folder, optimizer, scheduler, critic=None) -> dict:
    """Put back optimizer, scheduler, critic and random states from a checkpoint; returns the rest of the trainer's state."""
    found = load_state(folder)
    optimizer.load_state_dict(found["optimizer"])
    scheduler.load_state_dict(found["scheduler"])
    if critic is not None:
        critic.load_state_dict(found["critic"])
    restore_random(found["random"])
    return found["state"]


def random_state() -> dict:
    """The states of all random generators in use (torch, CUDA, numpy, random), as torch.load(weights_only=True) takes them."""
    import numpy as np
    import torch

    kind, key, pos, has_gauss, cached = np.random.get_state()
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
        "numpy": [kind, key.tolist(), pos, has_gauss, cached],
        "python": random.getstate(),
    }


def restore_random(state: dict):
    """Put back what `random_state` returned."""
    import numpy as np
    import torch

    torch.set_rng_state(state["torch"])
    if state["cuda"] and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(state["cuda"])
    kind, key, *rest = state["numpy"]
    np.random.set_state((kind, np.array(key, dtype=np.uint32), *rest))
    random.setstate(state["python"])


def _folders(run_dir: Path) -> list[Path]:
    """The checkpoints, complete or not, newest first; of one step the renamed-away .old last."""
    found = [p for p in run_dir.glob("step_*") if p.is_dir() and re.fullmatch(r"step_\d+(\.old)?", p.name)]
    return sorted(found, key=lambda p: (int(re.search(r"\d+", p.name)[0]), p.suffix == ""), reverse=True)


def _sync(path: Path):
    """Make a file, or the names in a folder, survive a power cut."""
    if path.is_dir() and os.name == "nt":
        return  # Windows cannot sync a folder
    handle = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
