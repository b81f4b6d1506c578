"""Group-relative advantages with variance-based masking (the SNR filter), in one launch and without a host sync.

    found = group_advantages(rewards, group_ids, filter="top_p", filter_value=0.9, include_zero=False, num_groups=G)
    found.advantages [B], found.keep [G], found.score [G], found.mean [G], found.std [G]

Within a group, advantage = (r - mean) / (std + eps). A group of equal rewards has no task gradient, only noise and
regularisers; the filter ranks groups by their reward spread and keeps the informative ones (RAGEN-2, arXiv 2604.06268,
SNR-aware filtering). Kept groups are found without a sort: group i's rank, and the mass ranked before it, are sums over
all j of [j ranks before i], so every group decides for itself.

One program does it all, in three phases with a barrier between: statistics of each group, the filter, the rows. G and B are
small (thousands), and what a launch costs is what is saved. Inside it is float64: sums of float32 rewards are then all but
exact, so groups with the same rewards tie whatever the order of their rows, and the twin breaks every tie the same way.
"""

from __future__ import annotations

import math

import torch

from nanoragen.kernels import reference
from nanoragen.kernels.dispatch import jit, tl, use_triton
from nanoragen.kernels.reference import GroupAdvantages

FILTERS = ("none", "top_p", "top_k", "top_k_abs", "min_p")
BLOCK_G, BLOCK_B = 16, 128  # groups x rows (or groups) looked at together


def group_advantages(
    rewards, group_ids, *, scale="std", ddof=1, eps=1e-6, filter="none", filter_value=1.0, filter_mode="linear",
    filter_metric="reward_std", include_zero=True, selection_eps=0.0, num_groups=None, token_rows=None, backend="auto",
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
                              ("linear", where score 0 is never kept) or softmax of the scores ("softmax", total 1).
                              filter_value 1 without selection_eps keeps all of them, however small their mass
                 "top_k"      the filter_value * G of highest score, rounded up
                 "top_k_abs"  the filter_value groups of highest score
                 "min_p"      those with score at least filter_value * the highest
    num_groups   G; None: the highest id + 1 (which on CUDA waits for the device, so pass it there). A group without rows
                 has mean, std and score 0 and is not kept
    token_rows   [P] integer, the row of each packed token: found.tokens is then each token's advantage [P]. A second
                 launch, by torch: it is spread over the device, which the one program of the filter is not

    Returns float32 (float64 for float64, torch only). Dropped groups have advantage 0; so have groups of equal rewards and of
    one, and a group with a reward that is not finite, which is never kept: whether rewards are finite is for the caller to check,
    where the episode is still known, and looking would wait for the device here. ValueError for a setting that is none of the above or, on a CPU, an id outside 0 to G - 1.
    RAGEN's own setting: top_p linear 0.9, include_zero False, selection_eps 0.01, reward_std. (Its top_k rounds down, to at
    least one; its linear top_p keeps zeros at filter_value 1.)
    """
    for key, setting, valid in (
        ("scale", scale, ("std", "none")), ("filter", filter, FILTERS), ("filter_mode", filter_mode, ("linear", "softmax")),
        ("filter_metric", filter_metric, ("reward_std", "reward_variance")), ("ddof", ddof, (0, 1)),
    ):  # fmt: skip
        if setting not in valid:
            raise ValueError(f"{key}: {setting!r}; valid: {', '.join(map(str, valid))}")
    if rewards.ndim != 1 or rewards.shape != group_ids.shape:
        raise ValueError(f"group_ids: shape {tuple(group_ids.shape)} for rewards {tuple(rewards.shape)}; valid: both [B]")
    B = len(rewards)
    G = num_groups if num_groups is not None else int(group_ids.max()) + 1 if B else 0
    if group_ids.device.type == "cpu" and B and not 0 <= group_ids.min() <= group_ids.max() < G:
        raise ValueError(f"group_ids: {int(group_ids.min())} to {int(group_ids.max())}; valid: 0 to {G - 1}")
    # the filter in terms of four rules: none, top_p, top_k (a number of groups), min_p
    softmax, value, k, rule = filter_mode == "softmax", float(filter_value), 0, filter
    if filter == "top_p" and not softmax:
        include_zero = False
    if filter == "top_p" and value >= 1 and selection_eps == 0:
        rule = "none"  # all that remain: a sum may be too rounded to see the smallest
    if filter in ("top_k", "top_k_abs"):
        rule, k = "top_k", math.ceil(round(value * G, 6)) if filter == "top_k" else int(value)
    kernel = use_triton(backend, rewards) and rewards.dtype != torch.float64 and G > 0
    found = (_launch if kernel else reference.group_advantages)(
        rewards, group_ids, G, scale, ddof, eps, rule, value, k, softmax, filter_metric, include_zero, selection_eps
    )
    if token_rows is not None:
        found.tokens = found.advantages[token_rows.long()]
    return found


def _launch(rewards, group_ids, G, scale, ddof, eps, rule, value, k, softmax, metric, include_zero, selection_eps):
    B, rewards, group_ids = len(rewards), rewards.float().contiguous(), group_ids.contiguous()
    advantages = torch.empty_like(rewards)
    score, mean, std = (torch.empty(G, dtype=torch.float32, device=rewards.device) for _ in range(3))
    keep = torch.empty(G, dtype=torch.bool, device=rewards.device)
    scratch = torch.empty(3, G, dtype=torch.float64, device=rewards.device)
    _group_advantages[(1,)](
        rewards, group_ids, advantages, keep, score, mean, std, scratch, B, G, k, VALUE=value, SELECTION_EPS=float(selection_eps),
        EPS=float(eps), SCALE=scale == "std", DDOF=ddof, RULE=rule, SOFTMAX=softmax, VARIANCE=metric == "reward_variance",
        ZERO=bool(include_zero), BLOCK_G=BLOCK_G, BLOCK_B=BLOCK_B, num_warps=8,
    )  # fmt: skip
    return GroupAdvantages(advantages, keep, score, mean, std)


@jit
def _group_row(ids, start, B, g, BLOCK_B: tl.constexpr):
    """Which rows of a block are in which group of a block: [BLOCK_G, BLOCK_B]."""
    rows = start + tl.arange(0, BLOCK_B)
    group = tl.load(ids + rows, mask=rows < B, other=-1)
    return rows, group[None, :] == g[:, None]


# The filter's settings are constants because a run has one set of them (and because a float argument is only 32 bits wide).
@jit(do_not_specialize=["B", "G", "k"], do_not_specialize_on_alignment=["R", "IDS"])
def _group_advantages(
    R, IDS, ADVANTAGE, KEEP, SCORE, MEAN, STD, SCRATCH, B, G, k, VALUE: tl.constexpr, SELECTION_EPS: tl.constexpr,
    EPS: tl.constexpr, SCALE: tl.constexpr, DDOF: tl.constexpr, RULE: tl.constexpr, SOFTMAX: tl.constexpr,
    VARIANCE: tl.constexpr, ZERO: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_B: tl.constexpr,
):  # fmt: skip
    exact_mean, factor, key = SCRATCH, SCRATCH + G, SCRATCH + 2 * G  # float64 [G] each

    # 1. statistics of a block of groups: two passes over the rewards, sums kept one a lane
    top = float("-inf")  # highest score of a candidate
    for g0 in range(0, G, BLOCK_G):
        g = g0 + tl.arange(0, BLOCK_G)
        count = tl.zeros((BLOCK_G, BLOCK_B), tl.float64)
        total = tl.zeros((BLOCK_G, BLOCK_B), tl.float64)
        high = tl.full((BLOCK_G, BLOCK_B), float("-inf"), tl.float32)
        low = tl.full((BLOCK_G, BLOCK_B), float("inf"), tl.float32)
        for start in range(0, B, BLOCK_B):
            rows, mine = _group_row(IDS, start, B, g, BLOCK_B)
            r = tl.load(R + rows, mask=rows < B, other=0.0)[None, :]
            count += tl.where(mine, 1.0, 0.0)
            total += tl.where(mine, r, 0.0)
            high = tl.maximum(high, tl.where(mine, r, float("-inf")))
            low = tl.minimum(low, tl.where(mine, r, float("inf")))
        count_g = tl.sum(count, 1)
        mean = tl.sum(total, 1) / tl.maximum(count_g, 1.0)
        squares = tl.zeros((BLOCK_G, BLOCK_B), tl.float64)
        for start in range(0, B, BLOCK_B):
            rows, mine = _group_row(IDS, start, B, g, BLOCK_B)
            d = tl.load(R + rows, mask=rows < B, other=0.0)[None, :].to(tl.float64) - mean[:, None]
            squares += tl.where(mine, d * d, 0.0)
        # equal rewards are found by comparison: a rounded variance is not exactly 0
        equal = (tl.max(high, 1) <= tl.min(low, 1)) | (count_g <= DDOF)
        variance = tl.where(equal, 0.0, tl.sum(squares, 1) / tl.maximum(count_g - DDOF, 1.0))
        std = tl.sqrt(variance)
        score = (variance if VARIANCE else std).to(tl.float32)
        finite = (tl.abs(score) < float("inf")) & (tl.abs(mean) < float("inf"))  # NaN is not either
        candidate = (count_g > 0) & finite if ZERO else (count_g > 0) & finite & (score > 0)
        inside = g < G
        ranked_by = tl.where(candidate & inside, score, float("-inf"))
        top = tl.maximum(top, tl.max(ranked_by, 0))
        tl.store(MEAN + g, mean.to(tl.float32), mask=inside)
        tl.store(STD + g, std.to(tl.float32), mask=inside)
        tl.store(SCORE + g, score, mask=inside)
        tl.store(exact_mean + g, mean, mask=inside)
        tl.store(factor + g, tl.where(equal, 0.0, 1.0 / (std + EPS) if SCALE else 1.0), mask=inside)
        tl.store(key + g, ranked_by.to(tl.float64), mask=inside)
    tl.debug_barrier()

    # 2. the filter: every group i adds up the groups j that rank before it (higher score, ties by index)
    for g0 in range(0, G, BLOCK_G):
        i = g0 + tl.arange(0, BLOCK_G)
        key_i = tl.load(key + i, mask=i < G, other=float("-inf"))
        rank = tl.zeros((BLOCK_G, BLOCK_B), tl.int32)
        before = tl.zeros((BLOCK_G, BLOCK_B), tl.float64)
        total = tl.zeros((BLOCK_B,), tl.float64)
        for start in range(0, G, BLOCK_B):
            j = start + tl.arange(0, BLOCK_B)
            key_j = tl.load(key + j, mask=j < G, other=float("-inf"))
            there = key_j > float("-inf")
            mass = tl.where(there, tl.exp(key_j - top) if SOFTMAX else key_j, 0.0)
            ahead = (key_j[None, :] > key_i[:, None]) | ((key_j[None, :] == key_i[:, None]) & (j[None, :] < i[:, None]))
            ahead = ahead & there[None, :]
            rank += ahead.to(tl.int32)
            before += tl.where(ahead, mass[None, :], 0.0)
            total += mass
        keep = key_i > float("-inf")
        if RULE == "top_p":
            all_mass = tl.sum(total, 0)
            limit = (VALUE - SELECTION_EPS) * all_mass if SOFTMAX else VALUE * all_mass - SELECTION_EPS
            keep = keep & (tl.sum(before, 1) < limit)
        elif RULE == "top_k":
            keep = keep & (tl.sum(rank, 1) < k)
        elif RULE == "min_p":
            keep = keep & (key_i >= VALUE * top.to(tl.float64))
        tl.store(KEEP + i, keep, mask=i < G)
        tl.store(factor + i, tl.where(keep, tl.load(factor + i, mask=i < G, other=0.0), 0.0), mask=i < G)
    tl.debug_barrier()

    # 3. the rows
    for start in range(0, B, BLOCK_B):
        rows = start + tl.arange(0, BLOCK_B)
        group = tl.load(IDS + rows, mask=rows < B, other=-1)
        exists = (group >= 0) & (group < G)
        f = tl.load(factor + group, mask=exists, other=0.0)
        d = tl.load(R + rows, mask=rows < B, other=0.0).to(tl.float64) - tl.load(exact_mean + group, mask=exists, other=0.0)
        tl.store(ADVANTAGE + rows, tl.where(f == 0, 0.0, d * f).to(tl.float32), mask=rows < B)
