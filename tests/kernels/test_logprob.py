"""logprob_entropy against float64 softmax by the book, for the twin and, under TRITON_INTERPRET=1, for the kernel."""

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from backends import BACKENDS, DEVICE
from hypothesis import given, settings
from hypothesis import strategies as st

from nanoragen.kernels.dispatch import interpreted
from nanoragen.kernels.logprob import logprob_entropy
from nanoragen.kernels.reference import as_rows

INF = float("inf")
ROOT = Path(__file__).parent.parent.parent


def book(logits, targets, temperature=1.0):
    """float64, straight from the definitions."""
    x = logits.double() / temperature
    p = torch.softmax(x, -1)
    log_p = torch.log_softmax(x, -1)
    entropy = -(p * torch.where(p > 0, log_p, 0.0)).sum(-1)  # whose gradient at -inf is not 0 * inf
    return log_p.gather(-1, targets[..., None]).squeeze(-1), entropy


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


def made(logits):
    """Logits as a model makes them: the output of an operation that has no use for its own values."""
    leaf = logits.clone().requires_grad_()
    return leaf, leaf * 1


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("V", [5, 300, 9001])
def test_inplace_gives_the_same_bits_in_the_logits_own_memory(V, dtype, backend):
    base = torch.randn(3, 4, V, device=DEVICE).to(dtype)
    targets = torch.randint(V, (3, 4), device=DEVICE)
    targets[1, 2] = targets[2, 0] = -100
    found = []
    for inplace in (False, True):
        _, logits = made(base)
        logprob, entropy = logprob_entropy(logits, targets, temperature=0.7, inplace=inplace, backend=backend)
        assert torch.equal(logits, base)  # the forward pass leaves them alone
        (grad,) = torch.autograd.grad((2 * logprob - entropy).sum(), logits)
        assert (grad.data_ptr() == logits.data_ptr()) == inplace
        found.append(grad)
    assert torch.equal(*found) and (found[1][1, 2] == 0).all() and (found[1][2, 0] == 0).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_inplace_of_a_slice_writes_nothing_else(backend):
    base, targets = torch.randn(3, 4, 50, device=DEVICE), torch.randint(40, (3, 3), device=DEVICE)
    found = []
    for inplace in (False, True):
        leaf, wide = made(base)
        logprob, entropy = logprob_entropy(wide[:, :-1, :40], targets, inplace=inplace, backend=backend)
        found += torch.autograd.grad((logprob + entropy).sum(), leaf)
    assert torch.equal(*found) and torch.equal(wide[:, :-1, :40], found[0][:, :-1, :40])
    assert torch.equal(wide[:, -1], base[:, -1]) and torch.equal(wide[..., 40:], base[..., 40:])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("misuse", ["backward twice", "saved by another operation", "saved by their own operation", "scored twice"])
def test_inplace_misuse_is_loud(misuse, backend):
    leaf, logits = made(torch.randn(2, 50, device=DEVICE))
    targets = torch.tensor([0, 49], device=DEVICE)
    if misuse == "saved by their own operation":
        logits = leaf.exp()  # whose backward needs its result
    loss = logprob_entropy(logits, targets, inplace=True, backend=backend)[0].sum()
    if misuse == "saved by another operation":
        loss = loss + (logits**2).sum()
    if misuse == "scored twice":
        loss = loss + logprob_entropy(logits, targets, temperature=2.0, inplace=True, backend=backend)[1].sum()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward(retain_graph=True)
        loss.backward()


@pytest.mark.parametrize("backend", BACKENDS)
def test_inplace_is_refused_where_a_gradient_cannot_lie(backend):
    leaf, logits = made(torch.randn(1, 4, 6, device=DEVICE))
    for bad in (leaf, leaf.view(4, 6), logits.expand(2, 4, 6), logits.transpose(1, 2), logits.as_strided((3, 6), (3, 1))):
        with pytest.raises(ValueError, match="^inplace: .*; valid: "):
            logprob_entropy(bad, torch.zeros(bad.shape[:-1], dtype=torch.long, device=DEVICE), inplace=True, backend=backend)
    with torch.no_grad():  # no gradient will ever be written
        logprob_entropy(leaf, torch.zeros(1, 4, dtype=torch.long, device=DEVICE), inplace=True, backend=backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("inplace", [False, True])
def test_ignored_rows_are_not_read(inplace, backend):
    """NaN in them reaches nothing, in either pass."""
    _, logits = made(torch.randn(4, 5003, device=DEVICE))
    logits.data[1::2] = float("nan")
    targets = torch.tensor([7, -1, 5002, -1], device=DEVICE)
    logprob, entropy = logprob_entropy(logits, targets, ignore_index=-1, inplace=inplace, backend=backend)
    (grad,) = torch.autograd.grad((logprob + entropy).sum(), logits)
    assert logprob.isfinite().all() and entropy.isfinite().all() and grad.isfinite().all()
    assert (grad[1::2] == 0).all() and (grad[::2] != 0).any(1).all()


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


def test_twin_in_float64_passes_gradcheck():
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


@pytest.mark.skipif(interpreted(), reason="this is the inner run")
@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_rows_beyond_two_to_the_31_elements(backend):
    """Offsets are 64-bit, also where the gradient is written. Of the 4.3 GB all but three rows is never touched, and so never
    handed out by the system."""
    if backend == "triton":
        pytest.importorskip("triton")
    code = f"""
import torch
from nanoragen.kernels import logprob, reference
stride, targets = 2**30 + 8, torch.tensor([0, 1, 63])
wide = torch.empty(2 * stride + 64, dtype=torch.float16)
rows = wide.as_strided((3, 64), (stride, 1))
rows[0], rows[1], rows[2] = torch.randn(3, 64).half()
near = rows.clone().requires_grad_()
function = logprob._LogprobEntropy if {backend!r} == "triton" else reference.LogprobEntropy
far = function.apply(rows.requires_grad_(), targets, 1.0, -100, True)  # past the check: rows is a leaf
want = logprob.logprob_entropy(near, targets, backend="torch")
assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(far, want)), (far, want)
for found, leaf in ((far, rows), (want, near)):
    (found[0].sum() + found[1].sum()).backward()
assert torch.allclose(rows, near.grad, atol=1e-3), (rows, near.grad)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.gpu
def test_last_row_of_a_tensor_beyond_two_to_the_31_elements_on_a_gpu():
    logits = torch.zeros(14_200, 151_936, dtype=torch.bfloat16, device="cuda")
    logits[-1].normal_()
    targets = torch.zeros(14_200, dtype=torch.long, device="cuda")
    logprob, entropy = logprob_entropy(logits, targets)
    alone = logprob_entropy(logits[-1:].clone(), targets[-1:])
    assert torch.equal(logprob[-1:], alone[0]) and torch.equal(entropy[-1:], alone[1])
    assert logprob[0].item() == pytest.approx(-11.931215, abs=1e-4) and entropy[0].item() == pytest.approx(11.931215, abs=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("T", [65_535, 65_536, 70_000])
def test_more_rows_than_a_grid_axis_on_a_gpu(T):
    logits, targets = torch.randn(T, 8, device="cuda"), torch.randint(8, (T,), device="cuda")
    for a, b in zip(logprob_entropy(logits, targets), book(logits, targets)):
        torch.testing.assert_close(a.double(), b, atol=1e-5, rtol=1e-5)


@pytest.mark.gpu
def test_no_large_temporary_on_a_gpu():
    logits = torch.randn(8192, 151_936, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    targets = torch.zeros(8192, dtype=torch.long, device="cuda")
    base = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    logprob, entropy = logprob_entropy(logits, targets)
    assert torch.cuda.max_memory_allocated() - base < 0.3e9
    (logprob.sum() + entropy.sum()).backward()
    assert torch.cuda.max_memory_allocated() - base < 1.2 * logits.numel() * 2


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
