"""Figures of episodes and of the process, and the interval of a proportion."""

import math
import os

import numpy as np
import pytest
from helpers import bandit_episode as episode

from nanoragen.rollout.episodes import Episode
from nanoragen.run import metrics


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
