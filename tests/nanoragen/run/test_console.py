"""The words for the person who runs it: a step in one line, and why a run learned nothing."""

import re
import warnings

import pytest

from nanoragen.run import console

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


def test_the_reward_of_few_steps_is_not_its_own_comparison():
    rows = [{**STEP, "reward": r} for r in (0.0, 0.0, 3.0, 3.0)]
    found = " ".join(console.diagnosis(rows, outcome(0.3, 0.4), outcome(0.3, 0.4), "bandit"))
    assert "(0.00 in the first steps, 3.00 in the last)" in found


def test_advice_does_not_contradict_itself():
    found = outcome(0.4, 0.6)
    cut = [{**STEP, "rollout/parse_rate": 0.0, "rollout/truncated_by_context": 1.0, "rollout/turns": turns} for turns in (0.0, 1.5)]
    never, partly = (" ".join(console.diagnosis([line], found, found, "bandit")) for line in cut)
    assert "do not parse" not in never and "Lower --max_turns or --max_tokens" in never
    assert "do not parse" in partly and "Raise --max_tokens" not in partly and "Start from a model" in partly
