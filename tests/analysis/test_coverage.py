"""Of 95 % intervals from few batches, as many hold the truth as they promise: simulations in which it is known."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from analysis.report.fidelity.recommendation import fewest_passes
from analysis.statistics.intervals import Scale, leak_test, mean_interval
from jagg_core.records import Cell, Record

Draw = Callable[[np.random.Generator, int], np.ndarray]

COSINES: dict[str, tuple[Draw, float]] = {
    "normal": (lambda rng, n: 0.2 + 0.04 * rng.normal(size=n), 0.2),
    "log-normal": (lambda rng, n: 0.02 * rng.lognormal(0, 0.5, n), 0.02 * np.exp(0.125)),
    "gamma": (lambda rng, n: 0.05 * rng.gamma(2, 1, n), 0.1),
    "exponential": (lambda rng, n: 0.05 * rng.exponential(1, n), 0.05),
}
"""One minus a cosine, with its mean. On photos-flux their coefficients of variation are 0.1 to 0.65."""

REPETITIONS = 3000


def coverage(draw: Callable[[np.random.Generator], np.ndarray], truth: float, scale: Scale) -> float:
    rng = np.random.default_rng(0)
    found = [mean_interval(draw(rng).tolist(), scale) for _ in range(REPETITIONS)]
    return float(np.mean([i.low <= truth <= i.high for i in found]))  # type: ignore[operator]


@pytest.mark.parametrize("n", [2, 4, 8, 16])
@pytest.mark.parametrize("kind", COSINES)
def test_intervals_of_a_mean_cosine_cover(kind: str, n: int) -> None:
    draw, mean = COSINES[kind]
    covered = coverage(lambda rng: 1 - draw(rng, n), 1 - mean, "cosine")
    assert 0.93 <= covered <= 0.99


@pytest.mark.parametrize("n", [2, 4, 8, 16])
def test_other_scales_cover(n: int) -> None:
    assert 0.93 <= coverage(lambda rng: rng.normal(-0.1, 0.3, n), -0.1, "linear") <= 0.97
    assert 0.93 <= coverage(lambda rng: 1 + 0.1 * rng.normal(size=n), 1, "positive") <= 0.97


@pytest.mark.parametrize("n", [4, 8, 16])
@pytest.mark.parametrize("mean", [0.0, 0.45, 1.4])
def test_intervals_of_the_leak_cover(mean: float, n: int) -> None:
    """They are too wide where there is none: the jackknife doubles the variance of a mean of pairs that are noise."""
    rng, found = np.random.default_rng(1), []
    for _ in range(500):
        gradients = rng.normal(size=(n, 100)) / 10
        gradients[:, 0] += mean
        share = leak_test(gradients @ gradients.T).share
        found.append(share.low <= mean**2 <= share.high)  # type: ignore[operator]
    assert 0.92 <= np.mean(found) <= (1 if mean == 0 else 0.995)


def test_looking_at_many_plans_needs_no_correction() -> None:
    """Plans whose mean cosine is just below the target: one is recommended in about 5 % of the studies.

    Whoever takes the fewest passes among all that have their lower end above it recommends one in far more.
    """
    rng, target, recommended, naive = np.random.default_rng(2), 0.99, 0, 0
    studies = 400
    for _ in range(studies):
        shared = rng.lognormal(0, 0.1, 8)  # rollouts are hard or easy for all plans alike
        cells = []
        for passes in range(14, 1, -1):
            for family in ("causal", "causal-predicted"):
                cosines = 1 - 0.01001 * shared * rng.lognormal(0, 0.2, 8) / np.exp(0.025)
                about = {"eta": 0.7, "family": family, "passes": passes}
                cells.append(Cell(f"{family}-{passes}", settings=about, samples={"cosine": cosines.tolist()}))
        record = Record("calibrate", [], "stub", {}, {}, [], {}, cells)
        lows = [mean_interval(cell.samples["cosine"], "cosine").low for cell in cells]
        naive += any(low is not None and low >= target for low in lows)
        recommended += fewest_passes(record, 0.7, target, ("causal", "causal-predicted")) is not None
    assert recommended <= 0.08 * studies  # 5 % and the noise of so many studies
    assert naive >= 0.2 * studies
