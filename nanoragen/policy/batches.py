"""Episodes to tensors: right padding, masks, turn index; and rows split into groups that fit into one forward pass.

Masks come from the episodes (that is, from the sampler), never from looking for an id, so the padding id may be the end-of-turn id.
Padding is on the right: position ids are 0, 1, 2, ... without being given. B episodes, T tokens of the longest.
"""

from dataclasses import dataclass

import torch

from nanoragen.run import distributed


@dataclass
class Batch:
    ids: torch.Tensor  # [B, T] long, padded on the right
    attention_mask: torch.Tensor  # [B, T] long, 1 on everything but padding
    mask: torch.Tensor  # [B, T] bool, True on exactly the ids that the model sampled
    turn: torch.Tensor  # [B, T] long, turn index (from 0) of a sampled id, -1 elsewhere

    def to(self, device) -> "Batch":
        return Batch(*(t.to(device) for t in (self.ids, self.attention_mask, self.mask, self.turn)))

    def select(self, rows: torch.Tensor) -> "Batch":
        """These rows, padded no further than their longest. rows: [b] long."""
        rows = rows.to(self.ids.device)
        T = int(self.attention_mask[rows].sum(1).max())
        return Batch(*(t[rows, :T] for t in (self.ids, self.attention_mask, self.mask, self.turn)))

    @property
    def predicts(self) -> torch.Tensor:
        """[B, T] bool: positions whose hidden state predicts a sampled id, which is the next one."""
        return torch.nn.functional.pad(self.mask[:, 1:], (0, 1))


def make_batch(episodes, pad_id: int) -> Batch:
    """Episodes (at least one) as one Batch on the CPU."""
    B, T = len(episodes), max(len(e.ids) for e in episodes)
    ids = torch.full((B, T), pad_id, dtype=torch.long)
    attention_mask = torch.zeros(B, T, dtype=torch.long)
    mask = torch.zeros(B, T, dtype=torch.bool)
    turn = torch.full((B, T), -1, dtype=torch.long)
    for b, episode in enumerate(episodes):
        n = len(episode.ids)
        ids[b, :n] = torch.tensor(episode.ids)
        attention_mask[b, :n] = 1
        mask[b, :n] = torch.tensor(episode.mask, dtype=torch.bool)
        for i, t in enumerate(episode.turns):
            turn[b, t.start : t.end] = i
    return Batch(ids, attention_mask, mask, turn)


def split_by_length(batch: Batch, rows: torch.Tensor, max_rows: int, max_tokens: int = 0, cached: int = 0) -> list[torch.Tensor]:
    """Split rows of a batch into index tensors of at most max_rows, alike in length, longest first.

    max_tokens: at most so many tokens each, padding counted (rows x longest); 0: no such limit. A row that is longer is alone.
    cached: first tokens of each row that are not run. Longest first so that memory runs out at once or never.
    """
    if max_rows < 1:
        raise ValueError(f"micro_batch: {max_rows} rows; valid: 1 or more")
    lengths = batch.attention_mask[rows.to(batch.ids.device)].sum(1).cpu() - cached
    order = lengths.argsort(descending=True, stable=True)
    sizes, lengths = [], lengths[order].tolist()
    while sum(sizes) < len(lengths):
        longest = max(1, lengths[sum(sizes)])
        size = min(max_rows, max(1, max_tokens // longest)) if max_tokens else max_rows
        sizes.append(min(size, len(lengths) - sum(sizes)))
    return list(rows.cpu()[order].split(sizes)) if sizes else []


def sorted_by_prompt(batch: Batch, rows: torch.Tensor) -> list[tuple[int, tuple[int, ...]]]:
    """[(row, its prompt: what stands before the first sampled id)], those of one prompt together, prompts alike in length too."""
    where = rows.to(batch.ids.device)
    starts = batch.mask[where].int().argmax(1).tolist()
    begins = batch.ids[where, : max(starts, default=0)].tolist()
    found = [(row, tuple(ids[:start])) for row, ids, start in zip(rows.tolist(), begins, starts)]
    return sorted(found, key=lambda pair: (len(pair[1]), pair[1]))


def local_shard(batch: Batch, found: list) -> list:
    """This process's share of a list as above: consecutive entries of it, so that few prompts are run in two processes."""
    if distributed.world() == 1:
        return found
    lengths = batch.attention_mask.sum(1).tolist()
    total, done, shard = sum(lengths[row] for row, _ in found), 0, []
    for row, prompt in found:
        middle = done + lengths[row] / 2
        if int(middle * distributed.world() / total) == distributed.rank():
            shard.append((row, prompt))
        done += lengths[row]
    return shard


def group_prefixes(found: list, max_rows: int, max_tokens: int) -> list[torch.Tensor]:
    """The rows of a list as above in parts whose different prompts fit into one forward pass (in tokens: one is never cut)."""
    parts, last, held = [], None, 0  # held: prompts in the last part
    for row, prompt in found:
        if prompt != last:
            last, held = prompt, held + 1
            if not parts or held > max_rows or (max_tokens and held * len(prompt) > max_tokens):
                parts, held = [*parts, []], 1
        parts[-1].append(row)
    return [torch.tensor(part, dtype=torch.long) for part in parts]
