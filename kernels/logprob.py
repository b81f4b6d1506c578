"""Log-probability of the target and entropy of the whole distribution, from logits, in one read of them.

    logprob, entropy = logprob_entropy(logits, targets, temperature=0.7)       # both differentiable

With x = logits / temperature, m = max x, s = sum e^(x-m) and w = sum e^(x-m) (x-m):

    logprob = x_target - m - log s                  H = -sum p log p = log s - w / s

Both are invariant to a shift of all logits, because everything is relative to the running maximum. A tile with a higher
maximum m_new first rescales the sums by alpha = e^(m - m_new):   w <- alpha (w + (m - m_new) s),   s <- alpha s.

Backward, with upstream gradients g and h:  d/dx = g ([x is target] - p) - h p (log p + H),  one read and one write; over the
logits themselves with inplace=True, so that no second [..., V] exists.

One program a row, on grid axis 0 (no 65,535 limit), with 64-bit offsets and a fixed order of tiles, so a row's result does not
depend on what else is in the batch. Sizes and strides are run-time arguments: a new length compiles nothing. Full tiles carry
no mask, so a vocabulary of any size keeps 128-bit loads as long as its rows start on 16 bytes; only the last tile is masked.
The program of an ignored row ends after its target (forward) or writes zeros (backward): a grid of live rows alone would need
their number on the host, and waiting for the device costs more. Left out: splitting a row over programs (few rows leave a GPU
idle), and second derivatives.
"""

from __future__ import annotations

import math

import torch
from torch.autograd.function import once_differentiable

from nanoragen.kernels import reference
from nanoragen.kernels.dispatch import jit, tl, triton, use_triton

LOG2E = 1.4426950408889634
BLOCK_V = 4096  # logits of a row in flight
# No version is compiled for the value of a size or stride, nor for whether an array [T] starts on 16 bytes (a slice of one
# often does not). Whether the logits do counts.
UNSPECIALIZED = {
    "do_not_specialize": ["n_inner", "stride_outer", "stride_inner", "V", "ignore_index"],
    "do_not_specialize_on_alignment": [
        "targets_ptr", "logprob_ptr", "entropy_ptr", "row_max_ptr", "log2_sum_ptr", "grad_logprob_ptr", "grad_entropy_ptr"
    ],
}  # fmt: skip


def logprob_entropy(logits, targets, *, temperature=1.0, ignore_index=-100, inplace=False, backend="auto"):
    """log softmax(logits / temperature)[target], and the entropy of that softmax, in nats.

    logits   [..., V] float64 (torch only), float32, bfloat16 or float16; any strides whose last is 1, read where they lie (a
             copy is made only where the last is not 1, or the leading dimensions do not merge into two)
    targets  [...] integer from 0 to V - 1; where it equals ignore_index both results are 0, and so is the gradient
    inplace  the backward pass writes the gradient over the logits. Nothing else may need their values then: a second backward,
             or an operation whose own backward saved them, raises RuntimeError (the write counts as a modification); reading
             them after the backward pass gives the gradient
    Returns (logprob [...], entropy [...]), float32 (float64 for float64), differentiable with respect to logits. -inf logits
    have probability 0. Inputs are not changed but by inplace. ValueError for shapes that do not fit, a temperature of 0 or
    less, or inplace where a gradient cannot lie (check_logits). IndexError for a target outside the vocabulary on a CPU; on a
    GPU, where looking would wait for the device, the kernel gives NaN.
    Source: the entropy and policy terms of RAGEN-2 (arXiv 2604.06268), eq. 1; online softmax after Milakov & Gimelshein 2018.
    """
    check_logits(logits, targets, temperature, ignore_index, inplace)
    if use_triton(backend, logits) and logits.dtype != torch.float64:
        return _LogprobEntropy.apply(logits, targets, float(temperature), int(ignore_index), inplace)
    return reference.logprob_entropy(logits, targets, temperature, ignore_index, inplace)


def check_targets(targets, V, temperature, ignore_index=None):
    """ValueError for targets that are no integers or a bad temperature; IndexError on a CPU for a target outside 0 .. V - 1."""
    if targets.is_floating_point():
        raise ValueError(f"targets: {targets.dtype}; valid: an integer type")
    if not 0 < temperature < math.inf:
        raise ValueError(f"temperature: {temperature}; valid: above 0")
    if targets.device.type == "cpu":
        outside = (targets < 0) | (targets >= V)
        bad = targets[outside if ignore_index is None else outside & (targets != ignore_index)]
        if len(bad):
            or_ignored = "" if ignore_index is None else f", or ignore_index ({ignore_index})"
            raise IndexError(f"targets: {int(bad[0])}; valid: 0 to {V - 1}{or_ignored}")


def check_logits(logits, targets, temperature, ignore_index, inplace):
    """Errors for what no kernel over rows of logits can take: see logprob_entropy."""
    if logits.ndim < 1 or logits.shape[:-1] != targets.shape or logits.shape[-1] == 0:
        raise ValueError(f"targets: shape {tuple(targets.shape)} for logits {tuple(logits.shape)}; valid: logits' without the last")
    check_targets(targets, logits.shape[-1], temperature, ignore_index)
    if not (inplace and logits.requires_grad and torch.is_grad_enabled()):
        return
    owner = logits if logits._base is None else logits._base
    if owner.is_leaf:  # a parameter's values would be lost to its own gradient
        raise ValueError("inplace: True for logits that are a leaf of the graph; valid: False, or the output of an operation")
    rows = reference.as_rows(logits)
    extent, separate = logits.shape[-1], rows.data_ptr() == logits.data_ptr()
    for stride, n in sorted(zip(rows.stride()[:2], rows.shape[:2])):
        separate &= n == 1 or stride >= extent
        extent += stride * (n - 1)
    if not separate:
        raise ValueError(
            f"inplace: True for shape {tuple(logits.shape)} and strides {logits.stride()}; valid: False, or rows of stride 1 "
            "that share no memory and merge into two dimensions"
        )


class _LogprobEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, targets, temperature, ignore_index, inplace):
        targets = targets.reshape(-1).contiguous()  # a slice [::2] is one-dimensional, yet not contiguous
        T = len(targets)
        logprob, entropy, row_max, log2_sum = (torch.empty(T, dtype=torch.float32, device=logits.device) for _ in range(4))
        if T:
            rows, sizes, options = launch_args(logits)
            _logprob_entropy_fwd_kernel[(T,)](
                rows, targets, logprob, entropy, row_max, log2_sum, *sizes, ignore_index, LOG2E / temperature, **options
            )
        ctx.save_for_backward(logits, targets, entropy, row_max, log2_sum)
        ctx.settings = temperature, ignore_index, inplace
        return logprob.view(logits.shape[:-1]), entropy.view(logits.shape[:-1])

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_logprob, grad_entropy):
        return logits_gradient(*ctx.saved_tensors, grad_logprob, grad_entropy, *ctx.settings), None, None, None, None


def logits_gradient(logits, targets, entropy, row_max, log2_sum, g, h, temperature, ignore_index, inplace):
    """d/d logits of the sum of g * logprob + h * entropy, from what the forward pass kept of each row. g, h [...]."""
    if inplace:
        grad = logits.detach()  # the same memory and version counter
        torch.autograd.graph.increment_version(grad)  # so that whoever saved the logits, this pass included, hears of the write
    else:
        grad = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
    if len(targets):
        rows, sizes, options = launch_args(logits)
        _logprob_entropy_bwd_kernel[(len(targets),)](  # g and h may be expanded scalars: a copy of [T] numbers makes them plain
            rows, targets, entropy, row_max, log2_sum, g.contiguous(), h.contiguous(), grad, *sizes, ignore_index,
            LOG2E / temperature, 1 / temperature, INPLACE=inplace, ALIGNED_OUT=launch_args(grad)[2]["ALIGNED"], **options,
        )  # fmt: skip
    return grad


def launch_args(logits):
    """(rows [n0, n1, V], (n1, the strides of both, V), options) of a launch with one program a row.

    The block is a function of V alone, so that equal rows are always summed in the same order. ALIGNED: every row starts on 16
    bytes, so that its full tiles can be moved 128 bits at a time.
    """
    rows = reference.as_rows(logits)
    _, n1, V = rows.shape
    block = min(BLOCK_V, max(16, triton.next_power_of_2(V)))
    starts = (rows.data_ptr(), *(stride * rows.element_size() for stride in rows.stride()[:2]))
    aligned = all(start % 16 == 0 for start in starts)
    return rows, (n1, *rows.stride()[:2], V), {"ALIGNED": aligned, "BLOCK_V": block, "num_warps": max(1, min(8, block // 512))}


@jit
def _row_offset(row, n_inner, stride_outer, stride_inner, ALIGNED: tl.constexpr, ELEMENT_BITS: tl.constexpr):
    """Offset of a row of [n_outer, n_inner, V], 64-bit; declared to the compiler as a multiple of 128 bits where it is one."""
    offset = (row // n_inner).to(tl.int64) * stride_outer + (row % n_inner).to(tl.int64) * stride_inner
    if ALIGNED:
        offset = tl.multiple_of(offset, 128 // ELEMENT_BITS)
    return offset


@jit
def _online_softmax_step(m, s, w, x, log2_scale):
    """Add a tile of logits x [BLOCK_V] to the running maximum m (a scalar) and to the sums s and w, one for each lane [BLOCK_V].

    One exp2 an element and one reduction a tile; the sums are rescaled only by a tile that raises the maximum.
    """
    m_tile = tl.max(x, 0)
    if m_tile > m:
        delta = tl.where(m == float("-inf"), 0.0, (m - m_tile) * log2_scale)  # nothing summed yet: nothing to rescale
        alpha = tl.exp2(delta)
        w = alpha * (w + delta * s)
        s = alpha * s
        m = m_tile
    shift = tl.where(m == float("-inf"), 0.0, m)  # only -inf so far: -inf - -inf would be NaN
    d = (x - shift) * log2_scale  # subtract first: exact, so a common offset of the logits changes nothing
    e = tl.exp2(d)
    s += e
    w += e * tl.maximum(d, -1e30)  # e = 0 at d = -inf, and 0 * -inf would be NaN
    return m, s, w


@jit
def _row_softmax(row_ptr, target, V, log2_scale, BLOCK_V: tl.constexpr):
    """Of one row, in one read: log-prob of the target, entropy, maximum, and log2 of the sum of e^(x - maximum)."""
    lanes = tl.arange(0, BLOCK_V)
    m = float("-inf")
    s = tl.zeros((BLOCK_V,), tl.float32)
    w = tl.zeros((BLOCK_V,), tl.float32)
    full = V // BLOCK_V * BLOCK_V
    for start in range(0, full, BLOCK_V):
        x = tl.load(row_ptr + start + lanes).to(tl.float32)
        m, s, w = _online_softmax_step(m, s, w, x, log2_scale)
    if full < V:
        x = tl.load(row_ptr + full + lanes, mask=full + lanes < V, other=float("-inf")).to(tl.float32)
        m, s, w = _online_softmax_step(m, s, w, x, log2_scale)
    s_row = tl.sum(s, 0)
    log2_sum = tl.log2(s_row)
    x_target = tl.load(row_ptr + target, mask=(target >= 0) & (target < V), other=float("nan")).to(tl.float32)
    logprob = ((x_target - m) * log2_scale - log2_sum) * 0.6931471805599453
    entropy = (log2_sum - tl.sum(w, 0) / s_row) * 0.6931471805599453
    return logprob, entropy, m, log2_sum


@jit(**UNSPECIALIZED)
def _logprob_entropy_fwd_kernel(
    logits_ptr, targets_ptr, logprob_ptr, entropy_ptr, row_max_ptr, log2_sum_ptr, n_inner, stride_outer: tl.int64,
    stride_inner: tl.int64, V, ignore_index, log2_scale, ALIGNED: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)  # at most 2^31 rows; offsets of logits are 64-bit
    target = tl.load(targets_ptr + row)
    if target == ignore_index:
        tl.store(logprob_ptr + row, 0.0)
        tl.store(entropy_ptr + row, 0.0)
        tl.store(row_max_ptr + row, 0.0)
        tl.store(log2_sum_ptr + row, 0.0)
    else:
        bits: tl.constexpr = logits_ptr.dtype.element_ty.primitive_bitwidth
        row_ptr = logits_ptr + _row_offset(row, n_inner, stride_outer, stride_inner, ALIGNED, bits)
        logprob, entropy, m, log2_sum = _row_softmax(row_ptr, target, V, log2_scale, BLOCK_V)
        tl.store(logprob_ptr + row, logprob)
        tl.store(entropy_ptr + row, entropy)
        tl.store(row_max_ptr + row, m)  # separate from log s: their sum would lose the digits of log s
        tl.store(log2_sum_ptr + row, log2_sum)


@jit
def _tile_gradient(x, columns, target, m, log2_sum, entropy, g, h, log2_scale, inv_temperature):
    """d/d logits of g * logprob + h * entropy, for a tile."""
    log2_p = (x - m) * log2_scale - log2_sum
    log_p = tl.maximum(log2_p * 0.6931471805599453, -1e4)  # p = 0 from there on: 0 * (h log p) is 0, not 0 * -inf
    return (tl.where(columns == target, g, 0.0) - tl.exp2(log2_p) * (g + h * (log_p + entropy))) * inv_temperature


@jit(**UNSPECIALIZED)
def _logprob_entropy_bwd_kernel(
    logits_ptr, targets_ptr, entropy_ptr, row_max_ptr, log2_sum_ptr, grad_logprob_ptr, grad_entropy_ptr, grad_logits_ptr, n_inner,
    stride_outer: tl.int64, stride_inner: tl.int64, V, ignore_index, log2_scale, inv_temperature, ALIGNED: tl.constexpr,
    ALIGNED_OUT: tl.constexpr, BLOCK_V: tl.constexpr, INPLACE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)  # at most 2^31 rows; offsets of logits are 64-bit
    target = tl.load(targets_ptr + row)
    bits: tl.constexpr = logits_ptr.dtype.element_ty.primitive_bitwidth
    row_ptr = logits_ptr + _row_offset(row, n_inner, stride_outer, stride_inner, ALIGNED, bits)
    if INPLACE:  # a tile is read before it is written, and by no other program
        out_ptr = row_ptr
    else:
        out_ptr = grad_logits_ptr + _row_offset(row, 1, V, 0, ALIGNED_OUT, bits)
    lanes = tl.arange(0, BLOCK_V)
    full = V // BLOCK_V * BLOCK_V
    if target == ignore_index:
        zero = tl.zeros((BLOCK_V,), dtype=grad_logits_ptr.dtype.element_ty)
        for start in range(0, full, BLOCK_V):
            tl.store(out_ptr + start + lanes, zero)
        tl.store(out_ptr + full + lanes, zero, mask=full + lanes < V)
    else:
        entropy, m, log2_sum = tl.load(entropy_ptr + row), tl.load(row_max_ptr + row), tl.load(log2_sum_ptr + row)
        g = tl.load(grad_logprob_ptr + row).to(tl.float32)
        h = tl.load(grad_entropy_ptr + row).to(tl.float32)
        for start in range(0, full, BLOCK_V):
            x = tl.load(row_ptr + start + lanes).to(tl.float32)
            d = _tile_gradient(x, start + lanes, target, m, log2_sum, entropy, g, h, log2_scale, inv_temperature)
            tl.store(out_ptr + start + lanes, d.to(grad_logits_ptr.dtype.element_ty))
        if full < V:
            inside = full + lanes < V
            x = tl.load(row_ptr + full + lanes, mask=inside, other=float("-inf")).to(tl.float32)
            d = _tile_gradient(x, full + lanes, target, m, log2_sum, entropy, g, h, log2_scale, inv_temperature)
            tl.store(out_ptr + full + lanes, d.to(grad_logits_ptr.dtype.element_ty), mask=inside)
