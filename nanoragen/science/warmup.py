"""How the bundled model was made: `python -m nanoragen.warmup --out my-nano --steps 3000`.

A small Llama decoder and its byte-level BPE, trained from nothing on noisy demonstrations of the bundled environments
(demonstrations.py), which are generated as they are consumed and never repeat.
Left out: web text. This model knows six games and no English.
"""

import copy
import json
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
import torch

from nanoragen.envs.base import WARMUP_SEEDS
from nanoragen.policy.loading import load
from nanoragen.rollout.chat import Chat
from nanoragen.run import cli
from nanoragen.science.demonstrations import demonstration, games

# share of episodes
MIXTURE = {"sokoban": 0.34, "frozen_lake": 0.14, "bandit": 0.12, "countdown": 0.12, "sudoku": 0.16, "webshop": 0.12}
CHUNK = 2048  # padded tokens that go through the model at once
OBSERVATION_WEIGHT = 0.1  # of the loss on later observations: predicting them teaches what moves do

CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TAGS = ["<think>", "</think>", "<answer>", "</answer>"]  # one token each, but plain text to the decoder
# One token a grid cell, a digit, a word: rows must not melt into single tokens that hide what lies in them.
PIECES = r"\n| ?[0-9]| ?[A-Z](?![a-z])| ?[A-Z]?[a-z]+| ?[^\sA-Za-z0-9]|\s+"


@dataclass
class Config:
    out: str = field(default="", metadata={"help": "folder of the new model"})
    resume: str = field(default="", metadata={"help": "go on from this model folder, with a vocabulary of today's games"})
    shares: str = field(default="", metadata={"help": "of the games, as in webshop=1.5,bandit=0.2; others keep theirs"})
    steps: int = 4000
    tokens: int = field(default=6144, metadata={"help": "of a batch"})
    lr: float = 3e-3
    hidden: int = field(default=128, metadata={"help": "width of the model, a multiple of 64"})
    layers: int = 6
    vocab: int = field(default=1280, metadata={"help": "tokens of the vocabulary"})
    seed: int = 0
    threads: int = 2
    save_every: int = 500


# -- tokenizer and model -----------------------------------------------------------------------------------------------


def train_tokenizer(texts, vocab_size: int):
    """Byte-level BPE on an iterator of texts, as a transformers tokenizer with the chat template and tags above."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    bytes_of_pieces = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(PIECES), "isolated"), bytes_of_pieces])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(TAGS), special_tokens=SPECIAL, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )  # fmt: skip
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_tokens([AddedToken(t, special=False, normalized=False) for t in TAGS])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>", chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False, model_max_length=2048,
    )  # fmt: skip


def new_model(tokenizer, hidden: int, layers: int):
    """A Llama decoder with attention biases, of about 12 * layers * hidden^2 parameters.

    Llama, because AutoTokenizer then reads tokenizer.json as it is. For model_type qwen2 it uses Qwen2's own splitting rule instead
    (transformers 5.24), and " 1" is one token in training and two after loading.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=hidden, intermediate_size=3 * hidden, num_hidden_layers=layers,
        num_attention_heads=hidden // 32, num_key_value_heads=hidden // 64, attention_bias=True, max_position_embeddings=2048,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0}, tie_word_embeddings=True, initializer_range=0.02,
        bos_token_id=None, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def new_vocabulary(model, old, new):
    """Give a model (input and output embeddings tied) another vocabulary, in place: a token that both have keeps its row,
    another begins as the mean of the rows of its pieces."""
    rows, known = model.get_input_embeddings().weight.data.clone(), old.get_vocab()
    model.resize_token_embeddings(len(new), mean_resizing=False)
    model.config.eos_token_id, model.config.pad_token_id = new.eos_token_id, new.pad_token_id
    for token, i in new.get_vocab().items():
        text = new.convert_tokens_to_string([token])
        pieces = [known[token]] if token in known else old(text, add_special_tokens=False)["input_ids"]
        model.get_input_embeddings().weight.data[i] = rows[torch.tensor(pieces)].mean(0)


def encode(chat, instruction: str, turns):
    """An episode as (ids, weights): weight 1 on replies with their end of turn, a little on later observations."""
    ids = chat.prompt(instruction, turns[0][0])
    weights = [0.0] * len(ids)
    for i, (_, reply) in enumerate(turns):
        sampled = chat.tokenizer(reply, add_special_tokens=False)["input_ids"] + [chat.tokenizer.eos_token_id]
        ids, weights = ids + sampled, weights + [1.0] * len(sampled)
        if i + 1 < len(turns):
            glue = chat.follow(sampled, turns[i + 1][0])
            ids, weights = ids + glue, weights + [OBSERVATION_WEIGHT] * len(glue)
    return ids, weights


# -- training ----------------------------------------------------------------------------------------------------------


class Stream:
    """Endless demonstrations: a fresh seed each, environments drawn by their share."""

    def __init__(self, seed: int, mixture=MIXTURE):
        self.rng, self.names = np.random.default_rng(seed), list(mixture)
        self.shares = np.array(list(mixture.values())) / sum(mixture.values())
        self.envs = {name: games(name) for name in mixture}

    def episode(self):
        name = str(self.rng.choice(self.names, p=self.shares))
        env = self.envs[name][self.rng.integers(len(self.envs[name]))]
        turns, _ = demonstration(name, env, int(self.rng.integers(WARMUP_SEEDS.start, WARMUP_SEEDS.stop)), self.rng)
        return env.instruction, turns

    def batches(self, chat, tokens: int):
        """Lists of encoded episodes, `tokens` in all and every environment in each by its share, shortest first."""
        batch, count = [], 0
        while True:
            batch.append(encode(chat, *self.episode()))
            count += len(batch[-1][0])
            if count >= tokens:
                yield sorted(batch, key=lambda e: len(e[0]))
                batch, count = [], 0


def backward(model, batch, pad_id: int) -> float:
    """Accumulate the gradient of a batch that is sorted by length, a few episodes at a time. Returns the cross-entropy of the
    replies, nats a token.

    The batch itself mixes all lengths: batches of similar lengths hold one game each, and then the short games are not learned.
    """
    total = sum(sum(w) for _, w in batch)
    replies, nats, start = 0, 0.0, 0
    while start < len(batch):
        end = start + 1
        while end < len(batch) and (end + 1 - start) * len(batch[end][0]) <= CHUNK:
            end += 1
        loss, count, reply_nats = loss_fn(model, batch[start:end], pad_id)
        (loss / total).backward()
        replies, nats, start = replies + count, nats + reply_nats, end
    return nats / replies


def loss_fn(model, batch, pad_id: int):
    """Weighted next-token cross-entropy of (ids, weights), summed; how many reply tokens, and their plain sum."""
    width = max(len(ids) for ids, _ in batch)
    ids = torch.tensor([i + [pad_id] * (width - len(i)) for i, _ in batch])
    weights = torch.tensor([w + [0.0] * (width - len(w)) for _, w in batch])
    # Right padding and causal attention: no token that counts ever sees a pad, so no mask is needed.
    logits = model(input_ids=ids).logits[:, :-1]
    nll = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
    weights = weights[:, 1:].flatten()
    replies = weights == 1
    return (nll * weights).sum(), int(replies.sum()), nll.detach()[replies].sum().item()


def check(c: Config):
    """ValueError "setting: value; valid: ..." for what cannot work."""
    if not c.out:
        raise ValueError("out: is not given; valid: the folder of the new model")
    for name in ("steps", "tokens", "layers", "threads", "save_every"):
        if getattr(c, name) < 1:
            raise ValueError(f"{name}: {getattr(c, name)}; valid: 1 or more")
    for name, fits, valid in (
        ("lr", 0 < c.lr < 1, "above 0, below 1"),
        ("seed", c.seed >= 0, "0 or more"),
        ("hidden", c.hidden >= 64 and c.hidden % 64 == 0, "a multiple of 64"),
        ("vocab", c.vocab >= 256 + len(SPECIAL + TAGS), f"{256 + len(SPECIAL + TAGS)} or more: every byte and tag"),
    ):
        if not fits:
            raise ValueError(f"{name}: {getattr(c, name)}; valid: {valid}")
    for name, share in cli.options(c.shares).items():
        if name not in MIXTURE or isinstance(share, bool) or not isinstance(share, (int, float)) or not 0 < share < 1e6:
            raise ValueError(f"shares: {name}={share}; valid: {', '.join(MIXTURE)}, each a number above 0")


def train(c: Config):
    """Trains the model that the settings describe and saves it in c.out, with the settings in warmup.json."""
    torch.manual_seed(c.seed)
    torch.set_num_threads(c.threads)
    words = Stream(c.seed)  # the vocabulary is that of all games, also where some are trained on more
    texts = (f"{i}\n{o}\n{r}" for i, turns in (words.episode() for _ in range(3000)) for o, r in turns)
    tokenizer = train_tokenizer(texts, c.vocab)
    if c.resume:
        model, old = load(c.resume)
        new_vocabulary(model, old, tokenizer)
    else:
        model = new_model(tokenizer, c.hidden, c.layers)
    print(f"{sum(p.numel() for p in model.parameters()) / 1e6:.2f}M parameters, vocabulary {len(tokenizer)}", flush=True)
    stream = Stream(c.seed + 1, MIXTURE | cli.options(c.shares))
    # Muon for the matrices of the blocks (about half the steps of AdamW here), AdamW for the rest.
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n]
    rest = [p for n, p in model.named_parameters() if p.ndim != 2 or "embed" in n]
    optimizers = [
        torch.optim.Muon(matrices, lr=c.lr, weight_decay=0.05, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(rest, lr=c.lr, betas=(0.9, 0.95), weight_decay=0.0),
    ]
    chat, out, start = Chat(tokenizer), Path(c.out), time.time()
    batches, seen, smooth = stream.batches(chat, c.tokens), 0, None
    for step in range(1, c.steps + 1):
        # linear warm-up, flat, then linear decay over the last 40%
        scale = min(step / 50, 1.0, max(0.02, (c.steps - step) / (0.4 * c.steps)))
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = c.lr * scale
        batch = next(batches)
        reply_nll = backward(model, batch, tokenizer.pad_token_id)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        seen += sum(len(ids) for ids, _ in batch)
        smooth = reply_nll if smooth is None else 0.98 * smooth + 0.02 * reply_nll
        if step % 50 == 0:
            speed = seen / (time.time() - start)
            print(f"step {step} reply nll {smooth:.4f} nats/token, {seen / 1e6:.1f}M tokens, {speed:.0f} tokens/s", flush=True)
        if step % c.save_every == 0 or step == c.steps:
            save(model, tokenizer, out)
            how = {k: v for k, v in asdict(c).items() if k not in ("out", "resume", "threads", "save_every")}
            (out / "warmup.json").write_text(json.dumps({**how, "steps_done": step, "tokens_seen": seen}, indent=1) + "\n")


def save(model, tokenizer, folder: Path):
    """A Hugging Face folder with bf16 weights: half the size, and loaded back as fp32."""
    half = copy.deepcopy(model).to(torch.bfloat16)
    half.generation_config.eos_token_id = tokenizer.eos_token_id
    half.generation_config.pad_token_id = tokenizer.pad_token_id
    half.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


@cli.quiet_when_unread
def main(argv=None):
    c = cli.parse(Config, argv, "nanoragen.warmup", __doc__.split("\n\n")[0])
    try:
        check(c)
    except ValueError as e:
        cli.fail("nanoragen.warmup", str(e).replace("env_options", "shares"))
    train(c)
