"""nanoragen: see, understand and prevent template collapse in multi-turn agents.

The folders `kernels/` and `envs/` of a checkout are the packages `nanoragen.kernels` and `nanoragen.envs`. They are never
imported under their bare names: `kernels` is also a Hugging Face package that transformers imports when it is installed.
In a wheel they lie inside this package. In a checkout, nanoragen/kernels/__init__.py looks for the first beside this package,
and the line below for the second.
"""

import os
from pathlib import Path

# Threads of OpenMP that wait for work spin by default: two runs on one machine then keep each other off the cores. Read when torch
# is imported; whatever the user has set stays.
for _name, _value in {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "0", "KMP_BLOCKTIME": "0"}.items():
    os.environ.setdefault(_name, _value)

__version__ = "0.1.0"

_root = Path(__file__).resolve().parent.parent
if (_root / "envs" / "base.py").is_file():
    __path__.append(str(_root))
