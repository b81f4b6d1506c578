"""The policy: a causal language model of transformers, loaded, batched and scored.

In: a model's name; episodes. Out: the model; log-prob and entropy of every sampled token, with gradient.

Read in this order:
    loading.py        nano, a folder, a GGUF file or a hub id becomes (model, tokenizer); adapters: lora.py; attention.py
    batches.py        episodes become tensors; rows are split so that each part fits into a forward pass
    scoring.py        micro-batches, and log-prob and entropy of their sampled tokens: what an update calls
    prefix_cache.py   what several sequences begin with is encoded once, with gradient through it
    support.py        what a model can do, asked here alone
"""
