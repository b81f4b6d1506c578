"""Small models of several families with random weights, for tests of what holds for any of them."""

import torch
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    FalconConfig,
    FalconForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoConfig,
    GPTNeoForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PhiConfig,
    PhiForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)  # fmt: skip

from nanoragen.policy.attention import NAME

V = 50
SMALL = dict(vocab_size=V, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
             num_key_value_heads=2, max_position_embeddings=128, initializer_range=0.3)  # fmt: skip


def gpt2(**more):
    config = dict(vocab_size=V, n_positions=128, n_embd=32, n_layer=2, n_head=4, initializer_range=0.3)
    return GPT2LMHeadModel(GPT2Config(**(config | more)))


def phi():  # its head has a bias
    model = PhiForCausalLM(PhiConfig(**SMALL))
    torch.nn.init.normal_(model.lm_head.bias)
    return model


def gpt_neo(hidden=False):
    """Every second layer sees a window of 8 only; hidden: and the configuration does not say so."""
    config = dict(vocab_size=V, hidden_size=32, num_layers=2, num_heads=4, max_position_embeddings=512, initializer_range=0.3)
    model = GPTNeoForCausalLM(GPTNeoConfig(**config, attention_types=[[["global", "local"], 1]], window_size=8))
    if hidden:
        model.config.attention_layers = None
    return model


def falcon():  # without positions of its own: alibi, which the cached way does not have
    return FalconForCausalLM(FalconConfig(vocab_size=V, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, alibi=True))


def longrope():
    rope = {"rope_type": "longrope", "rope_theta": 100.0, "short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
    rope["original_max_position_embeddings"] = 16
    return Phi3ForCausalLM(Phi3Config(**SMALL, pad_token_id=0, original_max_position_embeddings=16, rope_parameters=rope))


MODELS = {
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SMALL, tie_word_embeddings=True)),
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SMALL)),
    "llama-eager": lambda: LlamaForCausalLM(LlamaConfig(**SMALL, attn_implementation="eager")),
    "gpt2": gpt2,
    "phi": phi,
    "mistral": lambda: MistralForCausalLM(MistralConfig(**SMALL, sliding_window=100)),
    "llama-sdpa_cpu": lambda: LlamaForCausalLM(LlamaConfig(**{**SMALL, "num_key_value_heads": 2}, attn_implementation=NAME)),
}
FALLS_BACK = {
    "mistral": (lambda: MistralForCausalLM(MistralConfig(**SMALL, sliding_window=12)), "sliding window of 12"),
    "gemma2": (
        lambda: Gemma2ForCausalLM(Gemma2Config(**SMALL, head_dim=8, final_logit_softcapping=3.0)),
        "final_logit_softcapping",
    ),
    "gpt-neo": (gpt_neo, "local attention"),
    "gpt-neo that hides it": (lambda: gpt_neo(hidden=True), "differently"),
    "longrope": (longrope, "beyond 16 tokens"),
    "falcon": (falcon, "differently"),
    "bloom": (lambda: BloomForCausalLM(BloomConfig(vocab_size=V, hidden_size=32, n_layer=2, n_head=4)), "position ids"),
}
