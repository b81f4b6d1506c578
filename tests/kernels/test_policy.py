"""policy_loss against float64 autograd of the formula as written, for the reference implementation and the kernel."""

import math

import pytest
import torch
from backends import BACKENDS, DEVICE
from hypothesis import given, settings
from hypothesis import strategies as st

from nanoragen.kernels.policy import policy_loss

BASE = {"clip_low": 0.2, "clip_high": 0.28, "beta": 0.0, "kl": "k3", "entropy_coef": 0.0, "temperature": 0.8}


def book(logits, targets, old, advantages, weights, ref, *, clip_low, clip_high, beta, kl, entropy_coef, temperature):
    """float64, token by token, straight from the definitions; (loss, [T] logprob, entropy, clipped, kl)."""
    loss, stats = 0.0, []
    for t in range(len(targets)):
        if targets[t] == -100:
            stats.append([0.0] * 4)
            continue
        log_p = torch.log_softmax(logits[t].double() / temperature, 0)
        p = log_p.exp()
        entropy = -(p * torch.where(p > 0, log_p, 0.0)).sum()
        logprob, A = log_p[targets[t]], advantages[t].double()
        ratio = (logprob - (logprob.detach() if old is None else old[t].double())).exp()
        unclipped, clipped = A * ratio, A * min(max(ratio, 1 - clip_low), 1 + clip_high)
        token = -min(unclipped, clipped) - entropy_coef * entropy
        estimate = 0.0
        if ref is not None:
            d = min(max(ref[t].double() - logprob, -20.0), 20.0)
            d = torch.as_tensor(d, dtype=torch.float64)
            estimate = {"k1": -d, "k2": d**2 / 2, "k3": torch.exp(d) - d - 1}[kl]
            token = token + beta * estimate
        loss = loss + weights[t].double() * token
        stats.append([torch.as_tensor(x, dtype=torch.float64).item() for x in (logprob, entropy, clipped < unclipped, estimate)])
    return loss, torch.tensor(stats, dtype=torch.float64).T


def batch(T, V, dtype=torch.float32, seed=0):
    """Logits, and old and reference log-probs close enough that some tokens are clipped on either side and some are not."""
    rng = torch.Generator().manual_seed(seed)
    logits = (2 * torch.randn(T, V, generator=rng)).to(dtype)
    targets = torch.randint(V, (T,), generator=rng)
    logprob = torch.log_softmax(logits.double() / 0.8, -1).gather(1, targets[:, None])[:, 0]
    old = logprob + 0.4 * torch.randn(T, generator=rng)
    ref = logprob + 0.7 * torch.randn(T, generator=rng)
    advantages, weights = torch.randn(T, generator=rng), torch.rand(T, generator=rng) / T
    return [t.to(DEVICE) for t in (logits, targets, old.float(), advantages, weights, ref.float())]


def check(logits, targets, old, advantages, weights, ref, backend, inplace=False, **how):
    """Loss, statistics and gradient. Low-precision logits: their gradient may be as far off as rounding it once makes it."""
    leaf, exact = logits.clone().requires_grad_(), logits.double().requires_grad_()
    loss, stats = policy_loss(leaf * 1, targets, old, advantages, weights, ref_logprob=ref, inplace=inplace, backend=backend, **how)
    want, want_stats = book(exact, targets, old, advantages, weights, ref, **how)
    (3 * loss).backward()
    (3 * want).backward()
    assert loss.shape == () and loss.dtype == torch.float32
    torch.testing.assert_close(loss.double(), want.detach(), atol=1e-5, rtol=1e-5)
    found = torch.stack([stats.logprob, stats.entropy, stats.clipped, stats.kl])
    assert not found.requires_grad
    torch.testing.assert_close(found.double().cpu(), want_stats, atol=1e-4, rtol=1e-5)
    rounded = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 8e-3}[logits.dtype]
    torch.testing.assert_close(leaf.grad.double(), exact.grad, atol=1e-7 + rounded * exact.grad.abs().max().item(), rtol=rounded)
    return stats


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("entropy_coef", [0.0, 0.05])
@pytest.mark.parametrize("kl, beta", [(None, 0.0), ("k1", 0.3), ("k2", 0.3), ("k3", 0.3), ("k3", 0.0)])
def test_loss_statistics_and_gradient(kl, beta, entropy_coef, dtype, backend):
    args = batch(40 if backend == "torch" or DEVICE == "cuda" else 12, 37, dtype)
    args[1][3] = args[1][7] = -100
    for garbage in (*args[2:4], *args[5:]):  # in ignored rows nothing is looked at
        garbage[3] = float("nan")
    if kl is None:
        args[5] = None
    stats = check(*args, backend, **BASE | {"kl": kl or "k3", "beta": beta, "entropy_coef": entropy_coef})
    up, down = ((stats.clipped == 1) & (args[3] > 0)).any(), ((stats.clipped == 1) & (args[3] < 0)).any()
    assert up and down and (stats.clipped == 0).any()  # the batch has all three cases


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("V", [1, 5003])
def test_more_than_a_tile_and_in_place(V, backend):
    args = batch(4, V)
    check(*args, backend, **BASE | {"beta": 0.1, "entropy_coef": 0.01})
    check(*args, backend, inplace=True, **BASE | {"beta": 0.1, "entropy_coef": 0.01})


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("clip", [{}, {"clip_low": math.inf, "clip_high": math.inf}, {"clip_low": 0.0, "clip_high": 0.0}])
def test_without_old_log_probs_the_ratio_is_one(clip, backend):
    logits, targets, _, advantages, weights, _ = batch(6, 20)
    stats = check(logits, targets, None, advantages, weights, None, backend, **BASE | clip)
    assert (stats.clipped == 0).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_clip_at_infinity(backend):
    stats = check(*batch(8, 20), backend, **BASE | {"clip_low": math.inf, "clip_high": math.inf})
    assert (stats.clipped == 0).all()


def loss_of_one_token(logprob_minus_old, advantage, backend, weight=1.0, ref=None, **how):
    """Loss and gradient of a token of probability 1/2 whose log-ratio is given."""
    logits = torch.zeros(1, 2, device=DEVICE, requires_grad=True)
    old, ref = (None if x is None else torch.tensor([-math.log(2) + x], device=DEVICE) for x in (-logprob_minus_old, ref))
    loss, stats = policy_loss(
        logits, torch.tensor([0], device=DEVICE), old, torch.tensor([advantage], device=DEVICE),
        torch.tensor([weight], device=DEVICE), ref_logprob=ref, backend=backend, **how,
    )  # fmt: skip
    loss.backward()
    return loss.item(), logits.grad[0].tolist(), stats


@pytest.mark.parametrize("backend", BACKENDS)
def test_ratios_that_overflow(backend):
    """e^200 is no float32. Where the clip makes the true gradient 0 it is 0, not inf * 0 = NaN."""
    loss, grad, stats = loss_of_one_token(200.0, 2.0, backend)
    assert loss == pytest.approx(-2.4) and grad == [0, 0] and stats.clipped.item() == 1
    loss, grad, stats = loss_of_one_token(200.0, 0.0, backend)
    assert loss == 0 and grad == [0, 0]
    loss, grad, stats = loss_of_one_token(200.0, -1.0, backend, weight=0.0)
    assert loss == 0 and grad == [0, 0]
    loss, grad, stats = loss_of_one_token(-200.0, -2.0, backend)  # to 0: clipped at 0.8
    assert loss == pytest.approx(1.6) and grad == [0, 0] and stats.clipped.item() == 1
    loss, grad, stats = loss_of_one_token(200.0, -1.0, backend)  # nothing clips this one: the loss says so
    assert loss == math.inf


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kl", ["k1", "k2", "k3"])
def test_kl_is_capped(kl, backend):
    """A difference of 100 counts as 20 and has no gradient; 0.5 is 0.148721 under k3; 0 is 0."""
    loss, grad, stats = loss_of_one_token(0.0, 0.0, backend, ref=100.0, beta=1.0, kl=kl)
    assert loss == pytest.approx({"k1": -20.0, "k2": 200.0, "k3": math.exp(20) - 21}[kl], rel=1e-5) and grad == [0, 0]
    loss, grad, stats = loss_of_one_token(0.0, 0.0, backend, ref=0.5, beta=1.0, kl=kl)
    assert stats.kl.item() == pytest.approx({"k1": -0.5, "k2": 0.125, "k3": 0.148721}[kl], abs=1e-6) and grad[0] != 0
    assert loss_of_one_token(0.0, 0.0, backend, ref=0.0, beta=1.0, kl=kl)[0] == 0


@pytest.mark.parametrize("backend", BACKENDS)
def test_measuring_the_kl_changes_nothing(backend):
    logits, targets, old, advantages, weights, ref = batch(5, 9)
    found = []
    for reference_logprob in (None, ref):
        leaf = logits.clone().requires_grad_()
        loss, stats = policy_loss(leaf, targets, old, advantages, weights, ref_logprob=reference_logprob, backend=backend)
        loss.backward()
        found.append((loss, leaf.grad, stats.kl))
    assert torch.equal(found[0][0], found[1][0]) and torch.equal(found[0][1], found[1][1])
    assert (found[0][2] == 0).all() and (found[1][2] > 0).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_equals_the_trainers_own_formula(backend):
    """train.py's policy_loss, the reader's version, on the log-probs and entropies of the same logits."""
    import train

    logits, targets, old, advantages, weights, ref = batch(12, 30)
    c = train.Config(clip_low=0.2, clip_high=0.28, beta=0.1, kl="k3", entropy_coef=0.02, temperature=0.8)
    log_p = torch.log_softmax(logits.double() / 0.8, -1)
    logprob, entropy = log_p.gather(1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)
    want, part = train.policy_loss(logprob, old, advantages, weights, entropy, ref, c)
    loss, stats = policy_loss(
        logits, targets, old, advantages, weights, ref_logprob=ref, backend=backend, **BASE | {"beta": 0.1, "entropy_coef": 0.02}
    )
    assert loss.item() == pytest.approx(want.item(), abs=1e-5)
    assert (weights * stats.clipped).sum().item() == pytest.approx(part["clip_ratio/region_mean"], abs=1e-6)
    assert part["clip_ratio/region_mean"] > 0
    assert (weights * stats.kl).sum().item() == pytest.approx(part["kl"], abs=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_same_bits_every_time_and_for_a_row_alone(backend):
    args = batch(9, 300)
    runs = []
    for _ in range(2):
        leaf = args[0].clone().requires_grad_()
        loss, stats = policy_loss(leaf, *args[1:5], ref_logprob=args[5], beta=0.1, entropy_coef=0.01, backend=backend)
        loss.backward()
        runs.append((loss, leaf.grad, stats.logprob, stats.entropy, stats.kl))
    assert all(torch.equal(a, b) for a, b in zip(*runs))
    leaf = args[0][4:5].clone().requires_grad_()
    loss, stats = policy_loss(
        leaf, *(t[4:5] for t in args[1:5]), ref_logprob=args[5][4:5], beta=0.1, entropy_coef=0.01, backend=backend
    )
    loss.backward()
    alone = (leaf.grad[0], stats.logprob[0], stats.entropy[0], stats.kl[0])
    assert all(torch.equal(a, b[4]) for a, b in zip(alone, runs[0][1:]))


@pytest.mark.parametrize("backend", BACKENDS)
def test_padded_batch_equals_its_live_tokens(backend):
    """[B, T] with padding, a slice of wider logits, and the same tokens packed: the same loss and the same rows of gradient."""
    logits, targets, old, advantages, weights, _ = batch(12, 21)
    live = torch.tensor([[1, 1, 1, 0], [1, 0, 0, 0], [1, 1, 0, 0]], dtype=torch.bool, device=DEVICE)
    padded = [t.view(3, 4, *t.shape[1:]) for t in (logits, targets, old, advantages, weights)]
    wide = torch.cat([padded[0], padded[0][:, :1]], 1).requires_grad_()
    masked = torch.where(live, padded[1], -100)
    a, stats = policy_loss(wide[:, :-1], masked, *padded[2:], backend=backend)
    packed = padded[0][live].clone().requires_grad_()
    b, _ = policy_loss(packed, *(t[live] for t in padded[1:]), backend=backend)
    (a + b).backward()
    assert stats.logprob.shape == (3, 4) and a.item() == pytest.approx(b.item(), abs=1e-6)
    assert torch.equal(wide.grad[:, :-1][live], packed.grad) and (wide.grad[:, :-1][~live] == 0).all()


@settings(max_examples=20, deadline=None, derandomize=True)
@given(
    T=st.integers(1, 5), V=st.integers(1, 70), seed=st.integers(0, 999), kl=st.sampled_from(["k1", "k2", "k3"]),
    beta=st.sampled_from([0.0, 0.5]), entropy_coef=st.sampled_from([0.0, -0.1, 0.1]), clip=st.sampled_from([0.0, 0.2, math.inf]),
    inplace=st.booleans(),
)  # fmt: skip
@pytest.mark.parametrize("backend", BACKENDS)
def test_any_settings(backend, T, V, seed, kl, beta, entropy_coef, clip, inplace):
    how = {"kl": kl, "beta": beta, "entropy_coef": entropy_coef, "clip_low": clip, "clip_high": clip, "temperature": 0.8}
    check(*batch(T, V, seed=seed), backend, inplace=inplace, **how)


def test_the_reference_in_float64_passes_gradcheck():
    logits, *rest, ref = (t.double() if t.is_floating_point() else t for t in batch(4, 7))
    how = BASE | {"beta": 0.2, "entropy_coef": 0.05}
    call = lambda x: policy_loss(x, *rest, ref_logprob=ref, backend="torch", **how)[0]  # noqa: E731
    assert torch.autograd.gradcheck(call, logits.cpu().requires_grad_())


@pytest.mark.parametrize(
    "bad, match",
    [
        ({"kl": "k4"}, "kl: "),
        ({"beta": 0.1}, "beta: "),
        ({"clip_low": -0.1}, "clip_low"),
        ({"ref_logprob": torch.zeros(3)}, "ref_logprob: "),
        ({"advantages": torch.zeros(2, 1)}, "advantages: "),
        ({"weights": None}, "weights: "),
        ({"temperature": 0}, "temperature: "),
        ({"targets": torch.zeros(3, dtype=torch.long)}, "targets: "),
    ],
)
def test_bad_arguments(bad, match):
    good = {"logits": torch.zeros(2, 5), "targets": torch.tensor([0, 1]), "old_logprob": None}
    with pytest.raises(ValueError, match=f"^{match}.*valid: "):
        policy_loss(**good | {"advantages": torch.zeros(2), "weights": torch.ones(2)} | bad)


@pytest.mark.gpu
def test_a_step_touches_no_second_copy_of_the_logits_on_a_gpu():
    T, V = 4096, 151_936
    leaf = torch.randn(T, V, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    targets, ones = torch.zeros(T, dtype=torch.long, device="cuda"), torch.ones(T, device="cuda")
    logits = leaf * 1
    base = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    loss, _ = policy_loss(logits, targets, None, ones, ones / T, entropy_coef=0.01, inplace=True)
    (grad,) = torch.autograd.grad(loss, logits)
    assert grad.data_ptr() == logits.data_ptr() and torch.cuda.max_memory_allocated() - base < 2e6


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_reference_that_is_nan_is_seen_and_has_no_part_at_weight_0(backend):
    logits, targets, one = torch.randn(5, 37, device=DEVICE), torch.arange(5, device=DEVICE), torch.ones(5, device=DEVICE)
    ref = torch.full((5,), -3.0, device=DEVICE)
    ref[0] = torch.nan
    for kl in ("k1", "k2", "k3"):
        how = dict(ref_logprob=ref, kl=kl, backend=backend)
        loss, stats = policy_loss(logits, targets, -one, one, one, beta=0.1, **how)
        assert loss.isnan() and stats.kl.isnan().tolist() == [True] + 4 * [False]
        assert policy_loss(logits, targets, -one, one, one, beta=0.0, **how)[0].isfinite()  # only measured
        weights, x = torch.where(targets == 0, 0.0, one), logits.clone().requires_grad_()
        loss, _ = policy_loss(x, targets, -one, one, weights, beta=0.1, **how)
        loss.backward()
        rest, _ = policy_loss(logits[1:], targets[1:], -one[1:], one[1:], one[1:], beta=0.1, **{**how, "ref_logprob": ref[1:]})
        assert loss.item() == pytest.approx(rest.item(), rel=1e-5) and x.grad.isfinite().all() and not x.grad[0].any()
