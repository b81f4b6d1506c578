"""Log-probability of the target and entropy of the whole distribution, from logits, in one read of them.

    logprob, entropy = logprob_entropy(logits, targets, temperature=0.7)       # both differentiable

With x = logits / temperature, m = max x, s = sum e^(x-m) and w = sum e^(x-m) (x-m):

    logprob = x_target - m - log s                  H = -sum p log p = log s - w / s

Both are invariant to a shift of all logits, because everything is relative to the running maximum. A tile with maximum m'
is merged by  a = e^(m_old - m_new):   w <- a (w + (m_old - m_new) s),   s <- a s,   then the tile's own sums are added.

Backward, with upstream gradients g and h:  d/dx = g ([x is target] - p) - h p (log p + H),  one read and one write.

Programs: one row each, on grid axis 0 (no 65,535 limit), 64-bit offsets, fixed order of tiles, so a row's result does not
depend on what else is in the batch. Sizes and strides are run-time arguments: a new length compiles nothing. Full tiles
carry no mask, so their loads are as wide as the row's alignment allows; only the last tile is masked.
"""

from __future__ import annotations

import torch

from nanoragen.kernels import reference
from nanoragen.kernels.dispatch import jit, tl, triton, use_triton

LOG2E = 1.4426950408889634
LN2 = 0.6931471805599453
TILE = 4096  # logits of a row in flight


def logprob_entropy(logits, targets, *, temperature=1.0, ignore_index=-100, backend="auto"):
    """log softmax(logits / temperature)[target], and the entropy of that softmax, in nats.

    logits   [..., V] float64 (torch only), float32, bfloat16 or float16; any strides whose last is 1
    targets  [...] integer; where it equals ignore_index both results are 0, and so is the gradient
    Returns (logprob [...], entropy [...]), float32 (float64 for float64), differentiable with respect to logits. -inf logits
    have probability 0. Inputs are not changed. ValueError for shapes that do not fit, or a temperature of 0 or less.
    Source: the entropy and policy terms of RAGEN-2 (arXiv 2604.06268), eq. 1; online softmax after Milakov & Gimelshein 2018.
    """
    if logits.shape[:-1] != targets.shape or logits.ndim < 1 or logits.shape[-1] == 0:
        raise ValueError(
            f"targets: shape {tuple(targets.shape)} for logits {tuple(logits.shape)}; valid: logits' without the last"
        )
    if not temperature > 0:
        raise ValueError(f"temperature: {temperature}; valid: above 0")
    shape = targets.shape
    rows = logits.reshape(-1, logits.shape[-1])  # a view wherever one can be
    if rows.stride(-1) != 1:
        rows = rows.contiguous()
    targets = targets.reshape(-1)
    if use_triton(backend, logits) and logits.dtype != torch.float64:
        logprob, entropy = _LogprobEntropy.apply(rows, targets, float(temperature), int(ignore_index))
    else:
        logprob, entropy = reference.logprob_entropy(rows, targets, temperature, ignore_index)
    return logprob.view(shape), entropy.view(shape)


class _LogprobEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, targets, temperature, ignore_index):
        T, V = logits.shape
        logprob, entropy, lse2 = (torch.empty(T, dtype=torch.float32, device=logits.device) for _ in range(3))
        tile, warps = _tile(V)
        if T:
            _forward[(T,)](
                logits, targets, logprob, entropy, lse2, logits.stride(0), targets.stride(0), V, LOG2E / temperature, ignore_index,
                TILE=tile, num_warps=warps,
            )  # fmt: skip
        ctx.save_for_backward(logits, targets, entropy, lse2)
        ctx.temperature, ctx.ignore_index = temperature, ignore_index
        return logprob, entropy

    @staticmethod
    def backward(ctx, grad_logprob, grad_entropy):
        logits, targets, entropy, lse2 = ctx.saved_tensors
        T, V = logits.shape
        grad = torch.empty((T, V), dtype=logits.dtype, device=logits.device)
        tile, warps = _tile(V)
        if T:
            _backward[(T,)](
                logits, targets, entropy, lse2, grad_logprob, grad_entropy, grad, logits.stride(0), targets.stride(0),
                grad_logprob.stride(0), grad_entropy.stride(0), V, LOG2E / ctx.temperature, 1 / ctx.temperature, ctx.ignore_index,
                TILE=tile, num_warps=warps,
            )  # fmt: skip
        return grad, None, None, None


def _tile(V: int) -> tuple[int, int]:
    """Tile and warps for a vocabulary; a function of V alone, so equal rows are always summed in the same order."""
    tile = min(TILE, max(16, triton.next_power_of_2(V)))
    return tile, max(1, min(8, tile // 512))


@jit
def _merge(m, s, w, x):
    """Add a tile of logits x (in units of log2) to the running maximum m, sum s and weighted sum w."""
    m_new = tl.maximum(m, tl.max(x, 0))
    shift = tl.where(m_new == float("-inf"), 0.0, m_new)  # only -inf so far: -inf - -inf would be NaN
    d = x - shift
    e = tl.exp2(d)
    moved = tl.where(s > 0, m - shift, 0.0)
    a = tl.exp2(moved)
    w = a * (w + moved * s) + tl.sum(e * tl.where(e > 0, d, 0.0), 0)
    s = a * s + tl.sum(e, 0)
    return m_new, s, w


@jit
def _forward(X, Y, LOGPROB, ENTROPY, LSE2, stride_x, stride_y, V, scale2, ignore_index, TILE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    y = tl.load(Y + row * stride_y)
    if y == ignore_index:
        tl.store(LOGPROB + row, 0.0)
        tl.store(ENTROPY + row, 0.0)
        tl.store(LSE2 + row, 0.0)
    else:
        x_row = X + row * stride_x
        lanes = tl.arange(0, TILE)
        m = float("-inf")
        s = 0.0
        w = 0.0
        full = V // TILE * TILE
        for start in range(0, full, TILE):
            x = tl.load(x_row + start + lanes).to(tl.float32) * scale2
            m, s, w = _merge(m, s, w, x)
        if full < V:
            x = tl.load(x_row + full + lanes, mask=full + lanes < V, other=float("-inf")).to(tl.float32) * scale2
            m, s, w = _merge(m, s, w, x)
        target = tl.load(x_row + y).to(tl.float32) * scale2
        log2_s = tl.log2(s)
        tl.store(LOGPROB + row, (target - m - log2_s) * 0.6931471805599453)
        tl.store(ENTROPY + row, (log2_s - w / s) * 0.6931471805599453)
        tl.store(LSE2 + row, m + log2_s)


@jit
def _gradient(x, columns, y, lse2, H, g, h, scale2, inv_temperature):
    """d/d logits of g * logprob + h * entropy for a tile."""
    log2_p = x * scale2 - lse2
    p = tl.exp2(log2_p)
    log_p = tl.where(p > 0, log2_p * 0.6931471805599453, 0.0)
    return (tl.where(columns == y, g, 0.0) - p * (g + h * (log_p + H))) * inv_temperature


@jit
def _backward(
    X, Y, ENTROPY, LSE2, G, H, GRAD, stride_x, stride_y, stride_g, stride_h, V, scale2, inv_temperature, ignore_index,
    TILE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    y = tl.load(Y + row * stride_y)
    x_row = X + row * stride_x
    out_row = GRAD + row * V
    lanes = tl.arange(0, TILE)
    full = V // TILE * TILE
    if y == ignore_index:
        zero = tl.zeros((TILE,), dtype=GRAD.dtype.element_ty)
        for start in range(0, full, TILE):
            tl.store(out_row + start + lanes, zero)
        tl.store(out_row + full + lanes, zero, mask=full + lanes < V)
    else:
        lse2 = tl.load(LSE2 + row)
        entropy = tl.load(ENTROPY + row)
        g = tl.load(G + row * stride_g).to(tl.float32)
        h = tl.load(H + row * stride_h).to(tl.float32)
        for start in range(0, full, TILE):
            x = tl.load(x_row + start + lanes).to(tl.float32)
            d = _gradient(x, start + lanes, y, lse2, entropy, g, h, scale2, inv_temperature)
            tl.store(out_row + start + lanes, d.to(GRAD.dtype.element_ty))
        if full < V:
            inside = full + lanes < V
            x = tl.load(x_row + full + lanes, mask=inside, other=float("-inf")).to(tl.float32)
            d = _gradient(x, full + lanes, y, lse2, entropy, g, h, scale2, inv_temperature)
            tl.store(out_row + full + lanes, d.to(GRAD.dtype.element_ty), mask=inside)
