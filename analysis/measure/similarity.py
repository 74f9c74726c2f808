"""How close a plan's gradient is to the exact one, from the cross-gradient table alone."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from analysis.measure.cross_table import CrossTable
from jagg_core import Plan


@dataclass(frozen=True)
class Similarity:
    """An estimate against exact. None where a norm is zero: undefined, not 0 or 1.

    Attributes:
        cosine: in [-1, 1]; blind to scale.
        rel_error: ``|estimate - exact| / |exact|``.
        norm_ratio: ``|estimate| / |exact|``.
    """

    cosine: float | None
    rel_error: float | None
    norm_ratio: float | None


def similarity_from_products(estimate: float, exact: float, cross: float, difference: float) -> Similarity:
    """Computes similarity from squared norms of estimate, exact and difference, and their inner product."""
    if not exact > 0:
        return Similarity(None, None, None)
    error, ratio = math.sqrt(max(difference, 0.0) / exact), math.sqrt(max(estimate, 0.0) / exact)
    if not estimate > 0:
        return Similarity(None, error, ratio)
    cosine = cross / math.sqrt(estimate) / math.sqrt(exact)
    return Similarity(min(1.0, max(-1.0, cosine)), error, ratio)


def exact_vector(table: CrossTable, steps: Sequence[int] | None = None) -> np.ndarray:
    """Computes coefficients of the exact gradient of ``steps`` (all by default) over the rows of the table."""
    vector = np.zeros(len(table.gram))
    vector[: len(table.pairs)] = [i == j and (steps is None or j in steps) for i, j in table.pairs]
    return vector


def similarity(
    table: CrossTable, plan: Plan, steps: Sequence[int] | None = None, block: str | None = None
) -> Similarity:
    """Compares the plan's gradient with exact: whole update, or what ``steps`` (a group) contribute to both.

    ``block``: in the parameters of that block alone.
    """
    estimate, exact = table.vector(plan, steps), exact_vector(table, steps)
    rows = np.flatnonzero((estimate != 0) | (exact != 0))
    gram = (table.gram if block is None else table.grams[block])[np.ix_(rows, rows)]
    estimate, exact = estimate[rows], exact[rows]
    difference = estimate - exact
    return similarity_from_products(
        float(estimate @ gram @ estimate),
        float(exact @ gram @ exact),
        float(estimate @ gram @ exact),
        float(difference @ gram @ difference),
    )


def cross_cosines(table: CrossTable) -> np.ndarray:
    """Computes the cosine of every ``C[i, j]`` to ``C[j, j]``, ``[T, T]``; NaN where not collected or undefined."""
    cosines = np.full((table.steps, table.steps), np.nan)
    norms = np.sqrt(np.maximum(np.diag(table.gram), 0.0))
    for n, (i, j) in enumerate(table.pairs):
        same = table.index[j, j]
        if norms[n] > 0 and norms[same] > 0:
            cosines[i, j] = np.clip(table.gram[n, same] / norms[n] / norms[same], -1, 1)
    return cosines
