"""Summaries of few repetitions: median, spread, and a 95 % confidence interval of the mean.

The interval is Student's t with n - 1 degrees of freedom. A bootstrap of three values can only
return combinations of those three and so claims too narrow an interval; t says honestly that
three repetitions know little (t = 4.30).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from spark_appliance.bench.result import Summary

# 0.975 quantiles of Student's t for 1..30 degrees of freedom: the standard table, as in the
# NIST/SEMATECH e-Handbook of Statistical Methods, section 1.3.6.7.2.
_T975 = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228,
    2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086,
    2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip


def t975(degrees: int) -> float:
    """Return the 0.975 quantile of Student's t, for ``degrees`` >= 1 (error below 0.001).

    Above the table it is the series about the normal quantile (Abramowitz and Stegun, 26.7.5).
    """
    if degrees <= len(_T975):
        return _T975[degrees - 1]
    z = statistics.NormalDist().inv_cdf(0.975)
    return z + (z**3 + z) / (4 * degrees) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * degrees**2)


def summarize(values: Sequence[float]) -> Summary:
    """Summarize at least one value; raises ``statistics.StatisticsError`` for none."""
    n = len(values)
    mean = statistics.fmean(values)
    stddev = statistics.stdev(values) if n > 1 else None
    ci95 = None
    if stddev is not None:
        half = t975(n - 1) * stddev / math.sqrt(n)
        ci95 = (mean - half, mean + half)
    return Summary(
        n=n,
        median=statistics.median(values),
        mean=mean,
        min=min(values),
        max=max(values),
        stddev=stddev,
        ci95=ci95,
    )


def percentile(values: Sequence[float], percent: float) -> float:
    """Return a percentile (0..100) by linear interpolation between order statistics.

    This is numpy's default and Hyndman and Fan's type 7. Raises ValueError for no values.
    """
    if not values:
        raise ValueError("no values")
    ordered = sorted(values)
    position = (len(ordered) - 1) * percent / 100
    below = math.floor(position)
    above = math.ceil(position)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)
