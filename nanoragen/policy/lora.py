"""Low-rank adapters (LoRA, arXiv 2106.09685) by peft, an optional package: pip install "nanoragen[lora]".

    adapt(model, rank=8, alpha=16, seed=0)          # in place; the model's own weights are frozen from here on
    base = without(model)                           # the model as it was: no copy, both hold the same weights
    save(model, folder)                             # merged, a plain Hugging Face folder, and folder/adapter/ for peft and `load`
    load(model, folder)                             # the adapter comes back bit for bit

Every linear layer gets one but the head, whose weight is often the embedding's and is read by the fused scores. The layers are put
into the model itself. Left out: dropout, quantised bases, variants of LoRA, a resume from the merged weights, which are rounded.
"""

import copy
from pathlib import Path


def adapt(model, rank: int, alpha: float = 0.0, seed: int = 0):
    """Freeze the model and put adapters of this rank into it, in place; alpha 0: twice the rank. They change nothing at first.

    A layer's weight becomes W + (alpha / rank) B A: A is drawn from `seed`, B is 0.
    """
    import torch
    from peft import LoraConfig, inject_adapter_in_model

    config = LoraConfig(r=rank, lora_alpha=alpha or 2 * rank, target_modules="all-linear", task_type="CAUSAL_LM")
    model.requires_grad_(False)
    with torch.random.fork_rng(devices=[model.device] if model.device.type == "cuda" else []):
        torch.manual_seed(seed)
        inject_adapter_in_model(config, model)
    model.eval()
    model.lora_config = config


def adapted(model) -> bool:
    return hasattr(model, "lora_config")


def without(model):
    """The model without its adapters, frozen: a tree of modules of its own, that holds the same weights."""
    return _replaced(model, lambda layer: layer.base_layer)


def save(model, folder):
    """model.save_pretrained(folder); of an adapted model with the adapters merged into the weights, and beside them as they are."""
    import torch
    from safetensors.torch import save_file

    folder = Path(folder)
    if not adapted(model):
        model.save_pretrained(folder)
        return

    def merged(layer):
        base = layer.base_layer  # of the copy; its weight is the model's
        base.weight = torch.nn.Parameter(base.weight + layer.get_delta_weight("default"), requires_grad=False)
        return base

    with torch.no_grad():
        _replaced(model, merged).save_pretrained(folder)
    model.lora_config.save_pretrained(folder / "adapter")  # not beside the weights: transformers would load it on top of them
    found = {name: p.detach().cpu().contiguous() for name, p in _weights(model).items()}
    save_file(found, folder / "adapter" / "adapter_model.safetensors", metadata={"format": "pt"})


def load(model, folder):
    """Put an adapter that `save` wrote into an adapted model."""
    import torch
    from safetensors.torch import load_file

    found = load_file(Path(folder) / "adapter" / "adapter_model.safetensors")
    with torch.no_grad():
        for name, weight in _weights(model).items():
            weight.copy_(found[name])


def _weights(model) -> dict:
    """The adapter's weights by the names that peft gives them in a file."""
    return {f"base_model.model.{name.replace('.default.', '.')}": p for name, p in model.named_parameters() if ".lora_" in name}


def _replaced(model, layer_for):
    """A tree of modules like the model's, of the same weights, with layer_for(adapted layer) in place of each adapted layer."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    tree = copy.deepcopy(model, {id(p): p for p in model.parameters()})  # the memo: weights are not copied
    for name, layer in list(tree.named_modules()):
        if isinstance(layer, BaseTunerLayer):
            parent, _, own = name.rpartition(".")
            setattr(tree.get_submodule(parent), own, layer_for(layer))
    del tree.lora_config
    return tree.eval()
