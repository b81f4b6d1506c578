"""Group-relative advantages with variance-based masking (the SNR filter), in one launch and without a host sync.

    found = group_advantages(rewards, group_ids, filter="top_p", filter_value=0.9, include_zero=False)
    found.advantages [B], found.keep [G], found.score [G], found.mean [G], found.std [G]

Within a group, advantage = (r - mean) / (std + eps). A group of equal rewards has no task gradient, only noise and
regularisers; the filter ranks groups by their reward spread and keeps the informative ones (RAGEN-2, arXiv 2604.06268,
SNR-aware filtering). Kept groups are found without a sort: group i's rank, and the mass ranked before it, are sums over
all j of [j ranks before i], so every group decides for itself.

One program does it all, in three phases with a barrier between: statistics of each group, the filter, the rows. G and B are
small (thousands), and what a launch costs is what is saved.
"""

from __future__ import annotations

import torch

from nanoragen.kernels import reference
from nanoragen.kernels.dispatch import jit, tl, triton, use_triton
from nanoragen.kernels.reference import GroupAdvantages

FILTERS = ("none", "top_p", "top_k", "top_k_abs", "min_p")
ROWS = 1024  # rewards in flight


def group_advantages(
    rewards, group_ids, *, scale="std", ddof=1, eps=1e-6, filter="none", filter_value=1.0, filter_mode="linear",
    filter_metric="reward_std", include_zero=True, selection_eps=0.0, num_groups=None, backend="auto",
) -> GroupAdvantages:  # fmt: skip
    """rewards [B] finite floats, group_ids [B] integers from 0 to G - 1, rows in any order, groups of any size.

    scale        "std": (r - mean) / (std + eps); "none": r - mean (Dr. GRPO)
    ddof         1: sample std; 0: population std
    filter_metric  what a group is ranked by: "reward_std" or "reward_variance". Exactly 0 where all rewards are equal, or
                 where there are no more than ddof of them
    include_zero  whether groups of score 0 may be kept at all
    filter       "none"       all of those
                 "top_p"      the fewest of highest score whose mass reaches filter_value: group i stays if the mass ranked
                              before it is below filter_value * total - selection_eps (ties by index). Mass: the score itself
                              ("linear", where score 0 is never kept) or softmax of the scores ("softmax", total 1)
                 "top_k"      the filter_value * G of highest score, rounded up
                 "top_k_abs"  the filter_value groups of highest score
                 "min_p"      those with score at least filter_value * the highest
    num_groups   G; None: the highest id + 1 (which on CUDA waits for the device, so pass it there)

    Returns float32 (float64 for float64, torch only). Dropped groups have advantage 0. Whether rewards are finite is for the
    caller to check, where the episode is still known: looking would wait for the device here.
    RAGEN's own setting: top_p linear 0.9, include_zero False, selection_eps 0.01, reward_std.
    """
    for key, value, valid in (
        ("scale", scale, ("std", "none")), ("filter", filter, FILTERS), ("filter_mode", filter_mode, ("linear", "softmax")),
        ("filter_metric", filter_metric, ("reward_std", "reward_variance")), ("ddof", ddof, (0, 1)),
    ):  # fmt: skip
        if value not in valid:
            raise ValueError(f"{key}: {value!r}; valid: {', '.join(map(str, valid))}")
    if rewards.ndim != 1 or rewards.shape != group_ids.shape:
        raise ValueError(
            f"group_ids: shape {tuple(group_ids.shape)} for rewards {tuple(rewards.shape)}; valid: both [B]"
        )
    G = num_groups if num_groups is not None else int(group_ids.max()) + 1 if len(group_ids) else 0
    if not (use_triton(backend, rewards) and rewards.dtype != torch.float64) or not G:
        return reference.group_advantages(
            rewards,
            group_ids,
            G,
            scale,
            ddof,
            eps,
            filter,
            filter_value,
            filter_mode,
            filter_metric,
            include_zero,
            selection_eps,
        )
    rewards, group_ids = rewards.float().contiguous(), group_ids.contiguous()
    advantages = torch.empty_like(rewards)
    score, low, above, std = (torch.empty(G, dtype=torch.float32, device=rewards.device) for _ in range(4))
    equal, keep = (torch.empty(G, dtype=torch.int8, device=rewards.device) for _ in range(2))
    _group_advantages[(1,)](
        rewards, group_ids, advantages, score, low, above, std, equal, keep, len(rewards), G, float(filter_value), float(eps),
        float(selection_eps), SCALE=scale == "std", DDOF=ddof, FILTER=FILTERS.index(filter), SOFTMAX=filter_mode == "softmax",
        VARIANCE=filter_metric == "reward_variance", ZERO=bool(include_zero), ROWS=ROWS,
        GROUPS=max(16, triton.next_power_of_2(G)), num_warps=4,
    )  # fmt: skip
    return GroupAdvantages(advantages, keep.bool(), score, low + above, std)


@jit
def _group_advantages(
    R, IDS, ADVANTAGE, SCORE, LOW, ABOVE, STD, EQUAL, KEEP, B, G, value, eps, selection_eps, SCALE: tl.constexpr, DDOF: tl.constexpr,
    FILTER: tl.constexpr, SOFTMAX: tl.constexpr, VARIANCE: tl.constexpr, ZERO: tl.constexpr, ROWS: tl.constexpr,
    GROUPS: tl.constexpr,
):  # fmt: skip
    rows = tl.arange(0, ROWS)
    # 1. statistics of each group, relative to its lowest reward: a large common part never meets a small spread
    for g in range(0, G):
        count = 0.0
        high = float("-inf")
        low = float("inf")
        for start in range(0, B, ROWS):
            inside = start + rows < B
            mine = inside & (tl.load(IDS + start + rows, mask=inside, other=-1) == g)
            r = tl.load(R + start + rows, mask=inside, other=0.0)
            count += tl.sum(tl.where(mine, 1.0, 0.0), 0)
            high = tl.maximum(high, tl.max(tl.where(mine, r, float("-inf")), 0))
            low = tl.minimum(low, tl.min(tl.where(mine, r, float("inf")), 0))
        total = 0.0
        for start in range(0, B, ROWS):
            inside = start + rows < B
            mine = inside & (tl.load(IDS + start + rows, mask=inside, other=-1) == g)
            total += tl.sum(tl.where(mine, tl.load(R + start + rows, mask=inside, other=0.0) - low, 0.0), 0)
        mean = total / tl.maximum(count, 1.0)  # above the lowest
        squares = 0.0
        for start in range(0, B, ROWS):
            inside = start + rows < B
            mine = inside & (tl.load(IDS + start + rows, mask=inside, other=-1) == g)
            d = tl.load(R + start + rows, mask=inside, other=0.0) - low - mean
            squares += tl.sum(tl.where(mine, d * d, 0.0), 0)
        equal = (high <= low) | (count <= DDOF)  # compared, not computed: a rounded variance is not exactly 0
        variance = tl.where(equal, 0.0, squares / tl.maximum(count - DDOF, 1.0))
        std = tl.sqrt(variance)
        tl.store(LOW + g, tl.where(count > 0, low, 0.0))
        tl.store(ABOVE + g, tl.where(equal, 0.0, mean))
        tl.store(STD + g, std)
        tl.store(SCORE + g, variance if VARIANCE else std)
        tl.store(EQUAL + g, tl.where(count > 0, equal.to(tl.int8), 2))  # 2: nobody there
    tl.debug_barrier()

    # 2. the filter: every group counts who ranks before it
    index = tl.arange(0, GROUPS)
    exists = index < G
    score = tl.load(SCORE + index, mask=exists, other=0.0)
    there = exists & (tl.load(EQUAL + index, mask=exists, other=2) != 2)
    candidate = there if (ZERO and (SOFTMAX or FILTER != 1)) else there & (score > 0)
    top = tl.max(tl.where(candidate, score, 0.0), 0)
    mass = tl.where(candidate, tl.exp(score - top) if SOFTMAX else score, 0.0)
    total = tl.sum(mass, 0)
    rank = tl.zeros((GROUPS,), tl.float32)
    before = tl.zeros((GROUPS,), tl.float32)
    for j in range(0, G):
        score_j = tl.load(SCORE + j)
        there_j = tl.load(EQUAL + j) != 2
        candidate_j = there_j if (ZERO and (SOFTMAX or FILTER != 1)) else there_j & (score_j > 0)
        mass_j = tl.exp(score_j - top) if SOFTMAX else score_j
        ahead = candidate_j & ((score_j > score) | ((score_j == score) & (j < index)))
        rank += tl.where(ahead, 1.0, 0.0)
        before += tl.where(ahead, mass_j, 0.0)
    keep = candidate
    if FILTER == 1:
        keep = keep & (before < value * total - selection_eps * (total if SOFTMAX else 1.0))
    elif FILTER == 2:
        keep = keep & (rank < value * G)
    elif FILTER == 3:
        keep = keep & (rank < value)
    elif FILTER == 4:
        keep = keep & (score >= value * top)
    tl.store(KEEP + index, keep.to(tl.int8), mask=exists)
    tl.debug_barrier()

    # 3. the rows
    for start in range(0, B, ROWS):
        inside = start + rows < B
        group = tl.load(IDS + start + rows, mask=inside, other=0)
        r = tl.load(R + start + rows, mask=inside, other=0.0) - tl.load(LOW + group, mask=inside, other=0.0)
        a = r - tl.load(ABOVE + group, mask=inside, other=0.0)
        if SCALE:
            a = a / (tl.load(STD + group, mask=inside, other=0.0) + eps)
        live = (tl.load(KEEP + group, mask=inside, other=0) != 0) & (tl.load(EQUAL + group, mask=inside, other=1) == 0)
        tl.store(ADVANTAGE + start + rows, tl.where(live, a, 0.0), mask=inside)
