"""The cross-prompt log-prob matrix: sums of token log-probs of many (reasoning, prompt) pairs, straight from hidden states.

    sums = cross_logprob_matrix(hidden, weight, targets, cu_seqlens)     # [S], one number a pair
    found = cross_statistics(sums.view(M, N), own)                       # what collapse metrics are made of, [M] each

Segment s is the tokens cu_seqlens[s] to cu_seqlens[s + 1]. For each, log softmax(hidden @ weight.T / temperature)[target] is
summed. The logits never reach memory: the tokens' log-probs come from linear.py's kernels, without the entropy. A small kernel
then sums each segment in a fixed order, with no atomics, so a pair's sum is the same bits whatever else is measured. Forward
only: this is a diagnosis. Source: RAGEN-2 (arXiv 2604.06268), the estimate of I(X; Z).
"""

from __future__ import annotations

import math

import torch

from nanoragen.kernels import linear, reference
from nanoragen.kernels.dispatch import jit, tl, use_triton
from nanoragen.kernels.reference import CrossStatistics


def cross_logprob_matrix(hidden, weight, targets, cu_seqlens, *, temperature=1.0, backend="auto"):
    """hidden [P, D], weight [V, D] (the LM head), targets [P] integer, cu_seqlens [S + 1] integer, rising from 0 to P.

    Returns [S] float32 (float64 for float64, torch only), nats; 0 for an empty segment. No gradient. Any number of segments.
    Products are taken in hidden's dtype and summed in float32. ValueError for shapes that do not fit, or a temperature of 0
    or less. A target outside the vocabulary is an error on a CPU and NaN from the kernel.
    """
    fits = hidden.ndim == weight.ndim == 2 and hidden.shape[1] == weight.shape[1] and targets.shape == hidden.shape[:1]
    if not fits or cu_seqlens.ndim != 1 or len(cu_seqlens) < 1 or len(weight) == 0:
        raise ValueError(
            f"hidden {tuple(hidden.shape)}, weight {tuple(weight.shape)}, targets {tuple(targets.shape)}, cu_seqlens "
            f"{tuple(cu_seqlens.shape)} do not fit; valid: [P, D], [V, D], [P], [S + 1]"
        )
    if not 0 < temperature < math.inf:
        raise ValueError(f"temperature: {temperature}; valid: above 0")
    on_cpu = cu_seqlens.device.type == "cpu"  # elsewhere the host would have to wait to see
    if on_cpu and not (cu_seqlens[0] == 0 and cu_seqlens[-1] == len(targets) and (cu_seqlens.diff() >= 0).all()):
        raise ValueError(f"cu_seqlens: {int(cu_seqlens[0])} to {int(cu_seqlens[-1])}; valid: rising from 0 to {len(targets)}")
    hidden, weight = hidden.detach(), weight.detach()
    if not (use_triton(backend, hidden) and hidden.dtype != torch.float64):
        return reference.cross_logprob_matrix(hidden, weight, targets, cu_seqlens, float(temperature))
    token, *_ = linear.forward(hidden, weight, None, targets.long(), float(temperature), with_entropy=False)
    S = len(cu_seqlens) - 1
    sums = torch.empty(S, dtype=torch.float32, device=hidden.device)
    if S:
        _segment_sum[(S,)](token, cu_seqlens.contiguous(), sums, BLOCK=128, num_warps=1)
    return sums


@jit
def _segment_sum(TOKEN, CU, SUMS, BLOCK: tl.constexpr):
    """One program a segment, its tokens in blocks from its own first one: the order does not depend on other segments."""
    segment = tl.program_id(0).to(tl.int64)
    first = tl.load(CU + segment).to(tl.int64)
    last = tl.load(CU + segment + 1).to(tl.int64)
    sums = tl.zeros((BLOCK,), tl.float32)
    for start in range(first, last, BLOCK):
        tokens = start + tl.arange(0, BLOCK)
        sums += tl.load(TOKEN + tokens, mask=tokens < last, other=0.0)
    tl.store(SUMS + segment, tl.sum(sums, 0))


TIE = 1e-6  # scores this close, relative to the own one, are equal: a few units of float32 rounding (as in collapse.py)


def cross_statistics(sums, own, weights=None, *, backend="auto") -> CrossStatistics:
    """Row statistics of the cross matrix, in one launch and without a host sync.

    sums [M, N] log p(z_i | x_j), nats; own [M] integer, the column of each row's own prompt; weights [N] share of each prompt in
    the mixture, None: the share of rows whose own it is. A weight of 0 leaves a column out of the mixture, not out of the rank.

    Returns, each [M]:  matched = L[i, own], marginal = log sum_j w_j e^L[i, j] (float64: what is wanted is their difference),
    above = prompts that score higher than the own one, tied = prompts that score the same, itself included (int32). The own
    prompt is then among the k highest with probability min(max((k - above) / tied, 0), 1). A row with a NaN has marginal NaN.
    ValueError for shapes that do not fit, or, on a CPU, an own outside 0 to N - 1. Source: RAGEN-2 (arXiv 2604.06268), I(X; Z).
    """
    fits = sums.ndim == 2 and own.shape == sums.shape[:1] and (weights is None or weights.shape == sums.shape[1:])
    if not fits:
        found = tuple(sums.shape), tuple(own.shape), None if weights is None else tuple(weights.shape)
        raise ValueError(f"sums, own, weights: shapes {found}; valid: [M, N], [M], [N]")
    M, N = sums.shape
    if own.device.type == "cpu" and M and not 0 <= own.min() <= own.max() < N:
        raise ValueError(f"own: {int(own.min())} to {int(own.max())}; valid: columns 0 to {N - 1}")
    sums, own = sums.detach(), own.long()
    if weights is None:  # counts are whole numbers: the same in any order of adding
        weights = (
            torch.zeros(N, dtype=torch.float64, device=sums.device).index_add(0, own, sums.new_ones(M, dtype=torch.float64)) / M
        )
    if not use_triton(backend, sums):
        return reference.cross_statistics(sums, own, weights, TIE)
    sums, own, weights = sums.contiguous(), own.contiguous(), weights.contiguous()
    matched, marginal = (torch.empty(M, dtype=torch.float64, device=sums.device) for _ in range(2))
    above, tied = (torch.empty(M, dtype=torch.int32, device=sums.device) for _ in range(2))
    if M:
        _row_statistics[(M,)](sums, own, weights, matched, marginal, above, tied, N, TIE=TIE, BLOCK=128, num_warps=1)
    return CrossStatistics(matched, marginal, above, tied)


@jit(do_not_specialize=["N"])
def _row_statistics(L, OWN, WEIGHT, MATCHED, MARGINAL, ABOVE, TIED, N, TIE: tl.constexpr, BLOCK: tl.constexpr):
    """One program a row, which it reads twice: for the maximum and the rank, then for the sum relative to the maximum."""
    row = tl.program_id(0).to(tl.int64)
    own = tl.load(OWN + row)
    matched = tl.load(L + row * N + own).to(tl.float64)
    near = tl.where(tl.abs(matched) < float("inf"), TIE * tl.maximum(tl.abs(matched), 1.0), 0.0)
    top = tl.full((BLOCK,), float("-inf"), tl.float64)
    above = tl.zeros((BLOCK,), tl.int32)
    tied = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, N, BLOCK):
        j = start + tl.arange(0, BLOCK)
        x = tl.load(L + row * N + j, mask=j < N, other=float("-inf")).to(tl.float64)
        w = tl.load(WEIGHT + j, mask=j < N, other=0.0)
        above += (x - matched > near).to(tl.int32)
        same = (tl.abs(x - matched) <= near) | (x == matched) | (j == own)  # the own one counts whatever it is
        tied += (same & (j < N)).to(tl.int32)
        top = tl.maximum(top, tl.where(w > 0, x, float("-inf")))
    m = tl.max(top, 0)
    shift = tl.where(m == float("-inf"), 0.0, m)  # no prompt of the mixture makes this row: log 0, not -inf - -inf
    total = tl.zeros((BLOCK,), tl.float64)
    for start in range(0, N, BLOCK):
        j = start + tl.arange(0, BLOCK)
        x = tl.load(L + row * N + j, mask=j < N, other=float("-inf")).to(tl.float64)
        w = tl.load(WEIGHT + j, mask=j < N, other=0.0).to(tl.float64)
        total += tl.where(w > 0, w * tl.exp(x - shift), 0.0)
    tl.store(MATCHED + row, matched)
    tl.store(MARGINAL + row, shift + tl.log(tl.sum(total, 0)))
    tl.store(ABOVE + row, tl.sum(above, 0))
    tl.store(TIED + row, tl.sum(tied, 0))
