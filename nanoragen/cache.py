"""A layer of a KV cache with room behind it, so that a new token is written in place.

transformers' `DynamicLayer` joins old and new into a new tensor at every token: all keys and values are copied for each token
that is sampled, and for many rows with long contexts that takes longer than the model does. Left out: giving memory back.
"""

import torch
from transformers.cache_utils import DynamicLayer

ROOM = 128  # columns: a copy of everything that many tokens, and at most so much memory more


class RoomyLayer(DynamicLayer):
    """keys, values [B, heads, C, D]: views of the first C columns of a wider store, with the values DynamicLayer would have."""

    def __init__(self, keys: torch.Tensor, values: torch.Tensor):
        super().__init__()
        self.lazy_initialization(keys, values)
        self.keys, self.values, self.stores, self.last = keys, values, (keys, values), keys

    def update(self, key_states, value_states, *args, **kwargs):
        """Append [B, heads, new, D] each. Returns all keys and values, valid until the next call."""
        C = self.keys.shape[-2]
        end = C + key_states.shape[-2]
        # Rows selected or columns cropped meanwhile are another tensor than the last view: the store is out of date.
        if self.keys is not self.last or end > self.stores[0].shape[-2]:
            self.stores = tuple(_widened(t, end + ROOM) for t in (self.keys, self.values))
        for store, new in zip(self.stores, (key_states, value_states)):
            store[..., C:end, :] = new
        self.keys, self.values = (store[..., :end, :] for store in self.stores)
        self.last = self.keys
        return self.keys, self.values


def _widened(t: torch.Tensor, columns: int) -> torch.Tensor:
    """t [B, heads, C, D] at the front of a tensor [B, heads, columns, D]; what is behind it is not set."""
    wide = t.new_empty((*t.shape[:-2], columns, t.shape[-1]))
    wide[..., : t.shape[-2], :] = t
    return wide
