"""Cosine, relative error and norm ratio: what each is blind to, and where they are undefined."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from analysis.collect import CrossTable, collect_table
from analysis.similarity import Similarity, exact_vector, similarity, similarity_from_products
from jagg_core import ClippedSurrogate, Plan, Trajectory, causal_plan, exact_plan, jagg_plan
from tests.jagg_core.fields import ADVANTAGES, MlpField


@pytest.fixture
def table(field: MlpField, trajectory: Trajectory) -> CrossTable:
    return collect_table(field, trajectory, ADVANTAGES, ClippedSurrogate())


def scaled(plan: Plan, factor: float) -> Plan:
    return replace(plan, weights=factor * plan.weights)


def test_exact_is_exact(table: CrossTable, trajectory: Trajectory) -> None:
    plan = exact_plan(trajectory.sigmas)
    for steps in (None, range(3), range(9, 10)):
        assert np.array_equal(table.vector(plan, steps), exact_vector(table, steps))
        found = similarity(table, plan, steps)
        assert found.cosine == pytest.approx(1, abs=1e-12)
        assert found.cosine is not None
        assert found.cosine <= 1
        assert (found.rel_error, found.norm_ratio) == (0, 1)


@pytest.mark.parametrize("factor", [2.0, 0.5, 1e-6])
def test_the_cosine_is_blind_to_scale_and_the_error_is_not(
    factor: float, table: CrossTable, trajectory: Trajectory
) -> None:
    exact = similarity(table, scaled(exact_plan(trajectory.sigmas), factor))
    assert exact.cosine == pytest.approx(1, abs=1e-12)
    assert exact.rel_error == pytest.approx(abs(factor - 1), rel=1e-9)
    assert exact.norm_ratio == pytest.approx(factor, rel=1e-9)
    plan = jagg_plan(trajectory.sigmas, 5, 1.0)
    before, after = similarity(table, plan), similarity(table, scaled(plan, factor))
    assert after.cosine == pytest.approx(before.cosine, abs=1e-12)
    assert after.norm_ratio == pytest.approx(factor * before.norm_ratio, rel=1e-9)  # type: ignore[operator]
    assert abs(after.rel_error - before.rel_error) > 0.1  # type: ignore[operator]


def test_the_opposite_direction(table: CrossTable, trajectory: Trajectory) -> None:
    found = similarity(table, scaled(exact_plan(trajectory.sigmas), -1))
    assert found.cosine == pytest.approx(-1, abs=1e-12)
    assert found.rel_error == pytest.approx(2)
    assert found.norm_ratio == pytest.approx(1)


def test_a_small_orthogonal_error() -> None:
    """Numerical floor of a real trainer's reference: 0.4 % of error is a cosine of 0.999992."""
    squared = 0.004**2
    found = similarity_from_products(1 + squared, 1, 1, squared)
    assert found.cosine == pytest.approx(0.999992, abs=1e-7)
    assert found.rel_error == pytest.approx(0.004)


# Undefined


def test_without_an_exact_gradient_nothing_is_defined(field: MlpField, trajectory: Trajectory) -> None:
    assert similarity_from_products(4, 0, 0, 4) == Similarity(None, None, None)
    table = collect_table(field, trajectory, torch.zeros(4), ClippedSurrogate())
    for plan in (exact_plan(trajectory.sigmas), causal_plan(trajectory.sigmas, [0, 4])):
        assert similarity(table, plan) == Similarity(None, None, None)
        assert similarity(table, plan, range(3)) == Similarity(None, None, None)


def test_a_zero_estimate_has_no_direction_but_an_error(table: CrossTable, trajectory: Trajectory) -> None:
    assert similarity_from_products(0, 4, 0, 4) == Similarity(None, 1, 0)
    lost = scaled(exact_plan(trajectory.sigmas), 0)
    assert similarity(table, lost) == Similarity(None, 1, 0)
    weights = torch.eye(10, dtype=torch.float64)
    weights[2:5] = 0
    partly = Plan(tuple(range(10)), weights, trajectory.sigmas)
    assert similarity(table, partly, range(2, 5)) == Similarity(None, 1, 0)
    whole = similarity(table, partly)
    assert whole.cosine is not None
    assert 0 < whole.cosine < 1


# Rounding


@pytest.mark.parametrize("sign", [1, -1])
def test_rounding_never_leaves_the_range(sign: int) -> None:
    found = similarity_from_products(1, 1, sign * (1 + 1e-12), 0)
    assert found.cosine == sign


def test_rounding_below_zero_is_zero() -> None:
    assert similarity_from_products(1, 1, 1, -1e-18).rel_error == 0
    assert similarity_from_products(-1e-18, 1, 0, 1) == Similarity(None, 1, 0)


@pytest.mark.parametrize("size", [1e-300, 1e-150, 1e150, 1e300])
def test_squared_norms_of_any_size(size: float) -> None:
    found = similarity_from_products(size, size, 0.5 * size, size)
    assert found.cosine == pytest.approx(0.5)
    assert found.rel_error == pytest.approx(1)
    assert found.norm_ratio == pytest.approx(1)
