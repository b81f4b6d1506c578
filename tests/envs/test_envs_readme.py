"""envs/README.md: the environment it shows works as written, and its table is true."""

import importlib
import random
import re
import sys
from pathlib import Path

import pytest
from gymnasium.utils.env_checker import check_env
from playable import make

import nanoragen.envs.registry as registry
from nanoragen.envs.base import TextEnv
from nanoragen.envs.registry import names

README = (Path(__file__).resolve().parents[2] / "envs" / "README.md").read_text(encoding="utf-8")
(CODE,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


@pytest.fixture
def guess_number(tmp_path, monkeypatch):
    """The steps of the README: the file in envs/, the entry in the registry (both undone afterwards)."""
    import nanoragen.envs as folder

    (tmp_path / "guess_number.py").write_text(CODE, encoding="utf-8")
    monkeypatch.setattr(folder, "__path__", [*folder.__path__, str(tmp_path)])
    monkeypatch.setitem(registry._CLASSES, "guess_number", "GuessNumber")
    importlib.invalidate_caches()
    yield make("guess_number")
    sys.modules.pop("nanoragen.envs.guess_number", None)


def test_about_thirty_lines():
    assert len([line for line in CODE.splitlines() if line.strip()]) <= 36


@pytest.mark.filterwarnings("ignore")
def test_example_passes_the_checker_and_can_be_solved(guess_number):
    env = guess_number
    assert isinstance(env, TextEnv)
    check_env(env)
    for seed in range(20):
        first, _ = env.reset(seed=seed)
        assert env.reset(seed=seed)[0] == first
        for action in env.demonstrate():
            _, reward, terminated, _, info = env.step(action)
        assert terminated and info["success"] and reward == pytest.approx(0.95)


def test_example_hints_lead_to_the_number(guess_number):
    env, low, high = guess_number, 1, 20
    env.reset(seed=3)
    for _ in range(5):
        guess = (low + high) // 2
        text, _, terminated, _, info = env.step(str(guess))
        if terminated:
            break
        low, high = (guess + 1, high) if "higher" in text else (low, guess - 1)
    assert info["success"]


def test_example_answers_anything(guess_number):
    env, rng = guess_number, random.Random(0)
    env.reset(seed=0)
    texts = ["", "²", "٣", "-3", "0", "21", "9" * 5_000, "\x00", "\ud800", "1e1"]
    for text in texts + ["".join(chr(rng.randrange(1, 0x2000)) for _ in range(8)) for _ in range(200)]:
        observation, reward, terminated, _, info = env.step(text)
        assert env.observation_space.contains(observation) and reward == -0.05
        assert not terminated and not info["action_is_valid"]


def test_table_is_true():
    rows = {r[0].strip("` "): r for r in (line.strip("| ").split(" | ") for line in README.splitlines() if line.startswith("| `"))}
    assert list(rows) == names()
    for name, row in rows.items():
        env = make(name)
        assert row[4].strip() == f"{env.max_turns} x {env.max_actions_per_turn}"
        if isinstance(getattr(type(env), "actions", None), tuple):
            assert row[2].strip() == ", ".join(env.actions)
