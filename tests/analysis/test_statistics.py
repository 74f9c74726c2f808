"""Intervals that cover, and a leak test that sees a leak and nothing else."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from scipy import stats

from analysis.statistics.intervals import (
    Interval,
    Leak,
    Scale,
    leak_test,
    mean_interval,
    percentile_interval,
)

# Means


def test_value_is_the_mean_of_what_is_defined() -> None:
    found = mean_interval([1.0, None, 2.0, 6.0, None])
    assert (found.value, found.n) == (3.0, 3)
    assert found == mean_interval([1.0, 2.0, 6.0])


def test_the_linear_interval_is_student_s() -> None:
    """By hand: mean 3, deviation sqrt(7), t of two degrees of freedom 4.3027."""
    found = mean_interval([1.0, 2.0, 6.0])
    half = 4.302653 * 7**0.5 / 3**0.5
    assert (found.low, found.high) == (pytest.approx(3 - half, rel=1e-6), pytest.approx(3 + half, rel=1e-6))


def test_logarithmic_intervals_are_by_hand() -> None:
    """Of 0.96, 0.98 and 0.99 the distances from 1 have mean 7/300 and coefficient of variation 0.6547."""
    variation = 0.65465367
    near, far = (np.exp(4.302653 / 3**0.5 * variation * more) for more in (1, 1 + variation / 2))
    cosine = mean_interval([0.96, 0.98, 0.99], "cosine")
    assert cosine.value == pytest.approx(293 / 300)
    assert (cosine.low, cosine.high) == (pytest.approx(1 - 7 / 300 * far), pytest.approx(1 - 7 / 300 / near))
    positive = mean_interval([0.04, 0.02, 0.01], "positive")
    assert (positive.low, positive.high) == (pytest.approx(7 / 300 / near), pytest.approx(7 / 300 * far))


def test_a_cosine_is_never_below_minus_one_or_above_one() -> None:
    found = mean_interval([-0.9, 0.999], "cosine")
    assert found.low == -1
    assert found.high is not None
    assert found.high <= 1
    assert mean_interval([1.0, 1.0], "cosine") == Interval(1.0, 1.0, 1.0, 2)


def test_a_smaller_error_is_a_wider_interval() -> None:
    wide, narrow = (mean_interval([0.9, 0.95, 0.97, 0.99], "cosine", error) for error in (0.01, 0.05))
    assert wide.low < narrow.low < narrow.high < wide.high  # type: ignore[operator]


def test_one_sample_has_no_interval() -> None:
    assert mean_interval([0.5]) == mean_interval([None, 0.5]) == Interval(0.5, None, None, 1)


@pytest.mark.parametrize("samples", [[], [None], [None, None]])
def test_without_samples_all_is_undefined(samples: list[float | None]) -> None:
    assert mean_interval(samples) == Interval(None, None, None, 0)


@pytest.mark.parametrize("scale", ["linear", "cosine", "positive"])
def test_equal_samples_have_an_interval_of_nothing(scale: Scale) -> None:
    assert mean_interval([0.25] * 4, scale) == Interval(0.25, 0.25, 0.25, 4)


def test_percentiles_are_widened_for_few_batches() -> None:
    """Of draws of the mean of n normal samples: Student's interval of them, not 1.96 deviations of a biased one."""
    draws = np.random.default_rng(0).normal(size=2_000_000)
    for n in (8, 96):
        found = percentile_interval(0.0, draws * (1 - 1 / n) ** 0.5, n)
        expected = stats.t.ppf(0.975, n - 1)
        assert found.high == pytest.approx(expected, rel=0.02)
        assert found.low == pytest.approx(-expected, rel=0.02)


# Leak


def gram_of(batches: int, mean: float, seed: int, size: int = 300) -> np.ndarray:
    """Inner products of gradients with independent unit noise and a mean of norm ``mean``."""
    noise = np.random.default_rng(seed).normal(size=(batches, size)) / size**0.5
    noise[:, 0] += mean
    return noise @ noise.T


def test_pure_noise_is_no_leak() -> None:
    found = [leak_test(gram_of(10, 0.0, seed), seed) for seed in range(60)]
    assert np.mean([leak.share.value for leak in found]) == pytest.approx(0, abs=0.005)
    assert 0.4 < np.mean([leak.p_value for leak in found]) < 0.6
    assert np.mean([leak.p_value < 0.05 for leak in found]) < 0.15
    assert {leak.share.n for leak in found} == {10}


@pytest.mark.parametrize("mean", [1.0, 3.0])
def test_a_planted_mean_is_a_leak(mean: float) -> None:
    found = [leak_test(gram_of(10, mean, seed), seed) for seed in range(10)]
    assert np.mean([leak.share.value for leak in found]) == pytest.approx(mean**2, rel=0.15)
    assert {leak.p_text for leak in found} == {"p <= 0.002"}
    assert max(leak.p_value for leak in found) < 0.01


def test_the_smallest_p_value_is_what_the_flips_allow() -> None:
    """Three batches have four patterns of signs, one of which is the observed one; ten have 512."""
    assert leak_test(gram_of(3, 100.0, 0)).p_value == 1 / 4
    assert leak_test(gram_of(10, 100.0, 0)).p_value == 1 / 512
    assert 0 < leak_test(gram_of(20, 100.0, 0)).p_value < 0.01


def test_the_share_does_not_grow_with_the_number_of_batches() -> None:
    for n in (4, 8, 32):
        found = [leak_test(gram_of(n, 1.5, seed)).share.value for seed in range(40)]
        assert np.mean(found) == pytest.approx(1.5**2, rel=0.05)  # type: ignore[arg-type]


def test_few_batches_flip_every_way() -> None:
    gram = gram_of(6, 0.3, 1)
    signs = np.array(list(product((1, -1), repeat=6)))
    means = np.einsum("di,ij,dj->d", signs, gram, signs)
    assert leak_test(gram).p_value == pytest.approx(np.mean(means >= gram.sum() * (1 - 1e-9)), abs=1e-12)
    assert leak_test(gram, 1) == leak_test(gram, 2)


def test_scale_does_not_matter() -> None:
    gram = gram_of(8, 0.5, 0)
    expected = leak_test(gram)
    for factor in (1e-24, 1e24):
        found = leak_test(factor * gram)
        assert found.share.value == pytest.approx(expected.share.value, rel=1e-9)
        assert found.share.low == pytest.approx(expected.share.low, rel=1e-9)
        assert found.p_value == expected.p_value


def test_a_seed_is_a_leak() -> None:
    """With many batches the flips are drawn."""
    gram = gram_of(16, 0.0, 0)
    assert leak_test(gram, 1) == leak_test(gram, 1)
    assert leak_test(gram, 1).p_value != leak_test(gram, 2).p_value
    assert leak_test(gram, 1).p_value == pytest.approx(leak_test(gram, 2).p_value, abs=0.06)
    assert isinstance(leak_test(gram), Leak)


@pytest.mark.parametrize("batches", [0, 1, 2])
def test_few_batches_are_refused(batches: int) -> None:
    with pytest.raises(ValueError, match=f"needs at least 3 batches, got {batches}"):
        leak_test(gram_of(batches, 0.0, 0))


def test_gradients_that_do_not_vary_are_refused() -> None:
    for gram in (np.zeros((5, 5)), np.full((5, 5), 4.0)):
        with pytest.raises(ValueError, match="do not vary: their leak is undefined"):
            leak_test(gram)
