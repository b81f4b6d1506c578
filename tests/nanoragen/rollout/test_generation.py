"""The KV cache kept from turn to turn, and finished rows evicted during a turn: tokens and log-probs are those of the reference.

No environment plays here; whole rollouts both ways are in test_sampler.py.
"""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers import byte_tokenizer, tiny_model

from nanoragen.policy.support import kv_cache_unsupported, max_positions
from nanoragen.rollout import generation
from nanoragen.rollout.episodes import Sampling
from nanoragen.rollout.generation import CachedGenerator, UncachedGenerator, sampling_mode

TOKENIZER = byte_tokenizer()
V = len(TOKENIZER)
EVERY_FIFTH, ALL, NONE = list(range(1, V, 5)), list(range(V)), [V + 1]


def model_of(kind):
    if kind in ("qwen2", "gpt2"):
        return tiny_model(TOKENIZER, kind)
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    how = dict(vocab_size=V, hidden_size=32, intermediate_size=64, num_hidden_layers=2, initializer_range=0.3,
               max_position_embeddings=512, bos_token_id=None, eos_token_id=None)  # fmt: skip
    if kind == "llama":  # four queries a key
        return LlamaForCausalLM(LlamaConfig(**how, num_attention_heads=8, num_key_value_heads=2, head_dim=8)).eval()
    return GPTNeoXForCausalLM(GPTNeoXConfig(**how, num_attention_heads=2)).eval()  # rotary on a quarter of each head


@pytest.fixture
def evict_always(monkeypatch):
    """Every end of a reply evicts its row."""
    monkeypatch.setattr(generation, "COMPACT_FRACTION", 0)
    monkeypatch.setattr(generation, "COMPACT_ROWS", 1)
    monkeypatch.setattr(generation, "COMPACT_COLUMNS", 1)


def prompts(B, seed=0):
    """B prompts in pairs that are the same, of 3 to 29 ids."""
    rng = np.random.default_rng(seed)
    own = [rng.integers(V, size=rng.integers(3, 30)).tolist() for _ in range((B + 1) // 2)]
    return [own[i // 2] for i in range(B)]


def both(model, ends, B, *, max_tokens=12, turns=4, temperature=1.0, leave=True):
    """Play both ways and compare. Returns the lengths of the replies [turns][rows] and the rows of each call [turns][]."""
    chat = SimpleNamespace(tokenizer=TOKENIZER, end_ids=ends)
    sampling, rng = Sampling(max_tokens=max_tokens, temperature=temperature), np.random.default_rng(1)
    inner, calls, lengths = model.generate, [], []

    def counted(**inputs):
        calls[-1].append(len(inputs["input_ids"]))
        return inner(**inputs)

    with sampling_mode(model):
        reference, cached = (kind(model, chat, sampling, prompts(B)) for kind in (UncachedGenerator, CachedGenerator))
        for turn in range(1, turns + 1):
            uniforms = rng.random((len(reference.contexts), max_tokens)).tolist()
            replies, values = reference.sample(turn, uniforms)
            calls.append([])
            model.generate = counted
            found = cached.sample(turn, uniforms)
            assert found[0] == replies
            model.generate = inner
            for reply, wanted, got in zip(replies, values, found[1]):
                assert np.allclose(got, wanted, atol=2e-4) and len(got) == len(wanted) == len(reply)
            lengths.append([len(reply) for reply in replies])
            stay = [row for row in range(len(replies)) if not leave or len(replies) < 4 or rng.random() < 0.8]
            glue = [rng.integers(V, size=rng.integers(1, 15)).tolist() for _ in stay]
            for generator in (reference, cached):
                generator.extend(stay, glue)
            assert cached.contexts == reference.contexts
    return lengths, calls


def rows_left(lengths):
    """Rows in each call of `generate`, where every end evicts its row."""
    return [len(lengths)] + [n for end in sorted(set(lengths)) if (n := sum(length > end for length in lengths))]


@pytest.mark.parametrize("temperature", [1.0, 0.0])
@pytest.mark.parametrize("kind", ["qwen2", "gpt2", "llama", "gpt_neox"])
def test_cached_replies_and_values_are_those_of_the_reference(kind, temperature, evict_always):
    lengths, calls = both(model_of(kind), EVERY_FIFTH, 9, temperature=temperature)
    for n, rows in zip(lengths, calls):
        want = rows_left(n)
        assert rows == want or rows == want[:-1]  # no other call for the last column
    assert temperature == 0 or max(map(len, calls)) > 3 and len({n for turn in lengths for n in turn}) > 5


def windowed(kind, window):
    """A model whose layers, or every second of them, look back over a window (of tokens, or in chunks of so many) only."""
    from transformers import (
        Gemma3ForCausalLM,
        Gemma3TextConfig,
        Llama4ForCausalLM,
        Llama4TextConfig,
        MistralConfig,
        MistralForCausalLM,
    )

    torch.manual_seed(0)
    how = dict(vocab_size=V, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
               num_key_value_heads=1, head_dim=16, initializer_range=0.3, bos_token_id=None, eos_token_id=None, pad_token_id=None)  # fmt: skip
    if kind == "mistral":
        return MistralForCausalLM(MistralConfig(**how, sliding_window=window)).eval()
    if kind == "gemma3":
        kinds = ["sliding_attention", "full_attention"]
        return Gemma3ForCausalLM(Gemma3TextConfig(**how, sliding_window=window, layer_types=kinds)).eval()
    kinds = ["chunked_attention", "full_attention"]
    config = Llama4TextConfig(**how, attention_chunk_size=window, layer_types=kinds, num_local_experts=2, intermediate_size_mlp=32)
    return Llama4ForCausalLM(config).eval()


@pytest.mark.parametrize("window", [7, 512])
@pytest.mark.parametrize("kind", ["mistral", "gemma3", "llama4"])
def test_a_window_keeps_the_cache(kind, window, evict_always):
    """Contexts here have 3 to over 50 tokens: far beyond the shorter window, and never as many as the longer."""
    model, ids = windowed(kind, window), torch.arange(40)[None]
    assert not kv_cache_unsupported(model)
    other = windowed(kind, 19)(ids).logits
    assert not torch.allclose(model(ids).logits, other, atol=0.01)  # a window is seen
    lengths, calls = both(model, EVERY_FIFTH, 9)
    assert max(map(len, calls)) > 3 and len({n for turn in lengths for n in turn}) > 5


def test_models_without_keys_and_values_of_all_layers_say_so():
    """One without a cache, one that carries a state, and one of whose layers one is a convolution with a state."""
    from transformers import Lfm2Config, Lfm2ForCausalLM, MambaConfig, MambaForCausalLM

    mamba = MambaForCausalLM(MambaConfig(vocab_size=V, hidden_size=16, num_hidden_layers=1))
    config = Lfm2Config(vocab_size=V, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2,
                        num_key_value_heads=1, layer_types=["conv", "full_attention"])  # fmt: skip
    said = [kv_cache_unsupported(model) for model in (tiny_model(TOKENIZER, "gpt1"), mamba, Lfm2ForCausalLM(config))]
    for line, holds in zip(said, ("OpenAIGPTLMHeadModel takes no cache", "Mamba", "Lfm2ForCausalLM caches more")):
        assert line.startswith("rollouts encode every context anew") and holds in line and "\n" not in line
    assert not any(kv_cache_unsupported(model_of(kind)) for kind in ("qwen2", "gpt2", "llama", "gpt_neox"))


def test_positions_are_found_under_every_name():
    from transformers import BloomConfig, GPTJConfig, MambaConfig, MptConfig, Qwen2Config

    for config, want in (
        (MptConfig(max_seq_len=77), 77),
        (GPTJConfig(n_positions=78), 78),
        (Qwen2Config(max_position_embeddings=79), 79),
        (BloomConfig(), float("inf")),
        (MambaConfig(), float("inf")),
    ):
        assert max_positions(SimpleNamespace(config=config)) == want


def test_nobody_leaves_and_the_rows_change_places(evict_always):
    """The rows are in another order after each turn, and all play on. Here the padding id is one of those that end a turn."""
    lengths, calls = both(model_of("llama"), [TOKENIZER.pad_token_id, *EVERY_FIFTH], 7, leave=False, turns=5)
    assert all(len(turn) == 7 for turn in lengths) and all(len(rows) > 1 for rows in calls)


@pytest.mark.parametrize(
    "ends, B, max_tokens, lengths, calls",
    [(ALL, 6, 8, {1}, [6]), (NONE, 6, 8, {8}, [6]), (EVERY_FIFTH, 1, 8, None, [1]), (EVERY_FIFTH, 6, 1, {1}, [6])],
    ids=["all end at once", "nobody ends", "one row", "one token"],
)
def test_turns_in_which_nothing_is_evicted(ends, B, max_tokens, lengths, calls, evict_always):
    found, called = both(model_of("qwen2"), ends, B, max_tokens=max_tokens, leave=False)
    assert called == [calls] * 4
    assert lengths is None or all(set(turn) == lengths for turn in found)


def test_rows_are_evicted_where_that_pays():
    """Half of the rows, at least eight, four columns before the last: worked out from the lengths of the replies."""
    B, limit = 40, 24
    lengths, calls = both(model_of("qwen2"), EVERY_FIFTH, B, max_tokens=limit, leave=False, turns=3)
    for n, rows in zip(lengths, calls):
        going, want = sorted(n), [B]
        for column in range(1, limit):
            ended = sum(length <= column for length in going)
            if ended < len(going) and ended >= max(8, len(going) / 2) and limit - column >= 4:
                going = going[ended:]
                want.append(len(going))
        assert rows == want and len(want) > 1
    assert both(model_of("qwen2"), EVERY_FIFTH, 7, leave=False)[1] == [[7]] * 4  # never for fewer than eight


def test_when_enough_rows_have_finished():
    """Of 40 rows twenty must have ended, of 12 eight; what ended before is not forgotten, nor padding counted."""
    for B, enough in ((40, 20), (12, 8)):
        leave, ids = generation._EnoughFinished(torch.tensor([1, 4]), last=20), torch.full((B, 8), 7)
        for row in range(enough):  # one ends at each token
            ids[:row, -1], ids[row, -1] = 0, (1, 4)[row % 2]
            assert leave(ids, None).tolist() == [row + 1 == enough or r <= row for r in range(B)]
    for column, left in ((5, True), (6, False)):  # four columns to come, or three
        leave = generation._EnoughFinished(torch.tensor([1, 4]), last=9)
        assert leave(torch.tensor([[7] * (column - 1) + [4]] * 9 + [[7] * column]), None).tolist() == [True] * 9 + [left]


def test_no_row_is_decoded_after_its_end(evict_always):
    """Every call begins with one new column, so the rows of all forward passes are as many as the sampled ids."""
    model, shapes = model_of("qwen2"), []
    chat = SimpleNamespace(tokenizer=TOKENIZER, end_ids=EVERY_FIFTH)
    with sampling_mode(model):
        generator = CachedGenerator(model, chat, Sampling(max_tokens=16), prompts(8))
        model.register_forward_pre_hook(lambda _, args, kwargs: shapes.append(kwargs["input_ids"].shape), with_kwargs=True)
        replies, _ = generator.sample(1, np.random.default_rng(3).random((8, 16)).tolist())
    assert {C for _, C in shapes} == {1} and sum(B for B, _ in shapes) == sum(map(len, replies))


def test_broken_logits_after_an_eviction_name_the_turn(evict_always):
    model, calls = model_of("qwen2"), []
    chat, inner = SimpleNamespace(tokenizer=TOKENIZER, end_ids=EVERY_FIFTH), model.generate

    def generate(**inputs):
        calls.append(len(inputs["input_ids"]))
        if len(calls) == 2:
            model.model.norm.weight.fill_(float("nan"))
        return inner(**inputs)

    model.generate = generate
    with sampling_mode(model), pytest.raises(FloatingPointError, match="turn 7"):
        CachedGenerator(model, chat, Sampling(max_tokens=16), prompts(8)).sample(
            7, np.random.default_rng(3).random((8, 16)).tolist()
        )
    assert len(calls) == 2 and calls[1] < 8


def test_the_cache_has_no_holes():
    """After turns of ragged replies it has as many columns as the longest context, and room for one reply."""
    model, rng = model_of("qwen2"), np.random.default_rng(5)
    chat = SimpleNamespace(tokenizer=TOKENIZER, end_ids=EVERY_FIFTH)
    with sampling_mode(model):
        generator = CachedGenerator(model, chat, Sampling(max_tokens=16), prompts(6))
        for turn in range(6):
            longest = max(map(len, generator.contexts))
            generator.sample(turn, rng.random((6, 16)).tolist())
            assert all(s.shape[2] == longest + 16 - 1 for layer in generator.cache.layers for s in layer.buffers)
            generator.extend(list(range(6)), [[3] * int(n) for n in rng.integers(1, 9, size=6)])
