"""Flags, files of settings, and the one line that each mistake gets."""

import os
import subprocess
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import pytest

from nanoragen.run import cli

ROOT = str(Path(__file__).resolve().parents[3])


def flag(default, help):
    return field(default=default, metadata={"help": help})


@dataclass
class Config:
    env: str = flag("sokoban", "environment")
    lr: float = flag(1e-3, "peak learning rate of AdamW")
    steps: int = flag(40, "training steps")
    temperature: float = flag(1.0, "sampling temperature")
    algo: Literal["grpo", "rloo"] = flag("grpo", "advantage estimator")
    shuffle: bool = flag(False, "mix")
    cache: bool = flag(True, "keep keys and values")


def parse(*argv):
    return cli.parse(Config, list(argv), "prog.py", "A program.")


def error(capsys, *argv) -> str:
    with pytest.raises(SystemExit) as e:
        parse(*argv)
    out, err = capsys.readouterr()
    assert e.value.code == 2 and out == "" and err.count("\n") == 1 and err.startswith("prog.py: error: "), err
    return err.removeprefix("prog.py: error: ").rstrip("\n")


def write(tmp_path, text):
    path = tmp_path / "c.yaml"
    path.write_text(text)
    return str(path)


def test_defaults_and_flags():
    assert parse() == Config()
    found = parse("--lr", "1e-5", "--steps=3", "--algo", "rloo", "--env", "bandit")
    assert found == Config(lr=1e-5, steps=3, algo="rloo", env="bandit")
    assert isinstance(found.lr, float) and isinstance(found.steps, int)


@pytest.mark.parametrize("text, value", [("-0.1", -0.1), ("-1e-3", -1e-3), ("-2", -2.0), ("-1.5E+2", -150.0)])
def test_negative_numbers(text, value):
    assert parse("--temperature", text).temperature == parse(f"--temperature={text}").temperature == value


@pytest.mark.parametrize("name, default", [("shuffle", False), ("cache", True)])
def test_every_bool_can_be_said_both_ways(name, default):
    assert getattr(parse(), name) is default
    for argv in ([f"--{name}"], [f"--{name}", "true"], [f"--{name}=True"], [f"--{name}", "1"]):
        assert getattr(parse(*argv), name) is True
    for argv in ([f"--no_{name}"], [f"--{name}", "false"], [f"--{name}=0"]):
        assert getattr(parse(*argv), name) is False


@pytest.mark.parametrize(
    "argv, starts, holds",
    [
        (["--lerning_rate", "1"], "--lerning_rate: ", "did you mean --lr?"),  # by the words of its help
        (["--learning-rate=1"], "--learning-rate: ", "did you mean --lr?"),
        (["--stpes", "1"], "--stpes: ", "did you mean --steps?"),
        (["--temp", "1"], "--temp: ", "did you mean --temperature?"),  # never completed in silence
        (["--zzzzzz", "1"], "--zzzzzz: ", "valid: see --help"),
        (["extra"], "extra: ", "valid: --setting value"),
        (["--steps", "abc"], "steps: ", "valid: a whole number"),
        (["--steps", "2.5"], "steps: ", "valid: a whole number"),
        (["--lr", "fast"], "lr: ", "valid: a number"),
        (["--lr"], "lr: ", "valid: a number"),
        (["--algo", "grp"], "algo: ", "did you mean 'grpo'?"),
        (["--algo", "RLOO"], "algo: ", "did you mean 'rloo'?"),
        (["--steps", "1_000"], "steps: ", "valid: a whole number"),
        (["--steps", "\u0661\u0662"], "steps: ", "valid: a whole number"),
        (["--lr", "1_0.5"], "lr: ", "valid: a number"),
        (["--algo", "x"], "algo: ", "valid: grpo, rloo"),
        (["--shuffle", "maybe"], "shuffle: ", "valid: true or false"),
        (["--steps", "1", "--no_steps"], "--no_steps: ", "there is no such setting"),
    ],
)
def test_a_mistake_is_one_line(capsys, argv, starts, holds):
    text = error(capsys, *argv)
    assert text.startswith(starts) and holds in text


def test_the_last_of_a_repeated_flag_wins(tmp_path):
    assert parse("--lr", "1e-3", "--steps=2", "--lr=1e-4", "--steps", "3") == Config(lr=1e-4, steps=3)
    assert parse("--shuffle", "--no_shuffle").shuffle is False and parse("--no-cache", "--cache", "true").cache is True
    path = write(tmp_path, "steps: 7\n")
    assert parse("--steps", "1", "--config", path, "--steps", "9").steps == 9


def test_a_file_of_settings(tmp_path):
    path = write(tmp_path, "lr: 1e-5\nsteps: 7   # a comment\nalgo: rloo\nshuffle: true\nenv: no\n")
    assert parse("--config", path) == Config(lr=1e-5, steps=7, algo="rloo", shuffle=True, env="no")
    assert parse("--config", path, "--steps", "9", "--no_shuffle").steps == 9  # flags win, wherever they stand
    assert parse("--steps", "9", "--config", path).steps == 9
    assert parse("--config", path, "--no_shuffle").shuffle is False
    (tmp_path / "later.yaml").write_text("lr: 1e-6\n")
    assert parse("--config", path, "--config", str(tmp_path / "later.yaml")) == replace(parse("--config", path), lr=1e-6)
    assert parse("--config", write(tmp_path, "")) == Config()
    assert parse("--config", write(tmp_path, "temperature: -1e-3\nenv: '--x'\n")) == Config(temperature=-1e-3, env="--x")


@pytest.mark.parametrize(
    "text, starts, holds",
    [
        ("lerning_rate: 1", "lerning_rate: ", "did you mean lr?"),
        ("optimizer:\n  lr: 1", "optimizer: ", "there is no such setting"),  # a key in some section
        ("lr:\n  peak: 1", "lr: ", "no single value"),
        ("lr: [1, 2]", "lr: ", "no single value"),
        ("lr:", "lr: ", "no single value"),
        ("lr: 1\nlr: 2", "lr: ", "twice"),
        ("steps: many", "steps: ", "valid: a whole number"),
        ("algo: grp", "algo: ", "valid: grpo, rloo"),
        ("- lr", "config: ", "holds no settings"),
        ("lr: [", "config: ", "is not YAML"),
        ("1: 2", "1: ", "there is no such setting"),
        ("lr: " + "[" * 3000 + "]" * 3000, "config: ", "nested too deep"),
    ],
)
def test_a_mistake_in_the_file_is_one_line(tmp_path, capsys, text, starts, holds):
    found = error(capsys, "--config", write(tmp_path, text + "\n"))
    assert found.startswith(starts) and holds in found


def test_a_missing_file_is_one_line(tmp_path, capsys):
    assert error(capsys, "--config", str(tmp_path / "none.yaml")).startswith("config: ")


def test_options():
    assert cli.options("") == {}
    found = cli.options("boxes=2, observation=grid,p=1e-3,slippery=False")
    assert found == {"boxes": 2, "observation": "grid", "p": 1e-3, "slippery": False}
    for text in ("boxes", "boxes=", "=2", "a=1,a=2"):
        with pytest.raises(ValueError, match="^env_options: .*valid: "):
            cli.options(text)


def test_help_shows_every_setting_and_imports_nothing_heavy():
    code = (
        "import sys, eval\n"
        "try: eval.main(['--help'])\n"
        "except SystemExit as e: assert e.code == 0\n"
        "assert not {'torch', 'gymnasium', 'triton', 'matplotlib'} & set(sys.modules)\n"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert all(f"--{name}" in shown for name in ("env", "model", "samples", "max_tokens", "config")) and "--max-tokens" not in shown


def test_help_that_nobody_reads_ends_without_a_traceback(tmp_path):
    """What `| head -1` does to a program that prints more: here the pipe is closed before the first line."""
    (tmp_path / "p.py").write_text(
        "from dataclasses import dataclass, field\nfrom nanoragen.run import cli\n\n@dataclass\nclass Config:\n"
        "    lr: float = field(default=1.0, metadata={'help': 'rate'})\n\n@cli.quiet_when_unread\ndef main(argv=None):\n"
        "    cli.parse(Config, argv, 'p.py', '')\n\nmain()\n"
    )
    environment = {**os.environ, "PYTHONPATH": ROOT, "PYTHONUNBUFFERED": ""}  # all of it is in the buffer when main ends
    command = [sys.executable, str(tmp_path / "p.py"), "--help"]
    done = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
    done.stdout.close()
    assert done.stderr.read() == "" and done.wait(60) == 141
