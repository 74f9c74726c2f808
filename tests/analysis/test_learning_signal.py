"""Signal, bias and noise from inner products are those of the vectors; what cannot be known is undefined."""

from __future__ import annotations

import re
from dataclasses import fields

import numpy as np
import pytest

from analysis.statistics.intervals import DRAWS, Interval, mean_interval
from analysis.statistics.learning_signal import (
    Moments,
    Products,
    batches_to_tell,
    bias_interval,
    effective_dimension,
    kept_difference,
    moments,
    paired_difference,
    signal_loss,
    signal_samples,
    verdict,
)


def products_of(exact: np.ndarray, estimate: np.ndarray) -> Products:
    return Products(exact @ exact.T, estimate @ exact.T, estimate @ estimate.T)


def gradients(n: int, seed: int, signal: float = 1.0, bias: float = 0.3, size: int = 60) -> tuple[np.ndarray, ...]:
    """Exact gradients with mean ``signal`` on axis 0 and unit noise; an estimator that adds bias and noise."""
    rng = np.random.default_rng(seed)
    exact = rng.normal(size=(n, size)) / size**0.5
    exact[:, 0] += signal
    estimate = exact + 0.4 * rng.normal(size=(n, size)) / size**0.5
    estimate[:, 1] += bias
    return exact, estimate


def values(found: Moments) -> np.ndarray:
    """The fields, ``[5]`` or ``[5, draws]``."""
    return np.array([getattr(found, field.name) for field in fields(found)])


def cosine(a: np.ndarray, b: np.ndarray) -> float:
    return float(a @ b / np.linalg.norm(a) / np.linalg.norm(b))


# Products


@pytest.mark.parametrize("name", ["exact", "own"])
@pytest.mark.parametrize(
    ("table", "message"),
    [
        (np.ones((3, 4)), r"must be a square table, got shape \(3, 4\)"),
        (np.ones(3), r"must be a square table, got shape \(3,\)"),
        (np.ones((2, 2)), "needs at least 3 batches, got 2"),
        (np.array([[1, 2, np.nan], [2, 1, np.inf], [1, 1, 1]]), "must be finite, got 2 entries that are not"),
    ],
)
def test_tables_are_validated(name: str, table: np.ndarray, message: str) -> None:
    with pytest.raises(ValueError, match=f"{name} {message}"):
        Products(**({key: np.eye(3) for key in ("exact", "cross", "own")} | {name: table}))


@pytest.mark.parametrize("name", ["exact", "own"])
def test_what_must_be_symmetric(name: str) -> None:
    table = np.eye(3)
    table[0, 1] = 0.25
    with pytest.raises(ValueError, match=f"{name} must be symmetric, got entries that differ by 0.25"):
        Products(**({key: np.eye(3) for key in ("exact", "cross", "own")} | {name: table}))
    assert Products(np.eye(3), table, np.eye(3)).n == 3


@pytest.mark.parametrize(
    ("exact", "cross", "own"), [((3, 3), (4, 4), (3, 3)), ((4, 4), (4, 3), (3, 3)), ((3, 3), (4, 3), (4, 4))]
)
def test_tables_must_fit(exact: tuple[int, int], cross: tuple[int, int], own: tuple[int, int]) -> None:
    found = re.escape(f"{exact}, {cross}, {own}")
    with pytest.raises(ValueError, match=rf"\[n, n\], \[m, n\] and \[m, m\] with m <= n, got {found}"):
        Products(np.eye(*exact), np.ones(cross), np.eye(*own))


def test_cross_must_be_finite() -> None:
    with pytest.raises(ValueError, match="cross must be finite, got 1 entries that are not"):
        Products(np.eye(3), np.diag([1.0, np.nan, 1.0]), np.eye(3))


def fewer(seed: int, m: int, n: int = 24, bias: float = 0.5) -> tuple[np.ndarray, np.ndarray]:
    """Exact gradients of n batches, and of the first m those of an estimator that is close, with a bias."""
    rng = np.random.default_rng(seed)
    exact = rng.normal(size=(n, 200)) / 200**0.5
    exact[:, 0] += 1.0
    own = exact[:m] + 0.2 * rng.normal(size=(m, 200)) / 200**0.5
    own[:, 1] += bias
    return exact, own


def test_fewer_batches_than_exact_are_told_by_their_difference() -> None:
    exact, own = fewer(0, 6)
    found = moments(Products(exact @ exact.T, own @ exact.T, own @ own.T))
    pairs = [(i, j) for i in range(24) for j in range(24) if i != j]
    mu2 = np.mean([exact[i] @ exact[j] for i, j in pairs])
    apart = np.mean([(own[i] - exact[i]) @ exact[j] for i, j in pairs if i < 6])
    differs = own - exact[:6]
    more = 2 * apart + np.mean([differs[i] @ differs[j] for i, j in pairs if i < 6 and j < 6])
    assert found.mu2 == pytest.approx(mu2)
    assert found.cross == pytest.approx(mu2 + apart)
    assert found.own == pytest.approx(mu2 + more)
    assert found.noise == pytest.approx(np.mean((exact**2).sum(1)) - mu2)
    powers = np.mean((own**2).sum(1)) - np.mean((exact[:6] ** 2).sum(1))
    assert found.own_noise == pytest.approx(found.noise + powers - more)


def test_more_batches_of_exact_tell_more() -> None:
    """The loss of an estimator on 6 batches: the same on average, and known better if exact has 24."""
    true = 1 - (1 / np.sqrt(1.25 + 1.04 / 4)) / (1 / np.sqrt(1 + 1 / 4))
    wide, square = [], []
    for seed in range(300):
        exact, own = fewer(seed, 6)
        for losses, g in ((wide, exact), (square, exact[:6])):
            losses.append(moments(Products(g @ g.T, own @ g.T, own @ own.T)).loss(4))
    assert np.mean(wide) == pytest.approx(true, abs=0.01)
    assert np.std(wide) < 0.9 * np.std(square)


def test_samples_of_fewer_batches_lean_on_all_of_exact() -> None:
    exact, own = fewer(1, 5)
    found = Products(exact @ exact.T, own @ exact.T, own @ own.T)
    total = exact.sum(0)
    for b, sample in enumerate(signal_samples(found)):
        reference = total - exact[b]
        assert sample == pytest.approx(own[b] @ reference / np.linalg.norm(own[b]) / np.linalg.norm(reference))
    assert (found.m, found.n, paired_difference(found).n, signal_loss(found, 4).n) == (5, 24, 5, 5)


def test_tables_are_double() -> None:
    table = np.eye(3, dtype=np.float32)
    assert Products(table, table, table).own.dtype == np.float64


# Signal of each batch


def test_signal_is_the_cosine_to_the_other_batches() -> None:
    exact, estimate = gradients(7, 0)
    expected = [cosine(estimate[b], np.delete(exact, b, axis=0).sum(0)) for b in range(7)]
    assert signal_samples(products_of(exact, estimate)) == pytest.approx(expected, abs=1e-12)


def test_rows_of_cross_are_the_estimators() -> None:
    exact, estimate = gradients(7, 0)
    good = products_of(exact, estimate)
    swapped = Products(good.exact, good.cross.T, good.own)
    assert signal_samples(swapped) != pytest.approx(signal_samples(good), abs=1e-3)


def test_signal_is_clipped() -> None:
    """Inner products of low precision may claim a cosine above 1."""
    table = np.ones((3, 3))
    assert signal_samples(Products(table, 1.5 * table, table)) == [1, 1, 1]
    assert signal_samples(Products(table, -1.5 * table, table)) == [-1, -1, -1]


def test_signal_without_a_norm_is_undefined() -> None:
    exact, estimate = gradients(5, 1)
    estimate[2] = 0
    found = signal_samples(products_of(exact, estimate))
    assert [s is None for s in found] == [False, False, True, False, False]
    # the others of the last batch cancel
    exact = np.array([[1.0, 2.0], [-1.0, -2.0], [3.0, 1.0]])
    assert [s is None for s in signal_samples(products_of(exact, exact))] == [False, False, True]


def test_the_difference_is_paired() -> None:
    exact, estimate = gradients(9, 2)
    estimate[4] = 0
    found = paired_difference(products_of(exact, estimate))
    mine, theirs = signal_samples(products_of(exact, estimate)), signal_samples(products_of(exact, exact))
    pairs = zip(mine, theirs, strict=True)
    expected = mean_interval([e - g for e, g in pairs if e is not None and g is not None])
    assert found == expected
    assert found.n == 8
    assert found.value is not None
    assert found.value < 0
    assert paired_difference(products_of(exact, exact)) == Interval(0, 0, 0, 9)


# Moments


def test_moments_are_those_of_the_vectors() -> None:
    exact, estimate = gradients(6, 3)
    different = [(a, b) for a in range(6) for b in range(6) if a != b]
    mu2, cross, own = (
        np.mean([left[a] @ right[b] for a, b in different])
        for left, right in ((exact, exact), (estimate, exact), (estimate, estimate))
    )
    # the U-statistic of the noise is the ordinary sample covariance
    noise, own_noise = (np.trace(np.cov(rows.T)) for rows in (exact, estimate))
    found = moments(products_of(exact, estimate))
    assert values(found) == pytest.approx(np.array([mu2, cross, own, noise, own_noise]), rel=1e-12)
    bias2 = np.mean([(estimate[a] - exact[a]) @ (estimate[b] - exact[b]) for a, b in different])
    assert found.bias_squared == pytest.approx(bias2 / mu2, rel=1e-10)
    assert found.bias == pytest.approx((bias2 / mu2) ** 0.5, rel=1e-10)
    for scale in (0.5, 1, 8):
        signal, best = cross / (mu2 * (own + own_noise / scale)) ** 0.5, mu2 / (mu2 * (mu2 + noise / scale)) ** 0.5
        assert found.signal(scale) == pytest.approx(signal, rel=1e-12)
        assert found.exact_signal(scale) == pytest.approx(best, rel=1e-12)
        assert found.loss(scale) == pytest.approx(1 - signal / best, rel=1e-10)


def test_moments_are_unbiased() -> None:
    """Means over 2000 sets of 4 batches, within 4 standard errors of the truth."""
    found = np.array([values(moments(products_of(*gradients(4, seed, 0.5)))) for seed in range(2000)])
    truth = np.array([0.25, 0.25, 0.25 + 0.09, 1.0, 1.16])
    error = found.std(0) / 2000**0.5
    assert (np.abs(found.mean(0) - truth) < 4 * error).all()
    # a mean that kept the pairs of a batch with itself would be off by V / n
    assert (error < 0.03).all()


def test_signal_extrapolates_to_larger_batches() -> None:
    """The signal at scale 4 is the cosine to mu of the mean of 4 batches, within 3 %; the loss, within 0.02."""
    exact, estimate = gradients(4000, 4, 0.3, 0.1, 400)
    found = moments(products_of(exact[:600], estimate[:600]))
    mu = np.eye(400)[0]
    averaged = [
        float(np.mean([cosine(row, mu) for row in rows.reshape(1000, 4, 400).mean(1)])) for rows in (exact, estimate)
    ]
    assert found.exact_signal(4) == pytest.approx(averaged[0], rel=0.03)
    assert found.signal(4) == pytest.approx(averaged[1], rel=0.03)
    assert found.loss(4) == pytest.approx(1 - averaged[1] / averaged[0], abs=0.02)
    assert found.exact_signal(1) < 0.7 * averaged[0]


def test_a_batch_drawn_twice_is_no_pair() -> None:
    exact, estimate = gradients(5, 5)
    picks = np.array([[0, 0, 1, 3, 3], [0, 1, 2, 3, 4], [2, 2, 2, 2, 4]])
    found = values(moments(products_of(exact, estimate), np.array([np.bincount(p, minlength=5) for p in picks])))
    assert found.shape == (5, 3)
    for draw, pick in enumerate(picks):
        pairs = [(a, b) for a in pick for b in pick if a != b]
        for row, (left, right) in enumerate(((exact, exact), (estimate, exact), (estimate, estimate))):
            assert found[row, draw] == pytest.approx(np.mean([left[a] @ right[b] for a, b in pairs]), rel=1e-12)
        for row, rows in ((3, exact), (4, estimate)):
            power = np.mean([rows[a] @ rows[a] for a in pick])
            assert found[row, draw] == pytest.approx(power - found[2 * (row - 3), draw], rel=1e-12)


def test_resampling_adds_no_signal() -> None:
    """Without a mean the draws stay near the estimate; pairs of a batch with itself would add V / n = 0.05."""
    exact, _ = gradients(20, 6, 0.0, size=2000)
    products = products_of(exact, exact)
    weights = np.random.default_rng(0).multinomial(20, np.full(20, 1 / 20), size=DRAWS)
    assert np.mean(moments(products, weights).mu2) == pytest.approx(moments(products).mu2, abs=0.005)


def test_weights_of_one_are_none() -> None:
    products = products_of(*gradients(5, 7))
    expected = values(moments(products))
    assert expected.shape == (5,)
    assert values(moments(products, np.ones(5))) == pytest.approx(expected, rel=1e-14)
    assert values(moments(products, np.full((2, 5), 3.0))) == pytest.approx(np.stack([expected] * 2, 1), rel=1e-12)


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        (np.ones(4), r"shape \(5,\) or \(draws, 5\), got \(4,\)"),
        (np.ones((1, 2, 5)), r"got \(1, 2, 5\)"),
        (np.array([1, 1, 1, 1, -1]), "not be negative, got -1"),
        (np.array([[1, 1, 1, 1, 1], [5, 0, 0, 0, 0]]), "needs at least 2 batches, got 1"),
    ],
)
def test_weights_are_validated(weights: np.ndarray, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        moments(products_of(*gradients(5, 8)), weights)


def test_scale_of_the_estimator_is_bias_only() -> None:
    exact, estimate = gradients(12, 9, 2.0)
    small, large = products_of(exact, estimate), products_of(exact, 3 * estimate)
    assert signal_samples(large) == pytest.approx(signal_samples(small), rel=1e-12)
    assert moments(large).signal(2) == pytest.approx(moments(small).signal(2), rel=1e-12)
    found, expected = signal_loss(large, 2), signal_loss(small, 2)
    assert (found.value, found.low, found.high) == pytest.approx(
        (expected.value, expected.low, expected.high), abs=1e-12
    )
    # |3 mu - mu| = 2 |mu|, and the bias of the estimator itself, thrice
    assert moments(large).bias_squared == pytest.approx(4 + 9 * 0.3**2 / 4, rel=0.2)
    assert float(moments(small).bias_squared) < 0.1


def test_what_is_not_positive_is_nan() -> None:
    found = Moments(*(np.array(column) for column in ([1.0, -1.0, 0.0, 1.0], *[[1.0] * 4] * 2, [1.0] * 4, [-3.0] * 4)))
    assert np.isnan(found.bias_squared).tolist() == np.isnan(found.bias).tolist() == [False, True, True, False]
    assert np.isnan(found.exact_signal(1)).tolist() == [False, True, True, False]
    assert np.isnan(found.signal(1)).all()
    assert np.isnan(found.loss(6)).tolist() == [False, True, True, False]
    negative = Moments(1.0, 1.0, 0.9, 1.0, 1.0)
    assert negative.bias_squared == pytest.approx(-0.1)
    assert negative.bias == 0


@pytest.mark.parametrize("scale", [0, -1, float("nan")])
def test_scale_must_be_positive(scale: float) -> None:
    with pytest.raises(ValueError, match=f"scale must be positive, got {scale}"):
        signal_loss(products_of(*gradients(5, 10)), scale)


# Intervals


@pytest.mark.parametrize("scale", [1, 7, float("inf")])
def test_exact_loses_nothing(scale: float) -> None:
    exact, _ = gradients(8, 11)
    assert signal_loss(products_of(exact, exact), scale) == Interval(0, 0, 0, 8)


def test_intervals_cover() -> None:
    """Of 100 intervals from 24 batches at least 90 hold the truth; they are no wider than it takes."""
    truth = Moments(1.0, 1.0, 1.09, 1.0, 1.16)
    loss = float(truth.loss(2))
    found = []
    for seed in range(100):
        products = products_of(*gradients(24, seed))
        found.append((signal_loss(products, 2, seed), bias_interval(products, seed)))
    for index, expected in ((0, loss), (1, 0.09)):
        ends = np.array([(pair[index].low, pair[index].high) for pair in found], dtype=float)
        assert ((ends[:, 0] <= expected) & (expected <= ends[:, 1])).sum() >= 90
        spread = np.std([pair[index].value for pair in found])
        assert 3 * spread < np.mean(ends[:, 1] - ends[:, 0]) < 7 * spread


def test_intervals_are_of_the_estimates() -> None:
    products = products_of(*gradients(10, 12))
    for function, value in (
        (lambda seed: signal_loss(products, 4, seed), moments(products).loss(4)),
        (lambda seed: bias_interval(products, seed), moments(products).bias_squared),
    ):
        found = function(0)
        assert (found.value, found.n) == (value, 10)
        assert found.low < found.value < found.high
        assert found == function(0)
        assert found != function(1)


def test_without_a_signal_loss_and_bias_are_undefined() -> None:
    """Also where the estimate of ``|mu|^2`` happens to be positive."""
    positive = 0
    for seed in range(20):
        products = products_of(*gradients(12, seed, 0.0))
        positive += float(moments(products).mu2) > 0
        assert signal_loss(products, 1) == bias_interval(products) == Interval(None, None, None, 12)
    assert 5 <= positive <= 15


def test_zero_gradients_are_undefined() -> None:
    products = products_of(np.zeros((4, 3)), np.zeros((4, 3)))
    assert signal_samples(products) == [None] * 4
    assert paired_difference(products) == Interval(None, None, None, 0)
    assert signal_loss(products, 1) == bias_interval(products) == Interval(None, None, None, 4)


def test_three_batches_have_an_interval() -> None:
    """Every ninth draw holds one batch only and has no pairs."""
    found = signal_loss(products_of(*gradients(3, 17, 5.0)), 1)
    assert found.n == 3
    assert found.low is not None


# Decisions


@pytest.mark.parametrize(
    ("interval", "target", "expected"),
    [
        (Interval(0.5, 0.25, 0.75, 32), 0.0, 8),
        (Interval(0.5, 0.25, 0.75, 32), 1.0, 8),
        (Interval(0.5, 0.25, 0.75, 32), 0.375, 128),
        # only the side of the target counts
        (Interval(0.5, 0.25, 8.5, 32), 0.0, 8),
        (Interval(0.5, 0.25, 8.5, 32), 1.5, 2048),
        (Interval(0.5, 0.5, 0.5, 32), 0.0, 1),
        (Interval(0.5, 0.0, 1.0, 32), 0.375, 512),
        (Interval(0.5, 0.25, 0.75, 32), 0.5, None),
        (Interval(0.5, 0.25, 0.75, 32), 1e-200, 8),
        (Interval(1e-200, -1.0, 1.0, 32), 0.0, None),
        (Interval(None, None, None, 32), 0.0, None),
        (Interval(0.5, None, None, 1), 0.0, None),
    ],
)
def test_batches_to_tell(interval: Interval, target: float, expected: int | None) -> None:
    assert batches_to_tell(interval, target, 32) == expected


def test_batches_to_tell_are_rounded_up() -> None:
    assert batches_to_tell(Interval(0.5, 0.25, 0.75, 3), 0.0, 3) == 1
    assert batches_to_tell(Interval(0.5, 0.25, 0.75, 5), 0.0, 5) == 2


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0.01, 0.04, "kept"),
        (0.06, 0.09, "lost"),
        (0.01, 0.09, "cannot be told apart"),
        (0.01, 0.05, "cannot be told apart"),
        (0.05, 0.09, "cannot be told apart"),
        (None, None, "cannot be told apart"),
    ],
)
def test_verdict(low: float | None, high: float | None, expected: str) -> None:
    assert verdict(Interval(0.045, low, high, 9), 0.05) == expected


# Dimension


@pytest.mark.parametrize("signal", [0.0, 3.0])
@pytest.mark.parametrize("spectrum", ["flat", "steep"])
def test_effective_dimension(signal: float, spectrum: str) -> None:
    """Within 10 % of the participation ratio, also far above n^2, and whatever the mean."""
    rng = np.random.default_rng(18)
    powers = np.ones(3000) if spectrum == "flat" else 1 / np.arange(1, 3001) ** 0.8
    powers /= powers.sum()
    found = []
    for _ in range(12):
        rows = rng.normal(size=(24, 3000)) * powers**0.5
        rows[:, 1000] += signal
        found.append(effective_dimension(rows @ rows.T))
    assert np.mean(found) == pytest.approx(1 / (powers**2).sum(), rel=0.1)


def test_effective_dimension_is_the_mean_over_distinct_batches() -> None:
    """``tr(covariance^2)`` as the mean over four different batches of ``(g1 - g2)·(g3 - g4)`` squared, over 4."""
    exact, _ = gradients(6, 19)
    products = [
        ((exact[a] - exact[b]) @ (exact[c] - exact[d])) ** 2 / 4
        for a, b, c, d in np.ndindex(6, 6, 6, 6)
        if len({a, b, c, d}) == 4
    ]
    expected = np.trace(np.cov(exact.T)) ** 2 / np.mean(products)
    assert effective_dimension(exact @ exact.T) == pytest.approx(expected, rel=1e-10)


def test_effective_dimension_that_is_undefined() -> None:
    assert effective_dimension(np.eye(3)) is None
    assert effective_dimension(np.full((5, 5), 4.0)) is None
    with pytest.raises(ValueError, match="exact needs at least 3 batches, got 2"):
        effective_dimension(np.eye(2))


# One plan beside another


def three(seed: int = 3, bias: float = 0.5, n: int = 24) -> tuple[Products, Products]:
    """An estimator with bias and noise of its own, and one with noise alone, of the same exact gradients."""
    exact, biased = gradients(n, seed, bias=bias)
    other = exact + 0.3 * np.random.default_rng([seed, 1]).normal(size=exact.shape) / exact.shape[1] ** 0.5
    return products_of(exact, biased), products_of(exact, other)


def test_the_difference_of_two_plans_is_that_of_their_losses() -> None:
    biased, other = three()
    found = kept_difference(biased, other, 4)
    assert found.value == moments(other).loss(4) - moments(biased).loss(4)
    assert found.high is not None and found.high < 0, "the biased one keeps less"
    turned = kept_difference(other, biased, 4)
    assert (turned.low, turned.high) == pytest.approx((-found.high, -(found.low or 0)))


def test_two_plans_are_resampled_together() -> None:
    """Noise that both share cancels: the interval is narrower than those of the two losses."""
    biased, other = three(bias=0.1)
    ends = [kept_difference(biased, other, 4), signal_loss(biased, 4), signal_loss(other, 4)]
    widths = [(found.high or 0) - (found.low or 0) for found in ends]
    assert 0 < widths[0] < sum(widths[1:])
    same = kept_difference(other, other, 4)
    assert (same.value, same.low, same.high) == (0, 0, 0)


def test_plans_are_compared_on_the_batches_that_both_have() -> None:
    biased, other = three()
    short = Products(other.exact, other.cross[:9], other.own[:9, :9])
    found = kept_difference(biased, short, 4)
    assert found.n == 9
    cut = Products(biased.exact, biased.cross[:9], biased.own[:9, :9])
    assert found == kept_difference(cut, short, 4)


def test_plans_of_different_batches_are_not_compared() -> None:
    with pytest.raises(ValueError, match="must have the same exact gradients, got 24 and 24 batches"):
        kept_difference(three(3)[0], three(4)[1], 4)
