"""What several sequences begin with is encoded once: the keys and values of the first P tokens, with gradient through them.

    inputs, wanted = share(model, ids, wanted) or (plain inputs, wanted)                # in one micro-batch
    begun = Beginnings(model, ids, length(model, ids, wanted), apart=True)              # for many: nanoragen/policy/batches.py, passes
    ... begun.behind(rows, ids[rows]) ... loss.backward() of each; then begun.backward()

Episodes of a group share their prompt, and all of a run the instruction. The first P tokens of the rows are run once for each
beginning that is different; every row takes the keys and values of its own and runs only what follows. Attention is causal and
positions count from the first token, so each row's numbers and its gradient are those of the row alone, up to rounding. Between
two updates the weights stand still, so all micro-batches of one can follow the same keys and values: their gradients are added up,
and go through the beginnings once, at the end (the chain rule, with its sum taken early).

Left out: prefixes of several lengths side by side (P is the one that leaves the least to run), packed rows, layers that run again
in the backward pass (`model.checkpoint_activations`: they would write to the cache twice). The cross matrix,
nanoragen/collapse/matrix.py, shares prompts without gradient, and asks here which models can.
"""

import copy
import inspect
import math
from weakref import WeakKeyDictionary

import torch
from transformers import DynamicCache

from nanoragen.run.stops import out_of_memory

PAYS = 0.1  # share of a micro-batch's tokens that must be saved; measured with the bundled model on a CPU: 0.09 gains nothing
_AGREES = WeakKeyDictionary()  # model -> do both ways give the same hidden states, found out once


def share(model, ids, wanted):
    """(inputs of the second pass, wanted [B, T-P]), the first one done; None where the rows are better run in full.

    ids, wanted [B, T]: which hidden states will be picked; the P shared tokens stand before all of them, whatever is in the rows.
    """
    P = length(model, ids, wanted)
    return (Beginnings(model, ids, P).behind(range(len(ids)), ids), wanted[:, P:]) if P else None


def length(model, ids, wanted) -> int:
    """P, how many first tokens of these rows are best run once for each beginning that is different; 0: none. Arguments as in `share`."""
    first = int(wanted.any(0).int().argmax())  # the first column that is wanted; this one and all later are run for every row
    if first == 0:
        return 0
    starts = ids[:, :first].cpu().unique(dim=0)  # sorted, so that those that begin alike are neighbours
    alike = (starts[1:] == starts[:-1]).int().cumprod(1).sum(0)  # neighbours with the same first P tokens, P = 1 ... first
    most, at = ((len(ids) - len(starts) + alike) * torch.arange(1, first + 1)).max(0)  # tokens that need not run
    if most < PAYS * ids.numel() or why_not(model, ids.shape[1]) or any(getattr(m, "runs_again", False) for m in model.modules()):
        return 0
    P = int(at) + 1
    if model not in _AGREES:
        _AGREES[model] = _agrees(model, ids[:2], P)
    return P if _AGREES[model] else 0


class Beginnings:
    """Keys and values of the first P tokens of some sequences, run here, once for each beginning that is different.

    ids [n, T], 0 < P < T. apart: what follows is cut from the beginnings' own graph, and `backward` joins it again.
    """

    def __init__(self, model, ids, P: int, apart: bool = False):
        starts, row_of = ids[:, :P].cpu().unique(dim=0, return_inverse=True)
        cache = DynamicCache()  # without the config: layers with a (long enough) sliding window keep everything too
        model.base_model(input_ids=starts.to(ids.device), use_cache=True, **{cache_name(model.base_model): cache})
        self.P, self.row_of, self.name, self.layers = P, row_of.tolist(), cache_name(model), cache.layers
        self.encoded = self._given()
        if apart:
            for layer in self.layers:
                layer.keys, layer.values = (t.detach().requires_grad_(t.requires_grad) for t in (layer.keys, layer.values))

    def _given(self) -> list:
        """Keys and values of every layer that rows take, [starts, heads, P, D] each."""
        return [t for layer in self.layers for t in (layer.keys, layer.values)]

    def behind(self, rows, ids) -> dict:
        """Inputs that run ids[:, P:] behind the first P tokens. rows: which of the n sequences ids [b, T] are."""
        cache, starts = DynamicCache(), [self.row_of[row] for row in rows]
        for layer in map(copy.copy, self.layers):
            keys, values = layer.keys.unbind(), layer.values.unbind()
            # by stack, not by an index: its gradient is summed in the same order every time
            layer.keys, layer.values = (torch.stack([t[i] for i in starts]) for t in (keys, values))
            cache.layers.append(layer)
        return {"input_ids": ids[:, self.P :], self.name: cache, "use_cache": True}

    def backward(self):
        """What gathered in keys and values (`apart`) goes on to the weights."""
        pairs = [(t, given.grad) for t, given in zip(self.encoded, self._given()) if given.grad is not None]
        if pairs:
            torch.autograd.backward(*map(list, zip(*pairs)))


def cache_name(model) -> str:
    """What transformers calls the cache among this model's arguments: renamed within its version 5."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def why_not(model, longest: int) -> str:
    """Why nothing can follow cached keys and values of a prefix in this model, in sequences of so many tokens; "" if it can."""
    config = model.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ())
    window = getattr(config, "sliding_window", None) if not kinds or "sliding_attention" in kinds else None
    if getattr(model, "_is_stateful", False) or kinds - {"full_attention", "sliding_attention"}:
        return f"it has layers other than softmax attention over all tokens ({', '.join(sorted(kinds))})"
    if window and window < longest:
        return f"its sliding window of {window} is shorter than the {longest} tokens of a pair"
    if "local" in (getattr(config, "attention_layers", None) or ()):  # GPT-Neo's name for a window, counted in cached tokens
        return f"it has local attention, over the last {config.window_size} tokens of the cache"
    return rope_changes(model, longest)


def rope_changes(model, longest: int) -> str:
    """Why a token's position depends on how long its sequence is, "" if it does not."""
    config = model.config.get_text_config()
    rope = getattr(config, "rope_parameters", None) or {}
    trained = getattr(config, "original_max_position_embeddings", None) or getattr(config, "max_position_embeddings", None)
    for one in (rope, *(v for v in rope.values() if isinstance(v, dict))):  # of all layers, or of each kind
        limit = one.get("original_max_position_embeddings") or trained or math.inf
        if one.get("rope_type") in ("longrope", "dynamic") and longest > limit:
            return f"its positions ({one['rope_type']}) are others beyond {limit} tokens, and a pair has {longest}"
    return ""


def same(shared, plain, **close) -> bool:
    """Whether shared() is close to plain(), in torch.allclose's sense. To break on the shared way is a no; to lack memory is not."""
    try:
        found = shared()
    except Exception as e:  # whatever a model does with what it was not made for
        if out_of_memory(e):
            raise
        return False
    return torch.allclose(found, plain(), **close)


@torch.no_grad()
def _agrees(model, ids, P: int) -> bool:
    """Do both ways give the same hidden states? No list of models is complete, so each is asked, once, on the first rows it gets."""
    run = lambda inputs: model.base_model(**inputs).last_hidden_state[:, P - ids.shape[1] :].float()
    weight = next(model.parameters())
    close = 1e-3 if weight.dtype in (torch.float32, torch.float64) else 0.05
    with torch.autocast(weight.device.type, enabled=False):
        plain = run({"input_ids": ids, "use_cache": False})
        shared = lambda: run(Beginnings(model.base_model, ids, P).behind(range(len(ids)), ids))
        return same(shared, lambda: plain, rtol=close, atol=close * plain.std().item())
