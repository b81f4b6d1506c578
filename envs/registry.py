"""The environments by name: `make("sokoban")`, `gymnasium.make("nanoragen/Sokoban-v0")`, `train.py --env sokoban`.

Other names that `make` takes:
    my_env.py:MyEnv   a class in a file; its folder can be imported from
    my_env:MyEnv      a class in a module that can be imported, from the current directory too
    gym:ID            gymnasium's environment of that id, in text (gym_adapter.py); gym:my_env:ID imports my_env first
"""

import difflib
import functools
import importlib
import importlib.util
import inspect
import os
import sys
from pathlib import Path

import gymnasium

from nanoragen.envs.base import check_attributes

# file name in this folder (= the name users type) -> class in it
_CLASSES = {
    "sokoban": "Sokoban", "frozen_lake": "FrozenLake", "bandit": "Bandit", "countdown": "Countdown", "sudoku": "Sudoku",
    "rubiks_cube": "RubiksCube", "game_2048": "Game2048", "math_qa": "MathQA", "webshop": "WebShop", "search_qa": "SearchQA",
    "code": "Code", "lean": "Lean",
}  # fmt: skip
FORMS = "file.py:Class, module:Class, gym:ID"


def names() -> list[str]:
    """The names of the environments in this folder."""
    return list(_CLASSES)


def env_class(name: str) -> type:
    """The class behind a name other than gym:ID. ValueError says which names there are."""
    if name in _CLASSES:
        return getattr(importlib.import_module(f"nanoragen.envs.{name}"), _CLASSES[name])
    where, colon, cls = str(name).rpartition(":")
    if not colon:
        raise ValueError(f"env: there is no environment {name!r}; {_hint(str(name), _CLASSES)}valid: {', '.join(names())}, {FORMS}")
    module = _module(where, os.getcwd())
    found = getattr(module, cls, None)
    if not (isinstance(found, type) and issubclass(found, gymnasium.Env)):
        here = [k for k, v in vars(module).items() if isinstance(v, type) and issubclass(v, gymnasium.Env)
                and v.__module__ == module.__name__]  # fmt: skip
        why = "is no gymnasium.Env" if hasattr(module, cls) else "does not exist"
        raise ValueError(
            f"env: {name}: the class {cls!r} {why}; {_hint(cls, here)}valid: {', '.join(here) or 'a subclass of gymnasium.Env'}"
        )
    return found


@functools.cache
def _module(where: str, folder: str):
    """The module of "my_env.py" or "my_env", as seen from a folder. Loaded once, so that all episodes have the same class."""
    path = Path(folder, Path(where).expanduser()).resolve()
    is_file = where.endswith(".py")
    if is_file and not path.is_file():
        raise ValueError(f"env: there is no file {where}; valid: {FORMS}, or one of {', '.join(names())}")
    if (beside := str(path.parent) if is_file else folder) not in sys.path:
        sys.path.append(beside)  # last, so that nothing is hidden by it
    try:
        if not is_file:
            return importlib.import_module(where)
        spec = importlib.util.spec_from_file_location(str(path), path)
        module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as e:
        raise ValueError(f"env: {where!r} cannot be imported ({_why(e)}); valid: {FORMS}, or one of {', '.join(names())}") from e
    return module


def _why(error) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())


def _hint(word: str, known) -> str:
    near = difflib.get_close_matches(word, known, n=1)
    return f"did you mean {near[0]!r}? " if near else ""


def takers(option: str) -> list[str]:
    """The names of the environments that have this option."""
    return [name for name in names() if option in options_of(name)]


def options_of(name: str):
    """The options of an environment: name -> inspect.Parameter."""
    return inspect.signature(env_class(name)).parameters


def make(name: str, **options):
    """A fresh environment. `options` are the keyword arguments of its class (`boxes=2`); ValueError names a wrong one."""
    if name.startswith("gym:"):
        from nanoragen.envs.gym_adapter import GymText

        return GymText(name.removeprefix("gym:"), **options)
    cls, known = env_class(name), options_of(name)
    for key in options:
        if key not in known:
            raise ValueError(f"env: {name} has no option {key!r}; {_hint(key, known)}valid: {', '.join(known) or 'none'}")
    try:
        env = cls(**options)
    except ValueError:  # says it itself
        raise
    except (Exception, SystemExit) as e:
        raise ValueError(f"env: {name} cannot be made ({_why(e)}); valid: options that it takes") from e
    for key, value in options.items():
        switch = isinstance(known[key].default, bool)
        if switch != isinstance(value, bool):  # "no" would count as true, and true as 1
            raise ValueError(
                f"{key}: {value!r} is not possible in {name}; valid: {'true, false' if switch else 'no true or false'}"
            )
    if not isinstance(getattr(env, "instruction", None), str) or not env.instruction.strip():
        raise ValueError(
            f"env: {name} has no instruction; valid: a class with one, and with max_turns (nanoragen.envs.base.TextEnv)"
        )
    check_attributes(env, name)
    return env


for _name, _cls in _CLASSES.items():
    gymnasium.register(id=f"nanoragen/{_cls}-v0", entry_point=f"nanoragen.envs.{_name}:{_cls}")
