"""Loading by name, folder and GGUF file; what a model must heed; the reference; layers that run twice; the precision."""

import json
import subprocess
import sys

import numpy as np
import pytest
import torch
from helpers import Ladder, batch_of, byte_tokenizer, saved_model, score, tiny_model
from transformers import AutoModelForCausalLM

import train
from nanoragen.policy import loading, support
from nanoragen.rollout.episodes import Sampling, rollout
from nanoragen.run import settings


@pytest.fixture
def folder(tmp_path):
    tokenizer = byte_tokenizer()
    tiny_model(tokenizer, dropout=0.1).to(torch.bfloat16).save_pretrained(tmp_path / "m")
    tokenizer.save_pretrained(tmp_path / "m")
    return tmp_path / "m"


def test_the_bundled_model_loads():
    if not (settings.NANO / "config.json").is_file():
        pytest.skip("the bundled model has not been made yet")
    model, tokenizer = loading.load()
    assert sum(p.numel() for p in model.parameters()) < 4e6 and tokenizer.chat_template
    assert sum(f.stat().st_size for f in settings.NANO.iterdir()) <= 8 * 2**20


def test_weights_are_float32_without_dropout_whatever_the_folder_says(folder):
    model, tokenizer = loading.load(str(folder))
    assert {p.dtype for p in model.parameters()} == {torch.float32} and not model.training
    assert model.device.type == ("cuda" if torch.cuda.is_available() else "cpu")
    assert model.config._attn_implementation in ("sdpa_cpu", "sdpa", "flash_attention_2")
    half, _ = loading.load(str(folder), device="cpu", dtype=torch.bfloat16)
    assert {p.dtype for p in half.parameters()} == {torch.bfloat16}


def test_a_tokenizer_without_padding_pads_with_its_end(tmp_path):
    _, found = loading.load(str(saved_model(tmp_path, byte_tokenizer(pad=None))))
    assert found.pad_token_id == found.eos_token_id is not None


@pytest.mark.parametrize("name", ["./none", "/none/at/all", "runs/x/step_1", "none.gguf", "a/b/c", "~/none", "tests/none"])
def test_a_missing_path_is_one_line(name):
    with pytest.raises(ValueError, match="^model: there is no (folder|file) [^\n]*valid: nano, [^\n]*$"):
        loading.load(name)


def test_a_run_folder_points_to_its_checkpoint(tmp_path, folder):
    (tmp_path / "config.json").write_text('{"model": "nano", "env": "sokoban"}')  # the trainer's, not a model's
    folder.rename(tmp_path / "step_000020")
    with pytest.raises(ValueError, match="not a model folder, but step_000020 in it is"):
        loading.load(str(tmp_path))
    loading.locate(str(tmp_path / "step_000020"))


def test_code_in_a_models_folder_never_runs(folder, tmp_path, monkeypatch):
    """Nor when someone who is asked would say yes."""
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "evil", "auto_map": {"AutoConfig": "evil.C", "AutoModelForCausalLM": "evil.M"}}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "evil.py").write_text(
        f"open({str(tmp_path / 'ran')!r}, 'w')\n"
        "from transformers import Qwen2Config, Qwen2ForCausalLM\n"
        "class C(Qwen2Config):\n    model_type = 'evil'\n"
        "class M(Qwen2ForCausalLM):\n    config_class = C\n"
    )
    monkeypatch.setattr("builtins.input", lambda *prompt: "y")
    with pytest.raises(ValueError, match="^model: [^\n]*cannot be loaded"):
        loading.load(str(folder))
    assert not (tmp_path / "ran").exists()


def test_a_hub_id_without_network_is_one_line():  # the suite runs with HF_HUB_OFFLINE
    with pytest.raises(ValueError, match="^model: some-owner/some-model cannot be loaded [^\n]*network[^\n]*$"):
        loading.load("some-owner/some-model")


def test_a_broken_folder_is_one_line(folder):
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    for _ in range(2):
        with pytest.raises(ValueError, match="^model: [^\n]*cannot be loaded \\(this folder[^\n]*$"):
            loading.load(str(folder))
        weights.unlink(missing_ok=True)
    with pytest.raises(ValueError, match="^model: the name is empty"):
        loading.load("")


def test_wrong_paths_are_refused_before_torch_is_imported():
    code = "import sys; from nanoragen.policy.loading import locate\ntry: locate('./none')\n"
    code += "except ValueError: assert 'torch' not in sys.modules\nelse: raise SystemExit(1)"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("device", ["gpu", "cuda:99", "cpu:x"])
def test_a_wrong_device_is_one_line(device):
    with pytest.raises(ValueError, match="^device: [^\n]*valid: auto, cpu[^\n]*$"):
        loading.pick_device(device)


def test_gguf(tmp_path):
    """A tiny Llama written as a GGUF file: it loads, and what is saved of it is a plain folder with the same logits."""
    gguf = pytest.importorskip("gguf")
    pytest.importorskip("accelerate")
    D, H, V, F = 32, 2, 64, 48
    rng, file = np.random.default_rng(0), tmp_path / "tiny.gguf"
    w = gguf.GGUFWriter(file, "llama")
    w.add_context_length(128), w.add_embedding_length(D), w.add_block_count(1), w.add_feed_forward_length(F)
    w.add_head_count(H), w.add_head_count_kv(H), w.add_layer_norm_rms_eps(1e-5), w.add_rope_freq_base(10000.0)
    w.add_rope_dimension_count(D // H), w.add_vocab_size(V)
    tokens = ["<pad>", "<s>", "<|end|>", "ab", *"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"][:V]
    tokens += [f"<x{i}>" for i in range(V - len(tokens))]
    kinds = [gguf.TokenType.CONTROL] * 3 + [gguf.TokenType.NORMAL] * (V - 3)
    w.add_tokenizer_model("gpt2"), w.add_tokenizer_pre("smollm"), w.add_token_list(tokens), w.add_token_types(kinds)
    w.add_token_merges(["a b"]), w.add_bos_token_id(1), w.add_eos_token_id(2), w.add_pad_token_id(0)
    w.add_chat_template("{% for m in messages %}{{ m['content'] }}<|end|>{% endfor %}")

    def tensor(name, *shape):
        w.add_tensor(name, rng.normal(size=shape).astype(np.float32) * 0.2)

    tensor("token_embd.weight", V, D), tensor("output.weight", V, D), tensor("output_norm.weight", D)
    shapes = {f"attn_{part}": (D, D) for part in ("q", "k", "v", "output")}
    shapes |= {"attn_norm": (D,), "ffn_norm": (D,), "ffn_gate": (F, D), "ffn_up": (F, D), "ffn_down": (D, F)}
    for part, shape in shapes.items():
        tensor(f"blk.0.{part}.weight", *shape)
    w.write_header_to_file(), w.write_kv_data_to_file(), w.write_tensors_to_file(), w.close()

    model, tokenizer = loading.load(str(file))
    assert {p.dtype for p in model.parameters()} == {torch.float32} and tokenizer.chat_template
    ids = torch.tensor([[1, 5, 6, 7]])
    model.save_pretrained(tmp_path / "saved"), tokenizer.save_pretrained(tmp_path / "saved")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype=torch.float32)
    assert torch.equal(model(ids).logits, again(ids).logits)


def test_gguf_without_its_package_is_one_line(tmp_path, monkeypatch):
    (tmp_path / "x.gguf").write_bytes(b"GGUF")
    monkeypatch.setattr(settings.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="^model: .*package gguf; valid: pip install gguf accelerate$"):
        loading.load(str(tmp_path / "x.gguf"))


def stateful(kind):
    """A random model of a kind that is more than attention, or has no cache."""
    import transformers as t

    torch.manual_seed(0)
    how = dict(vocab_size=300, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
               num_key_value_heads=1, bos_token_id=None, eos_token_id=None, pad_token_id=None)  # fmt: skip
    mamba = dict(mamba_n_heads=4, mamba_d_head=16, mamba_d_state=8, mamba_n_groups=1, mamba_chunk_size=8)
    if kind == "rwkv":
        return t.RwkvForCausalLM(t.RwkvConfig(vocab_size=300, hidden_size=32, num_hidden_layers=2))
    if kind == "recurrent_gemma":
        return t.RecurrentGemmaForCausalLM(t.RecurrentGemmaConfig(**how | {"num_hidden_layers": 3}, lru_width=32, head_dim=16))
    if kind == "mamba":
        return t.MambaForCausalLM(t.MambaConfig(vocab_size=300, hidden_size=32, num_hidden_layers=2))
    if kind == "mamba2":
        more = dict(num_heads=4, head_dim=16, n_groups=1, state_size=8, chunk_size=8)
        return t.Mamba2ForCausalLM(t.Mamba2Config(vocab_size=300, hidden_size=32, num_hidden_layers=2, **more))
    if kind == "jamba":
        more = dict(attn_layer_period=2, attn_layer_offset=1, num_experts=2, mamba_d_state=8, mamba_dt_rank=4)
        return t.JambaForCausalLM(t.JambaConfig(**how, **more, use_mamba_kernels=False))
    if kind == "falcon_h1":
        return t.FalconH1ForCausalLM(t.FalconH1Config(**how, **mamba, mamba_d_ssm=64))
    if kind == "bamba":
        return t.BambaForCausalLM(t.BambaConfig(**how, **mamba, attn_layer_indices=[1]))
    if kind == "lfm2":
        return t.Lfm2ForCausalLM(t.Lfm2Config(**how, layer_types=["conv", "full_attention"]))
    return tiny_model(byte_tokenizer(), "gpt1")


@pytest.mark.parametrize("kind", ["rwkv", "recurrent_gemma"])
def test_a_model_that_reads_padding_as_text_is_refused(kind, tmp_path):
    """RWKV leaves the mask unused; in RecurrentGemma the attention heeds it, and the recurrent state takes the padding in."""
    model = stateful(kind)
    model.save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=f"^model: [^\n]*{type(model).__name__}[^\n]* would read padding as text; valid: [^\n]*$"):
        loading.load(str(tmp_path))


@pytest.mark.parametrize("kind", ["mamba", "mamba2", "jamba", "falcon_h1", "bamba", "lfm2", "gpt1"])
def test_a_model_with_a_state_that_respects_its_mask_is_let_in(kind):
    asked, model = [], stateful(kind).eval()
    model.register_forward_pre_hook(lambda *_: asked.append(1))
    assert support.respects_attention_mask(model) and asked
    with torch.no_grad():  # broken weights are the rollout's to report
        model.get_output_embeddings().weight[200] = float("nan")  # of a token that is not among those asked with
    assert support.respects_attention_mask(model)


def test_ordinary_models_are_not_asked_for_their_padding():
    model = tiny_model(byte_tokenizer())
    model.register_forward_pre_hook(lambda *_: pytest.fail("it was run"))
    assert support.respects_attention_mask(model)


def test_to_lack_memory_is_no_answer_to_the_question_for_padding(monkeypatch):
    model = stateful("mamba")
    model.register_forward_pre_hook(lambda *_: (_ for _ in ()).throw(RuntimeError("DefaultCPUAllocator: can't allocate memory")))
    with pytest.raises(RuntimeError, match="can't allocate"):
        support.respects_attention_mask(model)


def test_reference_is_a_frozen_copy():
    model = tiny_model(byte_tokenizer())
    frozen = loading.reference(model.train())
    assert not frozen.training and not any(p.requires_grad for p in frozen.parameters())
    before = frozen(torch.tensor([[5, 6, 7]])).logits.clone()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(1.0)
    assert torch.equal(frozen(torch.tensor([[5, 6, 7]])).logits, before) and all(p.requires_grad for p in model.parameters())


def counted(model, monkeypatch):
    """The token counts of the calls of the second layer's self attention, as they come."""
    attention, seen = model.base_model.layers[1].self_attn, []
    run = attention.forward

    def forward(hidden_states, *args, **kwargs):
        seen.append(hidden_states.shape[1])
        return run(hidden_states, *args, **kwargs)

    monkeypatch.setattr(attention, "forward", forward)
    return seen


def gradients_of_scores(model, seed=0):
    torch.manual_seed(seed)
    ids, sampled = torch.randint(5, 60, (3, 9)), torch.ones(3, 8, dtype=torch.bool)
    logprob, entropy = score(model, batch_of(ids, torch.ones_like(ids), sampled))
    return torch.autograd.grad(logprob.sum() + 0.1 * entropy.sum(), list(model.parameters()))


def test_checkpointed_layers_run_twice_keep_less_and_give_the_same_gradient(monkeypatch):
    model = tiny_model(byte_tokenizer(), dropout=0.5)  # in evaluation mode: there is none
    support.lm_head_is_linear(model)
    kept = []

    def gradient():
        kept.append(0)
        with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.__setitem__(-1, kept[-1] + t.numel()) or t, lambda t: t):
            return gradients_of_scores(model)

    want, seen = gradient(), counted(model, monkeypatch)
    loading.checkpoint_activations(model)
    got = gradient()
    assert seen == [9, 9] and not model.training
    assert kept[1] < 0.5 * kept[0]  # numbers saved in the forward pass, the head's included
    assert all((g - w).norm() <= 1e-6 * w.norm() for g, w in zip(got, want))


def test_a_checkpointed_copy_runs_its_own_layers():
    model = tiny_model(byte_tokenizer())
    loading.checkpoint_activations(model)
    frozen, ids = loading.reference(model), torch.tensor([[5, 6, 7]])
    before = frozen(ids).logits.clone()
    with torch.no_grad():
        for p in model.base_model.layers.parameters():
            p.add_(1.0)
    assert torch.equal(frozen(ids).logits, before) and not torch.equal(model(ids).logits, before)


def test_a_gradient_can_be_taken_twice_of_one_checkpointed_pass():  # as nanoragen/learning/gradients.py does
    model = tiny_model(byte_tokenizer())
    loading.checkpoint_activations(model)
    ids, weights = torch.tensor([[5, 6, 7, 8]]), list(model.parameters())
    out = model(ids).logits.square().sum()
    first = torch.autograd.grad(out, weights, retain_graph=True)
    assert all(torch.equal(a, b) for a, b in zip(first, torch.autograd.grad(out, weights)))


def test_r18_sampling_with_checkpointed_layers_keeps_its_cache(monkeypatch, caplog, recwarn):
    tokenizer = byte_tokenizer()
    model = tiny_model(tokenizer)
    loading.checkpoint_activations(model)
    seen, sampling = counted(model, monkeypatch), Sampling(max_tokens=12, max_turns=2)
    episodes = rollout(model, tokenizer, [Ladder()] * 2, [1, 1], [0, 0], sampling, env_name="ladder")
    turns = max(len(e.turns) for e in episodes)
    assert turns == 2 and sum(n > 1 for n in seen) <= turns  # the prompt, then what stands between two replies
    assert len(seen) > 12 and len(caplog.records) + len(recwarn) <= 1


def test_the_trainer_asks_for_it(monkeypatch, tmp_path, capsys):
    def refuse(model):
        raise ValueError(f"gradient_checkpointing: {type(model).__name__}")

    monkeypatch.setattr(loading, "checkpoint_activations", refuse)
    with pytest.raises(SystemExit):
        train.main(["--env", "bandit", "--gradient_checkpointing", "--out", str(tmp_path)])
    assert "gradient_checkpointing: Llama" in capsys.readouterr().err


def test_a_model_whose_layers_cannot_run_twice_is_one_line():
    with pytest.raises(ValueError, match="^gradient_checkpointing: Linear has no layer made for it; valid: false$"):
        loading.checkpoint_activations(torch.nn.Linear(2, 2))


def test_autocast():
    a = torch.ones(2, 2)
    with loading.autocast("cpu"):
        assert (a @ a).dtype == torch.float32
    with loading.autocast("cpu", "bfloat16"):
        assert (a @ a).dtype == torch.bfloat16
    with pytest.raises(ValueError, match="^dtype: "):
        loading.autocast("cpu", "float16")
