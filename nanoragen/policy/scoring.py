"""Micro-batches of episodes, and log p and entropy of the tokens that were sampled.

    for micro in micro_batches(model, batch, rows, c):
        with autocast(device, c.dtype):
            logprob, entropy = token_logprobs(model, micro, temperature)        # [P], [P]
        loss = ... micro.pick(advantage) ...                                    # tables [B, T] -> [P]
        loss.backward()
        micro.finish_prefix()                                                   # the shared prompts' own backward pass

b episodes of a micro-batch, P sampled tokens in it, in reading order.
"""

from dataclasses import dataclass

import torch

from nanoragen.kernels.linear import linear_logprob_entropy
from nanoragen.kernels.logprob import logprob_entropy
from nanoragen.policy import support
from nanoragen.policy.batches import Batch, group_prefixes, local_shard, sorted_by_prompt, split_by_length
from nanoragen.policy.loading import autocast
from nanoragen.policy.prefix_cache import PrefixCache, prefix_cache
from nanoragen.run import distributed


@dataclass
class MicroBatch:
    rows: torch.Tensor  # [b] long: which rows of the batch
    mask: torch.Tensor  # [b, T] bool: their sampled ids
    inputs: dict  # what the model is called with
    wanted: torch.Tensor  # bool, of the shape of the ids in inputs: the P positions whose hidden states predict sampled ids
    targets: torch.Tensor  # [P] long: the sampled ids
    prefix: PrefixCache | None = None  # what the rows follow, if anything
    last: bool = False  # no other micro-batch follows this prefix

    def pick(self, table: torch.Tensor) -> torch.Tensor:
        """What a table [B, T] over the batch holds for the sampled tokens. [P]"""
        return table[self.rows][self.mask]

    def row_of_token(self) -> torch.Tensor:
        """The row of the batch that each sampled token belongs to. [P] long"""
        return self.rows.to(self.mask.device)[self.mask.nonzero()[:, 0]]

    def finish_prefix(self):
        """After the backward pass of the last micro-batch that follows a prefix: the prefix's own."""
        if self.prefix and self.last:
            self.prefix.backward()


def micro_batches(model, batch: Batch, rows: torch.Tensor, c):
    """Some rows (long, the same in every process) as MicroBatches of at most c.micro_batch episodes and c.micro_tokens tokens.

    Under torchrun each process gets a share of about as many tokens as the others'. Prompts are run once for all micro-batches where
    the model can and it saves enough; their graph is held until `finish_prefix`, and no weight may move meanwhile.
    """
    for some in group_prefixes(local_shard(batch, sorted_by_prompt(batch, rows)), c.micro_batch, c.micro_tokens):
        prefix = prefix_cache(model, batch, some, c.dtype)
        parts = split_by_length(batch, some, c.micro_batch, c.micro_tokens, cached=prefix.P if prefix else 0)
        for part in parts:
            yield micro_batch(model, batch, part, prefix, last=part is parts[-1])


def micro_batch(model, batch: Batch, rows: torch.Tensor, prefix: PrefixCache | None = None, last=False) -> MicroBatch:
    """These rows as one MicroBatch: after their prefix; or in one row [1, N] without padding, where the model packs sequences, with
    positions that start at 0 with each episode, which tells flash-attn where one ends; or padded."""
    part = batch.select(rows)
    wanted, targets, real = part.predicts, part.ids[part.mask], part.attention_mask.bool()
    if prefix:
        inputs, wanted = prefix.suffix_inputs(rows.tolist(), part.ids), wanted[:, prefix.P :]
    elif support.packs_sequences(model):
        positions = torch.arange(part.ids.shape[1], device=part.ids.device).expand_as(part.ids)
        inputs = {"input_ids": part.ids[real][None], "position_ids": positions[real][None], "use_cache": False}
        wanted = wanted[real][None]
    else:
        inputs = {"input_ids": part.ids, "attention_mask": part.attention_mask, "use_cache": False}
    return MicroBatch(rows, batch.mask[rows], inputs, wanted, targets, prefix, last)


def token_logprobs(model, micro: MicroBatch, temperature=1.0, fused=True):
    """log pi(token | its context) and the entropy there: (logprob [P], entropy [P]), fp32, differentiable.

    The hidden states are picked on their way into the LM head, so [b, T, V] is never held. Nor is [P, V] where the logits are
    hidden x weight and nothing else (kernels/linear.py). fused=False is the reference implementation, and what models get that
    scale or cap their logits, or whose head is adapted.
    """
    fused = fused and support.lm_head_is_linear(model)
    pick = lambda hidden: hidden[micro.wanted][None]
    logits, hidden = support.through_head(model, pick, run_head=not fused, **micro.inputs)
    if not fused:
        return logprob_entropy(logits[0], micro.targets, temperature=temperature)
    if torch.is_autocast_enabled(hidden.device.type):
        hidden = hidden.to(torch.get_autocast_dtype(hidden.device.type))  # as the head itself would have
    head = model.get_output_embeddings()
    return linear_logprob_entropy(hidden[0], head.weight, micro.targets, bias=head.bias, temperature=temperature)


@torch.no_grad()
def token_table(model, batch: Batch, rows: torch.Tensor, c, score) -> torch.Tensor:
    """[B, T]: score(micro-batch) -> [P] of every sampled token of some rows (as in `micro_batches`), without gradient; 0 elsewhere."""
    table = torch.zeros(batch.ids.shape, device=batch.ids.device)
    for micro in micro_batches(model, batch, rows, c):
        with autocast(table.device, c.dtype):
            found = score(micro)
        table[micro.rows] = table[micro.rows].masked_scatter(micro.mask, found)
    distributed.sum_tensors([table])  # each process has scored its share
    return table
