"""A bank of gradients: inner products over batches are those of updates really run, whatever the centring."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from analysis.measure import signal_gradients
from analysis.measure.estimators import NamedPlan, distinct, exact, grouped, predicted, with_knots
from analysis.measure.knot_search import Knots
from analysis.measure.rivals import per_sample, rivals
from analysis.measure.rollouts import Batch
from analysis.measure.signal_gradients import bank_rows, main_plans, side_plans, watched_plans
from analysis.statistics.learning_signal import products, stored_products
from analysis.statistics.names import CENTRINGS, PER_PROMPT
from jagg_core import ClippedSurrogate, dance_schedule, group_advantages
from tests.jagg_core.fields import MlpField, gradient, make_rollout

SIGMAS = dance_schedule(7)[:-2]
LONG = dance_schedule(21)[:-2]
IDS = torch.tensor([0, 0, 1, 1])
DIMENSION = 512
"""More than the field has parameters: the projection only puts them elsewhere, and inner products are exact."""


def knots_for(steps: int) -> Knots:
    found = {passes: (0, *range(steps - passes + 1, steps)) for passes in range(1, steps + 1)}
    return {"spline": found, "causal": found}


def batch_of(field: MlpField, seed: int, rewards: Sequence[float] = (0.3, 1.1, -0.4, 2.0)) -> Batch:
    told = torch.tensor(rewards, dtype=torch.float64) + 0.1 * seed * torch.arange(4)
    return Batch(seed, field, make_rollout(field, seed=seed), ["a"] * 4, told, group_advantages(told, IDS))


def some_estimators(seed: int = 5) -> list[NamedPlan]:
    """One of every kind."""
    knots = knots_for(6)
    return [
        exact(SIGMAS),
        grouped(SIGMAS, "jagg", 3, 1.0),
        with_knots(SIGMAS, "causal", (0, 2, 4)),
        with_knots(SIGMAS, "spline", (0, 2, 5)),
        *predicted(SIGMAS, knots, (3,)),
        *rivals(SIGMAS, (2,), seed),
        *per_sample(SIGMAS, 4, (3, 2), seed),
    ]


def engine_rows(batch: Batch, chosen: Sequence[NamedPlan], advantages: Tensor) -> Tensor:
    """The gradients of updates really run."""
    policy = batch.policy
    assert isinstance(policy, MlpField)
    return torch.stack(
        [gradient(policy, batch.trajectory, advantages, e.plans[0], ClippedSurrogate())[0] for e in chosen]
    )


ADVANTAGES = {
    PER_PROMPT: lambda batch: batch.advantages,
    "global": lambda batch: group_advantages(batch.rewards, torch.zeros(4, dtype=torch.long)),
    "none": lambda batch: batch.rewards,
    "ones": lambda batch: torch.ones(4, dtype=torch.float64),
}


def test_the_field_fits_the_space(field: MlpField) -> None:
    assert sum(p.numel() for p in field.parameters()) < DIMENSION


@pytest.mark.parametrize("centring", CENTRINGS)
@pytest.mark.parametrize("workers", [1, 3])
def test_inner_products_are_those_of_the_engine(centring: str, workers: int, field: MlpField) -> None:
    batch, chosen = batch_of(field, 3), some_estimators()
    rows = bank_rows(batch, ClippedSurrogate(), {centring: chosen}, DIMENSION, 9, workers)
    assert rows.shape == (len(chosen), DIMENSION)
    expected = engine_rows(batch, chosen, ADVANTAGES[centring](batch))
    torch.testing.assert_close(rows @ rows.T, expected @ expected.T, rtol=1e-10, atol=1e-14)
    assert torch.linalg.matrix_rank(expected) > 6, "the estimators must differ"


def test_centrings_are_different_gradients(field: MlpField) -> None:
    batch = batch_of(field, 3)
    found = bank_rows(batch, ClippedSurrogate(), {c: [exact(SIGMAS)] for c in CENTRINGS}, DIMENSION, 9, 1)
    cosines = torch.corrcoef(found)
    assert (cosines - torch.eye(4)).abs().max() < 0.99
    assert list(CENTRINGS) == list(ADVANTAGES) == list(signal_gradients.ADVANTAGES)
    for row, (name, make) in zip(found, ADVANTAGES.items(), strict=True):
        alone = bank_rows(batch, ClippedSurrogate(), {name: [exact(SIGMAS)]}, DIMENSION, 9, 1)
        torch.testing.assert_close(row, alone[0], rtol=1e-10, atol=1e-14)
        assert torch.equal(signal_gradients.ADVANTAGES[name](batch), make(batch))


def test_ones_do_not_ask_the_reward(field: MlpField) -> None:
    rows = [
        bank_rows(batch_of(field, 3, rewards), ClippedSurrogate(), {"ones": [exact(SIGMAS)]}, DIMENSION, 9, 1)
        for rewards in ((0.3, 1.1, -0.4, 2.0), (1.0, 0.0, 0.0, 0.0))
    ]
    assert torch.equal(*rows)
    assert rows[0].norm() > 0


def test_rows_come_in_the_order_of_the_request(field: MlpField) -> None:
    batch = batch_of(field, 3)
    chosen = {"ones": some_estimators()[:2], PER_PROMPT: some_estimators()}
    rows = bank_rows(batch, ClippedSurrogate(), chosen, DIMENSION, 9, 1)
    expected = torch.cat([engine_rows(batch, some, ADVANTAGES[c](batch)) for c, some in chosen.items()])
    torch.testing.assert_close(rows @ rows.T, expected @ expected.T, rtol=1e-10, atol=1e-14)


def test_equal_passes_are_made_once(field: MlpField) -> None:
    """Rivals on some of the steps cost nothing beside exact."""
    batch, made = batch_of(field, 3), []
    chosen = {PER_PROMPT: [exact(SIGMAS), *rivals(SIGMAS, (2, 3), 1)]}
    bank_rows(batch, ClippedSurrogate(), chosen, DIMENSION, 9, 1, made.append)
    assert sum(made) == 6


def test_batches_share_a_projection(field: MlpField) -> None:
    """Inner products of different batches are those of their gradients, if the seed is the same."""
    batches = [batch_of(field, seed) for seed in (3, 4, 5)]
    chosen = some_estimators()
    rows = [bank_rows(b, ClippedSurrogate(), {PER_PROMPT: chosen}, DIMENSION, 9, 1).numpy() for b in batches]
    real = [engine_rows(b, chosen, b.advantages).numpy() for b in batches]
    for position in range(1, len(chosen)):
        found = products(np.stack([r[position] for r in rows]), np.stack([r[0] for r in rows]))
        exacts, own = np.stack([r[0] for r in real]), np.stack([r[position] for r in real])
        for table, expected in (
            (found.exact, exacts @ exacts.T),
            (found.cross, own @ exacts.T),
            (found.own, own @ own.T),
        ):
            np.testing.assert_allclose(table, expected, rtol=1e-9, atol=1e-14)
        assert not np.allclose(found.cross, found.cross.T, rtol=1e-6, atol=0) or np.allclose(own, exacts)
    other = bank_rows(batches[1], ClippedSurrogate(), {PER_PROMPT: chosen}, DIMENSION, 10, 1).numpy()
    assert abs(other[0] @ rows[0][0] - real[1][0] @ real[0][0]) > 1e-3 * abs(real[1][0] @ real[0][0])


def test_products_are_double() -> None:
    rows = np.full((3, 1000), 1e-3, dtype=np.float32)
    rows[:, 0] = 1e3
    found = products(rows, rows)
    assert found.own.dtype == np.float64
    assert found.own[0, 1] - 1e6 == pytest.approx(999 * 1e-6, rel=1e-4)


def test_a_small_dimension_is_a_projection(field: MlpField) -> None:
    batch = batch_of(field, 3)
    whole, small = (
        bank_rows(batch, ClippedSurrogate(), {PER_PROMPT: [exact(SIGMAS)]}, d, 9, 1) for d in (DIMENSION, 16)
    )
    assert small.shape == (1, 16)
    assert 0.2 < float(small.norm() / whole.norm()) < 3


# Which estimators


def plan_of(estimator: NamedPlan) -> tuple[object, ...]:
    [plan] = estimator.plans
    sites = () if plan.knot_sigmas is None else tuple(plan.knot_sigmas.tolist())
    return (plan.knots, tuple(plan.weights.flatten().tolist()), sites)


@pytest.mark.parametrize("jagg_frac", [0.0, 0.6, 1.0])
@pytest.mark.parametrize(("steps", "windows"), [(20, (4, 5, 8)), (5, (3, 4)), (4, (4,)), (2, (2,)), (3, (2, 3))])
def test_no_two_of_the_core_are_one_plan(steps: int, windows: tuple[int, ...], jagg_frac: float) -> None:
    sigmas = dance_schedule(steps + 1)[:-2]
    found = main_plans(sigmas, windows, jagg_frac, knots_for(steps), (20, 8, 5, 4, 3, 2))
    assert len({plan_of(e) for e in found}) == len(found)
    assert len({e.name for e in found}) == len(found)
    assert found[0].name == "exact"
    assert all(len(e.plans) == 1 for e in found)


def test_the_core_is_what_the_decision_is_about() -> None:
    found = [e.name for e in main_plans(LONG, (4, 5, 8), 0.6, knots_for(20), (8, 5, 99))]
    assert found == ["exact", "jagg-w4-f0.6", "jagg-w4-f1", "jagg-w5-f0.5", "jagg-w5-f1", "causal-8", "causal-5"]


def test_contenders_are_every_fraction_and_what_needs_passes_of_its_own() -> None:
    found = [e.name for e in side_plans(LONG, (4, 10, 20), knots_for(20))]
    grid = [f"jagg-w4-f{routed / 5:g}" for routed in range(1, 6)] + ["jagg-w10-f0.5", "jagg-w10-f1", "jagg-w20-f1"]
    assert found == [*grid, "spline-8", "spline-5", "causal-predicted-8", "causal-predicted-5"]
    assert [e.name for e in side_plans(SIGMAS, (4,), knots_for(6))][-2:] == ["spline-5", "causal-predicted-5"]


def test_suspects_are_one_of_each_kind_at_two_prices() -> None:
    everything = [
        *main_plans(LONG, (4, 5, 8), 0.6, knots_for(20), (8, 6, 5, 2)),
        *side_plans(LONG, (4, 5, 8), knots_for(20)),
        *rivals(LONG, (8, 5), 0),
    ]
    found = {e.name for e in watched_plans(everything, LONG, (4, 5, 8), 0.6)}
    assert found == {
        "exact",
        "jagg-w4-f0.6",
        "jagg-w4-f1",
        "jagg-w5-f1",
        "causal-8",
        "causal-5",
        "spline-8",
        "spline-5",
    }
    assert signal_gradients.SIDE_PASSES == (8, 5)


def test_plans_are_told_apart_by_what_they_are() -> None:
    """Not by their names, and not by the last bit of a weight or of a product."""
    once, all_groups, endpoint = (
        grouped(LONG, f, 20, frac) for f, frac in (("jagg", 0.6), ("jagg", 1), ("endpoint", 1))
    )
    all_groups = replace(all_groups, name="another name")
    assert once.identity == all_groups.identity != endpoint.identity
    [plan] = once.plans
    nearly = replace(once, plans=(replace(plan, weights=plan.weights * (1 + 1e-15)),))
    other = replace(once, plans=(replace(plan, weights=plan.weights * (1 + 1e-9)),))
    assert nearly.identity == once.identity != other.identity
    assert [e.name for e in distinct([endpoint, once, all_groups])] == [endpoint.name, all_groups.name]


def test_products_of_exact_have_no_second_copy_whatever_rounding_does() -> None:
    rows = np.random.default_rng(0).standard_normal((3, 50))
    found = products(rows, rows)
    rounded = replace(found, cross=found.cross * (1 + 1e-15))
    assert set(stored_products(rounded, of_exact=True)) == {"own"}
    assert set(stored_products(found, of_exact=False)) == {"own", "cross"}
