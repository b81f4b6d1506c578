"""The layer that writes in place holds what transformers' own layer holds, and copies only when its room is used up."""

import pytest
import torch
from transformers.cache_utils import DynamicLayer

from nanoragen import cache
from nanoragen.cache import RoomyLayer


def states(*shape, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator), torch.randn(shape, generator=generator)


def pair(B=3, C=5):
    """(ours, transformers' own) with the same B rows of C columns."""
    keys, values = states(B, 2, C, 4, seed=0)
    own = DynamicLayer()
    own.update(keys, values)
    return RoomyLayer(keys, values), own


def append(layers, new, seed):
    keys, values = states(layers[0].keys.shape[0], 2, new, 4, seed=seed)
    given = [layer.update(keys, values) for layer in layers]
    for ours, theirs in zip(*given):
        assert torch.equal(ours, theirs)
    assert layers[0].get_seq_length() == layers[1].get_seq_length()


@pytest.mark.parametrize("room", [1, 2, 128])
def test_the_values_are_those_of_transformers_own_layer(room, monkeypatch):
    monkeypatch.setattr(cache, "ROOM", room)
    layers = pair()
    for seed, new in enumerate((1, 1, 1, 4, 1), start=1):
        append(layers, new, seed)
    for rows in ([0, 2], [1]):  # episodes leave; what is written afterwards must not land in the rows of the old store
        for layer in layers:
            layer.batch_select_indices(torch.tensor(rows))
        append(layers, 1, 10)
        append(layers, 3, 11)
    for layer in layers:
        layer.crop(-2)
    append(layers, 1, 20)
    append(layers, 1, 21)


def test_a_token_is_written_in_place_and_the_prompt_is_never_written_to():
    keys, values = states(2, 2, 5, 4, seed=0)
    before = keys.clone()
    layer = RoomyLayer(keys, values)
    layer.update(*states(2, 2, 1, 4, seed=1))
    place = layer.keys.data_ptr()
    for n in range(cache.ROOM):
        layer.update(*states(2, 2, 1, 4, seed=n))
        assert layer.keys.data_ptr() == place
    layer.update(*states(2, 2, 1, 4, seed=2))
    assert layer.keys.data_ptr() != place  # the room is used up
    assert torch.equal(keys, before)
