"""Environments that raise, hang or return nonsense: the episode is lost and recorded, the others and the run go on."""

import json
import math
import signal
import sys
import time

import gymnasium
import pytest
import torch
from helpers import Ladder, byte_tokenizer, play, script, tiny_model

import train
from nanoragen.envs import registry
from nanoragen.rollout.episodes import Sampling, rollout
from nanoragen.run.checkpoint import is_complete, load_state
from nanoragen.run.faults import Leave, TooManyFaults, time_limit
from nanoragen.run.log import Log


def hang():
    end = time.monotonic() + 30
    while time.monotonic() < end:
        pass


def interrupt():
    raise KeyboardInterrupt


FAULTS = {
    "raises": lambda: 1 / 0,
    "nan reward": lambda: ("text", math.nan, False, False, {}),
    "no text": lambda: (b"text", 0.0, False, False, {}),
    "too few values": lambda: ("text", 0.0),
    "no info": lambda: ("text", 0.0, False, False, None),
    "exits": lambda: sys.exit(0),
    "interrupts": interrupt,
    "no tokenizer reads it": lambda: ("half a character \ud800", 0.0, False, False, {}),
    "hangs": hang,
    "hangs without python code": lambda: time.sleep(30),
}


class Faulty(Ladder):
    """Fails in its second step (or in reset) for seeds that are odd."""

    fault, where = staticmethod(FAULTS["raises"]), "step"

    def reset(self, *, seed=None, options=None):
        found = super().reset(seed=seed)
        return self.fault() if self.where == "reset" and seed % 2 else found

    def step(self, action):
        found = super().step(action)
        return self.fault() if self.where == "step" and len(self.acted) == 2 and self.np_random_seed % 2 else found


def rolled(fault, where="step", **more):
    tokenizer = byte_tokenizer()
    model = script(tiny_model(tokenizer), play(*["go</think><answer>up || up</answer>"] * 3, tokenizer=tokenizer))
    envs = [Faulty() for _ in range(4)]
    for env in envs:
        env.fault, env.where = fault, where
    settings = {"contain_faults": True, "env_timeout": 0.3, "max_tokens": 60, "keep_cache": False} | more
    return rollout(model, tokenizer, envs, [0, 1, 2, 3], [0, 1, 2, 3], Sampling(**settings), env_name="faulty")


@pytest.mark.parametrize("where", ["step", "reset"])
@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS.keys())
def test_a_fault_costs_its_episode_and_no_other(fault, where, monkeypatch):
    if where == "reset" and fault is FAULTS["no tokenizer reads it"]:
        fault = lambda: ("\ud800", {})  # noqa: E731
    monkeypatch.setattr(signal, "getsignal", lambda number: signal.SIG_DFL)  # as in a run, Ctrl-C is no KeyboardInterrupt
    start = time.monotonic()
    episodes = rolled(fault, where)
    assert time.monotonic() - start < 10
    healthy = rolled(lambda: None, "nowhere")
    for e, whole in zip(episodes, healthy):
        if e.seed % 2:
            assert e.truncated == "error" and "Traceback" in e.error and len(e.turns) == (where == "step")
        else:
            assert not e.error and e.ids == whole.ids and e.reward == whole.reward


def test_without_containment_a_fault_is_raised():
    with pytest.raises(ZeroDivisionError):
        rolled(FAULTS["raises"], contain_faults=False)
    with pytest.raises(TimeoutError, match="env_timeout"):
        rolled(FAULTS["hangs"], contain_faults=False)


@pytest.mark.parametrize("ours", [Leave(143), KeyboardInterrupt()], ids=["second signal", "Ctrl-C in a notebook"])
def test_what_the_user_asks_for_is_no_fault(ours):
    def fault():
        raise ours

    with pytest.raises(type(ours)):
        rolled(fault)


def test_prompts_that_the_seed_does_not_decide_are_faults():
    class Drifting(Ladder):
        made = 0

        def reset(self, *, seed=None, options=None):
            Drifting.made += 1
            return f"{super().reset(seed=seed)[0]} {Drifting.made}", {}

    tokenizer = byte_tokenizer()
    settings = Sampling(contain_faults=True, max_tokens=8)
    envs = [Drifting() for _ in range(3)]
    episodes = rollout(tiny_model(tokenizer), tokenizer, envs, [7] * 3, [0] * 3, settings, env_name="drifting")
    assert [e.truncated == "error" and "two different first observations" in e.error for e in episodes] == [False, True, True]


@pytest.mark.parametrize("key, value", [("step_reward", math.nan), ("step_reward", "x"), ("max_turns", None), ("instruction", 7)])
def test_attributes_that_no_episode_can_be_played_with(key, value, monkeypatch):
    monkeypatch.setattr(Ladder, key, value)
    assert all(e.truncated == "error" and f"{key} {value!r}" in e.error for e in rolled(lambda: None))
    with pytest.raises(ValueError, match=f"env: faulty .seed 0. has .*{key} {value!r}"):
        rolled(lambda: None, contain_faults=False)


@pytest.mark.parametrize("error", [RuntimeError("no licence\nsecond line"), SystemExit(0), KeyError("x")], ids=repr)
@pytest.mark.parametrize("name", ["gym:Broken-v0", "bandit"])
def test_an_environment_that_cannot_be_made_is_one_line(name, error, monkeypatch, capsys):
    def broken(self=None, **options):
        raise error

    gymnasium.register("Broken-v0", entry_point=broken, disable_env_checker=True)
    monkeypatch.setattr(registry.env_class("bandit"), "__init__", broken)
    with pytest.raises(SystemExit) as stop:
        train.main(["--env", name])
    message = capsys.readouterr().err
    gymnasium.registry.pop("Broken-v0")
    assert stop.value.code == 2 and f"env: {name} cannot be made ({type(error).__name__}" in message and message.count("\n") == 1


def test_half_a_character_in_an_error_is_logged(tmp_path):
    episode = rolled(FAULTS["raises"])[1]
    episode.error = "bad name \udcff"
    Log(tmp_path, {}).errors(1, [episode])
    assert json.loads((tmp_path / "errors.jsonl").read_text())["error"] == "bad name \udcff"


def test_the_time_limit_ends_code_that_catches_it_once_and_leaves_no_timer():
    with pytest.raises(TimeoutError), time_limit(0.05):
        try:
            hang()
        except Exception:
            hang()
    with time_limit(0.05):
        pass
    time.sleep(0.1)  # no signal comes late


SMALL = ["--steps", "3", "--groups", "4", "--group_size", "2", "--max_turns", "2", "--max_tokens", "24",
         "--final_episodes", "4", "--env", "frozen_lake"]  # fmt: skip


def faulty_training(monkeypatch, chance, out, *more, after=0):
    """Train in frozen lakes whose step fails for that share of training seeds, once so many steps are logged."""
    make = registry.make

    def fragile(name, **options):
        env = make(name, **options)
        step = env.step

        def fail(action):
            log = out / "metrics.jsonl"
            logged = log.read_text().count("\n") if log.is_file() else 0
            if logged >= after and env.np_random_seed >= 1_000_000 and env.np_random_seed % 100 < 100 * chance:  # training seeds
                raise RuntimeError("the ice broke")
            return step(action)

        env.step = fail
        return env

    monkeypatch.setattr(registry, "make", fragile)
    train.main([*SMALL, "--out", str(out), *more])


def test_training_goes_on_without_the_lost_episodes(tmp_path, monkeypatch):
    faulty_training(monkeypatch, 0.5, tmp_path, "--max_faults", "1")
    lines = [json.loads(text) for text in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    errors = [json.loads(text) for text in (tmp_path / "errors.jsonl").read_text().splitlines()]
    played = (tmp_path / "rollouts.jsonl").read_text().splitlines()
    assert [line["step"] for line in lines] == [1, 2, 3] and 0 < len(errors) == sum(line["rollout/faults"] for line in lines)
    assert len(errors) + len(played) == 3 * 8
    assert all("the ice broke" in e["error"] and e["env"] == "frozen_lake" and e["seed"] % 100 < 50 for e in errors)


@pytest.mark.parametrize("save_every", ["0", "1"])
def test_too_many_faults_keep_what_was_learned_and_a_checkpoint_as_it_is(save_every, tmp_path, monkeypatch):
    """--save_every 0: the step before is saved. 1: it is there, and stays what the uninterrupted run has, random states too."""
    with pytest.raises(SystemExit):
        faulty_training(monkeypatch, 1.0, tmp_path / "cut", "--save_every", save_every, after=1)
    assert is_complete(tmp_path / "cut/step_000001") and not (tmp_path / "cut/step_000002").exists()
    monkeypatch.undo()
    train.main([*SMALL, "--save_every", "1", "--keep", "9", "--out", str(tmp_path / "whole")])
    cut, whole = (load_state(tmp_path / run / "step_000001")["random"]["torch"] for run in ("cut", "whole"))
    assert torch.equal(cut, whole) == (save_every == "1")


def test_too_many_faults_end_the_run_in_one_line(tmp_path, monkeypatch, capsys):
    with pytest.raises(SystemExit) as stop:
        faulty_training(monkeypatch, 1.0, tmp_path)
    message = capsys.readouterr().err.strip().splitlines()[-1]
    assert stop.value.code == 2 and "8 of 8 episodes failed" in message and "the ice broke" in message and "--max_faults" in message


def test_the_message_names_a_seed_and_the_reason():
    failed = rolled(FAULTS["raises"])[1:2]
    assert "seed 1: ZeroDivisionError" in str(TooManyFaults(failed, 4, 0.1))
