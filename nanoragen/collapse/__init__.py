"""Template collapse, measured: does the reasoning Z still depend on the prompt X?

In: a model and token ids of prompts and reasonings. Out: mutual information, entropies, retrieval, and a regime in words.

Read in this order:
    matrix.py      L[i, j] = log p(z_i | x_j), each prompt encoded once (`cross_matrix`)
    estimator.py   the estimates and their standard errors from that matrix (`collapse_metrics`, `measure`), samplers
    regimes.py     what the estimates of a run mean, in words; needs no torch
"""

import importlib

_HOME = {"collapse_metrics": "estimator", "measure": "estimator", "cross_matrix": "matrix"}
__all__ = list(_HOME)


def __getattr__(name):
    """The public functions, imported when they are first asked for: `collapse.regimes` alone must not import torch."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
