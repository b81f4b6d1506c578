"""linear_logprob_entropy against float64 autograd by the book: the reference, and the kernels under TRITON_INTERPRET=1."""

import math

import pytest
import torch
from backends import BACKENDS, DEVICE, close, leaves, linear_book, make, ours, value_and_grads
from hypothesis import given, settings
from hypothesis import strategies as st

from nanoragen.kernels import linear, reference
from nanoragen.kernels.dispatch import interpreted
from nanoragen.kernels.linear import linear_logprob_entropy

INF = float("inf")
NOT_INTERPRETED = [b for b in BACKENDS if b == "torch" or not interpreted()]  # where sizes may be real ones


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("P, D, V, bias", [(1, 16, 1, True), (5, 1, 3, False), (37, 33, 301, True), (130, 64, 129, False)])
def test_at_least_as_near_to_float64_as_the_plain_way(P, D, V, bias, dtype, backend):
    """The plain way rounds the logits to the inputs' type; values must not show that, gradients only their own last rounding."""
    *inputs, targets = make(P, D, V, dtype, bias, seed=V)
    g, h = torch.randn(P, device=DEVICE), torch.randn(P, device=DEVICE)
    values, grads = value_and_grads(ours(backend, temperature=0.7), inputs, targets, g, h)
    exact, exact_grads = value_and_grads(
        lambda *a: linear_book(*a, 0.7), [None if t is None else t.double() for t in inputs], targets, g, h
    )
    _, plain_grads = value_and_grads(lambda *a: linear_book(*a, 0.7, dtype=dtype), inputs, targets, g, h)
    assert {v.dtype for v in values} == {torch.float32} and {t.dtype for t in grads} == {dtype}
    close(values, exact, 3e-5)
    for a, b, c in zip(grads, plain_grads, exact_grads, strict=True):
        rounding = torch.finfo(dtype).eps * c.abs().max() + 1e-5
        assert (a.double() - c).abs().max() <= (b.double() - c).abs().max() + rounding


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_what_keeping_d_logits_in_16_bits_costs(dtype, backend):
    """Relative error of whole gradients: under half a unit of the type, so less than rounding the gradient itself."""
    *inputs, targets = make(64, 32, 500, dtype, seed=3)
    g, h = torch.randn(64, device=DEVICE), torch.randn(64, device=DEVICE)
    kinds = [t.float() for t in inputs[1:]]  # float32 head and bias: their gradients are not rounded at the end
    _, grads = value_and_grads(ours(backend), [inputs[0], *kinds], targets, g, h)
    _, exact = value_and_grads(linear_book, [inputs[0].double(), *(t.double() for t in kinds)], targets, g, h)
    for a, b in zip(grads[1:], exact[1:], strict=True):
        assert (a.double() - b).norm() < torch.finfo(dtype).eps / 2 * b.norm()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("size", [2.0**17, 2.0**-17])
def test_upstream_gradients_that_fp16_cannot_hold(size, backend):
    """A scaled loss, and a mean over many tokens: d logits would overflow, or vanish."""
    hidden, weight, _, targets = make(8, 16, 200, torch.float16, bias=False)
    weight = weight.float() / 16
    g, h = size * torch.randn(8, device=DEVICE), size * torch.randn(8, device=DEVICE)
    _, (_, grad) = value_and_grads(ours(backend), [hidden, weight, None], targets, g, h)
    _, (_, exact) = value_and_grads(linear_book, [hidden.double(), weight.double(), None], targets, g, h)
    assert (grad.double() - exact).norm() < 1e-3 * exact.norm()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("shift", [0.0, 1000.0, -120.0, -50.0])
@pytest.mark.parametrize("V", [1, 3, 127, 129, 1000])
def test_equal_logits_give_ln_v_at_any_offset(V, shift, backend):
    hidden, weight = torch.zeros(2, 8, device=DEVICE), torch.randn(V, 8, device=DEVICE)
    bias, targets = torch.full((V,), shift, device=DEVICE), torch.tensor([0, V - 1], device=DEVICE)
    logprob, entropy = linear_logprob_entropy(hidden, weight, targets, bias=bias, backend=backend)
    assert logprob.tolist() == pytest.approx([-math.log(V)] * 2, abs=2e-5)
    assert entropy.tolist() == pytest.approx([math.log(V)] * 2, abs=2e-5)


@pytest.mark.parametrize("backend", NOT_INTERPRETED)
@pytest.mark.parametrize("V", [50_257, 129_920, 151_936])
def test_equal_logits_of_a_real_vocabulary(V, backend):
    weight, bias = torch.zeros(V, 4, device=DEVICE), torch.full((V,), -50.0, device=DEVICE)
    logprob, entropy = linear_logprob_entropy(
        torch.randn(3, 4, device=DEVICE), weight, torch.tensor([0, 7, V - 1], device=DEVICE), bias=bias, backend=backend
    )
    assert logprob.tolist() == pytest.approx([-math.log(V)] * 3, abs=2e-5)
    assert entropy.tolist() == pytest.approx([math.log(V)] * 3, abs=2e-5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_bf16_sums_do_not_stick(backend):
    """A bf16 running sum sticks at 256 and would give -5.545."""
    zeros = [torch.zeros(n, 16, dtype=torch.bfloat16, device=DEVICE) for n in (1, 1000)]
    logprob, entropy = linear_logprob_entropy(*zeros, torch.tensor([0], device=DEVICE), backend=backend)
    assert logprob.dtype == torch.float32 and logprob.item() == pytest.approx(-6.907755, abs=1e-4)
    assert entropy.item() == pytest.approx(6.907755, abs=1e-4)


@pytest.mark.parametrize("backend", BACKENDS)
def test_temperature_divides_logits(backend):
    """Logits 1, 2, 3 at temperature 0.5, through the head and through the bias."""
    column, targets = torch.tensor([[1.0], [2.0], [3.0]], device=DEVICE), torch.tensor([0, 1, 2], device=DEVICE)
    for weight, bias in ((column, None), (0 * column, column[:, 0])):
        logprob, entropy = linear_logprob_entropy(
            torch.ones(3, 1, device=DEVICE), weight, targets, bias=bias, temperature=0.5, backend=backend
        )
        assert logprob.tolist() == pytest.approx([-4.142932, -2.142932, -0.142932], abs=1e-5)
        assert entropy.tolist() == pytest.approx([0.441057] * 3, abs=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("shift", [1000.0, -1000.0])
def test_a_common_offset_changes_nothing(shift, backend):
    """Logits on a grid that float32 holds exactly around 0 and around +-1000: the same bits, gradients too."""
    torch.manual_seed(0)
    hidden = torch.randint(-4, 5, (6, 8), device=DEVICE).float()
    weight, bias = torch.randint(-16, 17, (301, 8), device=DEVICE) / 32, torch.randint(-32, 33, (301,), device=DEVICE) / 32
    targets, ones = torch.randint(301, (6,), device=DEVICE), torch.ones(6, device=DEVICE)
    found = [value_and_grads(ours(backend), (hidden, weight, b), targets, ones, ones) for b in (bias, bias + shift)]
    for a, b in zip(*found):
        assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("out", [slice(0, 260), slice(200, None), slice(None, None, 2)])
def test_a_bias_of_minus_infinity_excludes(out, backend, monkeypatch):
    """Single tokens, whole tiles and whole spans of them, at the beginning and at the end."""
    monkeypatch.setattr(linear, "SPAN", 128)
    hidden, weight, bias, _ = make(4, 9, 461)
    bias[out] = -INF
    kept = (bias > -INF).nonzero()[:, 0]
    places, g = torch.tensor([0, 1, 7, len(kept) - 1], device=DEVICE), torch.randn(4, device=DEVICE)
    values, grads = value_and_grads(ours(backend), (hidden, weight, bias), kept[places], g, g)
    exact, wanted = value_and_grads(linear_book, [t.double() for t in (hidden, weight[kept], bias[kept])], places, g, g)
    close(values, exact)
    close((grads[0], grads[1][kept], grads[2][kept]), wanted)
    assert (grads[1][out] == 0).all() and (grads[2][out] == 0).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_target_at_minus_infinity(backend):
    bias = torch.tensor([-INF, 0.0, 0.0], device=DEVICE)
    logprob, entropy = linear_logprob_entropy(
        torch.zeros(1, 4, device=DEVICE), torch.zeros(3, 4, device=DEVICE), torch.tensor([0], device=DEVICE), bias=bias,
        backend=backend,
    )  # fmt: skip
    assert logprob.item() == -INF and entropy.item() == pytest.approx(math.log(2), abs=1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
def test_ignored_tokens_are_zero_and_cost_nothing(backend, monkeypatch):
    """Their hidden states are NaN: they are not looked at. Only live tokens reach the work."""
    hidden, weight, bias, targets = make(7, 12, 50)
    targets[[0, 3, 6]] = -7
    live, ones = targets != -7, torch.ones(7, device=DEVICE)
    hidden[~live] = math.nan
    seen = []
    for owner, name in ((linear, "forward"), (reference, "linear_forward")):
        way = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda x, *rest, way=way: (seen.append(len(x)), way(x, *rest))[1])
    values, grads = value_and_grads(ours(backend, ignore_index=-7), (hidden, weight, bias), targets, ones, ones)
    assert seen == [4] and all((v[~live] == 0).all() for v in values) and (grads[0][~live] == 0).all()
    exact, exact_grads = value_and_grads(
        linear_book, [hidden[live].double(), weight.double(), bias.double()], targets[live], ones[live], ones[live]
    )
    close([v[live] for v in values], exact)
    close([grads[0][live], *grads[1:]], exact_grads)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("P", [0, 5])
def test_no_token_or_all_ignored(P, backend):
    hidden, weight, bias, targets = make(P, 12, 50)
    values, grads = value_and_grads(
        ours(backend), (hidden, weight, bias), torch.full_like(targets, -100), *torch.ones(2, P, device=DEVICE)
    )
    assert all(v.shape == (P,) and (v == 0).all() for v in values)
    assert [t.shape for t in grads] == [t.shape for t in (hidden, weight, bias)] and all((t == 0).all() for t in grads)


@pytest.mark.parametrize("backend", BACKENDS)
def test_gradients_add_up_and_each_output_alone_has_one(backend):
    """grad(2 logprob - 3 entropy) = 2 grad(logprob) - 3 grad(entropy), from expanded upstream gradients (.sum() sends them)."""
    *inputs, targets = make(9, 12, 140)
    inputs = leaves(*inputs)
    logprob, entropy = (t.sum() for t in ours(backend)(*inputs, targets))
    both, again, first, second = (
        torch.autograd.grad(loss, inputs, retain_graph=True)
        for loss in (2 * logprob - 3 * entropy, 2 * logprob - 3 * entropy, logprob, entropy)
    )
    for a, b, c, d in zip(both, again, first, second, strict=True):
        assert torch.equal(a, b)
        torch.testing.assert_close(a, 2 * c - 3 * d, atol=1e-5, rtol=1e-5)
    exact = leaves(*(t.double() for t in inputs))
    wanted = torch.autograd.grad(linear_book(*exact, targets)[0].sum(), exact)
    close(first, wanted)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("wanted", [(0,), (1,), (2,), (0, 2)])
def test_only_the_wanted_gradients(wanted, backend):
    """A frozen head, or anything else that is frozen: no gradient for it, and the same ones for the rest."""
    *inputs, targets = make(6, 12, 140)
    ones = torch.ones(6, device=DEVICE)
    _, everything = value_and_grads(ours(backend), inputs, targets, ones, ones)
    for i, t in enumerate(inputs):
        t.requires_grad_(i in wanted)
    sum(v.sum() for v in ours(backend)(*inputs, targets)).backward()
    for i, t in enumerate(inputs):
        assert torch.equal(t.grad, everything[i]) if i in wanted else t.grad is None


@pytest.mark.parametrize("backend", BACKENDS)
def test_without_a_gradient_the_same_values_and_nothing_kept(backend):
    hidden, weight, bias, targets = make(6, 12, 140)
    plain = linear_logprob_entropy(hidden, weight, targets, bias=bias, backend=backend)
    loud = linear_logprob_entropy(*leaves(hidden, weight), targets, bias=bias, backend=backend)
    with torch.no_grad():
        quiet = linear_logprob_entropy(*leaves(hidden, weight), targets, bias=bias, backend=backend)
    for a, b, c in zip(plain, loud, quiet, strict=True):
        assert torch.equal(a, b) and torch.equal(a, c)
        assert a.grad_fn is None and c.grad_fn is None and b.grad_fn is not None


@pytest.mark.parametrize("backend", BACKENDS)
def test_views_other_integers_and_untouched_inputs(backend):
    """Rows of wider arrays, a transposed head, every other target, int32: read as they are, changed by nobody."""
    torch.manual_seed(0)
    wide, tall, many = (
        torch.randn(14, 40, device=DEVICE),
        torch.randn(33, 90, device=DEVICE),
        torch.randint(90, (14,), device=DEVICE),
    )
    before = [t.clone() for t in (wide, tall, many)]
    ones = torch.ones(7, device=DEVICE)
    for targets in (many[::2], many[::2].int()):
        hidden, weight = wide[::2, :33].requires_grad_(), tall.T.requires_grad_()
        values = linear_logprob_entropy(hidden, weight, targets, backend=backend)
        grads = torch.autograd.grad(sum(v.sum() for v in values), (hidden, weight))
        exact, wanted = value_and_grads(linear_book, [hidden.double(), weight.double(), None], targets, ones, ones)
        close(values, exact)
        close(grads, wanted)
    assert all(torch.equal(a, b) for a, b in zip(before, (wide, tall, many), strict=True))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kinds", [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)])
def test_a_head_of_another_type(kinds, backend):
    """As under autocast. Gradients come back in each input's own type."""
    hidden, weight, _, targets = make(6, 16, 140, torch.bfloat16, bias=False)
    inputs, ones = [hidden.to(kinds[0]), weight.to(kinds[1]), None], torch.ones(6, device=DEVICE)
    values, grads = value_and_grads(ours(backend), inputs, targets, ones, ones)
    exact, wanted = value_and_grads(linear_book, [hidden.double(), weight.double(), None], targets, ones, ones)
    close(values, exact, 5e-5)
    assert tuple(t.dtype for t in grads) == kinds
    close(grads, wanted, 0.02)


@pytest.mark.parametrize("backend", BACKENDS)
def test_autocast_does_not_round_the_logits(backend):
    *inputs, targets = make(6, 16, 140)
    ones = torch.ones(6, device=DEVICE)
    alone = value_and_grads(ours(backend), inputs, targets, ones, ones)
    with torch.autocast(DEVICE, torch.bfloat16):
        under = value_and_grads(ours(backend), inputs, targets, ones, ones)
    for a, b in zip(alone, under, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_token_is_the_same_bits_alone_in_a_batch_elsewhere_and_padded(backend):
    hidden, weight, bias, targets = make(150, 33, 301)

    def score(rows, y):
        return linear_logprob_entropy(rows, weight, y, bias=bias, backend=backend)

    together, reverse = score(hidden, targets), score(hidden.flip(0), targets.flip(0))
    padded = score(hidden.repeat_interleave(2, 0), torch.stack([targets, torch.full_like(targets, -100)], 1).flatten())
    again = score(hidden, targets)
    for a, b, c, d in zip(together, reverse, padded, again, strict=True):
        assert torch.equal(a, c[::2]) and torch.equal(a, d)
        if backend == "triton":
            assert torch.equal(a, b.flip(0))
        else:  # a BLAS promises no order of summation
            torch.testing.assert_close(a, b.flip(0), atol=1e-5, rtol=1e-5)
    for i in (0, 77, 149) if backend == "triton" else ():
        assert all(torch.equal(a[0], b[i]) for a, b in zip(score(hidden[i : i + 1], targets[i : i + 1]), together, strict=True))


@pytest.mark.parametrize("backend", BACKENDS)
@settings(max_examples=8 if interpreted() else 40, deadline=None, derandomize=True)
@given(data=st.data())
def test_any_shape_scale_and_mask(backend, data):
    P, D, V = (data.draw(st.integers(low, high)) for low, high in ((0, 20), (1, 40), (1, 150)))
    temperature, scale = data.draw(st.floats(0.1, 5)), data.draw(st.floats(0, 30))
    *inputs, targets = make(P, D, V, bias=data.draw(st.booleans()), seed=data.draw(st.integers(0, 999)))
    inputs[0] = inputs[0] * scale
    targets[torch.tensor(data.draw(st.lists(st.booleans(), min_size=P, max_size=P)), dtype=torch.bool, device=DEVICE)] = -100
    g, h = torch.randn(2, P, device=DEVICE)
    values, grads = value_and_grads(ours(backend, temperature=temperature), inputs, targets, g, h)
    exact_inputs = [None if t is None else t.double() for t in inputs]
    exact, wanted = value_and_grads(lambda *a: linear_book(*a, temperature), exact_inputs, targets, g, h)
    _, plain = value_and_grads(lambda *a: linear_book(*a, temperature, dtype=torch.float32), inputs, targets, g, h)
    size = 1 + scale * 10 / temperature  # of a logit; the entropy's gradient has log p times p, so its rounding grows with it
    for a, b in zip(values, exact, strict=True):
        torch.testing.assert_close(a.double(), b, atol=2e-6 * size, rtol=1e-5)
        assert (b - a >= -1e-4 * size).all()
    for a, b, c in zip(grads, plain, wanted, strict=True):
        if c.numel():
            assert (a - c).abs().max() <= 2 * (b - c).abs().max() + 1e-5 * (1 + c.abs().max())


def test_the_reference_in_float64_passes_gradcheck():
    hidden, weight, bias, targets = make(4, 5, 11, torch.float64)
    targets[1] = -100
    inputs = leaves(hidden.cpu(), weight.cpu(), bias.cpu())
    assert torch.autograd.gradcheck(lambda h, w, b: linear_logprob_entropy(h, w, targets.cpu(), bias=b, temperature=0.8), inputs)


@pytest.mark.parametrize("backend", BACKENDS)
def test_second_derivatives_are_refused(backend):
    """They would be silently wrong."""
    hidden, weight, _, targets = make(2, 5, 7, bias=False)
    hidden.requires_grad_()
    logprob, _ = linear_logprob_entropy(hidden, weight, targets, backend=backend)
    (grad,) = torch.autograd.grad(logprob.exp().sum(), hidden, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


@pytest.mark.parametrize(
    "bad, match",
    [
        ({"hidden": torch.zeros(3, 5)}, r"hidden \(3, 5\).*do not fit; valid: \[P, D\], \[V, D\], \[P\]"),
        ({"hidden": torch.zeros(1, 3, 4)}, "do not fit"),
        ({"weight": torch.zeros(0, 4)}, "do not fit"),
        ({"targets": torch.zeros(2, dtype=torch.long)}, "do not fit"),
        ({"bias": torch.zeros(4)}, "bias \\(4,\\) do not fit"),
        ({"targets": torch.zeros(3)}, "targets: torch.float32; valid: an integer type"),
        ({"temperature": 0.0}, "temperature: 0.0; valid: above 0"),
        ({"temperature": math.nan}, "temperature: nan; valid: above 0"),
        ({"workspace": 0}, "workspace: 0; valid: bytes, above 0"),
        ({"backend": "cuda"}, "backend: 'cuda'; valid"),
    ],
)
def test_bad_arguments(bad, match):
    good = {"hidden": torch.zeros(3, 4), "weight": torch.zeros(7, 4), "targets": torch.zeros(3, dtype=torch.long)}
    with pytest.raises(ValueError, match=match):
        linear_logprob_entropy(**{**good, **bad})


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_bad_upstream_gradient_spoils_its_own_token_only(bad, backend):
    hidden, weight = torch.randn(6, 16, device=DEVICE, requires_grad=True), torch.randn(40, 16, device=DEVICE)
    logprob, _ = linear_logprob_entropy(hidden, weight, torch.arange(6, device=DEVICE), backend=backend)
    upstream = torch.ones(6, device=DEVICE)
    upstream[0] = bad
    (grad,) = torch.autograd.grad(logprob, hidden, upstream)
    assert grad[1:].isfinite().all() and not grad[0].isfinite().all()
