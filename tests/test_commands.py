"""The command lines as users type them, each in a process of its own."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from nanoragen.kernels.dispatch import triton

ROOT = Path(__file__).resolve().parent.parent
SMALL = ["--steps", "2", "--groups", "2", "--group_size", "3", "--final_episodes", "4", "--eval_every", "0", "--minibatches", "1"]


def command(*args, **env):
    return subprocess.run(
        [sys.executable, *map(str, args)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", **env},
    )


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Two steps of frozen_lake with the bundled model."""
    out = tmp_path_factory.mktemp("run") / "frozen lake"  # a space in the name
    done = command("train.py", "--env", "frozen_lake", "--out", out, *SMALL)
    assert done.returncode == 0, done.stderr[-3000:]
    return out, done


def test_what_a_run_says_and_leaves(run):
    out, done = run
    assert "before, " in done.stdout and f"python eval.py --model '{out / 'step_000002'}' --env frozen_lake" in done.stdout
    metrics = lines(out / "metrics.jsonl")
    assert [m["step"] for m in metrics] == [1, 2] and json.loads((out / "config.json").read_text())["env"] == "frozen_lake"
    for m in metrics:
        for key in ("reward", "reward_std", "frozen_lake/success", "rollout/in_group_reward_std", "rollout/filter_kept_ratio",
                    "rollout/zero_variance_ratio", "num_tokens", "step_time", "completions/mean_length",
                    "collapse_first_turn_sample/mi_seq_estimate", "collapse_first_turn_sample/mi_upper_bound",
                    "collapse_first_turn_sample/conditional_entropy_est", "collapse_first_turn_sample/retrieval_accuracy"):  # fmt: skip
            assert m[key] is not None, key
        assert m["skipped"] == 1 or (m["grad_norm"] > 0 and m["entropy"] > 0)


def test_rollouts_can_be_read_back(run):
    """O1: seed, turn texts, ids, mask, per-turn reward, advantage, kept or dropped; ids decode to the texts."""
    from transformers import AutoTokenizer

    out, _ = run
    tokenizer = AutoTokenizer.from_pretrained(out / "step_000002")
    episodes = lines(out / "rollouts.jsonl")
    assert len(episodes) == 2 * 2 * 3
    for e in episodes:
        assert {"step", "seed", "group", "messages", "advantage", "kept", "success", "reward"} <= e.keys()
        assert len(e["ids"]) == len(e["mask"]) and sum(e["mask"]) == sum(t["end"] - t["start"] for t in e["turns"])
        assert e["reward"] == pytest.approx(sum(t["reward"] for t in e["turns"]))
        assert e["kept"] or e["advantage"] == 0
        for turn in e["turns"]:
            assert turn["reply"] == tokenizer.decode(e["ids"][turn["start"] : turn["end"]]).replace("<|im_end|>", "")


def test_the_checkpoint_is_a_plain_hugging_face_model(run):
    """C2: transformers alone loads it, and eval.py takes it."""
    out, _ = run
    code = (
        "import sys, torch; from transformers import AutoModelForCausalLM, AutoTokenizer\n"
        "m = AutoModelForCausalLM.from_pretrained(sys.argv[1]); t = AutoTokenizer.from_pretrained(sys.argv[1])\n"
        "i = t('goal', return_tensors='pt')['input_ids']; print(m.generate(i, max_new_tokens=4, do_sample=False).shape[1] > i.shape[1])"
    )
    done = command("-c", code, out / "step_000002")
    assert done.stdout.strip() == "True", done.stderr[-2000:]
    done = command("eval.py", "--model", out / "step_000002", "--env", "frozen_lake", "--episodes", "4", "--json", "--show", "1",
                   "--out", out / "episodes.jsonl")  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert list(found)[:7] == ["success", "success_low", "success_high", "return", "turns", "parse_rate", "episodes"]
    assert found["episodes"] == 4 and 0 <= found["success_low"] <= found["success"] <= found["success_high"] <= 1
    assert "[turn 1]" in done.stdout and len(lines(out / "episodes.jsonl")) == 4


def test_a_run_is_never_overwritten(run):
    out, _ = run
    before = (out / "metrics.jsonl").read_bytes()
    done = command("train.py", "--env", "frozen_lake", "--out", out, *SMALL)
    assert done.returncode != 0 and "already holds a run" in done.stderr and (out / "metrics.jsonl").read_bytes() == before


@pytest.mark.skipif(triton is None, reason="needs Triton")
def test_kernels_and_references_train_alike(tmp_path):
    """One step through Triton's interpreter and one through the twins: the same loss, advantages, MI and gradient norm."""
    found = {}
    for flag in ("1", "0"):
        out = tmp_path / flag
        done = command("train.py", "--env", "frozen_lake", "--out", out, "--seed", "1", "--groups", "3", "--group_size", "4", "--steps", "1",
                       "--final_episodes", "1", "--eval_every", "0", "--minibatches", "1", "--beta", "0.1", "--max_turns", "2",
                       TRITON_INTERPRET=flag)  # fmt: skip
        assert done.returncode == 0, done.stderr[-3000:]
        found[flag] = lines(out / "metrics.jsonl")[0], [e["advantage"] for e in lines(out / "rollouts.jsonl")]
    kernel, twin = found["1"], found["0"]
    assert any(a != 0 for a in twin[1]) and kernel[1] == pytest.approx(twin[1], abs=1e-4)
    for key in ("loss", "grad_norm", "entropy", "kl", "collapse_first_turn_sample/mi_seq_estimate",
                "collapse_first_turn_sample/mi_estimate", "collapse_first_turn_sample/conditional_entropy_est"):  # fmt: skip
        assert kernel[0][key] == pytest.approx(twin[0][key], abs=1e-4), key


@pytest.mark.parametrize(
    "args, words",
    [(["--env", "sokobam"], ["sokobam", "sokoban"]), (["--grops", "4"], ["grops", "groups"]), (["--lerning_rate", "1"], ["did you mean --lr?"]),
     (["--groups", "0"], ["groups", "1 or more"]),
     (["--group_size", "1"], ["group_size", "2 or more"]), (["--model", "./missing"], ["model", "missing"]),
     (["--out", "/proc/nowhere/run"], ["out", "cannot be written"]), (["--lr", "fast"], ["lr", "number"])],
)  # fmt: skip
def test_bad_input_is_one_line(args, words):
    done = command("train.py", *args)
    assert done.returncode != 0 and done.stdout == ""
    assert len(done.stderr.strip().splitlines()) == 1 and all(w in done.stderr for w in words), done.stderr


@pytest.mark.parametrize("script", ["train.py", "eval.py"])
def test_help_imports_nothing_heavy(script):
    done = command("-X", "importtime", script, "--help")
    assert done.returncode == 0 and "--env" in done.stdout
    assert not any(line.rsplit("|", 1)[-1].strip() == "torch" for line in done.stderr.splitlines())


@pytest.mark.parametrize("policy, low, high", [("random", 0.0, 0.3), ("demonstrate", 0.95, 1.0)])
@pytest.mark.parametrize("env", ["sokoban", "frozen_lake", "countdown"])
def test_baselines(env, policy, low, high, tmp_path):
    done = command("eval.py", "--env", env, "--policy", policy, "--episodes", "200", "--json", "--out", tmp_path / "e.jsonl")
    assert done.returncode == 0, done.stderr[-2000:]
    assert low <= json.loads(done.stdout.splitlines()[-1])["success"] <= high


def test_the_bundled_model_is_a_good_start(tmp_path):
    """It parses, wins some and not most, and its reasoning tells prompts apart. The card has the figures of 512 episodes."""
    done = command("eval.py", "--env", "frozen_lake", "--episodes", "96", "--json", "--out", tmp_path / "e.jsonl")
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["parse_rate"] >= 0.95 and 0.3 < found["success"] < 0.75
    assert sum(f.stat().st_size for f in (ROOT / "nanoragen" / "assets" / "nano").iterdir()) <= 8_000_000
