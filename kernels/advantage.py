"""Group-relative advantages with variance-based filtering of groups (RAGEN-2's SNR filter), in one launch, without a host sync.

    result = group_advantages(rewards, group_ids, filter="top_p", filter_value=0.9, include_zero=False, num_groups=G)
    result.advantages [B], result.keep [G], result.score [G], result.mean [G], result.std [G]

Within a group, advantage = (r - mean) / (std + eps). A group of equal rewards has no task gradient, only noise and
regularisers; the filter ranks groups by their reward spread and keeps the informative ones (RAGEN-2, arXiv 2604.06268,
SNR-aware filtering). No sort is needed: with "j before i" for score_j > score_i, or equal scores and j < i,

    rank_i = sum_j [j before i]        mass_before_i = sum_j [j before i] mass_j

so every group decides for itself. One program does everything in three phases with a barrier between them: statistics of each
group, the filter, the rows. G and B are at most a few thousand, and the cost of launches is what is saved. Sums are float64:
those of float32 rewards are then all but exact, so groups with the same rewards tie whatever the order of their rows, and the
reference implementation breaks every tie in the same way.
"""

from __future__ import annotations

import math

import torch

from nanoragen.kernels import reference
from nanoragen.kernels.dispatch import jit, tl, use_triton
from nanoragen.kernels.reference import GroupAdvantages

FILTERS = ("none", "top_p", "top_k", "top_k_abs", "min_p")
BLOCK_G, BLOCK_B = 16, 128  # a tile of groups x rows, or of groups x groups


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
                 "top_p"      the fewest of highest score whose mass reaches filter_value: group i stays if the mass before it
                              is below filter_value * total - selection_eps (ties by index). Mass: the score itself
                              ("linear", where score 0 is never kept) or softmax of the scores ("softmax", total 1).
                              filter_value 1 without selection_eps keeps all of them, however small their mass
                 "top_k"      the filter_value * G of highest score, rounded up
                 "top_k_abs"  the filter_value groups of highest score
                 "min_p"      those with score at least filter_value * the highest
    num_groups   G; None: the highest id + 1 (which on CUDA waits for the device, so pass it there). A group without rows
                 has mean, std and score 0 and is not kept

    Returns float32 (float64 for float64, torch only). Dropped groups have advantage 0; so have groups of equal rewards and of
    one. A group with a reward that is not finite has score and std NaN and is never kept: checking rewards is left to the
    caller, who still knows the episode (here it would wait for the device). ValueError for a setting that is none of the above
    or, on a CPU, an id outside 0 to G - 1.
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
    # the five filters are four rules: none, top_p, top_k (a number of groups), min_p
    softmax, value, k, rule = filter_mode == "softmax", float(filter_value), 0, filter
    if filter == "top_p" and not softmax:
        include_zero = False
    if filter == "top_p" and value >= 1 and selection_eps == 0:
        rule = "none"  # all of positive score: rounding may hide the smallest from a sum
    if filter in ("top_k", "top_k_abs"):
        rule, k = "top_k", math.ceil(round(value * G, 6)) if filter == "top_k" else int(value)
    kernel = use_triton(backend, rewards) and rewards.dtype != torch.float64 and G > 0
    return (_launch if kernel else reference.group_advantages)(
        rewards, group_ids, G, scale, ddof, eps, rule, value, k, softmax, filter_metric, include_zero, selection_eps
    )


def _launch(rewards, group_ids, G, scale, ddof, eps, rule, value, k, softmax, metric, include_zero, selection_eps):
    B, rewards, group_ids = len(rewards), rewards.float().contiguous(), group_ids.contiguous()
    advantages = torch.empty_like(rewards)
    score, mean, std = (torch.empty(G, dtype=torch.float32, device=rewards.device) for _ in range(3))
    keep = torch.empty(G, dtype=torch.bool, device=rewards.device)
    scratch = torch.empty(3, G, dtype=torch.float64, device=rewards.device)
    _group_advantages_kernel[(1,)](
        rewards, group_ids, advantages, keep, score, mean, std, scratch, B, G, k, VALUE=value, SELECTION_EPS=float(selection_eps),
        EPS=float(eps), DIVIDE_BY_STD=scale == "std", DDOF=ddof, RULE=rule, SOFTMAX=softmax,
        VARIANCE=metric == "reward_variance", INCLUDE_ZERO=bool(include_zero), BLOCK_G=BLOCK_G, BLOCK_B=BLOCK_B, num_warps=8,
    )  # fmt: skip
    return GroupAdvantages(advantages, keep, score, mean, std)


@jit
def _membership(group_ids_ptr, start, B, groups, BLOCK_B: tl.constexpr):
    """Rows start .. start + BLOCK_B, and which of them are in which of the groups: [BLOCK_G, BLOCK_B]."""
    rows = start + tl.arange(0, BLOCK_B)
    ids = tl.load(group_ids_ptr + rows, mask=rows < B, other=-1)
    return rows, ids[None, :] == groups[:, None]


# The filter's settings are constants: a run has one set of them, and a float argument would be only 32 bits wide.
@jit(do_not_specialize=["B", "G", "k"], do_not_specialize_on_alignment=["rewards_ptr", "group_ids_ptr"])
def _group_advantages_kernel(
    rewards_ptr, group_ids_ptr, advantages_ptr, keep_ptr, score_ptr, mean_ptr, std_ptr, scratch_ptr, B, G, k,
    VALUE: tl.constexpr, SELECTION_EPS: tl.constexpr, EPS: tl.constexpr, DIVIDE_BY_STD: tl.constexpr, DDOF: tl.constexpr,
    RULE: tl.constexpr, SOFTMAX: tl.constexpr, VARIANCE: tl.constexpr, INCLUDE_ZERO: tl.constexpr,
    BLOCK_G: tl.constexpr, BLOCK_B: tl.constexpr,
):  # fmt: skip
    # float64 [G] each: the mean, what a deviation is multiplied by, and what the filter ranks by
    exact_mean_ptr, factor_ptr, key_ptr = scratch_ptr, scratch_ptr + G, scratch_ptr + 2 * G

    # 1. Statistics of a block of groups, in two passes over the rewards; each lane keeps its own sum.
    top_key = float("-inf")
    for g0 in range(0, G, BLOCK_G):
        groups = g0 + tl.arange(0, BLOCK_G)
        count = tl.zeros((BLOCK_G, BLOCK_B), tl.float64)
        total = tl.zeros((BLOCK_G, BLOCK_B), tl.float64)
        highest = tl.full((BLOCK_G, BLOCK_B), float("-inf"), tl.float32)
        lowest = tl.full((BLOCK_G, BLOCK_B), float("inf"), tl.float32)
        for start in range(0, B, BLOCK_B):
            rows, member = _membership(group_ids_ptr, start, B, groups, BLOCK_B)
            r = tl.load(rewards_ptr + rows, mask=rows < B, other=0.0)[None, :]
            count += tl.where(member, 1.0, 0.0)
            total += tl.where(member, r, 0.0)
            highest = tl.maximum(highest, tl.where(member, r, float("-inf")))
            lowest = tl.minimum(lowest, tl.where(member, r, float("inf")))
        n = tl.sum(count, 1)
        mean = tl.sum(total, 1) / tl.maximum(n, 1.0)
        squares = tl.zeros((BLOCK_G, BLOCK_B), tl.float64)
        for start in range(0, B, BLOCK_B):
            rows, member = _membership(group_ids_ptr, start, B, groups, BLOCK_B)
            d = tl.load(rewards_ptr + rows, mask=rows < B, other=0.0)[None, :].to(tl.float64) - mean[:, None]
            squares += tl.where(member, d * d, 0.0)
        # Equal rewards are found by comparison, since a rounded variance is not exactly 0. max and min skip a NaN, the mean
        # does not: a reward that is not finite makes the group's mean so, and its variance NaN.
        equal = ((tl.max(highest, 1) <= tl.min(lowest, 1)) | (n <= DDOF)) & (tl.abs(mean) < float("inf"))
        variance = tl.where(equal, 0.0, tl.sum(squares, 1) / tl.maximum(n - DDOF, 1.0))
        std = tl.sqrt(variance)
        score = (variance if VARIANCE else std).to(tl.float32)
        candidate = (n > 0) & (score < float("inf"))  # false for NaN
        if not INCLUDE_ZERO:
            candidate = candidate & (score > 0)
        inside = groups < G
        key = tl.where(candidate & inside, score, float("-inf"))
        top_key = tl.maximum(top_key, tl.max(key, 0))
        tl.store(mean_ptr + groups, mean.to(tl.float32), mask=inside)
        tl.store(std_ptr + groups, std.to(tl.float32), mask=inside)
        tl.store(score_ptr + groups, score, mask=inside)
        tl.store(exact_mean_ptr + groups, mean, mask=inside)
        tl.store(factor_ptr + groups, tl.where(equal, 0.0, 1.0 / (std + EPS) if DIVIDE_BY_STD else 1.0), mask=inside)
        tl.store(key_ptr + groups, key.to(tl.float64), mask=inside)
    tl.debug_barrier()

    # 2. The filter: every group i adds up the groups j before it.
    for g0 in range(0, G, BLOCK_G):
        i = g0 + tl.arange(0, BLOCK_G)
        key_i = tl.load(key_ptr + i, mask=i < G, other=float("-inf"))
        rank = tl.zeros((BLOCK_G, BLOCK_B), tl.int32)
        mass_before = tl.zeros((BLOCK_G, BLOCK_B), tl.float64)
        total_mass = tl.zeros((BLOCK_B,), tl.float64)
        for start in range(0, G, BLOCK_B):
            j = start + tl.arange(0, BLOCK_B)
            key_j = tl.load(key_ptr + j, mask=j < G, other=float("-inf"))
            candidate = key_j > float("-inf")
            mass = tl.where(candidate, tl.exp(key_j - top_key) if SOFTMAX else key_j, 0.0)
            before = (key_j[None, :] > key_i[:, None]) | ((key_j[None, :] == key_i[:, None]) & (j[None, :] < i[:, None]))
            before = before & candidate[None, :]
            rank += before.to(tl.int32)
            mass_before += tl.where(before, mass[None, :], 0.0)
            total_mass += mass
        keep = key_i > float("-inf")
        if RULE == "top_p":
            needed = tl.sum(total_mass, 0)
            needed = (VALUE - SELECTION_EPS) * needed if SOFTMAX else VALUE * needed - SELECTION_EPS
            keep = keep & (tl.sum(mass_before, 1) < needed)
        elif RULE == "top_k":
            keep = keep & (tl.sum(rank, 1) < k)
        elif RULE == "min_p":
            keep = keep & (key_i >= VALUE * top_key.to(tl.float64))
        tl.store(keep_ptr + i, keep, mask=i < G)
        tl.store(factor_ptr + i, tl.where(keep, tl.load(factor_ptr + i, mask=i < G, other=0.0), 0.0), mask=i < G)
    tl.debug_barrier()

    # 3. The rows.
    for start in range(0, B, BLOCK_B):
        rows = start + tl.arange(0, BLOCK_B)
        group = tl.load(group_ids_ptr + rows, mask=rows < B, other=-1)
        valid = (group >= 0) & (group < G)
        factor = tl.load(factor_ptr + group, mask=valid, other=0.0)
        r = tl.load(rewards_ptr + rows, mask=rows < B, other=0.0).to(tl.float64)
        d = r - tl.load(exact_mean_ptr + group, mask=valid, other=0.0)
        tl.store(advantages_ptr + rows, tl.where(factor == 0, 0.0, d * factor).to(tl.float32), mask=rows < B)
