"""The posterior that a run logs, against Bayes' rule."""

import pytest
import torch

from nanoragen.collapse.estimator import Measurement
from nanoragen.report.runs import posterior_record


def test_posterior_against_bayes():
    """Three rows, prompts of weight 2/3 and 1/3; the row of prompt 1 comes last, whatever its place."""
    L = torch.tensor([[0.2, 0.7], [0.5, 0.1], [0.4, 0.4]]).log()
    found = Measurement({}, L, [1, 0, 0], [1, 1, 1], None)
    record = posterior_record(5, found)
    want = [[0.5 * 2, 0.1], [0.4 * 2, 0.4], [0.2 * 2, 0.7]]
    assert record == {
        "step": 5, "size": [3, 2], "own": [0, 0, 1],
        "posterior": [[pytest.approx(p / sum(row), abs=6e-4) for p in row] for row in want],
    }  # fmt: skip
    big = Measurement({}, torch.zeros(80, 40), [i // 2 for i in range(80)], [1] * 80, None)
    record = posterior_record(1, big)
    assert (len(record["posterior"]), len(record["posterior"][0]), record["size"]) == (32, 32, [80, 40])
    assert record["posterior"][0] == [0.025] * 32 and record["own"] == [i // 2 for i in range(32)]
