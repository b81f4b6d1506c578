"""A layer of a KV cache that is put together once a turn, with room for the turn behind it, so that a token is written in place.

transformers' `DynamicLayer` joins old and new into a new tensor at every token: all keys and values are copied for each token
that is sampled, and for many rows with long contexts that takes longer than the model does. Left out: growing beyond the room,
and the ways of `DynamicLayer` to choose or repeat rows (`generate` without beams uses none).
"""

import torch
from transformers.cache_utils import DynamicLayer


class RoomyLayer(DynamicLayer):
    """keys, values [n, heads, C, D]: views of the first n rows and C columns of the stores [B, heads, room, D] given here.

    All numbers in the stores must be finite: what is masked is still multiplied, by 0.
    """

    def __init__(self, keys: torch.Tensor, values: torch.Tensor, columns: int):
        super().__init__()
        self.lazy_initialization(keys, values)
        self.stores = keys, values
        self._view(len(keys), columns)

    def update(self, key_states, value_states, *args, **kwargs):
        """Append [n, heads, new, D] each. Returns all keys and values of these rows, valid until the next call."""
        n, C = self.keys.shape[0], self.keys.shape[-2]
        end = C + key_states.shape[-2]
        if end > self.stores[0].shape[-2]:  # torch would write nothing to an empty slice, and not say so
            raise IndexError(f"{end} columns, and room for {self.stores[0].shape[-2]}")
        for store, new in zip(self.stores, (key_states, value_states)):
            store[:n, :, C:end] = new
        self._view(n, end)
        return self.keys, self.values

    def swap(self, front: torch.Tensor, back: torch.Tensor, rows: int):
        """Rows `front` change places with rows `back`, and only the first `rows` go on. The others stay in the stores."""
        C = self.keys.shape[-2]
        for store in self.stores:
            held = store[front, :, :C]
            store[front, :, :C] = store[back, :, :C]
            store[back, :, :C] = held
        self._view(rows, C)

    def _view(self, rows: int, columns: int):
        self.keys, self.values = (store[:rows, :, :columns] for store in self.stores)


def take(t: torch.Tensor, rows: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """A new tensor [B, heads, K, D]: the rows [B] of t [any, heads, C, D], of each its own columns [B, K]."""
    _, heads, C, D = t.shape
    at = rows[:, None, None] * heads + torch.arange(heads, device=t.device)[:, None]  # [B, heads, 1]
    at = at * C + columns[:, None]  # [B, heads, K]: where it is among all [D] of t
    return t.reshape(-1, D).index_select(0, at.flatten()).view(*at.shape, D)
