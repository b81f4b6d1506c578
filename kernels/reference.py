"""Reference implementations of the Triton kernels in plain torch: the oracle of their tests in float64, and what runs on a CPU.

Each computes the same numbers as its kernel, in the same units, with float32 arithmetic for anything narrower than float64.
They are written to be fast on a CPU: rows are taken in chunks that stay in the cache, so nothing of size [T, V] is held beside
the logits and, in the backward pass, their gradient.

Shapes: T tokens, P packed tokens, V vocabulary, D hidden size, S segments, B episodes, G groups.
"""

import math
from dataclasses import dataclass

import torch
from torch.autograd.function import once_differentiable

MIN_LOG_P = -1e4  # p = 0 from there on even in float64, and times any upstream gradient it is finite: 0 * it is 0, not NaN
COLUMNS = 2**14  # vocabulary entries whose weights are held in float32 at a time


def chunk_size(tensor) -> int:
    """Logits of a chunk: 2 MiB in float32, about a core's cache; on other devices the number of launches counts more."""
    return 2**19 if tensor.device.type == "cpu" else 2**24


# -- log-prob and entropy ----------------------------------------------------------------------------------------------


def as_rows(logits):
    """A view [n0, n1, V] of [..., V]: leading dimensions are merged where their strides allow it, as in a slice
    logits[:, :-1]. A copy only where the last stride is not 1 or more than two dimensions are left."""
    *sizes, V = logits.shape
    dims = [[1, 0], [1, 0]]  # [size, stride], innermost last
    for size, stride in zip(sizes, logits.stride()):
        if size == 1:
            continue
        if dims[-1][0] != 1 and dims[-1][1] == size * stride:
            dims[-1] = [dims[-1][0] * size, stride]
        else:
            dims.append([size, stride])
    if (logits.stride(-1) != 1 and V > 1) or any(size != 1 for size, _ in dims[:-2]):
        return logits.reshape(1, -1, V).contiguous()
    (n0, stride0), (n1, stride1) = dims[-2:]
    return logits.as_strided((n0, n1, V), (stride0, stride1, 1))


def gather_rows(rows, t):
    """Copies of rows t of [n0, n1, V], counted over both: [len(t), V]."""
    n0, n1, _ = rows.shape
    return rows[0].index_select(0, t) if n0 == 1 else rows[t // n1, t % n1]


def scatter_rows(rows, t, values):
    """Write values [len(t), V] to rows t of [n0, n1, V]."""
    n0, n1, _ = rows.shape
    if n0 == 1:
        rows[0][t] = values
    else:
        rows[t // n1, t % n1] = values


class LogprobEntropy(torch.autograd.Function):
    """logits [..., V], targets [...] -> logprob [...], entropy [...]. The backward pass recomputes p from the logits."""

    @staticmethod
    def forward(ctx, logits, targets, temperature, ignore_index, inplace=False):
        dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
        rows, targets = as_rows(logits), targets.reshape(-1).long()
        V = rows.shape[2]
        logprob, entropy, row_max, log_s = (torch.zeros(len(targets), dtype=dtype, device=logits.device) for _ in range(4))
        live = (targets != ignore_index).nonzero()[:, 0]
        for t in live.split(max(1, chunk_size(logits) // V)):
            x = gather_rows(rows, t).to(dtype)
            m = x.amax(1)
            # H = log s - w / s is shift-invariant: all below is relative to the maximum, subtracted first as that is exact
            x.sub_(torch.where(m == -torch.inf, 0.0, m)[:, None]).div_(temperature)
            target = x.gather(1, targets[t, None]).squeeze(1)
            e = x.exp()
            s = e.sum(1)
            w = x.clamp_(min=-1e30).mul_(e).sum(1)  # e = 0 at x = -inf, and 0 * -inf would be NaN
            row_max[t], log_s[t] = m, s.log()
            logprob[t], entropy[t] = target - log_s[t], log_s[t] - w / s
        ctx.save_for_backward(logits, targets, entropy, row_max, log_s)
        ctx.temperature, ctx.ignore_index, ctx.inplace = temperature, ignore_index, inplace
        return logprob.view(logits.shape[:-1]), entropy.view(logits.shape[:-1])

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_logprob, grad_entropy):
        logits, targets, entropy, row_max, log_s = ctx.saved_tensors
        rows, g, h = as_rows(logits), grad_logprob.reshape(-1, 1), grad_entropy.reshape(-1, 1)
        V = rows.shape[2]
        entropy = entropy.reshape(-1, 1)
        grad = logits.detach() if ctx.inplace else torch.zeros(logits.shape, dtype=logits.dtype, device=logits.device)
        out = as_rows(grad)
        if ctx.inplace:
            scatter_rows(out, (targets == ctx.ignore_index).nonzero()[:, 0], 0.0)
        live = (targets != ctx.ignore_index).nonzero()[:, 0]
        for t in live.split(max(1, chunk_size(logits) // V)):
            y = gather_rows(rows, t).to(row_max.dtype).sub_(row_max[t, None]).div_(ctx.temperature).sub_(log_s[t, None])  # log p
            p = y.exp()
            # d logprob / dx = [x is target] - p;  d H / dx = -p (log p + H)
            y.clamp_(min=MIN_LOG_P).add_(entropy[t]).mul_(-h[t]).sub_(g[t]).mul_(p)
            y.scatter_add_(1, targets[t, None], g[t].to(y.dtype))
            scatter_rows(out, t, y.div_(ctx.temperature).to(grad.dtype))
        return grad, None, None, None, None


def logprob_entropy(logits, targets, temperature, ignore_index, inplace=False):
    """Reference implementation of logprob.logprob_entropy."""
    return LogprobEntropy.apply(logits, targets, float(temperature), int(ignore_index), inplace)


# -- log-prob and entropy from hidden states ---------------------------------------------------------------------------


def tile(P, V, most, workspace, element, column):
    """(tokens, columns) of a tile of logits: at most `most` logits, and `workspace` bytes, where a logit needs `element` bytes
    and a column `column` more. A square where P allows: gradients are passed over once a tile, so the shorter side sets the
    traffic. The side solves side * (side * element + column) = workspace."""
    side = (math.isqrt(column**2 + 4 * element * workspace) - column) // (2 * element)
    tokens = max(1, min(P, side, math.isqrt(most)))
    return tokens, max(1, min(V, most // tokens, workspace // (tokens * element + column)))


def slices(n, size):
    return [slice(i, min(i + size, n)) for i in range(0, n, size)]


def linear_forward(hidden, weight, bias, targets, temperature, workspace):
    """hidden [P, D], weight [V, D], bias [V] or None, targets [P] -> logprob, entropy, row_max, log_s, [P] each."""
    dtype = torch.float64 if torch.float64 in (hidden.dtype, weight.dtype) else torch.float32
    (P, D), V = hidden.shape, len(weight)
    h = hidden.to(dtype) / temperature  # so that nothing of the logits' size has to be divided
    s, w = (torch.zeros(P, dtype=dtype, device=h.device) for _ in range(2))
    m, target = torch.full_like(s, -torch.inf), torch.full_like(s, torch.nan)
    # two chunks a tile: element-wise passes are short beside the product, and threads wait for each other less often
    copies = D * h.element_size() if weight.dtype != dtype else 0
    tokens, columns = tile(P, V, 2 * chunk_size(h), workspace, 2 * h.element_size(), copies)
    buffers = h.new_empty(2, tokens * columns)
    for v in slices(V, columns):
        head, b = weight[v].to(dtype), None if bias is None else bias[v].to(dtype) / temperature
        for t in slices(P, tokens):
            x, e = _logits(h[t], head, b, buffers)
            inside, y = _inside(targets[t], v)
            target[t] = torch.where(inside, x.gather(1, y[:, None])[:, 0], target[t])
            m_new = torch.maximum(m[t], x.amax(1))
            shift = torch.where(m_new == -torch.inf, 0.0, m_new)
            delta = (m[t] - shift).clamp_(min=-1e30)  # as below: 0 * -inf would be NaN
            alpha, e = delta.exp(), torch.exp(x.sub_(shift[:, None]), out=e)
            w[t] = alpha * (w[t] + delta * s[t]) + x.clamp_(min=-1e30).mul_(e).sum(1)
            s[t] = alpha * s[t] + e.sum(1)
            m[t] = m_new
    log_s = s.log()
    return target - m - log_s, log_s - w / s, m, log_s


def linear_backward(hidden, weight, bias, targets, temperature, workspace, saved, g, h, wanted):
    """Gradients of hidden, weight and bias, or None where not wanted, from the upstream gradients g and h [P]."""
    entropy, row_max, log_s = (t[:, None] for t in saved)
    dtype, (P, D), V = log_s.dtype, hidden.shape, len(weight)
    g, h, x_in = g[:, None], h[:, None], hidden.to(dtype) / temperature
    grad_hidden = torch.zeros(P, D, dtype=dtype, device=hidden.device) if wanted[0] else None
    grad_weight = torch.empty(V, D, dtype=weight.dtype, device=hidden.device) if wanted[1] else None
    grad_bias = torch.empty(V, dtype=bias.dtype, device=hidden.device) if wanted[2] else None
    copies = D * x_in.element_size() * (1 + (weight.dtype != dtype))
    tokens, columns = tile(P, V, 2 * chunk_size(x_in), workspace, 2 * x_in.element_size(), copies)
    buffers = x_in.new_empty(2, tokens * columns)
    for v in slices(V, columns):
        head, b = weight[v].to(dtype), None if bias is None else bias[v].to(dtype) / temperature
        sum_weight, sum_bias = torch.zeros_like(head), head.new_zeros(len(head))
        for t in slices(P, tokens):
            d, p = _logits(x_in[t], head, b, buffers)
            torch.exp(d.sub_(row_max[t]).sub_(log_s[t]), out=p)  # d is log p
            d.clamp_(min=MIN_LOG_P).add_(entropy[t]).mul_(-h[t]).sub_(g[t]).mul_(p)
            inside, y = _inside(targets[t], v)
            d.scatter_add_(1, y[:, None], torch.where(inside[:, None], g[t], 0.0))
            if wanted[0]:
                grad_hidden[t].addmm_(d, head)
            if wanted[1]:
                sum_weight.addmm_(d.T, x_in[t])
            if wanted[2]:
                sum_bias += d.sum(0)
        if wanted[1]:
            grad_weight[v] = sum_weight  # x_in carries the 1 / temperature
        if wanted[2]:
            grad_bias[v] = sum_bias / temperature
    return grad_hidden.div_(temperature).to(hidden.dtype) if wanted[0] else None, grad_weight, grad_bias


def _logits(h, head, bias, buffers):
    """h @ head.T + bias, written to the first of two buffers; and the second, in the same shape."""
    x, other = (b[: len(h) * len(head)].view(len(h), len(head)) for b in buffers)
    torch.mm(h, head.T, out=x) if bias is None else torch.addmm(bias, h, head.T, out=x)
    return x, other


def _inside(targets, v):
    """Which targets are in slice v of the vocabulary, and their index in it (any valid one for the others)."""
    y = targets - v.start
    return (y >= 0) & (targets < v.stop), y.clamp(0, v.stop - v.start - 1)


# -- the cross matrix --------------------------------------------------------------------------------------------------


def cross_logprob_matrix(hidden, weight, targets, cu_seqlens, temperature):
    """Reference implementation of cross.cross_logprob_matrix, in chunks of tokens and of the vocabulary."""
    dtype = torch.float64 if hidden.dtype == torch.float64 else torch.float32
    (P, _), V, targets = hidden.shape, len(weight), targets.long()
    target = torch.full((P,), torch.nan, dtype=dtype, device=hidden.device)
    lse = torch.full_like(target, -torch.inf)
    tokens = torch.arange(P, device=hidden.device)
    with torch.autocast(hidden.device.type, enabled=False):  # which would round the logits
        for first in range(0, V, COLUMNS):
            w = weight[first : first + COLUMNS].to(dtype)
            for t in tokens.split(max(1, 4 * chunk_size(hidden) // len(w))):
                x = (hidden[t].to(dtype) @ w.T).div_(temperature)
                inside, y = _inside(targets[t], slice(first, first + len(w)))
                target[t] = torch.where(inside, x.gather(1, y[:, None])[:, 0], target[t])
                lse[t] = torch.logaddexp(lse[t], x.logsumexp(1))
    lengths = (cu_seqlens[1:] - cu_seqlens[:-1]).long()
    if not len(lengths):
        return target.new_zeros(0)
    token = (target - lse)[int(cu_seqlens[0]) : int(cu_seqlens[-1])]
    return torch.segment_reduce(token, "sum", lengths=lengths, initial=0)


# -- advantages --------------------------------------------------------------------------------------------------------


@dataclass
class GroupAdvantages:
    advantages: torch.Tensor  # [B], 0 in dropped groups
    keep: torch.Tensor  # [G] bool
    score: torch.Tensor  # [G], what the filter ranks by: in-group std or variance
    mean: torch.Tensor  # [G]
    std: torch.Tensor  # [G], 0 exactly where all rewards are equal


def group_advantages(rewards, group_ids, G, scale, ddof, eps, rule, value, k, softmax, metric, include_zero, selection_eps):
    """Reference implementation of advantage.group_advantages, where every argument is explained. float64 inside, as there."""
    out = rewards.dtype if rewards.dtype == torch.float64 else torch.float32
    wide = torch.float32 if rewards.device.type == "mps" else torch.float64  # mps has no float64
    r, ids = rewards.detach().to(wide), group_ids.long()
    zero = torch.zeros(G, dtype=wide, device=r.device)
    count = zero.index_add(0, ids, torch.ones_like(r))
    high = (zero - torch.inf).scatter_reduce(0, ids, r, "amax")
    low = (zero + torch.inf).scatter_reduce(0, ids, r, "amin")
    mean = zero.index_add(0, ids, r) / count.clamp(min=1)
    # equal rewards are found by comparison, since a rounded variance is not exactly 0; with a reward that is not finite the
    # variance is NaN
    equal = ((high <= low) | (count <= ddof)) & mean.isfinite()
    squares = zero.index_add(0, ids, (r - mean[ids]) ** 2)
    variance = torch.where(equal, 0.0, squares / (count - ddof).clamp(min=1))
    std = variance.sqrt()
    score = (std if metric == "reward_std" else variance).to(out)
    s = score.to(wide)
    candidate = (count > 0) & s.isfinite() & ((s > 0) | include_zero)
    s = torch.where(candidate, s, -torch.inf)
    top = s.amax() if G else 0.0
    index = torch.arange(G, device=r.device)
    # before[i, j]: group j ranks before group i (higher score, ties by index)
    before = candidate & ((s > s[:, None]) | ((s == s[:, None]) & (index < index[:, None])))
    if rule == "top_p":
        mass = torch.where(candidate, (s - top).exp() if softmax else s, 0.0)
        limit = (value - selection_eps) * mass.sum() if softmax else value * mass.sum() - selection_eps
        keep = candidate & (torch.where(before, mass, 0.0).sum(1) < limit)
    elif rule == "top_k":
        keep = candidate & (before.sum(1) < k)
    elif rule == "min_p":
        keep = candidate & (s >= value * top)
    else:
        keep = candidate
    advantage = r - mean[ids]
    if scale == "std":
        advantage = advantage / (std + eps)[ids]
    advantage = torch.where((keep & ~equal)[ids], advantage, 0.0)
    return GroupAdvantages(advantage.to(out), keep, score, mean.to(out), std.to(out))


# -- the policy loss ---------------------------------------------------------------------------------------------------


@dataclass
class PolicyStats:
    logprob: torch.Tensor  # [...] log p(target)
    entropy: torch.Tensor  # [...] of the whole distribution, nats
    clipped: torch.Tensor  # [...] 1 where the clip has taken the gradient away, else 0
    kl: torch.Tensor  # [...] estimate of KL(policy || reference), 0 without a reference


def policy_loss(
    logits, targets, old, advantages, weights, ref, low, high, beta, kl, entropy_coef, temperature, ignore_index, inplace
):  # fmt: skip
    """Reference implementation of policy.policy_loss: autograd does the [T] part, LogprobEntropy the logits."""
    logprob, entropy = logprob_entropy(logits, targets, temperature, ignore_index, inplace)
    live = targets != ignore_index
    weights = torch.where(live, weights.detach(), 0.0)
    A = torch.where(weights == 0, 0.0, advantages.detach())
    log_ratio = torch.where(live, logprob - (logprob if old is None else old).detach(), 0.0)
    with torch.no_grad():
        ratio = log_ratio.exp()
        clipped = (A > 0) & (ratio > high) | (A < 0) & (ratio < low)
    # where the clip is active, or A is 0, neither the ratio nor its gradient is formed: it may overflow
    policy = -A * torch.where(clipped, ratio.clamp(low, high), torch.where(clipped | (A == 0), 0.0, log_ratio).exp())
    loss = policy - entropy_coef * entropy
    estimate = torch.zeros_like(logprob)
    if ref is not None:
        estimate = _kl(torch.where(live, ref.detach() - logprob.detach(), 0.0), kl)  # measured at weight 0 too
        if beta:
            loss = loss + beta * _kl(torch.where(weights == 0, 0.0, ref.detach() - logprob), kl)
    stats = PolicyStats(*(t.detach() for t in (logprob, entropy, clipped.to(logprob.dtype), estimate.to(logprob.dtype))))
    return torch.where(weights == 0, 0.0, weights * loss).sum().to(logprob.dtype), stats


def _kl(d, kind):
    d = d.clamp(-20, 20)  # a factor of 5e8: exp cannot overflow
    return {"k1": -d, "k2": d * d / 2, "k3": d.exp() - d - 1}[kind]


# -- statistics of the cross matrix ------------------------------------------------------------------------------------


@dataclass
class CrossStatistics:
    matched: torch.Tensor  # [M] float64, log p(z_i | its own prompt)
    marginal: torch.Tensor  # [M] float64, log p_mix(z_i)
    above: torch.Tensor  # [M] int32, prompts that score higher than the own one
    tied: torch.Tensor  # [M] int32, prompts that score the same, the own one among them


def cross_statistics(sums, own, weights, tie):
    """Reference implementation of cross.cross_statistics."""
    L = sums.double()
    matched = L.gather(1, own[:, None])
    tolerance = torch.where(matched.isfinite(), tie * matched.abs().clamp(min=1.0), 0.0)
    # a column of weight 0 is no part of the mixture, not even where L is NaN or inf there
    marginal = torch.where(weights > 0, L + weights.double().log(), -torch.inf).logsumexp(1)
    same = torch.arange(L.shape[1], device=L.device) == own[:, None]  # the own one counts whatever it is
    above, tied = (L - matched > tolerance).sum(1), ((L - matched).abs().le(tolerance) | (L == matched) | same).sum(1)
    return CrossStatistics(matched[:, 0], marginal, above.int(), tied.int())
