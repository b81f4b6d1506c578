"""The environments by name: `make("sokoban")`, `gymnasium.make("nanoragen/Sokoban-v0")`, `train.py --env sokoban`.

A name "gym:ID" is gymnasium's environment of that id, in text (gym_adapter.py).
"""

import difflib
import importlib
import inspect

import gymnasium

# file name in this folder (= the name users type) -> class in it
_CLASSES = {
    "sokoban": "Sokoban",
    "frozen_lake": "FrozenLake",
    "bandit": "Bandit",
    "countdown": "Countdown",
    "sudoku": "Sudoku",
    "rubiks_cube": "RubiksCube",
    "game_2048": "Game2048",
    "math_qa": "MathQA",
    "webshop": "WebShop",
    "search_qa": "SearchQA",
    "code": "Code",
    "lean": "Lean",
}


def names() -> list[str]:
    """The names that `make` takes."""
    return list(_CLASSES)


def env_class(name: str) -> type:
    """The class behind a name. ValueError with the nearest name when there is none."""
    if name not in _CLASSES:
        near = difflib.get_close_matches(str(name), _CLASSES, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise ValueError(f"env: there is no environment {name!r}; {hint}valid: {', '.join(names())}, gym:ID")
    return getattr(importlib.import_module(f"nanoragen.envs.{name}"), _CLASSES[name])


def takers(option: str) -> list[str]:
    """The names of the environments that have this option."""
    return [name for name in names() if option in inspect.signature(env_class(name)).parameters]


def make(name: str, **options):
    """A fresh environment. `options` are the keyword arguments of its class (`boxes=2`); ValueError names a wrong one."""
    if name.startswith("gym:"):
        from nanoragen.envs.gym_adapter import GymText

        return GymText(name.removeprefix("gym:"), **options)
    cls = env_class(name)
    valid = [p for p in inspect.signature(cls).parameters]
    for key in options:
        if key not in valid:
            near = difflib.get_close_matches(key, valid, n=1)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise ValueError(f"env: {name} has no option {key!r}; {hint}valid: {', '.join(valid) or 'none'}")
    try:
        env = cls(**options)
    except ValueError:  # says it itself
        raise
    except (Exception, SystemExit) as e:
        raise ValueError(f"env: {name} cannot be made ({type(e).__name__}: {e}); valid: options that it takes") from e
    for key, value in options.items():
        switch = isinstance(inspect.signature(cls).parameters[key].default, bool)
        if switch != isinstance(value, bool):  # "no" would count as true, and true as 1
            raise ValueError(
                f"{key}: {value!r} is not possible in {name}; valid: {'true, false' if switch else 'no true or false'}"
            )
    return env


for _name, _cls in _CLASSES.items():
    gymnasium.register(id=f"nanoragen/{_cls}-v0", entry_point=f"nanoragen.envs.{_name}:{_cls}")
