"""Estimators are declared once: each builds its plan and knows whether it looks ahead; strangers fit in."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from jagg_core import Plan
from jagg_core.grpo.plans import make_plan
from jagg_core.grpo.settings import PlanSettings
from jagg_core.plans import ESTIMATORS, Estimator, find_estimator, register_estimator
from jagg_core.plans.registry import estimators
from jagg_core.schedule import dance_schedule

SIGMAS = dance_schedule(21)[:20]
OPTIONS = {
    "exact": (),
    "groups": (4, 1.0),
    "knots": ([0, 5, 11, 16],),
    "random": (8, torch.Generator().manual_seed(0)),
}


def nearest_plan(sigmas: Tensor, knots: list[int]) -> Plan:
    """Gives every step to the knot that is nearest in sigma."""
    distance = (sigmas[list(knots)][:, None] - sigmas[None, :]).abs()
    weights = torch.zeros(len(knots), len(sigmas), dtype=torch.float64)
    weights[distance.argmin(0), range(len(sigmas))] = 1
    return Plan.from_weights(sigmas, knots, weights, "nearest")


MINE = Estimator("mine", "nearest in sigma", "knots", nearest_plan, looks_ahead=True)


@pytest.fixture(autouse=True)
def registry_as_it_was() -> Iterator[None]:
    before = dict(ESTIMATORS)
    yield
    ESTIMATORS.clear()
    ESTIMATORS.update(before)


@pytest.mark.parametrize("name", ESTIMATORS)
def test_every_estimator_builds_a_plan_and_knows_whether_it_looks_ahead(name: str) -> None:
    estimator = ESTIMATORS[name]
    plan = estimator.build(SIGMAS, *OPTIONS[estimator.kind])
    assert plan.name == name
    assert plan.anticipating is estimator.looks_ahead


def test_names_styles_and_knots_are_told_apart() -> None:
    assert [e.name for e in ESTIMATORS.values()] == list(ESTIMATORS)
    assert len({e.style[0] for e in ESTIMATORS.values()}) == len(ESTIMATORS)
    assert len({e.label for e in ESTIMATORS.values()}) == len(ESTIMATORS)
    assert [e.name for e in estimators(searched=True)] == ["causal", "spline"]
    assert {e.knots_of for e in ESTIMATORS.values() if e.kind == "knots"} == {"spline", "causal"}


@pytest.mark.parametrize(("text", "name"), [("nearest_plan", "nearest"), ("MINE", "mine")])
def test_a_stranger_trains_under_its_own_name(text: str, name: str) -> None:
    settings = PlanSettings(estimator=f"{__name__}:{text}", knots=(0, 5, 11, 16))
    assert find_estimator(settings.estimator).name == name
    plan = make_plan(settings, SIGMAS, 0)
    assert torch.equal(plan.weights, nearest_plan(SIGMAS, [0, 5, 11, 16]).weights)
    assert name in ESTIMATORS


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("magic", "estimator must be one of"),
        (f"{__name__}:SIGMAS", "must be an Estimator or a constructor"),
        (f"{__name__}:nothing", "has no 'nothing'"),
        ("no_such_module:plan", "there is no module"),
    ],
)
def test_what_is_no_estimator_is_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        find_estimator(text)


def test_a_name_is_taken_once() -> None:
    register_estimator(MINE)
    register_estimator(MINE)
    with pytest.raises(ValueError, match="'causal' is registered already"):
        register_estimator(Estimator("causal", "mine", "knots", nearest_plan, looks_ahead=True))
    with pytest.raises(ValueError, match="knots_of must be empty but for estimators of kind knots"):
        Estimator("other", "other", "groups", nearest_plan, looks_ahead=True, knots_of="causal")
