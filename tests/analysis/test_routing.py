"""``jagg_frac`` from per-group cosines: a leading share, not a count."""

from __future__ import annotations

import numpy as np
import pytest

from analysis.statistics.intervals import Interval
from analysis.statistics.jagg_frac import calibrated_frac, leading_share

NAN = float("nan")


@pytest.mark.parametrize(
    ("means", "share"),
    [
        ([0.99, 0.98, 0.95, 0.91], 1.0),
        ([0.99, 0.98, 0.95, 0.80], 0.75),
        ([0.99, 0.80, 0.95, 0.99], 0.25),  # a group in the middle fails: those behind it do not count
        ([0.80, 0.99, 0.99, 0.99], 0.0),
        ([0.90, 0.90, 0.89, 0.90], 0.5),  # the threshold itself is enough
        ([-0.5, -0.5, -0.5, -0.5], 0.0),
    ],
)
def test_leading_groups(means: list[float], share: float) -> None:
    assert leading_share(np.array([means, means]), 0.9) == share


def test_the_mean_decides() -> None:
    cosines = np.array([[0.99, 0.99], [0.83, 0.79]])
    assert leading_share(cosines, 0.9) == 0.5


def test_undefined_cosines_are_left_out() -> None:
    cosines = np.array([[0.99, NAN, 0.99], [NAN, 0.95, 0.85]])
    assert leading_share(cosines, 0.9) == 1.0
    # as if they were not there, not as if they were 0 or 1
    assert leading_share(np.array([[0.89, 1.0], [NAN, 1.0]]), 0.9) == 0.0


def test_a_group_without_any_cosine_ends_the_share() -> None:
    cosines = np.array([[0.99, NAN, 0.99], [0.99, NAN, 0.99]])
    assert leading_share(cosines, 0.9) == pytest.approx(1 / 3)
    assert leading_share(np.full((2, 3), NAN), -1.0) == 0


def test_many_at_once() -> None:
    first, second = [[0.99, 0.8], [0.99, 0.8]], [[0.99, 0.95], [0.99, 0.95]]
    assert leading_share(np.array([first, second]), 0.9).tolist() == [0.5, 1.0]


def test_calibration() -> None:
    groups = [[0.99, 0.98, 0.99, 0.99], [0.95, None, 0.96, 0.95], [0.2, 0.3, 0.1, None], [0.99] * 4]
    found = calibrated_frac(groups, 0.9)
    assert (found.value, found.n) == (0.5, 4)


def test_the_interval_resamples_batches() -> None:
    """The second group fails on one of four batches, and by enough to fail wherever that batch is drawn."""
    groups = [[0.99] * 4, [0.99, 0.99, 0.99, 0.0]]
    found = calibrated_frac(groups, 0.9)
    assert (found.value, found.low, found.high, found.n) == (0.5, 0.5, 1.0, 4)
    assert calibrated_frac(groups, 0.9, seed=5) == calibrated_frac(groups, 0.9, seed=5)


def test_one_batch_has_no_interval() -> None:
    assert calibrated_frac([[0.99], [0.5]], 0.9) == Interval(0.5, None, None, 1)


def test_all_undefined_keeps_nothing() -> None:
    assert calibrated_frac([[None, None], [None, None]], 0.9).value == 0
