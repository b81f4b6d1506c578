"""Two processes train as one does: same tokens, log, weights to 1e-5; they stop together, resume, and do not hang when one fails.

As a program (`torchrun --nproc_per_node=2 test_distributed.py FOLDER`) this file is what the two processes run: every case, in one
launch, because starting processes is what takes the time here.
"""

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "nanoragen")]  # for the processes that torchrun starts

from helpers import moments, timeless  # noqa: E402

import train  # noqa: E402
from nanoragen.run import distributed, metrics  # noqa: E402

SMALL = ["--env", "frozen_lake", "--device", "cpu", "--steps", "2", "--groups", "3", "--group_size", "3", "--max_turns", "2",
         "--max_tokens", "20", "--final_episodes", "1", "--mi_every", "2", "--save_every", "0", "--lr_warmup", "0",
         "--reward_noise", "0.5", "--lr", "5e-5"]  # fmt: skip
# AdamW divides a gradient by its size: where it is nothing but rounding (embeddings of words that are hardly ever likely) the step is
# as large as elsewhere and its sign a matter of rounding. So weights differ by a share of the learning rate.
CASES = {
    "grpo": ["--filter_value", "0.8", "--beta", "0.1", "--entropy_coef", "0.01", "--minibatches", "2"],
    "dapo": ["--algo", "dapo", "--filter", "none", "--minibatches", "9"],  # of one episode each: the second process has none
    "ppo": ["--algo", "ppo", "--filter", "none", "--minibatches", "2", "--value_clip", "0.2", "--micro_batch", "2"],
}


def in_the_middle(step, what):
    """Call `what` in the second process in the middle of a step."""
    rollouts = metrics.rollout_metrics

    def patched(*args):
        patched.step += 1
        if patched.step == step and distributed.rank() == 1:
            what()
        return rollouts(*args)

    patched.step = 0
    metrics.rollout_metrics = patched


def program(folder: Path, ports):
    ports = iter(ports)

    def main(*argv):  # each run meets at a port of its own: where they met before, old addresses are left
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=next(ports), TORCHELASTIC_USE_AGENT_STORE="False")
        train.main([*argv])

    for name, more in CASES.items():
        main(*SMALL, *more, "--out", str(folder / name))

    plain = metrics.rollout_metrics
    in_the_middle(1, lambda: os.kill(os.getpid(), signal.SIGTERM))
    code = None
    try:
        main(*SMALL, *CASES["grpo"], "--out", str(folder / "stopped"))
    except SystemExit as e:
        code = e.code
    metrics.rollout_metrics = plain
    (folder / f"code-{os.environ['RANK']}").write_text(str(code))
    (folder / "lines-when-stopped").write_text((folder / "stopped" / "metrics.jsonl").read_text())
    main("--resume", str(folder / "stopped"))

    def fail():
        raise RuntimeError("only the second process fails")

    in_the_middle(1, fail)
    main(*SMALL, "--out", str(folder / "failed"))
    (folder / "went on").touch()


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """(folder of the runs of two processes, what they printed)."""
    folder = tmp_path_factory.mktemp("two")
    listening = [socket.create_server(("127.0.0.1", 0)) for _ in range(len(CASES) + 3)]
    ports = [str(s.getsockname()[1]) for s in listening]
    for s in listening:
        s.close()
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", __file__, str(folder), *ports]
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    environment.update(OMP_NUM_THREADS="1", PYTHONWARNINGS="ignore")
    done = subprocess.run(torchrun, capture_output=True, text=True, env=environment, timeout=900)
    # the last case fails on purpose, and nothing before it does
    assert done.returncode != 0 and "only the second process fails" in done.stderr, done.stderr
    return folder, done.stdout


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    folder = tmp_path_factory.mktemp("one")
    for name, more in CASES.items():
        train.main([*SMALL, *more, "--out", str(folder / name)])
    return folder


def close(a, b, path=""):
    """Whether two JSON values are equal, numbers to 1e-5; what rollouts.jsonl rounds to 3 digits, to a digit."""
    if isinstance(a, dict):
        assert a.keys() == b.keys(), path
        return all(close(a[k], b[k], f"{path}/{k}") for k in a)
    if isinstance(a, list):
        assert len(a) == len(b), path
        return all(close(x, y, f"{path}/{i}") for i, (x, y) in enumerate(zip(a, b)))
    tolerance = 1.1e-3 if "/logprobs/" in path or "/entropies/" in path else 1e-5
    assert a == (pytest.approx(b, rel=1e-5, abs=tolerance) if isinstance(a, float) else b), path
    return True


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("name", [*CASES, "stopped"])
def test_two_processes_equal_one(name, one, two):
    a, b = one / ("grpo" if name == "stopped" else name), two[0] / name
    assert [line["step"] for line in timeless(b)] == [1, 2]  # one log, each step once
    assert close(timeless(a), timeless(b))
    assert close(lines(a / "rollouts.jsonl"), lines(b / "rollouts.jsonl"))  # every token, its advantage, what was kept
    a, b = a / "step_000002", b / "step_000002"
    start = load_file(ROOT / "nanoragen/assets/nano/model.safetensors")
    x, y = load_file(a / "model.safetensors"), load_file(b / "model.safetensors")
    assert x.keys() == y.keys() and max((x[k] - start[k]).abs().max() for k in x) > 1e-4  # it was trained
    assert max((x[k] - y[k]).abs().max().item() for k in x) < 1e-5
    x, y = moments(a), moments(b)
    assert x.keys() == y.keys() and all(torch.allclose(x[k], y[k], rtol=1e-3, atol=1e-5) for k in x)
    if name == "ppo":
        x, y = (torch.load(folder / "critic.pt", weights_only=True) for folder in (a, b))
        for part in ("trunk", "head"):
            assert all(torch.allclose(x[part][k], y[part][k], rtol=0, atol=1e-5) for k in x[part])


def test_the_cases_are_hard_enough(one):
    """There are updates in both steps, and the filter drops groups of a step."""
    kept = {name: [line["rollout/kept_groups"] for line in timeless(one / name)] for name in CASES}
    assert kept["dapo"] == kept["ppo"] == [3, 3] and 0 < min(kept["grpo"]) < 3


def test_a_signal_to_one_process_stops_both_after_the_same_step(two):
    folder = two[0]
    assert [(folder / f"code-{r}").read_text() for r in (0, 1)] == ["130", "130"]
    assert [line["step"] for line in lines(folder / "lines-when-stopped")] == [1]
    assert two[1].count("stopped by SIGTERM after step 1") == 1  # the first process says so, and only it


def test_a_process_that_fails_ends_the_others(two):
    folder = two[0]
    assert not (folder / "went on").exists()
    assert (folder / "failed" / "config.json").is_file() and not (folder / "failed" / "metrics.jsonl").exists()


def test_each_process_takes_its_own_device(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="device: cuda:1 under torchrun; valid: auto, cpu, cuda"):
        distributed.start("cuda:1")


if __name__ == "__main__":
    program(Path(sys.argv[1]), sys.argv[2:])
