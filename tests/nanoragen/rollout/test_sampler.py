"""How tokens are drawn: the distribution, and the kept cache against its reference (cases R5, R8-R11, R17, R18)."""

import logging
import math

import pytest
import torch
from helpers import FORGETFUL, Ladder, byte_tokenizer, tiny_model

import nanoragen.rollout.episodes
import nanoragen.rollout.sampler
from nanoragen.policy.batches import make_batch
from nanoragen.rollout.chat import Chat
from nanoragen.rollout.episodes import EpisodeRunner, Sampling, rollout
from nanoragen.rollout.sampler import Sampler, inverse_cdf

KINDS = ("qwen2", "gpt2")


class ManyEnds(Chat):
    """Every fifth id ends a turn, so that random replies end at all lengths."""

    def __init__(self, tokenizer):
        super().__init__(tokenizer)
        self.end_ids = [*self.end_ids, *range(5, len(tokenizer), 5)]


@pytest.fixture
def ragged(monkeypatch):
    monkeypatch.setattr(nanoragen.rollout.episodes, "Chat", ManyEnds)


def run(model, tokenizer, heights=(100,) * 6, *, seed=0, groups=(0, 0, 1, 1, 2, 2), **options):
    """Six episodes in three groups whose prompts differ in length. The ladder's text names its seed."""
    seeds = [10**g for g in groups]
    torch.manual_seed(seed)
    options = {"max_tokens": 12, "max_turns": 4, **options}
    envs = [Ladder(h) for h in heights]
    return rollout(model, tokenizer, envs, seeds, list(groups), Sampling(**options), env_name="ladder")


def token_logprobs(model, episodes, pad, temperature=1.0):
    """Per episode, the log-probs of its sampled ids by a plain forward on right-padded rows: how training scores."""
    batch = make_batch(episodes, pad)
    with torch.no_grad():
        logits = model(input_ids=batch.ids, attention_mask=batch.attention_mask).logits.float() / (temperature or 1.0)
    logp = logits[:, :-1].log_softmax(-1).gather(2, batch.ids[:, 1:, None])[..., 0]
    return [row[keep] for row, keep in zip(logp, batch.mask[:, 1:])]


@pytest.fixture
def drawn(monkeypatch):
    """What `inverse_cdf` was really given and drew: a list of (probabilities [B, V], ids [B])."""
    calls = []

    def spy(probs, uniforms):
        calls.append((probs, inverse_cdf(probs, uniforms)))
        return calls[-1][1]

    monkeypatch.setattr(nanoragen.rollout.sampler, "inverse_cdf", spy)
    return calls


# -- the distribution --------------------------------------------------------------------------------------------------


def test_inverse_cdf_gives_every_id_its_share():
    probs = torch.tensor([0.0, 0.25, 0.0, 0.5, 0.25, 0.0])
    uniforms = (torch.arange(1000, dtype=torch.float64) + 0.5) / 1000
    for scale in (1.0, 0.99, 1.01):  # a softmax sums to 1 but for rounding
        ids = inverse_cdf(scale * probs.expand(1000, 6), uniforms)
        assert torch.bincount(ids, minlength=6).tolist() == [0, 250, 0, 500, 250, 0] and ids.tolist() == sorted(ids.tolist())
    edges = torch.tensor([0.0, 0.25, 0.75, 1 - 2**-53], dtype=torch.float64)  # 0 goes to none of probability 0
    assert inverse_cdf(probs.expand(4, 6), edges).tolist() == [1, 3, 4, 4]
    many = torch.full((3, 200_000), 1 / 200_000)  # float32 sums would be off by more than an id
    uniforms = torch.tensor([0.1, 0.5, 0.9], dtype=torch.float64)
    assert inverse_cdf(many, uniforms).tolist() == pytest.approx([20_000, 100_000, 180_000], abs=1)


@pytest.mark.parametrize("keep_cache", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_r5_r9_r11_logprob_at_sampling_is_logprob_in_training(kind, keep_cache, ragged, drawn):
    """Multi-turn, padded, dropout configured, a template that deletes reasoning, temperature 0.7."""
    tokenizer = byte_tokenizer(FORGETFUL)
    model = tiny_model(tokenizer, kind, dropout=0.1).train()  # as the trainer may leave it
    episodes = run(model, tokenizer, temperature=0.7, keep_cache=keep_cache)
    assert model.training
    trained = token_logprobs(model.eval(), episodes, tokenizer.pad_token_id, 0.7)
    assert len({t.end - t.start for e in episodes for t in e.turns}) > 3  # ragged indeed
    # All six play four turns, so row r of every draw is episode r; draws after a row's end are padding.
    at = 0
    for turn in range(4):
        lengths = [e.turns[turn].end - e.turns[turn].start for e in episodes]
        for step in range(max(lengths)):
            probs, ids = drawn[at]
            at += 1
            for row, episode in enumerate(episodes):
                if step < lengths[row]:
                    position = episode.turns[turn].start + step
                    assert ids[row] == episode.ids[position]
                    ratio = trained[row][sum(episode.mask[:position])].exp() / probs[row, ids[row]]
                    assert ratio.item() == pytest.approx(1, abs=2e-5)
    assert at == len(drawn)


@pytest.mark.parametrize("keep_cache, temperature", [(True, 1.0), (True, 0.7), (False, 0.7), (True, 0.0)])
def test_what_is_noted_of_each_id_is_what_it_was_drawn_from(keep_cache, temperature, ragged, drawn):
    tokenizer = byte_tokenizer()
    model = tiny_model(tokenizer)
    episodes = run(model, tokenizer, temperature=temperature, keep_cache=keep_cache)
    for e, scored in zip(episodes, token_logprobs(model, episodes, tokenizer.pad_token_id, temperature)):
        assert len(e.logprobs) == len(e.entropies) == e.num_tokens > 0
        assert e.logprobs == pytest.approx(scored.tolist(), abs=2e-5)
    if temperature:  # all six play the first turn: the first draws are theirs
        for step in range(max(e.turns[0].end - e.turns[0].start for e in episodes)):
            probs = drawn[step][0].double()
            for p, e in zip(probs, episodes):
                if step < e.turns[0].end - e.turns[0].start:
                    assert e.entropies[step] == pytest.approx(-(p * p.clamp(min=1e-300).log()).sum().item(), abs=1e-4)


def test_impossible_ids_and_broken_rows_while_drawing():
    """A quarter each on two of four ids, half on one, none on the last; a NaN anywhere blanks the row and is noted."""
    logits = torch.tensor([[0.5, 0.25, 0.25, 0.0]]).log()
    for uniform, id in ((0.0, 0), (0.49, 0), (0.51, 1), (0.74, 1), (0.76, 2), (1 - 1e-16, 2)):
        sampler = Sampler(torch.tensor([[uniform]], dtype=torch.float64), 1.0, 1)
        assert sampler(torch.tensor([[7]]), logits)[0].isfinite().nonzero().tolist() == [[id]] and not sampler.broken
        assert sampler.values() == [[pytest.approx((math.log(0.25 if id else 0.5), 1.5 * math.log(2)))]]
    sampler = Sampler(torch.zeros(1, 1, dtype=torch.float64), 1.0, 1)
    assert sampler(torch.tensor([[7]]), torch.full((1, 4), math.nan)).isfinite().sum() == 1 and sampler.broken
    assert Sampler(torch.zeros(2, 1), 0.7, 1).values() == [[], []]


def test_nothing_but_the_temperature_reshapes_the_distribution(drawn):
    tokenizer = byte_tokenizer()
    model = tiny_model(tokenizer)
    plain = run(model, tokenizer)
    hostile = dict(
        do_sample=False, temperature=0.1, top_k=1, top_p=0.1, min_p=0.9, typical_p=0.5, epsilon_cutoff=0.5,
        eta_cutoff=0.5, repetition_penalty=5.0, no_repeat_ngram_size=1, bad_words_ids=[[50], [51]],
        suppress_tokens=list(range(60, 200)), begin_suppress_tokens=[1, 2, 3], forced_eos_token_id=7,
        forced_bos_token_id=8, min_new_tokens=8, max_new_tokens=2, max_length=3,
        eos_token_id=list(range(100)), pad_token_id=9, sequence_bias={(70,): 100.0}, use_cache=False,
        exponential_decay_length_penalty=(1, 5.0), renormalize_logits=True, watermarking_config={"bias": 9.0},
        num_beams=3, num_return_sequences=2, stop_strings=["a"], return_dict_in_generate=True,
    )  # fmt: skip
    for key, value in hostile.items():
        setattr(model.generation_config, key, value)
    config, drawn[:] = model.generation_config, []
    assert [e.ids for e in run(model, tokenizer)] == [e.ids for e in plain]
    assert model.generation_config is config and config.top_k == 1  # restored
    assert min(len(d[0].nonzero()) for d in drawn) > 6 * len(tokenizer) * 0.9  # no token was ruled out
    logits = model(torch.tensor([plain[0].ids[: plain[0].turns[0].start]])).logits[0, -1]
    assert torch.allclose(drawn[0][0][0], logits.softmax(-1), atol=1e-5)


def test_r10_temperature_zero_is_greedy(drawn):
    tokenizer = byte_tokenizer()
    model = tiny_model(tokenizer)
    model.generation_config.repetition_penalty = 5.0
    first, second = (run(model, tokenizer, temperature=0.0, seed=s) for s in (0, 1))
    assert drawn == [] and [e.ids for e in first] == [e.ids for e in second]
    for e in first:
        with torch.no_grad():
            best = model(torch.tensor([e.ids])).logits[0].argmax(-1)
        assert [int(best[p - 1]) for p, m in enumerate(e.mask) if m] == [i for i, m in zip(e.ids, e.mask) if m]
    assert all(t.isfinite().all() for t in token_logprobs(model, first, tokenizer.pad_token_id, 0.0))


@pytest.mark.parametrize("kind", KINDS)
def test_r8_left_padding_changes_nothing(kind, drawn):
    tokenizer = byte_tokenizer()
    model = tiny_model(tokenizer, kind)
    for keep_cache in (True, False):
        first, texts = [], []
        for pads in (0, 1, 3, 8):  # the other prompt is this much longer
            heights = [10, 10**pads]  # and its seed has one digit more
            drawn.clear()
            run(model, tokenizer, heights, groups=(0, 1), keep_cache=keep_cache, max_turns=1)
            first.append(drawn[0][0][0])
            texts.append(run(model, tokenizer, heights, groups=(0, 1), temperature=0.0, keep_cache=keep_cache)[0].ids)
        assert all(torch.allclose(p.log(), first[0].log(), atol=1e-5) for p in first)
        assert all(t == texts[0] for t in texts)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_r8_company_does_not_change_an_episode(kind, temperature, ragged):
    """An episode among others with longer prompts (so left-padded) and replies is the one it is alone, drawn or greedy."""
    tokenizer = byte_tokenizer()
    model = tiny_model(tokenizer, kind)
    heights = [1, 10**4, 10**9, 10**30]
    for keep_cache in (True, False):
        options = {"temperature": temperature, "keep_cache": keep_cache}
        together = run(model, tokenizer, heights, groups=range(4), **options)
        alone = [run(model, tokenizer, [h], groups=[g], **options)[0] for g, h in enumerate(heights)]
        assert [e.ids for e in together] == [e.ids for e in alone]
        both = zip(
            token_logprobs(model, together, tokenizer.pad_token_id),
            [token_logprobs(model, [e], tokenizer.pad_token_id)[0] for e in alone],
        )
        assert all(torch.allclose(a, b, atol=1e-4) for a, b in both)


def test_rollout_batch_changes_no_token_and_episodes_of_a_group_differ(ragged):
    tokenizer = byte_tokenizer()
    model = tiny_model(tokenizer)
    whole, parts, other = (run(model, tokenizer, rollout_batch=n, seed=s) for n, s in ((None, 0), (2, 0), (None, 1)))
    assert [e.ids for e in whole] == [e.ids for e in parts]
    assert len({tuple(e.ids) for e in whole + other}) == 12


# -- the kept cache ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("kind", KINDS)
def test_kept_cache_draws_the_tokens_of_its_reference(kind, temperature, ragged):
    """Four turns of ragged replies; with a context limit episodes leave early too."""
    tokenizer = byte_tokenizer()
    turns, lengths = set(), set()
    for seed, limit in enumerate([None, 240, 420]):
        model = tiny_model(tokenizer, kind, seed=seed)
        options = {"seed": seed, "temperature": temperature, "max_context": limit}
        fast, plain = (run(model, tokenizer, keep_cache=keep, **options) for keep in (True, False))
        assert [e.ids for e in fast] == [e.ids for e in plain]
        assert [e.mask for e in fast] == [e.mask for e in plain]
        turns |= {len(e.turns) for e in fast}
        lengths |= {t.end - t.start for e in fast for t in e.turns}
    assert len(turns) > 1 and max(turns) == 4 and len(lengths) > 3  # it was the hard case


def test_kept_cache_when_episodes_leave(ragged, monkeypatch):
    """Rows leave from the front, the middle and the back in different turns; the others go on undisturbed."""
    tokenizer = byte_tokenizer()
    model = tiny_model(tokenizer, seed=4)
    leaves = {0: 1, 3: 2, 5: 3}  # episode -> its last turn
    results, inner = [], EpisodeRunner._append_context
    for keep_cache in (True, False):
        rows = {}  # runners are made in the order of their episodes

        def append_context(runner, ids, rows=rows):
            row = rows.setdefault(runner, len(rows))
            if len(runner.episode.turns) == leaves.get(row):
                runner.episode.truncated = "context"
                return []
            return inner(runner, ids)

        monkeypatch.setattr(EpisodeRunner, "_append_context", append_context)
        results.append(run(model, tokenizer, keep_cache=keep_cache))
    assert [len(e.turns) for e in results[0]] == [1, 4, 4, 2, 4, 3]
    assert [e.ids for e in results[0]] == [e.ids for e in results[1]]


@pytest.fixture
def forwards():
    """(rows, columns) of every forward pass of a model: forwards(model) -> list that fills."""

    def watch(model):
        shapes = []
        model.register_forward_pre_hook(
            lambda module, args, kwargs: shapes.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
        )
        return shapes

    return watch


def test_shared_prompts_are_encoded_once_and_a_turn_costs_its_new_tokens(forwards):
    tokenizer = byte_tokenizer()
    model = tiny_model(tokenizer)
    shapes = forwards(model)
    episodes = run(model, tokenizer, max_turns=2)
    prompt = max(e.turns[0].start for e in episodes)
    assert shapes[0] == (3, prompt - 1)  # three prompts for six episodes
    glue = [e.turns[1].start - e.turns[0].end for e in episodes]
    again = [s for s in shapes[1:] if s[1] > 1]
    assert len(again) == 1 and again[0][0] == 6 and again[0][1] <= max(glue) + 1
    shapes.clear()
    run(model, tokenizer, max_turns=2, keep_cache=False)
    assert [s[1] > prompt for s in shapes if s[1] > 1] == [False, True] and shapes[0] == (6, prompt)  # the reference


def test_r18_gradient_checkpointing_leaves_the_cache_on(forwards, caplog):
    tokenizer = byte_tokenizer()
    model = tiny_model(tokenizer).train()
    model.gradient_checkpointing_enable()  # the name in all of transformers 5
    model.config.use_cache = False  # what trainers do beside it
    shapes = forwards(model)
    with caplog.at_level(logging.WARNING):
        run(model, tokenizer, keep_cache=False, max_turns=1)
        run(model, tokenizer, keep_cache=True, max_turns=1)
    assert sum(c > 1 for _, c in shapes) == 2 and len(shapes) > 10  # two prefills, then one token at a time
    assert model.training and model.is_gradient_checkpointing and model.config.use_cache is False
    assert len(caplog.records) <= 1


def test_a_sliding_window_keeps_the_cache(forwards):
    """Of 16 tokens, and contexts of over a hundred."""
    from transformers import MistralConfig, MistralForCausalLM

    tokenizer = byte_tokenizer()
    small = dict(hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1)
    torch.manual_seed(0)
    config = MistralConfig(vocab_size=len(tokenizer), sliding_window=16, bos_token_id=None, eos_token_id=None, **small)
    model = MistralForCausalLM(config).eval()
    plain = run(model, tokenizer, max_turns=3, keep_cache=False)
    shapes = forwards(model)
    assert run(model, tokenizer, max_turns=3) == plain and all(len(e.turns) == 3 and len(e.ids) > 100 for e in plain)
    glue = max(turn.start - before.end for e in plain for before, turn in zip(e.turns, e.turns[1:]))
    assert shapes[0][0] == 3  # the prompts once; then what is new: a reply at most, and the text after it
    assert max(C for _, C in shapes[1:]) <= 12 + glue < min(e.turns[1].start for e in plain)


def test_a_model_without_a_cache_plays():
    tokenizer = byte_tokenizer()
    model = tiny_model(tokenizer, "gpt1")
    episodes = run(model, tokenizer, max_turns=2)
    assert all(len(e.turns) == 2 for e in episodes)
    for episode, wanted in zip(episodes, token_logprobs(model, episodes, tokenizer.pad_token_id)):
        assert torch.allclose(torch.tensor(episode.logprobs), wanted, atol=1e-4)


def test_episodes_end_where_mpt_has_no_more_positions():
    from transformers import MptConfig, MptForCausalLM

    tokenizer = byte_tokenizer()
    model = MptForCausalLM(MptConfig(vocab_size=len(tokenizer), d_model=32, n_heads=2, n_layers=1, max_seq_len=200)).eval()
    episodes = run(model, tokenizer, max_turns=50)
    assert all(e.truncated == "context" and len(e.ids) <= 200 for e in episodes) and max(len(e.turns) for e in episodes) > 1


# -- broken weights ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_r17_broken_weights_do_not_play(value, temperature):
    tokenizer = byte_tokenizer()
    model = tiny_model(tokenizer, "gpt2").train()
    with torch.no_grad():
        model.transformer.ln_f.bias[3] = value
    config = model.generation_config
    with pytest.raises(FloatingPointError, match="turn 1"):
        run(model, tokenizer, temperature=temperature)
    assert model.training and model.generation_config is config and torch.is_grad_enabled()


def test_r17_names_the_turn():
    tokenizer = byte_tokenizer()
    model = tiny_model(tokenizer)

    turns = []

    def progress(line):
        turns.append(line)
        if len(turns) == 2:
            with torch.no_grad():
                model.model.norm.weight.fill_(float("nan"))

    with pytest.raises(FloatingPointError, match="turn 2"):
        rollout(model, tokenizer, [Ladder()], [0], [0], Sampling(max_tokens=4), env_name="ladder", progress=progress)
