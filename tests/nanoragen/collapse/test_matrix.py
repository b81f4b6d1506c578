"""The cross matrix: both ways of scoring against each other and against a loop that anyone can check by hand."""

import copy
import random

import pytest
import torch
from families import FALLS_BACK, MODELS, V, gpt2
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from nanoragen.collapse import estimator, matrix
from nanoragen.collapse.matrix import cross_matrix


def make(factory):
    torch.manual_seed(0)
    return factory().eval()


def lists(seed=0, prompts=(9, 14, 5, 20), reasonings=(1, 7, 2, 11, 4), common=4):
    """Prompts and reasonings of these lengths; the prompts begin with the same `common` ids."""
    rng = random.Random(seed)
    draw = lambda n: [rng.randrange(V) for _ in range(n)]
    start = draw(common)
    return [start + draw(n - common) for n in prompts], [draw(n) for n in reasonings]


def by_hand(model, prompts, reasonings, temperature=1.0):
    """One sequence at a time, no mask, no cache: token t is scored by the logits before it. [M, N]"""
    out = torch.zeros(len(reasonings), len(prompts), dtype=torch.float64)
    for i, z in enumerate(reasonings):
        for j, x in enumerate(prompts):
            with torch.no_grad():
                logits = model(torch.tensor([x + z])).logits[0].double() / temperature
            for t, token in enumerate(z):
                out[i, j] += torch.log_softmax(logits[len(x) + t - 1], -1)[token]
    return out


def close(a, b, tolerance=1e-5):
    torch.testing.assert_close(a.double(), b.double(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name, temperature", [(name, 1.0) for name in MODELS] + [("qwen2", 0.7), ("gpt2", 1.6)])
def test_both_ways_equal_the_loop(name, temperature, capsys):
    model = make(MODELS[name])
    prompts, reasonings = lists()
    expected = by_hand(model, prompts, reasonings, temperature)
    assert expected.std() > 1, "the case would show nothing"
    close(cross_matrix(model, prompts, reasonings, temperature=temperature), expected)
    close(cross_matrix(model, prompts, reasonings, temperature=temperature, shared_prefix=False), expected)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", ["qwen2", "gpt2", "mistral", "mistral, window 12"])  # grouped queries, own positions, windows
def test_equals_teacher_forcing_of_padded_batches(name, side):
    """All pairs in one batch, padded on either side, as a trainer would score them: positions count the tokens that are there."""
    model = make(MODELS[name] if name in MODELS else FALLS_BACK["mistral"][0])
    prompts, reasonings = lists()
    pairs = [(x, z) for z in reasonings for x in prompts]
    T = max(len(x) + len(z) for x, z in pairs)
    ids, mask, scored = torch.zeros(3, len(pairs), T, dtype=torch.long)
    for b, (x, z) in enumerate(pairs):
        at = T - len(x) - len(z) if side == "left" else 0
        ids[b, at : at + len(x + z)], mask[b, at : at + len(x + z)] = torch.tensor(x + z), 1
        scored[b, at + len(x) : at + len(x + z)] = 1
    with torch.no_grad():
        out = model(input_ids=ids, attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp(min=0)).logits.double()
    token = out[:, :-1].log_softmax(-1).gather(2, ids[:, 1:, None])[..., 0]
    expected = (token * scored[:, 1:]).sum(1).view(len(reasonings), len(prompts))
    for shared in (True, False):
        close(cross_matrix(model, prompts, reasonings, shared_prefix=shared), expected)


@pytest.mark.parametrize("name, common", [("qwen2", 0), ("qwen2", 5), ("gpt2", 5)])
def test_common_beginnings_of_prompts(name, common):
    model = make(MODELS[name])
    prompts, reasonings = lists(common=common)
    # 0: nothing in common; 5: one prompt is the beginning of all others
    close(cross_matrix(model, prompts, reasonings), by_hand(model, prompts, reasonings))
    close(cross_matrix(model, prompts[:1], reasonings), by_hand(model, prompts[:1], reasonings))


@pytest.mark.parametrize("size", [1, 8])
def test_the_length_of_a_row_changes_nothing(size, monkeypatch):
    model = make(MODELS["qwen2"])
    prompts, reasonings = lists(prompts=(3, 4, 2), common=1)
    monkeypatch.setattr(matrix, "PACKED_TOKENS", size)
    assert len(matrix._packs(reasonings, max(size, 4))) > 1
    close(cross_matrix(model, prompts, reasonings), by_hand(model, prompts, reasonings))


def test_plain_way_in_chunks(monkeypatch):
    model = make(MODELS["gpt2"])
    prompts, reasonings = lists()
    expected = cross_matrix(model, prompts, reasonings, shared_prefix=False)
    monkeypatch.setattr(matrix, "PLAIN_LOGITS", 3 * 25 * V)
    close(cross_matrix(model, prompts, reasonings, shared_prefix=False), expected)


@pytest.mark.parametrize("shared", [True, False])
def test_order_and_batch_composition_change_nothing(shared):
    model = make(MODELS["qwen2"])
    prompts, reasonings = lists()
    full = cross_matrix(model, prompts, reasonings, shared_prefix=shared)
    rows, columns = [3, 0, 4, 2, 1], [2, 0, 3, 1]
    moved = cross_matrix(model, [prompts[j] for j in columns], [reasonings[i] for i in rows], shared_prefix=shared)
    close(moved, full[rows][:, columns])
    for i in range(5):
        close(cross_matrix(model, prompts[1:2], [reasonings[i]], shared_prefix=shared), full[i : i + 1, 1:2])


def test_same_lists_are_computed_once():
    model = make(MODELS["qwen2"])
    prompts, reasonings = lists()
    full = cross_matrix(model, prompts, reasonings)
    tokens = []
    hook = model.get_decoder().register_forward_pre_hook(
        lambda _, args, kwargs: tokens.append(kwargs["input_ids"].numel()), with_kwargs=True
    )
    rows, columns = [0, 1, 2, 3, 4, 4, 1, 0], [3, 0, 1, 2, 3, 3]
    found = cross_matrix(model, [prompts[j] for j in columns], [reasonings[i] for i in rows])
    hook.remove()
    assert torch.equal(found[0], found[7]) and torch.equal(found[:, 0], found[:, 5])
    close(found, full[rows][:, columns])
    # the beginning once, the rest of each prompt once, each reasoning but its last token once a prompt
    assert sum(tokens) == 4 + (5 + 10 + 1 + 16) + 4 * (0 + 6 + 1 + 10 + 3)


@pytest.mark.parametrize("shared", [True, False])
def test_uniform_model_scores_every_token_once(shared):
    # CASES M1: 7 tokens at V = 10
    model = gpt2(vocab_size=10)
    torch.nn.init.zeros_(model.transformer.wte.weight)  # tied: every logit is 0
    sums = cross_matrix(model, [[1, 2, 3], [4]], [[5, 6, 7, 8, 9, 0, 1], [2]], shared_prefix=shared)
    close(sums[0], torch.full((2,), -16.118096), 1e-5)
    close(sums[0] / 7, torch.full((2,), -2.302585), 1e-6)
    close(sums[1], torch.full((2,), -2.302585), 1e-6)


def test_pairs_longer_than_the_model_are_refused():
    # CASES M3: a context is never cut, which would move what is scored
    model = make(lambda: gpt2(n_positions=16))
    prompts, reasonings = lists(prompts=(9, 10), reasonings=(7, 3))
    with pytest.raises(ValueError, match=r"^prompts: 17 tokens with their longest reasoning; valid: up to .* 16$"):
        cross_matrix(model, prompts, [reasonings[0] + [1]])
    with pytest.raises(ValueError, match="prompts: 22 tokens"):
        cross_matrix(model, lists(prompts=(20,))[0], [[1, 2, 3]], shared_prefix=False)
    # 9 + 8 - 1 = 16: the last token is scored, not run. The plain way runs it, and the twin must not break on it
    z = reasonings[0] + [1]
    roomy = gpt2(n_positions=32).eval()
    weights = model.state_dict()
    weights["transformer.wpe.weight"] = torch.cat([weights["transformer.wpe.weight"], torch.zeros(16, 32)])
    roomy.load_state_dict(weights)
    for shared in (True, False):
        close(cross_matrix(model, prompts[:1], [z], shared_prefix=shared), by_hand(roomy, prompts[:1], [z]))


@pytest.mark.parametrize("name", FALLS_BACK)
def test_models_that_cannot_share_say_so_once_and_are_right(name, capsys):
    factory, words = FALLS_BACK[name]
    model = make(factory)
    prompts, reasonings = lists()
    expected = by_hand(model, prompts, reasonings)
    for _ in range(2):
        close(cross_matrix(model, prompts, reasonings), expected, 2e-5)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1 and words in lines[0]


def test_a_model_that_scores_packed_rows_differently_is_noticed(capsys):
    model = make(MODELS["llama"])
    forward = model.forward

    def doubled(input_ids=None, attention_mask=None, position_ids=None, use_cache=None):
        out = forward(input_ids, attention_mask, position_ids=position_ids, use_cache=use_cache)
        out.logits = out.logits * 2  # a head that is more than a matrix, under no known name
        return out

    model.forward = doubled
    prompts, reasonings = lists()
    close(cross_matrix(model, prompts, reasonings), by_hand(model, prompts, reasonings))
    assert "differently" in capsys.readouterr().out


def test_another_attention_is_used_again_afterwards():
    AttentionInterface.register("like_sdpa", sdpa_attention_forward)
    model = make(MODELS["qwen2"])
    prompts, reasonings = lists()
    expected = cross_matrix(model, prompts, reasonings)
    model.set_attn_implementation("like_sdpa")
    close(cross_matrix(model, prompts, reasonings), expected)
    assert model.config._attn_implementation == "like_sdpa"


def test_training_flags_gradients_and_weights_are_left_alone():
    model = make(lambda: gpt2(resid_pdrop=0.5, embd_pdrop=0.5, attn_pdrop=0.5))
    prompts, reasonings = lists()
    expected = cross_matrix(model, prompts, reasonings)
    model.train()
    model.transformer.h[0].eval()  # a frozen part stays as it is
    before = [m.training for m in model.modules()], torch.get_rng_state()
    for shared in (True, False):
        found = cross_matrix(model, prompts, reasonings, shared_prefix=shared)
        close(found, expected)
        assert not found.requires_grad
    assert [m.training for m in model.modules()] == before[0] and torch.equal(torch.get_rng_state(), before[1])
    assert all(p.grad is None for p in model.parameters())


def test_empty_ones():
    model = make(MODELS["qwen2"])
    prompts, reasonings = lists()
    for shared in (True, False):
        found = cross_matrix(model, prompts, [[], reasonings[1], []], shared_prefix=shared)
        assert found.shape == (3, 4) and not found[[0, 2]].any() and found[1].all()
    assert cross_matrix(model, [], []).shape == (0, 0)
    assert cross_matrix(model, prompts, []).shape == (0, 4)
    with pytest.raises(ValueError, match="^prompts: an empty one"):
        cross_matrix(model, [[1], []], reasonings)
    with pytest.raises(ValueError, match="^temperature: 0 "):
        cross_matrix(model, prompts, reasonings, temperature=0)


def test_bfloat16_is_no_worse_shared_than_plain():
    model = make(MODELS["qwen2"])
    prompts, reasonings = lists()
    truth = by_hand(copy.deepcopy(model).bfloat16().double(), prompts, reasonings)  # of the same rounded weights
    model = model.bfloat16()
    plain = (cross_matrix(model, prompts, reasonings, shared_prefix=False).double() - truth).abs()
    shared = (cross_matrix(model, prompts, reasonings).double() - truth).abs()
    assert shared.mean() <= plain.mean() * 1.25 + 0.05


def test_posterior_against_bayes():
    """Three rows, prompts of weight 2/3 and 1/3; the row of prompt 1 comes last, whatever its place."""
    L = torch.tensor([[0.2, 0.7], [0.5, 0.1], [0.4, 0.4]]).log()
    found = estimator.Measurement({}, L, [1, 0, 0], [1, 1, 1], None)
    record = estimator.cross_record(5, found)
    want = [[0.5 * 2, 0.1], [0.4 * 2, 0.4], [0.2 * 2, 0.7]]
    assert record == {
        "step": 5, "size": [3, 2], "own": [0, 0, 1],
        "posterior": [[pytest.approx(p / sum(row), abs=6e-4) for p in row] for row in want],
    }  # fmt: skip
    big = estimator.Measurement({}, torch.zeros(80, 40), [i // 2 for i in range(80)], [1] * 80, None)
    record = estimator.cross_record(1, big)
    assert (len(record["posterior"]), len(record["posterior"][0]), record["size"]) == (32, 32, [80, 40])
    assert record["posterior"][0] == [0.025] * 32 and record["own"] == [i // 2 for i in range(32)]
