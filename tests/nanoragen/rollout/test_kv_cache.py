"""The layer that writes in place holds what transformers' own layer holds for the rows that go on, and loses none of the others."""

import pytest
import torch
from transformers.cache_utils import DynamicLayer

from nanoragen.rollout.kv_cache import PreallocatedLayer, gather_columns


def states(*shape, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator), torch.randn(shape, generator=generator)


def pair(B=4, C=5, room=20):
    """(ours, transformers' own) with the same B rows of C columns."""
    keys, values = states(B, 2, C, 4, seed=0)
    own = DynamicLayer()
    own.update(keys, values)
    return PreallocatedLayer(*(torch.cat([t, torch.zeros(B, 2, room - C, 4)], dim=2) for t in (keys, values)), C), own


def append(layers, new, seed):
    keys, values = states(layers[0].keys.shape[0], 2, new, 4, seed=seed)
    given = [layer.update(keys, values) for layer in layers]
    for ours, theirs in zip(*given):
        assert torch.equal(ours, theirs)
    assert layers[0].get_seq_length() == layers[1].get_seq_length()
    assert layers[0].get_mask_sizes(1) == layers[1].get_mask_sizes(1)


def test_the_values_are_those_of_transformers_own_layer():
    ours, own = layers = pair()
    place = ours.keys.data_ptr()
    for seed, new in enumerate((1, 1, 4), start=1):
        append(layers, new, seed)
    before = ours.keys.clone(), ours.values.clone()
    ours.swap_rows(torch.tensor([0, 1]), torch.tensor([3, 2]), 2)  # rows 0 and 1 have ended
    own.batch_select_indices(torch.tensor([3, 2]))
    append(layers, 3, 5)
    ours.swap_rows(torch.tensor([], dtype=torch.long), torch.tensor([], dtype=torch.long), 1)  # the last one has
    own.batch_select_indices(torch.tensor([0]))
    append(layers, 1, 6)
    for layer in layers:
        layer.crop(-1)
    append(layers, 1, 7)
    assert ours.keys.data_ptr() == place  # nothing was copied to another place
    for buffer, was in zip(ours.buffers, before):  # those who left are there as they left
        assert torch.equal(buffer[[3, 2, 1, 0], :, :11], was)


def test_memory_has_an_end():
    layer = pair(room=6)[0]
    layer.update(*states(4, 2, 1, 4, seed=1))
    with pytest.raises(IndexError, match="7 columns, and room for 6"):
        layer.update(*states(4, 2, 1, 4, seed=2))


def test_gather_columns_gives_each_row_its_columns():
    t = states(3, 2, 5, 4, seed=0)[0]
    rows, columns = torch.tensor([2, 0, 2, 1]), torch.tensor([[0, 4], [3, 3], [1, 2], [4, 0]])
    for found in (gather_columns(t, rows, columns), gather_columns(t.transpose(1, 2).contiguous().transpose(1, 2), rows, columns)):
        assert found.shape == (4, 2, 2, 4) and found.is_contiguous()
        for i, (row, own) in enumerate(zip(rows.tolist(), columns.tolist())):
            for k, column in enumerate(own):
                assert torch.equal(found[i, :, k], t[row, :, column])
