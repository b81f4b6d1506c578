"""The contexts of the episodes that are played, and replies to them by Hugging Face `generate`. Two ways to the same tokens.

The plain one (`PlainContexts`) encodes every context anew each turn. The fast one (`CachedContexts`) hands `generate` the same ids
and masks with keys and values of all but the last columns:

- A prompt that several episodes share is encoded once, and keys and values are kept from turn to turn, so that a turn costs its
  new tokens only. Between two turns the kept ones are put together again without the columns that were padding.
- The cache keeps every column in every layer, also where a layer looks back over a window only: masks count columns, rows have no
  holes, so a window sees the same tokens as in the plain way.
- A turn is played in legs: once enough rows have ended their replies, `generate` is left and goes on without them, so that a
  long reply does not keep the others busy with padding.

Left out on purpose: new episodes joining a running batch, an attention kernel of our own. B episodes still playing, C columns of their
contexts.
"""

import inspect
import math
from contextlib import contextmanager

import torch

from nanoragen.rollout.sampler import Draw

# A leg ends where at least this share of its rows, and this many, have ended, with this many columns still to come.
LEG_SHARE, LEG_ROWS, LEG_COLUMNS = 0.5, 8, 4


class PlainContexts:
    """The contexts of the episodes still playing, encoded anew each turn: the twin of CachedContexts."""

    def __init__(self, model, chat, sampling, contexts):
        self.model, self.chat, self.sampling, self.contexts = model, chat, sampling, [list(c) for c in contexts]

    def sample(self, turn: int, luck) -> list[list[int]]:
        """One reply for each context: its sampled ids, up to and including the first that ends a turn. luck: [B][max_tokens];
        self.values: of each id, Draw.values, perhaps with more behind them."""
        ids, mask = _pad_left(self.contexts, _pad_id(self.chat), self.model.device)
        out, self.values = _generate(self.model, self.chat, self.sampling, turn, luck, input_ids=ids, attention_mask=mask)
        self.replies = _cut(out[:, ids.shape[1] :], self.chat.end_ids)
        return self.replies

    def follow(self, rows: list[int], glue: list[list[int]]):
        """These rows play on, with these ids after their replies; the others leave."""
        self.contexts = [self.contexts[row] + self.replies[row] + g for row, g in zip(rows, glue)]


class CachedContexts(PlainContexts):
    """The same with kept keys and values. Of context i, those of its first known[i] ids are in row at[i] of the cache's stores,
    from column start[i] on."""

    def __init__(self, model, chat, sampling, contexts):
        super().__init__(model, chat, sampling, contexts)
        if not contexts:
            return
        from transformers.cache_utils import DynamicCache, DynamicLayer

        from nanoragen.policy.prefix_cache import cache_name  # imports transformers

        prompts = list(dict.fromkeys(tuple(c) for c in contexts))
        number = {p: i for i, p in enumerate(prompts)}
        ids, mask = _pad_left(prompts, _pad_id(chat), model.device)
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        self.cache_name = cache_name(model)
        cache = DynamicCache(config=model.config.get_text_config())
        cache.layers = [DynamicLayer() for _ in cache.layers]  # a sliding layer would drop what is behind its window
        out = model(
            input_ids=ids[:, :-1],
            attention_mask=mask[:, :-1],
            position_ids=positions[:, :-1],
            use_cache=True,
            logits_to_keep=1,
            **{self.cache_name: cache},
        )
        self.cache = out[self.cache_name]
        self.at = [number[tuple(c)] for c in contexts]
        self.start = [ids.shape[1] - len(c) for c in contexts]
        self.known = [len(c) - 1 for c in contexts]

    def sample(self, turn: int, luck) -> list[list[int]]:
        ends, limit = self.chat.end_ids, self.sampling.max_tokens
        end_ids = torch.tensor(ends, device=self.model.device)
        ids, mask = _pad_left(self.contexts, _pad_id(self.chat), self.model.device)
        self._arrange(ids.shape[1])
        self.replies, self.values = [[] for _ in ids], [[] for _ in ids]
        row_of, done = list(range(len(ids))), 0  # the context in each row of the stores, and the columns sampled
        while True:
            C = ids.shape[1]
            out, values = _generate(
                self.model, self.chat, self.sampling, turn, [luck[i][done:] for i in row_of[: len(ids)]],
                input_ids=ids, attention_mask=mask, stopping_criteria=[_Leave(end_ids, C + limit - done)],
                **{self.cache_name: self.cache},
            )  # fmt: skip
            new = _cut(out[:, C:], ends)
            for i, reply, seen in zip(row_of, new, values):
                self.replies[i] += reply
                self.values[i] += seen[: len(reply)]
                # the last column has not been through the model yet; those after an end are padding
                self.known[i] = min(len(self.contexts[i]) + len(self.replies[i]), out.shape[1] - 1 - self.start[i])
            done += out.shape[1] - C
            going = [row for row, reply in enumerate(new) if reply[-1] not in ends]
            if done == limit or not 0 < len(going) < len(new):
                break
            ids = out
            mask = torch.cat([mask, mask.new_ones(len(out), out.shape[1] - C)], dim=1)
            ids, mask = self._leave(going, row_of, ids, mask)
        for row, i in enumerate(row_of):
            self.at[i] = row
        return self.replies

    def follow(self, rows: list[int], glue: list[list[int]]):
        super().follow(rows, glue)
        self.at, self.start, self.known = ([of[row] for row in rows] for of in (self.at, self.start, self.known))

    def _arrange(self, C: int):
        """One row a context, in their order, padded on the left to C columns; all columns but those that some row does not know."""
        from nanoragen.rollout.kv_cache import RoomyLayer, take  # imports transformers

        device, start = self.model.device, [C - len(c) for c in self.contexts]
        rows = torch.tensor(self.at, device=device)
        move = torch.tensor([old - new for old, new in zip(self.start, start)], device=device)
        columns = torch.arange(C + self.sampling.max_tokens - 1, device=device) + move[:, None]
        known = C - max(len(c) - n for c, n in zip(self.contexts, self.known))
        for n, layer in enumerate(self.cache.layers):  # one by one, so that one is there twice
            stores = getattr(layer, "stores", (layer.keys, layer.values))
            inside = columns.clamp(0, stores[0].shape[-2] - 1)  # elsewhere there is padding, or it is yet to be written
            self.cache.layers[n] = RoomyLayer(*(take(t, rows, inside) for t in stores), known)
        self.start = start

    def _leave(self, going: list[int], row_of: list[int], ids, mask):
        """Rows `going` change places with those before them that have ended. Returns the ids and masks of those that go on."""
        n, order = len(going), list(range(len(ids)))
        front, back = sorted(set(range(n)) - set(going)), [row for row in going if row >= n]
        for a, b in zip(front, back):
            order[a], order[b] = b, a
        row_of[: len(ids)] = [row_of[row] for row in order]
        index, front, back = (torch.tensor(x, dtype=torch.long, device=ids.device) for x in (order[:n], front, back))
        for layer in self.cache.layers:
            layer.swap(front, back, n)
        return ids[index], mask[index]


class _Leave:
    """A stopping criterion for `generate`, called after each token: has so much ended that it pays to go on without it?

    end_ids: a tensor. last: the columns there can be. Nothing here waits for the device.
    """

    def __init__(self, end_ids, last: int):
        self.end_ids, self.last, self.ended = end_ids, last, None

    def __call__(self, input_ids, scores, **_):
        now = torch.isin(input_ids[:, -1], self.end_ids)
        self.ended = now if self.ended is None else self.ended | now  # [B]
        if self.last - input_ids.shape[1] < LEG_COLUMNS:
            return self.ended
        return self.ended | (self.ended.sum() >= max(LEG_ROWS, LEG_SHARE * len(now)))


def positions(model) -> float:
    """Tokens the model has positions for; infinity where it says nothing of it (BLOOM, Mamba)."""
    config = model.config.get_text_config()
    names = ("max_position_embeddings", "max_seq_len")  # of most, by transformers' own renaming (n_positions, ...); of MPT
    return next((limit for name in names if (limit := getattr(config, name, None))), math.inf)


def why_plain(model) -> str:
    """Why keys and values cannot be kept from turn to turn, so that every context is encoded anew; "" if they can. A line to print."""
    from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

    from nanoragen.policy.prefix_cache import cache_name

    slow = f"rollouts encode every context anew each turn: {type(model).__name__}"
    if cache_name(model) not in inspect.signature(model.forward).parameters:  # GPT-1
        return f"{slow} takes no cache"
    if getattr(model, "_is_stateful", False):
        return f"{slow} carries a state from token to token"
    layers = {type(layer) for layer in DynamicCache(config=model.config.get_text_config()).layers}
    others = sorted(kind.__name__ for kind in layers - {DynamicLayer, DynamicSlidingWindowLayer})
    return f"{slow} caches more than keys and values ({', '.join(others)})" if others else ""


@contextmanager
def sampling_mode(model):
    """No gradients, no dropout, and a blank generation config: `generate` fills unset options from the model's own."""
    from transformers import GenerationConfig

    own, training = model.generation_config, model.training
    model.generation_config = GenerationConfig()
    model.eval()  # also what keeps gradient checkpointing from switching the cache off
    try:
        with torch.no_grad():
            yield
    finally:
        model.generation_config = own
        model.train(training)


def _generate(model, chat, sampling, turn, luck, **inputs) -> tuple[torch.Tensor, list]:
    """`generate` with temperature alone. Returns [B, C + new] long: input columns, then replies padded on the right; and
    what is known of each new id (Draw.values)."""
    from transformers import GenerationConfig

    config = GenerationConfig(
        do_sample=False,  # Draw has drawn before `generate` chooses
        max_new_tokens=len(luck[0]), eos_token_id=chat.end_ids, pad_token_id=_pad_id(chat), use_cache=True,
    )  # fmt: skip
    luck = torch.tensor(luck, dtype=torch.float64, device=model.device)
    choose = Draw(luck, sampling.temperature, inputs["input_ids"].shape[1])
    out = model.generate(**inputs, generation_config=config, logits_processor=[choose])
    if choose.bad is not None and bool(choose.bad):
        raise FloatingPointError(f"generate: the model's logits are NaN or infinite in turn {turn}; its weights are broken")
    return out, choose.values()


def _pad_id(chat) -> int:
    pad = chat.tokenizer.pad_token_id
    return chat.end_ids[0] if pad is None else pad


def _pad_left(rows, pad_id, device) -> tuple[torch.Tensor, torch.Tensor]:
    """Lists of ids as (ids, mask), both [B, C] long, padded on the left."""
    C = max(len(r) for r in rows)
    ids = torch.tensor([[pad_id] * (C - len(r)) + list(r) for r in rows], device=device)
    mask = torch.tensor([[0] * (C - len(r)) + [1] * len(r) for r in rows], device=device)
    return ids, mask


def _cut(new: torch.Tensor, end_ids) -> list[list[int]]:
    """The replies in new [B, R]: each up to and including its first id that ends a turn, whole where there is none."""
    replies = []
    for row in new.tolist():
        end = next((i for i, id in enumerate(row) if id in end_ids), len(row) - 1)
        replies.append(row[: end + 1])
    return replies
