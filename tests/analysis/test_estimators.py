"""The estimators of the main job: names, passes, and schedules too short for their defaults."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from analysis.measure.estimators import (
    SUBSAMPLE_DRAWS,
    NamedPlan,
    exact,
    grouped,
    headline,
    leak_plans,
    mean_of_draws,
    pareto,
    predicted,
    subsampled,
    with_knots,
)
from analysis.statistics.names import grouped_name
from jagg_core import dance_schedule
from jagg_core.strict_json import plain

SIGMAS = dance_schedule(21)[:-2]
Knots = dict[str, dict[int, tuple[int, ...]]]


def knots_for(steps: int, fewest: int = 1) -> Knots:
    found = {passes: (0, *range(steps - passes + 1, steps)) for passes in range(fewest, steps + 1)}
    return {"spline": found, "causal": found}


def everything(steps: int, windows: tuple[int, ...]) -> list[NamedPlan]:
    sigmas = dance_schedule(steps + 1)[:-2]
    knots = knots_for(steps)
    return [
        *headline(sigmas, windows, 0.6, knots, 0),
        *pareto(sigmas, range(3, 6), knots, range(4, 15)),
        *leak_plans(sigmas, windows, 0.6, knots, 0),
    ]


def test_passes_of_the_papers_recipe() -> None:
    """Three of five groups of four are routed, as in the paper's figures, and then all of them."""
    assert len(SIGMAS) == 20
    assert (grouped(SIGMAS, "jagg", 4, 0.6).passes, grouped(SIGMAS, "jagg", 4, 1.0).passes) == (14, 10)
    assert (grouped(SIGMAS, "jagg", 5, 0.75).passes, grouped(SIGMAS, "jagg", 5, 1.0).passes) == (11, 8)
    for family in ("jagg-index", "endpoint"):
        assert grouped(SIGMAS, family, 4, 0.6).plans[0].knots == grouped(SIGMAS, "jagg", 4, 0.6).plans[0].knots
    assert grouped(SIGMAS, "jagg", 4, 0.6).label == "JAGG (paper), W=4, 3 of 5 groups"


def test_families_are_different_plans() -> None:
    jagg, index, endpoint = (grouped(SIGMAS, f, 5, 1.0).plans[0] for f in ("jagg", "jagg-index", "endpoint"))
    assert not torch.equal(jagg.weights, index.weights)
    assert torch.equal(jagg.weights.sum(0), torch.ones(20, dtype=torch.float64))
    assert endpoint.weights.sum() == 8


@pytest.mark.parametrize("windows", [(4, 5), (2,), (3, 5), (5,)])
def test_names_are_unique(windows: tuple[int, ...]) -> None:
    knots = knots_for(20)
    for group in (
        headline(SIGMAS, windows, 0.6, knots, 0),
        pareto(SIGMAS, range(3, 6), knots, range(4, 15)),
        leak_plans(SIGMAS, windows, 0.6, knots, 0),
    ):
        names = Counter(e.name for e in group)
        assert set(names.values()) == {1}, names


def test_equal_names_are_equal_plans() -> None:
    by_name: dict[str, NamedPlan] = {}
    for estimator in everything(20, (4, 5)):
        known = by_name.setdefault(estimator.name, estimator)
        if not estimator.name.startswith("subsample"):
            assert torch.equal(known.plans[0].weights, estimator.plans[0].weights), estimator.name
            assert known.describe() == estimator.describe()


def test_the_main_table_compares_at_equal_passes() -> None:
    chosen = headline(SIGMAS, (4, 5), 0.6, knots_for(20), 0)
    budgets = {e.passes for e in chosen if e.family == "jagg"}
    assert budgets == {14, 10, 8}
    for family in ("subsample", "spline", "causal"):
        assert {e.passes for e in chosen if e.family == family} == budgets | {5}
    assert not [e.name for e in chosen if e.family == "causal-predicted"]


def test_predicted_knots_are_the_causal_ones_moved() -> None:
    eight, five = predicted(SIGMAS, knots_for(20), (8, 5))
    assert [(e.name, e.passes, e.family) for e in (eight, five)] == [
        ("causal-predicted-8", 8, "causal-predicted"),
        ("causal-predicted-5", 5, "causal-predicted"),
    ]
    assert eight.plans[0].knots == knots_for(20)["causal"][8]
    assert eight.plans[0].knot_sigmas is not None
    assert not eight.anticipating
    assert eight.settings == {"knots": list(eight.plans[0].knots), "whole_update_only": True}


def test_every_number_of_passes_is_on_the_front() -> None:
    front = pareto(SIGMAS, range(3, 9), knots_for(20), range(4, 15))
    for family in ("spline", "causal"):
        assert sorted(e.passes for e in front if e.family == family) == list(range(4, 15))
    windows = Counter(e.settings["window"] for e in front if e.family == "jagg")
    assert windows == {3: 1, 4: 3, 5: 3, 6: 2, 7: 1, 8: 2}
    assert all(4 <= e.passes <= 14 for e in front)


def test_knots_that_were_not_found_are_left_out() -> None:
    knots = knots_for(20, fewest=9)
    assert {e.passes for e in headline(SIGMAS, (4, 5), 0.6, knots, 0) if e.family == "causal"} == {14, 10}
    assert [e.passes for e in predicted(SIGMAS, knots, (14, 9, 8))] == [14, 9]
    assert {e.family for e in leak_plans(SIGMAS, (5,), 0.6, knots, 0)} == {
        "exact",
        "jagg",
        "jagg-index",
        "endpoint",
        "subsample",
    }


@pytest.mark.parametrize("steps", range(2, 9))
def test_short_schedules(steps: int) -> None:
    """No number of passes exceeds the steps there are."""
    for window in range(2, min(steps, 5) + 1):
        chosen = everything(steps, (window,))
        assert chosen
        assert all(plan.steps == steps for e in chosen for plan in e.plans)
        assert all(1 <= e.passes <= steps for e in chosen)


@pytest.mark.parametrize("windows", [(4, 5), (20, 4), (5, 10, 20)])
def test_no_plan_stands_in_a_table_twice(windows: tuple[int, ...]) -> None:
    """Of one group of twenty, 0.6 and 1.0 are both all."""
    knots = knots_for(20)
    for chosen in (headline(SIGMAS, windows, 0.6, knots, 0), pareto(SIGMAS, range(3, 21), knots, range(4, 15))):
        plans = [(e.family, e.identity) for e in chosen]
        assert len(set(plans)) == len(plans)
    assert grouped_name(20, "jagg", 20, 0.6) == grouped_name(20, "jagg", 20, 1.0) == "jagg-w20-f1"


def test_random_steps_are_drawn_for_every_batch() -> None:
    estimator = subsampled(SIGMAS, 5, 0)
    drawn = [tuple(plan.knots for plan in estimator.plans_of(batch)) for batch in (0, 1, 1)]
    assert drawn[0] == tuple(plan.knots for plan in estimator.plans)
    assert drawn[0] != drawn[1] == drawn[2]


def test_linear_weights_on_searched_knots_stand_beside_causal_at_eight_passes() -> None:
    """Whatever the windows: how much is the rule, and how much where the knots are."""
    for windows in ((4,), (10, 20)):
        names = {e.name for e in headline(SIGMAS, windows, 0.6, knots_for(20), 0)}
        assert {"spline-8", "causal-8", "subsample-8"} <= names


def test_subsamples_are_draws_of_an_unbiased_plan() -> None:
    estimator = subsampled(SIGMAS, 5, 0)
    assert len(estimator.plans) == SUBSAMPLE_DRAWS
    assert {plan.passes for plan in estimator.plans} == {5}
    assert {float(plan.weights.sum()) for plan in estimator.plans} == {20.0}
    assert len({plan.knots for plan in estimator.plans}) > SUBSAMPLE_DRAWS / 2
    again, other = subsampled(SIGMAS, 5, 0), subsampled(SIGMAS, 5, 1)
    assert [p.knots for p in again.plans] == [p.knots for p in estimator.plans]
    assert [p.knots for p in other.plans] != [p.knots for p in estimator.plans]


def test_looking_ahead() -> None:
    knots = (0, 3, 9)
    found = {
        "exact": exact(SIGMAS),
        "jagg": grouped(SIGMAS, "jagg", 4, 1.0),
        "endpoint": grouped(SIGMAS, "endpoint", 4, 1.0),
        "subsample": subsampled(SIGMAS, 5, 0),
        "spline": with_knots(SIGMAS, "spline", knots),
        "causal": with_knots(SIGMAS, "causal", knots),
    }
    assert {name for name, estimator in found.items() if estimator.anticipating} == {"jagg", "spline"}


def test_the_leak_test_has_one_of_every_kind() -> None:
    suspects = leak_plans(SIGMAS, (4, 5), 0.6, knots_for(20), 0)
    families = Counter(e.family for e in suspects)
    assert families == {"exact": 1, "jagg": 4, "jagg-index": 1, "endpoint": 1, "subsample": 1, "spline": 1, "causal": 1}
    assert all(len(e.plans) == 1 for e in suspects if e.family != "subsample")
    assert {e.passes for e in suspects if e.family in ("subsample", "causal", "spline")} == {8}


def test_descriptions_can_be_stored() -> None:
    for estimator in everything(20, (4, 5)):
        about = estimator.describe()
        assert plain(about) == about
        assert about["passes"] == estimator.passes
        assert about["family"] == estimator.family


@pytest.mark.parametrize(
    ("values", "mean"), [([1.0, 2.0], 1.5), ([None, 2.0], 2.0), ([None, None], None), ([0.0], 0.0)]
)
def test_mean_of_draws(values: list[float | None], mean: float | None) -> None:
    assert mean_of_draws(values) == mean
