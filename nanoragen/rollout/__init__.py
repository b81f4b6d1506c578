"""Rollouts: the policy plays many episodes at once, and what it sampled is written down as it is sampled.

In: a model, its tokenizer, environments, seeds and `Sampling`. Out: `Episode`s, whose mask is 1 on exactly the sampled ids.

Read in this order:
    chat.py         a chat template becomes the token ids around each turn; a reply becomes reasoning and actions
    episodes.py     the turns of many episodes, their rewards, and how an episode ends
    generation.py   Hugging Face `generate`, with the KV cache kept from turn to turn (kv_cache.py)
    sampler.py      how an id is drawn: each row by its own uniform draws
"""
