"""The Triton kernels: `from nanoragen.kernels import logprob_entropy`, or `from nanoragen.kernels.logprob import ...`.

The modules lie in the folder `kernels/` of a checkout, which has no `__init__.py` because a package called `kernels` would hide
Hugging Face's. In a wheel they lie beside this file. Names are resolved when they are first asked for: importing this package
alone loads neither torch nor Triton.
"""

from importlib import import_module
from pathlib import Path

_MODULES = {
    "logprob_entropy": "logprob", "linear_logprob_entropy": "linear", "cross_logprob_matrix": "cross",
    "cross_statistics": "cross", "group_advantages": "advantage", "policy_loss": "policy",
}  # fmt: skip
__all__ = list(_MODULES)

if not Path(__file__).with_name("dispatch.py").is_file():
    __path__.append(str(Path(__file__).resolve().parents[2] / "kernels"))


def __getattr__(name):
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; valid: {', '.join(_MODULES)}, or a module of it")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__():
    return sorted({*globals(), *_MODULES})
