"""The bundled model is what its warm-up made: same ids as in training after every way of loading, and it knows its games."""

from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from nanoragen.policy.loading import load
from nanoragen.rollout.chat import Chat
from nanoragen.run import checkpoint
from nanoragen.science import demonstrations, warmup

FOLDER = Path(warmup.__file__).parents[1] / "assets" / "nano"


def demonstrated(name, n):
    env, rng = demonstrations.make(name, **demonstrations.OPTIONS.get(name, {})), np.random.default_rng(0)
    return env.instruction, [demonstrations.demonstration(name, env, seed, rng)[0] for seed in range(n)]


def test_every_way_of_loading_gives_the_ids_of_training(tmp_path):
    """A tokenizer class that brings its own splitting rule turns " 1" into two tokens, and nothing else shows it."""
    model, tokenizer = load()
    trained = Tokenizer.from_file(str(FOLDER / "tokenizer.json"))
    saved = checkpoint.save(tmp_path, 1, model, tokenizer)
    for other in (tokenizer, AutoTokenizer.from_pretrained(FOLDER), AutoTokenizer.from_pretrained(saved), load(str(saved))[1]):
        for name in warmup.MIXTURE:
            for turns in demonstrated(name, 5)[1]:
                for text in (text for turn in turns for text in turn):
                    assert other(text, add_special_tokens=False)["input_ids"] == trained.encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize("name", warmup.MIXTURE)
def test_the_model_expects_what_demonstrators_of_new_instances_say(name):
    """Cross-entropy of replies, nats a token: phrasings and mistakes cost 0.4 to 0.6, not knowing the game costs more."""
    model, tokenizer = load()
    instruction, episodes = demonstrated(name, 12)
    batch = [warmup.encode(Chat(tokenizer), instruction, turns) for turns in episodes]
    with torch.no_grad():
        _, replies, nats = warmup.loss_fn(model, batch, tokenizer.pad_token_id)
    assert nats / replies < 0.75


def test_a_new_vocabulary_keeps_the_rows_of_known_tokens_and_begins_the_others_from_their_pieces():
    model, old = load()
    before, text = model.get_input_embeddings().weight.detach().clone(), "the box is 1 down; zyzzyva zyzzyva zyzzyva"
    new = warmup.train_tokenizer([text] * 50, 300)
    warmup.new_vocabulary(model, old, new)
    rows = model.get_input_embeddings().weight
    assert rows.shape == (len(new), before.shape[1]) and model.get_output_embeddings().weight is rows
    unknown = set(new.get_vocab()) - set(old.get_vocab())
    assert "Ġzyzzyva" in unknown and "<answer>" not in unknown
    for token, i in new.get_vocab().items():
        text = new.convert_tokens_to_string([token])
        pieces = old(text, add_special_tokens=False)["input_ids"] if token in unknown else [old.get_vocab()[token]]
        assert torch.allclose(rows[i], before[pieces].mean(0), atol=1e-6)
    out = model(input_ids=torch.tensor([new("the box is 1 down")["input_ids"]])).logits
    assert out.shape[-1] == len(new)


@pytest.mark.parametrize(
    "flags, line",
    [([], "out: is not given; valid: the folder of the new model"), (["--steps", "0"], "steps: 0; valid: 1 or more"),
     (["--hidden", "100"], "hidden: 100; valid: a multiple of 64"), (["--lr", "nan"], "lr: nan; valid: above 0, below 1"),
     (["--shares", "chess=1"], f"shares: chess=1; valid: {', '.join(warmup.MIXTURE)}, each a number above 0"),
     (["--shares", "bandit"], "shares: 'bandit' is not key=value; valid: key=value,key=value")],
)  # fmt: skip
def test_bad_settings_are_one_line(flags, line, capsys):
    with pytest.raises(SystemExit) as stopped:
        warmup.main(["--out", "never-written", *flags] if flags else [])
    assert stopped.value.code == 2 and capsys.readouterr().err == f"nanoragen.warmup: error: {line}\n"


def test_small_enough_to_ship():
    assert sum(file.stat().st_size for file in FOLDER.rglob("*")) <= 8_000_000
