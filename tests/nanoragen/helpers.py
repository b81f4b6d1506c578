"""What the tests of the rollout stand on: a byte tokenizer, chat templates, tiny random models, a script, a small game.

All of it is made in memory: no download, no file.
"""

import json

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from nanoragen.envs.base import TextEnv
from nanoragen.policy.batches import Batch
from nanoragen.policy.prefix_cache import prefix_cache
from nanoragen.policy.scoring import micro_batch, token_logprobs
from nanoragen.rollout.episodes import Episode, Turn

SPECIAL = ["<|pad|>", "<|start|>", "<|end|>", "<s>", "</s>"]
TAGS = ["<think>", "</think>", "<answer>", "</answer>"]

_EACH = "{% for m in messages %}"
_ASK = "{% if add_generation_prompt %}"
CHATML = _EACH + "<|start|>{{ m['role'] }}\n{{ m['content'] }}<|end|>\n{% endfor %}" + _ASK + "<|start|>assistant\n{% endif %}"
# deletes the reasoning of all turns but the last
FORGETFUL = CHATML.replace(
    "{{ m['content'] }}",
    "{{ m['content'].split('</think>')[-1] if m['role'] == 'assistant' and not loop.last else m['content'] }}",
)
OPENS_THINK = CHATML.replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}")
EMPTY_THINK = CHATML.replace("assistant\n{% endif %}", "assistant\n<think>\n\n</think>\n\n{% endif %}")
NO_SYSTEM = "<s>{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}" + CHATML
INST = (  # system text inside the first user message, plain-text headers, end token after a space
    "{% if messages[0]['role'] == 'system' %}{% set s = '<<SYS>>' + messages[0]['content'] + '<</SYS>>' %}"
    "{% set rest = messages[1:] %}{% else %}{% set s = '' %}{% set rest = messages %}{% endif %}"
    "{% for m in rest %}{% if m['role'] == 'user' %}<s>[INST] {{ (s if loop.first else '') + m['content'] }} [/INST]"
    "{% else %} {{ m['content'] }} </s>{% endif %}{% endfor %}"
)
SYSTEM_LAST = (  # the system text moves to the last user message
    "{% set s = messages[0]['content'] + '\n\n' if messages[0]['role'] == 'system' else '' %}<s>"
    "{% for m in messages %}{% if m['role'] == 'user' %}[INST]{{ (s if loop.last else '') + m['content'] }}[/INST]"
    "{% elif m['role'] == 'assistant' %}{{ m['content'] }}</s>{% endif %}{% endfor %}"
)
PLAIN_TEXT = (  # no end-of-turn token at all
    _EACH + "{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}" + _ASK + "assistant: {% endif %}"
)
TEMPLATES = {
    "chatml": CHATML, "forgetful": FORGETFUL, "opens_think": OPENS_THINK, "empty_think": EMPTY_THINK,
    "no_system": NO_SYSTEM, "inst": INST, "system_last": SYSTEM_LAST, "plain_text": PLAIN_TEXT,
}  # fmt: skip


def byte_tokenizer(template=CHATML, *, merges=(), tags=True, eos="<|end|>", pad="<|pad|>"):
    """A byte-level tokenizer: 256 bytes, the special tokens, `merges` on top ("h e", "l l", ...), the tags."""
    vocab = {t: i for i, t in enumerate(SPECIAL + sorted(pre_tokenizers.ByteLevel.alphabet()))}
    pairs = [tuple(m.split()) for m in merges]
    for a, b in pairs:
        vocab.setdefault(a + b, len(vocab))
    core = Tokenizer(models.BPE(vocab=vocab, merges=pairs))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(SPECIAL)
    if tags:
        core.add_tokens([AddedToken(t, special=False, normalized=False) for t in TAGS])
    return PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token=eos, pad_token=pad, chat_template=template, clean_up_tokenization_spaces=False
    )


def encode(tokenizer, text):
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def saved_model(folder, tokenizer=None, **how):
    """A folder of `tiny_model(tokenizer, **how)` and its tokenizer, as --model takes it. Returns the folder."""
    tokenizer = tokenizer or byte_tokenizer()
    tiny_model(tokenizer, **how).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def tiny_model(tokenizer, kind="qwen2", *, seed=0, positions=2048, dropout=0.0):
    """A random model of two narrow layers in eval mode. Its weights are large, so that its choices differ."""
    torch.manual_seed(seed)
    vocab = len(tokenizer)
    if kind == "gpt1":  # without a cache
        from transformers import OpenAIGPTConfig, OpenAIGPTLMHeadModel

        config = OpenAIGPTConfig(vocab_size=vocab, n_positions=positions, n_embd=32, n_layer=2, n_head=2, initializer_range=0.3,
                                 attn_pdrop=dropout, embd_pdrop=dropout, resid_pdrop=dropout)  # fmt: skip
        return OpenAIGPTLMHeadModel(config).eval()
    if kind == "gpt2":
        config = GPT2Config(
            vocab_size=vocab, n_positions=positions, n_embd=32, n_layer=2, n_head=2, initializer_range=0.3,
            attn_pdrop=dropout, embd_pdrop=dropout, resid_pdrop=dropout, bos_token_id=None, eos_token_id=None,
        )  # fmt: skip
        return GPT2LMHeadModel(config).eval()
    config = Qwen2Config(
        vocab_size=vocab, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=positions, initializer_range=0.3, attention_dropout=dropout,
        tie_word_embeddings=True, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    return Qwen2ForCausalLM(config).eval()


def script(model, reply):
    """Make `model.generate` answer with `reply(context ids) -> ids`, cut to the turn's budget. Returns the model."""

    def generate(input_ids, attention_mask, generation_config, **more):
        replies = [
            reply(row[keep.bool()].tolist())[: generation_config.max_new_tokens] for row, keep in zip(input_ids, attention_mask)
        ]
        R, pad, ends = max(map(len, replies)), generation_config.pad_token_id, generation_config.eos_token_id
        assert all(len(r) == R or set(r) & set(ends) for r in replies), "a real model would have gone on"
        out = torch.cat([input_ids, torch.tensor([r + [pad] * (R - len(r)) for r in replies])], dim=1)
        cache = more.get("cache", more.get("past_key_values"))
        for layer in cache.layers if cache else ():  # as long as a real model would have left it
            rows, heads, C, D = layer.keys.shape
            layer.update(*torch.zeros(2, rows, heads, out.shape[1] - 1 - C, D))
        return out

    model.generate = generate
    return model


def play(*replies, tokenizer, end="<|end|>"):
    """A `reply` for `script`: the n-th text in the n-th turn, each closed by `end`, or as it is when it ends in "~"."""

    def reply(context):
        turn = tokenizer.decode(context).count("<|start|>assistant") - 1
        text = replies[turn]
        return encode(tokenizer, text[:-1] if text.endswith("~") else text + end)

    return reply


class Ladder(TextEnv):
    """Climb `height` rungs with "up"; "down" goes down; each step costs `step_reward`, the top gives 1."""

    instruction = "Climb. Actions: up, down."
    max_turns = 3
    max_actions_per_turn = 2
    step_reward = -0.1

    def __init__(self, height=100, growth=0):
        super().__init__()
        self.height, self.growth, self.acted = height, growth, []

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.at, self.acted = 0, []
        return self._text(), {"success": False, "action_is_valid": True, "action_is_effective": False}

    def step(self, action):
        self.acted.append(action)
        self.at += {"up": 1, "down": -1}.get(action, 0)
        done = self.at >= self.height
        info = {"success": done, "action_is_valid": action in ("up", "down"), "action_is_effective": True}
        return self._text(), self.step_reward + (1.0 if done else 0.0), done, False, info

    def _text(self):
        return f"rung {self.at} of {self.height}, seed {self.np_random_seed}" + "." * self.growth * len(self.acted)


CLOCK = ("time/", "step_time", "tokens_per_second", "memory/")


def timeless(run):
    """The lines of a run's metrics.jsonl without what a clock or the process's size says."""
    found = [json.loads(text) for text in (run / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if not k.startswith(CLOCK)} for line in found]


def moments(folder):
    """The optimiser's tensors in a checkpoint, by parameter and name."""
    state = torch.load(folder / "optimizer.pt", weights_only=True)["state"]
    return {f"{i} {k}": v for i, part in state.items() for k, v in part.items()}


def batch_of(ids, attention_mask, sampled):
    """A Batch of these ids [B, T]; sampled [B, T-1] bool: whether id t + 1 was."""
    mask = torch.nn.functional.pad(sampled, (1, 0))
    return Batch(ids, attention_mask, mask, mask.long() - 1)


def score(model, batch, rows=None, temperature=1.0, fused=True):
    """(logprob [P], entropy [P]) of the sampled tokens of some rows in one micro-batch with a prefix of its own, not cut off."""
    rows = torch.arange(len(batch.ids)) if rows is None else rows
    prefix = prefix_cache(model, batch, rows, "float32", detach=False)
    return token_logprobs(model, micro_batch(model, batch, rows, prefix), temperature, fused)


def bandit_episode(rewards=(0.5, 1.0), success=True, parsed=True, truncated=""):
    """An episode of two prompt ids and a turn of two sampled ids for each reward."""
    turns = [
        Turn(2 * i + 2, 2 * i + 4, 2 * i + 3, f"see {i}", "hm</think><answer>a</answer>", ["a"], parsed, r)
        for i, r in enumerate(rewards)
    ]
    ids, mask = list(range(2 + 2 * len(rewards))), [0, 0] + [1] * 2 * len(rewards)
    return Episode("bandit", 7, 0, ids, mask, turns, not truncated, truncated, success, "rules", "see 0")
