"""Gradient norms by reward variance: against autograd on each bucket's own loss in float64, and without a trace in the run."""

import itertools
import random

import numpy as np
import pytest
import torch
from helpers import byte_tokenizer, moments, timeless, tiny_model
from safetensors.torch import load_file

import train
from nanoragen.policy.batches import make_batch
from nanoragen.rollout.episodes import Episode, Turn
from nanoragen.science.gradients import add, buckets, gradients, measure, norm, signal_to_noise

GROUPS, SIZE, TEMPERATURE = 7, 4, 0.7


def uneven_episodes():
    rng, found = np.random.default_rng(0), []
    for i in range(GROUPS * SIZE):
        start, end = 4 + i % 3, 5 + i % 3 + int(rng.integers(0, 8))
        mask = [0] * start + [1] * (end - start) + [0, 0, 1]
        turns = [Turn(a, b, b, "", "", [], True, 0.0) for a, b in ((start, end), (end + 2, end + 3))]
        found.append(Episode("x", 0, i // SIZE, rng.integers(10, 200, len(mask)).tolist(), mask, turns))
    return found


def tiny(seed):
    return tiny_model(byte_tokenizer(), "gpt2", seed=seed).double()  # Llama's and Qwen's norms would round to float32


@pytest.fixture(scope="module")
def setting():
    """Seven groups, two of them without variance; a policy and another model as reference, all in float64."""
    model, reference = tiny(0), tiny(1).requires_grad_(False)
    rewards = torch.randn(GROUPS, SIZE, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    rewards *= torch.tensor([3.0, 0, 1, 0.5, 0, 2, 4])[:, None]
    return model, reference, uneven_episodes(), rewards.flatten(), torch.arange(GROUPS).repeat_interleave(SIZE)


def config(micro_batch=3, **more):
    """Neither the coefficients nor the filter count."""
    return train.Config(
        groups=GROUPS, temperature=TEMPERATURE, micro_batch=micro_batch, beta=0.3, entropy_coef=0.2, loss_length=5, **more
    )


OURS = train.token_weight, train.policy_loss


def measured(model, reference, episodes, rewards, ids, c=None):
    return measure(model, reference, None, episodes, rewards, ids, 0, c or config(), *OURS)


def advantages(algo, rewards):
    """From their definitions, and what an episode's loss is: a mean over its tokens, or a sum divided by something."""
    r = rewards.view(GROUPS, SIZE)
    less = r - r.mean(1, keepdim=True)
    return {
        "grpo": (less / (r.std(1, keepdim=True) + 1e-6)).flatten(),
        "dr_grpo": less.flatten() / 5,
        "rloo": torch.stack([r[:, k] - (r.sum(1) - r[:, k]) / (SIZE - 1) for k in range(SIZE)], 1).flatten(),
    }[algo]


def plain_losses(model, reference, episodes, advantages, kind, over_tokens=torch.mean):
    """The three losses from their definitions: one unpadded episode after the other, softmax written out."""
    task = entropy = kl = 0.0
    for e, a in zip(episodes, advantages):
        ids, at = torch.tensor([e.ids]), [t for t in range(1, len(e.ids)) if e.mask[t]]
        tables = [torch.log_softmax(m(ids).logits[0] / TEMPERATURE, -1)[[t - 1 for t in at]] for m in (model, reference)]
        own, ref = (table[range(len(at)), ids[0, at]] for table in tables)
        task = task - a * over_tokens(own) / len(episodes)
        entropy = entropy + (tables[0].exp() * tables[0]).sum(-1).mean() / len(episodes)
        each = {"k1": own - ref, "k2": (own - ref).square() / 2, "k3": (ref - own).exp() - (ref - own) - 1}[kind]
        kl = kl + each.mean() / len(episodes)
    return {"task": task, "entropy": entropy, "kl": kl}


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_norms_are_those_of_autograd_on_each_buckets_loss(setting, kind):
    model, reference, episodes, rewards, ids = setting
    found, std, group = measured(*setting, config(kl=kind)), rewards.view(GROUPS, SIZE).std(1), ids.tolist()
    assert [found[f"grad_norm/{n}/groups"] for n in range(6)] == [1, 1, 1, 1, 1, 2] and sum("/task" in k for k in found) == 6
    order = sorted(range(GROUPS), key=lambda g: (std[g].item(), g))
    for n, members in enumerate([[g] for g in order[:5]] + [order[5:]]):
        rows = [r for r, g in enumerate(group) if g in members]
        losses = plain_losses(model, reference, [episodes[r] for r in rows], advantages("grpo", rewards)[rows], kind)
        for name, loss in losses.items():
            model.zero_grad()
            loss.backward(retain_graph=True)
            want = torch.cat([p.grad.flatten() for p in model.parameters()]).norm().item()
            assert found[f"grad_norm/{n}/{name}"] == pytest.approx(want, rel=1e-9, abs=1e-15), (n, name)
        assert found[f"grad_norm/{n}/std_min"] == pytest.approx(min(std[g].item() for g in members))
        assert found[f"grad_norm/{n}/std_max"] == pytest.approx(max(std[g].item() for g in members))
    model.zero_grad()


@pytest.mark.parametrize("algo, over_tokens", [("grpo", torch.mean), ("dr_grpo", torch.sum), ("rloo", torch.sum)])
def test_advantages_and_weights_are_the_algorithms(setting, algo, over_tokens):
    model, reference, episodes, rewards, _ = setting
    found = measured(*setting, config(algo=algo, filter="top_k_abs", filter_value=1))
    order = rewards.view(GROUPS, SIZE).std(1).argsort(stable=True).tolist()
    for n, g in enumerate(order[:5]):
        rows = slice(g * SIZE, (g + 1) * SIZE)
        task = plain_losses(model, reference, episodes[rows], advantages(algo, rewards)[rows], "k3", over_tokens)["task"]
        want = norm(torch.autograd.grad(task, list(model.parameters())))
        assert found[f"grad_norm/{n}/task"] == pytest.approx(want, rel=1e-6, abs=1e-15)  # RLOO's n / (n - 1) is float32


def test_groups_without_variance_have_no_task_gradient_and_regularisers_do(setting):
    found = measured(*setting)
    for n in (0, 1):  # the two groups of equal rewards
        assert found[f"grad_norm/{n}/std_max"] == 0 and found[f"grad_norm/{n}/task"] == 0 and found[f"grad_norm/{n}/snr"] == 0
        assert found[f"grad_norm/{n}/entropy"] > 1e-3 and found[f"grad_norm/{n}/kl"] > 1e-3
    assert all(found[f"grad_norm/{n}/task"] > 1e-3 for n in range(2, 6))


def test_a_reference_equal_to_the_policy_pulls_nowhere_and_none_is_left_out(setting):
    model, _, *rest = setting
    same = tiny(0)
    for kind in ("k2", "k3"):
        found = measured(model, same, *rest, config(kl=kind))
        assert [found[f"grad_norm/{n}/kl"] for n in range(6)] == [0.0] * 6
    without = measured(model, None, *rest)
    assert without == {k: v for k, v in measured(*setting).items() if not k.endswith("/kl")}


def test_buckets_add_up_to_the_whole(setting):
    model, reference, episodes, rewards, group = setting
    batch = make_batch(episodes, 0)
    advantage = advantages("grpo", rewards)[:, None] * batch.mask

    def parts(groups):
        rows = [r for r, g in enumerate(group) if g in groups]
        halves = [rows[::2], rows[1::2]]
        found = gradients(model, reference, batch, halves, advantage, config(), *OURS)
        flat = {"task": add(found["a"], found["b"]), "entropy": found["entropy"], "kl": found["kl"]}
        return {k: len(rows) / len(group) * torch.cat([g.flatten() for g in v]) for k, v in flat.items()}

    split = [parts(groups) for groups in ((0, 3), (1,), (2, 4, 5, 6))]
    for name, whole in parts(range(GROUPS)).items():
        assert (sum(part[name] for part in split) - whole).norm() < 1e-12 * whole.norm()


def test_micro_batches_change_nothing_and_empty_episodes_are_nobody(setting):
    model, reference, episodes, rewards, ids = setting
    found = measured(*setting)
    assert measured(*setting) == found
    other = measured(*setting, config(micro_batch=50))
    assert all(other[k] == pytest.approx(v, rel=1e-9) for k, v in found.items())
    empty = Episode("x", 0, 1, [11, 12], [0, 0])  # in a group of equal rewards, which it does not change
    more = measured(
        model, reference, [*episodes, empty], torch.cat([rewards, rewards.new_zeros(1)]), torch.cat([ids, ids.new_tensor([1])])
    )
    assert all(more[k] == pytest.approx(v, rel=1e-9) for k, v in found.items())
    assert measured(model, reference, [empty], rewards[:1], ids[:1]) == {}


def test_nothing_is_touched(setting):
    model, reference, *_ = setting
    for i, p in enumerate(model.parameters()):
        p.grad = None if i % 2 else torch.full_like(p, 3.0)
    before = [p.clone() for p in model.parameters()], [p.grad for p in model.parameters()]
    states = torch.get_rng_state(), random.getstate(), repr(np.random.get_state())
    measured(*setting)
    assert all(torch.equal(a, b) for a, b in zip(before[0], model.parameters()))
    for i, (grad, p) in enumerate(zip(before[1], model.parameters())):
        assert p.grad is grad and (grad is None or (grad == 3).all()) and p.requires_grad
    assert torch.equal(states[0], torch.get_rng_state()) and states[1:] == (random.getstate(), repr(np.random.get_state()))
    assert not any(p.requires_grad or p.grad is not None for p in reference.parameters())
    model.zero_grad()


def test_a_run_that_measures_is_the_run_that_does_not(tmp_path):
    """Every other number of the log, the episodes, the weights and the moments, bit for bit."""
    small = ["--env", "frozen_lake", "--steps", "2", "--groups", "4", "--group_size", "3", "--max_turns", "2", "--max_tokens", "24",
             "--final_episodes", "2", "--eval_every", "0", "--beta", "0.1", "--entropy_coef", "0.01"]  # fmt: skip
    lines = {}
    for every in ("0", "1"):
        train.main([*small, "--grad_every", every, "--out", str(tmp_path / every)])
        lines[every] = timeless(tmp_path / every)
    for line, measured in zip(lines["0"], lines["1"]):
        assert {f"grad_norm/{n}/{p}" for n in range(4) for p in ("task", "entropy", "kl", "snr")} <= measured.keys()
        assert line == {k: v for k, v in measured.items() if not k.startswith("grad_norm/")} and line["grad_norm"] >= 0
    assert [lines["1"][0][f"grad_norm/{n}/kl"] for n in range(4)] == [0] * 4 and lines["1"][1]["grad_norm/0/kl"] > 0
    a, b = (tmp_path / every / "step_000002" for every in ("0", "1"))
    assert (a.parent / "rollouts.jsonl").read_bytes() == (b.parent / "rollouts.jsonl").read_bytes()
    x, y = moments(a), moments(b)
    assert x.keys() == y.keys() and all(torch.equal(x[k], y[k]) for k in x)
    weights = [load_file(run / "model.safetensors") for run in (a, b)]
    assert all(torch.equal(weights[0][k], weights[1][k]) for k in weights[0])


@pytest.mark.parametrize(
    "std, want",
    [([0.3, 0.1, 0.2], [[1], [2], [0]]), ([0.0] * 8, [[0], [1], [2, 3], [4], [5], [6, 7]]), ([], []), ([1.0], [[0]]),
     ([5.0, 4, 3, 2, 1, 0, 5, 4, 3, 2, 1, 0], [[5, 11], [4, 10], [3, 9], [2, 8], [1, 7], [0, 6]])],
)  # fmt: skip
def test_buckets(std, want):
    assert buckets(std) == want


@pytest.mark.parametrize("K", [2, 4])
def test_signal_and_noise_of_a_bandit_by_enumeration(K):
    """All K-tuples of a softmax policy over three arms: the expected noise and signal of the docstring, to rounding."""
    p, reward = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64), torch.tensor([1.0, 0.0, 0.4], dtype=torch.float64)
    score = torch.eye(3, dtype=torch.float64) - p  # d log p(arm) / d logits
    task = (p * reward) @ score  # the exact gradient of the expected reward
    for baseline in (False, True):
        noise = power = 0.0
        mean = torch.zeros(3, dtype=torch.float64)
        for arms in itertools.product(range(3), repeat=K):
            chance, r = p[list(arms)].prod().item(), reward[list(arms)]
            terms = (r - r.mean() * baseline)[:, None] * score[list(arms)] / K
            a, b = [terms[::2].sum(0)], [terms[1::2].sum(0)]
            g2, snr = norm(add(a, b)) ** 2, signal_to_noise(a, b, K // 2, K // 2)
            noise += chance * (g2 / (1 + snr) if snr != float("inf") else 0.0)
            power += chance * g2
            mean += chance * (a[0] + b[0])
        signal, truth = power - noise, task.square().sum().item()
        if baseline:
            assert signal == pytest.approx(((1 - 1 / K) ** 2 + 1 / K**2) * truth) and mean.tolist() == pytest.approx(
                ((1 - 1 / K) * task).tolist()
            )
        else:
            assert signal == pytest.approx(truth) and noise == pytest.approx(power - truth)
