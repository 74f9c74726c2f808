"""Cosine, relative error and norm ratio: what each is blind to, and where they are undefined."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from analysis.measure.cross_table import CrossTable, collect_table
from analysis.measure.similarity import Similarity, cross_cosines, exact_vector, similarity, similarity_from_products
from jagg_core import ClippedSurrogate, Plan, Trajectory, causal_plan, exact_plan, jagg_plan
from tests.jagg_core.fields import ADVANTAGES, MlpField, gradient


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


# Blocks and single pairs


@pytest.fixture
def blocks(field: MlpField) -> dict[torch.Tensor, str]:
    return {field.inner: "first", field.bias: "first", field.outer: "last"}


@pytest.mark.parametrize("steps", [None, range(3, 7)])
def test_a_block_is_its_own_parameters_alone(
    steps: range | None, blocks: dict[torch.Tensor, str], field: MlpField, trajectory: Trajectory
) -> None:
    table = collect_table(field, trajectory, ADVANTAGES, ClippedSurrogate(), blocks=blocks)
    plan = jagg_plan(trajectory.sigmas, 5, 1.0)
    sizes = {"inner": field.inner.numel(), "bias": field.bias.numel(), "outer": field.outer.numel()}
    assert list(dict(field.named_parameters())) == list(sizes)
    cut = sizes["inner"] + sizes["bias"]
    chosen = {"first": slice(0, cut), "last": slice(cut, None)}
    exact, estimate = (part_of(p, steps) for p in (exact_plan(trajectory.sigmas), plan))
    whole, other = (gradient(field, trajectory, ADVANTAGES, p, ClippedSurrogate())[0] for p in (exact, estimate))
    found = {}
    for block, own in chosen.items():
        a, b = whole[own], other[own]
        found[block] = similarity(table, plan, steps, block=block)
        assert found[block].cosine == pytest.approx(float(a @ b / a.norm() / b.norm()), abs=1e-10)
        assert found[block].rel_error == pytest.approx(float((b - a).norm() / a.norm()), rel=1e-8)
        assert found[block].norm_ratio == pytest.approx(float(b.norm() / a.norm()), rel=1e-10)
    assert found["first"] != found["last"]
    assert similarity(table, plan, steps) == similarity(table, plan, steps, block=None)
    assert similarity(table, plan, steps).cosine not in (found["first"].cosine, found["last"].cosine)


def part_of(plan: Plan, steps: range | None) -> Plan:
    """The plan without contributions of other steps."""
    weights = plan.weights.clone()
    if steps is not None:
        weights[:, [j for j in range(plan.steps) if j not in steps]] = 0
    return replace(plan, weights=weights)


def test_an_unknown_block_is_an_error(table: CrossTable, trajectory: Trajectory) -> None:
    plan = exact_plan(trajectory.sigmas)
    assert similarity(table, plan, block="all") == similarity(table, plan)
    with pytest.raises(KeyError, match="attention"):
        similarity(table, plan, block="attention")


def test_a_block_without_a_gradient_is_undefined(field: MlpField, trajectory: Trajectory) -> None:
    table = collect_table(field, trajectory, ADVANTAGES, ClippedSurrogate())
    two = replace(table, grams={"all": table.gram, "silent": np.zeros_like(table.gram)})
    plan = causal_plan(trajectory.sigmas, [0, 4])
    assert similarity(two, plan, block="silent") == Similarity(None, None, None)
    assert similarity(two, plan) == similarity(table, plan)


def test_cosine_of_every_pair_to_the_steps_own(field: MlpField, trajectory: Trajectory) -> None:
    table = collect_table(field, trajectory, ADVANTAGES, ClippedSurrogate(), past=6, future=2)
    found = cross_cosines(table)
    assert found.shape == (10, 10)
    for i in range(10):
        for j in range(10):
            if not -2 <= j - i <= 6:
                assert np.isnan(found[i, j])
                continue
            weights = torch.zeros(1, 10, dtype=torch.float64)
            weights[0, j] = 1
            elsewhere, own = (
                gradient(field, trajectory, ADVANTAGES, Plan((knot,), weights, trajectory.sigmas), ClippedSurrogate())[
                    0
                ]
                for knot in (i, j)
            )
            expected = float(torch.cosine_similarity(elsewhere, own, dim=0))
            assert found[i, j] == pytest.approx(expected, abs=1e-9), (i, j)
    assert np.diag(found).tolist() == pytest.approx([1] * 10, abs=1e-12)
    assert np.nanmax(found) <= 1
    assert not np.allclose(found, found.T, equal_nan=True)


def test_pairs_without_a_gradient_are_undefined(field: MlpField, trajectory: Trajectory) -> None:
    table = collect_table(field, trajectory, torch.zeros(4), ClippedSurrogate())
    assert np.isnan(cross_cosines(table)).all()
    row = table.index[2, 2]
    ones = np.ones_like(table.gram)
    ones[row], ones[:, row] = 0, 0
    found = cross_cosines(replace(table, grams={"all": ones}))
    # the step's own gradient vanishes, and so every cosine to it is undefined
    assert np.isnan(found[:, 2]).all()
    assert not np.isnan(np.delete(found, 2, axis=1)).any()


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
