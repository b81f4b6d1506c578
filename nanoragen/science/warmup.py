"""How the bundled model was made, runnable: `python -m nanoragen.warmup --out my-nano --steps 3000`.

A tiny Llama decoder and its byte-level BPE, trained from nothing on noisy demonstrations of the bundled environments
(demonstrations.py).

Data is generated as it is consumed and never repeats: no epochs, no files. Left out on purpose: web text. This model knows
six games, not English.
"""

import argparse
import copy
import json
import time
from pathlib import Path

import numpy as np

from nanoragen.envs.base import WARMUP_SEEDS
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


# -- tokenizer and model -----------------------------------------------------------------------------------------------


def train_tokenizer(texts, vocab_size: int):
    """Byte-level BPE on an iterator of texts, as a transformers tokenizer with the chat template and tags above."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
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

    Llama, because there AutoTokenizer reads tokenizer.json as it is. For model_type qwen2 it puts Qwen2's own splitting
    rule in its place (transformers 5.24), so " 1" is two tokens after loading and one in training, without a word.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=hidden,
            intermediate_size=3 * hidden,
            num_hidden_layers=layers,
            num_attention_heads=hidden // 32,
            num_key_value_heads=hidden // 64,
            attention_bias=True,
            max_position_embeddings=2048,
            rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
            tie_word_embeddings=True,
            initializer_range=0.02,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )


def new_vocabulary(model, old, new):
    """Give a model (input and output embeddings tied) another vocabulary, in place: a token that both have keeps its row,
    another begins as the mean of the rows of its pieces."""
    import torch

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
    """Accumulate the gradient of a batch, a few episodes of like length at a time: little padding, and yet one loss.

    (Batches that were themselves of like length held one game each. The short games shared one in fifteen, and were
    not learned.) Returns the cross-entropy of the replies, nats a token.
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
    import torch

    width = max(len(ids) for ids, _ in batch)
    ids = torch.tensor([i + [pad_id] * (width - len(i)) for i, _ in batch])
    weights = torch.tensor([w + [0.0] * (width - len(w)) for _, w in batch])
    # Right padding and causal attention: no token that counts ever sees a pad, so no mask is needed.
    logits = model(input_ids=ids).logits[:, :-1]
    nll = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
    weights = weights[:, 1:].flatten()
    replies = weights == 1
    return (nll * weights).sum(), int(replies.sum()), nll.detach()[replies].sum().item()


def train(args):
    import torch

    from nanoragen.rollout.chat import Chat

    torch.manual_seed(args.seed)
    torch.set_num_threads(args.threads)
    words = Stream(args.seed)  # the vocabulary is that of all games, also where some are trained on more
    texts = (f"{i}\n{o}\n{r}" for i, turns in (words.episode() for _ in range(3000)) for o, r in turns)
    tokenizer = train_tokenizer(texts, args.vocab)
    if args.resume:
        from nanoragen.policy.loading import load

        model, old = load(args.resume)
        new_vocabulary(model, old, tokenizer)
    else:
        model = new_model(tokenizer, args.hidden, args.layers)
    print(f"{sum(p.numel() for p in model.parameters()) / 1e6:.2f}M parameters, vocabulary {len(tokenizer)}", flush=True)
    stream = Stream(args.seed + 1, MIXTURE | cli.options(args.shares))
    # Muon for the matrices of the blocks (about half the steps of AdamW here), AdamW for the rest.
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n]
    rest = [p for n, p in model.named_parameters() if p.ndim != 2 or "embed" in n]
    optimizers = [
        torch.optim.Muon(matrices, lr=args.lr, weight_decay=0.05, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(rest, lr=args.lr, betas=(0.9, 0.95), weight_decay=0.0),
    ]
    chat, out, start = Chat(tokenizer), Path(args.out), time.time()
    batches, seen, smooth = stream.batches(chat, args.tokens), 0, None
    for step in range(1, args.steps + 1):
        # linear warm-up, flat, then linear decay over the last 40%
        scale = min(step / 50, 1.0, max(0.02, (args.steps - step) / (0.4 * args.steps)))
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = args.lr * scale
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
            print(
                f"step {step} reply nll {smooth:.4f} nats/token, {seen / 1e6:.1f}M tokens, {speed:.0f} tokens/s",
                flush=True,
            )
        if step % args.save_every == 0 or step == args.steps:
            save(model, tokenizer, out)
            how = {k: v for k, v in vars(args).items() if k not in ("out", "resume", "threads", "save_every")}
            (out / "warmup.json").write_text(json.dumps({**how, "steps_done": step, "tokens_seen": seen}, indent=1) + "\n")


def save(model, tokenizer, folder: Path):
    """A Hugging Face folder with bf16 weights: half the size, and loaded back as fp32."""
    import torch

    half = copy.deepcopy(model).to(torch.bfloat16)
    half.generation_config.eos_token_id = tokenizer.eos_token_id
    half.generation_config.pad_token_id = tokenizer.pad_token_id
    half.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def main(argv=None):
    parser = argparse.ArgumentParser(prog="python -m nanoragen.warmup", description=__doc__.split("\n\n")[0], allow_abbrev=False)
    parser.add_argument("--out", required=True, help="folder of the new model")
    parser.add_argument("--resume", help="go on from this model folder, with a vocabulary of today's games")
    parser.add_argument("--shares", default="", help="of the games, as in webshop=1.5,bandit=0.2; others keep theirs")
    parser.add_argument("--steps", type=int, default=4000)
    parser.add_argument("--tokens", type=int, default=6144, help="tokens of a batch")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--vocab", type=int, default=1280)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--save_every", type=int, default=500)
    args = parser.parse_args(argv)
    try:
        shares = cli.options(args.shares)
    except ValueError as e:
        parser.error(str(e).replace("env_options", "shares"))
    for name, share in shares.items():
        if name not in MIXTURE or not isinstance(share, (int, float)) or not 0 < share < 1e6:
            parser.error(f"shares: {name}={share}; valid: {', '.join(MIXTURE)}, each a number above 0")
    train(args)
