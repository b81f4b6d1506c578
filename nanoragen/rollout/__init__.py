"""Rollouts: the policy plays many episodes at once, and its ids are recorded as they are sampled.

In: a model, its tokenizer, environments, seeds and `Sampling`. Out: `Episode`s, whose mask is 1 on exactly the sampled ids.

Read in this order:
    chat.py         a chat template becomes the token ids around each turn; a reply becomes reasoning and actions (parse_reply)
    episodes.py     the turns of many episodes: ids and mask, rewards, limits and ends (EpisodeRunner)
    generation.py   Hugging Face `generate`, with the KV cache (kv_cache.py) kept from turn to turn, and the reference without
    sampler.py      how an id is drawn: each row by its own uniform draws
"""
