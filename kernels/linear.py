"""Log-probability of the target and entropy, straight from hidden states and the LM head: the logits [P, V] never exist.

    logprob, entropy = linear_logprob_entropy(hidden, weight, targets, temperature=0.7)    # both differentiable

The maths is logprob.py's (log-prob and entropy from the running m, s, w; one formula for the gradient); here a logit is
computed where it is used. A program takes a block of tokens and a span of the vocabulary, goes through the span in tiles and
through the hidden size in slices for the tensor cores (products in hidden's type, sums in float32, never rounded before the
softmax), and stores four numbers a token and span: m, s, w and the target's logit. A second kernel combines the spans in order.

Backward recomputes the logits, a tile [tokens x columns] at a time, writes d logits into a workspace of bounded size, and
multiplies that by the head (gradient of hidden) and by hidden (gradient of the head), summing in float32. The gradients cannot
be formed in the forward pass, as losses that end in one scalar do: the upstream gradients, one a token and output, are known
only after the policy loss has seen the log-probs. The price is one matrix product of four. Without a gradient to compute
(scoring: old policy, reference, cross matrix) nothing but the results is kept.

Spans and tiles are functions of V and the inputs' type alone and are summed in order, without atomics, so a token's result has
the same bits alone, among others, and anywhere among them (of the kernels: the reference implementation leaves its products to
a BLAS). Tokens are on grid axis 0; offsets are 64-bit; no kernel is compiled for a particular number of tokens. Left out:
second derivatives, a head split over devices.
"""

from __future__ import annotations

import torch
from torch.autograd.function import once_differentiable

from nanoragen.kernels import reference
from nanoragen.kernels.dispatch import interpreted, jit, tl, triton, use_triton
from nanoragen.kernels.logprob import LOG2E, _tile_gradient, check_targets

WORKSPACE = 64 * 2**20  # bytes
BLOCKS16 = {"BLOCK_P": 128, "BLOCK_V": 128, "BLOCK_D": 64}  # bf16 and fp16, on tensor cores
BLOCKS32 = {"BLOCK_P": 64, "BLOCK_V": 64, "BLOCK_D": 32}
SPAN = 4096  # columns of the vocabulary a program goes through: from a few hundred tokens on there are enough programs for a GPU
UNSPECIALIZED = ["P", "V", "targets_ptr"]  # no version is compiled for a number of tokens, or the address of their first target
# whether torch's cuBLAS call takes 16-bit inputs and a float32 output
FLOAT32_OUT = torch.version.cuda is not None and tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 11)


def linear_logprob_entropy(
    hidden, weight, targets, *, bias=None, temperature=1.0, ignore_index=-100, backend="auto", workspace=WORKSPACE
):
    """log softmax(z)[target] and the entropy of that softmax, in nats, with z = (hidden @ weight.T + bias) / temperature.

    hidden    [P, D] float64 (torch only), float32, bfloat16 or float16
    weight    [V, D] the LM head; its type may differ from hidden's: the kernel takes products in hidden's
    targets   [P] integer from 0 to V - 1; tokens where it equals ignore_index cost nothing: both results and the gradient are 0
    bias      [V] or None; -inf excludes a token
    workspace bytes of logits, their gradient and copies of slices of the head held at a time (at least one small tile is);
              beside it only arrays of hidden's size are, and the gradients themselves
    Returns (logprob [P], entropy [P]), float32 (float64 where an input is), differentiable with respect to hidden, weight and
    bias; gradients are summed in float32 and returned in each input's type. Autocast does not apply inside. The count of live
    tokens is read by the host. Inputs are not changed. ValueError for shapes that do not fit, a temperature of 0 or less or no
    workspace. IndexError for a target outside the vocabulary on a CPU; NaN on a GPU, where looking would wait for the device.
    Source: RAGEN-2 (arXiv 2604.06268), eq. 1; online softmax after Milakov & Gimelshein 2018.
    """
    fits = hidden.ndim == weight.ndim == 2 and hidden.shape[1] == weight.shape[1] and targets.shape == hidden.shape[:1]
    if not fits or len(weight) == 0 or (bias is not None and bias.shape != weight.shape[:1]):
        raise ValueError(
            f"hidden {tuple(hidden.shape)}, weight {tuple(weight.shape)}, targets {tuple(targets.shape)}, bias "
            f"{None if bias is None else tuple(bias.shape)} do not fit; valid: [P, D], [V, D], [P], [V] or None"
        )
    check_targets(targets, len(weight), temperature, ignore_index)
    if not workspace > 0:
        raise ValueError(f"workspace: {workspace}; valid: bytes, above 0")
    kernel = use_triton(backend, hidden) and torch.float64 not in (hidden.dtype, weight.dtype)
    impl = (forward, backward) if kernel else (reference.linear_forward, reference.linear_backward)
    return _LinearLogprobEntropy.apply(hidden, weight, bias, targets, float(temperature), int(ignore_index), int(workspace), impl)


class _LinearLogprobEntropy(torch.autograd.Function):
    """What both implementations share: ignored tokens are left out before the work and put back after it."""

    @staticmethod
    def forward(ctx, hidden, weight, bias, targets, temperature, ignore_index, workspace, impl):
        live = LiveTokens(targets != ignore_index)
        with torch.autocast(hidden.device.type, enabled=False):
            logprob, entropy, *rest = impl[0](
                live.select(hidden), weight, bias, live.select(targets).long(), temperature, workspace
            )
        ctx.save_for_backward(hidden, weight, bias, targets, entropy, *rest)
        ctx.live, ctx.temperature, ctx.workspace, ctx.impl = live, temperature, workspace, impl
        return live.restore(logprob), live.restore(entropy)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_logprob, grad_entropy):
        hidden, weight, bias, targets, *saved = ctx.saved_tensors
        live, wanted = ctx.live, ctx.needs_input_grad[:3]
        if len(live.index) == 0:
            return *(torch.zeros_like(t) if want else None for t, want in zip((hidden, weight, bias), wanted)), *[None] * 5
        with torch.autocast(hidden.device.type, enabled=False):
            grad_hidden, grad_weight, grad_bias = ctx.impl[1](
                live.select(hidden), weight, bias, live.select(targets).long(), ctx.temperature, ctx.workspace,
                saved, live.select(grad_logprob), live.select(grad_entropy), wanted,
            )  # fmt: skip
        return live.restore(grad_hidden) if wanted[0] else None, grad_weight, grad_bias, *[None] * 5


class LiveTokens:
    """The tokens that are not ignored: selected from [P, ...], and put back among zeros. No copy where none is ignored."""

    def __init__(self, mask):
        self.index, self.P = mask.nonzero()[:, 0], len(mask)

    def select(self, x):
        return x if len(self.index) == self.P else x[self.index]

    def restore(self, x):
        return x if len(self.index) == self.P else x.new_zeros(self.P, *x.shape[1:]).index_copy_(0, self.index, x)


# -- launches of the kernels -------------------------------------------------------------------------------------------


def forward(hidden, weight, bias, targets, temperature, workspace=WORKSPACE, with_entropy=True):
    """logprob, entropy, row_max, log2_sum: [P] float32 each; the entropy means nothing without with_entropy. targets int64."""
    hidden, weight, targets = _unit_stride(_dot_type(hidden)), _unit_stride(_dot_type(weight)), targets.contiguous()
    (P, D), V, log2_scale = hidden.shape, len(weight), LOG2E / temperature
    out = [torch.empty(P, dtype=torch.float32, device=hidden.device) for _ in range(4)]
    blocks, n_spans = _blocks(hidden, D), triton.cdiv(V, SPAN)
    tokens = max(1, workspace // (16 * n_spans * blocks["BLOCK_P"])) * blocks["BLOCK_P"]  # 16 bytes a token and span
    for t in reference.slices(P, tokens):
        n = t.stop - t.start
        partials = torch.empty(4, n_spans, n, dtype=torch.float32, device=hidden.device)
        _partial_softmax_kernel[(triton.cdiv(n, blocks["BLOCK_P"]), n_spans)](
            hidden[t], weight, _or_dummy(bias, weight), targets[t], partials, n, V, D, hidden.stride(0), weight.stride(0),
            log2_scale, HAS_BIAS=bias is not None, WITH_ENTROPY=with_entropy, SPAN=SPAN, **blocks, num_warps=8,
        )  # fmt: skip
        _combine_kernel[(triton.cdiv(n, 128),)](
            partials, targets[t], *(x[t] for x in out), n, V, n_spans, log2_scale, BLOCK_P=128, num_warps=4
        )
    return out


def backward(hidden, weight, bias, targets, temperature, workspace, saved, g, h, wanted):
    """The gradients of hidden [P, D], weight [V, D] and bias [V], each in its own type, or None where not wanted. P > 0."""
    entropy, row_max, log2_sum = saved
    hidden, weight, targets = _unit_stride(hidden), _unit_stride(weight), targets.contiguous()
    (P, D), V, dtype, device = hidden.shape, len(weight), hidden.dtype, hidden.device
    # d logits are kept in hidden's type, divided by the power of two that brings the largest upstream gradient to 1 .. 2: exact,
    # and fp16 neither overflows under a scaled loss nor loses the small ones of a mean over many tokens
    largest = torch.stack([g, h]).abs()  # of the finite ones: one that is not finite spoils its own token only
    scale = torch.exp2(torch.where(largest.isfinite(), largest, 0.0).amax().clamp(min=1e-30).log2().floor())
    g, h, scale = g / scale, h / scale, scale / temperature
    # a tile's sides are multiples of 128, so that every slice starts on 16 bytes
    tokens, columns = reference.tile(P, triton.cdiv(V, 128) * 128, 2**62, workspace, hidden.element_size(), 6 * D)
    tokens, columns = max(1, tokens // 128) * 128, max(1, columns // 128) * 128
    d_logits = torch.empty(min(tokens, P), columns, dtype=dtype, device=device)
    blocks = _blocks(_dot_type(hidden), D)
    grad_hidden = torch.zeros(P, D, dtype=torch.float32, device=device) if wanted[0] else None
    grad_weight = torch.empty(V, D, dtype=weight.dtype, device=device) if wanted[1] else None
    grad_bias = torch.empty(V, dtype=bias.dtype, device=device) if wanted[2] else None
    for v in reference.slices(V, columns):
        w, b, n = weight[v], None if bias is None else bias[v], v.stop - v.start
        sum_weight, sum_bias = (torch.zeros(n, *size, dtype=torch.float32, device=device) for size in ((D,), ()))
        for t in reference.slices(P, tokens):
            x, d = hidden[t], d_logits[: t.stop - t.start, :n]
            _grad_logits_kernel[(triton.cdiv(len(d), blocks["BLOCK_P"]), triton.cdiv(n, blocks["BLOCK_V"]))](
                _dot_type(x), _dot_type(w), _or_dummy(b, w), targets[t], entropy[t], row_max[t], log2_sum[t], g[t], h[t], d,
                len(d), n, D, _dot_type(x).stride(0), _dot_type(w).stride(0), columns, v.start, LOG2E / temperature,
                HAS_BIAS=b is not None, **blocks, num_warps=8,
            )  # fmt: skip
            if wanted[0]:
                _add_product(grad_hidden[t], d, w.to(dtype))
            if wanted[1]:
                _add_product(sum_weight, d.T, x)
            if wanted[2]:
                sum_bias += d.sum(0, dtype=torch.float32)
        if wanted[1]:
            grad_weight[v] = sum_weight.mul_(scale)
        if wanted[2]:
            grad_bias[v] = sum_bias.mul_(scale)
    return grad_hidden.mul_(scale).to(dtype) if wanted[0] else None, grad_weight, grad_bias


def _add_product(out, a, b):
    """out += a @ b, with out in float32, so that 16-bit inputs are summed over all tiles without being rounded between them."""
    if a.is_cuda and a.dtype != torch.float32 and FLOAT32_OUT:
        torch.addmm(out, a, b, out_dtype=torch.float32, out=out)
    else:  # an older torch pays with float32 copies
        out.addmm_(a.float(), b.float())


def _blocks(hidden, D) -> dict:
    """Block sizes: a function of the inputs' type, never of their number, so equal tokens are summed in the same order."""
    blocks = BLOCKS32 if hidden.dtype == torch.float32 else BLOCKS16
    return {**blocks, "EVEN_D": D % blocks["BLOCK_D"] == 0}


def _dot_type(x):
    """bfloat16 as float32 under the interpreter, whose bf16 products are wrong. On a GPU x itself."""
    return x.float() if interpreted() and x.dtype == torch.bfloat16 else x


def _unit_stride(x):
    """Rows are read where they lie; a copy only where their inner stride is not 1."""
    return x if x.stride(1) == 1 else x.contiguous()


def _or_dummy(bias, other):
    return other if bias is None else bias.contiguous()  # a pointer that is never read where there is no bias


# -- the kernels -------------------------------------------------------------------------------------------------------


@jit
def _logits_tile(
    hidden_rows_ptr, weight_rows_ptr, bias_ptr, columns, D, HAS_BIAS: tl.constexpr, EVEN_D: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """A tile of logits [BLOCK_P, BLOCK_V] in float32, before the temperature: rows of hidden times rows of the head."""
    x = tl.zeros((BLOCK_P, BLOCK_V), tl.float32)
    for d in range(0, D, BLOCK_D):
        k = d + tl.arange(0, BLOCK_D)
        if EVEN_D:
            h = tl.load(hidden_rows_ptr[:, None] + k[None, :])
            w = tl.load(weight_rows_ptr[None, :] + k[:, None])
        else:
            h = tl.load(hidden_rows_ptr[:, None] + k[None, :], mask=(k < D)[None, :], other=0.0)
            w = tl.load(weight_rows_ptr[None, :] + k[:, None], mask=(k < D)[:, None], other=0.0)
        x = tl.dot(h, w.to(h.dtype), acc=x, input_precision="ieee")
    if HAS_BIAS:
        x += tl.load(bias_ptr + columns).to(tl.float32)[None, :]
    return x


@jit(do_not_specialize=UNSPECIALIZED)
def _partial_softmax_kernel(
    hidden_ptr, weight_ptr, bias_ptr, targets_ptr, partials_ptr, P, V, D, hidden_stride: tl.int64, weight_stride: tl.int64,
    log2_scale, HAS_BIAS: tl.constexpr, WITH_ENTROPY: tl.constexpr, SPAN: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_D: tl.constexpr, EVEN_D: tl.constexpr,
):  # fmt: skip
    """m, s, w and the target's logit of a block of tokens over a span of the vocabulary: partials [4, n_spans, P]."""
    tokens = tl.program_id(0).to(tl.int64) * BLOCK_P + tl.arange(0, BLOCK_P)
    first = tl.program_id(1) * SPAN
    # lanes past the end read the last row again: no masks in the loop, and what they compute is dropped
    hidden_rows_ptr = hidden_ptr + tl.minimum(tokens, P - 1) * hidden_stride
    target = tl.load(targets_ptr + tl.minimum(tokens, P - 1))
    m = tl.full((BLOCK_P,), float("-inf"), tl.float32)
    s = tl.zeros((BLOCK_P,), tl.float32)
    w = tl.zeros((BLOCK_P,), tl.float32)
    x_target = tl.zeros((BLOCK_P,), tl.float32)
    for v in range(first, tl.minimum(first + SPAN, V), BLOCK_V):
        columns = v + tl.arange(0, BLOCK_V)
        inside = tl.minimum(columns, V - 1)
        weight_rows_ptr = weight_ptr + inside.to(tl.int64) * weight_stride
        x = _logits_tile(hidden_rows_ptr, weight_rows_ptr, bias_ptr, inside, D, HAS_BIAS, EVEN_D, BLOCK_P, BLOCK_V, BLOCK_D)
        x = tl.where((columns < V)[None, :], x, float("-inf"))
        x_target += tl.sum(tl.where(columns[None, :] == target[:, None], x, 0.0), 1)
        m_new = tl.maximum(m, tl.max(x, 1))
        shift = tl.where(m_new == float("-inf"), 0.0, m_new)  # only -inf so far: -inf - -inf would be NaN
        delta = (m - shift) * log2_scale
        alpha = tl.exp2(delta)
        d = (x - shift[:, None]) * log2_scale
        e = tl.exp2(d)
        if WITH_ENTROPY:  # e = 0 at d = -inf, and 0 * -inf would be NaN
            w = alpha * (w + tl.maximum(delta, -1e30) * s) + tl.sum(e * tl.maximum(d, -1e30), 1)
        s = alpha * s + tl.sum(e, 1)
        m = m_new
    out_ptr = partials_ptr + tl.program_id(1).to(tl.int64) * P + tokens
    step = tl.num_programs(1).to(tl.int64) * P
    live = tokens < P
    tl.store(out_ptr, m, mask=live)
    tl.store(out_ptr + step, s, mask=live)
    tl.store(out_ptr + 2 * step, w, mask=live)
    tl.store(out_ptr + 3 * step, x_target, mask=live)


@jit(do_not_specialize=[*UNSPECIALIZED, "logprob_ptr", "entropy_ptr", "row_max_ptr", "log2_sum_ptr", "n_spans"])
def _combine_kernel(
    partials_ptr, targets_ptr, logprob_ptr, entropy_ptr, row_max_ptr, log2_sum_ptr, P, V, n_spans, log2_scale,
    BLOCK_P: tl.constexpr,
):  # fmt: skip
    """Combine the spans of each token, in order, into its log-prob and entropy."""
    tokens = tl.program_id(0).to(tl.int64) * BLOCK_P + tl.arange(0, BLOCK_P)
    live = tokens < P
    m = tl.full((BLOCK_P,), float("-inf"), tl.float32)
    s = tl.zeros((BLOCK_P,), tl.float32)
    w = tl.zeros((BLOCK_P,), tl.float32)
    x_target = tl.zeros((BLOCK_P,), tl.float32)
    part_ptr, step = partials_ptr + tokens, n_spans.to(tl.int64) * P
    for _ in range(n_spans):
        m_i = tl.load(part_ptr, mask=live, other=0.0)
        s_i = tl.load(part_ptr + step, mask=live, other=1.0)
        w_i = tl.load(part_ptr + 2 * step, mask=live, other=0.0)
        x_target += tl.load(part_ptr + 3 * step, mask=live, other=0.0)
        m_new = tl.maximum(m, m_i)
        shift = tl.where(m_new == float("-inf"), 0.0, m_new)
        delta, delta_i = (m - shift) * log2_scale, (m_i - shift) * log2_scale
        alpha, alpha_i = tl.exp2(delta), tl.exp2(delta_i)
        w = alpha * (w + tl.maximum(delta, -1e30) * s) + alpha_i * (w_i + tl.maximum(delta_i, -1e30) * s_i)
        s = alpha * s + alpha_i * s_i
        m = m_new
        part_ptr += P
    log2_sum = tl.log2(s)
    target = tl.load(targets_ptr + tokens, mask=live, other=0)
    logprob = ((x_target - m) * log2_scale - log2_sum) * 0.6931471805599453
    tl.store(logprob_ptr + tokens, tl.where((target >= 0) & (target < V), logprob, float("nan")), mask=live)
    tl.store(entropy_ptr + tokens, (log2_sum - w / s) * 0.6931471805599453, mask=live)
    tl.store(row_max_ptr + tokens, m, mask=live)  # separate from log s: their sum would lose the digits of log s
    tl.store(log2_sum_ptr + tokens, log2_sum, mask=live)


@jit(do_not_specialize=[
    *UNSPECIALIZED, "entropy_ptr", "row_max_ptr", "log2_sum_ptr", "grad_logprob_ptr", "grad_entropy_ptr", "first_column"
])  # fmt: skip
def _grad_logits_kernel(
    hidden_ptr, weight_ptr, bias_ptr, targets_ptr, entropy_ptr, row_max_ptr, log2_sum_ptr, grad_logprob_ptr, grad_entropy_ptr,
    grad_logits_ptr, P, V, D, hidden_stride: tl.int64, weight_stride: tl.int64, grad_logits_stride, first_column, log2_scale,
    HAS_BIAS: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_D: tl.constexpr, EVEN_D: tl.constexpr,
):  # fmt: skip
    """d (g logprob + h entropy) / d logits, without the 1 / temperature, for V rows of the head from first_column on."""
    tokens = tl.program_id(0).to(tl.int64) * BLOCK_P + tl.arange(0, BLOCK_P)
    columns = tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)
    row, inside = tl.minimum(tokens, P - 1), tl.minimum(columns, V - 1)
    hidden_rows_ptr, weight_rows_ptr = hidden_ptr + row * hidden_stride, weight_ptr + inside.to(tl.int64) * weight_stride
    x = _logits_tile(hidden_rows_ptr, weight_rows_ptr, bias_ptr, inside, D, HAS_BIAS, EVEN_D, BLOCK_P, BLOCK_V, BLOCK_D)
    target, entropy = tl.load(targets_ptr + row) - first_column, tl.load(entropy_ptr + row)
    m, log2_sum = tl.load(row_max_ptr + row), tl.load(log2_sum_ptr + row)
    g, h = tl.load(grad_logprob_ptr + row), tl.load(grad_entropy_ptr + row)
    d = _tile_gradient(
        x, columns[None, :], target[:, None], m[:, None], log2_sum[:, None], entropy[:, None], g[:, None], h[:, None],
        log2_scale, 1.0,
    )  # fmt: skip
    tl.store(
        grad_logits_ptr + tokens[:, None] * grad_logits_stride + columns[None, :], d.to(grad_logits_ptr.dtype.element_ty),
        mask=(tokens < P)[:, None] & (columns < V)[None, :],
    )  # fmt: skip
