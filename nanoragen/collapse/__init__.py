"""Template collapse, measured: does the reasoning Z still depend on the prompt X?

In: a model and token ids of prompts and reasonings. Out: mutual information, entropies, retrieval, and a regime in words.

Read in this order:
    matrix.py      L[i, j] = log p(z_i | x_j), each prompt encoded once (`cross_matrix`)
    estimator.py   the estimates and their standard errors from that matrix (`collapse_metrics`, `measure`), samplers
    monitor.py     the measurements of a run from step to step; nanoragen/run/regimes.py names what they show
"""

from nanoragen.collapse.estimator import collapse_metrics, measure
from nanoragen.collapse.matrix import cross_matrix

__all__ = ["collapse_metrics", "cross_matrix", "measure"]
