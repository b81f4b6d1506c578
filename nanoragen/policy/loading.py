"""Load the policy and its tokenizer, freeze a reference, choose the precision.

    model, tokenizer = load()                                # the bundled model
    model, tokenizer = load("runs/sokoban-grpo-0/step_000040")        # any Hugging Face folder
    model, tokenizer = load("Qwen/Qwen2.5-0.5B-Instruct")    # a hub id
    model, tokenizer = load("SmolLM2-135M.Q8_0.gguf")        # one file

Precision: weights are float32, on a GPU too, where the forward passes run in bfloat16 under `autocast`: a bfloat16 weight cannot
take a step smaller than 1/256 of itself. Pass `dtype` to hold them otherwise (evaluation of a large model).
Attention: flash_attention_2 on CUDA where flash-attn is installed and the model can use it, else what transformers picks
(SDPA), on a CPU without two of its copies (attention.py).
Left out: quantised training, a model spread over several GPUs, code from a model's folder or the hub.
"""

import copy
from contextlib import nullcontext
from functools import partial
from pathlib import Path

from nanoragen.run.checkpoint import MARKER, damage, of_trainer
from nanoragen.run.distributed import pick_device
from nanoragen.run.settings import MODELS, locate


def load(name="nano", *, device=None, dtype=None):
    """(model, tokenizer) in evaluation mode: no dropout, in training neither, so that sampling and scoring agree.

    name: "nano", a folder, a .gguf file, or a hub id. device: None or "auto" (CUDA if there is one), or as torch names it.
    dtype: of the weights, None = float32. ValueError in one line where there is no such model, or no way to fetch it.
    """
    if (folder := Path(name).expanduser()).joinpath(MARKER).is_file():
        wrong = damage(folder, which=lambda file: not of_trainer(file))
        if wrong:
            raise ValueError(f"model: {name} is damaged ({wrong}); valid: a whole one, or one you changed, without {MARKER}")
    where, extra = locate(str(name))
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import is_flash_attn_2_available
    from transformers.utils.logging import disable_progress_bar

    from nanoragen.policy import attention, support

    disable_progress_bar()  # loading takes a moment, and the trainer has a bar of its own
    device = pick_device(device)
    if "gguf_file" in extra:
        loading = _gguf_arguments()
    else:
        loading = {}
        extra = extra if Path(where).is_dir() or _hub_answers(where) else {"local_files_only": True}
    try:
        extra["trust_remote_code"] = False  # said in so many words: unsaid, transformers asks, and takes "y" from standard input
        tokenizer = AutoTokenizer.from_pretrained(where, **extra)
        model = AutoModelForCausalLM.from_pretrained(where, dtype=dtype or torch.float32, **extra, **loading)
    except Exception as e:  # no network, no such name, a cut or foreign file: as many types as libraries underneath
        reason = " ".join(str(e).split())[:200]
        at = "this folder or file" if Path(where).exists() else "no such folder here, and from the hub"
        raise ValueError(f"model: {name} cannot be loaded ({at}: {reason}); {MODELS} (the hub needs a network)") from e
    if "gguf_file" in extra and getattr(model, "hf_quantizer", None) is not None:
        model.hf_quantizer.remove_quantization_config(model)  # it is a plain model now, to be trained and saved as one
    model.to(device).eval()
    if not support.respects_attention_mask(model):
        raise ValueError(f"model: {name} ({type(model).__name__}) would read padding as text; valid: one that respects its attention mask")
    if device.type == "cuda" and is_flash_attn_2_available() and model._supports_flash_attn:
        model.set_attn_implementation("flash_attention_2")
    if device.type == "cpu" and model.config._attn_implementation == "sdpa" and support.takes_other_attention(model):
        model.set_attn_implementation(attention.NAME)
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token  # masks come from the sampler, so pad = eos is harmless
    return model, tokenizer


def load_policy(c, saved=None, device=None):
    """(model, tokenizer) that a run trains, as its settings c say: whole or by adapters, layers checkpointed or not.

    saved: checkpoint to go on from; device: None is the settings' own. Adapters stand on the weights that the run began with; the
    checkpoint's have them merged in.
    """
    from nanoragen.policy import lora

    model, tokenizer = load(str(c.model if c.lora else saved or c.model), device=device or c.device)
    if c.gradient_checkpointing:
        checkpoint_activations(model)
    if c.lora:
        lora.adapt(model, c.lora, c.lora_alpha, c.seed)
        if saved:
            lora.load(model, saved)
    return model, tokenizer


def _gguf_arguments() -> dict:
    """What makes transformers unpack a GGUF file. Before it could keep the blocks packed, it always did."""
    import transformers

    config = getattr(transformers, "GgufConfig", None)
    return {} if config is None else {"quantization_config": config(dequantize=True)}


def _hub_answers(name: str) -> bool:
    """One quick question to the hub. Without an answer only what was downloaded before is tried, not for a minute."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    try:
        HfApi().model_info(name, timeout=5)
    except HfHubHTTPError:
        pass  # an answer, though not a kind one: from_pretrained says it in full
    except Exception:  # no network, no route, switched off: of whatever library is underneath
        return False
    return True


def reference(model):
    """The model as it is, frozen, for the KL penalty: a copy; of an adapted model what is under the adapters, not copied."""
    from nanoragen.policy import lora

    if lora.adapted(model):
        return lora.without(model)
    return copy.deepcopy(model).requires_grad_(False).eval()


def checkpoint_activations(model):
    """Gradient checkpointing, in place: a decoder layer keeps its input alone, and runs again in the backward pass.

    Not by transformers' own switch: it works in training mode only, where dropout is on, and sampling and scoring disagree.
    Where no gradient is taken the layers run as they are, so that sampling keeps its KV cache. Copies of the model do the same.
    ValueError where transformers marks no layer of this model as one that can be run again.
    """
    from transformers.modeling_layers import GradientCheckpointingLayer

    layers = [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)]
    if not layers:
        raise ValueError(f"gradient_checkpointing: {type(model).__name__} has no layer made for it; valid: false")
    for layer in layers:
        layer.is_checkpointed = True  # nanoragen/policy/support.py looks for it
        layer.forward = partial(_run_again, layer.forward)  # no closure: a deep copy must run its own layer


def _run_again(forward, *args, **kwargs):
    import torch
    from torch.utils.checkpoint import checkpoint

    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)  # nothing in it is random


def autocast(device, dtype="auto"):
    """The context of every forward pass, of sampling and scoring alike. dtype: "auto" (bfloat16 on CUDA, float32 on a
    CPU), "float32" or "bfloat16"."""
    import torch

    kind = torch.device(device).type
    if dtype == "auto":
        dtype = "bfloat16" if kind == "cuda" else "float32"
    if dtype not in ("float32", "bfloat16"):
        raise ValueError(f"dtype: {dtype!r}; valid: auto, float32, bfloat16")
    return torch.autocast(kind, dtype=torch.bfloat16) if dtype == "bfloat16" else nullcontext()
