"""The measurements of a run: moving averages, both samplings, the posterior that is logged."""

import json
from dataclasses import replace

import pytest
import torch
from measured import metrics_of, played, qwen2

from nanoragen.collapse import monitor
from nanoragen.collapse.estimator import measure
from nanoragen.collapse.monitor import Ema
from nanoragen.run import regimes


def test_moving_averages_survive_a_resume():
    steps = [metrics_of(-torch.rand(4, 4) * 5, lengths=[2, 3, 4, 5]) for _ in range(4)]
    whole, first = Ema(), Ema()
    expected = [whole.update(s) for s in steps]
    for s in steps[:2]:
        first.update(s)
    second = Ema()
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert second.update({}) == {}  # a step without a measurement
    assert [second.update(s) for s in steps[2:]] == expected[2:]
    assert expected[0]["mi_zscore_ema"] == pytest.approx(steps[0]["mi_zscore"])
    average = steps[0]["marginal_std_seq"] * 0.9 + steps[1]["marginal_std_seq"] * 0.1
    assert expected[1]["marginal_std_ema_seq"] == pytest.approx(average)
    assert expected[1]["mi_zscore_ema_seq"] == pytest.approx(steps[1]["mi_seq_estimate"] / (average + 1e-3))
    assert expected[0].keys() == {f"{a}_ema{b}" for a in ("mi_zscore", "marginal_std") for b in ("", "_seq")}


# ---------------------------------------------------------------------------------------------------------- samplers
def test_both_samplings_are_logged_each_with_averages_of_its_own():
    model, (one, two) = qwen2(), (played(), played(seed=1))
    ema, state = Ema(), torch.get_rng_state()
    first, logged = monitor.diagnose(model, one, ema, temperature=0.8, seed=3)
    resumed = Ema()
    resumed.load_state_dict(json.loads(json.dumps(ema.state_dict())))
    expected, both = {}, {}
    for sampling in ("first_turn", "trajectory"):
        found, alone = measure(model, one, sampling=sampling, temperature=0.8, seed=3), Ema()
        later = measure(model, two, sampling=sampling, temperature=0.8, seed=4)
        for out, m in ((expected, found), (both, later)):
            out.update({f"collapse_{sampling}_sample/{k}": v for k, v in {**m, **alone.update(m)}.items()})
    assert logged == expected and first == measure(model, one, temperature=0.8, seed=3) and first.sums.shape == (16, 8)
    assert monitor.diagnose(model, two, resumed, temperature=0.8, seed=4)[1] == both
    assert monitor.diagnose(model, two, temperature=0.8, seed=4)[1].keys() == {k for k in both if "_ema" not in k}
    assert torch.equal(torch.get_rng_state(), state)


def test_a_regime_is_not_said_when_nothing_is_measured_any_more():
    model, run = qwen2(), monitor.Monitor()
    line, found = run.measure(model, played(), 1, {}, 1.0)
    assert line["regime"] in regimes.MEANING and run.regime.startswith(line["regime"]) and found.sums.shape == (16, 8)
    silent = [replace(e, turns=[replace(t, think_end=t.start) for t in e.turns]) for e in played()]
    line, found = run.measure(model, silent, 2, {}, 1.0)
    assert "regime" not in line and run.regime == "" and found is None
    assert "regime" in run.measure(model, played(), 3, {}, 1.0)[0] and run.regime
