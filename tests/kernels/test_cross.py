"""cross_logprob_matrix against float64 log-softmax by the book."""

import pytest
import torch
from backends import BACKENDS, DEVICE

from nanoragen.kernels import reference
from nanoragen.kernels.cross import cross_logprob_matrix


def book(hidden, weight, targets, cu, temperature):
    logprob = torch.log_softmax(hidden.double() @ weight.double().T / temperature, -1)
    token = logprob.gather(1, targets[:, None])[:, 0].cpu()
    return torch.stack([token[a:b].sum() for a, b in zip(cu[:-1].tolist(), cu[1:].tolist())])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("P, D, V", [(1, 16, 5), (37, 40, 301), (70, 64, 128)])
def test_values(P, D, V, dtype, backend):
    torch.manual_seed(P)
    hidden, weight = torch.randn(P, D, device=DEVICE).to(dtype), torch.randn(V, D, device=DEVICE).to(dtype)
    targets = torch.randint(V, (P,), device=DEVICE)
    cu = torch.tensor([0, P // 3, P // 3, P], dtype=torch.int32, device=DEVICE)  # an empty segment too
    sums = cross_logprob_matrix(hidden, weight, targets, cu, temperature=0.8, backend=backend)
    assert sums.dtype == torch.float32 and sums.shape == (3,) and sums[1] == 0
    torch.testing.assert_close(sums.double().cpu(), book(hidden, weight, targets, cu, 0.8), atol=1e-3, rtol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_uniform_model(backend):
    """Seven tokens of a uniform model over ten: -16.118096, not -13.815511 (six) or -18.42 (eight)."""
    sums = cross_logprob_matrix(
        torch.zeros(7, 16, device=DEVICE), torch.randn(10, 16, device=DEVICE), torch.arange(7, device=DEVICE),
        torch.tensor([0, 7], device=DEVICE), backend=backend,
    )  # fmt: skip
    assert sums.item() == pytest.approx(-16.118096, abs=1e-4)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_segment_is_the_same_bits_alone(backend):
    hidden, weight = torch.randn(40, 32, device=DEVICE), torch.randn(50, 32, device=DEVICE)
    targets, cu = torch.randint(50, (40,), device=DEVICE), torch.tensor([0, 10, 40], device=DEVICE)
    both = cross_logprob_matrix(hidden, weight, targets, cu, backend=backend)
    if backend == "triton":
        alone = cross_logprob_matrix(hidden[10:], weight, targets[10:], torch.tensor([0, 30], device=DEVICE), backend=backend)
        assert torch.equal(alone[0], both[1])
    again = cross_logprob_matrix(hidden, weight, targets, cu, backend=backend)
    assert torch.equal(both, again)


@pytest.mark.parametrize("backend", BACKENDS)
def test_hidden_narrower_than_the_head(backend):
    """Under autocast hidden is bf16 and the head float32."""
    hidden, weight = torch.randn(9, 16, device=DEVICE).bfloat16(), torch.randn(50, 16, device=DEVICE)
    weight = weight.bfloat16().float()
    targets, cu = torch.randint(50, (9,), device=DEVICE), torch.tensor([0, 4, 9], device=DEVICE)
    sums = cross_logprob_matrix(hidden, weight, targets, cu, backend=backend)
    torch.testing.assert_close(sums.double().cpu(), book(hidden, weight, targets, cu, 1.0), atol=1e-3, rtol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_targets_out_of_the_vocabulary_do_not_pass_silently(backend):
    args = torch.randn(2, 16, device=DEVICE), torch.randn(5, 16, device=DEVICE), torch.tensor([0, 5], device=DEVICE)
    cu = torch.tensor([0, 1, 2], device=DEVICE)
    if backend == "triton":
        assert cross_logprob_matrix(*args, cu, backend=backend).isnan().tolist() == [False, True]
    else:
        with pytest.raises((RuntimeError, IndexError)):
            cross_logprob_matrix(*args, cu, backend=backend)


def test_twin_takes_the_vocabulary_in_slices(monkeypatch):
    monkeypatch.setattr(reference, "COLUMNS", 7)
    hidden, weight = torch.randn(9, 16, dtype=torch.float64), torch.randn(50, 16, dtype=torch.float64)
    targets, cu = torch.randint(50, (9,)), torch.tensor([0, 4, 9])
    sums = cross_logprob_matrix(hidden, weight, targets, cu, backend="torch")
    torch.testing.assert_close(sums, book(hidden, weight, targets, cu, 1.0), atol=1e-10, rtol=1e-12)


def test_twin_takes_any_number_of_pairs():
    S = 70_000
    hidden, weight, targets = torch.randn(S, 4), torch.randn(6, 4), torch.randint(6, (S,))
    sums = cross_logprob_matrix(hidden, weight, targets, torch.arange(S + 1))
    want = torch.log_softmax(hidden @ weight.T, -1).gather(1, targets[:, None])[:, 0]
    torch.testing.assert_close(sums, want, atol=1e-5, rtol=1e-5)


def test_shapes_that_do_not_fit():
    with pytest.raises(ValueError, match="do not fit"):
        cross_logprob_matrix(torch.zeros(3, 4), torch.zeros(5, 6), torch.zeros(3, dtype=torch.long), torch.tensor([0, 3]))


@pytest.mark.gpu
def test_more_pairs_than_a_grid_axis_on_a_gpu():
    S = 66_000
    hidden, weight = torch.randn(S, 16, device="cuda"), torch.randn(32, 16, device="cuda")
    targets, cu = torch.randint(32, (S,), device="cuda"), torch.arange(S + 1, device="cuda")
    got, want = (cross_logprob_matrix(hidden, weight, targets, cu, backend=b) for b in ("triton", "torch"))
    torch.testing.assert_close(got, want, atol=1e-3, rtol=1e-4)
