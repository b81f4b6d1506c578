"""Every registered environment trains and evaluates from the command line; --data and --allow_code_execution reach them."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from fake_lean import fake_lean
from helpers import saved_model

import eval as evaluation
import train
from nanoragen.envs.registry import names
from nanoragen.run.settings import env_flags, env_options

ROOT = Path(__file__).resolve().parents[1]
SMALL = ["--groups", "2", "--group_size", "2", "--final_episodes", "2", "--eval_every", "0", "--minibatches", "1", "--filter", "none",
         "--max_turns", "2"]  # fmt: skip
GYM = "gym:FrozenLake-v1"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = saved_model(tmp_path_factory.mktemp("model"), positions=16_384)
    return ["--model", str(folder), "--max_tokens", "8", "--device", "cpu"]


@pytest.fixture(scope="module")
def lean(tmp_path_factory):
    return fake_lean(tmp_path_factory.mktemp("lean"))


def flags(name, lean):
    return {"code": ["--allow_code_execution"], "lean": ["--env_options", f"command={lean}"]}.get(name, [])


@pytest.mark.parametrize("name", [*names(), GYM])
def test_three_steps_of_training_and_an_evaluation(name, model, lean, tmp_path, capsys):
    out, more = tmp_path / "run", flags(name, lean)
    train.main(["--env", name, "--steps", "3", *SMALL, *model, *more, "--out", str(out)])
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert all(line["rollout/faults"] == 0 and line["num_tokens"] > 0 and f"{name}/success" in line for line in lines)
    assert lines[-1][f"eval/{name}/episodes"] == 2
    (said,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("evaluate  ")]
    argv = said.removeprefix("evaluate  python eval.py ").split()  # what the run says to type, as it says it
    evaluation.main([*argv, "--episodes", "2", "--max_turns", "2", "--max_tokens", "8", "--out", str(tmp_path / "e.jsonl")])
    assert f"{name}, 2 episodes" in capsys.readouterr().out


@pytest.mark.parametrize("name", names())
def test_who_solves_and_who_guesses(name, lean, tmp_path, capsys):
    """The solver solves all; guessing solves under 30%, but for bandit, which is a coin. envs/README.md has 200 episodes of each."""

    def success(policy):
        argv = ["--env", name, "--policy", policy, "--episodes", "4" if name in ("code", "lean") else "20", *flags(name, lean)]
        evaluation.main([*argv, "--json", "--out", str(tmp_path / "e.jsonl")])
        return json.loads(capsys.readouterr().out.splitlines()[-1])["success"]

    assert success("demonstrate") >= 0.95
    if name == "bandit":
        assert 0.2 < success("random") < 0.7
    elif name != "lean":  # the stand-in for Lean counts goals, and "omega" closes any
        assert success("random") < 0.3


# -- --data and --allow_code_execution ---------------------------------------------------------------------------------


@pytest.fixture
def rows(tmp_path):
    path = tmp_path / "a, b=c" / "rows.jsonl"  # what --env_options could not hold
    path.parent.mkdir()
    path.write_text('{"nums": [2, 5], "target": 10}\n')
    return str(path)


def error(capsys, program, *argv):
    with pytest.raises(SystemExit) as e:
        program.main(list(argv))
    err, name = capsys.readouterr().err, f"{program.__name__}.py: error: "
    assert e.value.code == 2 and err.count("\n") == 1 and err.startswith(name)
    return err.removeprefix(name)


@pytest.mark.parametrize("program", [train, evaluation])
def test_flags_that_nothing_takes_or_that_are_given_twice(program, rows, capsys):
    assert env_options(program.Config(env="countdown", data=rows)) == {"data": rows}
    c = program.Config(env="code", env_options="level=2", allow_code_execution=True)
    assert env_options(c) == {"level": 2, "allow_code_execution": True}
    assert env_options(program.Config(env="code", env_options="allow_code_execution=true")) == {"allow_code_execution": True}
    text = error(capsys, program, "--env", "sokoban", "--data", rows)
    assert text == "data: sokoban takes none; valid: with --env countdown or math_qa or webshop or search_qa or code or lean\n"
    text = error(capsys, program, "--env", "bandit", "--allow_code_execution")
    assert text == "allow_code_execution: bandit takes none; valid: with --env code\n"
    assert error(capsys, program, "--env", GYM, "--data", rows).startswith("data: gym:FrozenLake-v1 takes none; ")
    assert error(capsys, program, "--env", "countdown", "--data", rows, "--env_options", "data=x").startswith(
        "data: is given twice"
    )
    more = ["--allow_code_execution", "--env_options", "allow_code_execution=true"]
    assert error(capsys, program, "--env", "code", *more).startswith("allow_code_execution: is given twice")
    assert error(capsys, program, "--env", "code").endswith("valid: --allow_code_execution\n")
    assert error(capsys, program, "--env", "countdown", "--data", rows + "x").startswith("data: ")


def test_data_reaches_training_evaluation_and_a_resumed_run(rows, model, tmp_path, capsys):
    out = tmp_path / "run"
    train.main(["--env", "countdown", "--data", rows, "--steps", "1", *SMALL, *model, "--out", str(out)])
    assert f"--env countdown --data '{rows}'" in capsys.readouterr().out
    train.main(["--resume", str(out), "--steps", "2"])
    seen = [json.loads(line) for line in (out / "rollouts.jsonl").read_text().splitlines()]
    assert {e["step"] for e in seen} == {1, 2} and all("numbers 2 5 target 10" in json.dumps(e) for e in seen)
    capsys.readouterr()
    assert "data: " in error(capsys, train, "--resume", str(out), "--steps", "3", "--data", rows + "x")
    argv = ["--env", "countdown", "--data", rows, "--policy", "demonstrate", "--episodes", "3", "--show", "1"]
    evaluation.main([*argv, "--out", str(tmp_path / "e.jsonl")])
    assert "numbers 2 5 target 10" in capsys.readouterr().out


def test_leave_to_run_programs_is_kept_by_resume_and_can_be_typed_again(model, tmp_path, capsys):
    out = tmp_path / "run"
    train.main(["--env", "code", "--allow_code_execution", "--steps", "1", *SMALL, *model, "--out", str(out)])
    assert capsys.readouterr().out.rstrip().endswith("--env code --allow_code_execution")
    train.main(["--resume", str(out), "--steps", "2"])
    assert (
        env_flags(train.Config(env="countdown", env_options="numbers=4", data="x y"))
        == "--env countdown --env_options numbers=4 --data 'x y'"
    )


def test_without_lean_one_line(tmp_path):
    """In a process of its own, as it is typed: nothing but the line, and no folder is made."""
    argv = ["--env", "lean", "--env_options", "command=no-lean-here", "--out", tmp_path / "run"]
    done = subprocess.run([sys.executable, ROOT / "train.py", *map(str, argv)], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 2 and done.stdout == "" and done.stderr.count("\n") == 1
    assert done.stderr.startswith("train.py: error: command: ") and "needs Lean 4" in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name, module", [("webshop", "bm25s"), ("search_qa", "bm25s")])
def test_a_library_that_is_missing_is_named(name, module, monkeypatch, capsys):
    from nanoragen.envs import search_corpus, webshop_catalogue

    search_corpus.generated.cache_clear(), webshop_catalogue.generated.cache_clear()  # indexed by an earlier test
    monkeypatch.setitem(sys.modules, module, None)
    assert "pip install 'nanoragen[envs]'" in error(capsys, train, "--env", name)
