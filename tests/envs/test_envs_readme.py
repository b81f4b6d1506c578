"""envs/README.md: the environment it shows works as written, and its table is true."""

import json
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest
from gymnasium.utils.env_checker import check_env
from playable import make

from nanoragen.envs import registry
from nanoragen.envs.base import TextEnv
from nanoragen.envs.registry import names

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "envs" / "README.md").read_text(encoding="utf-8")
(CODE,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


@pytest.fixture
def guess_number(tmp_path):
    (tmp_path / "my_env.py").write_text(CODE, encoding="utf-8")
    return registry.make(f"{tmp_path}/my_env.py:GuessNumber")


def test_about_thirty_lines():
    assert len([line for line in CODE.splitlines() if line.strip()]) <= 36


def test_example_is_trained_resumed_and_evaluated_as_the_page_says(tmp_path):
    """In processes of its own, from the folder of the file. A resumed run has the same name in its config.json."""
    (tmp_path / "my_env.py").write_text(CODE, encoding="utf-8")
    name = "my_env.py:GuessNumber"
    assert f"python train.py --env {name}" in README and f"python eval.py --env {name} --policy random" in README
    small = "--groups 2 --group_size 2 --final_episodes 2 --eval_every 0 --max_tokens 8 --device cpu --out run"
    evaluation = f"eval.py --env {name} --policy random --episodes 3"
    for line in (f"train.py --env {name} --steps 1 {small}", "train.py --resume run --steps 2", evaluation):
        program, *argv = line.split()
        done = subprocess.run([sys.executable, ROOT / program, *argv], cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    assert f"{name}, 3 episodes" in done.stdout
    assert json.loads((tmp_path / "run/config.json").read_text())["env"] == name
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2] and f"{name}/success" in lines[1]
    assert "Find the number from 1 to 20" in (tmp_path / "run/rollouts.jsonl").read_text()


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
