"""Episodes to tensors (cases R1, R6, R7, R13)."""

import pytest
import torch

from nanoragen.policy.batches import make_batch, split_by_length
from nanoragen.rollout.episodes import Episode, Turn


def episode(*spans, pad=0, end=1):
    """ids 10, 11, ... with replies at `spans` (start, end of ids), each closed by the end-of-turn id."""
    n = spans[-1][1]
    ids, mask = list(range(10, 10 + n)), [0] * n
    turns = []
    for a, b in spans:
        mask[a:b] = [1] * (b - a)
        ids[b - 1] = end
        turns.append(Turn(a, b, a, "o", "r", [], True, 0.5))
    return Episode("game", 0, 0, ids, mask, turns)


def test_r7_r13_padding_with_the_end_of_turn_id():
    batch = make_batch([episode((2, 5)), episode((3, 5), (6, 10))], pad_id=1)  # pad = end of turn
    assert batch.ids.tolist() == [[10, 11, 12, 13, 1, 1, 1, 1, 1, 1], [10, 11, 12, 13, 1, 15, 16, 17, 18, 1]]
    assert batch.mask.int().tolist() == [[0, 0, 1, 1, 1, 0, 0, 0, 0, 0], [0, 0, 0, 1, 1, 0, 1, 1, 1, 1]]
    assert batch.attention_mask.tolist() == [[1] * 5 + [0] * 5, [1] * 10]
    assert batch.turn.tolist() == [[-1, -1, 0, 0, 0] + [-1] * 5, [-1, -1, -1, 0, 0, -1, 1, 1, 1, 1]]
    # a reward at the end of the last turn lands on the end of turn that was sampled, not one further
    last = [row.nonzero().max().item() for row in batch.mask]
    assert last == [4, 9]


def test_r1_r7_gradient_reaches_the_sampled_ids_and_only_them():
    batch = make_batch([episode((2, 5)), episode((3, 5), (6, 10))], pad_id=1)
    logits = torch.randn(2, 10, 32, requires_grad=True)
    logp = logits[:, :-1].log_softmax(-1).gather(2, batch.ids[:, 1:, None])[..., 0]
    (logp * batch.mask[:, 1:]).sum().backward()
    assert (logits.grad.abs().sum(-1) > 0).int().tolist() == [
        [0, 1, 1, 1, 0, 0, 0, 0, 0, 0],  # position 3 predicts the end of turn at 4
        [0, 0, 1, 1, 0, 1, 1, 1, 1, 0],
    ]


def test_select_trims_the_padding():
    batch = make_batch([episode((2, 5)), episode((3, 5), (6, 10)), episode((1, 3))], pad_id=0)
    part = batch.select(torch.tensor([2, 0]))
    assert part.ids.shape == (2, 5)
    assert part.ids.tolist() == [[10, 11, 1, 0, 0], [10, 11, 12, 13, 1]]
    assert part.turn.tolist() == [[-1, 0, 0, -1, -1], [-1, -1, 0, 0, 0]]
    assert part.to("cpu").mask.dtype == torch.bool


def test_an_episode_without_a_turn():
    empty = Episode("game", 0, 0, [7, 8, 9], [0, 0, 0], truncated="context")
    batch = make_batch([empty, episode((2, 5))], pad_id=0)
    assert not batch.mask[0].any() and (batch.turn[0] == -1).all() and batch.attention_mask[0].sum() == 3


def test_split_by_length():
    lengths = [5, 9, 3, 7, 9]
    batch = make_batch([episode((1, n)) for n in lengths], pad_id=0)
    parts = split_by_length(batch, torch.tensor([0, 1, 2, 4]), 3)  # without row 3
    assert [p.tolist() for p in parts] == [[1, 4, 0], [2]]
    assert [p.tolist() for p in split_by_length(batch, torch.arange(5), 100)] == [[1, 4, 3, 0, 2]]
    with pytest.raises(ValueError, match="micro_batch"):
        split_by_length(batch, torch.arange(5), 0)


def test_split_by_length_by_tokens_hold_as_many_rows_as_fit():
    lengths = [5, 9, 3, 7, 9, 4]
    batch, rows = make_batch([episode((1, n)) for n in lengths], pad_id=0), torch.arange(6)
    cut = lambda *limits: [p.tolist() for p in split_by_length(batch, rows, *limits)]
    assert cut(100, 18) == [[1, 4], [3, 0], [5, 2]]  # 2 x 9, 2 x 7 (3 x 7 is too many), 2 x 4
    assert cut(100, 21) == [[1, 4], [3, 0, 5], [2]]
    assert cut(1, 18) == [[1], [4], [3], [0], [5], [2]]  # both limits apply
    assert cut(100, 1) == [[1], [4], [3], [0], [5], [2]]  # an episode is never cut, nor left out
    assert cut(4, 10**9) == cut(4) == [[1, 4, 3, 0], [5, 2]]
    assert split_by_length(batch, rows[:0], 4, 18) == []
    shuffled = split_by_length(batch, torch.tensor([2, 5, 1]), 100, 13)
    assert [p.tolist() for p in shuffled] == [[1], [5, 2]]
