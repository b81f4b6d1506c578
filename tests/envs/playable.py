"""Environments for the tests that run over all of them: some need leave, or a program, before they start."""

import atexit
import functools
import shutil
import tempfile
from pathlib import Path

from fake_lean import fake_lean

from nanoragen.envs import code, registry

code.run = functools.cache(code.run)  # the same instances are played over and over, and the same program ends in the same way
CHECKED = {}


@functools.cache
def _fake_lean() -> str:
    folder = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, folder)
    return fake_lean(Path(folder) / "lean")


def options(name: str) -> dict:
    if name == "code":
        return {"allow_code_execution": True, "seconds": 20.0}
    return {"command": _fake_lean(), "seconds": 20.0} if name == "lean" else {}


def make(name: str):
    env = registry.make(name, **options(name))
    if name == "lean":
        env.check = functools.partial(_check_once, env, env.check)
    return env


def _check_once(env, check, tactics):
    key = env.theorem.statement, *tactics
    if key not in CHECKED:
        CHECKED[key] = check(tactics)
    return CHECKED[key]
