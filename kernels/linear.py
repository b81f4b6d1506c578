"""Log-probability of the target and entropy, straight from hidden states and the LM head: the logits [P, V] never exist.

    logprob, entropy = linear_logprob_entropy(hidden, weight, targets, temperature=0.7)    # both differentiable

The maths is logprob.py's (log-prob and entropy from the running m, s, w; one formula for the gradient); here a logit is made
where it is used. A program takes a block of tokens and a span of the vocabulary, walks the span in tiles and the hidden size
in slices for the tensor cores (products in hidden's type, sums in float32, never rounded before the softmax), and leaves four
numbers a token and span. A second small kernel merges the spans in order.

Backward recomputes the logits, a tile [tokens x columns] at a time, writes d logits into a workspace of bounded size, and
multiplies that by the head (gradient of hidden) and by hidden (gradient of the head), summing in float32. Why not form the
gradients in the forward pass, as losses with one scalar at the end do? The upstream gradients here, one a token and output, are
only known once the policy loss has seen the log-probs: the price is one GEMM of four. Without a gradient to
compute (scoring: old policy, reference, cross matrix) nothing but the results is kept.

Spans and tiles are functions of V and the inputs' type alone and are summed in order, without atomics, so a token's result is
the same bits alone, among others, and anywhere among them (of the kernels: the CPU twin leaves its products to a BLAS). Tokens are on grid axis 0; offsets are 64-bit; no kernel is compiled
for a particular number of tokens. Left out: second derivatives, a head split over devices.
"""

from __future__ import annotations

import math

import torch
from torch.autograd.function import once_differentiable

from nanoragen.kernels import reference
from nanoragen.kernels.dispatch import interpreted, jit, tl, triton, use_triton
from nanoragen.kernels.logprob import LOG2E, _gradient

WORKSPACE = 64 * 2**20  # bytes
BLOCKS16 = {"BLOCK_P": 128, "BLOCK_V": 128, "BLOCK_D": 64}  # bf16 and fp16, on tensor cores
BLOCKS32 = {"BLOCK_P": 64, "BLOCK_V": 64, "BLOCK_D": 32}
NUMBERS = ("P", "V", "Y")  # nothing is compiled for a particular number of tokens, or place of their first target
WIDE_SUMS = torch.version.cuda is not None and tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 11)  # in torch's cuBLAS
SPAN = 4096  # columns of the vocabulary a program walks; more programs than a GPU has cores from a few hundred tokens on


def linear_logprob_entropy(
    hidden, weight, targets, *, bias=None, temperature=1.0, ignore_index=-100, backend="auto", workspace=WORKSPACE
):
    """log softmax(z)[target] and the entropy of that softmax, in nats, with z = (hidden @ weight.T + bias) / temperature.

    hidden    [P, D] float64 (torch only), float32, bfloat16 or float16
    weight    [V, D] the LM head; its type may differ from hidden's: the kernel takes products in hidden's
    targets   [P] integer; tokens where it equals ignore_index cost nothing: both results and the gradient are 0
    bias      [V] or None; -inf excludes a token
    workspace bytes of logits, their gradient and copies of slices of the head held at a time (at least one small tile is);
              beside it only arrays of hidden's size are, and the gradients themselves
    Returns (logprob [P], entropy [P]), float32 (float64 where an input is), differentiable with respect to hidden, weight and
    bias; gradients are summed in float32 and returned in each input's type. Autocast does not apply inside. The count of live
    tokens is read by the host. Inputs are not changed. ValueError for shapes that do not fit, a temperature of 0 or less or no
    workspace. A target outside the vocabulary is an IndexError on a CPU and NaN on a GPU, which cannot stop to say so.
    Source: RAGEN-2 (arXiv 2604.06268), eq. 1; online softmax after Milakov & Gimelshein 2018.
    """
    fits = hidden.ndim == weight.ndim == 2 and hidden.shape[1] == weight.shape[1] and targets.shape == hidden.shape[:1]
    if not fits or len(weight) == 0 or (bias is not None and bias.shape != weight.shape[:1]):
        raise ValueError(
            f"hidden {tuple(hidden.shape)}, weight {tuple(weight.shape)}, targets {tuple(targets.shape)}, bias "
            f"{None if bias is None else tuple(bias.shape)} do not fit; valid: [P, D], [V, D], [P], [V] or None"
        )
    if targets.is_floating_point():
        raise ValueError(f"targets: {targets.dtype}; valid: an integer type")
    if not 0 < temperature < math.inf:
        raise ValueError(f"temperature: {temperature}; valid: above 0")
    if not workspace > 0:
        raise ValueError(f"workspace: {workspace}; valid: bytes, above 0")
    wide = torch.float64 in (hidden.dtype, weight.dtype)
    kernel = use_triton(backend, hidden) and not wide
    ways = (forward, backward) if kernel else (reference.linear_forward, reference.linear_backward)
    return _LinearLogprobEntropy.apply(hidden, weight, bias, targets, float(temperature), int(ignore_index), int(workspace), ways)


class _LinearLogprobEntropy(torch.autograd.Function):
    """What both backends share: ignored tokens are left out before the work and put back after it."""

    @staticmethod
    def forward(ctx, hidden, weight, bias, targets, temperature, ignore_index, workspace, ways):
        live = (targets != ignore_index).nonzero()[:, 0]
        few = _Few(live, len(targets))
        with torch.autocast(hidden.device.type, enabled=False):
            logprob, entropy, *rest = ways[0](few.take(hidden), weight, bias, few.take(targets).long(), temperature, workspace)
        ctx.save_for_backward(hidden, weight, bias, targets, live, entropy, *rest)
        ctx.temperature, ctx.workspace, ctx.ways = temperature, workspace, ways
        return few.put(logprob), few.put(entropy)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_logprob, grad_entropy):
        hidden, weight, bias, targets, live, *saved = ctx.saved_tensors
        few, wanted = _Few(live, len(targets)), ctx.needs_input_grad[:3]
        if len(live) == 0:
            return *(torch.zeros_like(t) if want else None for t, want in zip((hidden, weight, bias), wanted)), *[None] * 5
        with torch.autocast(hidden.device.type, enabled=False):
            grad_hidden, grad_weight, grad_bias = ctx.ways[1](
                few.take(hidden), weight, bias, few.take(targets).long(), ctx.temperature, ctx.workspace,
                saved, few.take(grad_logprob), few.take(grad_entropy), wanted,
            )  # fmt: skip
        return few.put(grad_hidden) if wanted[0] else None, grad_weight, grad_bias, *[None] * 5


class _Few:
    """Some of P rows: taken out, and put back among zeros. Nothing is copied where they are all of them."""

    def __init__(self, live, P):
        self.live, self.P, self.all = live, P, len(live) == P

    def take(self, x):
        return x if self.all else x[self.live]

    def put(self, x):
        return x if self.all else x.new_zeros(self.P, *x.shape[1:]).index_copy_(0, self.live, x)


# -- the kernels' side ---------------------------------------------------------------------------------------------------


def forward(hidden, weight, bias, targets, temperature, workspace=WORKSPACE, with_entropy=True):
    """logprob, entropy, top, log2_s: [P] float32 each; the entropy means nothing unless asked for. targets [P] int64."""
    hidden, weight, targets = _rows(_exact(hidden)), _rows(_exact(weight)), targets.contiguous()
    (P, D), V = hidden.shape, len(weight)
    out = [torch.empty(P, dtype=torch.float32, device=hidden.device) for _ in range(4)]
    blocks, spans = _blocks(hidden, D), triton.cdiv(V, SPAN)
    slab = max(1, workspace // (16 * spans * blocks["BLOCK_P"])) * blocks["BLOCK_P"]  # four numbers a token and span
    for t in reference.slices(P, slab):
        n = t.stop - t.start
        parts = torch.empty(4, spans, n, dtype=torch.float32, device=hidden.device)
        _walk[(triton.cdiv(n, blocks["BLOCK_P"]), spans)](
            hidden[t], weight, _pointer(bias, weight), targets[t], parts, n, V, D, hidden.stride(0), weight.stride(0),
            LOG2E / temperature, BIAS=bias is not None, ENTROPY=with_entropy, SPAN=SPAN, **blocks, num_warps=8,
        )  # fmt: skip
        _merge_spans[(triton.cdiv(n, 128),)](
            parts, targets[t], *(x[t] for x in out), n, V, spans, LOG2E / temperature, BLOCK=128, num_warps=4
        )
    return out


def backward(hidden, weight, bias, targets, temperature, workspace, saved, g, h, wanted):
    """The gradients of hidden [P, D], weight [V, D] and bias [V], each in its own type, or None where not wanted. P > 0."""
    entropy, top, log2_s = saved
    hidden, weight, targets = _rows(hidden), _rows(weight), targets.contiguous()
    (P, D), V, kind, device = hidden.shape, len(weight), hidden.dtype, hidden.device
    # d logits are kept in hidden's type, over a power of two that brings the largest upstream gradient to 1 to 2: exact, and
    # fp16 neither overflows under a scaled loss nor loses the small ones of a mean over many tokens
    largest = torch.stack([g, h]).abs()  # of the finite ones: one that is not spoils its own token only
    scale = torch.exp2(torch.where(largest.isfinite(), largest, 0.0).amax().clamp(min=1e-30).log2().floor())
    g, h, scale = g / scale, h / scale, scale / temperature
    # a tile's sides are multiples of 128, so that every slice starts on 16 bytes
    tokens, columns = reference.tile(P, triton.cdiv(V, 128) * 128, 2**62, workspace, hidden.element_size(), 6 * D)
    tokens, columns = max(1, tokens // 128) * 128, max(1, columns // 128) * 128
    d_logits = torch.empty(min(tokens, P), columns, dtype=kind, device=device)
    blocks = _blocks(_exact(hidden), D)
    grad_hidden = torch.zeros(P, D, dtype=torch.float32, device=device) if wanted[0] else None
    grad_weight = torch.empty(V, D, dtype=weight.dtype, device=device) if wanted[1] else None
    grad_bias = torch.empty(V, dtype=bias.dtype, device=device) if wanted[2] else None
    for v in reference.slices(V, columns):
        w, b, n = weight[v], None if bias is None else bias[v], v.stop - v.start
        sum_weight, sum_bias = (torch.zeros(n, *size, dtype=torch.float32, device=device) for size in ((D,), ()))
        for t in reference.slices(P, tokens):
            x, d = hidden[t], d_logits[: t.stop - t.start, :n]
            _d_logits[(triton.cdiv(len(d), blocks["BLOCK_P"]), triton.cdiv(n, blocks["BLOCK_V"]))](
                _exact(x), _exact(w), _pointer(b, w), targets[t], entropy[t], top[t], log2_s[t], g[t], h[t], d, len(d), n, D,
                _exact(x).stride(0), _exact(w).stride(0), columns, v.start, LOG2E / temperature,
                BIAS=b is not None, **blocks, num_warps=8,
            )  # fmt: skip
            if wanted[0]:
                _add_product(grad_hidden[t], d, w.to(kind))
            if wanted[1]:
                _add_product(sum_weight, d.T, x)
            if wanted[2]:
                sum_bias += d.sum(0, dtype=torch.float32)
        if wanted[1]:
            grad_weight[v] = sum_weight.mul_(scale)
        if wanted[2]:
            grad_bias[v] = sum_bias.mul_(scale)
    return grad_hidden.mul_(scale).to(kind) if wanted[0] else None, grad_weight, grad_bias


def _add_product(out, a, b):
    """out += a @ b, with out in float32, so that 16-bit inputs are summed over all tiles without being rounded between them."""
    if a.is_cuda and a.dtype != torch.float32 and WIDE_SUMS:
        torch.addmm(out, a, b, out_dtype=torch.float32, out=out)
    else:  # an older torch pays with float32 copies
        out.addmm_(a.float(), b.float())


def _blocks(hidden, D) -> dict:
    """Block sizes: a function of the inputs' type, never of their number, so equal tokens are summed in the same order."""
    blocks = BLOCKS32 if hidden.dtype == torch.float32 else BLOCKS16
    return {**blocks, "EVEN": D % blocks["BLOCK_D"] == 0}


def _exact(x):
    """bfloat16 as float32 under the interpreter, whose bf16 products are wrong. On a GPU x itself."""
    return x.float() if interpreted() and x.dtype == torch.bfloat16 else x


def _rows(x):
    """Rows are read where they lie; a copy only where their inner stride is not 1."""
    return x if x.stride(1) == 1 else x.contiguous()


def _pointer(bias, other):
    return other if bias is None else bias.contiguous()  # never read where there is none


@jit
def _logits(
    h_rows, w_rows, BIAS_PTR, columns, D, BIAS: tl.constexpr, EVEN: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_V: tl.constexpr,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    """A tile of logits [BLOCK_P, BLOCK_V] in float32, before the temperature: rows of hidden times rows of the head."""
    lanes = tl.arange(0, BLOCK_D)
    x = tl.zeros((BLOCK_P, BLOCK_V), tl.float32)
    for d in range(0, D, BLOCK_D):
        k = d + lanes
        if EVEN:
            h = tl.load(h_rows[:, None] + k[None, :])
            w = tl.load(w_rows[None, :] + k[:, None])
        else:
            h = tl.load(h_rows[:, None] + k[None, :], mask=(k < D)[None, :], other=0.0)
            w = tl.load(w_rows[None, :] + k[:, None], mask=(k < D)[:, None], other=0.0)
        x = tl.dot(h, w.to(h.dtype), acc=x, input_precision="ieee")
    if BIAS:
        x += tl.load(BIAS_PTR + columns).to(tl.float32)[None, :]
    return x


@jit(do_not_specialize=NUMBERS)
def _walk(
    HIDDEN, WEIGHT, BIAS_PTR, Y, PARTS, P, V, D, h_stride: tl.int64, w_stride: tl.int64, scale2,
    BIAS: tl.constexpr, ENTROPY: tl.constexpr, SPAN: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_D: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """m, s, w and the target's logit of a block of tokens over a span of the vocabulary: PARTS [4, spans, P]."""
    tokens = tl.program_id(0).to(tl.int64) * BLOCK_P + tl.arange(0, BLOCK_P)
    first = tl.program_id(1) * SPAN
    # lanes past the end read the last row again: no masks in the loop, and what they compute is dropped
    h_rows = HIDDEN + tl.minimum(tokens, P - 1) * h_stride
    y = tl.load(Y + tl.minimum(tokens, P - 1))
    m = tl.full((BLOCK_P,), float("-inf"), tl.float32)
    s = tl.zeros((BLOCK_P,), tl.float32)
    w = tl.zeros((BLOCK_P,), tl.float32)
    target = tl.zeros((BLOCK_P,), tl.float32)
    for v in range(first, tl.minimum(first + SPAN, V), BLOCK_V):
        columns = v + tl.arange(0, BLOCK_V)
        inside = tl.minimum(columns, V - 1)
        x = _logits(h_rows, WEIGHT + inside.to(tl.int64) * w_stride, BIAS_PTR, inside, D, BIAS, EVEN, BLOCK_P, BLOCK_V, BLOCK_D)
        x = tl.where((columns < V)[None, :], x, float("-inf"))
        target += tl.sum(tl.where(columns[None, :] == y[:, None], x, 0.0), 1)
        m_new = tl.maximum(m, tl.max(x, 1))
        shift = tl.where(m_new == float("-inf"), 0.0, m_new)  # only -inf so far: -inf - -inf would be NaN
        moved = (m - shift) * scale2
        a = tl.exp2(moved)
        d = (x - shift[:, None]) * scale2
        e = tl.exp2(d)
        if ENTROPY:  # e = 0 at d = -inf, and 0 * -inf would be NaN
            w = a * (w + tl.maximum(moved, -1e30) * s) + tl.sum(e * tl.maximum(d, -1e30), 1)
        s = a * s + tl.sum(e, 1)
        m = m_new
    out = PARTS + tl.program_id(1).to(tl.int64) * P + tokens
    step = tl.num_programs(1).to(tl.int64) * P
    live = tokens < P
    tl.store(out, m, mask=live)
    tl.store(out + step, s, mask=live)
    tl.store(out + 2 * step, w, mask=live)
    tl.store(out + 3 * step, target, mask=live)


@jit(do_not_specialize=[*NUMBERS, "LOGPROB", "ENTROPY", "TOP", "LOG2_S", "spans"])
def _merge_spans(PARTS, Y, LOGPROB, ENTROPY, TOP, LOG2_S, P, V, spans, scale2, BLOCK: tl.constexpr):
    """The spans of each token, in order."""
    tokens = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    live = tokens < P
    m = tl.full((BLOCK,), float("-inf"), tl.float32)
    s = tl.zeros((BLOCK,), tl.float32)
    w = tl.zeros((BLOCK,), tl.float32)
    target = tl.zeros((BLOCK,), tl.float32)
    part, step = PARTS + tokens, spans.to(tl.int64) * P
    for _ in range(spans):
        m_i = tl.load(part, mask=live, other=0.0)
        s_i = tl.load(part + step, mask=live, other=1.0)
        w_i = tl.load(part + 2 * step, mask=live, other=0.0)
        target += tl.load(part + 3 * step, mask=live, other=0.0)
        m_new = tl.maximum(m, m_i)
        shift = tl.where(m_new == float("-inf"), 0.0, m_new)
        moved, moved_i = (m - shift) * scale2, (m_i - shift) * scale2
        a, a_i = tl.exp2(moved), tl.exp2(moved_i)
        w = a * (w + tl.maximum(moved, -1e30) * s) + a_i * (w_i + tl.maximum(moved_i, -1e30) * s_i)
        s = a * s + a_i * s_i
        m = m_new
        part += P
    log2_s = tl.log2(s)
    y = tl.load(Y + tokens, mask=live, other=0)
    logprob = ((target - m) * scale2 - log2_s) * 0.6931471805599453
    tl.store(LOGPROB + tokens, tl.where((y >= 0) & (y < V), logprob, float("nan")), mask=live)
    tl.store(ENTROPY + tokens, (log2_s - w / s) * 0.6931471805599453, mask=live)
    tl.store(TOP + tokens, m, mask=live)  # kept apart from log s: their sum would lose the digits of log s
    tl.store(LOG2_S + tokens, log2_s, mask=live)


@jit(do_not_specialize=[*NUMBERS, "ENTROPY", "TOP", "LOG2_S", "G", "H", "first"])
def _d_logits(
    HIDDEN, WEIGHT, BIAS_PTR, Y, ENTROPY, TOP, LOG2_S, G, H, OUT, P, V, D, h_stride: tl.int64, w_stride: tl.int64, stride,
    first, scale2, BIAS: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_D: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """d (g logprob + h entropy) / d logits, without the 1 / temperature, of a slice of V rows of the head from `first` on."""
    tokens = tl.program_id(0).to(tl.int64) * BLOCK_P + tl.arange(0, BLOCK_P)
    columns = tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)
    row, inside = tl.minimum(tokens, P - 1), tl.minimum(columns, V - 1)
    x = _logits(
        HIDDEN + row * h_stride, WEIGHT + inside.to(tl.int64) * w_stride, BIAS_PTR, inside, D, BIAS, EVEN, BLOCK_P, BLOCK_V, BLOCK_D
    )  # fmt: skip
    y, entropy = tl.load(Y + row) - first, tl.load(ENTROPY + row)
    m, log2_s = tl.load(TOP + row), tl.load(LOG2_S + row)
    g, h = tl.load(G + row), tl.load(H + row)
    d = _gradient(
        x, columns[None, :], y[:, None], m[:, None], log2_s[:, None], entropy[:, None], g[:, None], h[:, None], scale2, 1.0
    )
    tl.store(
        OUT + tokens[:, None] * stride + columns[None, :], d.to(OUT.dtype.element_ty),
        mask=(tokens < P)[:, None] & (columns < V)[None, :],
    )  # fmt: skip
