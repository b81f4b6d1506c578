"""group_advantages against a loop over groups in plain Python, float64, and the worked cases."""

import math
import random
from fractions import Fraction

import pytest
import torch
from backends import BACKENDS, DEVICE

from nanoragen.kernels.advantage import FILTERS, group_advantages


def book(rewards, ids, G, *, scale, ddof, filter, filter_value, filter_mode, filter_metric, include_zero, selection_eps):
    """Lists in, lists out; nothing vectorised, a sort for the ranking."""
    groups = [[r for r, i in zip(rewards, ids) if i == g] for g in range(G)]
    mean = [sum(x) / len(x) for x in groups]
    std = [
        0.0 if len(x) <= ddof or max(x) == min(x) else math.sqrt(sum((r - m) ** 2 for r in x) / (len(x) - ddof))
        for x, m in zip(groups, mean)
    ]
    score = std if filter_metric == "reward_std" else [s * s for s in std]
    order = sorted((g for g in range(G) if include_zero or score[g] > 0), key=lambda g: (-score[g], g))
    if filter == "top_p" and filter_mode == "linear":
        kept, mass = [], 0.0
        for g in order:
            if score[g] > 0 and mass < filter_value * sum(score) - selection_eps:
                kept.append(g)
            mass += score[g]
    elif filter == "top_p":
        total, kept, mass = sum(math.exp(score[g]) for g in order), [], 0.0
        for g in order:
            if mass < filter_value - selection_eps:
                kept.append(g)
            mass += math.exp(score[g]) / total
    elif filter == "top_k":
        kept = order[: math.ceil(filter_value * G)]
    elif filter == "top_k_abs":
        kept = order[: int(filter_value)]
    elif filter == "min_p":
        kept = [g for g in order if score[g] >= filter_value * max(score)]
    else:
        kept = order
    advantage = [
        0.0 if i not in kept or std[i] == 0 else (r - mean[i]) / (std[i] + 1e-6 if scale == "std" else 1.0)
        for r, i in zip(rewards, ids)
    ]
    return advantage, [g in kept for g in range(G)], score, mean, std


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("filter", FILTERS)
def test_random_batches(filter, backend):
    rng = random.Random(FILTERS.index(filter))
    for _ in range(8 if backend == "triton" and DEVICE == "cpu" else 1000):
        G = rng.randint(1, 9)
        ids = [g for g in range(G) for _ in range(rng.randint(1, 6))]
        rng.shuffle(ids)
        offset, unit = rng.choice([0.0, -3.0, 64.0]), rng.choice([1.0, 0.125, 8.0])
        # a third of the groups constant; the others' spreads are continuous, so that rounding decides no tie
        flat = {g: rng.random() < 0.3 for g in range(G)}
        rewards = [offset + unit * (1.0 if flat[g] else round(rng.gauss(0, 1) * 2**12) / 2**12) for g in ids]
        how = dict(
            scale=rng.choice(["std", "none"]), ddof=rng.choice([0, 1]), filter_mode=rng.choice(["linear", "softmax"]),
            filter_metric=rng.choice(["reward_std", "reward_variance"]), include_zero=rng.random() < 0.5,
            selection_eps=rng.choice([0.0, 0.01]), filter=filter,
            filter_value=rng.randint(1, G) if filter == "top_k_abs" else rng.choice([0.37, 0.55, 0.9]),
        )  # fmt: skip
        got = group_advantages(torch.tensor(rewards, device=DEVICE), torch.tensor(ids, device=DEVICE), backend=backend, **how)
        want = book(rewards, ids, G, **how)
        assert got.keep.tolist() == want[1], (how, rewards, ids)
        for a, b in zip((got.advantages, got.score, got.mean, got.std), (want[0], *want[2:])):
            torch.testing.assert_close(a.cpu().double(), torch.tensor(b, dtype=torch.float64), atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("filter", ["top_k_abs", "min_p"])
def test_ties_are_those_of_exact_arithmetic(filter, backend):
    """Rewards 0, 1, 2: variances are fractions, many of them equal between groups of other rewards and sizes."""
    rng = random.Random(7)
    for _ in range(6 if backend == "triton" and DEVICE == "cpu" else 1000):
        G = rng.randint(2, 9)
        ids = [g for g in range(G) for _ in range(rng.randint(2, 6))]
        rng.shuffle(ids)
        rewards = [rng.randint(0, 2) for _ in ids]
        score = []
        for g in range(G):
            x = [Fraction(r) for r, i in zip(rewards, ids) if i == g]
            m = sum(x) / len(x)
            score.append(sum((r - m) ** 2 for r in x) / (len(x) - 1))
        order, k = sorted(range(G), key=lambda g: (-score[g], g)), rng.randint(1, G)
        kept = order[:k] if filter == "top_k_abs" else [g for g in order if score[g] >= max(score) / 2]
        found = group_advantages(
            torch.tensor(rewards, dtype=torch.float32, device=DEVICE), torch.tensor(ids, device=DEVICE), filter=filter,
            filter_value=k if filter == "top_k_abs" else 0.5, filter_metric="reward_variance", backend=backend,
        )  # fmt: skip
        assert found.keep.tolist() == [g in kept for g in range(G)], (rewards, ids)
        assert [s == 0 for s in found.score.tolist()] == [s == 0 for s in score]


def advantages(rewards, ids, **how):
    return group_advantages(torch.tensor(rewards, device=DEVICE), torch.tensor(ids, device=DEVICE), **how).advantages.tolist()


@pytest.mark.parametrize("backend", BACKENDS)
def test_worked_cases(backend):
    assert advantages([0.0, 10.0, 1.0, 20.0], [0, 1, 0, 1], backend=backend) == pytest.approx(
        [-0.707107] * 2 + [0.707107] * 2, abs=1e-5
    )
    assert advantages([0.0, 10.0, 1.0, 20.0], [0, 1, 0, 1], ddof=0, backend=backend) == pytest.approx([-1, -1, 1, 1], abs=1e-5)
    assert advantages([1.0, 1.0, 2.0], [0] * 3, backend=backend) == pytest.approx([-0.57735, -0.57735, 1.154701], abs=1e-5)
    assert advantages([1.0, 1.0, 2.0], [0] * 3, ddof=0, backend=backend) == pytest.approx([-0.707107] * 2 + [1.414214], abs=1e-5)
    assert advantages([1.0, 0.0, 0.0, 0.0], [0] * 4, backend=backend) == pytest.approx([1.5] + [-0.5] * 3, abs=1e-5)
    assert advantages([-0.3, -0.5], [0, 0], backend=backend) == pytest.approx([0.707107, -0.707107], abs=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("value", [0.1, 0.5, -7.3, 1e-8, 3e7, 1000.1])
def test_equal_rewards_are_exactly_zero(value, backend):
    """A rounded variance of 0.1, 0.1, 0.1 is not 0; ours is, and such a group is dropped where zeros are not included."""
    found = group_advantages(
        torch.tensor([value] * 3 + [0.0, 1.0, 0.0], device=DEVICE), torch.tensor([0, 0, 0, 1, 1, 1], device=DEVICE),
        filter="top_p", filter_value=1.0, backend=backend,
    )  # fmt: skip
    assert found.score[0] == 0 and found.std[0] == 0 and found.advantages[:3].tolist() == [0, 0, 0]
    assert found.keep.tolist() == [False, True]


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_group_of_one_has_advantage_zero(backend):
    assert advantages([5.0, 0.0, 1.0], [0, 1, 1], backend=backend)[0] == 0


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_large_common_part_does_not_cancel(backend):
    shifted = advantages([1000.0, 1000.125, 1000.25], [0] * 3, backend=backend)
    assert shifted == pytest.approx(advantages([0.0, 0.125, 0.25], [0] * 3, backend=backend), abs=1e-6)


def pairs(*spreads):
    """One group of two rewards 0 and 2 x spread for each: score = population std = spread."""
    rewards = torch.tensor([r for s in spreads for r in (0.0, 2 * s)], device=DEVICE)
    return rewards, torch.arange(len(spreads), device=DEVICE).repeat_interleave(2)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "how, kept",
    [
        ({"filter": "top_p", "filter_value": 0.9}, 9),  # mass before the tenth is 9 of 10: not below 0.9
        ({"filter": "top_p", "filter_value": 0.91}, 10),
        ({"filter": "top_p", "filter_value": 0.3}, 3),
        ({"filter": "top_p", "filter_value": 0.9, "filter_mode": "softmax"}, 9),
        ({"filter": "top_k", "filter_value": 0.6}, 6),
        ({"filter": "top_k", "filter_value": 0.55}, 6),
        ({"filter": "top_k_abs", "filter_value": 7}, 7),
        ({"filter": "min_p", "filter_value": 1.0}, 10),
    ],
)  # fmt: skip
def test_ties_are_broken_by_index(how, kept, backend):
    """Ten groups of the same three rewards, in another order each: the same score to the bit, so the first ones stay."""
    some = [0.1, -0.7, 1.3]
    rewards = [some[(i + g) % 3] for g in range(10) for i in range(3)]
    ids = [g for g in range(10) for _ in range(3)]
    found = group_advantages(torch.tensor(rewards, device=DEVICE), torch.tensor(ids, device=DEVICE), backend=backend, **how)
    assert len(set(found.score.tolist())) == 1
    assert found.keep.tolist() == [True] * kept + [False] * (10 - kept)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("mode", ["linear", "softmax"])
def test_top_p_of_one_keeps_every_group_with_a_score(mode, backend):
    rewards, ids = pairs(1e6, 1e-4, 0.0, 3.0)
    found = group_advantages(
        rewards, ids, ddof=0, filter="top_p", filter_value=1.0, filter_mode=mode, include_zero=False, backend=backend
    )
    assert found.keep.tolist() == [True, True, False, True]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("filter", FILTERS)
def test_nothing_varies(filter, backend):
    """All groups constant: without zeros nothing is kept by any rule, and nothing is NaN."""
    rewards, ids = torch.tensor([0.5] * 4 + [-0.1] * 4, device=DEVICE), torch.tensor([0] * 4 + [1] * 4, device=DEVICE)
    found = group_advantages(rewards, ids, filter=filter, filter_value=1, include_zero=False, backend=backend)
    assert not found.keep.any() and (found.advantages == 0).all() and found.mean.tolist() == pytest.approx([0.5, -0.1])


@pytest.mark.parametrize("backend", BACKENDS)
def test_filter_looks_at_spread_not_at_the_mean(backend):
    """[0.5 x 4] is dropped, [0, 1, 0, 1] with the same mean kept; so is [0, -0.1, 0, -0.1], shaped rewards without success."""
    rewards = torch.tensor([0.5] * 4 + [0.0, 1.0] * 2 + [0.0, -0.1] * 2, device=DEVICE)
    found = group_advantages(
        rewards, torch.arange(3, device=DEVICE).repeat_interleave(4), ddof=0, filter="top_p", filter_metric="reward_variance",
        include_zero=False, backend=backend,
    )  # fmt: skip
    assert found.keep.tolist() == [False, True, True] and found.score.tolist() == pytest.approx([0, 0.25, 0.0025])


@pytest.mark.parametrize("backend", BACKENDS)
def test_order_of_rows_changes_no_bit(backend):
    rewards, ids = torch.randn(300, device=DEVICE), torch.randint(20, (300,), device=DEVICE)
    order = torch.randperm(300, device=DEVICE)
    a = group_advantages(rewards, ids, num_groups=20, filter="top_p", filter_value=0.5, backend=backend)
    b = group_advantages(rewards[order], ids[order], num_groups=20, filter="top_p", filter_value=0.5, backend=backend)
    assert torch.equal(a.keep, b.keep) and torch.equal(a.score, b.score)
    torch.testing.assert_close(a.advantages[order], b.advantages, atol=1e-7, rtol=1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
def test_one_bad_reward_stays_in_its_group_and_empty_groups_are_not_kept(backend):
    rewards = torch.tensor([1.0, 0.0, float("nan"), 1.0, 0.0, 1.0], device=DEVICE)
    found = group_advantages(rewards, torch.tensor([0, 0, 0, 0, 2, 2], device=DEVICE), num_groups=3, backend=backend)
    assert found.advantages[4:].tolist() == pytest.approx([-0.707107, 0.707107], abs=1e-5)
    assert found.keep[1:].tolist() == [False, True] and found.std[1] == found.mean[1] == 0


@pytest.mark.parametrize("backend", BACKENDS)
def test_more_groups_and_rows_than_a_block(backend):
    G, K = 150, 3
    rewards, ids = torch.randn(G * K, device=DEVICE), torch.arange(G * K, device=DEVICE) % G
    found = group_advantages(rewards, ids, filter="top_k", filter_value=0.5, backend=backend)
    x = rewards.double().view(K, G)
    std = x.std(0)
    best = set(std.argsort(descending=True)[: G // 2].tolist())
    assert {g for g, kept in enumerate(found.keep.tolist()) if kept} == best
    want = torch.where(found.keep, (x - x.mean(0)) / (std + 1e-6), 0.0).flatten()
    torch.testing.assert_close(found.advantages.double(), want, atol=1e-5, rtol=1e-5)


def test_ids_out_of_range():
    with pytest.raises(ValueError, match="group_ids"):
        group_advantages(torch.zeros(2), torch.tensor([0, 2]), num_groups=2)


@pytest.mark.parametrize("bad", [{"filter": "topp"}, {"scale": "var"}, {"ddof": 2}, {"filter_mode": "log"}])
def test_bad_arguments(bad):
    with pytest.raises(ValueError, match=next(iter(bad))):
        group_advantages(torch.zeros(2), torch.zeros(2, dtype=torch.long), **bad)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("filter", FILTERS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_group_with_a_bad_reward_is_dropped_and_no_other(bad, filter, backend):
    rewards = torch.tensor([bad, 1.0, 3.0, 1.0, 2.0, 0.0], device=DEVICE)
    ids = torch.tensor([0, 0, 1, 1, 2, 2], device=DEVICE)
    value = 2 if filter == "top_k_abs" else 0.9
    found = group_advantages(rewards, ids, filter=filter, filter_value=value, backend=backend)
    assert found.keep.tolist() == [False, True, True] and found.advantages[:2].tolist() == [0, 0]
    assert found.advantages[2:].tolist() == pytest.approx([0.707107, -0.707107] * 2, abs=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("ddof", [0, 1])
@pytest.mark.parametrize("metric", ["reward_std", "reward_variance"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("group", [[0.0], [0.0, 0.0], [0.0, 1.0, 1.0, 1.0]])
def test_score_and_std_of_a_group_with_a_bad_reward_are_nan(group, bad, metric, ddof, backend):
    """Also where the bad reward is the only one, or all of them are the same infinity."""
    for places in (slice(0, 1), slice(0, None)):
        rewards = torch.tensor([*group, 1.0, 3.0], device=DEVICE)
        rewards[: len(group)][places] = bad
        ids = torch.tensor([0] * len(group) + [1, 1], device=DEVICE)
        found = group_advantages(rewards, ids, num_groups=3, ddof=ddof, filter_metric=metric, backend=backend)
        assert found.score.isnan().tolist() == found.std.isnan().tolist() == [True, False, False]
        assert found.keep.tolist() == [False, True, False] and found.advantages.isfinite().all()
        assert (found.advantages[: len(group)] == 0).all() and (found.advantages[len(group) :] != 0).all()
