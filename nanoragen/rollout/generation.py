"""Replies to the contexts of many episodes by Hugging Face `generate`, with the KV cache kept from turn to turn.

`UncachedGenerator` is the reference implementation: it encodes every context anew each turn. `CachedGenerator` samples the same
tokens. It gives `generate` the same ids and masks, and with them the keys and values of all but the last columns:

- A prompt that several episodes share is encoded once. Keys and values are kept from turn to turn, so that a turn costs its new
  tokens only. Between two turns the rows are aligned anew, without the columns that were padding.
- Every layer keeps every column, also one with a sliding window: rows have no holes, so a window sees the same tokens.
- Finished rows are evicted during a turn: once enough replies have ended, `generate` is called again for the others alone.

Left out on purpose: new episodes that join a running batch, an attention kernel of our own. Shapes: B contexts, C columns.
"""

from contextlib import contextmanager

import torch
from transformers import DynamicCache, GenerationConfig
from transformers.cache_utils import DynamicLayer

from nanoragen.policy.support import cache_argument
from nanoragen.rollout.kv_cache import PreallocatedLayer, gather_columns
from nanoragen.rollout.sampler import Sampler

# Rows are evicted once at least this fraction of them, and this many, have finished, with this many columns still to come.
COMPACT_FRACTION, COMPACT_ROWS, COMPACT_COLUMNS = 0.5, 8, 4


class UncachedGenerator:
    """The reference implementation of CachedGenerator, which is also for models without a KV cache."""

    def __init__(self, model, chat, sampling, contexts):
        """contexts: for each episode its ids up to and including the "<think>" that the reply goes on from."""
        self.model, self.chat, self.sampling, self.contexts = model, chat, sampling, [list(c) for c in contexts]
        pad = chat.tokenizer.pad_token_id
        self.pad_id = chat.end_ids[0] if pad is None else pad

    def sample(self, turn: int, uniforms) -> tuple[list, list]:
        """A reply to each context, drawn by uniforms [B][max_tokens]. turn: what an error names.

        Returns (replies, values): of each its ids, up to and including the first that ends a turn; of each id (log-prob, entropy).
        """
        _, self.replies, values = self._generate(turn, uniforms, *self._pad_left(self.contexts))
        return self.replies, values

    def extend(self, rows: list[int], glue: list[list[int]]):
        """These rows play on, with these ids after their replies; the other rows leave."""
        self.contexts = [self.contexts[row] + self.replies[row] + g for row, g in zip(rows, glue)]

    def _generate(self, turn, uniforms, ids, mask, **more) -> tuple[torch.Tensor, list, list]:
        """`generate` with the temperature alone. Returns the ids [B, C + new], padded on the right, and (replies, values) in them."""
        config = GenerationConfig(
            do_sample=False,  # Sampler has drawn before `generate` chooses
            max_new_tokens=len(uniforms[0]), eos_token_id=self.chat.end_ids, pad_token_id=self.pad_id, use_cache=True,
        )  # fmt: skip
        uniforms = torch.tensor(uniforms, dtype=torch.float64, device=self.model.device)
        sampler = Sampler(uniforms, self.sampling.temperature, start=ids.shape[1])
        out = self.model.generate(input_ids=ids, attention_mask=mask, generation_config=config, logits_processor=[sampler], **more)
        if sampler.broken:
            raise FloatingPointError(f"generate: the model's logits are NaN or infinite in turn {turn}; its weights are broken")
        replies = [self._up_to_end(row) for row in out[:, ids.shape[1] :].tolist()]
        return out, replies, [seen[: len(reply)] for seen, reply in zip(sampler.values(), replies)]

    def _up_to_end(self, row: list[int]) -> list[int]:
        """The ids up to and including the first that ends a turn; all where there is none."""
        return row[: next((i + 1 for i, id in enumerate(row) if id in self.chat.end_ids), len(row))]

    def _pad_left(self, rows) -> tuple[torch.Tensor, torch.Tensor]:
        """Lists of ids as (ids, mask), both [B, C] int64, padded on the left."""
        C, device = max(map(len, rows)), self.model.device
        ids = torch.tensor([[self.pad_id] * (C - len(r)) + list(r) for r in rows], device=device)
        mask = torch.tensor([[0] * (C - len(r)) + [1] * len(r) for r in rows], device=device)
        return ids, mask


class CachedGenerator(UncachedGenerator):
    """The same with a KV cache: the first cached[i] ids of context i have keys and values in row row[i], from column start[i] on."""

    def __init__(self, model, chat, sampling, contexts):
        super().__init__(model, chat, sampling, contexts)
        if not contexts:
            return
        prompts = list(dict.fromkeys(tuple(c) for c in contexts))
        number = {p: i for i, p in enumerate(prompts)}
        ids, mask = self._pad_left(prompts)
        inputs = {"input_ids": ids, "attention_mask": mask, "position_ids": (mask.cumsum(1) - 1).clamp(min=0)}
        self.cache_argument = cache_argument(model)
        cache = DynamicCache(config=model.config.get_text_config())
        cache.layers = [DynamicLayer() for _ in cache.layers]  # a sliding layer would drop what is behind its window
        inputs = {key: tensor[:, :-1] for key, tensor in inputs.items()} | {self.cache_argument: cache}
        out = model(**inputs, use_cache=True, logits_to_keep=1)
        self.cache = out[self.cache_argument]
        self.row = [number[tuple(c)] for c in contexts]
        self.start = [ids.shape[1] - len(c) for c in contexts]
        self.cached = [len(c) - 1 for c in contexts]

    def sample(self, turn: int, uniforms) -> tuple[list, list]:
        ends, max_tokens = self.chat.end_ids, self.sampling.max_tokens
        ids, mask = self._pad_left(self.contexts)
        self._align(ids.shape[1])
        self.replies, values = [[] for _ in ids], [[] for _ in ids]
        order, sampled = list(range(len(ids))), 0  # the context in each row of the cache; columns of the replies so far
        while True:
            C = ids.shape[1]
            enough = _EnoughFinished(torch.tensor(ends, device=ids.device), C + max_tokens - sampled)
            out, new, seen = self._generate(
                turn, [uniforms[i][sampled:] for i in order[: len(ids)]], ids, mask,
                stopping_criteria=[enough], **{self.cache_argument: self.cache},
            )  # fmt: skip
            for row, i in enumerate(order[: len(ids)]):
                self.replies[i] += new[row]
                values[i] += seen[row]
                # the last column has not been through the model yet; those after an end are padding
                self.cached[i] = min(len(self.contexts[i]) + len(self.replies[i]), out.shape[1] - 1 - self.start[i])
            sampled += out.shape[1] - C
            live = [row for row, reply in enumerate(new) if reply[-1] not in ends]
            if sampled == max_tokens or not 0 < len(live) < len(new):
                break
            mask = torch.cat([mask, mask.new_ones(len(out), out.shape[1] - C)], dim=1)
            ids, mask = self._evict_finished(live, order, out, mask)
        for row, i in enumerate(order):
            self.row[i] = row
        return self.replies, values

    def extend(self, rows: list[int], glue: list[list[int]]):
        super().extend(rows, glue)
        self.row, self.start, self.cached = ([of[row] for row in rows] for of in (self.row, self.start, self.cached))

    def _align(self, C: int):
        """Make row i that of context i, padded on the left to C columns, with memory for a reply; what is not cached in all rows goes."""
        device, start = self.model.device, [C - len(c) for c in self.contexts]
        rows = torch.tensor(self.row, device=device)
        shift = torch.tensor([old - new for old, new in zip(self.start, start)], device=device)
        columns = torch.arange(C + self.sampling.max_tokens - 1, device=device) + shift[:, None]
        uncached = max(len(c) - n for c, n in zip(self.contexts, self.cached))  # columns that `generate` has to encode
        for n, layer in enumerate(self.cache.layers):  # one by one, so that only one layer is in memory twice
            buffers = getattr(layer, "buffers", (layer.keys, layer.values))
            inside = columns.clamp(0, buffers[0].shape[-2] - 1)  # elsewhere there is padding, or it is yet to be written
            self.cache.layers[n] = PreallocatedLayer(*(gather_columns(t, rows, inside) for t in buffers), C - uncached)
        self.start = start

    def _evict_finished(self, live: list[int], order: list[int], ids, mask) -> tuple[torch.Tensor, torch.Tensor]:
        """Live rows change places with the finished rows before them. Returns the ids and masks of the live ones."""
        n = len(live)
        front, back = sorted(set(range(n)) - set(live)), [row for row in live if row >= n]
        for a, b in zip(front, back):
            order[a], order[b] = order[b], order[a]
        front, back = (torch.tensor(rows, dtype=torch.long, device=ids.device) for rows in (front, back))
        ids[front], mask[front] = ids[back], mask[back]
        for layer in self.cache.layers:
            layer.swap_rows(front, back, n)
        return ids[:n], mask[:n]


class _EnoughFinished:
    """A stopping criterion for `generate`, called after each token: have enough rows finished to go on without them?

    end_ids: a tensor. last: the columns there can be. Nothing here waits for the device.
    """

    def __init__(self, end_ids, last: int):
        self.end_ids, self.last, self.finished = end_ids, last, False

    def __call__(self, input_ids, scores, **_) -> torch.Tensor:
        """[B] bool: the rows that stop. `generate` ends when all do."""
        self.finished = torch.isin(input_ids[:, -1], self.end_ids) | self.finished
        enough = self.finished.sum() >= max(COMPACT_ROWS, COMPACT_FRACTION * len(input_ids))
        return self.finished | enough if self.last - input_ids.shape[1] >= COMPACT_COLUMNS else self.finished


@contextmanager
def sampling_mode(model):
    """No gradients, no dropout, and a blank generation config: `generate` fills unset options from the model's own."""
    own, training = model.generation_config, model.training
    model.generation_config = GenerationConfig()
    model.eval()  # also what keeps gradient checkpointing from switching the cache off
    try:
        with torch.no_grad():
            yield
    finally:
        model.generation_config = own
        model.train(training)
