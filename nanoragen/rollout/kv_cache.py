"""A layer of a KV cache with memory for a whole turn, so that a sampled token's keys and values are written in place.

transformers' `DynamicLayer` copies all keys and values at every token, to join them with the new ones. For many rows with long
contexts that takes longer than the model does. Left out: growing, and choosing or repeating rows.
"""

import torch
from transformers.cache_utils import DynamicLayer


class PreallocatedLayer(DynamicLayer):
    """keys, values [n, heads, C, D]: views of the first n rows and C columns of two buffers [B, heads, capacity, D] given here.

    All numbers in the buffers must be finite: what is masked is still multiplied, by 0.
    """

    def __init__(self, keys: torch.Tensor, values: torch.Tensor, columns: int):
        super().__init__()
        self.lazy_initialization(keys, values)
        self.buffers = keys, values
        self._view(len(keys), columns)

    def update(self, key_states, value_states, *args, **kwargs):
        """Append [n, heads, new, D] each. Returns all keys and values of these rows, valid until the next call."""
        n, C = self.keys.shape[0], self.keys.shape[-2]
        end, capacity = C + key_states.shape[-2], self.buffers[0].shape[-2]
        if end > capacity:  # torch would write nothing to an empty slice, and not say so
            raise IndexError(f"{end} columns, and room for {capacity}")
        for buffer, new in zip(self.buffers, (key_states, value_states)):
            buffer[:n, :, C:end] = new
        self._view(n, end)
        return self.keys, self.values

    def swap_rows(self, front: torch.Tensor, back: torch.Tensor, n: int):
        """Rows `front` change places with rows `back`, and only the first n go on. The others stay in the buffers."""
        C = self.keys.shape[-2]
        for buffer in self.buffers:
            held = buffer[front, :, :C]
            buffer[front, :, :C] = buffer[back, :, :C]
            buffer[back, :, :C] = held
        self._view(n, C)

    def _view(self, rows: int, columns: int):
        self.keys, self.values = (buffer[:rows, :, :columns] for buffer in self.buffers)


def gather_columns(t: torch.Tensor, rows: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """A new tensor [B, heads, K, D]: the rows [B] of t [any, heads, C, D], of each its own columns [B, K]."""
    _, heads, C, D = t.shape
    index = rows[:, None, None] * heads + torch.arange(heads, device=t.device)[:, None]  # [B, heads, 1]
    index = index * C + columns[:, None]  # [B, heads, K]: where it is among all [D] of t
    return t.reshape(-1, D).index_select(0, index.flatten()).view(*index.shape, D)
