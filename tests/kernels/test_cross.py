"""cross_logprob_matrix against float64 log-softmax by the book, cross_statistics against collapse.py, which has its own way."""

import pytest
import torch
from backends import BACKENDS, DEVICE

from nanoragen.collapse.estimator import collapse_metrics
from nanoragen.kernels import reference
from nanoragen.kernels.cross import cross_logprob_matrix, cross_statistics


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


def test_the_reference_takes_the_vocabulary_in_slices(monkeypatch):
    monkeypatch.setattr(reference, "COLUMNS", 7)
    hidden, weight = torch.randn(9, 16, dtype=torch.float64), torch.randn(50, 16, dtype=torch.float64)
    targets, cu = torch.randint(50, (9,)), torch.tensor([0, 4, 9])
    sums = cross_logprob_matrix(hidden, weight, targets, cu, backend="torch")
    torch.testing.assert_close(sums, book(hidden, weight, targets, cu, 1.0), atol=1e-10, rtol=1e-12)


def test_the_reference_takes_any_number_of_pairs():
    S = 70_000
    hidden, weight, targets = torch.randn(S, 4), torch.randn(6, 4), torch.randint(6, (S,))
    sums = cross_logprob_matrix(hidden, weight, targets, torch.arange(S + 1))
    want = torch.log_softmax(hidden @ weight.T, -1).gather(1, targets[:, None])[:, 0]
    torch.testing.assert_close(sums, want, atol=1e-5, rtol=1e-5)


def test_shapes_that_do_not_fit():
    with pytest.raises(ValueError, match="do not fit"):
        cross_logprob_matrix(torch.zeros(3, 4), torch.zeros(5, 6), torch.zeros(3, dtype=torch.long), torch.tensor([0, 3]))


def matrix(M, N, seed, dtype=torch.float32):
    """Scores with ties: on a grid of 1/4, some equal but for rounding, some columns all the same, some impossible."""
    rng = torch.Generator().manual_seed(seed)
    L = torch.randint(-40, -4, (M, N), generator=rng).to(dtype) / 4
    own = torch.randint(max(1, N - 1), (M,), generator=rng)  # the last prompt has no row
    L[::3, : N // 2] = L[::3, :1] * (1 + 1e-7)
    L[1::3] -= 5000
    L[2::5, -1] = -torch.inf
    return L.to(DEVICE), own.to(DEVICE)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("M, N", [(1, 1), (7, 2), (12, 5), (30, 9), (5, 300)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_statistics_give_the_collapse_metrics(M, N, dtype, backend):
    L, own = matrix(M, N, M + N, dtype)
    found = cross_statistics(L, own, backend=backend)
    want = collapse_metrics(L, own, torch.ones(M))
    assert (found.matched - found.marginal).mean().item() == pytest.approx(want["mi_seq_estimate"], abs=1e-9)
    assert -found.matched.mean().item() == pytest.approx(want["conditional_entropy_seq_est"], rel=1e-12)
    assert -found.marginal.mean().item() == pytest.approx(want["reasoning_entropy_seq_est"], rel=1e-12)
    for k, name in (
        (1, "retrieval_accuracy"),
        (2, "retrieval_accuracy@2"),
        (4, "retrieval_accuracy@4"),
        (8, "retrieval_accuracy@8"),
    ):
        if name in want:
            credit = ((k - found.above.double()) / found.tied).clamp(0, 1)
            assert credit.mean().item() == pytest.approx(want[name], abs=1e-12)
    assert ((found.above >= 0) & (found.tied >= 1) & (found.above + found.tied <= N)).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_statistics_of_worked_cases(backend):
    p = torch.tensor([[0.9, 0.1], [0.1, 0.9]], device=DEVICE).log()
    found = cross_statistics(p, torch.tensor([0, 1], device=DEVICE), backend=backend)
    assert (found.matched - found.marginal).mean().item() == pytest.approx(0.587787, abs=1e-6)
    far = torch.tensor([[-5000.0, -5010.0], [-5010.0, -5000.0]], device=DEVICE)  # no underflow
    found = cross_statistics(far, torch.tensor([0, 1], device=DEVICE), backend=backend)
    assert (found.matched - found.marginal).tolist() == pytest.approx([0.693102] * 2, abs=1e-6)
    found = cross_statistics(
        p.expand(2, 2)[:1], torch.tensor([1], device=DEVICE), torch.tensor([0.25, 0.75], device=DEVICE), backend=backend
    )
    assert found.marginal.item() == pytest.approx(torch.tensor(0.25 * 0.9 + 0.75 * 0.1).log().item(), abs=1e-6)
    assert (found.above.item(), found.tied.item()) == (1, 1)
    nothing = cross_statistics(torch.full((1, 3), -torch.inf, device=DEVICE), torch.tensor([2], device=DEVICE), backend=backend)
    assert nothing.marginal.item() == -torch.inf


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_row_of_statistics_is_the_same_bits_alone(backend):
    L, own = matrix(20, 150, 3)
    weights = torch.rand(150, device=DEVICE)
    L += torch.randn(20, 150, device=DEVICE)
    together = cross_statistics(L, own, weights, backend=backend)
    alone = cross_statistics(L[7:8], own[7:8], weights, backend=backend)
    for name in ("matched", "marginal", "above", "tied"):
        assert torch.equal(getattr(together, name)[7:8], getattr(alone, name))


def test_statistics_of_bad_arguments():
    for bad in ((torch.zeros(2, 3), torch.tensor([0])), (torch.zeros(2, 3), torch.tensor([0, 1]), torch.ones(2))):
        with pytest.raises(ValueError, match="^sums, own, weights: .*; valid: "):
            cross_statistics(*bad)
    with pytest.raises(ValueError, match="^own: 0 to 3; valid: columns 0 to 2"):
        cross_statistics(torch.zeros(2, 3), torch.tensor([0, 3]))


@pytest.mark.gpu
def test_more_pairs_than_a_grid_axis_on_a_gpu():
    S = 66_000
    hidden, weight = torch.randn(S, 16, device="cuda"), torch.randn(32, 16, device="cuda")
    targets, cu = torch.randint(32, (S,), device="cuda"), torch.arange(S + 1, device="cuda")
    got, want = (cross_logprob_matrix(hidden, weight, targets, cu, backend=b) for b in ("triton", "torch"))
    torch.testing.assert_close(got, want, atol=1e-3, rtol=1e-4)


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_own_score_that_is_not_finite_still_has_a_rank(backend):
    sums = torch.tensor([[-torch.inf, -1.0, -2.0], [torch.nan, -1.0, -2.0]], device=DEVICE)
    found = cross_statistics(sums, torch.zeros(2, dtype=torch.long, device=DEVICE), backend=backend)
    assert (found.above[0].item(), found.tied.tolist()) == (2, [1, 1])


@pytest.mark.parametrize("backend", BACKENDS)
def test_autocast_does_not_round_the_logits(backend):
    hidden, weight = torch.randn(6, 16, device=DEVICE), torch.randn(40, 16, device=DEVICE)
    args = hidden, weight, torch.randint(0, 40, (6,), device=DEVICE), torch.tensor([0, 2, 6], device=DEVICE)
    with torch.autocast(DEVICE, torch.bfloat16):
        found = cross_logprob_matrix(*args, backend=backend)
    assert torch.equal(found, cross_logprob_matrix(*args, backend=backend))


@pytest.mark.skipif(DEVICE != "cpu", reason="on a GPU nobody looks")
@pytest.mark.parametrize("cu", [[0, 3, 9], [0, 4, 2, 6], [1, 6], [0, 5]])
def test_segments_that_are_not_the_tokens(cu):
    with pytest.raises(ValueError, match="^cu_seqlens: .*valid: rising from 0 to 6"):
        cross_logprob_matrix(torch.ones(6, 4), torch.ones(9, 4), torch.zeros(6, dtype=torch.long), torch.tensor(cu))
