"""The cross matrix L[i, j] = log p(z_i | x_j): M reasonings scored after N prompts, each prompt encoded once.

The plain way runs M * N full sequences. The shared way encodes a prompt into a KV cache, then runs the reasonings in one row after
it: positions start again after the prompt for each, and a mask lets each see the prompt and itself only. So no reasoning gets a copy
of the cache, and the LM head runs on reasoning tokens alone. Left out: prompts in a batch, prefixes that only some prompts share.

Shapes: M reasonings (rows), N prompts (columns), P scored tokens, Q tokens run together, D hidden size, V vocabulary;
Tx and Tz tokens of a prompt and of a reasoning.
"""

import math
from contextlib import contextmanager
from itertools import cycle
from weakref import WeakSet

import torch
from transformers import DynamicCache

from nanoragen.kernels.cross import cross_logprob_matrix
from nanoragen.policy import support
from nanoragen.policy.attention import TAKES_MASK

PACKED_TOKENS = 256  # run in one row, at least
PLAIN_LOGITS = 2**26  # logits held at a time by the plain way
_TOLD = WeakSet()  # models whose fall-back was printed


@torch.no_grad()
def cross_matrix(model, prompts, reasonings, *, temperature=1.0, shared_prefix=True) -> torch.Tensor:
    """L[i, j] = sum_t log softmax(logits / temperature) of reasoning i's tokens after prompt j.

    model: any transformers causal LM. prompts: N lists of ids, each at least one; reasonings: M lists, an empty one
    sums to 0. Returns [M, N] float32 on the model's device. Same lists are computed once.

    shared_prefix=True encodes each prompt once (what all prompts begin with, once for all) and scores all reasonings
    against its cached keys and values; False runs every pair in full and is the reference implementation. A model that cannot share falls
    back to it and one line says why. Tokens run, plain / shared = (Tx + Tz) / (Tz + Tx / M).

    ValueError: an empty prompt, a temperature of 0 or less, or a pair with more tokens than the model has positions.
    """
    if temperature <= 0:
        raise ValueError(f"temperature: {temperature} gives no distribution to score under; valid: a number above 0")
    prompts, column = distinct(prompts)
    reasonings, row = distinct(reasonings)
    if not all(prompts):
        raise ValueError("prompts: an empty one; valid: at least one token, the first reasoning token is scored by it")
    device = next(model.parameters()).device
    if not prompts or not any(reasonings):
        return torch.zeros(len(row), len(column), device=device)
    longest = max(map(len, prompts)) + max(map(len, reasonings)) - 1  # the last token is scored, not run
    limit = support.max_positions(model)
    if longest > limit:
        raise ValueError(f"prompts: {longest} tokens with their longest reasoning; valid: up to the model's {limit}")
    with _scoring_mode(model):
        reason = _why_plain(model, prompts, reasonings, longest) if shared_prefix else "asked for"
        sums = (_plain if reason else _shared)(model, prompts, reasonings, temperature)
    return sums[torch.tensor(row, device=device)][:, torch.tensor(column, device=device)]


def distinct(lists) -> tuple[list[list[int]], list[int]]:
    """The different lists in order of first appearance, and where each of the given ones went."""
    index = {}
    places = [index.setdefault(tuple(ids), len(index)) for ids in lists]
    return [list(key) for key in index], places


@contextmanager
def _scoring_mode(model):
    """Evaluation mode, and attention that takes a mask of our own; everything as it was afterwards."""
    training = [m for m in model.modules() if m.training]
    attention = getattr(model.config, "_attn_implementation", None)
    swap = attention not in (None, *TAKES_MASK) and getattr(model, "_supports_sdpa", False)
    model.eval()
    if swap:
        model.set_attn_implementation("sdpa")
    try:
        yield
    finally:
        if swap:
            model.set_attn_implementation(attention)
        for m in training:
            m.training = True


def _plain(model, prompts, reasonings, temperature, alone=False):
    """Every pair in full: right padded, with mask and positions, through the model's own logits. [M, N]

    alone: one pair at a time, and no logits of its prompt where the model can leave them out; so it takes little memory.
    """
    device = next(model.parameters()).device
    sums = torch.zeros(len(reasonings), len(prompts), device=device)
    pairs = [(i, j) for i, z in enumerate(reasonings) for j in range(len(prompts)) if z]
    pairs.sort(key=lambda p: len(reasonings[p[0]]) + len(prompts[p[1]]), reverse=True)  # alike lengths together
    alone = alone or bool(support.positions_depend_on_length(model, len(reasonings[pairs[0][0]]) + len(prompts[pairs[0][1]]) - 1))
    while pairs:
        T = len(reasonings[pairs[0][0]]) + len(prompts[pairs[0][1]]) - 1  # the last token is scored, not run
        B = 1 if alone else max(1, PLAIN_LOGITS // (T * model.config.get_text_config().vocab_size))
        chunk, pairs = pairs[:B], pairs[B:]
        ids, mask, targets = torch.zeros(3, len(chunk), T, dtype=torch.long)
        scored = torch.zeros(len(chunk), T, dtype=torch.bool)
        for b, (i, j) in enumerate(chunk):
            pair, start = torch.tensor(prompts[j] + reasonings[i]), len(prompts[j])
            ids[b, : len(pair) - 1] = pair[:-1]
            mask[b, : len(pair) - 1] = 1
            targets[b, : len(pair) - 1] = pair[1:]  # position t scores token t + 1
            scored[b, start - 1 : len(pair) - 1] = True
        ids, mask, targets, scored = (v.to(device) for v in (ids, mask, targets, scored))
        extra = {"position_ids": torch.arange(T, device=device).expand_as(ids)} if support.takes_argument(model, "position_ids") else {}
        if alone and support.takes_argument(model, "logits_to_keep"):
            extra["logits_to_keep"] = len(reasonings[chunk[0][0]])
        logits = model(input_ids=ids, attention_mask=mask, use_cache=False, **extra).logits
        targets, scored = targets[:, -logits.shape[1] :], scored[:, -logits.shape[1] :]
        logprob = torch.log_softmax(logits.float() / temperature, dim=-1).gather(-1, targets[..., None]).squeeze(-1)
        found = torch.where(scored, logprob.double(), 0.0).sum(dim=1)
        rows, columns = torch.tensor(chunk, device=device).unbind(1)
        sums[rows, columns] = found.float()
    return sums


def _shared(model, prompts, reasonings, temperature):
    """Each prompt once; then the reasonings in one row behind its cache, each seeing the prompt and itself. [M, N]"""
    decoder, head = model.get_decoder(), model.get_output_embeddings()
    device = next(model.parameters()).device
    bool_mask = model.config._attn_implementation != "eager"
    cache = DynamicCache()  # without the config: layers with a (long enough) sliding window keep everything too

    def run(ids, at, mask=None):  # [Q] -> [Q, D], and ids join the cache
        out = decoder(
            input_ids=ids[None], position_ids=at[None], attention_mask=mask, use_cache=True, **{support.cache_argument(decoder): cache}
        )
        return out.last_hidden_state[0]

    weight, bias = head.weight, getattr(head, "bias", None)  # [V, D], [V]
    if bias is not None:  # as one more column, met by a constant 1 in the hidden states
        weight = torch.cat([weight, bias[:, None].to(weight.dtype)], dim=1)
    ids = [torch.tensor(x, device=device) for x in prompts]
    place = torch.arange(max(map(len, prompts)), device=device)
    common = 0  # what all prompts begin with; each keeps a token of its own, whose hidden state scores first tokens
    while common < min(map(len, prompts)) - 1 and len({x[common] for x in prompts}) == 1:
        common += 1
    if common:
        run(ids[0][:common], place[:common])
    packs = [_Pack(rows, reasonings, device) for rows in _packs(reasonings, _row(prompts))]
    sums = torch.zeros(len(reasonings), len(prompts), device=device)
    for j, x in enumerate(ids):
        last = run(x[common:], place[common : len(x)])[-1:]  # [1, D] scores every reasoning's first token
        for pack in packs:
            hidden = last
            Q = len(pack.ids)
            if Q:
                mask = torch.cat([pack.block.new_ones(Q, len(x)), pack.block], dim=1)[None, None]  # [1, 1, Q, Tx + Q]
                if not bool_mask:
                    mask = torch.zeros_like(mask, dtype=last.dtype).masked_fill(~mask, torch.finfo(last.dtype).min)
                hidden = torch.cat([last, run(pack.ids, len(x) + pack.offset, mask)])  # [1 + Q, D]
                cache.crop(-Q)
            hidden = hidden[pack.source].to(weight.dtype)  # [P, D]
            if bias is not None:
                hidden = torch.cat([hidden, hidden.new_ones(len(hidden), 1)], dim=1)
            found = cross_logprob_matrix(hidden, weight, pack.targets, pack.cu_seqlens, temperature=temperature)
            sums[pack.rows, j] = found.float()
        cache.crop(common - len(x))
    return sums


def _row(prompts) -> int:
    """Tokens that run in one row: it attends to the blocks of others in vain, and costs no more than the longest prompt."""
    return max(PACKED_TOKENS, *map(len, prompts))


def _packs(reasonings, size) -> list[list[int]]:
    """Indices of reasonings that run together: at most `size` tokens, or one reasoning. Empty ones are left out."""
    packs, room = [], 0
    for i, z in enumerate(reasonings):
        if not z:
            continue
        if not packs or len(z) > room:
            packs.append([])
            room = size
        packs[-1].append(i)
        room -= len(z)
    return packs


class _Pack:
    """Reasonings in one row: ids, offset [Q] (place in its reasoning), block [Q, Q] (who sees whom), and for the head
    source [P] (0: the prompt's last token, 1 + q: token q of the row), targets [P], cu_seqlens [rows + 1]."""

    def __init__(self, rows, reasonings, device):
        ids, offset, owner, source, targets, cu = [], [], [], [], [], [0]
        for n, i in enumerate(rows):
            z = reasonings[i]
            source += [0] + list(range(len(ids) + 1, len(ids) + len(z)))
            ids += z[:-1]  # the last token is scored, not run
            offset += range(len(z) - 1)
            owner += [n] * (len(z) - 1)
            targets += z
            cu.append(len(targets))
        self.rows, self.ids, self.offset, owner, self.source, self.targets = (
            torch.tensor(v, dtype=torch.long, device=device) for v in (rows, ids, offset, owner, source, targets)
        )
        self.cu_seqlens = torch.tensor(cu, dtype=torch.int32, device=device)
        self.block = (owner[:, None] == owner[None, :]).tril()


def _why_plain(model, prompts, reasonings, longest) -> str:
    """Why this model cannot share a prefix, "" if it can. Said in one line, once a model."""
    reason = support.packed_reasonings_unsupported(model, longest, TAKES_MASK)
    if not reason and not _same_sums(model, prompts, reasonings):
        reason = "tried on the longest prompt, it scores packed reasonings differently"
    if reason and model not in _TOLD:
        print(f"cross_matrix: every pair is encoded in full, a prompt's cache cannot be shared: {reason}")
        _TOLD.add(model)
    return reason


@support.once_per_model
def _same_sums(model, prompts, reasonings) -> bool:
    """Whether both ways give the same sums: with the longest prompt and its end, and a row of reasonings as full as it gets, of
    which the first and a long one far down the row are compared."""
    two, row = [max(prompts, key=len)], []
    two.append(two[0][-4:])
    for z in cycle(filter(None, reasonings)):
        if row and sum(map(len, row)) + len(z) > _row(two):
            break
        row.append(z)
    compared = [0, max(range(len(row)), key=lambda i: (len(row[i]), i))]
    ends = [row[i] for i in compared]
    weight = model.get_output_embeddings().weight
    rounded = weight.dtype not in (torch.float32, torch.float64) or torch.is_autocast_enabled(weight.device.type)
    close = {"rtol": 0.02, "atol": 0.25 * math.sqrt(max(map(len, ends)))} if rounded else {"rtol": 0.002, "atol": 0.02}
    shared, plain = lambda: _shared(model, two, row, 1.0)[compared], lambda: _plain(model, two, ends, 1.0, alone=True)
    return support.close_to(shared, plain, **close)
