"""What a plan loses of the expected gradient: intervals that hold the truth, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest

from analysis.statistics.direction import direction_cosine, direction_lost, signal_share, update_loss
from analysis.statistics.intervals import Interval
from analysis.statistics.learning_signal import Moments, Products, products

SIZE = 40


def gradients(
    rng: np.random.Generator, n: int, noise: float, turned: float, extra: float
) -> tuple[np.ndarray, np.ndarray]:
    """Gradients of n batches: exact with mean 1 on axis 0, and an estimator turned towards axis 1, noise shared."""
    exact = noise * rng.normal(size=(n, SIZE)) / SIZE**0.5
    estimate = exact + extra * rng.normal(size=(n, SIZE)) / SIZE**0.5
    exact[:, 0] += 1
    estimate[:, 0] += 0.9
    estimate[:, 1] += turned
    return estimate, exact


def covers(interval: Interval, truth: float) -> bool:
    assert interval.low is not None and interval.high is not None
    return interval.low <= truth <= interval.high


@pytest.mark.parametrize("n", [8, 16, 32])
@pytest.mark.parametrize(("turned", "extra"), [(0.1, 0.05), (0.3, 0.2)])
def test_intervals_cover(n: int, turned: float, extra: float) -> None:
    rng, noise = np.random.default_rng(n), 0.7
    cosine = 0.9 / np.hypot(0.9, turned)
    own, own_noise = 0.81 + turned**2, noise**2 + extra**2
    powers_of = np.random.default_rng(5)
    loss = float(Moments(1, 0.9, own, 50.0, 44.0).loss(4))
    truths = [cosine, 1 - cosine**2, own / (own + own_noise), loss, loss]
    covered = []
    for _ in range(400):
        found = products(*gradients(rng, n, noise, turned, extra))
        # squared norms of the policy gradient, whose noise power is 50 for exact and 44 for the plan
        common = powers_of.normal(size=n)
        exact_powers = 51 + 4 * common + powers_of.normal(size=n)
        powers = own + 44 + 3.5 * common + powers_of.normal(size=n)
        intervals = [direction_cosine(found), direction_lost(found), signal_share(found)]
        intervals.append(update_loss(found, powers.tolist(), exact_powers.tolist(), 4))
        intervals.append(update_loss(found, powers[:8].tolist(), exact_powers[:8].tolist(), 4))
        covered.append([covers(one, truth) for one, truth in zip(intervals, truths, strict=True)])
    share = np.mean(covered, axis=0)
    assert (share >= 0.91).all() and (share <= 0.99).all(), share


def test_an_estimator_without_bias_is_within_its_interval_which_is_too_wide() -> None:
    rng = np.random.default_rng(3)
    lost = [direction_lost(products(*gradients(rng, 12, 0.5, 0.0, 0.2))) for _ in range(400)]
    assert np.mean([covers(one, 0.0) for one in lost]) >= 0.94
    assert abs(np.mean([one.value for one in lost])) < 2e-3  # type: ignore[misc]  # noise adds nothing


def test_products_of_one_batch_are_left_out() -> None:
    rng = np.random.default_rng(4)
    estimate, exact = gradients(rng, 10, 0.6, 0.2, 0.1)
    pairs = [(i, j) for i in range(10) for j in range(10) if i != j]
    of_two = ((estimate, exact), (estimate, estimate), (exact, exact))
    cross, own, mu2 = (np.mean([a[i] @ b[j] for i, j in pairs]) for a, b in of_two)
    found = products(estimate, exact)
    assert direction_cosine(found).value == pytest.approx(cross / np.sqrt(own * mu2))
    assert direction_lost(found).value == pytest.approx(1 - cross**2 / (own * mu2))
    assert signal_share(found).value == pytest.approx(own / (estimate**2).sum(1).mean())


def test_exact_loses_nothing() -> None:
    _, exact = gradients(np.random.default_rng(0), 8, 0.6, 0.2, 0.1)
    found = products(exact, exact)
    powers = [3.0] * 8
    for interval in (direction_lost(found), update_loss(found, powers, powers, 4)):
        assert (interval.value, interval.low, interval.high) == pytest.approx((0, 0, 0), abs=1e-9)


def test_noise_alone_has_no_direction() -> None:
    apart = products(np.eye(5), -np.eye(5))
    assert direction_cosine(apart) == direction_lost(apart) == Interval(None, None, None, 5)


def test_what_does_not_fit_is_refused() -> None:
    found = products(np.eye(4) + 1, np.eye(4) + 1)
    for own, exact in (3, 4), (2, 2), (5, 5):
        with pytest.raises(ValueError, match=f"must be of equally many batches, 3 to 4, got {own} and {exact}"):
            update_loss(found, [1.0] * own, [1.0] * exact, 1)
    fewer = Products(found.exact, found.exact[:3], found.exact[:3, :3])
    with pytest.raises(ValueError, match="products must hold the estimator on all 4 batches of exact, got 3"):
        direction_lost(fewer)
