"""What a plan loses of the expected gradient, from pathwise gradients of it and of exact on the same rollout batches.

Means come from pairs of different batches, in which noise averages out (`analysis.statistics.learning_signal.moments`);
intervals are by the delete-one jackknife over batches and Student's t. Coverage: `tests/analysis/test_direction.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
from scipy import stats

from analysis.statistics.intervals import Interval
from analysis.statistics.learning_signal import Moments, Products, Values, moments


def direction_cosine(products: Products) -> Interval:
    """Computes the cosine between the expected gradients of an estimator and of exact.

    Not clipped, so that it has no bias from noise beyond that of a ratio. Undefined where a squared mean is not
    positive.
    """
    return _jackknife(products, lambda found: _cosine(found))


def direction_lost(products: Products) -> Interval:
    """Computes ``1 - cos^2`` of the expected gradients: the share of the squared mean that points elsewhere."""
    return _jackknife(products, lambda found: 1 - _cosine(found) ** 2)


def signal_share(products: Products) -> Interval:
    """Computes ``S = |mu_e|^2 / E |e|^2`` of the estimator: the share of a batch's squared norm that is its mean's."""
    return _jackknife(products, lambda found: np.asarray(found.own / (found.own + found.own_noise))[()])


def signal_ratio(one: Products, other: Products) -> Interval:
    """Computes the signal-to-noise ratio ``|mu|^2 / V`` of one estimator over another's, on n batches of each.

    The jackknife leaves out a batch of both at a time, on the logarithm. Undefined where a squared mean is not
    positive.
    """
    if one.n != other.n:
        raise ValueError(f"both must be of equally many batches, got {one.n} and {other.n}")

    def logarithm(found: Moments, weights: np.ndarray) -> Values:
        reference = moments(other, weights)
        ratio = np.asarray(found.own / found.own_noise / (reference.own / reference.own_noise))
        positive = (np.asarray(found.own) > 0) & (np.asarray(reference.own) > 0)
        return np.log(np.where(positive, ratio, np.nan))[()]

    made = _jackknife_weighted(one, logarithm)
    value, low, high = (None if end is None else math.exp(end) for end in (made.value, made.low, made.high))
    return Interval(value, low, high, made.n)


def update_loss(products: Products, powers: Sequence[float], exact_powers: Sequence[float], scale: float) -> Interval:
    """Computes the share of exact's signal that an update by the policy gradient loses on the estimator.

    The means are those of pathwise gradients, which have the policy gradient's expectation; the noise is that of the
    policy gradient itself, whose squared norms are known well from few batches.

    Args:
        products: of the pathwise gradients of n batches.
        powers: ``|e|^2`` of the policy gradient by the estimator, on the first m of these batches, m values.
        exact_powers: ``|g|^2`` of the exact policy gradient, likewise.
        scale: samples of the update over samples of a batch.

    Raises:
        ValueError: powers of fewer than 3 or more than n batches, or not equally many of both.
    """
    own, exact = np.asarray(powers, dtype=np.float64), np.asarray(exact_powers, dtype=np.float64)
    if own.shape != exact.shape or not 3 <= len(own) <= products.n:
        raise ValueError(
            f"powers and exact_powers must be of equally many batches, 3 to {products.n}, "
            f"got {len(own)} and {len(exact)}"
        )

    def loss(found: Moments, weights: np.ndarray) -> Values:
        first = weights[..., : len(own)]
        total = first.sum(-1)
        noise, own_noise = first @ exact / total - found.mu2, first @ own / total - found.own
        return Moments(found.mu2, found.cross, found.own, noise, own_noise).loss(scale)

    return _jackknife_weighted(products, loss)


def _cosine(found: Moments) -> Values:
    squared = np.asarray(found.mu2) * np.asarray(found.own)
    both = (np.asarray(found.mu2) > 0) & (np.asarray(found.own) > 0)
    return (found.cross / np.sqrt(np.where(both, squared, np.nan)))[()]


def _jackknife(products: Products, figure: Callable[[Moments], Values]) -> Interval:
    return _jackknife_weighted(products, lambda found, _: figure(found))


def _jackknife_weighted(products: Products, figure: Callable[[Moments, np.ndarray], Values]) -> Interval:
    """A figure with its interval; undefined if it, or a figure without one of the batches, is."""
    n = products.n
    if products.m != n:
        raise ValueError(f"products must hold the estimator on all {n} batches of exact, got {products.m}")
    every, without = np.ones(n), 1 - np.eye(n)
    value = float(figure(moments(products), every))
    left_out = np.asarray(figure(moments(products, without), without))
    if math.isnan(value) or np.isnan(left_out).any():
        return Interval(None, None, None, n)
    error = math.sqrt((n - 1) / n * float(((left_out - left_out.mean()) ** 2).sum()))
    reach = float(stats.t.ppf(0.975, n - 1)) * error
    return Interval(value, value - reach, value + reach, n)
