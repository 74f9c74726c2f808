"""Rivals that train on some steps only: which steps, with which weights, drawn from the batch's own seed."""

from __future__ import annotations

import pytest
import torch

from analysis.measure.estimators import NamedPlan
from analysis.measure.gradients import on_policy_upstream, plan_passes
from analysis.measure.rivals import kept_steps_plan, per_sample, per_sample_plan, rivals
from jagg_core import ClippedSurrogate, Plan, Trajectory, dance_schedule, exact_plan
from tests.jagg_core.fields import ADVANTAGES, MlpField, full_weights, gradient, relative_error

SIGMAS = dance_schedule(21)[:-2]
SEEDS = range(40)


def sigmas_of(steps: int) -> torch.Tensor:
    return dance_schedule(steps + 1)[:-2]


def by_name(seed: int, steps: int = 20) -> dict[str, NamedPlan]:
    return {e.name: e for e in rivals(sigmas_of(steps), (8, 5), seed)}


def plan_of(name: str, seed: int, steps: int = 20) -> Plan:
    [plan] = by_name(seed, steps)[name].plans
    return plan


def kept(plan: Plan) -> tuple[int, ...]:
    """The steps whose own gradient is taken; asserts that no weight lies elsewhere."""
    weights = full_weights(plan)
    assert torch.equal(weights, torch.diag(torch.diagonal(weights)))
    return plan.knots


# Shared by all samples


def test_names_and_families_do_not_depend_on_the_seed() -> None:
    for seed in SEEDS:
        assert {name: (e.family, e.passes) for name, e in by_name(seed).items()} == {
            "subsample-8": ("subsample", 8),
            "subsample-5": ("subsample", 5),
            "mixgrpo": ("window", 4),
            "flow-grpo-fast": ("window", 2),
            "high-noise-half": ("half", 10),
            "low-noise-half": ("half", 10),
        }
        assert {name: e.describe() for name, e in by_name(seed).items()} == {
            name: e.describe() for name, e in by_name(0).items()
        }


def test_nobody_looks_ahead() -> None:
    assert not any(e.anticipating for e in by_name(0).values())


@pytest.mark.parametrize("count", [8, 5])
def test_subsampling_is_weighted_up(count: int) -> None:
    drawn = set()
    for seed in SEEDS:
        plan = plan_of(f"subsample-{count}", seed)
        drawn.add(kept(plan))
        assert plan.weights[plan.weights != 0].tolist() == pytest.approx([20 / count] * count)
    assert len(drawn) > 30
    assert {step for steps in drawn for step in steps} == set(range(20))


@pytest.mark.parametrize(("name", "size", "last"), [("mixgrpo", 4, 16), ("flow-grpo-fast", 2, 8)])
def test_windows_are_consecutive_steps(name: str, size: int, last: int) -> None:
    """MixGRPO's may lie anywhere, Flow-GRPO-Fast's in the noisier half alone; every place is drawn."""
    starts = set()
    for seed in range(200):
        plan = plan_of(name, seed)
        steps = kept(plan)
        assert steps == tuple(range(steps[0], steps[0] + size))
        assert set(plan.weights.flatten().tolist()) == {0, 1}
        starts.add(steps[0])
    assert starts == set(range(last + 1))


def test_halves_are_the_whole() -> None:
    high, low = plan_of("high-noise-half", 0), plan_of("low-noise-half", 0)
    assert (kept(high), kept(low)) == (tuple(range(10)), tuple(range(10, 20)))
    assert torch.equal(full_weights(high) + full_weights(low), full_weights(exact_plan(SIGMAS)))
    assert (len(kept(plan_of("high-noise-half", 0, 5))), len(kept(plan_of("low-noise-half", 0, 5)))) == (2, 3)


def test_the_seed_decides() -> None:
    for name in ("subsample-8", "subsample-5", "mixgrpo", "flow-grpo-fast"):
        plans = [plan_of(name, seed) for seed in (3, 3, *SEEDS)]
        assert plans[0].knots == plans[1].knots
        assert torch.equal(plans[0].weights, plans[1].weights)
        assert len({plan.knots for plan in plans}) > 4


def test_purposes_draw_on_their_own() -> None:
    """The same seed does not put every window and subset at the same place."""
    starts = [(plan_of("mixgrpo", s).knots[0] % 9, plan_of("flow-grpo-fast", s).knots[0]) for s in SEEDS]
    assert any(a != b for a, b in starts)
    assert any(not set(plan_of("subsample-5", s).knots) <= set(plan_of("subsample-8", s).knots) for s in SEEDS)


@pytest.mark.parametrize("steps", [2, 3, 4, 5, 6])
def test_short_schedules(steps: int) -> None:
    for seed in SEEDS:
        found = rivals(sigmas_of(steps), (8, 5, 2, 1), seed)
        assert len({e.name for e in found}) == len(found)
        for estimator in found:
            assert 1 <= estimator.passes < steps, estimator.name
            assert kept(estimator.plans[0])[-1] < steps
        names = {e.name for e in found}
        assert {"subsample-1", "high-noise-half", "low-noise-half"} <= names
        assert ("mixgrpo" in names, "flow-grpo-fast" in names) == (steps > 4, steps > 2)


def test_their_passes_are_exacts_own(field: MlpField, trajectory: Trajectory) -> None:
    upstream = on_policy_upstream(field, trajectory, ADVANTAGES, ClippedSurrogate())
    plans = [e.plans[0] for seed in (1, 2, 3) for e in rivals(trajectory.sigmas, (8, 5, 2), seed)]
    passes, combine = plan_passes([exact_plan(trajectory.sigmas), *plans], trajectory, upstream)
    assert len(passes) == 10
    assert combine.shape == (1 + len(plans), 10)


# Other steps for every sample


@pytest.mark.parametrize("count", [1, 3, 10])
def test_each_sample_has_its_own_steps(count: int) -> None:
    plan = per_sample_plan(sigmas_of(10), count, 6, torch.Generator().manual_seed(4))
    assert plan.weights.shape == (6, 10, 10)
    chosen = set()
    for weights in plan.weights:
        assert torch.equal(weights, torch.diag(torch.diagonal(weights)))
        own = torch.diagonal(weights).nonzero().flatten().tolist()
        assert len(own) == count
        assert torch.diagonal(weights)[own].tolist() == pytest.approx([10 / count] * count)
        chosen.add(tuple(own))
    assert (len(chosen) > 1) == (count < 10)


def test_per_sample_estimators() -> None:
    found = per_sample(SIGMAS, 4, (8, 5), 3)
    assert [(e.name, e.family, e.passes) for e in found] == [
        ("per-sample-8", "subsample", 8),
        ("per-sample-5", "subsample", 5),
    ]
    again, other = per_sample(SIGMAS, 4, (8, 5), 3), per_sample(SIGMAS, 4, (8, 5), 4)
    for one, same, different in zip(found, again, other, strict=True):
        assert torch.equal(one.plans[0].weights, same.plans[0].weights)
        assert not torch.equal(one.plans[0].weights, different.plans[0].weights)
        assert one.describe() == different.describe()
    assert per_sample(sigmas_of(4), 3, (8, 5, 4), 0) == []
    with pytest.raises(ValueError, match="count"):
        per_sample_plan(SIGMAS, 21, 2, torch.Generator())


@pytest.mark.parametrize("count", [1, 3])
def test_gradients_of_each_sample_alone_add_up(count: int, field: MlpField, trajectory: Trajectory) -> None:
    plan = per_sample_plan(trajectory.sigmas, count, 4, torch.Generator().manual_seed(1))
    found, _ = gradient(field, trajectory, ADVANTAGES, plan, ClippedSurrogate())
    expected = torch.zeros_like(found)
    for sample, (part, advantage) in enumerate(zip(trajectory.split(1), ADVANTAGES.split(1), strict=True)):
        own = torch.diagonal(plan.weights[sample]).nonzero().flatten().tolist()
        alone, _ = gradient(field, part, advantage, kept_steps_plan(trajectory.sigmas, own, "own"), ClippedSurrogate())
        expected += 10 / count * alone
    assert relative_error(found, expected) < 1e-10
    exact, _ = gradient(field, trajectory, ADVANTAGES, exact_plan(trajectory.sigmas), ClippedSurrogate())
    assert relative_error(found, exact) > 0.05


def test_over_all_draws_it_is_the_exact_gradient(field: MlpField, trajectory: Trajectory) -> None:
    """Each step is drawn for each sample in ``count / T`` of the cases."""
    plans = [per_sample_plan(trajectory.sigmas, 5, 4, torch.Generator().manual_seed(s)) for s in range(600)]
    mean = torch.stack([plan.weights for plan in plans]).mean(0)
    assert (mean - full_weights(exact_plan(trajectory.sigmas))).abs().max() < 0.2
