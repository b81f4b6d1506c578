"""Ctrl-C and SIGTERM in every phase of a run: a whole checkpoint or none, the right exit status, one line that says how to go on.

The signal comes when the progress bar names the phase, so it is always the same moment. Left out: signals to a process that
hangs inside C code, which Python answers only when that returns.
"""

import errno
import io
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import tqdm
from helpers import saved_model, timeless

import train
from nanoragen.run import checkpoint, files, signals

ROOT = Path(__file__).resolve().parent.parent
PHASES = ["evaluation (before)", "rollout", "turn 1", "diagnosis", "advantages", "reference", "score", "update 1/2", "update 2/2",
          "critic 1/2", "evaluation (held out)", "save"]  # fmt: skip


@pytest.fixture(scope="module")
def arguments(tmp_path_factory):
    """A run of 2 steps that has every phase, as a list of arguments but for --out."""
    folder = saved_model(tmp_path_factory.mktemp("model"))
    return ["--env", "bandit", "--model", str(folder), "--steps", "2", "--groups", "2", "--group_size", "2", "--max_turns", "1",
            "--max_tokens", "4", "--filter", "none", "--entropy_coef", "0.01", "--minibatches", "2", "--algo", "ppo",
            "--beta", "0.1", "--final_episodes", "2", "--eval_episodes", "2", "--eval_every", "1", "--save_every", "1"]  # fmt: skip


@pytest.fixture(scope="module")
def whole(arguments, tmp_path_factory):
    out = tmp_path_factory.mktemp("whole") / "run"
    train.main([*arguments, "--out", str(out)])
    return timeless(out)


def signal_in(phase, numbers, patch):
    """Send these signals to this process, once, when the bar shows that phase."""
    show, left = tqdm.tqdm.set_description_str, list(numbers)

    def shown(self, text, *args):
        show(self, text, *args)
        while text.startswith(phase) and left:
            os.kill(os.getpid(), left.pop(0))

    patch.setattr(tqdm.tqdm, "set_description_str", shown)
    return left


@pytest.mark.parametrize("phase", PHASES)
def test_a_signal_in_any_phase_saves_the_step(phase, arguments, whole, tmp_path, monkeypatch, capsys):
    out, number = tmp_path / "run", (signal.SIGTERM, signal.SIGINT)[PHASES.index(phase) % 2]
    with monkeypatch.context() as patch, pytest.raises(SystemExit) as end:
        left = signal_in(phase, [number], patch)
        train.main([*arguments, "--out", str(out)])
    said = capsys.readouterr().out
    assert not left and end.value.code == 130
    assert f"stopped by {signal.Signals(number).name} after step 1, which is saved" in said and f"train.py --resume {out}" in said
    assert checkpoint.newest(out, say=pytest.fail).name == "step_000001" and not list(out.glob("*.tmp"))
    train.main(["--resume", str(out)])
    assert timeless(out) == whole


@pytest.mark.parametrize("phase", PHASES)
def test_a_second_signal_ends_it_at_once_and_leaves_nothing_half_done(phase, arguments, tmp_path, monkeypatch, capsys):
    out = tmp_path / "run"
    with monkeypatch.context() as patch, pytest.raises(SystemExit) as end:
        signal_in(phase, [signal.SIGINT, signal.SIGTERM], patch)
        train.main([*arguments, "--out", str(out)])
    said = capsys.readouterr()
    assert end.value.code == 143 and f"ended at once by SIGTERM in {phase}" in said.out + said.err
    assert "no checkpoint was saved yet" in said.out + said.err and not list(out.glob("step_*"))


def test_a_second_signal_while_files_are_written_leaves_the_checkpoint_before(arguments, whole, tmp_path, monkeypatch, capsys):
    out, sync = tmp_path / "run", files.sync

    def interrupted(path):
        sync(path)
        if "step_000002" in str(path):
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)

    with monkeypatch.context() as patch, pytest.raises(SystemExit) as end:
        patch.setattr(files, "sync", interrupted)
        train.main([*arguments, "--out", str(out)])
    said = capsys.readouterr()
    assert (
        end.value.code == 130
        and f"in save; what was saved is whole; go on with: python train.py --resume {out}" in said.out + said.err
    )
    assert checkpoint.newest(out, say=pytest.fail).name == "step_000001" and not list(out.glob("*.tmp"))
    train.main(["--resume", str(out)])
    assert timeless(out) == whole


def test_a_signal_in_the_last_evaluation_changes_nothing(arguments, whole, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        left = signal_in("evaluation (after)", [signal.SIGTERM], patch)
        train.main([*arguments, "--out", str(tmp_path / "run")])
    assert not left and timeless(tmp_path / "run") == whole


class Closed(io.StringIO):
    """A pipe whose reader has ended after so many lines."""

    def __init__(self, lines):
        super().__init__()
        self.left = lines

    def write(self, text):
        self.left -= text.count("\n")
        if self.left < 0:
            raise BrokenPipeError(errno.EPIPE, "Broken pipe")
        return super().write(text)


@pytest.mark.parametrize("lines", [0, 3, 7])
def test_a_reader_that_ends_stops_the_run_and_nothing_is_lost(lines, arguments, whole, tmp_path, monkeypatch):
    out = tmp_path / "run"
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", Closed(lines))
        patch.setattr(sys, "stderr", Closed(0))  # 2>&1
        if lines < 7:
            with pytest.raises(SystemExit) as end:
                train.main([*arguments, "--out", str(out)])
            assert end.value.code == 130
        else:  # the last step is done: only its last words are lost
            train.main([*arguments, "--out", str(out)])
    assert checkpoint.newest(out, say=pytest.fail).name == f"step_00000{1 + (lines == 7)}"
    if lines < 7:
        train.main(["--resume", str(out)])
    assert timeless(out) == whole


@pytest.mark.skipif(not hasattr(signal, "SIGHUP"), reason="no terminals here")
def test_a_closed_terminal_asks_but_not_under_nohup():
    for handler, heard in ((signal.SIG_DFL, "SIGHUP"), (signal.SIG_IGN, None)):
        before = signal.signal(signal.SIGHUP, handler)
        try:
            with signals.Stop() as asked:
                os.kill(os.getpid(), signal.SIGHUP)
            assert asked.asked == heard and signal.getsignal(signal.SIGHUP) is handler
        finally:
            signal.signal(signal.SIGHUP, before)


# runs a program that gets a signal at the moment when it imports a module
IMPORTING = """
import os, runpy, sys
program, name, number = sys.argv[1], sys.argv[2], int(sys.argv[3])
class Signal:
    def find_spec(self, wanted, *more):
        if wanted == name:
            os.kill(os.getpid(), number)
sys.meta_path.insert(0, Signal())
sys.argv = sys.argv[:1] + sys.argv[4:]
runpy.run_path(program, run_name="__main__")
"""


@pytest.mark.parametrize(
    "program, module, number",
    [("train.py", "transformers", signal.SIGINT), ("train.py", "torch", signal.SIGTERM), ("eval.py", "yaml", signal.SIGINT)],
)
def test_a_signal_while_loading_is_one_line_and_no_traceback(program, module, number, tmp_path):
    command = [sys.executable, "-c", IMPORTING, ROOT / program, module, int(number), "--env", "bandit", "--out", tmp_path / "run"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, cwd=tmp_path, env=environment)
    assert done.returncode == 128 + number, done.stderr
    assert done.stderr.strip() == f"ended by {signal.Signals(number).name}; what is saved stays as it is" and done.stdout == ""
