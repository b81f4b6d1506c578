"""What several sequences begin with is encoded once: the keys and values of the first P tokens, with gradient through them.

    prefix = prefix_cache(model, batch, rows, dtype)            # or None, where it would save little or the model cannot
    inputs = prefix.suffix_inputs(some_rows, ids)               # run what follows, for some of the rows
    loss.backward()                                             # of each; stops at the prefix
    prefix.backward()                                           # after the last: goes on to the weights

Episodes of a group share their prompt, and all of a run the instruction. The first P tokens are run once for each prefix that is
different; every row takes the keys and values of its own and runs only what follows. Attention is causal and positions count from
the first token, so numbers and gradient are those of the row alone, up to rounding. Weights stand still within an update, so all its
micro-batches follow the same keys and values; their gradients add up and go through the prefixes once (the chain rule, summed early).

Left out: prefixes of several lengths side by side (P is the one that leaves the least to run), packed rows, checkpointed layers.
"""

import copy

import torch
from transformers import DynamicCache

from nanoragen.policy import support
from nanoragen.policy.loading import autocast

MIN_SAVED = 0.1  # share of the tokens that a prefix must save; measured with the bundled model on a CPU: 0.09 gains nothing


def prefix_cache(model, batch, rows, dtype="auto", detach=True):
    """The PrefixCache of some rows of a Batch; None where they are better run in full. dtype: as `autocast` takes it."""
    part = batch.select(rows)
    P = 0 if support.packs_sequences(model) else prefix_length(model, part.ids, part.predicts)
    if not P:
        return None
    with autocast(part.ids.device, dtype):
        return PrefixCache(model, part.ids[:, :P], rows.tolist(), detach)


def prefix_length(model, ids, wanted) -> int:
    """P, how many first tokens of these rows are best run once for each prefix that is different; 0: none.

    ids, wanted [B, T]: which hidden states will be picked. The P tokens stand before all of them, whatever is in the rows.
    """
    first = int(wanted.any(0).int().argmax())  # the first column that is wanted; this one and all later are run for every row
    if first == 0:
        return 0
    starts = ids[:, :first].cpu().unique(dim=0)  # sorted, so that those that begin alike are neighbours
    alike = (starts[1:] == starts[:-1]).int().cumprod(1).sum(0)  # neighbours with the same first P tokens, P = 1 ... first
    saved, at = ((len(ids) - len(starts) + alike) * torch.arange(1, first + 1)).max(0)  # tokens that need not run
    P = int(at) + 1
    if saved < MIN_SAVED * ids.numel() or support.prefix_cache_unsupported(model, ids.shape[1]) or support.is_checkpointed(model):
        return 0
    return P if same_states(model, ids[:2], P) else 0


class PrefixCache:
    """Keys and values of the first P tokens of some rows, run here, once for each prefix that is different.

    ids [n, P]; rows: names of the n rows, for `suffix_inputs`. detach: what follows is cut from the prefixes' own graph, and
    `backward` joins it again.
    """

    def __init__(self, model, ids, rows, detach: bool):
        prefixes, prefix_of = ids.cpu().unique(dim=0, return_inverse=True)
        cache = DynamicCache()  # without the config: layers with a (long enough) sliding window keep everything too
        model.base_model(input_ids=prefixes.to(ids.device), use_cache=True, **{support.cache_argument(model.base_model): cache})
        self.P, self.prefix_of = ids.shape[1], dict(zip(rows, prefix_of.tolist()))
        self.argument, self.layers = support.cache_argument(model), cache.layers
        self.encoded = self.keys_and_values()
        if detach:
            for layer in self.layers:
                layer.keys, layer.values = (t.detach().requires_grad_(t.requires_grad) for t in (layer.keys, layer.values))

    def keys_and_values(self) -> list:
        """Of every layer, as suffixes take them, [prefixes, heads, P, D] each."""
        return [t for layer in self.layers for t in (layer.keys, layer.values)]

    def suffix_inputs(self, rows, ids) -> dict:
        """What to call the model with to run ids[:, P:] after the first P tokens. rows: names of the rows that ids [b, T] are."""
        cache, prefixes = DynamicCache(), [self.prefix_of[row] for row in rows]
        for layer in map(copy.copy, self.layers):
            keys, values = layer.keys.unbind(), layer.values.unbind()
            # by stack, not by an index: its gradient is summed in the same order every time
            layer.keys, layer.values = (torch.stack([t[i] for i in prefixes]) for t in (keys, values))
            cache.layers.append(layer)
        return {"input_ids": ids[:, self.P :], self.argument: cache, "use_cache": True}

    def backward(self):
        """The gradient that gathered in keys and values goes on to the weights (`detach`)."""
        pairs = [(t, given.grad) for t, given in zip(self.encoded, self.keys_and_values()) if given.grad is not None]
        if pairs:
            torch.autograd.backward(*map(list, zip(*pairs)))


@support.once_per_model
@torch.no_grad()
def same_states(model, ids, P: int) -> bool:
    """Whether rows give the same hidden states in full and after a cached prefix of P tokens: tried on the first rows there are."""
    states = lambda inputs: model.base_model(**inputs).last_hidden_state[:, P - ids.shape[1] :].float()
    close = support.rounding(model)
    with torch.autocast(ids.device.type, enabled=False):
        full = states({"input_ids": ids, "use_cache": False})
        after = lambda: states(PrefixCache(model.base_model, ids[:, :P], range(len(ids)), detach=False).suffix_inputs(range(len(ids)), ids))
        return support.close_to(after, lambda: full, rtol=close, atol=close * full.std().item())
