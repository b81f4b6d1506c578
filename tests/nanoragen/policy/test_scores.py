"""Scores of sampled tokens: the head on picked positions only, rows packed or padded, and precision."""

import math

import pytest
import torch
from helpers import batch_of, byte_tokenizer, score, tiny_model
from transformers import Gemma2Config, Gemma2ForCausalLM

from nanoragen.policy import loading, support
from nanoragen.policy.scoring import micro_batch, token_logprobs


def soft_capped():
    torch.manual_seed(0)
    return Gemma2ForCausalLM(
        Gemma2Config(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
                     num_key_value_heads=1, head_dim=16, final_logit_softcapping=0.5, attn_implementation="eager",
                     initializer_range=0.3)
    ).eval()  # fmt: skip


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("kind", ["qwen2", "gpt2", "gemma2"])
def test_token_logprobs_are_those_of_the_full_logits(kind, fused):
    model = soft_capped() if kind == "gemma2" else tiny_model(byte_tokenizer(), kind)
    torch.manual_seed(0)
    ids = torch.randint(5, 60, (3, 9))
    attention = torch.ones_like(ids)
    attention[1, 6:] = 0
    sampled = torch.rand(3, 8) < 0.5
    sampled[1, 5:] = False
    logp = (model(input_ids=ids, attention_mask=attention).logits[:, :-1][sampled] / 0.7).log_softmax(-1)
    full = logp.gather(1, ids[:, 1:][sampled][:, None])[:, 0], -(logp.exp() * logp).sum(1)
    found = score(model, batch_of(ids, attention, sampled), temperature=0.7, fused=fused)
    weight = torch.randn(2, int(sampled.sum()))
    for f, e in zip(found, full):
        torch.testing.assert_close(f, e, atol=1e-5, rtol=1e-5)
    gradients = [
        torch.autograd.grad((weight[0] * a).sum() + (weight[1] * b).sum(), list(model.parameters()), allow_unused=True)
        for a, b in (full, found)
    ]
    for e, g in zip(*gradients):
        torch.testing.assert_close(g, e, atol=1e-4, rtol=1e-3)
    torch.testing.assert_close(model(input_ids=ids).logits.shape[:2], (3, 9))  # the hook is gone


def ragged():
    torch.manual_seed(0)
    ids, attention = torch.randint(5, 60, (3, 9)), torch.ones(3, 9, dtype=torch.long)
    attention[0, 4:] = attention[2, 7:] = 0
    sampled = (torch.rand(3, 8) < 0.6) & attention[:, 1:].bool()
    assert sampled[0, 2] and sampled[1, 7]  # the last tokens of two rows: what follows them in the pack is another row's
    return ids, attention, sampled


@pytest.mark.parametrize("kind", ["qwen2", "gpt2"])
@pytest.mark.parametrize("mask", ["ours", "by position"])
def test_packed_rows_give_the_scores_and_gradient_of_padded_ones(kind, mask, monkeypatch):
    """SDPA with a block-diagonal mask stands in for the variable-length kernel: the same rows, the same positions."""
    model, (ids, attention, sampled) = tiny_model(byte_tokenizer(), kind), ragged()
    batch, weight, found = batch_of(ids, attention, sampled), torch.randn(2, int(sampled.sum())), []
    for pack in (False, True):
        monkeypatch.setattr(support, "packs_sequences", lambda model, pack=pack: pack)
        micro = micro_batch(model, batch, torch.arange(3))
        if pack:
            assert micro.inputs["input_ids"].shape == (1, 4 + 9 + 7)
            assert micro.inputs["position_ids"][0].tolist() == [*range(4), *range(9), *range(7)]
        if pack and mask == "ours":  # not what transformers makes of the positions
            block = torch.block_diag(*(torch.ones(n, n).tril() for n in (4, 9, 7)))
            lowest = torch.finfo(torch.float32).min
            micro.inputs["attention_mask"] = torch.zeros(20, 20).masked_fill(block == 0, lowest)[None, None]
        logprob, entropy = token_logprobs(model, micro, 0.7)
        gradient = torch.autograd.grad((weight[0] * logprob).sum() + (weight[1] * entropy).sum(), list(model.parameters()))
        found.append((logprob, entropy, torch.cat([g.flatten() for g in gradient])))
    for padded, got in zip(*found):
        assert (got - padded).norm() < 1e-5 * padded.norm()


def test_only_flash_attention_packs():
    model, batch = tiny_model(byte_tokenizer()), batch_of(*ragged())
    assert micro_batch(model, batch, torch.arange(3)).inputs.keys() == {"input_ids", "attention_mask", "use_cache"}
    model.config._attn_implementation_internal = "flash_attention_2"
    assert micro_batch(model, batch, torch.arange(3)).inputs.keys() == {"input_ids", "position_ids", "use_cache"}
    model.config.layer_types = ["full_attention", "linear_attention"]  # its state would run on into the next episode
    assert micro_batch(model, batch, torch.arange(3)).inputs.keys() == {"input_ids", "attention_mask", "use_cache"}


@pytest.mark.gpu
def test_packing_under_flash_attention_equals_padding_under_sdpa():
    pytest.importorskip("flash_attn")
    model, (ids, attention, sampled) = tiny_model(byte_tokenizer()).cuda(), (t.cuda() for t in ragged())
    found = []
    for kernel in ("sdpa_cpu", "sdpa", "flash_attention_2"):
        model.set_attn_implementation(kernel)
        with loading.autocast("cuda"):
            logprob, entropy = score(model, batch_of(ids, attention, sampled))
        found.append(torch.cat([logprob, entropy]))
    assert (found[1] - found[0]).abs().max() < 0.1  # both in bfloat16; a token that sees another row is off by more than 1


def test_fused_scores_never_hold_the_logits():
    model, shapes = tiny_model(byte_tokenizer()), []
    model.get_output_embeddings().register_forward_hook(lambda module, args, out: shapes.append(tuple(out.shape)))
    ids, sampled = torch.randint(5, 60, (2, 9)), torch.ones(2, 8, dtype=torch.bool)
    support.lm_head_is_linear(model)  # asked on a few tokens, once
    shapes.clear()
    score(model, batch_of(ids, torch.ones_like(ids), sampled))
    assert all(math.prod(shape) == 0 for shape in shapes) and shapes


def test_lm_head_is_linear_sees_what_a_model_does_around_its_head():
    class Adapted(torch.nn.Linear):  # as an adapter's: a Linear, and more
        def forward(self, x):
            return super().forward(x) + 1.0

    plain, adapted = tiny_model(byte_tokenizer()), tiny_model(byte_tokenizer())
    adapted.lm_head.__class__ = Adapted
    scaled = tiny_model(byte_tokenizer())
    forward = scaled.forward

    def doubled(*args, **more):
        out = forward(*args, **more)
        out.logits = out.logits * 2
        return out

    scaled.forward = doubled
    assert support.lm_head_is_linear(plain) and not any(map(support.lm_head_is_linear, (adapted, scaled, soft_capped())))


def test_scores_under_autocast_are_those_of_bfloat16_states():
    model = tiny_model(byte_tokenizer())
    torch.manual_seed(0)
    ids, sampled = torch.randint(5, 60, (2, 9)), torch.ones(2, 8, dtype=torch.bool)
    exact = score(model, batch_of(ids, torch.ones_like(ids), sampled))
    with loading.autocast("cpu", "bfloat16"):
        found = score(model, batch_of(ids, torch.ones_like(ids), sampled))
    for f, e in zip(found, exact):
        assert f.dtype == torch.float32 and 0 < (f - e).abs().max() < 0.2  # log-probs of about -8, in 8 bits
