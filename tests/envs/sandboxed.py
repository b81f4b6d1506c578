"""What the tests of the sandbox share: isolations to try, runs that must end well, and what is still alive."""

import contextlib
import os
import random
import sys
from pathlib import Path

import pytest

from nanoragen.envs import sandbox
from nanoragen.envs.sandbox import run

ROOT = Path(__file__).resolve().parents[2]
BEST = sandbox.isolation() if sys.platform.startswith("linux") else "none"
MODES = pytest.mark.parametrize("mode", dict.fromkeys([BEST, "none"]))
apart = pytest.mark.skipif(BEST != "namespaces", reason="needs namespaces, which are not allowed here")
PROC = BEST == "namespaces" and run("import os; print(os.path.exists('/proc/self'))").stdout == "True\n"
SMALL = dict(seconds=2.0, memory=256 << 20, processes=16)
PATIENT = {**SMALL, "seconds": 20.0}  # for what ends by itself, on a busy machine


def cleanly(code, **options):
    result = run(code, **{**PATIENT, **options})
    assert result.status == "ok", result
    return result.stdout


def alive(word: str) -> list[int]:
    """Processes, zombies excepted, whose command line holds the word."""
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            if word.encode() in Path(f"/proc/{name}/cmdline").read_bytes() and int(name) != os.getpid():
                found.append(int(name))
        except OSError:
            pass
    return found


def all_children() -> set[str]:
    found = set()
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            found.update(Path(f"/proc/self/task/{thread}/children").read_text().split())
    return found


BEFORE = set()


@pytest.fixture(autouse=True)
def count_from_here():
    """Other tests of the process have children of their own: the judge of mathematics keeps one."""
    BEFORE.clear()
    BEFORE.update(all_children())


def children() -> set[str]:
    return all_children() - BEFORE


def word() -> str:
    return f"sleeper{random.Random().getrandbits(64)}"


def tries(*statements) -> str:
    return "".join(f"try:\n  {s}\n  print('done')\nexcept OSError as e: print(type(e).__name__)\n" for s in statements)
