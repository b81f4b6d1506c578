"""Adapters: what they add, what is frozen and shared, what a checkpoint of them holds."""

import importlib.util
from functools import partial

import pytest
import torch
from helpers import batch_of, byte_tokenizer, score, tiny_model
from transformers import AutoModelForCausalLM

from nanoragen.policy import loading, lora, support
from nanoragen.run import checkpoint
from train import Config, check

IDS = torch.tensor([[5, 6, 7, 8, 9, 10]])


@pytest.fixture
def adapted():
    """A tiny model with adapters of rank 3 and alpha 12 that have learned something, and its weights from before."""
    pytest.importorskip("peft")
    model = tiny_model(byte_tokenizer())
    before = {n: p.clone() for n, p in model.named_parameters()}
    lora.adapt(model, 3, 12.0)
    untrained = model(IDS).logits.clone()
    torch.manual_seed(1)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lora_B" in name:
                p.normal_(std=0.1)
    return model, before, untrained


def merged_by_hand(model, before):
    """W + (12 / 3) B A in float64, by the names of the plain model."""
    parts, found = {n: p.detach().double() for n, p in model.named_parameters()}, {n: p.double() for n, p in before.items()}
    for name, weight in found.items():
        layer = name.removesuffix(".weight")
        if f"{layer}.lora_A.default.weight" in parts:
            found[name] = weight + 4 * parts[f"{layer}.lora_B.default.weight"] @ parts[f"{layer}.lora_A.default.weight"]
    return found


def test_adapters_sit_on_every_linear_layer_but_the_head_and_change_nothing_at_first(adapted):
    model, _, untrained = adapted
    plain = tiny_model(byte_tokenizer())
    assert torch.equal(untrained, plain(IDS).logits) and not torch.allclose(model(IDS).logits, untrained, atol=1e-2)
    names = {n.split(".lora_")[0] for n, p in model.named_parameters() if p.requires_grad}
    linear = {n for n, m in plain.named_modules() if isinstance(m, torch.nn.Linear) and n != "lm_head"}
    assert names == linear and len(linear) == 2 * 7
    assert all(".lora_" in n for n, p in model.named_parameters() if p.requires_grad)
    assert support.lm_head_is_linear(model) and not any(m.training for m in model.modules())


def test_scores_and_their_gradient_are_those_of_the_merged_weights(adapted):
    """The gradient of W + s B A with respect to B is s G A^T, with respect to A it is s B^T G."""
    model, before, _ = adapted
    plain = tiny_model(byte_tokenizer()).double()
    plain.load_state_dict(merged_by_hand(model, before), strict=False)
    sampled = torch.ones(1, 5, dtype=torch.bool)
    for m, fused in ((plain, False), (model, True)):
        logprob, entropy = score(m, batch_of(IDS, torch.ones_like(IDS), sampled), fused=fused)
        (logprob.sum() + 0.3 * entropy.sum()).backward()
    torch.testing.assert_close(model(IDS).logits.double(), plain(IDS).logits, atol=1e-4, rtol=1e-4)
    gradient, parts = {n: p.grad for n, p in plain.named_parameters()}, dict(model.named_parameters())
    for name, a in parts.items():
        if ".lora_A." in name:
            layer, b = name.split(".lora_A.")[0], parts[name.replace("lora_A", "lora_B")]
            want = 4 * gradient[f"{layer}.weight"] @ a.double().T, 4 * b.double().T @ gradient[f"{layer}.weight"]
            for got, expected in zip((b.grad, a.grad), want):
                assert (got - expected).norm() < 1e-4 * expected.norm()
        assert ".lora_" in name or a.grad is None


def test_checkpointed_layers_give_adapters_the_same_gradient(adapted):
    model, _, _ = adapted  # frozen embeddings: no layer input asks for a gradient
    trained = [p for p in model.parameters() if p.requires_grad]
    want = torch.autograd.grad(model(IDS).logits.square().sum(), trained)
    loading.checkpoint_activations(model)
    got = torch.autograd.grad(model(IDS).logits.square().sum(), trained)
    assert all((g - w).norm() <= 1e-6 * w.norm() for g, w in zip(got, want))


def test_the_reference_is_the_model_below_the_adapters_and_no_copy(adapted):
    model, _, untrained = adapted
    reference = loading.reference(model)
    assert torch.equal(reference(IDS).logits, untrained) and not any(p.requires_grad for p in reference.parameters())
    assert {p.data_ptr() for p in reference.parameters()} <= {p.data_ptr() for p in model.parameters()}
    assert any(p.requires_grad for p in model.parameters()) and not torch.equal(model(IDS).logits, untrained)


def test_a_checkpoint_is_a_plain_folder_of_merged_weights_with_the_adapter_beside_it(adapted, tmp_path):
    from peft import PeftModel

    model, before, _ = adapted
    kept = {n: p.clone() for n, p in model.named_parameters()}
    folder = checkpoint.save(tmp_path, 1, model, byte_tokenizer(), partial(lora.save, model))
    plain = AutoModelForCausalLM.from_pretrained(folder).eval()
    want = merged_by_hand(model, before)
    assert want.keys() == dict(plain.named_parameters()).keys()
    assert all((p - want[n]).abs().max() < 1e-6 for n, p in plain.named_parameters())
    torch.testing.assert_close(plain(IDS).logits, model(IDS).logits, atol=1e-4, rtol=1e-4)
    assert all(torch.equal(p, kept[n]) for n, p in model.named_parameters())  # saving changed nothing
    foreign = PeftModel.from_pretrained(tiny_model(byte_tokenizer()), folder / "adapter")
    torch.testing.assert_close(foreign(IDS).logits, model(IDS).logits, atol=1e-5, rtol=1e-5)
    again = tiny_model(byte_tokenizer())
    lora.adapt(again, 3, 12.0, seed=7)
    lora.load(again, folder)
    assert all(torch.equal(p, kept[n]) for n, p in again.named_parameters())


def test_the_critic_shares_the_frozen_weights_and_trains_adapters_of_its_own(adapted):
    from nanoragen.learning.critic import Critic

    model, _, _ = adapted
    critic = Critic(model, 1e-3, lambda update: 1.0)
    own = {p.data_ptr() for p in critic.parameters}
    assert not own & {p.data_ptr() for p in model.parameters()} and len(critic.parameters) == 2 * 2 * 7 + 2
    assert {p.data_ptr() for p in critic.trunk.parameters()} - own <= {p.data_ptr() for p in model.parameters()}


def test_what_cannot_work_is_one_line(monkeypatch):
    for bad, key in (({"lora": -1}, "lora"), ({"lora_alpha": 4.0}, "lora_alpha: 4.0 with --lora 0; valid: --lora RANK")):
        with pytest.raises(ValueError, match=key):
            check(Config(env="bandit", **bad))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r'^lora: 8 needs the package peft; valid: 0, or pip install "nanoragen\[lora\]"$'):
        check(Config(env="bandit", lora=8))
    check(Config(env="bandit"))
