"""How much may be approximated: ``jagg_frac`` from per-group cosines."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from analysis.statistics.intervals import DRAWS, Interval, percentile_interval


def leading_share(cosines: np.ndarray, threshold: float) -> np.ndarray:
    """Share of leading groups, all of mean cosine at least ``threshold``: ``[..., batches, groups]`` to ``[...]``.

    NaN marks undefined cosines, which are left out; a group without any defined one ends the share.
    """
    defined = ~np.isnan(cosines)
    total = np.where(defined, cosines, 0.0).sum(-2)
    count = defined.sum(-2)
    passed = (count > 0) & (total >= threshold * count)
    return np.cumprod(passed, axis=-1).sum(-1) / cosines.shape[-1]


def calibrated_frac(groups: Sequence[Sequence[float | None]], threshold: float, seed: int = 0) -> Interval:
    """``jagg_frac`` for a threshold, from the cosines of each group (outer) on each rollout batch (inner).

    The interval resamples rollout batches.
    """
    cosines = np.array([[np.nan if c is None else c for c in group] for group in groups], dtype=np.float64).T
    value = float(leading_share(cosines, threshold))
    if len(cosines) < 2:
        return Interval(value, None, None, len(cosines))
    index = np.random.default_rng(seed).integers(len(cosines), size=(DRAWS, len(cosines)))
    return percentile_interval(value, leading_share(cosines[index], threshold), len(cosines))
