"""The CPU's attention: the numbers and gradients of softmax(QK' + mask)V written out, and of transformers' own way."""

import pytest
import torch
from helpers import byte_tokenizer
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from nanoragen.policy import attention, loading

SMALL = dict(
    vocab_size=len(byte_tokenizer()), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=8, head_dim=8
)


def layer(groups):
    """What transformers hands over as the module: it says how many query heads share keys and values."""
    module = torch.nn.Module()
    module.num_key_value_groups = groups
    return module


def saved(folder, model):
    tokenizer = byte_tokenizer()
    for part in (model, tokenizer):
        part.save_pretrained(folder)
    return folder


def by_hand(q, k, v, seen, scaling):
    """[B, Q, H, D] in float64; a query that sees nothing gives 0."""
    q, k, v = q.double(), *(x.double().repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    scores = (q @ k.transpose(-1, -2) * scaling).masked_fill(~seen, -torch.inf)
    return (scores.softmax(-1).nan_to_num(0.0) @ v).transpose(1, 2)


@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("H, heads, Q, C", [(8, 2, 5, 12), (8, 2, 1, 12), (4, 4, 5, 12), (8, 1, 12, 12), (6, 3, 40, 70)])
def test_values_and_gradients(H, heads, Q, C, dtype, tolerance):
    g = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(*shape, generator=g, dtype=torch.float64).to(dtype).requires_grad_()
    q, k, v = draw(3, H, Q, 16), draw(3, heads, C, 16), draw(3, heads, C, 16)
    seen = torch.ones(Q, C, dtype=torch.bool).tril(C - Q).repeat(3, 1, 1, 1)
    seen[0, :, :, :4] = False  # padded on the left
    found, weights = attention.attention(layer(H // heads), q, k, v, seen, scaling=0.3)
    assert weights is None and found.dtype == dtype and found.is_contiguous()
    exact = [x.detach().double().requires_grad_() for x in (q, k, v)]
    want, out = by_hand(*exact, seen, 0.3), torch.randn(3, Q, H, 16, generator=g)
    assert torch.allclose(found.double(), want, rtol=tolerance, atol=tolerance)
    for x, y in zip(torch.autograd.grad((found * out).sum(), (q, k, v)), torch.autograd.grad((want * out).sum(), exact)):
        assert (x.double() - y).norm() <= 2 * tolerance * y.norm()


def test_a_query_that_sees_nothing_gives_0_and_no_nan():
    q, k = torch.randn(2, 4, 3, 8, requires_grad=True), torch.randn(2, 2, 6, 8)
    seen = torch.ones(2, 1, 3, 6, dtype=torch.bool)
    seen[0, :, 0] = False
    found, _ = attention.attention(layer(2), q, k, k, seen, scaling=1.0)
    assert not found[0, 0].any() and torch.autograd.grad(found.sum(), q)[0].isfinite().all()


def test_the_mask_is_made_a_number_once_for_all_layers():
    mask = torch.rand(2, 1, 3, 6) < 0.5
    first = attention._additive(mask, torch.float32)
    assert attention._additive(mask, torch.float32) is first and attention._additive(mask, torch.float64).dtype == torch.float64
    assert torch.equal(first == 0, mask) and torch.equal(first == -torch.inf, ~mask)


def test_a_model_says_the_same_as_with_transformers_own(tmp_path):
    torch.manual_seed(0)
    made = LlamaForCausalLM(LlamaConfig(**SMALL, num_key_value_heads=2)).eval()
    folder = saved(tmp_path, made)
    model, _ = loading.load(str(folder), device="cpu")
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    assert (model.config._attn_implementation, plain.config._attn_implementation) == (attention.NAME, "sdpa")
    ids, mask = torch.randint(60, (3, 20)), torch.ones(3, 20, dtype=torch.long)
    mask[0, :7] = 0
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    a, b = (m(input_ids=ids, attention_mask=mask, position_ids=positions).logits[mask.bool()] for m in (model, plain))
    assert torch.allclose(a, b, atol=1e-5)
    model.save_pretrained(tmp_path / "again")  # and no other library need know the name
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "again").config._attn_implementation == "sdpa"


def test_models_that_do_not_take_an_attention_from_outside_keep_theirs(tmp_path):
    from transformers import BloomConfig, BloomForCausalLM

    made = BloomForCausalLM(BloomConfig(vocab_size=len(byte_tokenizer()), hidden_size=32, n_layer=1, n_head=2))
    assert loading.load(str(saved(tmp_path, made)), device="cpu")[0].config._attn_implementation == "eager"


def test_models_whose_code_asks_for_sdpa_by_name_keep_it(tmp_path):
    """DeepSeek V3.2 chooses 4 keys a query, and masks the others itself under "eager" and "sdpa" only."""
    pytest.importorskip("transformers.models.deepseek_v32", reason="this transformers does not know the model")
    from transformers import DeepseekV32Config, DeepseekV32ForCausalLM

    torch.manual_seed(0)
    latent = dict(q_lora_rank=16, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=8)
    experts = dict(n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, n_group=2, topk_group=1)
    config = {k: v for k, v in SMALL.items() if k != "head_dim"} | latent | experts
    config |= dict(num_attention_heads=4, num_key_value_heads=4, index_topk=4, index_n_heads=2, index_head_dim=8)
    folder = saved(tmp_path, DeepseekV32ForCausalLM(DeepseekV32Config(**config, initializer_range=0.2)).eval())
    model, plain = (
        loading.load(str(folder), device="cpu")[0],
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval(),
    )
    assert plain.config._attn_implementation == "sdpa"
    ids = torch.randint(60, (2, 20))
    with torch.no_grad():
        assert torch.allclose(model(input_ids=ids).logits, plain(input_ids=ids).logits, atol=1e-5)
