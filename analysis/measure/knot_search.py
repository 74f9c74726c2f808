"""Which steps to differentiate at: search on the cross-gradient tables of calibration rollouts."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from torch import Tensor

from analysis.measure.cross_table import CrossTable
from analysis.measure.similarity import exact_vector
from jagg_core import Plan
from jagg_core.plans import estimators

MakePlan = Callable[[Tensor, Sequence[int]], Plan]

Knots = dict[str, dict[int, tuple[int, ...]]]
"""Knots by family and number of passes."""


def searched() -> dict[str, MakePlan]:
    """Returns the constructors whose knots are searched, by name. The first knot is always 0: nothing precedes it."""
    return {estimator.name: estimator.build for estimator in estimators(searched=True)}


class KnotSearch:
    """Best knots of a kind of plan for every number of passes, by mean cosine over the tables.

    Backward elimination from all steps (drop the knot that costs least), then single swaps until none helps.

    Raises:
        ValueError: no tables.
    """

    def __init__(self, tables: Sequence[CrossTable], sigmas: Tensor, make: MakePlan) -> None:
        if not tables:
            raise ValueError("tables must not be empty to search knots, got none")
        self.tables = tables
        self.sigmas = sigmas
        self.make = make
        self.exact = [exact_vector(t) for t in tables]
        self.exact_gram = [t.gram @ e for t, e in zip(tables, self.exact, strict=True)]
        self.exact_norm = [float(e @ g) ** 0.5 for e, g in zip(self.exact, self.exact_gram, strict=True)]
        self._known: dict[tuple[int, ...], float] = {}

    def score(self, knots: Sequence[int]) -> float:
        """Computes the mean cosine to exact over the tables; minus infinity if a table lacks a pair of the plan."""
        key = tuple(knots)
        if key not in self._known:
            plan = self.make(self.sigmas, key)
            try:
                vector = self.tables[0].vector(plan)
            except ValueError:
                self._known[key] = -np.inf
                return -np.inf
            cosines = []
            for table, exact_gram, norm in zip(self.tables, self.exact_gram, self.exact_norm, strict=True):
                length = float(vector @ table.gram @ vector) ** 0.5
                cosines.append(float(vector @ exact_gram) / (length * norm) if length * norm > 0 else 0.0)
            # to ten decimals: which of two equal choices is taken must not hang on the last bit
            self._known[key] = round(float(np.mean(cosines)), 10)
        return self._known[key]

    def search(self) -> dict[int, tuple[int, ...]]:
        """Returns knots for every number of passes from T down to the fewest that the tables can judge."""
        steps = self.tables[0].steps
        knots = tuple(range(steps))
        best = {steps: knots}
        for passes in range(steps - 1, 0, -1):
            candidates = [tuple(k for k in knots if k != drop) for drop in knots[1:]]
            knots = self._improve(max(candidates, key=self.score))
            if self.score(knots) == -np.inf:
                break
            best[passes] = knots
        return best

    def _improve(self, knots: tuple[int, ...]) -> tuple[int, ...]:
        free = range(1, self.tables[0].steps)
        while True:
            swaps = [tuple(sorted({*knots} - {out} | {new})) for out in knots[1:] for new in free if new not in knots]
            best = max(swaps, key=self.score, default=knots)
            if self.score(best) <= self.score(knots):
                return knots
            knots = best
