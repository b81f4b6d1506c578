"""The cross-prompt log-prob matrix: sums of token log-probs of many (reasoning, prompt) pairs, straight from hidden states.

    sums = cross_logprob_matrix(hidden, weight, targets, cu_seqlens)     # [S], one number a pair

Segment s is the tokens cu_seqlens[s] to cu_seqlens[s + 1]. For each, log softmax(hidden @ weight.T / temperature)[target] is
summed. Neither the logits nor the per-token log-probs reach memory: a program takes one segment, walks its tokens in blocks,
the vocabulary in tiles, the hidden size in slices for the tensor cores, and keeps the running (maximum, sum) of each token.
Order is fixed and there are no atomics, so a pair's sum is the same bits whatever else is measured. Forward only: this is a
diagnosis. Source: RAGEN-2 (arXiv 2604.06268), the estimate of I(X; Z).
"""

from __future__ import annotations

import torch

from nanoragen.kernels import reference
from nanoragen.kernels.dispatch import interpreted, jit, tl, triton, use_triton

LOG2E = 1.4426950408889634


def cross_logprob_matrix(hidden, weight, targets, cu_seqlens, *, temperature=1.0, backend="auto"):
    """hidden [P, D], weight [V, D] (the LM head), targets [P] integer, cu_seqlens [S + 1] integer, rising from 0 to P.

    Returns [S] float32 (float64 for float64, torch only), nats; 0 for an empty segment. No gradient. Any number of segments.
    ValueError for shapes that do not fit, or a temperature of 0 or less.
    """
    P, D = hidden.shape
    if weight.ndim != 2 or weight.shape[1] != D or targets.shape != (P,) or cu_seqlens.ndim != 1 or len(cu_seqlens) < 1:
        raise ValueError(
            f"hidden {tuple(hidden.shape)}, weight {tuple(weight.shape)}, targets {tuple(targets.shape)}, cu_seqlens "
            f"{tuple(cu_seqlens.shape)} do not fit; valid: [P, D], [V, D], [P], [S + 1]"
        )
    if not temperature > 0:
        raise ValueError(f"temperature: {temperature}; valid: above 0")
    hidden, weight = hidden.detach(), weight.detach()
    if not (use_triton(backend, hidden) and hidden.dtype != torch.float64):
        return reference.cross_logprob_matrix(hidden, weight, targets, cu_seqlens, float(temperature))
    if interpreted():  # its bf16 products are wrong; the same numbers as float32 are exact
        hidden, weight = hidden.float(), weight.float()
    hidden, weight, targets, cu_seqlens = (
        hidden.contiguous(),
        weight.contiguous(),
        targets.contiguous(),
        cu_seqlens.contiguous(),
    )
    S, V = len(cu_seqlens) - 1, len(weight)
    sums = torch.empty(S, dtype=torch.float32, device=hidden.device)
    if S:
        slice_d = min(64, max(16, triton.next_power_of_2(D)))
        _cross[(S,)](
            hidden, weight, targets, cu_seqlens, sums, V, D, LOG2E / temperature,
            BLOCK_P=32, BLOCK_V=128, BLOCK_D=slice_d, num_warps=4,
        )  # fmt: skip
    return sums


@jit
def _cross(
    HIDDEN, WEIGHT, Y, CU, SUMS, V, D, scale2, BLOCK_P: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_D: tl.constexpr
):  # fmt: skip
    segment = tl.program_id(0).to(tl.int64)
    first = tl.load(CU + segment).to(tl.int64)
    last = tl.load(CU + segment + 1).to(tl.int64)
    p_lanes, v_lanes, d_lanes = tl.arange(0, BLOCK_P), tl.arange(0, BLOCK_V), tl.arange(0, BLOCK_D)
    total = 0.0
    for start in range(first, last, BLOCK_P):
        tokens = start + p_lanes
        live = tokens < last
        y = tl.load(Y + tokens, mask=live, other=0)
        m = tl.full((BLOCK_P,), float("-inf"), tl.float32)
        s = tl.zeros((BLOCK_P,), tl.float32)
        target = tl.zeros((BLOCK_P,), tl.float32)
        for v in range(0, V, BLOCK_V):
            columns = v + v_lanes
            logits = tl.zeros((BLOCK_P, BLOCK_V), tl.float32)
            for d in range(0, D, BLOCK_D):
                k = d + d_lanes
                h = tl.load(HIDDEN + tokens[:, None] * D + k[None, :], mask=live[:, None] & (k < D)[None, :], other=0.0)
                w = tl.load(
                    WEIGHT + columns.to(tl.int64)[None, :] * D + k[:, None],
                    mask=(columns < V)[None, :] & (k < D)[:, None],
                    other=0.0,
                )
                logits = tl.dot(h, w, acc=logits, input_precision="ieee")
            x = tl.where((columns < V)[None, :], logits * scale2, float("-inf"))
            m_new = tl.maximum(m, tl.max(x, 1))
            s = s * tl.exp2(m - m_new) + tl.sum(tl.exp2(x - m_new[:, None]), 1)
            target += tl.sum(tl.where(columns[None, :] == y[:, None], x, 0.0), 1)
            m = m_new
        logprob = (target - m - tl.log2(s)) * 0.6931471805599453
        total += tl.sum(tl.where(live, logprob, 0.0), 0)
    tl.store(SUMS + segment, total)
