"""Faults put into whole runs: damaged checkpoints and logs, full disks, NaN, no memory. What was saved stays whole.

A tiny random model plays the bandit, so that a run takes a moment. Signals: test_signals.py. Kills while saving:
nanoragen/test_checkpoint.py. Environments that fail: nanoragen/test_faults.py. Inputs at random: nanoragen/test_fuzz.py.
Left out: faults of the machine's memory, and of a file system that says a write is done when it is not.
"""

import errno
import json
import random
import shutil
import subprocess

import pytest
import torch
from helpers import saved_model, timeless
from safetensors.torch import load_file

import train
from nanoragen.collapse import monitor
from nanoragen.policy import loading, scoring
from nanoragen.rollout import episodes as rollout
from nanoragen.rollout.generation import UncachedGenerator
from nanoragen.run import checkpoint, files, records

FILE_DAMAGES = 96  # truncations and flipped bits, over all files of a checkpoint
LOG_DAMAGES = 60  # torn lines, NUL bytes, broken UTF-8, flipped bits, in metrics.jsonl and rollouts.jsonl


@pytest.fixture(scope="module")
def arguments(tmp_path_factory):
    """A run of 3 steps, as a list of arguments but for --out."""
    folder = saved_model(tmp_path_factory.mktemp("model"))
    return ["--env", "bandit", "--model", str(folder), "--steps", "3", "--groups", "2", "--group_size", "2", "--max_turns", "1",
            "--max_tokens", "4", "--filter", "none", "--entropy_coef", "0.01", "--minibatches", "2", "--lr_warmup", "0",
            "--lr_schedule", "constant", "--final_episodes", "2", "--eval_every", "0", "--save_every", "1",
            "--early_stop", "none"]  # fmt: skip


@pytest.fixture(scope="module")
def whole(arguments, tmp_path_factory):
    """The run without any fault. Copy it before damaging it."""
    out = tmp_path_factory.mktemp("whole") / "run"
    train.main([*arguments, "--keep", "9", "--out", str(out)])
    return out


def failure(capsys, *argv) -> str:
    """The one line with which train.py ends."""
    with pytest.raises(SystemExit) as end:
        train.main(list(argv))
    found = capsys.readouterr().err.strip().splitlines()[-1]
    assert end.value.code == 2 and found.startswith("train.py: error: "), found
    return found


def same_weights(a, b):
    a, b = load_file(a / "model.safetensors"), load_file(b / "model.safetensors")
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


# -- damaged files -------------------------------------------------------------------------------------------------------


def damaged(data: bytes, kind: str, rng) -> bytes:
    at = rng.randrange(len(data))
    if kind == "truncate":
        return data[:at]
    if kind == "flip":
        return data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :]
    return data[:at] + {"nul": b"\0" * 7, "utf8": b"\xe4\xbd", "torn": b"\n", "deep": b"[" * 100_000 + b"\n"}[kind] + data[at + 1 :]


def test_no_damage_to_any_file_of_a_checkpoint_goes_unnoticed(whole, tmp_path):  # C1
    run, rng, harmless = tmp_path / "run", random.Random(0), 0
    shutil.copytree(whole, run)
    folder = run / "step_000003"
    files = sorted(p for p in folder.rglob("*") if p.is_file())
    assert {"model.safetensors", "optimizer.pt", "random.pt", "trainer_state.json", "tokenizer.json", "complete.json"} <= {
        p.name for p in files
    }
    for n in range(FILE_DAMAGES):
        path, kind, said = files[n // 2 % len(files)], ("truncate", "flip")[n % 2], []
        data = path.read_bytes()
        path.write_bytes(damaged(data, kind, rng))
        found = checkpoint.newest(run, say=said.append)
        if path.name == checkpoint.MARKER and found == folder:  # white space of the marker
            assert json.loads(path.read_text()) == json.loads(data)
            harmless += 1
        else:
            assert found.name == "step_000002" and len(said) == 1 and "step_000003 is not whole (" in said[0], (path, kind)
            assert path.name in said[0] or path.name == checkpoint.MARKER  # which may now tell another name, size or checksum
            with pytest.raises(ValueError, match="step_000003 is (damaged|not a complete checkpoint)"):
                if checkpoint.of_trainer(path.name) or path.name == checkpoint.MARKER:
                    checkpoint.load_state(folder)
                loading.load(str(folder))  # also where the marker is wrong about a file of the model
        path.write_bytes(data)
    assert checkpoint.newest(run, say=pytest.fail) == folder and harmless <= 4


@pytest.mark.parametrize(
    "name, kind", [("model.safetensors", "flip"), ("optimizer.pt", "flip"), ("trainer_state.json", "truncate")]
)
def test_a_resume_goes_back_to_the_older_checkpoint_and_says_so_plainly(name, kind, whole, tmp_path, capsys):
    run = tmp_path / "run"
    shutil.copytree(whole, run)
    path = run / "step_000003" / name
    path.write_bytes(damaged(path.read_bytes(), kind, random.Random(1)))
    capsys.readouterr()
    train.main(["--resume", str(run)])
    out, err = capsys.readouterr()
    said = [line for line in err.splitlines() if "passed over" in line]
    assert len(said) == 1 and said[0].startswith(f"{run / 'step_000003'} is not whole ({name} has ") and "Warning" not in err
    assert f"resumed after step 2 from {run / 'step_000002'}" in out + err
    assert timeless(run) == timeless(whole) and same_weights(run / "step_000003", whole / "step_000003")
    assert checkpoint.damage(run / "step_000003") == ""


def test_a_checkpoint_of_before_checksums_is_read(whole, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(whole, run)
    marker = run / "step_000003" / checkpoint.MARKER
    marker.write_text(json.dumps({name: saved["bytes"] for name, saved in json.loads(marker.read_text()).items()}))
    assert checkpoint.newest(run, say=pytest.fail).name == "step_000003"
    assert checkpoint.load_state(run / "step_000003")["state"]["step"] == 3


@pytest.mark.parametrize("name", ["metrics.jsonl", "rollouts.jsonl"])
def test_a_damaged_log_costs_the_damaged_line_and_no_other(name, whole, tmp_path):
    rng, data = random.Random(2), (whole / name).read_bytes()
    kinds = ["truncate", "flip", "nul", "utf8", "torn", "deep"]
    for n in range(LOG_DAMAGES // 2):
        (tmp_path / name).write_bytes(damaged(data, kinds[n % len(kinds)], rng))
        before = [
            line for line in (tmp_path / name).read_bytes().splitlines(keepends=True) if line in data.splitlines(keepends=True)
        ]
        records.rewind(tmp_path, 2)
        after = (tmp_path / name).read_bytes().splitlines(keepends=True)
        assert [line for line in after if line in before] == [line for line in before if json.loads(line)["step"] <= 2]
        assert not after or after[-1].endswith(b"\n")


def test_a_run_with_damaged_logs_can_be_resumed(whole, tmp_path, arguments):
    run, rng = tmp_path / "run", random.Random(3)
    shutil.copytree(whole, run)
    shutil.rmtree(run / "step_000003")
    for name in ("metrics.jsonl", "rollouts.jsonl"):
        first, rest = (run / name).read_bytes().split(b"\n", 1)
        (run / name).write_bytes(damaged(first, "nul", rng) + b"\n" + rest + b'{"step": 4, "x')
    train.main(["--resume", str(run)])
    lines = [records.whole_record(line) for line in (run / "metrics.jsonl").read_bytes().splitlines(keepends=True)]
    assert [line and line["step"] for line in lines] == [None, 2, 3]
    assert same_weights(run / "step_000003", whole / "step_000003")


# -- full disks ----------------------------------------------------------------------------------------------------------


def at_the_save_of(step, monkeypatch, fault):
    """Call fault() when that step is about to be saved."""
    save = checkpoint.save

    def faulty(run, at, *args, **kw):
        if at == step:
            fault()
        return save(run, at, *args, **kw)

    monkeypatch.setattr(checkpoint, "save", faulty)


def check_full_disk(said, out, whole):
    """One line that names the folder and what to do; step 1 as it was, nothing half-written."""
    assert "out: " in said and str(out) in said and "make room" in said and f"--resume {out}" in said
    assert checkpoint.newest(out, say=pytest.fail).name == "step_000001" and not list(out.glob("*.tmp"))
    assert same_weights(out / "step_000001", whole / "step_000001")


@pytest.mark.parametrize("room", [1_000, 60_000, 150_000], ids=["config", "weights", "optimizer"])
def test_a_file_that_may_not_grow_ends_the_run_and_nothing_is_lost(room, arguments, whole, tmp_path, monkeypatch, capsys):
    resource = pytest.importorskip("resource")
    out, limit = tmp_path / "run", resource.getrlimit(resource.RLIMIT_FSIZE)
    with monkeypatch.context() as patch:  # Python ignores SIGXFSZ: a write beyond the limit is an OSError (EFBIG)
        at_the_save_of(2, patch, lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (room, limit[1])))
        try:
            said = failure(capsys, *arguments, "--keep", "9", "--out", str(out))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert "File too large" in said
    check_full_disk(said, out, whole)
    train.main(["--resume", str(out)])
    assert timeless(out) == timeless(whole) and same_weights(out / "step_000003", whole / "step_000003")


def test_a_full_disk_ends_the_run_and_nothing_is_lost(arguments, whole, tmp_path, capsys):
    size = sum(p.stat().st_size for p in (whole / "step_000001").iterdir())
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = shutil.which("mount") and subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={int(1.7 * size)}", "tmpfs", str(disk)], capture_output=True, text=True
    )
    if not mounted or mounted.returncode:
        pytest.skip(f"no tmpfs may be mounted here: {mounted.stderr.strip() if mounted else 'no mount'}")
    try:
        said = failure(capsys, *arguments, "--keep", "9", "--out", str(disk / "run"))
        check_full_disk(said, disk / "run", whole)
        subprocess.run(["mount", "-o", f"remount,size={9 * size}", str(disk)], check=True)
        train.main(["--resume", str(disk / "run")])
        assert timeless(disk / "run") == timeless(whole)
    finally:
        subprocess.run(["umount", str(disk)], check=True)


@pytest.mark.parametrize("name", ["model", "optimizer.pt", "trainer_state.json", "complete.json"])
def test_no_space_at_any_file_of_a_checkpoint(name, arguments, whole, tmp_path, monkeypatch, capsys):
    out, sync = tmp_path / "run", files.sync

    def full(path):
        if path.name.startswith(name) and "step_000002" in str(path):
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        sync(path)

    with monkeypatch.context() as patch:
        patch.setattr(files, "sync", full)
        said = failure(capsys, *arguments, "--keep", "9", "--out", str(out))
    assert "No space left on device" in said
    check_full_disk(said, out, whole)


# -- numbers that are none -----------------------------------------------------------------------------------------------


def nan_at(place, patch):
    """Break every update at one place."""
    loss, score = train.policy_loss, scoring.token_logprobs

    def broken_loss(logprob, *args):
        if place == "gradient":
            logprob.register_hook(lambda g: g * float("nan"))
        total, part = loss(logprob, *args)
        return (total, part) if place == "gradient" else (total * float("nan"), part | {"loss": float("nan")})

    def broken_score(*args):
        logprob, *rest = score(*args)
        return logprob * float("inf"), *rest

    patch.setattr(*((scoring, "token_logprobs", broken_score) if place == "log-prob" else (train, "policy_loss", broken_loss)))


@pytest.mark.parametrize("place", ["loss", "gradient", "log-prob"])
def test_an_update_that_is_not_finite_is_left_out_and_named(place, arguments, tmp_path, monkeypatch, capsys):
    nan_at(place, monkeypatch)
    start = loading.load(arguments[3])[0].state_dict()
    longer = ["9" if before == "--steps" else arg for before, arg in zip(["", *arguments], arguments)]
    train.main([*longer, "--out", str(tmp_path / "run")])
    said = capsys.readouterr()
    lines = timeless(tmp_path / "run")
    assert len(lines) == 3 and all(
        line["nonfinite_updates"] == 2 and line["nonfinite"] == f"{place} of update 1/2" for line in lines
    )
    assert f"updates left out: 2, not finite: {place} of update 1/2" in said.out + said.err
    assert (
        f"stopped early: not finite in 3 steps running: {place} of update 1/2" in said.out + said.err
        and "--lr" in said.out + said.err
    )
    end = load_file(tmp_path / "run/step_000003/model.safetensors")
    assert end and all(torch.equal(end[k], start[k]) for k in end)
    optimizer = torch.load(tmp_path / "run/step_000003/optimizer.pt", weights_only=True)
    assert not optimizer["state"]  # no moment has seen it either


@pytest.mark.parametrize("reward", [float("nan"), float("inf"), 1e39], ids=str)
def test_a_reward_that_is_not_finite_names_environment_and_seed(reward, arguments, tmp_path, monkeypatch, capsys):
    from nanoragen.envs.bandit import Bandit

    monkeypatch.setattr(
        rollout, "parse_reply", lambda *_: type("Reply", (), {"reasoning": "", "actions": ["left"], "parsed": True})
    )
    monkeypatch.setattr(Bandit, "step", lambda self, action: ("text", reward, True, False, {"success": False}))
    said = failure(capsys, *arguments, "--out", str(tmp_path / "run"))
    assert "returned the reward" in said and "bandit (seed " in said and not list(tmp_path.glob("run/step_*"))


def test_logits_that_are_not_finite_end_the_run_with_the_phase_and_the_rate(arguments, tmp_path, monkeypatch, capsys):
    rolled = rollout.rollout

    def broken(model, *args, progress=None, **kw):
        if (tmp_path / "run/step_000001").is_dir() and progress:
            model.get_output_embeddings().register_forward_hook(lambda module, args, out: out * float("nan"))
        return rolled(model, *args, progress=progress, **kw)

    monkeypatch.setattr(rollout, "rollout", broken)
    said = failure(capsys, *arguments, "--out", str(tmp_path / "run"))
    assert "turn 1: 4 episodes" in said and "lower --lr (now" in said and f"--resume {tmp_path / 'run'}" in said
    assert checkpoint.newest(tmp_path / "run").name == "step_000001"


@pytest.mark.parametrize("weight", [float("nan"), float("inf"), 1e30], ids=str)
@pytest.mark.parametrize("of", ["model", "critic"])
def test_weights_that_are_no_numbers_are_never_saved(of, weight, arguments, tmp_path, monkeypatch, capsys):
    run = tmp_path / "run"

    def spoil(save=checkpoint.save):
        def spoilt(folder, step, model, *args, **kw):
            if step == 2:
                (model.get_output_embeddings().weight if of == "model" else kw["critic"].head.weight).data[0, 0] = weight
            return save(folder, step, model, *args, **kw)

        return spoilt

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "save", spoil())
        said = failure(capsys, *arguments, "--algo", "ppo", "--keep", "1", "--out", str(run))
    assert "save: weights of step 2" in said and "lower --lr (now" in said and f"--resume {run}" in said
    assert [p.name for p in run.glob("step_*")] == ["step_000001"] and checkpoint.damage(run / "step_000001") == ""


# -- no memory -----------------------------------------------------------------------------------------------------------


def exhausted(kind):
    if kind == "cuda":
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")
    if kind == "cpu":
        torch.empty(2**58)  # the allocator's own message
    raise MemoryError


@pytest.mark.parametrize("kind", ["cuda", "cpu", "python"])
@pytest.mark.parametrize(
    "module, name, phase, advice",
    [(UncachedGenerator, "_generate", "turn 1", "--rollout_batch (now 0"), (monitor, "measure", "diagnosis", "--mi_every 0"),
     (train, "score_all", "score", "--micro_batch (now 32)"), (train, "policy_loss", "update 1/2", "--micro_batch (now 32)")],
)  # fmt: skip
def test_out_of_memory_is_one_line(kind, module, name, phase, advice, arguments, tmp_path, monkeypatch, capsys):
    real, run = getattr(module, name), tmp_path / "run"
    monkeypatch.setattr(module, name, lambda *a, **k: exhausted(kind) if list(run.glob("step_*")) else real(*a, **k))
    said = failure(capsys, *arguments, "--out", str(run))
    assert f"out of memory in {phase}" in said and advice in said and f"--resume {run}" in said
    assert checkpoint.newest(run, say=pytest.fail).name == "step_000001"


def test_other_errors_keep_their_traceback(arguments, tmp_path, monkeypatch):
    monkeypatch.setattr(train, "policy_loss", lambda *a: (_ for _ in ()).throw(RuntimeError("a shape is wrong")))
    with pytest.raises(RuntimeError, match="^a shape is wrong$"):
        train.main([*arguments, "--out", str(tmp_path / "run")])
