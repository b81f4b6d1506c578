"""logprob_entropy against float64 softmax by the book: the reference implementation and, under TRITON_INTERPRET=1, the kernel."""

import math

import pytest
import torch
from backends import BACKENDS, DEVICE, by_the_book
from hypothesis import given, settings
from hypothesis import strategies as st

from nanoragen.kernels.logprob import logprob_entropy
from nanoragen.kernels.reference import as_rows

INF = float("inf")


def book(logits, targets, temperature=1.0):
    return by_the_book(logits.double() / temperature, targets)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("V", [1, 3, 127, 129, 1000, 5003])
def test_values_and_gradients(V, dtype, backend):
    torch.manual_seed(V)
    logits = (3 * torch.randn(5, V)).to(DEVICE, dtype).requires_grad_()
    targets, g, h = torch.randint(V, (5,), device=DEVICE), torch.randn(5, device=DEVICE), torch.randn(5, device=DEVICE)
    exact = logits.detach().double().requires_grad_()
    logprob, entropy = logprob_entropy(logits, targets, temperature=0.7, backend=backend)
    want_logprob, want_entropy = book(exact, targets, 0.7)
    assert logprob.dtype == entropy.dtype == torch.float32
    torch.testing.assert_close(logprob.double(), want_logprob, atol=1e-4, rtol=1e-5)
    torch.testing.assert_close(entropy.double(), want_entropy, atol=1e-4, rtol=1e-5)
    (logprob * g + entropy * h).sum().backward()
    (want_logprob * g + want_entropy * h).sum().backward()
    # the gradient is rounded once, to the logits' own type
    tolerance = {torch.float32: 2e-5, torch.float16: 1e-3, torch.bfloat16: 8e-3}[dtype]
    torch.testing.assert_close(logits.grad.double(), exact.grad, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("shift", [0.0, 1000.0, -120.0, -50.0])
@pytest.mark.parametrize("V", [1, 3, 127, 129, 1000, 50257, 129_920, 151_936])
def test_equal_logits_give_ln_v_at_any_offset(V, shift, backend):
    logprob, entropy = logprob_entropy(
        torch.full((1, V), shift, device=DEVICE), torch.tensor([V - 1], device=DEVICE), backend=backend
    )
    assert logprob.item() == pytest.approx(-math.log(V), abs=2e-5)
    assert entropy.item() == pytest.approx(math.log(V), abs=2e-5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_temperature_divides_logits(backend):
    logits, targets = torch.tensor([[1.0, 2.0, 3.0]] * 3, device=DEVICE), torch.tensor([0, 1, 2], device=DEVICE)
    logprob, entropy = logprob_entropy(logits, targets, temperature=0.5, backend=backend)
    assert logprob.tolist() == pytest.approx([-4.142932, -2.142932, -0.142932], abs=1e-5)
    assert entropy.tolist() == pytest.approx([0.441057] * 3, abs=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_minus_infinity_contributes_nothing(backend):
    """Single -inf logits, and whole tiles of them, at the beginning and at the end."""
    logits = torch.randn(3, 9000, device=DEVICE)
    logits[0, :5000] = logits[1, 4000:] = logits[2, ::2] = -INF
    targets = torch.tensor([8000, 3, 7], device=DEVICE)
    logits.requires_grad_()
    logprob, entropy = logprob_entropy(logits, targets, backend=backend)
    want = book(logits.detach(), targets)
    torch.testing.assert_close(logprob.double(), want[0], atol=1e-4, rtol=1e-5)
    torch.testing.assert_close(entropy.double(), want[1], atol=1e-4, rtol=1e-5)
    (logprob.sum() + entropy.sum()).backward()
    assert torch.isfinite(logits.grad).all() and (logits.grad[0, :5000] == 0).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_row_is_the_same_bits_alone_in_a_batch_elsewhere_and_beside_padding(backend):
    """Values and gradients."""

    def both(logits, targets):
        leaf = logits.clone().requires_grad_()
        logprob, entropy = logprob_entropy(leaf, targets, backend=backend)
        (2 * logprob.sum() - entropy.sum()).backward()
        return logprob.detach(), entropy.detach(), leaf.grad

    rows, targets = torch.randn(12, 5003, device=DEVICE), torch.randint(5003, (12,), device=DEVICE)
    together = both(rows, targets)
    for i in (0, 7, 11):
        assert all(torch.equal(a[0], b[i]) for a, b in zip(both(rows[i : i + 1], targets[i : i + 1]), together))
    assert all(torch.equal(a.flip(0), b) for a, b in zip(both(rows.flip(0), targets.flip(0)), together))
    padded = torch.where(torch.arange(12, device=DEVICE) % 4 == 3, -100, targets).view(3, 4)
    live = padded.flatten() != -100
    for a, b in zip(both(rows.view(3, 4, 5003), padded), together):
        assert torch.equal(a.reshape(b.shape)[live], b[live])


@pytest.mark.parametrize("backend", BACKENDS)
@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    T=st.integers(1, 4), V=st.integers(1, 80), seed=st.integers(0, 999), temperature=st.sampled_from([0.3, 1.0, 4.0]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]), offset=st.sampled_from([0.0, -90.0, 500.0]),
    blocked=st.sampled_from([0.0, 0.3, 0.9]), ignored=st.booleans(),
)  # fmt: skip
def test_no_further_from_float64_than_the_plain_way(backend, T, V, seed, temperature, dtype, offset, blocked, ignored):
    """On any logits: the plain way in the same precision may be as wrong as it likes, and ours at most that wrong."""
    rng = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(T, V, generator=rng) + offset
    targets = torch.randint(V, (T,), generator=rng)
    logits[(torch.rand(T, V, generator=rng) < blocked) & (torch.arange(V) != targets[:, None])] = -INF
    logits, targets = logits.to(DEVICE, dtype), targets.to(DEVICE)
    exact, leaf = logits.double().requires_grad_(), logits.clone().requires_grad_()
    wanted = torch.where(targets >= V // 2, targets, -100) if ignored else targets
    live = wanted != -100
    want, got = book(exact, targets, temperature), logprob_entropy(leaf, wanted, temperature=temperature, backend=backend)
    low = torch.log_softmax(logits / temperature, -1)
    plain = low.gather(1, targets[:, None])[:, 0], -torch.where(low > -INF, low.exp() * low, 0.0).sum(-1)
    for ours, theirs, true in zip(got, plain, want):
        error, allowed = (ours - true)[live].abs(), (theirs.double() - true)[live].abs()
        assert (error <= allowed + 1e-5 * (1 + true[live].abs())).all()
        assert (ours[~live] == 0).all()
    (want[0] - 0.5 * want[1])[live].sum().backward()
    (got[0] - 0.5 * got[1]).sum().backward()
    half_ulp = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 8e-3}[dtype]
    torch.testing.assert_close(leaf.grad.double(), exact.grad, atol=half_ulp / temperature, rtol=half_ulp)


@pytest.mark.parametrize("backend", BACKENDS)
def test_ignored_rows_are_zero_without_gradient(backend):
    logits = torch.randn(2, 3, 50, device=DEVICE, requires_grad=True)
    targets = torch.tensor([[1, -100, 2], [-100, -100, 49]], device=DEVICE)
    logprob, entropy = logprob_entropy(logits, targets, backend=backend)
    assert logprob.shape == targets.shape and (logprob[targets == -100] == 0).all() and (entropy[targets == -100] == 0).all()
    (logprob.sum() + entropy.sum()).backward()
    assert (logits.grad[targets == -100] == 0).all() and (logits.grad[targets != -100] != 0).any()


@pytest.mark.parametrize("backend", BACKENDS)
def test_strided_rows_expanded_gradients_and_untouched_input(backend):
    wide = torch.randn(6, 300, device=DEVICE)
    view = wide[::2, :129].requires_grad_()
    targets, before = torch.tensor([0, 5, 128], device=DEVICE), wide.clone()
    logprob, entropy = logprob_entropy(view, targets, backend=backend)
    (first,) = torch.autograd.grad(logprob.sum() + entropy.sum(), view, retain_graph=True)  # .sum() sends an expanded gradient
    (second,) = torch.autograd.grad(logprob.sum() + entropy.sum(), view)
    assert torch.equal(first, second) and torch.equal(wide, before)
    exact = view.detach().double().requires_grad_()
    (want,) = torch.autograd.grad(sum(t.sum() for t in book(exact, targets)), exact)
    torch.testing.assert_close(first.double(), want, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_same_values_with_and_without_grad(backend):
    logits, targets = torch.randn(4, 77, device=DEVICE), torch.tensor([1, 2, 3, 4], device=DEVICE)
    plain = logprob_entropy(logits, targets, backend=backend)
    with torch.no_grad():
        quiet = logprob_entropy(logits, targets, backend=backend)
    loud = logprob_entropy(logits.clone().requires_grad_(), targets, backend=backend)
    for a, b, c in zip(plain, quiet, loud):
        assert torch.equal(a, b) and torch.equal(a, c)


@pytest.mark.parametrize("backend", BACKENDS)
def test_bf16_sums_do_not_stick(backend):
    """A bf16 running sum sticks at 256 and would give -5.545."""
    logits = torch.zeros(1, 1000, dtype=torch.bfloat16, device=DEVICE)
    logprob, entropy = logprob_entropy(logits, torch.tensor([0], device=DEVICE), backend=backend)
    assert logprob.dtype == torch.float32 and logprob.item() == pytest.approx(-6.907755, abs=1e-4)
    assert entropy.item() == pytest.approx(6.907755, abs=1e-4)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("shift", [1000.0, -1000.0])
def test_a_common_offset_changes_nothing(shift, backend):
    """The same logits around 0 and around +-1000, on a grid that float32 holds exactly at both: the same bits."""
    logits = torch.randint(-160, 160, (4, 5003), device=DEVICE) / 32.0
    targets = torch.tensor([0, 7, 4999, 5002], device=DEVICE)
    found = []
    for x in (logits, logits + shift):
        x.requires_grad_()
        logprob, entropy = logprob_entropy(x, targets, backend=backend)
        (logprob.sum() + entropy.sum()).backward()
        found.append((logprob, entropy, x.grad))
    assert all(torch.equal(a, b) for a, b in zip(*found))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("cut", ["slice", "transpose", "expand", "permute", "inner", "scalar"])
def test_any_layout(cut, backend):
    base = torch.randn(3, 4, 5, 40, device=DEVICE)
    logits = {
        "slice": base[0, :, :-1],  # two strides that do not fold
        "transpose": base[0].transpose(0, 1),
        "expand": base[0, 0, :1].expand(6, 40),
        "permute": base.permute(1, 0, 2, 3)[:, :2, 1:],  # three that do not: copied
        "inner": base[0, 0].T,  # last stride not 1: copied
        "scalar": base[0, 0, 0],
    }[cut]
    targets = torch.randint(logits.shape[-1], logits.shape[:-1], device=DEVICE)
    assert (as_rows(logits).data_ptr() == logits.data_ptr()) == (cut not in ("permute", "inner"))
    leaf = logits.detach().requires_grad_()
    exact = logits.detach().double().requires_grad_()
    got, want = logprob_entropy(leaf, targets, backend=backend), book(exact, targets)
    for a, b in zip(got, want):
        assert a.shape == targets.shape
        torch.testing.assert_close(a.double(), b, atol=1e-5, rtol=1e-5)
    grads = torch.autograd.grad(sum(t.sum() for t in got), leaf) + torch.autograd.grad(sum(t.sum() for t in want), exact)
    torch.testing.assert_close(grads[0].double(), grads[1], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_gradients_add_up(backend):
    """grad(2 logprob - 3 entropy) = 2 grad(logprob) - 3 grad(entropy); each alone leaves the other's upstream gradient out."""
    logits, targets = torch.randn(4, 129, device=DEVICE, requires_grad=True), torch.tensor([0, 1, 2, 128], device=DEVICE)
    logprob, entropy = (t.sum() for t in logprob_entropy(logits, targets, backend=backend))
    both, first, second = (
        torch.autograd.grad(loss, logits, retain_graph=True)[0] for loss in (2 * logprob - 3 * entropy, logprob, entropy)
    )
    torch.testing.assert_close(both, 2 * first - 3 * second, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_second_derivatives_are_refused(backend):
    """They would be silently wrong."""
    logits = torch.randn(2, 5, device=DEVICE, requires_grad=True)
    logprob, _ = logprob_entropy(logits, torch.tensor([0, 1], device=DEVICE), backend=backend)
    (grad,) = torch.autograd.grad(logprob.exp().sum(), logits, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


@pytest.mark.parametrize("backend", BACKENDS)
def test_strided_targets(backend):
    logits, targets = torch.randn(5, 9, device=DEVICE), torch.arange(10, device=DEVICE)[::2] % 9
    for a, b in zip(logprob_entropy(logits, targets, backend=backend), book(logits, targets)):
        torch.testing.assert_close(a.double(), b, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_target_at_minus_infinity(backend):
    logits = torch.tensor([[-INF, 0.0, 0.0]], device=DEVICE)
    logprob, entropy = logprob_entropy(logits, torch.tensor([0], device=DEVICE), backend=backend)
    assert logprob.item() == -INF and entropy.item() == pytest.approx(math.log(2), abs=1e-6)


def test_the_reference_in_float64_passes_gradcheck():
    logits = torch.randn(3, 11, dtype=torch.float64, requires_grad=True)
    targets = torch.tensor([0, 10, 4])
    assert torch.autograd.gradcheck(lambda x: logprob_entropy(x, targets, temperature=0.8), logits)


@pytest.mark.parametrize("bad, match", [({"temperature": 0.0}, "temperature"), ({"backend": "cuda"}, "backend")])
def test_bad_arguments(bad, match):
    with pytest.raises(ValueError, match=match):
        logprob_entropy(torch.randn(2, 5), torch.tensor([0, 1]), **bad)


def test_shapes_that_do_not_fit():
    with pytest.raises(ValueError, match="targets"):
        logprob_entropy(torch.randn(2, 5), torch.tensor([0, 1, 2]))


@pytest.mark.parametrize("backend", BACKENDS)
def test_minus_infinity_under_a_large_upstream_gradient(backend):
    """-inf has p = 0; whatever multiplies it, its gradient is 0."""
    logits = torch.randn(5, 37, device=DEVICE)
    logits[:, :3] = -torch.inf
    logits.requires_grad_()
    _, entropy = logprob_entropy(logits, torch.full((5,), 5, device=DEVICE), backend=backend)
    (grad,) = torch.autograd.grad(1e30 * entropy.sum(), logits)
    assert grad.isfinite().all() and not grad[:, :3].any()


def test_targets_are_integers():
    with pytest.raises(ValueError, match="^targets: torch.float32"):
        logprob_entropy(torch.zeros(2, 5), torch.zeros(2))
