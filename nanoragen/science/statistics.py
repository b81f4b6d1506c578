"""Few numbers, honestly: rank correlation, 95% intervals of a statistic and of a mean, and what they allow to say.

Left out: corrections for asking several questions. scipy has all but the verdict; a test compares.
"""

import math

import numpy as np

from nanoragen.run.metrics import Z95

ENOUGH = 5  # rows for a bootstrap


def ranks(x) -> np.ndarray:
    """1 for the smallest; equal values share the mean of their ranks."""
    _, inverse, count = np.unique(x, return_inverse=True, return_counts=True)
    return (count.cumsum() - (count - 1) / 2)[inverse]


def spearman(x, y) -> float:
    """Rank correlation: Pearson's of the ranks. NaN where one of them does not vary."""
    x, y = ranks(x) - (len(x) + 1) / 2, ranks(y) - (len(y) + 1) / 2
    scale = math.sqrt((x @ x) * (y @ y))
    return float(x @ y / scale) if scale else math.nan


def bootstrap(statistic, rows, resamples=2000, seed=0) -> tuple[float, float]:
    """95% percentile interval of statistic(rows) [n, ...], rows drawn with replacement. NaN for fewer than ENOUGH rows."""
    rows, rng = np.asarray(rows, dtype=float), np.random.default_rng(seed)
    if len(rows) < ENOUGH:
        return math.nan, math.nan
    values = [statistic(rows[rng.integers(len(rows), size=len(rows))]) for _ in range(resamples)]
    values = [v for v in values if math.isfinite(v)]
    return (float(np.quantile(values, 0.025)), float(np.quantile(values, 0.975))) if values else (math.nan, math.nan)


# two-sided 95% quantiles of Student's t for 2 to 10 degrees of freedom
T95 = (4.302653, 3.182446, 2.776445, 2.570582, 2.446912, 2.364624, 2.306004, 2.262157, 2.228139)


def t95(df: int) -> float:
    """df: 2 or more. Above 10: the expansion around the normal quantile (Abramowitz & Stegun 26.7.5), right to 2e-4."""
    if df <= 10:
        return T95[df - 2]
    z, n = Z95, 4 * df
    terms = (z**3 + z) / n, (5 * z**5 + 16 * z**3 + 3 * z) / (6 * n**2), (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (6 * n**3)
    return z + sum(terms)


def t_interval(values) -> tuple[float, float, float]:
    """(mean, low, high): 95% interval of the mean of independent values; NaN bounds for fewer than three."""
    x = np.asarray(values, dtype=float)
    if len(x) < 3:
        return (float(x.mean()) if len(x) else math.nan), math.nan, math.nan
    half = t95(len(x) - 1) * x.std(ddof=1) / math.sqrt(len(x))
    return float(x.mean()), float(x.mean() - half), float(x.mean() + half)


def verdict(low: float, high: float, n: int) -> str:
    """Of a claim that something is above 0, from its 95% interval of n rows. NaN bounds of enough rows: a correlation with a constant."""
    if not (math.isfinite(low) and math.isfinite(high)):
        return "undecided (too few runs)" if n < ENOUGH else "not defined: one of them does not vary"
    return "reproduced" if low > 0 else "not reproduced" if high < 0 else "undecided (interval contains 0)"
