"""Load the policy and its tokenizer, freeze a reference, choose the precision, and run the head where it is needed.

    model, tokenizer = load()                                # the bundled model
    model, tokenizer = load("runs/sokoban-grpo-0/step_000040")        # any Hugging Face folder
    model, tokenizer = load("Qwen/Qwen2.5-0.5B-Instruct")    # a hub id
    model, tokenizer = load("SmolLM2-135M.Q8_0.gguf")        # one file

Precision: weights are float32, on a GPU too. There the forward passes run in bfloat16 under `autocast`, and AdamW updates
float32 master weights: a bfloat16 weight cannot take a step smaller than 1/256 of itself. Pass `dtype` to hold them
otherwise (evaluation of a large model).

Attention: flash_attention_2 on CUDA where flash-attn is installed and the model can use it, else what transformers picks
(SDPA). Left out: quantised training, adapters, several GPUs, code from the hub (trust_remote_code is never set).
"""

import copy
import importlib.util
from contextlib import nullcontext
from pathlib import Path

from nanoragen.checkpoint import MARKER, damage, of_trainer

NANO = Path(__file__).resolve().parent / "assets" / "nano"
VALID = "valid: nano, a folder or .gguf file, a hub id"


def locate(name: str) -> tuple[str, dict]:
    """What `name` means: (folder or hub id, further arguments of from_pretrained). ValueError if it can be nothing.

    Looks at files only, so a wrong path is refused before anything heavy is imported.
    """
    if not name:
        raise ValueError(f"model: the name is empty; {VALID}")
    path = NANO if name == "nano" else Path(name).expanduser()
    if path.suffix.lower() == ".gguf":
        if not path.is_file():
            raise ValueError(f"model: there is no file {name}; {VALID}")
        for package in ("gguf", "accelerate"):
            if importlib.util.find_spec(package) is None:
                raise ValueError(f"model: a .gguf file needs the package {package}; valid: pip install gguf accelerate")
        return str(path.parent), {"gguf_file": path.name}
    if path.is_dir():
        config = path / "config.json"
        if not (
            config.is_file() and '"model_type"' in config.read_text(errors="replace")
        ):  # a run's folder has a config.json of its own
            inside = sorted(p.name for p in path.glob("step_*") if (p / "config.json").is_file())
            hint = f", but {inside[-1]} in it is" if inside else " (no config.json with a model_type)"
            raise ValueError(f"model: {name} is not a model folder{hint}; {VALID}")
        return str(path), {}
    looks_like_path = name == "nano" or name.startswith(("/", ".", "~")) or name.count("/") > 1 or "\\" in name
    if looks_like_path or name.split("/")[0] == "runs" or Path(name.split("/")[0]).is_dir():
        raise ValueError(f"model: there is no folder {path}; {VALID}")
    return name, {}


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

    disable_progress_bar()  # loading takes a moment, and the trainer has a bar of its own
    device = pick_device(device)
    if "gguf_file" in extra:
        loading = _gguf_arguments()
    else:
        loading = {}
        extra = extra if Path(where).is_dir() or _hub_answers(where) else {"local_files_only": True}
    try:
        tokenizer = AutoTokenizer.from_pretrained(where, **extra)
        model = AutoModelForCausalLM.from_pretrained(where, dtype=dtype or torch.float32, **extra, **loading)
    except Exception as e:  # no network, no such name, a cut or foreign file: as many types as libraries underneath
        reason = " ".join(str(e).split())[:200]
        at = "this folder or file" if Path(where).exists() else "no such folder here, and from the hub"
        raise ValueError(f"model: {name} cannot be loaded ({at}: {reason}); {VALID} (the hub needs a network)") from e
    if "gguf_file" in extra and getattr(model, "hf_quantizer", None) is not None:
        model.hf_quantizer.remove_quantization_config(model)  # it is a plain model now, to be trained and saved as one
    model.to(device)
    if device.type == "cuda" and is_flash_attn_2_available() and model._supports_flash_attn:
        model.set_attn_implementation("flash_attention_2")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token  # masks come from the sampler, so pad = eos is harmless
    return model.eval(), tokenizer


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
    """A frozen copy, for the KL penalty."""
    return copy.deepcopy(model).requires_grad_(False).eval()


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


def sampled_logits(model, ids, attention_mask, sampled):
    """The logits that score some tokens, [P, V]: the head runs on those positions only.

    ids, attention_mask [B, T], padded on the right; sampled [B, T-1] bool: whether token t + 1 is wanted. Row p of the result
    belongs to the p-th True of `sampled`, in reading order. Differentiable. [B, T, V] is never held: the hidden states are
    picked on their way into the head, so whatever a model does to its logits afterwards (scaling, soft caps) is kept.
    """

    def pick(head, args):
        return (args[0][:, :-1][sampled][None],)  # [B, T, D] -> [1, P, D]

    hook = model.get_output_embeddings().register_forward_pre_hook(pick)
    try:
        return model(input_ids=ids, attention_mask=attention_mask, use_cache=False).logits[0]
    finally:
        hook.remove()
