"""The plain torch twins of the Triton kernels: the oracle in float64, and what runs on a CPU.

Each computes the same numbers as its kernel, in the same units, with float32 arithmetic for anything narrower than float64.
They are written to be good on a CPU: rows are taken in chunks that stay in cache, so nothing of size [T, V] is held beside
the logits and, in the backward pass, their gradient.

Shapes: T tokens, V vocabulary, D hidden size, S segments, B episodes, G groups.
"""

from dataclasses import dataclass

import torch

CHUNK = 2**19  # elements of a chunk of logits: 2 MiB in float32, about a core's cache


@dataclass
class GroupAdvantages:
    advantages: torch.Tensor  # [B], 0 in dropped groups
    keep: torch.Tensor  # [G] bool
    score: torch.Tensor  # [G], what the filter ranks by: in-group std, or variance
    mean: torch.Tensor  # [G]
    std: torch.Tensor  # [G], 0 exactly where all rewards are equal


# -- log-prob and entropy ----------------------------------------------------------------------------------------------


class LogprobEntropy(torch.autograd.Function):
    """logits [T, V], targets [T] -> logprob [T], entropy [T]. The backward pass recomputes p from the logits."""

    @staticmethod
    def forward(ctx, logits, targets, temperature, ignore_index):
        dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
        logprob, entropy, lse = (torch.zeros(len(targets), dtype=dtype, device=logits.device) for _ in range(3))
        live = (targets != ignore_index).nonzero()[:, 0]  # ignored rows cost nothing
        for rows in live.split(max(1, CHUNK // logits.shape[1])):
            x = logits[rows].to(dtype).div_(temperature)
            m = x.amax(1, keepdim=True)
            target = x.gather(1, targets[rows, None]).sub_(m).squeeze(1)
            x.sub_(m)  # H = log s - w / s is shift-invariant: everything below is relative to the maximum
            e = x.exp()
            s = e.sum(1)
            x.masked_fill_(e == 0, 0.0)  # p log p -> 0 as p -> 0: -inf logits contribute nothing
            w = x.mul_(e).sum(1)
            log_s = s.log()
            logprob[rows], entropy[rows], lse[rows] = target - log_s, log_s - w / s, m.squeeze(1) + log_s
        ctx.save_for_backward(logits, targets, entropy, lse)
        ctx.temperature, ctx.ignore_index = temperature, ignore_index
        return logprob, entropy

    @staticmethod
    def backward(ctx, grad_logprob, grad_entropy):
        logits, targets, entropy, lse = ctx.saved_tensors
        grad = torch.zeros_like(logits)
        live = (targets != ctx.ignore_index).nonzero()[:, 0]
        for rows in live.split(max(1, CHUNK // logits.shape[1])):
            y = logits[rows].to(lse.dtype).div_(ctx.temperature).sub_(lse[rows, None])  # log p
            p = y.exp()
            y.masked_fill_(p == 0, 0.0)
            # d logprob / dx = [x is target] - p;  d H / dx = -p (log p + H)
            y.add_(entropy[rows, None]).mul_(-grad_entropy[rows, None]).sub_(grad_logprob[rows, None]).mul_(p)
            y.scatter_add_(1, targets[rows, None], grad_logprob[rows, None].to(y.dtype))
            grad[rows] = y.div_(ctx.temperature).to(grad.dtype)
        return grad, None, None, None


def logprob_entropy(logits, targets, temperature, ignore_index):
    """Twin of logprob.logprob_entropy on flattened rows: logits [T, V], targets [T]."""
    return LogprobEntropy.apply(logits, targets, float(temperature), int(ignore_index))


# -- the cross matrix --------------------------------------------------------------------------------------------------


def cross_logprob_matrix(hidden, weight, targets, cu_seqlens, temperature):
    """Twin of cross.cross_logprob_matrix. Logits are made and used a chunk of tokens at a time."""
    dtype = torch.float64 if hidden.dtype == torch.float64 else torch.float32
    logprob = torch.zeros(len(targets), dtype=dtype, device=hidden.device)
    weight = weight.to(dtype)
    for rows in torch.arange(len(targets), device=hidden.device).split(max(1, 4 * CHUNK // len(weight))):
        logits = (hidden[rows].to(dtype) @ weight.T).div_(temperature)
        logprob[rows] = logits.gather(1, targets[rows, None]).squeeze(1) - logits.logsumexp(1)
    segment = torch.arange(len(cu_seqlens) - 1, device=hidden.device).repeat_interleave(
        (cu_seqlens[1:] - cu_seqlens[:-1]).long()
    )
    first, last = int(cu_seqlens[0]), int(cu_seqlens[-1])
    return torch.zeros(len(cu_seqlens) - 1, dtype=dtype, device=hidden.device).index_add_(
        0, segment, logprob[first:last]
    )


# -- advantages --------------------------------------------------------------------------------------------------------


def group_advantages(
    rewards,
    group_ids,
    groups,
    scale,
    ddof,
    eps,
    filter,
    filter_value,
    filter_mode,
    filter_metric,
    include_zero,
    selection_eps,
):
    """Twin of advantage.group_advantages; the meaning of every argument stands there."""
    r = rewards if rewards.dtype == torch.float64 else rewards.float()
    ids = group_ids.long()
    count = torch.zeros(groups, dtype=r.dtype, device=r.device).index_add_(0, ids, torch.ones_like(r))
    high = torch.full_like(count, -torch.inf).scatter_reduce_(0, ids, r, "amax")
    low = torch.full_like(count, torch.inf).scatter_reduce_(0, ids, r, "amin")
    # Equal rewards have score exactly 0: decided by comparing them, since a computed variance is rounded.
    equal = (high <= low) | (count <= ddof)
    low = torch.where(count > 0, low, 0.0)
    deviation = r - low[ids]  # relative to the lowest reward: a large common part never meets a small spread
    above = torch.zeros_like(count).index_add_(0, ids, deviation) / count.clamp(min=1)
    above = torch.where(equal, 0.0, above)
    deviation = deviation - above[ids]
    squares = torch.zeros_like(count).index_add_(0, ids, deviation**2)
    variance = torch.where(equal, 0.0, squares / (count - ddof).clamp(min=1))
    std = variance.sqrt()
    score = std if filter_metric == "reward_std" else variance
    candidate = (count > 0) if include_zero else (count > 0) & (score > 0)
    # rank by comparison: before[i, j] = group j is ranked before group i (higher score; ties by index)
    index = torch.arange(groups, device=r.device)
    s = torch.where(candidate, score, -torch.inf)
    before = (s[None, :] > s[:, None]) | ((s[None, :] == s[:, None]) & (index[None, :] < index[:, None]))
    rank = before.sum(1)
    if filter == "none":
        keep = candidate
    elif filter == "top_p":
        if filter_mode == "linear":
            candidate = candidate & (score > 0)
            mass = torch.where(candidate, score, 0.0)
            limit = filter_value * mass.sum() - selection_eps
        else:
            mass = torch.where(candidate, (score - torch.where(candidate, score, -torch.inf).amax()).exp(), 0.0)
            mass = mass / mass.sum().clamp(min=torch.finfo(mass.dtype).tiny)
            limit = filter_value - selection_eps
        keep = candidate & (torch.where(before, mass[None, :], 0.0).sum(1) < limit)
    elif filter == "top_k":
        keep = candidate & (rank < filter_value * groups)
    elif filter == "top_k_abs":
        keep = candidate & (rank < filter_value)
    else:  # min_p
        keep = candidate & (score >= filter_value * score.amax())
    advantage = deviation / (std[ids] + eps) if scale == "std" else deviation
    advantage = torch.where(keep[ids] & ~equal[ids], advantage, 0.0)
    return GroupAdvantages(advantage, keep, score, low + above, std)
