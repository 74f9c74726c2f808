"""The search against every possible set of knots, and on tables whose best knots are known."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
import torch

from analysis.measure.cross_table import CrossTable, collect_table, reachable_pairs
from analysis.measure.knot_search import KnotSearch, searched
from analysis.measure.similarity import similarity
from jagg_core import ClippedSurrogate, causal_plan, dance_schedule, spline_plan
from tests.jagg_core.fields import ADVANTAGES, MlpField, make_rollout

PAIRS = reachable_pairs(7)
SIGMAS = dance_schedule(8)[:-2]
each_family = pytest.mark.parametrize("family", searched())


def table_of(jacobians: np.ndarray, seed: int) -> CrossTable:
    """The table of Jacobians ``[T, D, P]`` and random upstream gradients."""
    steps = len(jacobians)
    upstream = np.random.default_rng(seed).normal(size=(steps, jacobians.shape[1]))
    pairs = reachable_pairs(steps)
    vectors = np.stack([jacobians[i].T @ upstream[j] for i, j in pairs])
    return CrossTable(steps, pairs, {"all": vectors @ vectors.T})


def drifting(steps: int, seed: int) -> np.ndarray:
    """Jacobians that drift at random, at a random pace."""
    rng = np.random.default_rng(seed)
    pace = rng.exponential(size=(steps, 1, 1))
    return np.cumsum(pace * rng.normal(size=(steps, 5, 12)), axis=0)


@each_family
@pytest.mark.parametrize("seed", range(4))
def test_the_search_finds_the_best_of_all_subsets(family: str, seed: int) -> None:
    tables = [table_of(drifting(7, seed), 10 * seed + n) for n in range(2)]
    search = KnotSearch(tables, SIGMAS, searched()[family])
    found = search.search()
    assert list(found) == [7, 6, 5, 4, 3, 2, 1]
    for passes, knots in found.items():
        subsets = [(0, *rest) for rest in combinations(range(1, 7), passes - 1)]
        scores = sorted(search.score(knots) for knots in subsets)
        assert (knots[0], len(knots)) == (0, passes)
        assert search.score(knots) >= scores[-1] - 0.001 * abs(scores[-1])
        if 1 < passes < 6:
            assert scores[0] < 0.99 * scores[-1], "all subsets are as good: nothing was tested"
    assert [search.score(knots) for knots in found.values()] == sorted(map(search.score, found.values()), reverse=True)


def test_blocks_of_equal_jacobians_are_found() -> None:
    """Where the Jacobian jumps at steps 2 and 6 alone, three causal knots are exact, and no other three."""
    blocks = np.random.default_rng(0).normal(size=(3, 5, 12))
    table = table_of(blocks[[0, 0, 1, 1, 1, 1, 2]], 1)
    search = KnotSearch([table], SIGMAS, causal_plan)
    found = search.search()
    assert found[3] == (0, 2, 6)
    assert search.score(found[3]) == pytest.approx(1, abs=1e-12)
    assert search.score(found[2]) < 0.99


def test_jacobians_linear_in_sigma_need_two_spline_knots() -> None:
    ends = np.random.default_rng(0).normal(size=(2, 5, 12))
    alpha = SIGMAS.numpy()[:, None, None]
    table = table_of(alpha * ends[0] + (1 - alpha) * ends[1], 1)
    found = KnotSearch([table], SIGMAS, spline_plan).search()
    assert found[2] == (0, 6)
    assert similarity(table, spline_plan(SIGMAS, found[2])).cosine == pytest.approx(1, abs=1e-12)


@each_family
def test_the_score_is_the_mean_cosine(family: str) -> None:
    field = MlpField()
    tables = []
    for seed in (3, 4):
        trajectory = make_rollout(field, steps=6, seed=seed)
        tables.append(collect_table(field, trajectory, ADVANTAGES, ClippedSurrogate()))
    search = KnotSearch(tables, trajectory.sigmas, searched()[family])
    for knots in ((0, 1, 2, 3, 4, 5), (0, 3), (0,)):
        plan = searched()[family](trajectory.sigmas, knots)
        cosines = [similarity(table, plan).cosine for table in tables]
        assert search.score(knots) == pytest.approx(np.mean(cosines), abs=1e-10)  # type: ignore[arg-type]


def test_a_limited_reach_ends_the_search() -> None:
    """With knots at most two steps before the step they serve, seven steps need three of them."""
    whole = table_of(drifting(7, 0), 0)
    pairs = reachable_pairs(7, past=2, future=0)
    index = [whole.index[pair] for pair in pairs]
    table = CrossTable(7, pairs, {"all": whole.gram[np.ix_(index, index)]})
    search = KnotSearch([table], SIGMAS, causal_plan)
    found = search.search()
    assert min(found) == 3
    assert found[3] == (0, 3, 6) or max(np.diff([*found[3], 7])) <= 3
    assert search.score((0, 5)) == -np.inf
    unlimited = KnotSearch([whole], SIGMAS, causal_plan)
    assert all(search.score(knots) == pytest.approx(unlimited.score(knots)) for knots in found.values())


def test_a_table_without_gradient_scores_nothing() -> None:
    table = CrossTable(7, PAIRS, {"all": np.zeros((49, 49))})
    assert KnotSearch([table], SIGMAS, causal_plan).score((0, 3)) == 0


def test_no_tables_are_refused() -> None:
    with pytest.raises(ValueError, match="tables must not be empty to search knots, got none"):
        KnotSearch([], torch.tensor([1.0, 0.5]), causal_plan)
