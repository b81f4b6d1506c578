"""The cross-prompt log-prob matrix: sums of token log-probs of many (reasoning, prompt) pairs, straight from hidden states.

    sums = cross_logprob_matrix(hidden, weight, targets, cu_seqlens)     # [S], one number a pair

Segment s is the tokens cu_seqlens[s] to cu_seqlens[s + 1]. For each, log softmax(hidden @ weight.T / temperature)[target] is
summed. The logits never reach memory: a program takes a block of tokens, walks the vocabulary in tiles and the hidden size in
slices for the tensor cores, and keeps the running (maximum, sum) of each token. A second small kernel sums each segment in
a fixed order, with no atomics, so a pair's sum is the same bits whatever else is measured. Forward only: this is a diagnosis.
Left out: splitting the vocabulary over programs. Source: RAGEN-2 (arXiv 2604.06268), the estimate of I(X; Z).
"""

from __future__ import annotations

import torch

from nanoragen.kernels import reference
from nanoragen.kernels.dispatch import interpreted, jit, tl, triton, use_triton

LOG2E = 1.4426950408889634


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
    if not temperature > 0:
        raise ValueError(f"temperature: {temperature}; valid: above 0")
    hidden, weight = hidden.detach(), weight.detach()
    if not (use_triton(backend, hidden) and hidden.dtype != torch.float64):
        return reference.cross_logprob_matrix(hidden, weight, targets, cu_seqlens, float(temperature))
    if interpreted():  # its bf16 products are wrong; the same numbers as float32 are exact
        hidden, weight = hidden.float(), weight.float()
    hidden, weight, targets, cu_seqlens = (t.contiguous() for t in (hidden, weight, targets, cu_seqlens))
    (P, D), V, S = hidden.shape, len(weight), len(cu_seqlens) - 1
    token, sums = (torch.empty(n, dtype=torch.float32, device=hidden.device) for n in (P, S))
    if P:
        blocks = BLOCKS32 if hidden.dtype == torch.float32 else BLOCKS16
        _token[(triton.cdiv(P, blocks["BLOCK_P"]),)](
            hidden, weight, targets, token, P, V, D, LOG2E / temperature, **blocks, num_warps=8
        )
    if S:
        _segment_sum[(S,)](token, cu_seqlens, sums, BLOCK=128, num_warps=1)
    return sums


BLOCKS16 = {"BLOCK_P": 128, "BLOCK_V": 128, "BLOCK_D": 64}  # bf16 and fp16, on tensor cores
BLOCKS32 = {"BLOCK_P": 64, "BLOCK_V": 64, "BLOCK_D": 32}


@jit(do_not_specialize=["P"])
def _token(
    HIDDEN, WEIGHT, Y, TOKEN, P, V, D, scale2, BLOCK_P: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_D: tl.constexpr
):  # fmt: skip
    """The log-prob of each token of a block."""
    tokens = tl.program_id(0).to(tl.int64) * BLOCK_P + tl.arange(0, BLOCK_P)
    v_lanes, d_lanes = tl.arange(0, BLOCK_V), tl.arange(0, BLOCK_D)
    live = tokens < P
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
                WEIGHT + columns.to(tl.int64)[None, :] * D + k[:, None], mask=(columns < V)[None, :] & (k < D)[:, None], other=0.0
            )
            logits = tl.dot(h, w.to(h.dtype), acc=logits, input_precision="ieee")
        x = tl.where((columns < V)[None, :], logits, float("-inf"))
        m_new = tl.maximum(m, tl.max(x, 1))
        # the same guards as in logprob.py: a head whose bias says -inf must not turn a whole tile into NaN
        shift = tl.where(m_new == float("-inf"), 0.0, m_new)
        s = s * tl.exp2((m - shift) * scale2) + tl.sum(tl.exp2((x - shift[:, None]) * scale2), 1)
        target += tl.sum(tl.where(columns[None, :] == y[:, None], x, 0.0), 1)
        m = m_new
    logprob = ((target - m) * scale2 - tl.log2(s)) * 0.6931471805599453
    tl.store(TOKEN + tokens, tl.where((y >= 0) & (y < V), logprob, float("nan")), mask=live)


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
