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
        ({"rollout/zero_variance_ratio": 1.0, "skipped": 1.0}, "Everything was filtered out.*no variance to keep", "Loosen"),
        ({"skipped": 0.8}, "Everything was filtered out.*--filter none", "No variance"),
        ({"rollout/truncated_by_context": 0.6}, "out of context", "No variance"),
        ({"nonfinite_updates": 0.5}, "not finite", "hardly moved"),
        ({}, "signals are there.*hardly moved", "No variance"),
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


FOUND = {"success": 0.5, "success_low": 0.4, "success_high": 0.6}


def said(rows, before=FOUND, after=FOUND):
    return " ".join(console.diagnosis(rows, before, after, "bandit"))


@pytest.mark.parametrize(
    "rewards, std, says",
    [((0.50, 0.75), 0.43, "rose, .*0.50 in the first steps, 0.75 in the last"), ((0.75, 0.50), 0.43, "fell .0.75 in the first"),
     ((0.50, 0.51), 0.43, "hardly moved"), ((0.5, 0.5), 0.0, "hardly moved"), ((0.5, 0.6), 0.0, "rose"),
     ((0.501, 0.502), 0.0, "hardly moved")],
)  # fmt: skip
def test_what_is_said_of_the_reward_is_what_its_two_numbers_show(rewards, std, says):
    rows = [{**STEP, "reward": r, "reward_std": std} for r in rewards for _ in range(15)]
    assert re.search(f"the reward in training {says}", said(rows)) and "flat" not in said(rows)


@pytest.mark.parametrize("kl, says", [(11.7, "updates are too large .approx_kl up to 12 nats a token.: lower --lr"), (0.01, "Lower --lr")])
def test_a_parse_rate_that_was_lost_names_the_learning_rate_and_no_tokens(kl, says):
    """Three steps at --lr 1: every reply parses, then none; they are cut because nothing ends them."""
    rows = [{**STEP, "rollout/parse_rate": p, "completions/clipped_ratio": 1 - p, "approx_kl": kl, "bandit/success": p / 2,
             "rollout/zero_variance_ratio": 1 - p} for p in (1.0, 0.0, 0.0)]  # fmt: skip
    text = said(rows, outcome(0.5, 0.62), outcome(0.0, 0.04))
    assert re.search(says, text) and "100% of the turns did in the first step, 0% in the last half" in text
    assert "--max_tokens" not in text and "easier" not in text


@pytest.mark.parametrize("cut, longer", [(0.0, False), (0.9, True)])
def test_more_tokens_are_advised_where_replies_are_cut(cut, longer):
    text = said([{**STEP, "rollout/parse_rate": 0.2, "completions/clipped_ratio": cut}] * 30)
    assert ("90% of the replies are cut: raise --max_tokens" in text) == longer and "model that knows the format" in text


def test_large_updates_are_named_where_success_fell_and_where_nothing_else_is_wrong():
    rows = [{**STEP, "approx_kl": 0.5}] * 30
    assert "lower --lr" in said(rows) and "lower --lr" in said(rows, outcome(0.5, 0.6), outcome(0.1, 0.2))
    assert "lower --lr" not in said([{**STEP, "approx_kl": 0.01}] * 30)


def test_where_no_group_can_vary_nothing_is_said_of_their_variance():
    rows = [{k: v for k, v in STEP.items() if "in_group" not in k and "zero_var" not in k}] * 30
    assert "group" not in said(rows).replace("--groups", "")
