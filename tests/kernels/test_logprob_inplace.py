"""logprob_entropy with inplace=True: the gradient lies where the logits lay, and nothing else may need them then."""

import pytest
import torch
from backends import BACKENDS, DEVICE

from nanoragen.kernels.logprob import logprob_entropy


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
