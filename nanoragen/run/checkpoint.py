"""Checkpoints: a plain Hugging Face folder with the trainer's state beside the weights; whole, or not there.

    save(run, 100, model, tokenizer, optimizer=..., scheduler=..., state={...}, keep=2)  -> run/step_000100/
    folder = newest(run)                    # the newest complete one, whatever was killed when
    AutoModelForCausalLM.from_pretrained(folder);  load_state(folder)

A checkpoint is written as `step_000100.tmp`, every file is synced to disk, then `complete.json` with the size and SHA-256 of each,
and only then is the folder renamed. A kill leaves a `.tmp`, which nobody reads and the next save removes; a full disk leaves
nothing. Both are checked when the newest is looked for, and again for the files that are loaded: a file that was cut or changed
later is noticed, and never loaded. The checksums find damage by accident; against intent they prove nothing, they lie beside.

Left out: sharded and asynchronous saving.
"""

import hashlib
import json
import random
import re
import shutil
import sys
from pathlib import Path

from nanoragen.run import files

MARKER = "complete.json"
MAX_WEIGHT = 1e18  # the square of what is larger has no room in float32


class CannotSave(RuntimeError):
    """A checkpoint could not be written: disk full or gone. Nothing of it is left, and older ones are as they were."""


def save(
    run_dir, step: int, model, tokenizer, save_model=None, *, optimizer=None, scheduler=None, critic=None, state=None, keep: int = 2
) -> Path:
    """Write run_dir/step_<step>/ and return it, then delete all but the newest `keep` complete ones.

    save_model(folder): writes the model's files; None: model.save_pretrained. state: what JSON can hold, and comes back equal.
    CannotSave where the disk takes no more; FloatingPointError where a weight, of the critic too, is no number a model can compute
    with: what was saved before is then worth more.

    The files: config, safetensors, tokenizer and chat template (save_pretrained), adapter/ (if there is one; the
    weights have it merged in), optimizer.pt, scheduler.pt, critic.pt (if there is one), random.pt, trainer_state.json, complete.json.
    """
    from safetensors import SafetensorError

    _check_weights([*model.parameters(), *getattr(critic, "parameters", [])], step)
    run_dir = Path(run_dir)
    folder = run_dir / folder_name(step)
    temporary = run_dir / f"{folder.name}.tmp"
    parts = {"optimizer": optimizer, "scheduler": scheduler, "critic": critic}
    parts = {name: part.state_dict() for name, part in parts.items() if part is not None} | {"random": random_state()}
    state = {"step": step, **(state or {})}
    for left in run_dir.glob("step_*.tmp"):  # of an earlier process, killed while it saved
        shutil.rmtree(left)
    try:
        _write(temporary, save_model or model.save_pretrained, tokenizer, parts, state)
        if folder.exists():  # saved again at the same step; a kill between the two renames leaves .old, which newest() reads
            old = run_dir / f"{folder.name}.old"
            shutil.rmtree(old, ignore_errors=True)
            folder.rename(old)
        temporary.rename(folder)
        files.sync(run_dir)
    except (OSError, RuntimeError, SafetensorError) as e:  # what Python, torch.save and safetensors raise when a disk is full
        cause = e.__context__ if isinstance(e.__context__, OSError) else e
        reason = getattr(cause, "strerror", None) or " ".join(str(cause).split())[:150]
        raise CannotSave(f"{run_dir}: the checkpoint of step {step} cannot be written ({reason})") from e
    finally:
        shutil.rmtree(temporary, ignore_errors=True)  # renamed by now, if all went well
    shutil.rmtree(run_dir / f"{folder.name}.old", ignore_errors=True)
    for old in [f for f in _folders(run_dir) if is_complete(f)][keep:]:
        (old / MARKER).unlink()  # first, so that a kill in mid-deletion leaves nothing that looks whole
        shutil.rmtree(old)
    return folder


def _check_weights(parameters, step: int):
    largest = max(p.detach().abs().amax().nan_to_num(nan=float("inf")).item() for p in parameters if p.numel())
    if largest > MAX_WEIGHT:
        raise FloatingPointError(f"weights of step {step} up to {largest:g} in size, which are not saved")


def folder_name(step: int) -> str:
    """Of the folder of a step, within the run's."""
    return f"step_{step:06d}"


def _write(folder: Path, save_model, tokenizer, parts: dict, state: dict):
    """Every file of a checkpoint, on disk; the marker last."""
    import torch

    folder.mkdir(parents=True)
    save_model(folder)
    tokenizer.save_pretrained(folder)
    for name, part in parts.items():
        with open(folder / f"{name}.pt", "wb") as file:  # a file of Python's, so that a full disk is an OSError, at least beneath
            torch.save(part, file)
    (folder / "trainer_state.json").write_text(json.dumps(state, indent=1) + "\n")
    found = {}
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        files.sync(path)
        found[str(path.relative_to(folder))] = {"bytes": path.stat().st_size, "sha256": _sha256(path)}
    (folder / MARKER).write_text(json.dumps(found, indent=1) + "\n")
    files.sync(folder / MARKER)
    files.sync(folder)


def newest(run_dir, say=lambda text: print(text, file=sys.stderr)) -> Path | None:
    """The newest whole checkpoint of a run, None if there is none. Reads every byte of it.

    say: called with a line for each newer one that is not whole: which, and why.
    """
    for folder in _folders(Path(run_dir)):
        wrong = damage(folder)
        if not wrong:
            return folder
        say(f"{folder} is not whole ({wrong}) and is passed over")
    return None


def damage(folder, which=lambda name: True) -> str:
    """What is wrong with a checkpoint: a file that is missing, cut or changed since it was saved; "" if it is whole.

    which: the files whose checksums are compared, by name. Sizes are compared of all. Checkpoints of before there were
    checksums have sizes only.
    """
    folder = Path(folder)
    try:
        files = json.loads((folder / MARKER).read_text(encoding="utf-8"))
        files = {name: {"bytes": saved} if isinstance(saved, int) else saved for name, saved in files.items()}
    except FileNotFoundError:
        return f"no {MARKER}: it was not saved to its end"
    except (OSError, ValueError, RecursionError, AttributeError):
        return f"{MARKER} cannot be read"
    for name, saved in files.items():
        if not isinstance(saved, dict) or saved.keys() not in ({"bytes"}, {"bytes", "sha256"}):
            return f"{MARKER} cannot be read"
        path = folder / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != saved["bytes"]:
            return f"{name} has {path.stat().st_size} bytes instead of {saved['bytes']}"
        if "sha256" in saved and which(name) and _sha256(path) != saved["sha256"]:
            return f"{name} has changed since it was saved"
    return ""


def is_complete(folder) -> bool:
    """Whether every file that was saved is there in its full size. Quick: reads no contents."""
    return not damage(folder, which=lambda name: False)


def of_trainer(name: str) -> bool:
    """Whether a file of a checkpoint is the trainer's own, which nobody needs to load the model."""
    return name.endswith(".pt") or name == "trainer_state.json"


def load_state(folder) -> dict:
    """What was saved beside the model: {"state": dict, "optimizer", "scheduler", "critic": state dicts or None, "random": dict}."""
    import torch

    folder = Path(folder)
    wrong = damage(folder, which=of_trainer)
    if wrong:
        raise ValueError(f"resume: {folder} is not a complete checkpoint ({wrong}); valid: a step_... folder of a run")
    parts = {}
    for name in ("optimizer", "scheduler", "critic", "random"):
        file = folder / f"{name}.pt"
        parts[name] = torch.load(file, map_location="cpu", weights_only=True) if file.is_file() else None
    return {"state": json.loads((folder / "trainer_state.json").read_text()), **parts}


def restore(folder, optimizer, scheduler, critic=None) -> dict:
    """Put back optimizer, scheduler, critic and random states from a checkpoint; returns the rest of the trainer's state.

    Rates and weight decay stay as the optimizers were made with: the settings' of now.
    """
    found = load_state(folder)
    restore_optimizer(optimizer, scheduler, found["optimizer"], found["scheduler"])
    if critic is not None:
        critic.load_state_dict(found["critic"])
    restore_random(found["random"])
    return found["state"]


def restore_optimizer(optimizer, scheduler, moments: dict, position: dict):
    """Put back an AdamW's moments and a LambdaLR's position, and keep rates, schedule and weight decay as they were made."""
    rates, decays = scheduler.base_lrs, [group["weight_decay"] for group in optimizer.param_groups]
    optimizer.load_state_dict(moments)
    scheduler.load_state_dict(position)
    scheduler.base_lrs = rates
    for group, rate, decay, factor in zip(optimizer.param_groups, rates, decays, scheduler.lr_lambdas):
        group.update(initial_lr=rate, weight_decay=decay, lr=rate * factor(scheduler.last_epoch))
    scheduler._last_lr = [group["lr"] for group in optimizer.param_groups]


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


def _sha256(path: Path) -> str:
    found = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(2**20):
            found.update(block)
    return found.hexdigest()
