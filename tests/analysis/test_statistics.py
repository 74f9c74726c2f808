"""Intervals that cover, and a leak test that sees a leak and nothing else."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from analysis.statistics.intervals import Interval, Leak, bootstrap, leak_test

# Bootstrap


def test_intervals_cover() -> None:
    """A 95 % percentile interval of 30 samples covers a little less than 95 % of the time."""
    rng = np.random.default_rng(0)
    found = [bootstrap(rng.normal(3.0, 2.0, size=30).tolist(), seed) for seed in range(150)]
    covered = sum(i.low <= 3.0 <= i.high for i in found)  # type: ignore[operator]
    assert 0.85 * 150 <= covered <= 0.99 * 150
    widths = [i.high - i.low for i in found]  # type: ignore[operator]
    assert np.mean(widths) == pytest.approx(2 * 1.96 * 2.0 / 30**0.5, rel=0.1)


def test_value_is_the_mean_of_what_is_defined() -> None:
    found = bootstrap([1.0, None, 2.0, 6.0, None])
    assert (found.value, found.n) == (3.0, 3)
    assert found == bootstrap([1.0, 2.0, 6.0])
    assert found.low is not None
    assert found.high is not None
    assert 1.0 <= found.low < 3.0 < found.high <= 6.0


def test_a_seed_is_an_interval() -> None:
    samples = np.random.default_rng(0).normal(size=20).tolist()
    assert bootstrap(samples, 3) == bootstrap(samples, 3)
    assert bootstrap(samples, 3) != bootstrap(samples, 4)


def test_one_sample_has_no_interval() -> None:
    assert bootstrap([0.5]) == bootstrap([None, 0.5]) == Interval(0.5, None, None, 1)


@pytest.mark.parametrize("samples", [[], [None], [None, None]])
def test_without_samples_all_is_undefined(samples: list[float | None]) -> None:
    assert bootstrap(samples) == Interval(None, None, None, 0)


def test_equal_samples_have_an_interval_of_nothing() -> None:
    assert bootstrap([0.25] * 4) == Interval(0.25, 0.25, 0.25, 4)


# Leak


def gram_of(batches: int, mean: float, seed: int, size: int = 300) -> np.ndarray:
    """Inner products of gradients with independent unit noise and a mean of norm ``mean``."""
    noise = np.random.default_rng(seed).normal(size=(batches, size)) / size**0.5
    noise[:, 0] += mean
    return noise @ noise.T


def test_pure_noise_is_no_leak() -> None:
    found = [leak_test(gram_of(10, 0.0, seed), seed) for seed in range(60)]
    assert np.mean([leak.ratio for leak in found]) == pytest.approx(1, abs=0.05)
    assert 0.4 < np.mean([leak.p_value for leak in found]) < 0.6
    assert np.mean([leak.p_value < 0.05 for leak in found]) < 0.15
    assert {leak.n for leak in found} == {10}


@pytest.mark.parametrize("mean", [1.0, 3.0])
def test_a_planted_mean_is_a_leak(mean: float) -> None:
    found = [leak_test(gram_of(10, mean, seed), seed) for seed in range(10)]
    assert np.mean([leak.ratio for leak in found]) == pytest.approx(1 + 10 * mean**2, rel=0.15)
    assert max(leak.p_value for leak in found) < 0.01


def test_the_smallest_p_value_is_what_the_flips_allow() -> None:
    """Three batches have four patterns of signs, one of which is the observed one; ten have 512."""
    assert leak_test(gram_of(3, 100.0, 0)).p_value == 1 / 4
    assert leak_test(gram_of(10, 100.0, 0)).p_value == 1 / 512
    assert 0 < leak_test(gram_of(20, 100.0, 0)).p_value < 0.01


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
        assert found.ratio == pytest.approx(expected.ratio, rel=1e-9)
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
    with pytest.raises(ValueError, match=f"needs at least 3 batches, found {batches}"):
        leak_test(gram_of(batches, 0.0, 0))


def test_gradients_that_do_not_vary_are_refused() -> None:
    for gram in (np.zeros((5, 5)), np.full((5, 5), 4.0)):
        with pytest.raises(ValueError, match="do not vary: their leak is undefined"):
            leak_test(gram)
