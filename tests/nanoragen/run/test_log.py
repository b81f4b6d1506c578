"""Records that survive a bad disk, and trackers."""

import json
import math
import sys
import types

import pytest
import torch
from helpers import bandit_episode as episode

from nanoragen.learning import advantages
from nanoragen.run import log as logs


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_metrics_are_appended_and_stay_json(tmp_path):
    for start in (1, 3):  # a second process goes on with the same file
        log = logs.Log(tmp_path / "run", {"lr": 1e-3})
        for step in (start, start + 1):
            log.step({"step": step, "reward": math.nan if step == 2 else 0.5, "deep": {"x": [math.inf, 1.0]}})
        log.close()
    found = lines(tmp_path / "run" / "metrics.jsonl")
    assert [m["step"] for m in found] == [1, 2, 3, 4]
    assert found[1]["reward"] is None and found[0]["reward"] == 0.5 and found[0]["deep"] == {"x": [None, 1.0]}
    assert json.loads((tmp_path / "run" / "config.json").read_text()) == {"lr": 1e-3}


def test_rollouts_hold_what_is_needed_to_replay_and_check_an_episode(tmp_path):  # O1
    log = logs.Log(tmp_path, {})
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
    log = logs.Log(tmp_path, {})
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
    file = logs.Lines(tmp_path / "x.jsonl")
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

    monkeypatch.setattr(logs, "open", Full, raising=False)
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
        monkeypatch.setattr(logs.importlib.util, "find_spec", lambda name: None)
        with pytest.raises(ValueError, match="^log: .*" + match):
            logs.Log(tmp_path, {}, trackers=text)
    monkeypatch.undo()
    calls = []
    fake = types.ModuleType("wandb")
    fake.__spec__ = types.SimpleNamespace()
    fake.init = lambda **kw: calls.append(("init", kw["project"], kw["name"], kw["config"]))
    fake.log = lambda numbers, step: calls.append((step, numbers))
    fake.finish = lambda: calls.append("finish")
    monkeypatch.setitem(sys.modules, "wandb", fake)
    log = logs.Log(tmp_path / "run", {"lr": 1.0}, trackers="wandb")
    log.step({"step": 2, "reward": 0.5, "regime": "diverse"})
    log.close()
    assert calls == [("init", "nanoragen", "run", {"lr": 1.0}), (2, {"reward": 0.5}), "finish"]


def test_a_turn_has_the_mean_advantage_of_its_tokens(tmp_path):
    one, two = episode(), episode((-0.1,))  # turns at 2:4 and 4:6, and at 2:4
    advantages.note_turns([one, two], torch.tensor([[0, 0, 1.0, 2, -3, -4], [0, 0, 5, 5, 0, 0]]))
    logs.Log(tmp_path, {}).rollouts(1, [one, two], [-1.0, 5.0], [True, True])
    assert [[t["advantage"] for t in e["turns"]] for e in lines(tmp_path / "rollouts.jsonl")] == [[1.5, -3.5], [5.0]]
