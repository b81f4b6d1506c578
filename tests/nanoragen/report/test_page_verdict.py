"""The verdict of the report: what it says of a run, from success, MI and entropy, and at which thresholds."""

import math
import re

import pytest
import report_runs
from report_runs import S, evaluation, lines, metrics_line, page_of, words

from nanoragen.report.runs import Run
from nanoragen.report.verdict import View
from nanoragen.report.verdict import verdict as judge
from nanoragen.run import regimes

make = report_runs.make  # the fixture


def verdict(folder):
    level, head, why = judge(View(Run(folder).read()))
    return level, head, " ".join(why)


def test_verdict_of_a_healthy_run(make):
    level, head, why = verdict(make())
    assert level == "good" and "rose from 40.0% to 70.0%" in head and "depends on its prompt" in head
    assert "intervals do not overlap" in why and "What to do: nothing" in why


def test_verdict_of_template_collapse(make):
    """Success rises, entropy stays, MI falls to a tenth: not healthy, and it says since when and what to do."""
    folder = make(change=lambda s: {S + "mi_seq_estimate": 2.0 if s < 5 else 0.2})
    level, head, why = verdict(folder)
    assert level == "bad" and "template collapse" in head and "--filter top_p" in why
    # means of five: (4 x 2 + 0.2) / 5 = 1.64 at step 5, 1.28, then 0.92, under half
    assert "steps 1 to 6: diverse; steps 7 to 8: template collapse" in words(page_of(folder))


@pytest.mark.parametrize(
    "last, level, said",
    [(0.2, "bad", "fell from 40.0% to 20.0%"), (0.45, "watch", "went from 40.0% to 45.0%, which may be chance")],
)
def test_verdict_of_success_that_does_not_rise(make, last, level, said):
    folder = make(change=lambda s: {})
    rows = [metrics_line(s) for s in range(1, 9)]
    rows[0].update(evaluation("eval/before", 0.4))
    rows[7].update(evaluation("eval", last))
    lines(folder / "metrics.jsonl", rows)
    found = verdict(folder)
    assert found[0] == level and said in found[1] and "The signals are there" in found[2]


def test_verdict_of_reasoning_that_never_depended_on_its_prompt(make):
    """The regime compares with the first measurement, so it is "diverse" here; retrieval at chance tells."""
    level, head, why = verdict(make(change=lambda s: {S + "mi_seq_estimate": 0.05, S + "retrieval_accuracy": 0.15}))
    assert level == "watch" and "ignores its prompt" in head and "15.0% against 12.5%" in why


def test_mi_is_judged_as_a_share_of_its_bound(make):
    """Two prompts instead of eight: MI falls to a third in nats, and is still all that there is to know. And the other way round."""
    bound = lambda s: {S + "mi_upper_bound": math.log(8 if s < 3 else 2), S + "mi_seq_estimate": math.log(8 if s < 3 else 2)}
    assert verdict(make(change=bound))[0] == "good"
    grown = lambda s: {S + "mi_upper_bound": math.log(2 if s < 3 else 64), S + "mi_seq_estimate": math.log(2)}
    level, head, why = verdict(make("grown", change=grown))
    assert level == "bad" and "template collapse" in head and "MI 17% of its bound, first 100%" in why


def test_with_one_prompt_there_is_no_regime(make):
    one = {S + "mi_seq_estimate": 0.0, S + "mi_upper_bound": 0.0, S + "retrieval_accuracy": 1.0, S + "retrieval_chance_level": 1.0}
    folder = make(change=lambda s: one, groups=1)
    level, head, why = verdict(folder)
    assert level == "watch" and "was not measured" in head and "--groups 2 or more" in why
    assert not re.search("collapse\\b|diverse", words(page_of(folder).split("</header>")[0].split("<h1>")[1]))


def test_verdict_names_what_happened(make):
    folder = make(
        steps=8, change=lambda s: {"nonfinite_updates": int(s == 3), "skipped": float(s > 6), "early_stopped/success": s == 8}
    )
    _, _, why = verdict(folder)
    assert "1 updates were not finite" in why and "2 of 8 steps updated nothing" in why
    assert "stopped early: held-out success under 1% in 5 evaluations running" in why
    (folder / "config.json").write_text('{"env": "lake", "steps": 20}')
    lines(folder / "metrics.jsonl", [metrics_line(s) for s in (1, 2)])
    level, _, why = verdict(folder)
    assert level == "unknown" and "ends at step 2 of 20" in why


def test_one_measurement_that_jumps_is_not_the_verdict(make):
    """A run whose reasoning collapsed, and a last measurement of a few prompts that looks well by chance."""
    folder = make(change=lambda s: {S + "mi_seq_estimate": 2.0 if s in (1, 8) else 0.1})
    assert "template collapse" in verdict(folder)[1]
    assert verdict(make("other", change=lambda s: {S + "mi_seq_estimate": 0.1 if s == 8 else 2.0}))[0] == "good"


def test_one_retrieval_that_jumps_is_not_the_verdict(make):
    """A standard error of 0.1 alone reaches chance; the mean of five has 0.1 / sqrt(5), and lies well above it."""
    jump = lambda s: {S + "retrieval_accuracy": 0.25 if s == 8 else 0.9, S + "retrieval_accuracy_se": 0.1}
    assert verdict(make(change=jump))[0] == "good"
    low = lambda s: {S + "retrieval_accuracy": 0.9 if s in (1, 8) else 0.0}  # mean of the last five: 18.0%
    level, _, why = verdict(make("low", change=lambda s: {**low(s), S + "retrieval_accuracy_se": 0.2}))
    assert level == "watch" and "18.0% against 12.5%" in why


def test_sentences_on_mi_and_chance(make):
    """MI: the mean of the last five, as in the regime. Chance of unequal prompts: (2/3)^2 + (1/3)^2, what ignoring them gives."""
    folder = make(change=lambda s: {S + "mi_seq_estimate": 1.0 if s < 8 else 2.0})
    row = [0.667, 0.333]
    lines(folder / "cross.jsonl", [{"step": 8, "size": [3, 2], "own": [0, 0, 1], "posterior": [row, row, row]}])
    text = words(page_of(folder))
    assert f"MI {1.2 / math.log(8):.0%} of its bound" in text
    assert "own prompt has 55.6% of the probability on average; chance is 55.6%" in text


def test_one_evaluation_and_one_step(make):
    a, b = make("a", steps=1), make("b")
    rows = [metrics_line(1, **evaluation("eval/before", 0.4))]
    lines(a / "metrics.jsonl", rows)
    text = words(page_of(a))
    assert ", 1 step " in text and "40.0% (95%: 35.0% to 45.0%), measured once" in text and "8 steps" in words(page_of(b))
    assert "a 1 40.0% \u2013 95.6%" in words(page_of(a, b))


def test_the_thresholds_are_those_of_collapse(make, monkeypatch):
    folder = make(change=lambda s: {S + "mi_seq_estimate": 2.0 if s < 4 else 1.6})
    assert regimes.LOW == 0.5 and verdict(folder)[0] == "good"
    monkeypatch.setattr(regimes, "LOW", 0.85)
    assert "template collapse" in verdict(folder)[1]
