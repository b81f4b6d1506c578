"""The cross-prompt log-prob matrix: sums of token log-probs of many (reasoning, prompt) pairs, straight from hidden states.

    sums = cross_logprob_matrix(hidden, weight, targets, cu_seqlens)     # [S], one number a pair

Segment s is the tokens cu_seqlens[s] to cu_seqlens[s + 1]. For each, log softmax(hidden @ weight.T / temperature)[target] is
summed. The logits never reach memory: the tokens' log-probs come from linear.py's kernels, without the entropy. A small kernel
then sums each segment in a fixed order, with no atomics, so a pair's sum is the same bits whatever else is measured. Forward
only: this is a diagnosis. Source: RAGEN-2 (arXiv 2604.06268), the estimate of I(X; Z).
"""

from __future__ import annotations

import torch

from nanoragen.kernels import linear, reference
from nanoragen.kernels.dispatch import jit, tl, use_triton


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
