"""nanoragen: see, understand and prevent template collapse in multi-turn agents.

The folders `kernels/` and `envs/` of a checkout are the packages `nanoragen.kernels` and `nanoragen.envs`. They are never
imported under their bare names: `kernels` is also a Hugging Face package that transformers imports when it is installed.
In a wheel they lie inside this package. In a checkout, nanoragen/kernels/__init__.py looks for the first beside this package,
and the last lines below for the second.
"""

import os
from pathlib import Path

__version__ = "0.1.0"

# Threads of OpenMP that wait for work sleep; by default they spin, and two runs on one machine take each other's cores. The pool
# (libgomp in torch's builds for Linux, libomp elsewhere) reads this once, when torch is imported.
if not os.environ.keys() & {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"}:  # else the user's word counts
    os.environ["OMP_WAIT_POLICY"] = "PASSIVE"

_root = Path(__file__).resolve().parent.parent
if (_root / "envs" / "base.py").is_file():
    __path__.append(str(_root))
