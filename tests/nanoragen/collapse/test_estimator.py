"""Collapse metrics against closed forms and enumeration, the samplers, one whole measurement."""

import itertools
import math
import random

import pytest
import torch
from measured import episode, metrics_of, played, qwen2
from transformers import GPT2Config, GPT2LMHeadModel

from nanoragen.collapse.estimator import collapse_metrics, first_turn_sample, measure, trajectory_sample, valid_thinking_rate

LOG = math.log


def logs(rows):
    return torch.tensor(rows, dtype=torch.float64).log()


def symmetric(own, *others):
    """N = 1 + len(others) prompts with a row each: `own` on the diagonal, the others after it, round and round."""
    row = [own, *others]
    n = len(row)
    return [[row[(j - i) % n] for j in range(n)] for i in range(n)]


# ------------------------------------------------------------------------------------------------------- closed forms
def test_cap_and_the_matched_prompt_in_the_mixture():
    # CASES M4
    two, three = metrics_of(logs(symmetric(0.9, 0.1))), metrics_of(logs(symmetric(0.8, 0.1, 0.1)))
    assert two["mi_seq_estimate"] == pytest.approx(0.587787, abs=1e-6)
    assert two["mi_upper_bound"] == pytest.approx(0.693147, abs=1e-6)
    assert three["mi_seq_estimate"] == pytest.approx(0.875469, abs=1e-6)
    assert three["mi_upper_bound"] == pytest.approx(1.098612, abs=1e-6)
    assert metrics_of(torch.full((3, 3), -7.3))["mi_seq_estimate"] == pytest.approx(0, abs=1e-9)


def test_negative_estimates_stay():
    # CASES M5
    out = metrics_of(logs(symmetric(0.1, 0.9)))
    assert out["mi_seq_estimate"] == pytest.approx(LOG(0.1 / 0.5), abs=1e-9)
    assert out["mi_seq_estimate"] == pytest.approx(-1.609438, abs=1e-6)
    assert out["retrieval_accuracy"] == 0 and out["retrieval_above_chance"] == -0.5


def test_sign_and_the_identity():
    # CASES M6
    torch.manual_seed(0)
    L, lengths = -torch.rand(6, 6, dtype=torch.float64) * 20, [3, 1, 7, 2, 5, 4]
    before, after = metrics_of(L, lengths=lengths), metrics_of(L + torch.eye(6), lengths=lengths)
    for name in ("mi_estimate", "mi_seq_estimate"):
        assert after[name] > before[name]
    assert after["conditional_entropy_seq_est"] == pytest.approx(before["conditional_entropy_seq_est"] - 1)
    for out, seq in itertools.product((before, after), ("", "_seq")):
        gap = out[f"reasoning_entropy{seq}_est"] - out[f"conditional_entropy{seq}_est"]
        assert gap == pytest.approx(out[f"mi{seq}_estimate"], abs=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_sums_means_and_no_underflow(dtype):
    # CASES M7
    out = metrics_of(torch.tensor(symmetric(-2.0, -6.0), dtype=dtype), lengths=[2, 2])
    assert out["mi_seq_estimate"] == pytest.approx(0.674997, abs=1e-6)
    assert out["mi_estimate"] == pytest.approx(0.566219, abs=1e-6)
    assert out["conditional_entropy_seq_est"] == 2 and out["conditional_entropy_est"] == 1
    out = metrics_of(torch.tensor(symmetric(-5000.0, -5010.0), dtype=dtype), lengths=[1000, 1000])
    assert out["mi_seq_estimate"] == pytest.approx(0.693102, abs=1e-6)


def test_the_proxy_is_no_information():
    # a value a token that, times the tokens, is more than there is to know; sums say what is known: all of it
    out = metrics_of(torch.tensor(symmetric(-10.0, -40.0)), lengths=[10, 10])
    assert out["mi_estimate"] <= out["mi_upper_bound"] < out["mi_estimate"] * 10
    assert out["mi_seq_estimate"] == pytest.approx(LOG(2), abs=1e-9)


def test_a_policy_that_copies_its_prompt():
    own = [0, 0, 1, 2, 3, 3, 3, 3]
    L = torch.full((8, 4), -math.inf)
    L[torch.arange(8), torch.tensor(own)] = 0.0
    out = metrics_of(L, own)
    entropy = -sum(w * LOG(w) for w in (2 / 8, 1 / 8, 1 / 8, 4 / 8))
    assert out["mi_seq_estimate"] == pytest.approx(entropy, abs=1e-12) == out["mi_upper_bound"]
    assert out["retrieval_accuracy"] == 1 and out["conditional_entropy_seq_est"] == 0
    assert out["reasoning_entropy_seq_est"] == pytest.approx(entropy)


@pytest.mark.parametrize("n", [1, 2, 3, 7, 10, 11])
def test_a_policy_that_ignores_its_prompt_is_exactly_at_chance(n):
    for seed in range(5):
        rng = random.Random(seed)
        m = rng.randint(1, 30)
        rows = torch.tensor([-100 * rng.random() for _ in range(m)])
        # columns that differ by what float32 rounds away
        L = rows[:, None] * (1 + 1e-7 * torch.tensor([[rng.choice([-1, 0, 1]) for _ in range(n)] for _ in range(m)]))
        out = metrics_of(L, [rng.randrange(n) for _ in range(m)])
        assert out["mi_seq_estimate"] == pytest.approx(0, abs=1e-4)
        assert out["retrieval_accuracy"] == out["retrieval_chance_level"] == 1 / n
        assert out["retrieval_above_chance"] == 0
        for k in (2, 4, 8):
            assert (f"retrieval_accuracy@{k}" in out) == (k < n)
            if k < n:
                assert out[f"retrieval_accuracy@{k}"] == k / n


def by_enumeration(table, weights):
    """I(X; Z), H(Z|X) of p(z | x) = table [N, Z], p(x) = weights."""
    mi = h = 0.0
    for x, w in enumerate(weights):
        for z, p in enumerate(table[x]):
            mix = sum(v * table[y][z] for y, v in enumerate(weights))
            mi += w * p * LOG(p / mix)
            h -= w * p * LOG(p)
    return mi, h


@pytest.mark.parametrize("alpha", [0.0, 0.25, 0.5, 1.0])
def test_mixtures_by_enumeration(alpha):
    # a policy that copies its prompt's text with probability alpha, else speaks from a fixed one; rows in exact shares
    weights, size = (0.5, 0.25, 0.25), 32
    table = [[alpha * (x == z) + (1 - alpha) * f for z, f in enumerate((0.5, 0.25, 0.125, 0.125))] for x in range(3)]
    rows, own = [], []
    for x, w in enumerate(weights):
        for z, p in enumerate(table[x]):
            count = w * p * 4 * size
            assert count == int(count)
            rows += [[LOG(table[y][z]) if table[y][z] else -math.inf for y in range(3)]] * int(count)
            own += [x] * int(count)
    mi, h = by_enumeration([[p or 1e-300 for p in row] for row in table], weights)
    out = metrics_of(torch.tensor(rows, dtype=torch.float64), own)
    assert out["mi_seq_estimate"] == pytest.approx(mi, abs=1e-9)
    assert out["conditional_entropy_seq_est"] == pytest.approx(h, abs=1e-9)
    assert out["mi_upper_bound"] == pytest.approx(1.5 * LOG(2))
    assert (out["retrieval_above_chance"] > 0) == (alpha > 0)


# ------------------------------------------------------------------------------------- weights, duplicates, invariance
def test_equal_columns_are_one_prompt_with_its_share_of_the_rows():
    torch.manual_seed(1)
    L = -torch.rand(6, 3, dtype=torch.float64) * 5
    own = [0, 0, 1, 2, 1, 0]
    merged = metrics_of(L, own)
    doubled = metrics_of(L[:, [0, 1, 0, 2, 1]], [0, 2, 4, 3, 1, 2], column_keys=["a", "b", "a", "c", "b"])
    assert doubled == merged
    apart = metrics_of(L[:, [0, 1, 0, 2, 1]], [0, 2, 4, 3, 1, 2])
    assert apart["mi_upper_bound"] > merged["mi_upper_bound"]
    assert apart["retrieval_accuracy"] < merged["retrieval_accuracy"]


def test_a_prompt_without_rows_weighs_nothing_but_can_be_the_wrong_answer():
    torch.manual_seed(1)
    L = -torch.rand(6, 3, dtype=torch.float64) * 5
    own = [0, 0, 1, 2, 1, 2]
    more = metrics_of(torch.cat([L, torch.zeros(6, 1)], dim=1), own)
    less = metrics_of(L, own)
    for name in less:
        if "retrieval" not in name:
            assert more[name] == pytest.approx(less[name], abs=1e-12), name
    assert more["retrieval_accuracy"] == 0 and more["retrieval_chance_level"] == 1 / 4


def test_order_changes_nothing():
    torch.manual_seed(2)
    L, own, lengths = -torch.rand(9, 4) * 9, [0, 1, 2, 3, 0, 1, 2, 0, 0], [3, 1, 4, 1, 5, 9, 2, 6, 5]
    expected = metrics_of(L, own, lengths)
    rows, columns = torch.randperm(9).tolist(), torch.randperm(4).tolist()
    moved = metrics_of(L[rows][:, columns], [columns.index(own[i]) for i in rows], [lengths[i] for i in rows])
    assert moved.keys() == expected.keys()
    for name, value in expected.items():
        assert moved[name] == pytest.approx(value, abs=1e-12), name
    # every row twice: the same estimates, and the same errors, for no prompt was added
    twice = metrics_of(torch.cat([L, L]), own * 2, lengths * 2)
    for name, value in expected.items():
        assert twice[name] == pytest.approx(value, abs=1e-12), name


def test_all_names_are_there_and_are_numbers():
    out = metrics_of(-torch.rand(9, 9))
    se = {"mi_seq_estimate", "mi_estimate", "conditional_entropy_est", "conditional_entropy_seq_est",
          "reasoning_entropy_est", "reasoning_entropy_seq_est", "retrieval_accuracy", "retrieval_accuracy@2",
          "retrieval_accuracy@4", "retrieval_accuracy@8"}  # fmt: skip
    rest = {"mi_upper_bound", "retrieval_chance_level", "retrieval_above_chance", "mi_zscore", "mi_zscore_seq",
            "marginal_std", "marginal_std_seq"}  # fmt: skip
    assert out.keys() == se | rest | {f"{name}_se" for name in se}
    assert all(type(v) is float and math.isfinite(v) for v in out.values())
    assert not any(name.endswith("_se") for name in metrics_of(-torch.rand(3, 1), [0, 0, 0]))


def test_zscore_and_retrieval_at_k():
    L, lengths = torch.tensor([[-1.0, -2, -3, -4], [-1, -2, -3, -4], [-1, -2, -3, -4], [-3, -3, -1, -3]]), [1, 2, 1, 2]
    out = metrics_of(L, lengths=lengths)
    scores = L.double() / torch.tensor(lengths)[:, None]
    marginal = (scores.exp().mean(dim=1)).log()
    gap = (scores.diag() - marginal).mean()
    std = ((marginal - marginal.mean()) ** 2).mean().sqrt()
    assert out["marginal_std"] == pytest.approx(std.item())
    assert out["mi_zscore"] == pytest.approx((gap / (std + 1e-3)).item())
    assert out["marginal_std_seq"] == pytest.approx(L.double().exp().mean(dim=1).log().std(correction=0).item())
    assert out["mi_zscore_seq"] == pytest.approx(out["mi_seq_estimate"] / (out["marginal_std_seq"] + 1e-3))
    # ranks 1, 2, 3, and in the last row one is above and three share the places 2 to 4
    assert out["retrieval_accuracy"] == 1 / 4
    assert out["retrieval_accuracy@2"] == pytest.approx((1 + 1 + 0 + 1 / 3) / 4)
    assert "retrieval_accuracy@4" not in out


def test_standard_errors():
    L = -torch.rand(5, 5, dtype=torch.float64) * 4
    out = metrics_of(L)
    gap = L.diag() - torch.logsumexp(L - LOG(5), dim=1)
    assert out["mi_seq_estimate_se"] == pytest.approx((gap.std() / 5**0.5).item())  # a row a prompt: the usual one
    # rows of one prompt are no independent draws: the error is that of the prompts' means
    values = torch.tensor([1.0, 1, 1, 5, 5, 5, 3, 3, 3], dtype=torch.float64)
    out = metrics_of(-values[:, None].expand(9, 3), [0, 0, 0, 1, 1, 1, 2, 2, 2])
    assert out["conditional_entropy_seq_est"] == 3
    assert out["conditional_entropy_seq_est_se"] == pytest.approx(2 / 3**0.5)


def test_standard_errors_cover_the_spread_of_many_measurements():
    rng = torch.Generator().manual_seed(0)
    table = torch.softmax(2 * torch.randn(400, 6, generator=rng, dtype=torch.float64), dim=1)  # prompts to draw from
    means, errors = [], []
    for _ in range(80):
        prompts = table[torch.randperm(400, generator=rng)[:16]]
        z = torch.multinomial(prompts, 3, replacement=True, generator=rng)  # [16, 3]
        own = torch.arange(16).repeat_interleave(3)
        out = metrics_of(prompts.log()[:, z.flatten()].T, own.tolist())
        means.append(out["conditional_entropy_seq_est"])
        errors.append(out["conditional_entropy_seq_est_se"])
    ratio = torch.tensor(errors).mean() / torch.tensor(means).std()
    assert 0.8 < ratio < 1.25


@pytest.mark.parametrize(
    "sums, own, lengths, keys, words",
    [
        (torch.zeros(0, 2), [], [], None, "sums"),
        (torch.zeros(2, 2), [0], [1, 1], None, "sums"),
        (torch.zeros(2, 2), [0, 1], [1], None, "sums"),
        (torch.zeros(2, 2), [0, 2], [1, 1], None, "own"),
        (torch.zeros(2, 2), [0, -1], [1, 1], None, "own"),
        (torch.zeros(2, 2), [0, 1], [1, 0], None, "lengths"),
        (torch.zeros(2, 2), [0, 1], [1, 1], ["a"], "column_keys"),
        (torch.tensor([[0.0, math.nan]]), [0], [1], None, "sums"),
        (torch.tensor([[0.0, -math.inf]]), [1], [1], None, "sums"),
    ],
)
def test_wrong_input_is_named(sums, own, lengths, keys, words):
    with pytest.raises(ValueError, match=f"^{words}: .*; valid: .*$"):
        collapse_metrics(sums, own, lengths, column_keys=keys)


def test_first_turns():
    a, b = [1, 2, 3], [1, 5]
    episodes = [
        episode(a, [([7, 8], [9], [4]), ([6], [9], [])]),
        episode(b, [([7], [], [])]),
        episode(a, [([], [9, 9], [4]), ([6], [9], [])]),  # empty first reasoning: left out
        episode(a, [([8], [9], [])]),
        episode(b, []),  # no turn at all
    ]
    prompts, reasonings, own, keys = first_turn_sample(episodes)
    assert (prompts, reasonings, own, keys) == ([a, b], [[7, 8], [7], [8]], [0, 1, 0], [tuple(a), tuple(b)])
    assert valid_thinking_rate(episodes) == 5 / 6
    assert valid_thinking_rate([]) == 0
    assert first_turn_sample([]) == ([], [], [], [])


def test_trajectories_weigh_the_same_whatever_their_length():
    long = episode([1], [([7], [9], [k]) for k in range(10, 30)])
    short = episode([2], [([], [9], [3]), ([8], [9], [])])
    silent = episode([3], [([], [9], [])])
    prompts, reasonings, own, keys = trajectory_sample([long, short, silent], 400, seed=0)
    assert len(reasonings) == 400 and reasonings.count([8]) == 200
    counts = [own.count(j) for j in range(len(prompts)) if prompts[j][0] == 1]
    assert len(counts) == 20 and max(counts) < 30  # 200 / 20 each; chance of one above 30: about 1e-8
    assert prompts[own[reasonings.index([8])]] == [2, 9, 3] and keys == [tuple(x) for x in prompts]
    assert trajectory_sample([long, short], 7, seed=3) == trajectory_sample([long, short], 7, seed=3)
    draws = {tuple(trajectory_sample([long], 1, seed=s)[0][0]) for s in range(10)}
    assert len(draws) > 3
    assert trajectory_sample([silent], 5, seed=0) == ([], [], [], [])


# -------------------------------------------------------------------------------------------------- whole measurements
@pytest.mark.parametrize("sampling, n, m", [("first_turn", 8, 16), ("trajectory", 8, 8)])
def test_measure(sampling, n, m):
    model, episodes = qwen2(), played()
    state = random.getstate(), torch.get_rng_state()
    got = measure(model, episodes, sampling=sampling, temperature=0.8, seed=3)
    assert state[0] == random.getstate() and torch.equal(state[1], torch.get_rng_state())
    assert got.sums.shape == (m, n) == (len(got.own), len(got.column_keys)) and len(got.lengths) == m
    assert got["valid_thinking_rate"] == 1 and got["mi_upper_bound"] == pytest.approx(LOG(8))
    assert dict(got, valid_thinking_rate=0) == dict(
        collapse_metrics(got.sums, got.own, got.lengths, column_keys=got.column_keys), valid_thinking_rate=0
    )
    assert measure(model, episodes, sampling=sampling, temperature=0.8, seed=3) == got
    assert measure(model, episodes, sampling=sampling, temperature=0.8, seed=4) != got
    rows = {(tuple(e.ids[: t.start]), t.think_end - t.start) for e in episodes for t in e.turns}
    assert {(got.column_keys[j], length) for j, length in zip(got.own, got.lengths)} <= rows


def test_measure_a_model_that_ignores_its_prompt():
    # no value reaches the residual stream, and all prompts end in the same token: columns differ by nothing
    model = qwen2()
    for layer in model.model.layers:
        torch.nn.init.zeros_(layer.self_attn.o_proj.weight)
    got = measure(model, played(), max_prompts=7, rows_per_prompt=3)
    assert got["mi_seq_estimate"] == pytest.approx(0, abs=1e-5) and got["mi_estimate"] == pytest.approx(0, abs=1e-5)
    assert got["retrieval_accuracy"] == got["retrieval_chance_level"] == 1 / 7 and got["retrieval_above_chance"] == 0
    assert got["mi_upper_bound"] == pytest.approx(LOG(7))
    assert measure(qwen2(), played())["mi_seq_estimate"] != pytest.approx(0, abs=0.1)


def test_measure_finds_what_a_real_policy_keeps_of_its_prompt():
    # reasonings drawn from the model itself: the estimate is positive and below the cap
    model, episodes = qwen2(initializer_range=0.8), []
    torch.manual_seed(1)
    for e in played(size=2):
        prompt = e.ids[:7]
        ids = model.generate(torch.tensor([prompt]), do_sample=True, top_k=0, max_new_tokens=4, eos_token_id=None)
        episodes.append(episode(prompt, [(ids[0, 7:].tolist(), [9], [])], group=e.group))
    got = measure(model, episodes)
    assert 0.5 * LOG(8) < got["mi_seq_estimate"] <= LOG(8)
    assert got["retrieval_accuracy"] > 0.5


def test_measure_without_reasoning_and_near_the_last_position():
    model = qwen2()
    silent = [episode([1, 2], [([], [9], [])]) for _ in range(3)]
    got = measure(model, silent)
    assert got == {"valid_thinking_rate": 0} and got.sums.shape == (0, 0)
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=40, n_positions=12, n_embd=16, n_layer=1, n_head=2)).eval()
    fits = [episode([g] * 5, [([1] * 8, [9], [])], group=g) for g in range(2)]
    tight = episode([9] * 10, [([1] * 3, [9], [])], group=2)  # fits with its own reasoning, not with the others'
    got = measure(model, fits + [tight])
    assert got.sums.shape == (2, 2) and got["mi_upper_bound"] == pytest.approx(LOG(2))
    with pytest.raises(ValueError, match="^sampling: 'last' is unknown; valid: 'first_turn', 'trajectory'$"):
        measure(model, fits, sampling="last")
