"""Rank correlation, 95% intervals and the verdict that they allow, for tables of few rows; on top of scipy.stats.

Left out: corrections for asking several questions.
"""

import math
import warnings

import numpy as np
from scipy import stats

ENOUGH = 5  # rows for a bootstrap


def spearman(x, y, axis=-1):
    """Spearman's rank correlation along an axis, equal values sharing their mean rank; NaN where x or y does not vary."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", stats.ConstantInputWarning)
        return stats.pearsonr(stats.rankdata(x, axis=axis), stats.rankdata(y, axis=axis), axis=axis).statistic


def bootstrap(statistic, *columns, resamples=2000, seed=0) -> tuple[float, float]:
    """95% percentile interval of statistic(*columns, axis=-1), rows drawn with replacement. NaN for fewer than ENOUGH rows.

    columns: [n] each, row i of all of them is drawn together. Resamples in which the statistic is not defined are left out.
    """
    columns, rng = np.asarray(columns, dtype=float), np.random.default_rng(seed)
    if columns.shape[1] < ENOUGH:
        return math.nan, math.nan
    drawn = statistic(*columns[:, rng.integers(columns.shape[1], size=(resamples, columns.shape[1]))], axis=-1)
    drawn = drawn[np.isfinite(drawn)]
    return tuple(np.quantile(drawn, (0.025, 0.975)).tolist()) if len(drawn) else (math.nan, math.nan)


def t_interval(values) -> tuple[float, float, float]:
    """(mean, low, high): Student's 95% interval of the mean of independent values; NaN bounds for fewer than three."""
    if len(values) < 3:
        return (float(np.mean(values)) if len(values) else math.nan), math.nan, math.nan
    mean, half = float(np.mean(values)), float(stats.t.ppf(0.975, len(values) - 1) * stats.sem(values))
    return mean, mean - half, mean + half


def verdict(low: float, high: float, n: int) -> str:
    """Of a claim that something is above 0, from its 95% interval of n rows. Of enough rows, NaN bounds mean a constant column."""
    if not (math.isfinite(low) and math.isfinite(high)):
        return "undecided (too few runs)" if n < ENOUGH else "not defined: one of them does not vary"
    return "reproduced" if low > 0 else "not reproduced" if high < 0 else "undecided (interval contains 0)"
