"""An environment by file and class, or by module and class: what is played, and one line for what cannot be."""

import sys
import types

import gymnasium
import pytest

from nanoragen.envs import registry
from nanoragen.envs.registry import make
from nanoragen.evaluate import evaluate
from nanoragen.rollout.episodes import Sampling
from nanoragen.run.settings import PlaySettings, check_ranges

GAME = """
import gymnasium
from nanoragen.envs.base import TextEnv
from {beside} import COLOURS

class GuessColour(TextEnv):
    max_turns, actions = 3, COLOURS
    instruction = "Name the colour: red, green. Reply <think>...</think><answer>red</answer>"

    def __init__(self, bonus=0.0, loud=False):
        super().__init__()
        self.bonus = bonus

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.colour = COLOURS[self.np_random.integers(2)]
        return "which?", {{"success": False}}

    def step(self, action):
        found = action == self.colour
        return "which?", float(found) + self.bonus, found, False, {{"success": found}}

class Plain:
    instruction, max_turns = "x", 1

class Bare(gymnasium.Env):
    max_turns = 1

class Silent(TextEnv):
    pass

class NoTurns(gymnasium.Env):
    instruction = "x"

class NoActions(gymnasium.Env):
    instruction, max_turns = "x", 1

class Fails(TextEnv):
    def __init__(self):
        raise SystemExit("no\\nscreen")
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with a module, and what it imports beside it; the current directory. Module names are those of this test alone."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.chdir(tmp_path)
    stem = f"game_{abs(hash(tmp_path))}"
    (tmp_path / f"{stem}_colours.py").write_text('COLOURS = ("red", "green")\n')
    (tmp_path / "my_env.py").write_text(GAME.format(beside=f"{stem}_colours"))
    (tmp_path / f"{stem}.py").write_text(GAME.format(beside=f"{stem}_colours"))
    return types.SimpleNamespace(path=tmp_path, module=stem)


def forms(folder):
    return ["my_env.py", f"./../{folder.path.name}/my_env.py", f"{folder.path}/my_env.py", folder.module]


def test_every_form_is_played_with_options(folder):
    results = []
    for form in forms(folder):
        env = make(f"{form}:GuessColour", bonus=0.5)
        assert type(env).__name__ == "GuessColour" and env.bonus == 0.5
        assert type(make(f"{form}:GuessColour")) is type(env)  # a file is loaded once
        found, episodes = evaluate(
            None, None, f"{form}:GuessColour", range(20), Sampling(), policy="random", env_options={"bonus": 0.5}
        )
        results.append([found, [t.actions for e in episodes for t in e.turns]])
        assert episodes[0].env == f"{form}:GuessColour"
    assert results[0][0]["success"] > 0.5 and all(r == results[0] for r in results)


def test_a_file_from_another_folder_and_one_of_the_same_name(folder, tmp_path, monkeypatch):
    other = tmp_path / "other"
    other.mkdir()
    (other / "my_env.py").write_text(GAME.format(beside=f"{folder.module}_colours").replace("which?", "another"))
    assert make("my_env.py:GuessColour").reset(seed=0)[0] == "which?"
    monkeypatch.chdir(other)
    assert make("my_env.py:GuessColour").reset(seed=0)[0] == "another"
    assert make("../my_env.py:GuessColour").reset(seed=0)[0] == "which?"
    monkeypatch.setenv("HOME", str(other))
    assert make("~/my_env.py:GuessColour").reset(seed=0)[0] == "another"


def test_nothing_is_hidden_by_the_folder(folder):
    """A file beside it that has the name of a package leaves the package in place."""
    (folder.path / "gymnasium.py").write_text("raise RuntimeError")
    assert isinstance(make("my_env.py:GuessColour"), gymnasium.Env) and sys.path[0] != str(folder.path)
    assert sys.path.count(str(folder.path)) == 1


def test_settings_take_it_and_its_options(folder):
    check_ranges(PlaySettings(env="my_env.py:GuessColour", env_options="bonus=2,loud=true"))
    with pytest.raises(ValueError, match="^env: my_env.py:GuessColour has no option 'bonnus'; did you mean 'bonus'"):
        check_ranges(PlaySettings(env="my_env.py:GuessColour", env_options="bonnus=2"))
    with pytest.raises(ValueError, match="^loud: 1 is not possible in my_env.py:GuessColour; valid: true, false"):
        check_ranges(PlaySettings(env="my_env.py:GuessColour", env_options="loud=1"))


@pytest.mark.parametrize(
    "name, message",
    [
        ("nope.py:GuessColour", "there is no file nope.py; valid: file.py:Class, module:Class, gym:ID, or one of sokoban"),
        (".:GuessColour", "'[.]' cannot be imported .*; valid: file.py:Class, module:Class"),
        ("no_such_module:X", "'no_such_module' cannot be imported .ModuleNotFoundError.*; valid: file.py:Class, module:Class"),
        (":X", "'' cannot be imported .*; valid: file.py:Class"),
        ("broken.py:X", "'broken.py' cannot be imported .SyntaxError.*; valid: file.py:Class"),
        ("leaves.py:X", "'leaves.py' cannot be imported .SystemExit: 3.; valid: file.py:Class"),
        ("my_env.py", "there is no environment 'my_env.py'; valid: sokoban, .*, file.py:Class, module:Class, gym:ID"),
        ("my_env.py:", ".*the class '' does not exist; valid: GuessColour, Bare"),
        ("my_env.py:GuesColour", ".*does not exist; did you mean 'GuessColour'[?] valid: GuessColour, Bare"),
        ("my_env.py:Plain", ".*the class 'Plain' is no gymnasium.Env; .*valid: GuessColour"),
        ("my_env.py:COLOURS", ".*the class 'COLOURS' is no gymnasium.Env; .*valid: GuessColour"),
        ("my_env.py:Bare", "my_env.py:Bare has no instruction; valid: a class with one"),
        ("my_env.py:Silent", "my_env.py:Silent has no instruction; valid: a class with one"),
        ("my_env.py:NoTurns", "my_env.py:NoTurns has max_turns None; valid: a whole number, 1 or more"),
        ("my_env.py:NoActions", "my_env.py:NoActions has max_actions_per_turn None; valid: a whole number, 1 or more"),
        ("my_env.py:Fails", "my_env.py:Fails cannot be made .SystemExit: no screen.; valid: options that it takes"),
        ("sokobann", "there is no environment 'sokobann'; did you mean 'sokoban'[?] valid: sokoban"),
    ],
)
def test_one_line_for_what_cannot_be_played(name, message, folder):
    (folder.path / "broken.py").write_text("def f(:\n")
    (folder.path / "leaves.py").write_text("raise SystemExit(3)")
    with pytest.raises(ValueError, match=f"^env: {message}") as error:
        make(name)
    assert "\n" not in str(error.value)


def test_a_random_player_needs_to_know_the_actions(folder):
    env = make("my_env.py:GuessColour")
    del type(env).actions
    with pytest.raises(
        ValueError, match="^policy: GuessColour has neither `actions` nor `random_action`; valid: model, demonstrate"
    ):
        env.random_action(None)


def test_modules_of_gymnasium_environments(folder):
    with (folder.path / f"{folder.module}.py").open("a") as file:
        file.write("gymnasium.register('OwnColour-v0', entry_point=GuessColour)\n")
    sys.path.append(str(folder.path))
    try:
        env = make(f"gym:{folder.module}:OwnColour-v0")
        assert env.reset(seed=0)[0] == "which?" and env.instruction.startswith("Name the colour")
    finally:
        gymnasium.registry.pop("OwnColour-v0", None)
    assert registry.names()[0] == "sokoban"
