"""The maths of train.py against worked values, and its invariants on a tiny random model."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers import byte_tokenizer, saved_model, score, tiny_model

import eval as evaluation
import train
from nanoragen.kernels.advantage import group_advantages
from nanoragen.policy import scoring
from nanoragen.policy.batches import make_batch, split_by_length
from nanoragen.policy.scoring import micro_batch
from nanoragen.rollout.episodes import Episode, Turn
from train import Config, check, kl_estimate, policy_loss, score_all, update


def episodes(count=8, seed=0, vocab=200):
    """Episodes of one or two turns, uneven, with observation ids between."""
    rng = np.random.default_rng(seed)
    found = []
    for i in range(count):
        ids, mask, turns = rng.integers(10, vocab, size=5 + i % 3).tolist(), [], []
        mask = [0] * len(ids)
        for _ in range(1 + i % 2):
            start, n = len(ids), int(rng.integers(1, 9))
            ids += rng.integers(10, vocab, size=n).tolist() + rng.integers(10, vocab, size=3).tolist()
            mask += [1] * n + [0] * 3
            turns.append(Turn(start, start + n, start + n, "", "", [], True, float(rng.normal())))
        found.append(Episode("x", 0, i // 4, ids, mask, turns))
    return found


@pytest.fixture
def tiny():
    tokenizer = byte_tokenizer()
    return tiny_model(tokenizer), tokenizer


def gradient(model, found, rows, advantage, c, reference=None):
    """The gradient that one update would apply, captured before the optimiser. advantage: [B] of episodes or [B, T]."""
    grads = {}

    class Spy:
        def step(self):
            grads.update({n: p.grad.clone() for n, p in model.named_parameters()})

        def zero_grad(self, set_to_none=True):
            model.zero_grad(set_to_none=True)

    batch, rows = make_batch(found, 0), torch.tensor(rows)
    ref = score_all(reference, batch, rows, c) if reference is not None else None
    advantage = advantage if advantage.ndim == 2 else advantage[:, None] * batch.mask
    log = update(model, Spy(), Spy(), batch, advantage, rows, ref, c, np.random.default_rng(0), lambda text: None)
    return torch.cat([g.flatten() for g in grads.values()]), log


def settings(**more):
    return Config(minibatches=1, max_grad_norm=1e9, **more)


def test_token_weights_make_a_sequence_mean():
    """Episode A: 4 tokens of loss 1; B: 1 token of loss 6. Sequence mean 3.5, not the token mean 2."""
    advantage = torch.tensor([-1.0] * 4 + [-6.0])
    weight = torch.tensor([1 / (4 * 2)] * 4 + [1 / (1 * 2)])
    zero = torch.zeros(5)
    loss, _ = policy_loss(zero, zero, advantage, weight, zero, None, Config())
    assert loss.item() == pytest.approx(3.5)


@pytest.mark.parametrize(
    "ratio, advantage, want",
    [(1.5, 1.0, -1.2), (1.5, -1.0, 1.5), (0.5, 1.0, -0.5), (0.5, -1.0, 0.8), (1.1, 2.0, -2.2)],
)
def test_clipping_takes_the_worse_of_the_two(ratio, advantage, want):
    one, log_ratio = torch.ones(1), torch.tensor([ratio]).log()
    loss, _ = policy_loss(log_ratio, torch.zeros(1), advantage * one, one, 0 * one, None, Config())
    assert loss.item() == pytest.approx(want, rel=1e-5)


def test_kl_estimates():
    policy = torch.zeros(1)
    assert kl_estimate(policy, torch.tensor([0.5]), "k3").item() == pytest.approx(0.148721, abs=1e-6)
    assert kl_estimate(policy, torch.tensor([0.5]), "k2").item() == pytest.approx(0.125)
    assert kl_estimate(policy, torch.tensor([0.5]), "k1").item() == pytest.approx(-0.5)
    for kind in ("k1", "k2", "k3"):
        assert kl_estimate(policy, policy, kind).item() == 0
        far = torch.zeros(1, requires_grad=True)
        kl = kl_estimate(far, torch.tensor([100.0]), kind)
        kl.backward()
        assert torch.isfinite(kl) and torch.isfinite(far.grad)


def test_score_is_the_teacher_forced_log_softmax(tiny):
    model, _ = tiny
    found = episodes()
    batch = make_batch(found, 0)
    rows = torch.tensor([5, 0, 3])
    logprob, entropy = score(model, batch, rows, 0.7)
    want = []
    for r in rows.tolist():  # each alone, unpadded
        ids = torch.tensor([found[r].ids])
        table = torch.log_softmax(model(ids).logits[0].double() / 0.7, -1)
        want += [table[t - 1, ids[0, t]].item() for t in range(1, ids.shape[1]) if found[r].mask[t]]
    assert logprob.tolist() == pytest.approx(want, abs=1e-4)
    owner = micro_batch(model, batch, rows).row_of_token()
    assert owner.tolist() == [r for r in rows.tolist() for _ in range(found[r].num_tokens)]


def test_on_policy_loss_is_zero_and_the_gradient_is_not(tiny):
    """What users take for a dead run: the ratio is 1, advantages sum to 0, and yet there is a gradient."""
    model, _ = tiny
    found = episodes(4)
    advantage = torch.tensor([1.0, -1.0, 0.5, -0.5])
    grad, log = gradient(model, found, range(4), advantage, settings())
    assert abs(log["loss"]) < 1e-6 and grad.norm() > 1e-3 and log["clip_ratio/region_mean"] == 0 and abs(log["approx_kl"]) < 1e-6


def test_micro_batches_change_nothing(tiny):
    model, _ = tiny
    found, advantage = episodes(8), torch.linspace(-1, 1, 8)
    want, _ = gradient(model, found, range(8), advantage, settings(micro_batch=8, entropy_coef=0.1))
    for size in (1, 3, 4):
        got, _ = gradient(model, found, range(8), advantage, settings(micro_batch=size, entropy_coef=0.1))
        assert (got - want).norm() < 1e-5 * want.norm()


@pytest.mark.parametrize("beta", [0.0, 0.1])
def test_dropped_groups_dilute_nothing(tiny, beta):
    """Two kept and two dropped groups give the gradient of the kept two alone; KL and entropy included."""
    model, tokenizer = tiny
    other = tiny_model(tokenizer, seed=1)
    found, c = episodes(16), settings(beta=beta, entropy_coef=0.05)
    rewards = torch.tensor([0.0, 1, 0, 1] + [0.5] * 4 + [1.0, 0, 0, 0] + [2.0] * 4)
    ids = torch.arange(4).repeat_interleave(4)
    kept = group_advantages(rewards, ids, filter="top_p", filter_value=1.0, include_zero=False)
    assert kept.keep.tolist() == [True, False, True, False]
    rows = [0, 1, 2, 3, 8, 9, 10, 11]

    reference = other if beta else None
    got, _ = gradient(model, found, rows, kept.advantages, c, reference)
    alone = [found[r] for r in rows]
    want, _ = gradient(model, alone, range(8), kept.advantages[rows], c, reference)
    assert (got - want).norm() < 1e-5 * want.norm()
    for scale, factor in (("linear", 0.5), ("sqrt", 0.707107)):
        scaled, _ = gradient(model, found, rows, kept.advantages, replace(c, filter_loss_scale=scale), reference)
        assert (scaled - factor * want).norm() < 1e-5 * want.norm()


@pytest.mark.parametrize("aggregation", ["seq_mean_token_mean", "token_mean", "seq_mean_token_sum", "seq_mean_token_sum_norm"])
def test_episodes_without_advantage_are_not_run_and_still_count(tiny, monkeypatch, aggregation):
    """The gradient is that of the loss over all eight, written out; with a bonus, whose gradient is not 0, all are run."""
    model, _ = tiny
    found, advantage = episodes(8), torch.tensor([0.5, -1.0, 0, 0, 0, 0, 0, 2.0])
    c, ran, own = settings(aggregation=aggregation, loss_length=10), [], scoring.token_logprobs
    monkeypatch.setattr(scoring, "token_logprobs", lambda m, micro, *more: (ran.extend(micro.rows.tolist()), own(m, micro, *more))[1])
    got, log = gradient(model, found, range(8), advantage, c)
    assert sorted(ran) == [0, 1, 7] and log["nonfinite_updates"] == 0

    tokens, loss = [e.num_tokens for e in found], 0.0
    weight = {
        "seq_mean_token_mean": [1 / 8 / n for n in tokens],
        "token_mean": [1 / sum(tokens)] * 8,
        "seq_mean_token_sum": [1 / 8] * 8,
        "seq_mean_token_sum_norm": [1 / 80] * 8,
    }[aggregation]
    for e, a, w in zip(found, advantage.tolist(), weight):
        logprob = model(input_ids=torch.tensor([e.ids])).logits[0, :-1].log_softmax(-1)
        chosen = logprob.gather(1, torch.tensor(e.ids)[1:, None])[:, 0][torch.tensor(e.mask)[1:] == 1]
        loss = loss - w * a * chosen.sum()
    model.zero_grad()
    loss.backward()
    want = torch.cat([p.grad.flatten() for p in model.parameters()])
    assert (got - want).norm() < 1e-5 * want.norm()

    ran.clear()
    gradient(model, found, range(8), advantage, replace(c, entropy_coef=0.1))
    assert sorted(ran) == list(range(8))


def test_an_update_of_which_nothing_is_run_still_moves_by_momentum(tiny):
    model, _ = tiny
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.0)
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)
    batch, c = make_batch(episodes(8), 0), Config(minibatches=1)
    updated(model, optimizer, scheduler, batch, torch.linspace(-1, 1, 8), c)
    weight = model.get_input_embeddings().weight
    m, v, before = (t.clone() for t in (*(optimizer.state[weight][k] for k in ("exp_avg", "exp_avg_sq")), weight.detach()))
    log = updated(model, optimizer, scheduler, batch, torch.zeros(8), c)
    assert log["loss"] == 0 and log["grad_norm"] == 0 and "entropy" not in log
    m, v = 0.9 * m, 0.999 * v  # AdamW with a gradient of 0, written out: second step
    want = before - 0.01 * (m / (1 - 0.9**2)) / ((v / (1 - 0.999**2)).sqrt() + 1e-8)
    assert torch.allclose(weight, want, atol=1e-7) and not torch.equal(weight, before)


def test_observation_positions_get_no_gradient(tiny):
    model, _ = tiny
    batch, seen = make_batch(episodes(2), 0), []

    def keep(module, args, out):
        if torch.is_grad_enabled():  # not what a model is asked once about its head
            out.last_hidden_state.retain_grad()
            seen.append(out.last_hidden_state)

    hook = model.base_model.register_forward_hook(keep)
    logprob, entropy = score(model, batch, torch.arange(2), 1.0)
    hook.remove()
    (logprob.sum() + entropy.sum()).backward()
    reached = seen[0].grad.abs().sum(-1) > 0  # [B, T]: whose logits are in the loss
    assert torch.equal(reached[:, :-1], batch.mask[:, 1:]) and not reached[:, -1].any()


def updated(model, optimizer, scheduler, batch, advantage, c):
    rows, rng = torch.arange(len(advantage)), np.random.default_rng(0)
    table = torch.where(batch.mask, advantage[:, None], 0.0)
    return update(model, optimizer, scheduler, batch, table, rows, None, c, rng, lambda text: None)


def test_a_nan_gradient_costs_the_update_and_not_the_weights(tiny):
    model, _ = tiny
    before = [p.clone() for p in model.parameters()]
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer)
    batch, advantage = make_batch(episodes(4), 0), torch.tensor([1.0, float("nan"), 0.0, -1.0])
    log = updated(model, optimizer, scheduler, batch, advantage, settings())
    assert log["nonfinite_updates"] == 1 and all(torch.equal(a, b) for a, b in zip(before, model.parameters()))


def test_a_log_prob_that_is_broken_in_another_process_is_named(tiny, monkeypatch):
    """Under torchrun the process that writes the log may have had none of the broken rows."""
    model, _ = tiny
    monkeypatch.setattr(train.distributed, "add_up", lambda total: total | {"loss": float("nan")})
    monkeypatch.setattr(train.distributed, "first", lambda item: item or "log-prob")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer)
    log = updated(model, optimizer, scheduler, make_batch(episodes(4), 0), torch.tensor([1.0, 0.5, 0.0, -1.0]), settings())
    assert log["nonfinite"] == "log-prob of update 1/1"


def test_several_minibatches_use_the_probabilities_from_before_the_first(tiny):
    model, _ = tiny
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)
    batch, advantage = make_batch(episodes(8), 0), torch.tensor([1.0, -1] * 4)
    c = Config(minibatches=2, epochs=2, max_grad_norm=1e9)
    log = updated(model, optimizer, scheduler, batch, advantage, c)
    assert log["approx_kl"] > 1e-6  # the ratio left 1 after the first minibatch


def test_split_rows_cover_every_row_once():
    batch = make_batch(episodes(8), 0)
    parts = split_by_length(batch, torch.tensor([7, 1, 4, 2, 0]), 2)
    assert sorted(torch.cat(parts).tolist()) == [0, 1, 2, 4, 7] and max(map(len, parts)) == 2


@pytest.mark.parametrize(
    "bad, key",
    [({"groups": 0}, "groups"), ({"group_size": 1}, "group_size"), ({"env": "sokobam"}, "sokoban"), ({"temperature": 0.0}, "temperature"),
     ({"filter_value": 1.5}, "filter_value"), ({"model": "./no-such-folder"}, "model"), ({"env_options": "boxs=2"}, "boxes"),
     ({"lr": float("nan")}, "lr"), ({"env_timeout": float("nan")}, "env_timeout"), ({"env_timeout": 1e-9}, "env_timeout"),
     ({"seed": 10**20}, "seed"), ({"format_penalty": 5.0}, "format_penalty"), ({"clip_low": 2.0}, "clip_low"), ({"beta": float("nan")}, "beta"), ({"entropy_coef": float("nan")}, "entropy_coef"),
     *(({k: v}, f"^{k}: .*valid: ") for k, v in {
         "steps": 10**10, "groups": 10**9, "max_tokens": 10**10, "lr": 1e30, "weight_decay": 1e300, "reward_noise": 1e300, "lora": 10**8,
         "env_timeout": 1e300, "temperature": 1e-30, "format_penalty": -1e300, "filter_eps": 2.0, "final_episodes": 1_000_001,
         "critic_lr": 1.0, "kl": "k1", "quantile": 0.7, "device": "meta"}.items()),
     ({"groups": 10**5}, "^final_episodes: "), ({"filter": "none", "filter_value": 0.5}, "^filter_value: 0.5 with --filter none"),
     ({"filter": "none", "filter_metric": "success_std"}, "^filter_metric: "), ({"filter": "none", "filter_include_zero": True}, "^filter_inc"),
     ({"filter": "top_k", "filter_mode": "softmax"}, "^filter_mode: "), ({"filter": "top_k_abs", "filter_value": 1.5}, "a whole number"),
     ({"device": "cuda:x"}, "^device: "), ({"weight_decay": float("inf")}, "weight_decay"), ({"format_penalty": float("nan")}, "format_penalty"), ({"log": "wandbb"}, "log")],
)  # fmt: skip
def test_settings_that_cannot_work_are_named(bad, key):
    with pytest.raises(ValueError, match=key):
        check(Config(**bad))


def test_learning_rate_schedule():
    c = Config(lr_warmup=4, lr_schedule="linear")
    assert train.learning_rate(0, 100, c) == pytest.approx(0.2) and train.learning_rate(50, 100, c) == pytest.approx(0.5)
    assert train.learning_rate(50, 100, Config(lr_schedule="constant")) == 1.0


def test_a_reply_as_long_as_the_context_is_refused(tiny):
    from nanoragen.policy.support import max_positions
    from nanoragen.run.settings import check_context

    model, _ = tiny  # 2048 positions
    with pytest.raises(ValueError, match="^max_tokens: 64 with --max_context 64; valid: below 64"):
        check(Config(max_context=64))
    with pytest.raises(ValueError, match="^max_tokens: 2048 with the context of nano 2048; valid"):
        check_context(Config(max_tokens=2048), max_positions(model))
    check(Config(max_context=65))
    check_context(Config(max_tokens=2047), max_positions(model))


def test_a_reply_as_long_as_the_context_of_mpt_is_refused():
    from transformers import MptConfig

    from nanoragen.policy.support import max_positions
    from nanoragen.run.settings import check_context

    model = SimpleNamespace(config=MptConfig(max_seq_len=64))
    with pytest.raises(ValueError, match="^max_tokens: 64 with the context of nano 64; valid"):
        check_context(Config(), max_positions(model))


def test_slow_rollouts_are_told_of_once(tmp_path, capsys):
    """GPT-1 has no cache; it trains all the same."""
    saved_model(tmp_path / "m", kind="gpt1")
    few = ["--env", "bandit", "--model", str(tmp_path / "m"), "--max_tokens", "4"]
    small = ["--steps", "2", "--groups", "2", "--group_size", "2", "--final_episodes", "2", "--filter", "none"]
    train.main([*few, *small, "--out", str(tmp_path / "run")])
    told = "rollouts encode every context anew each turn: OpenAIGPTLMHeadModel takes no cache"
    assert capsys.readouterr().out.count(told) == 1
    evaluation.main([*few, "--episodes", "2", "--out", str(tmp_path / "e")])
    assert capsys.readouterr().out.count(told) == 1
    evaluation.main(["--env", "bandit", "--max_tokens", "4", "--episodes", "2", "--out", str(tmp_path / "e")])
    assert "anew" not in capsys.readouterr().out


def test_only_groups_that_can_vary_count_in_the_log():
    """Group 0 varies (std of 0 and 2: sqrt 2), 1 does not, 2 has one episode left, 3 none."""
    from nanoragen.learning.advantages import group_metrics

    ids = torch.tensor([0, 1, 2, 1, 0])
    found = group_metrics(group_advantages(torch.tensor([0.0, 1.0, 5.0, 1.0, 2.0]), ids, num_groups=4), ids)
    assert found["rollout/in_group_reward_std"] == pytest.approx(2**0.5 / 2) and found["rollout/zero_variance_ratio"] == 0.5
    assert found["rollout/groups"] == 4
    alone = group_metrics(group_advantages(torch.tensor([1.0, 2.0]), torch.tensor([0, 1]), num_groups=2), torch.tensor([0, 1]))
    assert "rollout/in_group_reward_std" not in alone and "rollout/zero_variance_ratio" not in alone


@pytest.mark.parametrize("beta", ["0", "0.1"])
def test_where_nobody_watches_there_is_a_line_a_step_and_no_bar(beta, tmp_path, monkeypatch, capsys):
    """Nor is a phase named that is not run: without KL there is no reference model."""
    import tqdm

    phases, show = [], tqdm.tqdm.set_description_str
    monkeypatch.setattr(tqdm.tqdm, "set_description_str", lambda self, text, *more: (phases.append(text), show(self, text, *more)))
    small = ["--steps", "2", "--groups", "2", "--group_size", "2", "--max_tokens", "8", "--final_episodes", "2", "--mi_every", "0"]
    train.main(["--env", "bandit", *small, "--filter", "none", "--beta", beta, "--out", str(tmp_path / "run")])
    said = capsys.readouterr()
    assert said.err == "" and "\r" not in said.out  # captured: no terminal
    assert [line[:9] for line in said.out.splitlines() if line.startswith("step ")] == ["step    1", "step    2"]
    assert ("reference" in phases) == (beta != "0") and {"rollout", "save"} <= set(phases)
