"""Load the policy and its tokenizer, freeze a reference, choose the precision, and run the head where it is needed.

    model, tokenizer = load()                                # the bundled model
    model, tokenizer = load("runs/sokoban-grpo-0/step_000040")        # any Hugging Face folder
    model, tokenizer = load("Qwen/Qwen2.5-0.5B-Instruct")    # a hub id
    model, tokenizer = load("SmolLM2-135M.Q8_0.gguf")        # one file

Precision: weights are float32, on a GPU too. There the forward passes run in bfloat16 under `autocast`, and AdamW updates
float32 master weights: a bfloat16 weight cannot take a step smaller than 1/256 of itself. Pass `dtype` to hold them
otherwise (evaluation of a large model).

Attention: flash_attention_2 on CUDA where flash-attn is installed and the model can use it, else what transformers picks
(SDPA), on a CPU without two of its copies (nanoragen/policy/attention.py). With flash_attention_2 training packs a micro-batch into one
row without padding. Adapters: nanoragen/policy/lora.py.
Left out: quantised training, a model spread over several GPUs, code from a model's folder or the hub.
"""

import copy
import inspect
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from weakref import WeakKeyDictionary

from nanoragen.run.checkpoint import MARKER, damage, of_trainer
from nanoragen.run.settings import MODELS, locate

_HEAD_IS_ALL = WeakKeyDictionary()  # model -> what head_is_all found


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

    from nanoragen.policy import attention

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
    if not heeds_its_mask(model):
        raise ValueError(f"model: {name} ({type(model).__name__}) would read padding as text; valid: one that heeds its mask")
    if device.type == "cuda" and is_flash_attn_2_available() and model._supports_flash_attn:
        model.set_attn_implementation("flash_attention_2")
    if device.type == "cpu" and model.config._attn_implementation == "sdpa" and attention.suits(model):
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


def heeds_its_mask(model) -> bool:
    """Whether a row gives the same numbers alone and padded on the left beside another, as a rollout has it.

    Attention over keys and values leaves out what is masked, so only other models are asked, on a few tokens: the state of some
    takes in the padding (RWKV, RecurrentGemma). A model that cannot run such rows at all does not heed them either.
    """
    import torch

    from nanoragen.rollout.generation import why_plain
    from nanoragen.run.stops import out_of_memory

    if not why_plain(model):
        return True
    weight = next(model.parameters())
    ids = torch.arange(32, device=weight.device).view(2, 16) % model.config.get_text_config().vocab_size
    mask = torch.ones_like(ids)
    mask[0, :-3] = 0
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    takes = "position_ids" in inspect.signature(model.forward).parameters

    def last(at) -> torch.Tensor:  # logits of the first row's last token
        more = {"position_ids": positions[at]} if takes else {}
        return model(input_ids=ids[at], attention_mask=mask[at], **more).logits[0, -1].float()

    try:
        with torch.no_grad():
            alone, padded = last((slice(0, 1), slice(-3, None))), last((slice(None), slice(None)))
    except Exception as e:  # whatever a model does with what it was not made for
        if out_of_memory(e):
            raise
        return False
    close = 1e-3 if weight.dtype in (torch.float32, torch.float64) else 0.05
    spread = alone.nan_to_num().std().item()  # broken weights are the rollout's to report
    return torch.allclose(padded, alone, rtol=close, atol=close * spread, equal_nan=True)


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


def pick_device(device=None):
    """A torch.device that is there: None or "auto" is CUDA if there is one, else the CPU. ValueError otherwise."""
    import torch

    if device in (None, "", "auto"):
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(device)
    except RuntimeError as e:
        raise ValueError(f"device: {device!r} is not a device; valid: auto, cpu, cuda, cuda:1") from e
    count = torch.cuda.device_count()
    if device.type == "cuda" and (device.index or 0) >= count:
        raise ValueError(f"device: {device} is not there ({count} CUDA devices); valid: auto, cpu")
    return device


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
        layer.runs_again = True  # nanoragen/policy/prefix_cache.py asks: it would write to a cache twice
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


def sampled_scores(model, ids, attention_mask, sampled, temperature=1.0, fused=True, behind=None):
    """log p(token | its context) and the entropy there, of some tokens: (logprob [P], entropy [P]), fp32, differentiable.

    ids, attention_mask [B, T], padded on the right; sampled [B, T-1] bool: whether token t + 1 is wanted. Entry p of the results
    belongs to the p-th True of `sampled`, in reading order. The hidden states are picked on their way into the head, so [B, T, V]
    is never held. Nor is [P, V], where the logits are hidden x head and nothing else: fused=False is the plain twin, and what
    models get that scale or cap their logits, or whose head is adapted. behind: as in `forward_inputs`.
    """
    import torch

    from nanoragen.kernels.linear import linear_logprob_entropy
    from nanoragen.kernels.logprob import logprob_entropy

    fused = fused and head_is_all(model)
    inputs, wanted = forward_inputs(model, ids, attention_mask, sampled, behind=behind)
    targets, logits, hidden = ids[:, 1:][sampled], *_through_head(model, lambda x: x[wanted][None], run_head=not fused, **inputs)
    if not fused:
        return logprob_entropy(logits[0], targets, temperature=temperature)
    if torch.is_autocast_enabled(hidden.device.type):
        hidden = hidden.to(torch.get_autocast_dtype(hidden.device.type))  # as the head itself would have
    head = model.get_output_embeddings()
    return linear_logprob_entropy(hidden[0], head.weight, targets, bias=head.bias, temperature=temperature)


def packs(model) -> bool:
    """Whether episodes go in one row without padding: it uses flash-attn, and nothing in it carries a state from token to token."""
    kinds = set(getattr(model.config.get_text_config(), "layer_types", None) or ())
    attends = kinds <= {"full_attention", "sliding_attention"} and not getattr(model, "_is_stateful", False)
    return attends and getattr(model.config, "_attn_implementation", None) == "flash_attention_2"


def forward_inputs(model, ids, attention_mask, sampled, packed=None, behind=None):
    """(inputs, wanted): what to call a model with, and the mask that picks, from its hidden states, those before sampled tokens.

    ids, attention_mask [B, T] and sampled [B, T-1] as in `sampled_scores`; hidden[wanted] is [P, D], in reading order. packed: the
    episodes in one row [1, N] without padding, positions starting at 0 with each: so flash-attn's variable-length kernel is told
    where one ends. None: where the model `packs`. behind(ids): inputs that run the rows behind what was run before
    (nanoragen/policy/batches.py, passes). Without it padded rows that begin alike are run behind a common prefix, which is run here
    (nanoragen/policy/prefix_cache.py).
    """
    import torch

    from nanoragen.policy import prefix_cache

    packed = packs(model) if packed is None else packed
    wanted, real = torch.nn.functional.pad(sampled, (0, 1)), attention_mask.bool()
    if behind:
        inputs = behind(ids)
        return inputs, wanted[:, -inputs["input_ids"].shape[1] :]
    if not packed:
        plain = {"input_ids": ids, "attention_mask": attention_mask, "use_cache": False}, wanted
        return prefix_cache.share(model, ids, wanted) or plain
    positions = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
    return {"input_ids": ids[real][None], "position_ids": positions[real][None], "use_cache": False}, wanted[real][None]


def _through_head(model, pick, run_head=True, **inputs):
    """(logits, hidden): a forward pass in which the head sees pick(hidden) in place of hidden; or nothing, if not run_head."""
    picked = []

    def before(head, args):
        picked.append(pick(args[0]))
        return (picked[0] if run_head else picked[0][:, :0],)

    hook = model.get_output_embeddings().register_forward_pre_hook(before)
    try:
        return model(**inputs).logits, picked[0]
    finally:
        hook.remove()


def head_is_all(model) -> bool:
    """Whether logits = hidden @ weight.T + bias, with nothing before or after: each model is asked once, on a few tokens."""
    import torch

    head = model.get_output_embeddings()
    if type(head) is not torch.nn.Linear:  # an adapter's, a quantised one
        return False
    if model not in _HEAD_IS_ALL:
        ids = torch.arange(4, device=head.weight.device)[None] % len(head.weight)
        with torch.no_grad(), torch.autocast(head.weight.device.type, enabled=False):
            logits, hidden = _through_head(model, lambda x: x, input_ids=ids, use_cache=False)
            _HEAD_IS_ALL[model] = torch.allclose(logits.float(), head(hidden).float(), rtol=1e-5, atol=1e-6, equal_nan=True)
    return _HEAD_IS_ALL[model]
