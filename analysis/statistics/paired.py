"""Paired comparisons over few seeds: Student's interval, and Holm's correction for the number of comparisons."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats


@dataclass(frozen=True)
class Paired:
    """A mean difference of ``n`` pairs with its 95 % t interval and two-sided p value. None: fewer than two pairs."""

    mean: float
    low: float | None
    high: float | None
    p_value: float | None
    n: int


def paired(differences: Sequence[float]) -> Paired:
    """Computes mean, interval and p value of differences, one per seed.

    Raises:
        ValueError: no difference.
    """
    values, n = np.array(differences, dtype=np.float64), len(differences)
    if n == 0:
        raise ValueError("differences must have at least one value, got none")
    mean = float(values.mean())
    if n < 2:
        return Paired(mean, None, None, None, n)
    error = float(values.std(ddof=1) / np.sqrt(n))
    half = float(stats.t.ppf(0.975, n - 1)) * error
    p_value = float(2 * stats.t.sf(abs(mean) / error, n - 1)) if error > 0 else float(mean == 0)
    return Paired(mean, mean - half, mean + half, p_value, n)


def holm(p_values: Sequence[float | None]) -> list[float | None]:
    """Adjusts p values for their number by Holm's step-down rule; None stays None and does not count.

    Source: S. Holm, "A simple sequentially rejective multiple test procedure", Scand. J. Statist. 6 (1979).
    """
    places = sorted((p, place) for place, p in enumerate(p_values) if p is not None)
    adjusted: list[float | None] = [None] * len(p_values)
    largest = 0.0
    for rank, (p, place) in enumerate(places):
        largest = max(largest, min(1.0, p * (len(places) - rank)))
        adjusted[place] = largest
    return adjusted
