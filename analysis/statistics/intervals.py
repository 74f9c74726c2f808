"""Intervals and tests. Rollout batches are the unit; every draw is seeded."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Literal

import numpy as np

DRAWS = 2000
"""Bootstrap draws, and random flips of signs."""

ROUNDING = 1e-12
"""Distance from the end of a logarithmic scale that is rounding."""

LARGEST_EXPONENT = 700.0
"""Of a factor that is still finite."""

CLAIM_BATCHES = 8
"""Fewest batches from which anything is claimed: below, an interval is printed and no conclusion drawn."""

Scale = Literal["linear", "cosine", "positive"]
"""Of a mean's interval: as it is; on the logarithm of one minus it; on its logarithm."""


@dataclass(frozen=True)
class Interval:
    """An estimate with its 95 % interval from ``n`` samples. None: undefined."""

    value: float | None
    low: float | None
    high: float | None
    n: int


def mean_interval(samples: Sequence[float | None], scale: Scale = "linear", error: float = 0.05) -> Interval:
    """Computes the mean of the defined samples and its interval by Student's t; one sample has no interval.

    On the scale of a logarithm the standard error is by the delta method, ``cv / sqrt(n)`` with the coefficient of
    variation cv of the samples; away from the end of the scale, where skewed samples have their tail, it is taken
    ``1 + cv / 2`` times as large. The interval is of the arithmetic mean on every scale. Coverage:
    `tests/analysis/test_coverage.py`.

    Args:
        samples: independent, one per batch; None is left out.
        scale: ``"cosine"`` for what is at most 1 and piles up there, ``"positive"`` for what is above 0.
        error: share of intervals that miss, half of them on each side.
    """
    values = np.array([s for s in samples if s is not None], dtype=np.float64)
    n = len(values)
    if n == 0:
        return Interval(None, None, None, 0)
    mean = float(values.mean())
    if n == 1:
        return Interval(mean, None, None, 1)
    from scipy import stats

    reach = float(stats.t.ppf(1 - error / 2, n - 1) / math.sqrt(n))
    deviation = float(values.std(ddof=1))
    distance = {"linear": 0.0, "cosine": 1 - mean, "positive": mean}[scale]
    if not distance > ROUNDING:
        return Interval(mean, mean - reach * deviation, mean + reach * deviation, n)
    variation = deviation / distance
    near = distance * math.exp(-reach * variation)
    far = distance * math.exp(min(reach * variation * (1 + variation / 2), LARGEST_EXPONENT))
    return Interval(mean, near, far, n) if scale == "positive" else Interval(mean, max(-1.0, 1 - far), 1 - near, n)


def percentile_interval(value: float, draws: np.ndarray, n: int) -> Interval:
    """Computes the interval of an estimate from bootstrap draws of its ``n`` batches, widened for few of them.

    Percentiles of draws are too narrow by ``sqrt(1 - 1 / n)`` and know no Student t. Their tails are therefore those of
    a normal distribution beyond ``t sqrt(n / (n - 1))``: the expanded percentile interval (Hesterberg, 2015).
    ``draws``: may hold NaN, which is left out.
    """
    from scipy import stats

    tail = float(stats.norm.sf(stats.t.ppf(0.975, n - 1) * math.sqrt(n / (n - 1))))
    low, high = np.nanquantile(draws, [tail, 1 - tail], method="nearest")
    return Interval(value, float(low), float(high), n)


@dataclass(frozen=True)
class Leak:
    """Whether the mean of gradients vanishes, and how large it is.

    Attributes:
        share: ``|mu|^2 / V`` with its interval: squared norm of the mean gradient over the noise power of a batch; 0
            without a leak, and it does not grow with the number of batches. An unbiased numerator may be negative.
        p_value: share of the sign flips of the batches with a mean at least as large, the observed one among them.
        p_floor: the smallest that ``p_value`` can be with so many batches.
    """

    share: Interval
    p_value: float
    p_floor: float

    @property
    def p_text(self) -> str:
        """``p = 0.03``, or ``p <= 0.0078`` where no flip of signs gives as large a mean."""
        return f"p <= {self.p_floor:.2g}" if self.p_value <= self.p_floor else f"p = {self.p_value:.2g}"


def leak_test(gram: np.ndarray, seed: int = 0) -> Leak:
    """Tests that gradients with zero expectation have it, from their inner products ``[n, n]``.

    With all advantages 1 the exact gradient has expectation zero. Under the null the sign of each batch is exchangeable
    to good approximation, so random flips of signs give the distribution of the mean's norm. The share's interval is by
    the delete-one jackknife and Student's t.

    Raises:
        ValueError: fewer than 3 batches, or gradients that all vanish.
    """
    n = len(gram)
    if n < 3:
        raise ValueError(f"the leak test needs at least 3 batches, got {n}")
    trace, total = float(np.trace(gram)), float(gram.sum())
    if not trace - total / n > 0:
        raise ValueError("the gradients do not vary: their leak is undefined")
    if 2 ** (n - 1) <= DRAWS:
        # all of them; the first sign is free to stay
        signs = np.array([(1.0, *rest) for rest in product((1.0, -1.0), repeat=n - 1)])
    else:
        signs = np.random.default_rng(seed).choice([-1.0, 1.0], size=(DRAWS, n))
        signs[0] = 1
    flipped = np.einsum("di,ij,dj->d", signs, gram, signs)
    p_value = float((flipped >= total * (1 - 1e-12)).mean())
    return Leak(_leak_share(gram), p_value, 1 / len(signs))


def _leak_share(gram: np.ndarray) -> Interval:
    """``|mu|^2 / V`` from inner products of at least 3 batches."""
    n = len(gram)
    rows, own = gram.sum(1), np.diag(gram)

    def share(count: int, trace: np.ndarray, total: np.ndarray) -> np.ndarray:
        mean = (total - trace) / (count * (count - 1))
        return mean / (trace / count - mean)

    value = float(share(n, own.sum(), gram.sum()))
    without = share(n - 1, own.sum() - own, gram.sum() - 2 * rows + own)
    error = math.sqrt((n - 1) / n * float(((without - without.mean()) ** 2).sum()))
    from scipy import stats

    reach = float(stats.t.ppf(0.975, n - 1)) * error
    return Interval(value, value - reach, value + reach, n)
