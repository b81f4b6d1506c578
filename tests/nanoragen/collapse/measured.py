"""What the tests of measurements stand on: a matrix's metrics, a tiny model, random episodes."""

import random

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from nanoragen.collapse.estimator import collapse_metrics
from nanoragen.rollout.episodes import Episode, Turn


def metrics_of(matrix, own=None, lengths=None, **more):
    own = list(range(len(matrix))) if own is None else own
    return collapse_metrics(torch.as_tensor(matrix), own, lengths or [1] * len(own), **more)


def qwen2(**more):
    torch.manual_seed(0)
    config = dict(vocab_size=40, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
                  num_key_value_heads=2, max_position_embeddings=64, initializer_range=0.3)  # fmt: skip
    return Qwen2ForCausalLM(Qwen2Config(**(config | more))).eval()


def episode(prompt, turns, group=0):
    """turns: (reasoning ids, the rest of the reply, what follows) each."""
    ids, out = list(prompt), []
    for thought, rest, after in turns:
        start = len(ids)
        ids += thought + rest
        out.append(Turn(start, len(ids), start + len(thought), "", "", [], bool(thought), 0.0))
        ids += after
    return Episode("x", group, group, ids, [0] * len(ids), out)


def played(groups=10, size=3, seed=0):
    rng = random.Random(seed)
    draw = lambda n: [rng.randrange(40) for _ in range(n)]
    out = []
    for g in range(groups):
        prompt = draw(6) + [5]
        for _ in range(size):
            out.append(episode(prompt, [(draw(rng.randint(1, 5)), [9], [3]), (draw(4), [9], [])], group=g))
    return out
