"""The estimate of memory: against numbers worked out by hand, and against what torch really keeps."""

import pytest
import torch
from helpers import byte_tokenizer, tiny_model
from transformers import AutoModelForCausalLM, Qwen2Config

from nanoragen.policy import loading
from nanoragen.run import memory
from train import Config

QWEN = Qwen2Config(
    vocab_size=151936, hidden_size=896, intermediate_size=4864, num_hidden_layers=24, num_attention_heads=14,
    num_key_value_heads=2, max_position_embeddings=32768, tie_word_embeddings=True,
)  # fmt: skip  # Qwen2.5-0.5B


@pytest.fixture(scope="module")
def nano():
    return loading.load(device="cpu")[0]


def test_the_bundled_model_by_hand(nano):
    """6 layers, H = A = 128, V = 64, I = 384; 128 episodes of 600 tokens, 32 in a micro-batch."""
    weights = sum(p.numel() for p in nano.parameters())
    found = memory.estimate(nano.config, weights, weights, Config(micro_tokens=0), 600, 4)
    assert weights == 1_347_456 and found == {
        "weights": 5_389_824, "gradients": 5_389_824, "optimizer": 10_779_648, "reference": 0, "critic": 0,
        "KV cache": 235_929_600,  # 2 x 4 x 6 x 64 x 600 x 128
        "activations": 1_356_595_200,  # (16 x 128 + 4 x (2 x 128 + 5 x 128 + 4 x 384)) x 6 x 32 x 600
        "total": 5_389_824 + 10_779_648 + 5_389_824 + 1_356_595_200,
    }  # fmt: skip


def test_half_a_billion_weights_by_hand():
    """24 layers, H = A = 896, V = 128, I = 4864; bfloat16 autocast; 128 episodes of 1000 tokens, 4 in a micro-batch."""
    with torch.device("meta"):
        P = sum(p.numel() for p in AutoModelForCausalLM.from_config(QWEN).parameters())
    base = {"groups": 8, "group_size": 16, "micro_batch": 4, "micro_tokens": 0}
    of = lambda U=P, **more: memory.estimate(QWEN, P, U, Config(**{**base, **more}), 1000, 2)
    found = of(beta=0.1)
    assert P == 494_032_768 and found == {
        "weights": 1_976_131_072, "gradients": 1_976_131_072, "optimizer": 3_952_262_144, "reference": 1_976_131_072, "critic": 0,
        "KV cache": 1_572_864_000,  # 2 x 2 x 24 x 128 x 1000 x 128
        "activations": 7_820_193_536,  # (16 x 896 + 2 x (5 x 896 + 5 x 896 + 4 x 4864)) x 24 x 4 x 1000, and 2 P
        "total": 17_700_848_896,
    }  # fmt: skip
    assert of(gradient_checkpointing=True)["activations"] == 4 * 896 * 24 * 4000 + 71168 * 4000 + 2 * P
    assert of(micro_tokens=2500)["activations"] == 71168 * 24 * 2500 + 2 * P
    assert of(micro_tokens=10)["activations"] == 71168 * 24 * 1000 + 2 * P  # one episode is never cut
    assert of(rollout_batch=16)["KV cache"] == 196_608_000 == of(rollout_batch=16, minibatches=64)["KV cache"]
    assert of(minibatches=64)["activations"] == 71168 * 24 * 2000 + 2 * P  # two episodes in a minibatch
    with_prompts = lambda **more: memory.estimate(QWEN, P, P, Config(**{**base, **more}), 1000, 2, 300)["activations"] - 2 * P
    assert with_prompts() == 71168 * 24 * (4000 + 4 * 300)  # four prompts in a pass, as rows in a micro-batch
    assert with_prompts(groups=2) == 71168 * 24 * (4000 + 2 * 300)
    assert with_prompts(micro_tokens=700) == 71168 * 24 * (1000 + 700) and with_prompts(micro_tokens=9) == 71168 * 24 * 1300
    assert with_prompts(gradient_checkpointing=True) == of(gradient_checkpointing=True)["activations"] - 2 * P
    assert of(algo="ppo")["critic"] == 16 * P
    few = of(4_399_104, beta=0.1, lora=8, algo="ppo")
    assert (few["gradients"], few["optimizer"], few["reference"], few["critic"]) == (17_596_416, 35_192_832, 0, 70_385_664)
    wide = memory.estimate(QWEN, P, 4_399_104, Config(groups=80, group_size=16, micro_batch=1, lora=8), 1000, 2)
    assert wide["total"] == wide["weights"] + wide["optimizer"] + wide["KV cache"]  # the rollout is the peak


@pytest.mark.parametrize("autocast", [False, True])
def test_activations_are_what_torch_keeps(nano, autocast):
    kept, own = {}, {p.untyped_storage().data_ptr() for p in nano.parameters()}

    def keep(t):
        if t.untyped_storage().data_ptr() not in own:
            kept[t.untyped_storage().data_ptr()] = t  # held, so that no address is used twice
        return t

    ids, mask = torch.randint(5, 600, (8, 200)), torch.ones(8, 200, dtype=torch.long)
    mask[0, 100:] = 0
    with (
        torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t),
        loading.autocast("cpu", "bfloat16" if autocast else "float32"),
    ):
        nano.base_model(input_ids=ids, attention_mask=mask, use_cache=False)
    found = sum(t.untyped_storage().nbytes() for t in kept.values())
    c = Config(groups=1, group_size=8, minibatches=1, micro_batch=8)
    guess = memory.estimate(nano.config, 1_273_600, 1_273_600, c, 200, 2 if autocast else 4)["activations"]
    assert 0.85 < guess / found < 1.15


def test_the_line_and_its_warning(monkeypatch):
    tokenizer = byte_tokenizer()
    ask = lambda **more: memory.lines(
        tiny_model(tokenizer), Config(env="bandit", device="cpu", **more), 100, 40
    )
    monkeypatch.setattr(memory, "device_bytes", lambda device: 16e9)
    (line,) = ask()
    assert "of the 16.0 GB of cpu" in line and "KV cache" in line and "critic" not in line and "critic" in ask(algo="ppo")[0]
    monkeypatch.setattr(memory, "device_bytes", lambda device: 0)
    assert len(ask()) == 1 and " of the " not in ask()[0]
    monkeypatch.setattr(memory, "device_bytes", lambda device: 1e6)
    assert "--micro_tokens" in ask()[1] and "\n" not in ask()[1] and "--rollout_batch" in ask(micro_batch=1, groups=90)[1]
    assert (memory.size(999), memory.size(4.24e9)) == ("0 MB", "4.2 GB")


def test_memory_of_the_device_is_asked():
    assert 2**27 < memory.device_bytes(torch.device("cpu")) < 2**50
