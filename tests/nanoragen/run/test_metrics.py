"""Records that survive a bad disk, intervals, and the words for a run that learns nothing."""

import importlib.util
import json
import math
import os
import re
import sys
import types
import warnings

import numpy as np
import pytest
import torch

from nanoragen.learning import advantages
from nanoragen.rollout.episodes import Episode, Turn
from nanoragen.run import console, metrics
from nanoragen.run.log import Lines, Log


def episode(rewards=(0.5, 1.0), success=True, parsed=True, truncated=""):
    turns = [
        Turn(2 * i + 2, 2 * i + 4, 2 * i + 3, f"see {i}", "hm</think><answer>a</answer>", ["a"], parsed, r)
        for i, r in enumerate(rewards)
    ]
    n = len(rewards)
    return Episode(
        "bandit",
        7,
        0,
        list(range(2 + 2 * n)),
        [0, 0] + [1] * 2 * n,
        turns,
        not truncated,
        truncated,
        success,
        "rules",
        "see 0",
    )


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_metrics_are_appended_and_stay_json(tmp_path):
    for start in (1, 3):  # a second process goes on with the same file
        log = Log(tmp_path / "run", {"lr": 1e-3})
        for step in (start, start + 1):
            log.step({"step": step, "reward": math.nan if step == 2 else 0.5, "deep": {"x": [math.inf, 1.0]}})
        log.close()
    found = lines(tmp_path / "run" / "metrics.jsonl")
    assert [m["step"] for m in found] == [1, 2, 3, 4]
    assert found[1]["reward"] is None and found[0]["reward"] == 0.5 and found[0]["deep"] == {"x": [None, 1.0]}
    assert json.loads((tmp_path / "run" / "config.json").read_text()) == {"lr": 1e-3}


def test_rollouts_hold_what_is_needed_to_replay_and_check_an_episode(tmp_path):  # O1
    log = Log(tmp_path, {})
    log.rollouts(5, [episode(), episode((-0.1,), False, False, "turns")], [0.7, -0.7], [True, False])
    a, b = lines(tmp_path / "rollouts.jsonl")
    assert (a["step"], a["env"], a["seed"], a["group"], a["advantage"], a["kept"], a["success"]) == (
        5,
        "bandit",
        7,
        0,
        0.7,
        True,
        True,
    )
    assert [t["reward"] for t in a["turns"]] == [0.5, 1.0] and a["reward"] == 1.5
    assert len(a["ids"]) == len(a["mask"]) and [m["role"] for m in a["messages"]] == ["system"] + ["user", "assistant"] * 2
    for turn in a["turns"]:
        assert a["mask"][turn["start"] : turn["end"]] == [1, 1]
    assert (b["kept"], b["truncated"], b["turns"][0]["parsed"]) == (False, "turns", False)


def test_a_disk_error_warns_once_and_does_not_stop_the_run(tmp_path):  # O1
    log = Log(tmp_path, {})
    (tmp_path / "rollouts.jsonl").mkdir()  # cannot be opened for writing, by root neither
    with pytest.warns(UserWarning, match="rollouts.jsonl cannot be written") as seen:
        log.rollouts(1, [episode()], [0.0], [True])
        log.rollouts(2, [episode()], [0.0], [True])
    assert len(seen) == 1
    log.step({"step": 1})
    assert lines(tmp_path / "metrics.jsonl") == [{"step": 1}]
    (tmp_path / "rollouts.jsonl").rmdir()  # the disk is back
    log.rollouts(3, [episode()], [0.0], [True])
    assert [r["step"] for r in lines(tmp_path / "rollouts.jsonl")] == [3]


def test_half_a_line_does_not_spoil_the_next(tmp_path, monkeypatch):
    file = Lines(tmp_path / "x.jsonl")
    file.write([{"n": 1}])
    real = open

    class Full:  # a disk that fills up in mid-line
        def __init__(self, *args, **kwargs):
            self.file = real(*args, **kwargs)

        def __enter__(self):
            return self

        def __exit__(self, *_):
            self.file.close()

        def write(self, text):
            self.file.write(text[:3])
            raise OSError(28, "No space left on device")

    monkeypatch.setattr("nanoragen.run.log.open", Full, raising=False)
    with pytest.warns(UserWarning, match="No space left"):
        file.write([{"n": 2}])
    monkeypatch.undo()
    file.write([{"n": 3}])
    assert (tmp_path / "x.jsonl").read_text().splitlines() == ['{"n": 1}', '{"n', '{"n": 3}']


def test_trackers(tmp_path, monkeypatch):
    for text, match in (
        ("tensorbord", "there is no"),
        ("trackio", "trackio is not installed; valid: pip install trackio"),
    ):
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
        with pytest.raises(ValueError, match="^log: .*" + match):
            Log(tmp_path, {}, trackers=text)
    monkeypatch.undo()
    calls = []
    fake = types.ModuleType("wandb")
    fake.__spec__ = types.SimpleNamespace()
    fake.init = lambda **kw: calls.append(("init", kw["project"], kw["name"], kw["config"]))
    fake.log = lambda numbers, step: calls.append((step, numbers))
    fake.finish = lambda: calls.append("finish")
    monkeypatch.setitem(sys.modules, "wandb", fake)
    log = Log(tmp_path / "run", {"lr": 1.0}, trackers="wandb")
    log.step({"step": 2, "reward": 0.5, "regime": "diverse"})
    log.close()
    assert calls == [("init", "nanoragen", "run", {"lr": 1.0}), (2, {"reward": 0.5}), "finish"]


def test_wilson_against_its_equation():
    # the bounds are the two p with (p - k/n)^2 = z^2 p (1 - p) / n
    for k, n in ((0, 10), (1, 10), (5, 10), (10, 10), (37, 256), (2.5, 7.5)):
        low, high = metrics.wilson(k, n)
        assert 0 <= low <= k / n <= high <= 1
        for p in (low, high):
            assert (p - k / n) ** 2 == pytest.approx(1.959963984540054**2 * p * (1 - p) / n, abs=1e-12)
    assert metrics.wilson(0, 10)[0] == 0 and metrics.wilson(10, 10)[1] == 1 and metrics.wilson(0, 0) == (0.0, 1.0)


def test_rollout_metrics():
    cut = episode((-0.1,), False, False, "turns")
    cut.turns[0].cut, cut.turns[0].end = True, 7
    found = metrics.rollout_metrics([episode(), cut], "bandit")
    assert found["completions/max_length"] == 5 and found["completions/clipped_ratio"] == pytest.approx(1 / 3)
    assert found["reward"] == pytest.approx(0.7) and found["reward_std"] == pytest.approx(1.6 / math.sqrt(2))
    assert found["bandit/success"] == 0.5 and found["num_tokens"] == 6 + 4 and found["completions/mean_length"] == 3
    assert found["rollout/parse_rate"] == pytest.approx(2 / 3) and found["rollout/turns"] == 1.5
    assert found["rollout/truncated_by_turns"] == 0.5 and found["valid_thinking_rate"] == 1
    one = metrics.rollout_metrics([Episode("bandit", 0, 0, [1, 2], [0, 0], truncated="context")], "bandit")  # no turn at all
    assert one["rollout/parse_rate"] == 0 and one["reward_std"] == 0 and one["rollout/truncated_by_context"] == 1


STEP = {
    "step": 3, "reward": 1.234, "bandit/success": 0.5, "rollout/in_group_reward_std": 0.75, "rollout/kept_groups": 6, "rollout/groups": 8,
    "rollout/filter_kept_ratio": 0.75, "collapse_first_turn_sample/conditional_entropy_est": 0.41,
    "collapse_first_turn_sample/mi_seq_estimate": 1.5, "collapse_first_turn_sample/mi_upper_bound": 2.08,
    "collapse_first_turn_sample/retrieval_accuracy": 0.875, "collapse_first_turn_sample/retrieval_chance_level": 0.125,
    "tokens_per_second": 12345.6, "regime": "diverse", "skipped": 0.0, "rollout/parse_rate": 1.0,
    "rollout/zero_variance_ratio": 0.1,
}  # fmt: skip


def test_console_line():
    line = console.console_line(STEP)
    for part in ("step    3", "reward   1.23", "success  50.0%", "in-group std  0.75", "kept 6/8", "H(Z|X) 0.41", "MI 1.50 of 2.08",
                 "retrieval  88% (chance 12%)", "12,346 tokens/s", "diverse"):  # fmt: skip
        assert part in line
    assert "\n" not in line and "held-out" not in line and "no update" not in line
    bare = {"step": 1, "reward": 0.0, "bandit/success": 0.0, "rollout/kept_groups": 0, "rollout/groups": 8}
    bare = console.console_line({**bare, "skipped": 1.0, "eval/bandit/success": 0.25})
    assert "MI" not in bare and "kept 0/8 |" in bare and "held-out success 25.0%" in bare and "every group was filtered out" in bare


def outcome(low, high):
    return {"success": (low + high) / 2, "success_low": low, "success_high": high}


@pytest.mark.parametrize(
    "change, says, not_said",
    [
        ({"rollout/parse_rate": 0.2}, "Replies do not parse", "No variance"),
        (
            {"rollout/zero_variance_ratio": 0.9, "bandit/success": 0.0},
            "No variance in groups: .*almost all fail",
            "parse:",
        ),
        (
            {"rollout/zero_variance_ratio": 0.9, "bandit/success": 1.0},
            "No variance in groups: .*almost all succeed",
            "fail,",
        ),
        ({"rollout/zero_variance_ratio": 1.0, "skipped": 1.0}, "Everything is filtered.*no variance to keep", "Loosen"),
        ({"skipped": 0.8}, "Everything is filtered.*--filter none", "No variance"),
        ({"rollout/truncated_by_context": 0.6}, "out of context", "No variance"),
        ({"nonfinite_updates": 0.5}, "not finite", "flat"),
        ({}, "signals are there.*reward is flat", "No variance"),
    ],
)
def test_diagnosis_names_the_missing_signal(change, says, not_said):
    history = [{**STEP, **change} for _ in range(30)]
    found = console.diagnosis(history, outcome(0.3, 0.4), outcome(0.33, 0.43), "bandit")
    text = " ".join(found)
    assert re.search(says, text) and not_said not in text and all("\n" not in s for s in found)


def test_diagnosis_is_silent_when_it_learned_and_honest_when_it_fell():
    history = [STEP] * 30
    assert console.diagnosis(history, outcome(0.3, 0.4), outcome(0.5, 0.6), "bandit") == []
    fell = " ".join(console.diagnosis(history, outcome(0.5, 0.6), outcome(0.1, 0.2), "bandit"))
    assert "fell" in fell and "--lr" in fell


def test_diagnosis_of_a_short_bare_run_raises_nothing():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert console.diagnosis([{"step": 1, "reward": 0.0}], outcome(0, 0.1), outcome(0, 0.1), "bandit")


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="needs /proc")
def test_what_the_process_holds(tmp_path):
    before = metrics.process_metrics()
    block, files = np.ones(40 * 2**20, dtype=np.uint8), [open(tmp_path / str(i), "w") for i in range(5)]  # 40 MiB, written to
    after = metrics.process_metrics()
    for file in files:
        file.close()
    assert block.nbytes == 40 * 2**20 and 35 < after["memory/rss_mb"] - before["memory/rss_mb"] < 60
    assert after["memory/open_files"] == before["memory/open_files"] + 5
    assert metrics.process_metrics()["memory/open_files"] == before["memory/open_files"]


def test_the_reward_of_few_steps_is_not_its_own_comparison():
    rows = [{**STEP, "reward": r} for r in (0.0, 0.0, 3.0, 3.0)]
    found = " ".join(console.diagnosis(rows, outcome(0.3, 0.4), outcome(0.3, 0.4), "bandit"))
    assert "(0.00 in the first steps, 3.00 in the last)" in found


def test_a_turn_has_the_mean_advantage_of_its_tokens(tmp_path):
    one, two = episode(), episode((-0.1,))  # turns at 2:4 and 4:6, and at 2:4
    advantages.note_turns([one, two], torch.tensor([[0, 0, 1.0, 2, -3, -4], [0, 0, 5, 5, 0, 0]]))
    Log(tmp_path, {}).rollouts(1, [one, two], [-1.0, 5.0], [True, True])
    assert [[t["advantage"] for t in e["turns"]] for e in lines(tmp_path / "rollouts.jsonl")] == [[1.5, -3.5], [5.0]]


def test_advice_does_not_contradict_itself():
    found = outcome(0.4, 0.6)
    cut = [{**STEP, "rollout/parse_rate": 0.0, "rollout/truncated_by_context": 1.0, "rollout/turns": turns} for turns in (0.0, 1.5)]
    never, partly = (" ".join(console.diagnosis([line], found, found, "bandit")) for line in cut)
    assert "do not parse" not in never and "Lower --max_turns or --max_tokens" in never
    assert "do not parse" in partly and "Raise --max_tokens" not in partly and "Start from a model" in partly
