"""Checkpoints are whole or not there, load as plain Hugging Face folders, and give back every state exactly."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import torch
from helpers import byte_tokenizer, tiny_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from nanoragen.policy import loading
from nanoragen.run import checkpoint

IDS = torch.tensor([[5, 70, 80, 90, 100, 33]])


@pytest.fixture(scope="module")
def parts():
    tokenizer = byte_tokenizer()
    return tiny_model(tokenizer), tokenizer


def save(folder, step, parts, **kw):
    return checkpoint.save(folder, step, *parts, **kw)


def test_a_checkpoint_is_a_hugging_face_folder(tmp_path, parts):  # C2
    model, tokenizer = parts
    folder = save(tmp_path, 100, parts)
    assert folder == tmp_path / "step_000100" and [p.name for p in tmp_path.iterdir()] == ["step_000100"]
    again, words = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    assert (
        again.generate(IDS, do_sample=False, max_new_tokens=8).tolist()
        == model.generate(IDS, do_sample=False, max_new_tokens=8).tolist()
    )
    chat = [{"role": "user", "content": "hé √ 你"}]
    assert words.apply_chat_template(chat, tokenize=False) == tokenizer.apply_chat_template(chat, tokenize=False)
    assert words("hé √ <think>")["input_ids"] == tokenizer("hé √ <think>")["input_ids"]
    ours, _ = loading.load(str(folder))
    assert all(torch.equal(a, b) for a, b in zip(ours.state_dict().values(), model.state_dict().values()))


def test_states_come_back_exactly(tmp_path):
    def fresh():
        model = tiny_model(byte_tokenizer())
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        return model, optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda u: 1 / (1 + u))

    def step(model, optimizer, scheduler):
        noise = torch.randn(()) + np.random.rand() + random.random()
        loss = model(IDS, labels=IDS).loss * (1 + noise.abs())
        loss.backward()
        optimizer.step(), scheduler.step(), optimizer.zero_grad()
        return loss.item()

    model, optimizer, scheduler = fresh()
    torch.manual_seed(1), np.random.seed(1), random.seed(1)
    step(model, optimizer, scheduler)
    state = {"seed_cursor": 17, "ema": 0.1 + 0.2, "first_regime": [0.3, None]}
    folder = checkpoint.save(tmp_path, 1, model, byte_tokenizer(), optimizer=optimizer, scheduler=scheduler, state=state)
    expected = [step(model, optimizer, scheduler) for _ in range(3)]

    _, optimizer2, scheduler2 = fresh()
    model2 = AutoModelForCausalLM.from_pretrained(folder)
    optimizer2 = torch.optim.AdamW(model2.parameters(), lr=1e-2)
    scheduler2 = torch.optim.lr_scheduler.LambdaLR(optimizer2, lambda u: 1 / (1 + u))
    found = checkpoint.load_state(folder)
    optimizer2.load_state_dict(found["optimizer"]), scheduler2.load_state_dict(found["scheduler"])
    checkpoint.restore_random(found["random"])
    assert found["state"] == {"step": 1, **state}
    assert [step(model2, optimizer2, scheduler2) for _ in range(3)] == expected


def test_the_newest_are_kept_and_found(tmp_path, parts):
    assert checkpoint.newest(tmp_path) is None and checkpoint.newest(tmp_path / "none") is None
    for step in (9, 10, 1_000_000):  # one more digit than the names are padded to
        save(tmp_path, step, parts, keep=2)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step_000010", "step_1000000"]
    assert checkpoint.newest(tmp_path).name == "step_1000000"


@pytest.mark.parametrize("harm", ["truncate", "delete", "no marker", "broken marker"])
def test_a_damaged_newest_is_passed_over_with_a_message(tmp_path, parts, harm, capsys):  # C1
    save(tmp_path, 1, parts)
    folder = save(tmp_path, 2, parts)
    weights, marker = folder / "model.safetensors", folder / checkpoint.MARKER
    if harm == "truncate":
        os.truncate(weights, weights.stat().st_size - 1)
    elif harm == "delete":
        (folder / "random.pt").unlink()
    elif harm == "no marker":
        marker.unlink()
    else:
        marker.write_text(marker.read_text()[:-20])
    assert checkpoint.newest(tmp_path).name == "step_000001"
    said = capsys.readouterr().err
    assert said.startswith(f"{folder} is not whole (") and said.endswith(" and is passed over\n") and said.count("\n") == 1
    with pytest.raises(ValueError, match="^resume: .*not a complete checkpoint"):
        checkpoint.load_state(folder)


def test_saving_again_at_the_same_step_never_leaves_nothing(tmp_path, parts):
    save(tmp_path, 1, parts, state={"n": 1})
    folder = save(tmp_path, 1, parts, state={"n": 2})
    assert checkpoint.load_state(folder)["state"]["n"] == 2 and len(list(tmp_path.iterdir())) == 1
    folder.rename(tmp_path / "step_000001.old")  # killed between the two renames
    assert checkpoint.load_state(checkpoint.newest(tmp_path))["state"]["n"] == 2


def test_damaged_folders_do_not_push_out_whole_ones(tmp_path, parts):
    save(tmp_path, 1, parts)
    (tmp_path / "step_000008").mkdir()
    (tmp_path / "step_000009.tmp").mkdir()
    save(tmp_path, 2, parts, keep=2)
    assert {"step_000001", "step_000002"} <= {p.name for p in tmp_path.iterdir()}
    assert not (tmp_path / "step_000009.tmp").exists()


KILLS = 50
SAVER = """
import os, sys
from helpers import byte_tokenizer, tiny_model
from nanoragen.run import checkpoint
tokenizer = byte_tokenizer()
model = tiny_model(tokenizer)
for folder in sys.stdin:  # a child for each folder: torch is imported once, not fifty times
    child = os.fork()
    if child == 0:
        for step in range(1, 10_000):
            checkpoint.save(folder.strip(), step, model, tokenizer, state={"n": step}, keep=2)
            print(step, flush=True)
    print("child", child, flush=True)
    os.waitpid(child, 0)
    print("dead", flush=True)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_fifty_kills_at_random_points_of_saving(tmp_path):  # C1
    rng = random.Random(0)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        [sys.executable, "-c", SAVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    ) as server:
        for trial in range(KILLS):
            folder, said = tmp_path / str(trial), []
            print(folder, file=server.stdin, flush=True)
            while "2" not in said or not any(line.startswith("child") for line in said):
                said.append(server.stdout.readline().strip())
                assert said[-1], "the process that saves is gone"
            time.sleep(rng.uniform(0, 0.1))  # a save takes about as long
            os.kill(next(int(line.split()[1]) for line in said if line.startswith("child")), signal.SIGKILL)
            while said[-1] != "dead":
                said.append(server.stdout.readline().strip())
            last = max(int(line) for line in said if line.isdigit())
            found = checkpoint.newest(folder)  # the last that was announced, or one that was whole but not yet announced
            assert checkpoint.load_state(found)["state"]["n"] in (last, last + 1)
            assert json.loads((found / checkpoint.MARKER).read_text())
            AutoModelForCausalLM.from_pretrained(found)
            shutil.rmtree(folder)
        server.stdin.close()
