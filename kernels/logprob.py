"""Log-probability of the target and entropy of the whole distribution, from logits, in one read of them.

    logprob, entropy = logprob_entropy(logits, targets, temperature=0.7)       # both differentiable

With x = logits / temperature, m = max x, s = sum e^(x-m) and w = sum e^(x-m) (x-m):

    logprob = x_target - m - log s                  H = -sum p log p = log s - w / s

Both are invariant to a shift of all logits, because everything is relative to the running maximum. A tile with maximum m'
is merged by  a = e^(m_old - m_new):   w <- a (w + (m_old - m_new) s),   s <- a s,   then the tile's own terms are added.

Backward, with upstream gradients g and h:  d/dx = g ([x is target] - p) - h p (log p + H),  one read and one write; over the
logits themselves with inplace=True, so that no second [..., V] exists.

Ignored rows are not read. Their program ends after its target (forward) or writes the zeros that autograd has to find there
(backward). A shorter grid of live rows only would need their number on the host, and a wait for the device costs more than
the programs that end at once; zeroing the whole gradient first would write the live rows twice.

Programs: one row each, on grid axis 0 (no 65,535 limit), 64-bit offsets, fixed order of tiles, so a row's result does not
depend on what else is in the batch. Sizes and strides are run-time arguments: a new length compiles nothing. Full tiles
carry no mask, so a vocabulary of any size keeps 128-bit loads as long as its rows start on 16 bytes; only the last tile is
masked. Left out: splitting a row over programs (few rows leave a GPU idle), and second derivatives.
"""

from __future__ import annotations

import math

import torch
from torch.autograd.function import once_differentiable

from nanoragen.kernels import reference
from nanoragen.kernels.dispatch import jit, tl, triton, use_triton

LOG2E = 1.4426950408889634
TILE = 4096  # logits of a row in flight
# What nothing is compiled for: the value of a size or stride, and whether an array of one number a row starts on 16 bytes
# (a slice of one often does not). That of the logits counts.
ANY = {
    "do_not_specialize": ["n1", "stride0", "stride1", "V", "ignore_index"],
    "do_not_specialize_on_alignment": ["Y", "LOGPROB", "ENTROPY", "TOP", "LOG2_S", "G", "H"],
}


def logprob_entropy(logits, targets, *, temperature=1.0, ignore_index=-100, inplace=False, backend="auto"):
    """log softmax(logits / temperature)[target], and the entropy of that softmax, in nats.

    logits   [..., V] float64 (torch only), float32, bfloat16 or float16; any strides whose last is 1, read where they lie (a
             copy is made only where the last is not 1, or the leading dimensions do not fold into two)
    targets  [...] integer; where it equals ignore_index both results are 0, and so is the gradient
    inplace  the backward pass writes the gradient over the logits. Nothing else may need their values then: a second backward,
             or an operation whose own backward saved them, raises RuntimeError (the write counts as a modification); reading
             them after the backward pass gives the gradient
    Returns (logprob [...], entropy [...]), float32 (float64 for float64), differentiable with respect to logits. -inf logits
    have probability 0. Inputs are not changed but by inplace. ValueError for shapes that do not fit, a temperature of 0 or
    less, or inplace where a gradient cannot lie (check_logits). A target outside the vocabulary is an error on a CPU and NaN
    from the kernel, which cannot stop to say so.
    Source: the entropy and policy terms of RAGEN-2 (arXiv 2604.06268), eq. 1; online softmax after Milakov & Gimelshein 2018.
    """
    check_logits(logits, targets, temperature, inplace)
    if use_triton(backend, logits) and logits.dtype != torch.float64:
        return _LogprobEntropy.apply(logits, targets, float(temperature), int(ignore_index), inplace)
    return reference.logprob_entropy(logits, targets, temperature, ignore_index, inplace)


def check_logits(logits, targets, temperature, inplace):
    """ValueError for what no kernel over rows of logits can take."""
    if logits.ndim < 1 or logits.shape[:-1] != targets.shape or logits.shape[-1] == 0:
        raise ValueError(f"targets: shape {tuple(targets.shape)} for logits {tuple(logits.shape)}; valid: logits' without the last")
    if targets.is_floating_point():
        raise ValueError(f"targets: {targets.dtype}; valid: an integer type")
    if not 0 < temperature < math.inf:
        raise ValueError(f"temperature: {temperature}; valid: above 0")
    if not (inplace and logits.requires_grad and torch.is_grad_enabled()):
        return
    owner = logits if logits._base is None else logits._base
    if owner.is_leaf:  # a parameter's values would be lost to its own gradient
        raise ValueError("inplace: True for logits that are a leaf of the graph; valid: False, or the output of an operation")
    rows = reference.as_rows(logits)
    reach, apart = logits.shape[-1], rows.data_ptr() == logits.data_ptr()
    for stride, n in sorted(zip(rows.stride()[:2], rows.shape[:2])):
        apart &= n == 1 or stride >= reach
        reach += stride * (n - 1)
    if not apart:
        layout = f"shape {tuple(logits.shape)} and strides {logits.stride()}"
        raise ValueError(
            f"inplace: True for {layout}; valid: False, or rows of stride 1 that share no memory and fold into two dimensions"
        )


class _LogprobEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, targets, temperature, ignore_index, inplace):
        rows = reference.as_rows(logits)  # [n0, n1, V]
        targets = targets.reshape(-1).contiguous()  # which a slice [::2] is not, though it is flat
        T, V = len(targets), rows.shape[2]
        logprob, entropy, top, log2_s = (torch.empty(T, dtype=torch.float32, device=logits.device) for _ in range(4))
        if T:
            tile, warps = _tile(V)
            _forward[(T,)](
                rows, targets, logprob, entropy, top, log2_s, rows.shape[1], rows.stride(0), rows.stride(1), V, ignore_index,
                LOG2E / temperature, ALIGNED=_aligned(rows), TILE=tile, num_warps=warps,
            )  # fmt: skip
        ctx.save_for_backward(logits, targets, entropy, top, log2_s)
        ctx.settings = temperature, ignore_index, inplace
        return logprob.view(logits.shape[:-1]), entropy.view(logits.shape[:-1])

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_logprob, grad_entropy):
        return gradient(*ctx.saved_tensors, grad_logprob, grad_entropy, *ctx.settings), None, None, None, None


def gradient(logits, targets, entropy, top, log2_s, g, h, temperature, ignore_index, inplace):
    """d/d logits of the sum of g * logprob + h * entropy, from what the forward pass kept of each row. g, h [...]."""
    rows = reference.as_rows(logits)
    T, V = len(targets), rows.shape[2]
    if inplace:
        grad = logits.detach()  # the same memory and version counter
        torch.autograd.graph.increment_version(grad)  # so that whoever saved the logits, this pass included, hears of the write
    else:
        grad = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
    if T:
        tile, warps = _tile(V)
        _backward[(T,)](  # the upstream gradients may be expanded scalars; a copy of [T] numbers makes them plain
            rows, targets, entropy, top, log2_s, g.contiguous(), h.contiguous(), grad, rows.shape[1], rows.stride(0),
            rows.stride(1), V, ignore_index, LOG2E / temperature, 1 / temperature, ALIGNED=_aligned(rows),
            ALIGNED_OUT=_aligned(reference.as_rows(grad)), TILE=tile, INPLACE=inplace, num_warps=warps,
        )  # fmt: skip
    return grad


def _tile(V: int) -> tuple[int, int]:
    """Tile and warps for a vocabulary; a function of V alone, so equal rows are always summed in the same order."""
    tile = min(TILE, max(16, triton.next_power_of_2(V)))
    return tile, max(1, min(8, tile // 512))


def _aligned(rows) -> bool:
    """Whether every row starts on 16 bytes, so that its full tiles can be moved 128 bits at a time."""
    starts = (rows.data_ptr(), *(stride * rows.element_size() for stride in rows.stride()[:2]))
    return all(start % 16 == 0 for start in starts)


@jit
def _start(row, n1, stride0, stride1, ALIGNED: tl.constexpr, BITS: tl.constexpr):
    """Offset of a row of [n0, n1, V], 64-bit; told to the compiler as a multiple of 128 bits where it is one."""
    start = (row // n1).to(tl.int64) * stride0 + (row % n1).to(tl.int64) * stride1
    if ALIGNED:
        start = tl.multiple_of(start, 128 // BITS)
    return start


@jit
def _merge(m, s, w, x, scale2):
    """Add a tile of logits x [TILE] to the running maximum m (a scalar) and to the sums s and w, kept one a lane [TILE].

    One exp2 an element, one reduction a tile; the sums are rescaled only by a tile that raises the maximum.
    """
    top = tl.max(x, 0)
    if top > m:
        moved = tl.where(m == float("-inf"), 0.0, (m - top) * scale2)  # nothing summed yet: nothing to move
        a = tl.exp2(moved)
        w = a * (w + moved * s)
        s = a * s
        m = top
    shift = tl.where(m == float("-inf"), 0.0, m)  # only -inf so far: -inf - -inf would be NaN
    d = (x - shift) * scale2  # subtract first: exact, so a common offset of the logits changes nothing
    e = tl.exp2(d)
    s += e
    w += e * tl.maximum(d, -1e30)  # e = 0 at d = -inf, and 0 * -inf would be NaN
    return m, s, w


@jit
def _softmax(x_row, y, V, scale2, TILE: tl.constexpr):
    """Of one row, in one read: log-prob of y, entropy, maximum, and log2 of the sum of e^(x - maximum)."""
    lanes = tl.arange(0, TILE)
    m = float("-inf")
    s = tl.zeros((TILE,), tl.float32)
    w = tl.zeros((TILE,), tl.float32)
    full = V // TILE * TILE
    for start in range(0, full, TILE):
        x = tl.load(x_row + start + lanes).to(tl.float32)
        m, s, w = _merge(m, s, w, x, scale2)
    if full < V:
        x = tl.load(x_row + full + lanes, mask=full + lanes < V, other=float("-inf")).to(tl.float32)
        m, s, w = _merge(m, s, w, x, scale2)
    total = tl.sum(s, 0)
    log2_s = tl.log2(total)
    target = tl.load(x_row + y, mask=(y >= 0) & (y < V), other=float("nan")).to(tl.float32)
    logprob = ((target - m) * scale2 - log2_s) * 0.6931471805599453
    entropy = (log2_s - tl.sum(w, 0) / total) * 0.6931471805599453
    return logprob, entropy, m, log2_s


@jit(**ANY)
def _forward(
    X, Y, LOGPROB, ENTROPY, TOP, LOG2_S, n1, stride0: tl.int64, stride1: tl.int64, V, ignore_index, scale2,
    ALIGNED: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)  # at most 2^31 rows; offsets of logits are 64-bit
    y = tl.load(Y + row)
    if y == ignore_index:
        tl.store(LOGPROB + row, 0.0)
        tl.store(ENTROPY + row, 0.0)
        tl.store(TOP + row, 0.0)
        tl.store(LOG2_S + row, 0.0)
    else:
        x_row = X + _start(row, n1, stride0, stride1, ALIGNED, X.dtype.element_ty.primitive_bitwidth)
        logprob, entropy, m, log2_s = _softmax(x_row, y, V, scale2, TILE)
        tl.store(LOGPROB + row, logprob)
        tl.store(ENTROPY + row, entropy)
        tl.store(TOP + row, m)  # kept apart from log s: their sum would lose the digits of log s
        tl.store(LOG2_S + row, log2_s)


@jit
def _gradient(x, columns, y, m, log2_s, entropy, g, h, scale2, inv_temperature):
    """d/d logits of g * logprob + h * entropy, for a tile."""
    log2_p = (x - m) * scale2 - log2_s
    log_p = tl.maximum(log2_p * 0.6931471805599453, -1e4)  # p = 0 from there on: 0 * (h log p) is 0, not 0 * -inf
    return (tl.where(columns == y, g, 0.0) - tl.exp2(log2_p) * (g + h * (log_p + entropy))) * inv_temperature


@jit(**ANY)
def _backward(
    X, Y, ENTROPY, TOP, LOG2_S, G, H, GRAD, n1, stride0: tl.int64, stride1: tl.int64, V, ignore_index, scale2, inv_temperature,
    ALIGNED: tl.constexpr, ALIGNED_OUT: tl.constexpr, TILE: tl.constexpr, INPLACE: tl.constexpr = False,
):  # fmt: skip
    row = tl.program_id(0)  # at most 2^31 rows; offsets of logits are 64-bit
    y = tl.load(Y + row)
    x_row = X + _start(row, n1, stride0, stride1, ALIGNED, X.dtype.element_ty.primitive_bitwidth)
    if INPLACE:  # a tile is read before it is written, and by nobody else
        out_row = x_row
    else:
        out_row = GRAD + _start(row, 1, V, 0, ALIGNED_OUT, X.dtype.element_ty.primitive_bitwidth)
    lanes = tl.arange(0, TILE)
    full = V // TILE * TILE
    if y == ignore_index:
        zero = tl.zeros((TILE,), dtype=GRAD.dtype.element_ty)
        for start in range(0, full, TILE):
            tl.store(out_row + start + lanes, zero)
        tl.store(out_row + full + lanes, zero, mask=full + lanes < V)
    else:
        entropy, m, log2_s = tl.load(ENTROPY + row), tl.load(TOP + row), tl.load(LOG2_S + row)
        g = tl.load(G + row).to(tl.float32)
        h = tl.load(H + row).to(tl.float32)
        for start in range(0, full, TILE):
            x = tl.load(x_row + start + lanes).to(tl.float32)
            d = _gradient(x, start + lanes, y, m, log2_s, entropy, g, h, scale2, inv_temperature)
            tl.store(out_row + start + lanes, d.to(GRAD.dtype.element_ty))
        if full < V:
            inside = full + lanes < V
            x = tl.load(x_row + full + lanes, mask=inside, other=float("-inf")).to(tl.float32)
            d = _gradient(x, full + lanes, y, m, log2_s, entropy, g, h, scale2, inv_temperature)
            tl.store(out_row + full + lanes, d.to(GRAD.dtype.element_ty), mask=inside)
