"""Sizes: any workspace, little memory beside the results, more rows than a grid axis, offsets beyond 31 bits."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from backends import BACKENDS, DEVICE, by_the_book, close, linear_book, make, ours, value_and_grads

from nanoragen.kernels import linear, reference
from nanoragen.kernels.dispatch import interpreted
from nanoragen.kernels.linear import linear_logprob_entropy
from nanoragen.kernels.logprob import logprob_entropy

ROOT = Path(__file__).parent.parent.parent
NOT_INTERPRETED = [b for b in BACKENDS if b == "torch" or not interpreted()]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("workspace", [1, 12_000, 2**26])
def test_any_workspace_gives_the_same(workspace, backend, monkeypatch):
    """One that forces many slabs of tokens and slices of the vocabulary, and spans of one tile."""
    monkeypatch.setattr(linear, "SPAN", 32)
    monkeypatch.setattr(linear, "BLOCKS32", {"BLOCK_P": 16, "BLOCK_V": 16, "BLOCK_D": 16})
    *inputs, targets = make(40, 20, 140 if workspace > 1 else 20)
    g, h = torch.randn(2, 40, device=DEVICE)
    values, grads = value_and_grads(ours(backend, workspace=workspace), inputs, targets, g, h)
    exact, wanted = value_and_grads(linear_book, [t.double() for t in inputs], targets, g, h)
    close(values, exact)
    close(grads, wanted, 5e-5)


def test_tiles_keep_within_the_workspace():
    for P, V, most, workspace, element, column in (
        (2048, 151_936, 2**18, 2**26, 8, 0), (7, 151_936, 2**18, 2**26, 8, 3584), (70_000, 8, 2**62, 2**26, 2, 12 * 896),
        (65_536, 262_144, 2**62, 2**26, 2, 12 * 4096), (3, 5, 2**18, 2**26, 8, 0), (1000, 1000, 2**18, 50_000, 8, 400),
    ):  # fmt: skip
        tokens, columns = reference.tile(P, V, most, workspace, element, column)
        assert 1 <= tokens <= P and 1 <= columns <= V and tokens * columns <= most
        assert tokens * columns * element + columns * column <= workspace


def test_peak_memory_of_the_reference():
    """Logits of 256 MiB that never exist: forward, and forward with backward, stay under a tenth of them."""
    code = """
import torch
from nanoragen.kernels.linear import linear_logprob_entropy

def high_water():
    return int(next(line for line in open("/proc/self/status") if line.startswith("VmHWM")).split()[1]) * 1024

torch.set_num_threads(1)
P, D, V = 1024, 32, 65_536
hidden, weight, targets = torch.randn(P, D), torch.randn(V, D), torch.randint(V, (P,))
grads = torch.zeros(P, D), torch.zeros(V, D)
linear_logprob_entropy(hidden, weight[:2048], targets % 2048)  # so that the BLAS is loaded
for leaf in (False, True):
    hidden.requires_grad_(leaf), weight.requires_grad_(leaf)
    open("/proc/self/clear_refs", "w").write("5")  # the high-water mark starts again from here
    before = high_water()
    logprob, entropy = linear_logprob_entropy(hidden, weight, targets)
    if leaf:
        (logprob - 0.1 * entropy).sum().backward()
        before += weight.numel() * 4 + hidden.numel() * 4  # the gradients themselves
    print((high_water() - before) / (P * V * 4))
"""
    try:
        open("/proc/self/clear_refs", "w").close()
    except OSError:
        pytest.skip("no /proc/self/clear_refs to measure with")
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    shares = [float(line) for line in done.stdout.split()]
    assert len(shares) == 2 and max(shares) < 0.1, shares


@pytest.mark.parametrize("backend", NOT_INTERPRETED)
@pytest.mark.parametrize("P", [65_536, 70_000])
def test_more_tokens_than_a_grid_axis(P, backend):
    hidden, weight, bias, targets = make(P, 4, 8)
    close(linear_logprob_entropy(hidden, weight, targets, bias=bias, backend=backend), linear_book(hidden, weight, bias, targets))


@pytest.mark.skipif(interpreted(), reason="this is the inner run")
@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_rows_of_logits_beyond_two_to_the_31_elements(backend):
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


def test_rows_of_hidden_beyond_two_to_the_31_elements():
    """Offsets are 64-bit, of hidden and of the head. The 4.3 GB are touched in six rows, so the system never hands them out."""
    code = """
import torch
from nanoragen.kernels.linear import linear_logprob_entropy
stride = 2**30 + 8
wide = torch.empty(2 * stride + 128, dtype=torch.float16)
hidden, weight = wide.as_strided((3, 64), (stride, 1)), wide.as_strided((3, 64), (stride, 1), 64)
for rows in (hidden, weight):
    rows[0], rows[1], rows[2] = torch.randn(3, 64).half()
results = []
for h, w, backend in ((hidden, weight, "triton"), (hidden.clone(), weight.clone(), "torch")):
    h, w = h.detach().requires_grad_(), w.detach().requires_grad_()
    values = linear_logprob_entropy(h, w, torch.tensor([0, 1, 2]), backend=backend)
    results.append([*values, *torch.autograd.grad(values[0].sum(), (h, w))])
for a, b in zip(*results):
    assert torch.allclose(a, b, atol=5e-3), (a, b)
"""
    pytest.importorskip("triton")
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True
    )  # fmt: skip
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
    for a, b in zip(logprob_entropy(logits, targets), by_the_book(logits.double(), targets)):
        torch.testing.assert_close(a.double(), b, atol=1e-5, rtol=1e-5)


@pytest.mark.gpu
def test_no_large_temporary_from_logits_on_a_gpu():
    logits = torch.randn(8192, 151_936, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    targets = torch.zeros(8192, dtype=torch.long, device="cuda")
    base = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    logprob, entropy = logprob_entropy(logits, targets)
    assert torch.cuda.max_memory_allocated() - base < 0.3e9
    (logprob.sum() + entropy.sum()).backward()
    assert torch.cuda.max_memory_allocated() - base < 1.2 * logits.numel() * 2


@pytest.mark.gpu
def test_no_large_temporary_from_hidden_on_a_gpu():
    P, D, V = 8192, 896, 151_936
    hidden, weight = torch.randn(P, D, device="cuda").bfloat16(), torch.randn(V, D, device="cuda").bfloat16() / 30
    hidden.requires_grad_(), weight.requires_grad_()
    base = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    logprob, entropy = linear_logprob_entropy(hidden, weight, torch.zeros(P, dtype=torch.long, device="cuda"))
    assert torch.cuda.max_memory_allocated() - base < 0.1e9
    (logprob.sum() + entropy.sum()).backward()
    assert torch.cuda.max_memory_allocated() - base < weight.numel() * 2 + 0.2e9  # the logits would be 2.5e9


@pytest.mark.gpu
def test_rows_of_hidden_beyond_two_to_the_31_elements_on_a_gpu():
    hidden = torch.zeros(1_100_000, 2048, dtype=torch.bfloat16, device="cuda")
    hidden[-1].normal_()
    weight, targets = torch.randn(300, 2048, device="cuda").bfloat16(), torch.zeros(1_100_000, dtype=torch.long, device="cuda")
    together = linear_logprob_entropy(hidden, weight, targets)
    alone = linear_logprob_entropy(hidden[-1:].clone(), weight, targets[-1:])
    assert all(torch.equal(a[-1:], b) for a, b in zip(together, alone, strict=True))
