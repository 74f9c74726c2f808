"""Intervals and tests. Rollout batches are the unit that is resampled; every draw is seeded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
from scipy import stats

DRAWS = 2000


@dataclass(frozen=True)
class Interval:
    """An estimate with its 95 % percentile bootstrap interval from ``n`` samples. None: undefined."""

    value: float | None
    low: float | None
    high: float | None
    n: int


def _resampled(samples: Sequence[np.ndarray], statistic: Callable[..., np.ndarray], seed: int) -> tuple[float, float]:
    """Ends of the interval of a statistic of paired samples, resampled together."""
    found = stats.bootstrap(
        samples, statistic, n_resamples=DRAWS, paired=True, vectorized=True, method="percentile", rng=seed
    ).confidence_interval
    return float(found.low), float(found.high)


def bootstrap(samples: Sequence[float | None], seed: int = 0) -> Interval:
    """Mean of the defined samples and its interval; with one sample there is a value but no interval."""
    values = np.array([s for s in samples if s is not None], dtype=np.float64)
    if len(values) == 0:
        return Interval(None, None, None, 0)
    if len(values) == 1:
        return Interval(float(values[0]), None, None, 1)
    return Interval(float(values.mean()), *_resampled([values], np.mean, seed), len(values))


@dataclass(frozen=True)
class Leak:
    """Whether the mean of gradients vanishes.

    Attributes:
        ratio: squared norm of the mean over what sampling noise alone would make of it; about 1 without a leak.
        p_value: share of the sign flips of the batches with a mean at least as large, the observed one among them.
        n: batches.
    """

    ratio: float
    p_value: float
    n: int


def leak_test(gram: np.ndarray, seed: int = 0) -> Leak:
    """Test that gradients with zero expectation have it, from their inner products ``[n, n]``.

    With all advantages 1 the exact gradient has expectation zero. Under the null the sign of each batch is exchangeable
    to good approximation, so random flips of signs give the distribution of the mean's norm.

    Raises:
        ValueError: fewer than 3 batches, or gradients that all vanish.
    """
    n = len(gram)
    if n < 3:
        raise ValueError(f"the leak test needs at least 3 batches, found {n}")
    trace, total = float(np.trace(gram)), float(gram.sum())
    noise = (trace - total / n) / (n - 1)
    if not noise > 0:
        raise ValueError("the gradients do not vary: their leak is undefined")
    if 2 ** (n - 1) <= DRAWS:
        # all of them; the first sign is free to stay
        signs = np.array([(1.0, *rest) for rest in product((1.0, -1.0), repeat=n - 1)])
    else:
        signs = np.random.default_rng(seed).choice([-1.0, 1.0], size=(DRAWS, n))
        signs[0] = 1
    flipped = np.einsum("di,ij,dj->d", signs, gram, signs)
    return Leak(total / n / noise, float((flipped >= total * (1 - 1e-12)).mean()), n)
