"""The cross-prompt log-prob matrix: sums of token log-probs of many (reasoning, prompt) pairs, straight from hidden states.

    sums = cross_logprob_matrix(hidden, weight, targets, cu_seqlens)     # [S], one number a pair
    stats = cross_statistics(sums.view(M, N), own)                       # what the collapse metrics need, [M] each

Segment s is the tokens cu_seqlens[s] to cu_seqlens[s + 1]. For each, log softmax(hidden @ weight.T / temperature)[target] is
summed. The logits never reach memory: the tokens' log-probs come from linear.py's kernels, without the entropy. A small kernel
then sums each segment in a fixed order, without atomics, so a pair's sum has the same bits whatever else is measured. Forward
only: this is a diagnosis. Source: RAGEN-2 (arXiv 2604.06268), the estimate of I(X; Z).
"""

from __future__ import annotations

import torch

from nanoragen.kernels import linear, reference
from nanoragen.kernels.dispatch import jit, tl, use_triton
from nanoragen.kernels.logprob import check_targets
from nanoragen.kernels.reference import CrossStatistics

TIE = 1e-6  # scores this close, relative to the own one, count as equal: a few units of float32 rounding of a sum of log-probs


def cross_logprob_matrix(hidden, weight, targets, cu_seqlens, *, temperature=1.0, backend="auto"):
    """hidden [P, D], weight [V, D] (the LM head), targets [P] integer, cu_seqlens [S + 1] integer, rising from 0 to P.

    Returns [S] float32 (float64 for float64, torch only), nats; 0 for an empty segment. No gradient. Any number of segments.
    Products are taken in hidden's dtype and summed in float32. ValueError for shapes that do not fit or a temperature of 0 or
    less. IndexError for a target outside the vocabulary on a CPU; on a GPU, where looking would wait for the device, its
    segment is NaN.
    """
    fits = hidden.ndim == weight.ndim == 2 and hidden.shape[1] == weight.shape[1] and targets.shape == hidden.shape[:1]
    if not fits or cu_seqlens.ndim != 1 or len(cu_seqlens) < 1 or len(weight) == 0:
        raise ValueError(
            f"hidden {tuple(hidden.shape)}, weight {tuple(weight.shape)}, targets {tuple(targets.shape)}, cu_seqlens "
            f"{tuple(cu_seqlens.shape)} do not fit; valid: [P, D], [V, D], [P], [S + 1]"
        )
    check_targets(targets, len(weight), temperature)
    on_cpu = cu_seqlens.device.type == "cpu"  # elsewhere the host would have to wait to see
    if on_cpu and not (cu_seqlens[0] == 0 and cu_seqlens[-1] == len(targets) and (cu_seqlens.diff() >= 0).all()):
        raise ValueError(f"cu_seqlens: {int(cu_seqlens[0])} to {int(cu_seqlens[-1])}; valid: rising from 0 to {len(targets)}")
    hidden, weight = hidden.detach(), weight.detach()
    if not (use_triton(backend, hidden) and hidden.dtype != torch.float64):
        return reference.cross_logprob_matrix(hidden, weight, targets, cu_seqlens, float(temperature))
    logprob, *_ = linear.forward(hidden, weight, None, targets.long(), float(temperature), with_entropy=False)
    S = len(cu_seqlens) - 1
    sums = torch.empty(S, dtype=torch.float32, device=hidden.device)
    if S:
        _segment_sum_kernel[(S,)](logprob, cu_seqlens.contiguous(), sums, BLOCK=128, num_warps=1)
    return sums


@jit
def _segment_sum_kernel(logprob_ptr, cu_seqlens_ptr, sums_ptr, BLOCK: tl.constexpr):
    """One program a segment, its tokens in blocks from its own first one: the order does not depend on other segments."""
    segment = tl.program_id(0).to(tl.int64)
    first = tl.load(cu_seqlens_ptr + segment).to(tl.int64)
    end = tl.load(cu_seqlens_ptr + segment + 1).to(tl.int64)
    sums = tl.zeros((BLOCK,), tl.float32)
    for start in range(first, end, BLOCK):
        tokens = start + tl.arange(0, BLOCK)
        sums += tl.load(logprob_ptr + tokens, mask=tokens < end, other=0.0)
    tl.store(sums_ptr + segment, tl.sum(sums, 0))


def cross_statistics(sums, own, weights=None, *, backend="auto") -> CrossStatistics:
    """Row statistics of the cross matrix, in one launch and without a host sync.

    sums [M, N] log p(z_i | x_j), nats; own [M] integer, the column of each row's own prompt; weights [N] share of each prompt in
    the mixture, None: the share of rows whose own it is. A weight of 0 leaves a column out of the mixture, not out of the rank.

    Returns, each [M]:  matched = L[i, own], marginal = log sum_j w_j e^L[i, j] (float64: what is wanted is their difference),
    above = prompts that score higher than the own one, tied = prompts that score the same, itself included (int32). The own
    prompt is then among the k highest with probability min(max((k - above) / tied, 0), 1). A row with a NaN has marginal NaN.
    ValueError for shapes that do not fit, or, on a CPU, an own outside 0 to N - 1. Source: RAGEN-2 (arXiv 2604.06268), I(X; Z).
    """
    if not (sums.ndim == 2 and own.shape == sums.shape[:1] and (weights is None or weights.shape == sums.shape[1:])):
        shapes = tuple(sums.shape), tuple(own.shape), None if weights is None else tuple(weights.shape)
        raise ValueError(f"sums, own, weights: shapes {shapes}; valid: [M, N], [M], [N]")
    M, N = sums.shape
    if own.device.type == "cpu" and M and not 0 <= own.min() <= own.max() < N:
        raise ValueError(f"own: {int(own.min())} to {int(own.max())}; valid: columns 0 to {N - 1}")
    sums, own = sums.detach(), own.long()
    if weights is None:  # counts are whole numbers, so their sums are the same in any order
        weights = sums.new_zeros(N, dtype=torch.float64).index_add(0, own, sums.new_ones(M, dtype=torch.float64)) / M
    if not use_triton(backend, sums):
        return reference.cross_statistics(sums, own, weights, TIE)
    sums, own, weights = sums.contiguous(), own.contiguous(), weights.contiguous()
    matched, marginal = (torch.empty(M, dtype=torch.float64, device=sums.device) for _ in range(2))
    above, tied = (torch.empty(M, dtype=torch.int32, device=sums.device) for _ in range(2))
    if M:
        _row_statistics_kernel[(M,)](sums, own, weights, matched, marginal, above, tied, N, TIE=TIE, BLOCK=128, num_warps=1)
    return CrossStatistics(matched, marginal, above, tied)


@jit(do_not_specialize=["N"])
def _row_statistics_kernel(
    sums_ptr, own_ptr, weights_ptr, matched_ptr, marginal_ptr, above_ptr, tied_ptr, N, TIE: tl.constexpr, BLOCK: tl.constexpr
):
    """One program a row, which it reads twice: for the maximum and the rank, then for the sum relative to the maximum."""
    row = tl.program_id(0).to(tl.int64)
    row_ptr = sums_ptr + row * N
    own = tl.load(own_ptr + row)
    matched = tl.load(row_ptr + own).to(tl.float64)
    tolerance = tl.where(tl.abs(matched) < float("inf"), TIE * tl.maximum(tl.abs(matched), 1.0), 0.0)
    maxima = tl.full((BLOCK,), float("-inf"), tl.float64)
    above = tl.zeros((BLOCK,), tl.int32)
    tied = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, N, BLOCK):
        j = start + tl.arange(0, BLOCK)
        x = tl.load(row_ptr + j, mask=j < N, other=float("-inf")).to(tl.float64)
        w = tl.load(weights_ptr + j, mask=j < N, other=0.0)
        above += (x - matched > tolerance).to(tl.int32)
        same = (tl.abs(x - matched) <= tolerance) | (x == matched) | (j == own)  # the own one counts whatever it is
        tied += (same & (j < N)).to(tl.int32)
        maxima = tl.maximum(maxima, tl.where(w > 0, x, float("-inf")))
    m = tl.max(maxima, 0)
    shift = tl.where(m == float("-inf"), 0.0, m)  # no prompt of the mixture makes this row: log 0, not -inf - -inf
    total = tl.zeros((BLOCK,), tl.float64)
    for start in range(0, N, BLOCK):
        j = start + tl.arange(0, BLOCK)
        x = tl.load(row_ptr + j, mask=j < N, other=float("-inf")).to(tl.float64)
        w = tl.load(weights_ptr + j, mask=j < N, other=0.0).to(tl.float64)
        total += tl.where(w > 0, w * tl.exp(x - shift), 0.0)
    tl.store(matched_ptr + row, matched)
    tl.store(marginal_ptr + row, shift + tl.log(tl.sum(total, 0)))
    tl.store(above_ptr + row, tl.sum(above, 0))
    tl.store(tied_ptr + row, tl.sum(tied, 0))
