"""The algorithms against values worked out by hand: GAE, advantages of episodes, settings; and what they do to a small model.

The loss, and all that TRL or verl computes as well, is compared with them in test_references.py.
"""

import json
from dataclasses import asdict
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from test_references import MASK, REWARD, VALUE, close, wave

import train
from nanoragen.learning.advantages import bi_level_gae, gae, group_relative, group_statistics, last_tokens, token_advantages
from nanoragen.learning.critic import Critic
from nanoragen.policy.batches import Batch, make_batch
from nanoragen.rollout.episodes import Episode, Turn
from nanoragen.run.settings import RAGEN_FILTER, check
from train import ALGORITHMS, Config, token_weight


def test_aggregations_of_a_long_and_a_short_episode():
    """A: 4 tokens of loss 1; B: 1 token of loss 6; at most 8 tokens."""
    length, loss = torch.tensor([4.0, 1.0]), torch.tensor([4 * 1.0, 1 * 6.0])  # sums over tokens
    want = {"seq_mean_token_mean": 3.5, "token_mean": 2.0, "seq_mean_token_sum": 5.0, "seq_mean_token_sum_norm": 0.625}
    for aggregation, value in want.items():
        assert (token_weight(length, Config(aggregation=aggregation, loss_length=8)) * loss).sum() == pytest.approx(value)


# -- GAE, by hand --------------------------------------------------------------------------------------------------------


def table(*rows):
    return torch.tensor(rows, dtype=torch.float64)


def test_gae_by_hand_and_gaps_are_passed_over():
    """delta = -0.14, 0.14, 0.4 and gamma lam = 0.45."""
    got = gae(table([0, 0, 1]), table([0.5, 0.4, 0.6]), torch.ones(1, 3).bool(), 0.9, 0.5)
    close(got.tolist(), [[0.004, 0.32, 0.4]], 1e-12)
    mask = table([0, 1, 0, 0, 1, 1, 0]).bool()
    gaps = gae(table([0, 0, 0, 0, 0, 1, 0]), table([9, 0.5, 9, 9, 0.4, 0.6, 9]), mask, 0.9, 0.5)
    close(gaps.tolist(), [[0, 0.004, 0, 0, 0.32, 0.4, 0]], 1e-12)


def test_bi_level_gae_by_hand():
    """Two turns of two tokens; the first earns nothing, and is a turn all the same.

    Turns: A1 = 1 - 0.4 = 0.6; A0 = 0.95 * 0.4 - 0.2 + 0.95 * 0.6 = 0.75. Tokens: 0.6 + (0.4 - 0.3), 0.75 + (0.2 - 0.1).
    """
    turn, value = torch.tensor([[-1, 0, 0, -1, 1, 1, -1]]), table([0, 0.1, 0.2, 0, 0.3, 0.4, 0])
    got = bi_level_gae(table([0, 0, 0, 0, 0, 1, 0]), value, turn, 1.0, 1.0, 0.95, 1.0)
    close(got.tolist(), [[0, 0.85, 0.75, 0, 0.7, 0.6, 0]], 1e-12)
    # gamma 0.5, lam 0.8, turn_gamma 0.9, turn_lam 0.5: A0 = 0.9 * 0.4 - 0.2 + 0.45 * 0.6 = 0.43
    # first tokens: 0.5 * 0.4 - 0.3 + 0.4 * 0.6 = 0.14; 0.5 * 0.2 - 0.1 + 0.4 * 0.43 = 0.172
    got = bi_level_gae(table([0, 0, 0, 0, 0, 1, 0]), value, turn, 0.5, 0.8, 0.9, 0.5)
    close(got.tolist(), [[0, 0.172, 0.43, 0, 0.14, 0.6, 0]], 1e-12)


def test_bi_level_gae_on_the_example_in_ragens_source():
    """Ten tokens, turns of five, reward 1 each, V = 0.1 ... 1.0, turn_gamma 0.95: returns 1.95 and 1 less the value."""
    turn, value = torch.tensor([[0] * 5 + [1] * 5]), table([n / 10 for n in range(1, 11)])
    got = bi_level_gae(table([0, 0, 0, 0, 1, 0, 0, 0, 0, 1]), value, turn, 1.0, 1.0, 0.95, 1.0)
    close(got.tolist(), [[1.85, 1.75, 1.65, 1.55, 1.45, 0.4, 0.3, 0.2, 0.1, 0.0]], 1e-12)


def test_one_turn_makes_both_kinds_of_gae_the_same():
    turn = torch.where(MASK, 0, -1)
    turn[:, 3] = torch.where(MASK[:, 3], 0, turn[:, 3])
    turn, mask = turn[2:3], MASK[2:3]  # the row without gaps
    reward, value = REWARD[2:3] + table([0] * 8 + [1.5]), VALUE[2:3]
    close(bi_level_gae(reward, value, turn, 0.9, 0.7, 0.5, 0.5).tolist(), gae(reward, value, mask, 0.9, 0.7).tolist(), 1e-12)


def test_turns_end_at_their_last_token_whatever_they_earn():
    turn = torch.tensor([[-1, 0, 0, -1, 1, 2, 2], [0, -1, -1, 1, 1, 1, -1]])
    assert last_tokens(turn).long().tolist() == [[0, 0, 1, 0, 1, 0, 1], [1, 0, 0, 0, 0, 1, 0]]


# -- advantages of episodes ------------------------------------------------------------------------------------------------


def episode(*rewards, tokens=2, parsed=(), group=0, success=False):
    """An episode whose turns earn these rewards, `tokens` sampled ids each, one id between."""
    ids, mask, turns = [1, 2, 3], [0, 0, 0], []
    for i, r in enumerate(rewards):
        start = len(ids)
        ids, mask = ids + [7] * tokens + [4], mask + [1] * tokens + [0]
        turns.append(Turn(start, start + tokens, start + tokens, "", "", [], i not in parsed, r))
    return Episode("x", 0, group, ids, mask, turns, success=success)


def estimate(episodes, value=None, noise=0.0, **settings):
    """(advantage of every turn of every episode, GroupAdvantages) under some settings, groups as the episodes say."""
    ids = torch.tensor([e.group for e in episodes])
    c = Config(**{"groups": int(ids.max()) + 1, "filter": "none", **settings})
    check(c)
    rewards, batch = torch.tensor([e.reward for e in episodes]) + torch.tensor(noise), make_batch(episodes, 0)
    found = group_statistics(c, episodes, rewards, ids)
    rows = torch.tensor([i for i, e in enumerate(episodes) if found.keep[e.group] and e.num_tokens], dtype=torch.long)
    tokens, returns = token_advantages(c, found, episodes, rewards, ids, batch, rows, value)
    assert not tokens[~batch.mask].any() and returns is None or value is not None
    for row, e in enumerate(episodes):  # the tokens of a turn are alike, unless a critic tells them apart
        for t in e.turns if value is None else ():
            assert tokens[row, t.start : t.end].unique().numel() == 1
    return [[tokens[row, t.start].item() for t in e.turns] for row, e in enumerate(episodes)], found


def test_step_penalties_reach_the_advantage():
    got, _ = estimate([episode(-0.1, -0.1, -0.1), episode(*[-0.1] * 5)])
    assert got[0] == pytest.approx([0.70710] * 3, abs=1e-4) and got[1] == pytest.approx([-0.70710] * 5, abs=1e-4)


def test_an_episode_counts_once_in_its_baseline_however_many_turns_it_has():
    got, _ = estimate([episode(1.0), episode(*[0.0] * 5)], scale="none")
    assert got[0] == pytest.approx([0.5]) and got[1] == pytest.approx([-0.5] * 5)  # not 1 - 1/6
    got, _ = estimate([episode(1.0), episode(*[0.0] * 5)], scale="none", credit="turn")
    assert got[0] == pytest.approx([0.5]) and got[1] == pytest.approx([-0.5, 0, 0, 0, 0])


def test_credit_by_turn_by_hand():
    """Returns-to-go [3, 2] and [0.5, 0 (over)]: less their means 1.25, -1.25 and 1; std of 3 and 0.5 is 1.767767."""
    pair = [episode(1.0, 2.0), episode(0.5)]
    got, _ = estimate(pair, scale="none", credit="turn")
    assert got[0] == pytest.approx([1.25, 1.0]) and got[1] == pytest.approx([-1.25])
    got, _ = estimate(pair, credit="turn")
    assert got[0] == pytest.approx([0.7071064, 0.5656851], abs=1e-6) and got[1] == pytest.approx([-0.7071064], abs=1e-6)
    got, _ = estimate(pair, algo="rloo", credit="turn")
    assert got[0] == pytest.approx([2.5, 2.0]) and got[1] == pytest.approx([-2.5])


def test_at_the_first_turn_credit_by_turn_is_credit_by_episode():
    rng = np.random.default_rng(0)
    several = [episode(*rng.normal(size=1 + i % 4), group=i % 3) for i in range(12)]
    whole, turn = (estimate(several, credit=credit)[0] for credit in ("episode", "turn"))
    assert [t[0] for t in turn] == pytest.approx([w[0] for w in whole], abs=1e-6)


def test_noise_on_the_reward_of_an_episode_comes_with_its_last_turn():
    pair, noise = [episode(1.0, 2.0), episode(0.5)], [0.5, -0.25]
    got, _ = estimate(pair, noise=noise, scale="none", credit="turn")
    want, _ = estimate([episode(1.0, 2.5), episode(0.25)], scale="none", credit="turn")
    assert got[0] == pytest.approx(want[0]) and got[1] == pytest.approx(want[1])


def test_equal_returns_earned_at_different_times_are_no_signal():
    got, found = estimate([episode(1.0, 0.0), episode(0.0, 1.0)], credit="turn")
    assert found.std.item() == 0 and got == [[0, 0], [0, 0]]


def test_rloo_with_groups_of_different_sizes():
    several = [episode(r, group=g) for r, g in ((1.0, 0), (2.0, 0), (6.0, 0), (1.0, 1), (4.0, 1), (5.0, 2))]
    got, _ = estimate(several, algo="rloo")
    assert [a for (a,) in got] == pytest.approx([1 - 4, 2 - 3.5, 6 - 1.5, -3, 3, 0])


@pytest.mark.parametrize("successes, signs", [(1, [1, 0, 0, 0]), (2, [1, 1, 0, 0]), (3, [0, 0, 0, -1])])
def test_the_quantile_baseline_has_two_regimes(successes, signs):
    """QAE with K = 0.4: a success rate up to 0.6 rewards the successes, above it blames the failures; the rest gets 0."""
    several = [episode(float(i < successes)) for i in range(4)]
    got, found = estimate(several, baseline="quantile", quantile=0.4)
    assert [a for (a,) in got] == pytest.approx([s / (found.std.item() + 1e-6) for s in signs], abs=1e-5)


def test_per_reward_normalisation_sees_what_the_sum_hides():
    """Task reward 1 with bad format and 0.9 with good format sum to the same; each by itself they differ (GDPO)."""
    several = [episode(0.9, parsed=()), episode(0.9), episode(1.0 - 0.1, parsed=(0,)), episode(0.0)]
    assert estimate(several)[0][1] == estimate(several)[0][2]
    got, _ = estimate(several, scale="per_reward")
    task, manners = torch.tensor([0.9, 0.9, 1.0, 0.0]), torch.tensor([0, 0, -0.1, 0])
    want = sum((r - r.mean()) / (r.std() + 1e-6) for r in (task, manners))
    want = (want - want.mean()) / want.repeat(2).std()  # over tokens, of which each has two
    assert [a for (a,) in got] == pytest.approx(want.tolist(), abs=1e-5)


def test_per_reward_normalisation_of_equal_task_rewards_is_the_format_alone():
    """2.2 each for the task, all but exactly: what rounding leaves is not blown up by a std next to 0."""
    several = [episode(2.2), episode(2.2), episode(2.2, -0.1, parsed=(1,))]
    found = SimpleNamespace(keep=torch.ones(1).bool(), std=torch.ones(1), advantages=torch.zeros(3))
    rewards, penalties = torch.tensor([e.reward for e in several]), torch.tensor([0.0, 0.0, -0.1])
    got = group_relative(Config(scale="per_reward"), found, rewards, torch.zeros(3, 1), penalties, torch.zeros(3).long())
    assert got[:, 0].tolist() == pytest.approx([0.577340, 0.577340, -1.154681], abs=1e-5)  # of the penalties, std 0.057735


def test_soft_reweighting_counts_a_group_by_its_spread():
    several = [episode(r, group=g) for r, g in ((0.0, 0), (1.0, 0), (0.0, 1), (4.0, 1), (2.0, 2), (2.0, 2))]
    got, _ = estimate(several, scale="none", soft_reweight=True)
    assert [a for (a,) in got] == pytest.approx([-0.125, 0.125, -2, 2, 0, 0], abs=1e-5)


def test_failures_with_worse_manners_pass_a_reward_filter_but_not_a_success_filter():
    failed = [episode(r, group=0) for r in (0.0, -0.1, 0.0, -0.1)]
    several = [*failed, episode(1.0, group=1, success=True), episode(0.0, group=1)]
    for metric, want in (("reward_std", [True, True]), ("success_std", [False, True])):
        got, found = estimate(several, filter="top_p", filter_value=1.0, filter_metric=metric)
        assert found.keep.tolist() == want and any(a for (a,) in got[:4]) == want[0] and got[4][0] > 0


def test_a_critic_that_knows_nothing_leaves_plain_returns():
    several = [episode(1.0, 2.0), episode(0.5, 0.0, -1.0)]
    nothing = torch.zeros(make_batch(several, 0).ids.shape)
    assert estimate(several, nothing, algo="ppo", scale="none")[0] == [[3, 2], pytest.approx([-0.5, -1, -1])]
    assert estimate(several, nothing, algo="ppo", scale="none", credit="episode")[0] == [[3, 3], pytest.approx([-0.5] * 3)]


def test_batch_scale_is_mean_0_and_variance_1_over_the_tokens_that_train():
    several = [episode(r, group=g, tokens=n) for r, g, n in ((1.0, 0, 3), (0.0, 0, 1), (5.0, 1, 2), (5.0, 1, 2))]
    (a,), (b,), *dropped = estimate(several, scale="batch", filter="top_p", filter_value=1.0)[0]
    assert dropped == [[0], [0]]
    assert 3 * a + b == pytest.approx(0, abs=1e-6) and (3 * a * a + b * b) / 3 == pytest.approx(1, abs=1e-5)


# -- settings ----------------------------------------------------------------------------------------------------------


def test_the_table_is_what_the_papers_say_and_a_flag_that_is_given_wins():
    for algo, row in ALGORITHMS.items():
        c = Config(algo=algo)
        assert tuple(getattr(c, k) for k in train.COLUMNS) == row
        check(c)
        again = Config(**json.loads(json.dumps(asdict(c))))  # as a resumed run reads it
        assert again == c
    c = Config(algo="dapo", aggregation="seq_mean_token_sum", clip_high=0.4, baseline="others")
    assert (c.aggregation, c.clip_high, c.baseline) == ("seq_mean_token_sum", 0.4, "others")
    assert (c.scale, c.clip_low) == ("std", 0.2)


@pytest.mark.parametrize(
    "bad, key",
    [({"group_size": 1}, "group_size"), ({"algo": "ppo", "group_size": 1}, "group_size"),
     ({"algo": "ppo", "scale": "std"}, "scale"), ({"algo": "ppo", "scale": "per_reward"}, "scale"),
     ({"baseline": "quantile", "credit": "turn"}, "credit"), ({"scale": "per_reward", "credit": "turn"}, "scale"),
     ({"bi_level": True}, "bi_level"), ({"gamma": 0.9}, "gamma"), ({"algo": "ppo", "turn_gamma": 0.9}, "turn_gamma"),
     ({"value_clip": 0.5}, "value_clip"), ({"loss_length": 9}, "loss_length"), ({"clip_low": -1.0}, "clip_low"),
     ({"clip_high": float("nan")}, "clip_high"), ({"algo": "ppo", "lam": 1.5}, "lam"),
     ({"filter_eps": 0.1, "filter": "min_p"}, "filter_eps"),
     ({"filter": "ragen", "filter_value": 0.5}, "filter_value"), ({"filter": "ragen", "filter_mode": "softmax"}, "filter_mode")],
)  # fmt: skip
def test_contradictions_are_one_line(bad, key):
    with pytest.raises(ValueError, match=f"^{key}: .*; valid: ") as error:
        check(Config(**bad))
    assert "\n" not in str(error.value)


def test_ppo_needs_no_group():
    check(Config(algo="ppo", group_size=1, filter="none"))


def test_the_papers_filter_in_one_word():
    """Linear top_p 0.9 with eps 0.01: of reward stds 0.6, 0.3, 0.1, 0 (sum 1) those before whose turn less than 0.89 is kept."""
    c = Config(filter="ragen", groups=5)
    assert {k: getattr(c, k) for k in RAGEN_FILTER} == RAGEN_FILTER
    spread = [0.6, 0.295, 0.1, 0.0, 0.005]
    rewards = torch.tensor([x for s in spread for x in (0.0, s * 2**0.5)])
    ids = torch.arange(5).repeat_interleave(2)
    assert group_statistics(c, [], rewards, ids).keep.tolist() == [True, True, False, False, False]  # 0.895 is enough
    strict = Config(filter="top_p", groups=5)
    assert group_statistics(strict, [], rewards, ids).keep.tolist() == [True, True, True, False, False]  # and here is not


def test_dapo_never_trains_on_equal_rewards():
    rewards, ids = torch.tensor([0.0, 1.0, 2.0, 2.0]), torch.tensor([0, 0, 1, 1])
    for algo, want in (("dapo", [True, False]), ("grpo", [True, True])):
        assert group_statistics(Config(algo=algo, filter="none", groups=2), [], rewards, ids).keep.tolist() == want


# -- on a model ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def model():
    from helpers import byte_tokenizer, tiny_model

    return tiny_model(byte_tokenizer())


@pytest.mark.parametrize("algo", ALGORITHMS)
def test_micro_batch_size_row_order_and_padding_change_no_gradient(model, algo, monkeypatch):
    from test_train import episodes, gradient

    found, advantage = episodes(8), wave(1.0, 0.3)[:2, :8].reshape(-1)[:8].float()
    base = {"algo": algo, "minibatches": 1, "max_grad_norm": 1e9, "entropy_coef": 0.1, "loss_length": 20}
    want, _ = gradient(model, found, range(8), advantage, Config(**base, micro_batch=8))
    for limits in ({"micro_batch": 1}, {"micro_batch": 3}, {"micro_tokens": 30}, {"micro_batch": 2, "micro_tokens": 45}):
        got, _ = gradient(model, found, range(8), advantage, Config(**base, **limits))
        assert (got - want).norm() < 1e-5 * want.norm()
    order = [3, 7, 0, 5, 1, 6, 2, 4]
    got, _ = gradient(model, [found[i] for i in order], range(8), advantage[order], Config(**base, micro_batch=4))
    assert (got - want).norm() < 1e-5 * want.norm()
    trimmed = Batch.select
    monkeypatch.setattr(Batch, "select", lambda self, rows: _padded(trimmed(self, rows), 7))
    got, _ = gradient(model, found, range(8), advantage, Config(**base, micro_batch=8))
    assert (got - want).norm() < 1e-5 * want.norm()


def _padded(batch, n):
    pad = lambda t, value: torch.nn.functional.pad(t, (0, n), value=value)
    return Batch(pad(batch.ids, 0), pad(batch.attention_mask, 0), pad(batch.mask, False), pad(batch.turn, -1))


def fresh_critic(model, **kwargs):
    critic = Critic(model, 1e-2, lambda update: 1.0, **kwargs)
    torch.nn.init.normal_(critic.head.weight)
    return critic


def test_a_value_is_of_the_state_before_its_token(model):
    """It does not change with the token itself, nor with padding, and does with what comes before."""
    critic, c = fresh_critic(model), Config(micro_batch=1)
    first, second = episode(1.0, 2.0), episode(1.0, 2.0)
    second.ids[4] = 9  # the second sampled token
    a, b = (critic.values(make_batch(found, 0), torch.tensor([0]), c)[0] for found in ([first], [second, episode(*[0.0] * 9)]))
    assert a[3:5].tolist() == pytest.approx(b[3:5].tolist(), abs=1e-6) and abs(a[6] - b[6]) > 1e-4
    assert a[[0, 1, 2, 5]].tolist() == [0] * 4  # where nothing was sampled


def test_the_critic_learns_returns_and_leaves_the_policy_alone(model):
    before = [p.clone() for p in model.parameters()]
    critic, found = Critic(model, 1e-2, lambda update: 1.0), [episode(1.0, 2.0), episode(0.5, -1.0, 3.0)]
    batch, rows, c = make_batch(found, 0), torch.arange(2), Config(algo="ppo", minibatches=1)
    assert not critic.values(batch, rows, c).any()  # at the start it expects nothing
    returns, log = torch.where(batch.mask, 3.0 - batch.turn, 0.0), []
    for step in range(40):
        log.append(critic.update(batch, rows, returns, critic.values(batch, rows, c), c, np.random.default_rng(step)))
    assert log[0]["critic/explained_variance"] == 0 and log[-1]["critic/explained_variance"] > 0.9
    assert log[0]["critic/loss"] == pytest.approx((returns[batch.mask] ** 2).mean().item() / 2, rel=1e-5)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters()))


def test_micro_batches_change_nothing_for_the_critic(model):
    from test_train import episodes

    batch, rows, critic, found = make_batch(episodes(8), 0), torch.arange(8), fresh_critic(model), []
    returns = torch.where(batch.mask, torch.arange(8.0)[:, None] - 3, 0.0)

    class Spy:
        def step(self):
            found.append(torch.cat([p.grad.flatten() for p in critic.parameters]))

        def zero_grad(self, set_to_none=True):
            for p in critic.parameters:
                p.grad = None

    critic.optimizer, critic.scheduler = Spy(), SimpleNamespace(step=lambda: None)
    for limits in ({"micro_batch": 8}, {"micro_batch": 3}, {"micro_batch": 1}, {"micro_tokens": 30}):
        c = Config(algo="ppo", minibatches=1, **limits, max_grad_norm=1e9, value_clip=0.5)
        critic.update(batch, rows, returns, torch.zeros_like(returns), c, np.random.default_rng(0))
    assert all((g - found[0]).norm() < 1e-5 * found[0].norm() for g in found) and found[0].norm() > 0


@pytest.mark.parametrize("algo", ["grpo", "ppo"])
def test_a_step_without_a_kept_group_changes_no_weight_and_no_moment(algo, tmp_path, monkeypatch):
    from nanoragen.rollout import episodes as rollouts

    play, played = rollouts.rollout, []

    def flat_after_the_first(*args, **kwargs):
        episodes = play(*args, **kwargs)
        if len(episodes) == 12:  # a step's, not an evaluation's
            played.append(episodes)
        for e in episodes if len(played) > 1 else ():
            for t in e.turns:
                t.reward = 0.25 / len(e.turns)
        return episodes

    monkeypatch.setattr(rollouts, "rollout", flat_after_the_first)
    small = "--env frozen_lake --steps 3 --groups 3 --group_size 4 --max_turns 2 --max_tokens 24 --final_episodes 2 --eval_every 0 "
    small += "--save_every 1 --keep 3 --mi_every 0 --weight_decay 0.1 --beta 0.1 --entropy_coef 0.1 --format_penalty=-0.5"
    train.main([*small.split(), "--algo", algo, "--out", str(tmp_path / "run")])
    lines = [json.loads(text) for text in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert [line["skipped"] for line in lines] == [0, 1, 1] and lines[0]["grad_norm"] > 0 and lines[0]["lr"] == lines[2]["lr"]
    for name in ("model.safetensors", "optimizer.pt", "scheduler.pt", *(["critic.pt"] if algo == "ppo" else [])):
        first, last = ((tmp_path / f"run/step_00000{n}" / name).read_bytes() for n in (1, 3))
        assert first == last, name
