"""Early stops by their definitions, one step before they are due and when they are; and the two signals."""

import json
import os
import signal

import pytest

from nanoragen.run import stops
from nanoragen.run.signals import Stop
from nanoragen.run.stops import early_stop

ALL = "variance,filtered,success"


def history(std=(), skipped=(), success=()):
    n = max(len(std), len(skipped), len(success))
    lines = [{"rollout/in_group_reward_std": 1.0, "skipped": 0.0} for _ in range(n)]
    for key, values in (("rollout/in_group_reward_std", std), ("skipped", skipped), ("eval/bandit/success", success)):
        for line, value in zip(lines, values):
            if value is not None:
                line[key] = value
    return lines


def test_variance_under_a_tenth_of_the_first_ten_steps_mean_for_ten_steps():
    first = [0.5, 1.5] * 5  # mean 1
    assert early_stop(history(first + [0.09] * 9), "bandit", ALL) is None
    name, why = early_stop(history(first + [0.09] * 10), "bandit", ALL)
    assert name == "variance" and "10% of its start" in why
    assert early_stop(history([2.0] * 10 + [0.2] * 10), "bandit", ALL)[0] == "variance"  # a tenth is enough
    assert early_stop(history(first + [0.09] * 5 + [0.11] + [0.09] * 9), "bandit", ALL) is None
    assert early_stop(history([0.0] * 30), "bandit", ALL) is None  # never any variance: that is the diagnosis' to say


def test_five_empty_batches_running():
    assert early_stop(history(skipped=[1.0] * 4), "bandit", ALL) is None
    assert early_stop(history(skipped=[1.0, 1, 0, 1, 1, 1, 1]), "bandit", ALL) is None
    assert early_stop(history(skipped=[0.0, 1, 1, 1, 1, 1]), "bandit", ALL)[0] == "filtered"


def test_five_evaluations_under_one_percent():
    assert early_stop(history(success=[0.0, None, 0.0, 0.009, 0.0]), "bandit", ALL) is None
    assert early_stop(history(success=[0.0, None, 0.0, 0.009, 0.0, 0.0]), "bandit", ALL)[0] == "success"
    assert early_stop(history(success=[0.0, 0.0, 0.01, 0.0, 0.0, 0.0]), "bandit", ALL) is None
    assert early_stop(history(success=[0.0] * 5), "sokoban", ALL) is None  # evaluations of another environment


def test_three_steps_running_with_an_update_that_was_not_finite():
    lines = history(std=[1.0] * 4)
    for line, n in zip(lines, (4, 0, 1, 4)):
        line["nonfinite_updates"] = n
    assert early_stop(lines, "bandit", "none") is None
    assert early_stop(lines + [{**lines[0]}], "bandit", "none")[0] == "nonfinite"


def test_each_can_be_switched_off_and_a_wrong_name_is_named():
    assert early_stop(history(skipped=[1.0] * 9), "bandit", "variance,success") is None
    assert early_stop(history(skipped=[1.0] * 9, success=[0.0] * 9), "bandit", "none") is None
    with pytest.raises(ValueError, match="early_stop: .*'varience'.*valid: variance"):
        early_stop([], "bandit", "varience")


def test_the_first_signal_is_noted_and_the_second_leaves():
    with Stop() as stop:
        assert stop.asked is None
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.asked == "SIGINT"
        with pytest.raises(SystemExit) as left:
            os.kill(os.getpid(), signal.SIGTERM)
    assert left.value.code == 128 + signal.SIGTERM


def test_what_an_early_stopped_run_ends_with_is_in_its_log(tmp_path, monkeypatch):
    """The last evaluation, of --final_episodes, and in the report the reason in words."""
    import train

    monkeypatch.setattr(stops, "early_stop", lambda *_: ("filtered", stops.WHY["filtered"]))
    args = ["--env", "bandit", "--steps", "3", "--groups", "2", "--group_size", "2", "--max_tokens", "8", "--mi_every", "0"]
    train.main([*args, "--eval_every", "1", "--eval_episodes", "3", "--final_episodes", "5", "--out", str(tmp_path / "run")])
    (line,) = map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
    assert line["early_stopped/filtered"] == 1 and line["eval/bandit/episodes"] == 5
    assert stops.WHY["filtered"] in (tmp_path / "run" / "report.html").read_text()
