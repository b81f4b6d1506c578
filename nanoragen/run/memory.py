"""What a step will need, roughly, before the first one: one line, and one more where the device has less.

    for text in lines(model, c, tokens, prompt): say(text)

In bytes, of P weights (float32), of which U are trained; s bytes a number in the forward passes (bfloat16 autocast: 2, else 4):

    weights      4 P
    gradients    4 U                        optimizer  8 U (two moments of AdamW)
    reference    4 P with --beta            0 with --lora, which shares the weights
    critic       16 U with --algo ppo       a copy of what is trained, its gradients and moments
    KV cache     2 s L V C                  keys and values of C tokens: the episodes generated at a time, each as long as can be
    activations  (16 H + s (x H + 5 A + 4 I)) L N       N padded tokens of the largest micro-batch, and of the prompts that are
                 run for it (nanoragen/policy/prefix_cache.py); x = 2, under autocast 5
                 with --gradient_checkpointing 4 H L N, and the layer that runs again: L = 1; prompts are in their rows
                 and 2 P under autocast, for weights in bfloat16

L layers of width H, heads x head size A (V: key heads x head size), feed-forward width I. In a layer are kept: the input of each
norm and its normalised form, in float32; the inputs of the projections (autocast casts for each anew); queries, keys and values as
attention takes them (repeated for grouped heads), its output twice; gate, activation, up and their product. The total is the larger
of rollout (KV cache) and update (gradients, activations). Left out: logits, workspaces, fragmentation, attention that holds its
T x T table, experts, several GPUs.
"""

import math
import os


def estimate(config, weights: int, trained: int, c, tokens: int, compute: int, prompt: int = 0) -> dict[str, int]:
    """Bytes of each part above, and "total". config: of transformers; weights, trained: counts; tokens: of the longest episode,
    of them prompt: its first ones, which its group shares; compute: bytes a number in the forward passes."""
    config = config.get_text_config()
    L, H, heads = config.num_hidden_layers, config.hidden_size, config.num_attention_heads
    head = getattr(config, "head_dim", None) or H // heads
    A, V = heads * head, (getattr(config, "num_key_value_heads", None) or heads) * head
    inner = getattr(config, "intermediate_size", None) or 4 * H
    episodes = c.groups * c.group_size
    rows = min(c.micro_batch, math.ceil(episodes / c.minibatches))
    N = min(rows * tokens, max(tokens, c.micro_tokens or rows * tokens))
    if not c.gradient_checkpointing:
        prompts = prompt * min(c.groups, c.micro_batch)
        N += min(prompts, max(prompt, c.micro_tokens or prompts))
    autocast = compute < 4
    layer = (16 * H + compute * ((5 if autocast else 2) * H + 5 * A + 4 * inner)) * N
    parts = {
        "weights": 4 * weights,
        "gradients": 4 * trained,
        "optimizer": 8 * trained,
        "reference": 4 * weights if c.beta > 0 and not c.lora else 0,
        "critic": 16 * trained if c.baseline == "critic" else 0,
        "KV cache": 2 * compute * L * V * tokens * min(c.rollout_batch or episodes, episodes),
        "activations": (4 * H * L * N + layer if c.gradient_checkpointing else L * layer) + 2 * weights * autocast,
    }
    always = sum(parts[k] for k in ("weights", "optimizer", "reference", "critic"))
    return parts | {"total": always + max(parts["KV cache"], parts["gradients"] + parts["activations"])}


def device_bytes(device) -> int:
    """Memory of a torch.device; 0 where it cannot be asked."""
    import torch

    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 0


def lines(model, c, tokens: int, prompt: int) -> list[str]:
    """The estimate of a run as a line of text, and a second one if the model's device has less. tokens, prompt: as in `estimate`."""
    device = model.device
    compute = 2 if c.dtype == "bfloat16" or c.dtype == "auto" and device.type == "cuda" else 4
    weights, trained = sum(p.numel() for p in model.parameters()), sum(p.numel() for p in model.parameters() if p.requires_grad)
    found, there = estimate(model.config, weights, trained, c, tokens, compute, prompt), device_bytes(device)
    parts = ", ".join(f"{k} {size(v)}" for k, v in found.items() if v and k != "total")
    has = f" of the {size(there)} of {device}" if there else ""
    text = [f"memory, roughly: {size(found['total'])}{has}, with episodes of {tokens} tokens ({parts})"]
    if there and found["total"] > there:
        rollout = found["KV cache"] > found["gradients"] + found["activations"]
        lower = "--rollout_batch" if rollout else "--micro_batch, --micro_tokens"
        other = "--lora" if rollout else "--gradient_checkpointing, --lora"
        text.append(f"warning: that is more than there is; lower {lower} or --max_context, or try {other}")
    return text


def size(count: float) -> str:
    """Bytes in powers of 1000, as 4.2 GB."""
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.0f} MB"


def out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out: of a GPU (torch.OutOfMemoryError is a RuntimeError), of torch's CPU allocator, or of Python."""
    said = str(error)
    words = ("out of memory", "can't allocate memory", "not enough memory")
    return isinstance(error, MemoryError) or isinstance(error, RuntimeError) and any(w in said for w in words)
