"""The live meter: its estimates by enumeration, what it leaves alone, and what it refuses."""

from __future__ import annotations

import dataclasses
import json
import math
import warnings
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor, nn

from jagg_core import ClippedSurrogate, DanceSDE, Trajectory, accumulate_gradients
from jagg_core.engine import LowFidelity, Meter
from jagg_core.engine.meter import _student, fidelity_of, step_chances
from jagg_core.objective import upstream_autograd
from jagg_core.plans import Plan, causal_plan, endpoint_plan, exact_plan, jagg_plan, subsample_plan
from jagg_core.reference import plain_gradient
from jagg_core.schedule import dance_schedule
from tests.jagg_core.fields import (
    ADVANTAGES,
    MlpField,
    PerSampleLinearField,
    flat_gradient,
    make_rollout,
    noise_like,
    nudge,
    trajectory_at,
    with_log_ratios,
)

OBJECTIVE = ClippedSurrogate(clip_range=1e-3)
SIGMAS = dance_schedule(7)[:6]
CAUSAL = causal_plan(SIGMAS, [0, 2, 3])


def flat(gradients: Sequence[Tensor]) -> Tensor:
    return torch.cat([gradient.flatten() for gradient in gradients])


def residuals(policy: nn.Module, trajectory: Trajectory, plan: Plan) -> tuple[Tensor, Tensor]:
    """The plan's gradient, and every step's exact gradient less what the plan has of it, ``[T, P]``."""
    parameters, rows = list(policy.parameters()), trajectory.rows
    upstream = []
    for step in range(plan.steps):
        velocity = policy.velocity(*trajectory.site(step), rows).detach()
        upstream.append(upstream_autograd(OBJECTIVE, trajectory, step, velocity, ADVANTAGES, None).gradient)
    exact = exact_plan(trajectory.sigmas)

    def only(step: int, of: Plan) -> Tensor:
        alone = [u if j == step else torch.zeros_like(u) for j, u in enumerate(upstream)]
        return flat(plain_gradient(policy, parameters, trajectory, alone, of))

    rest = torch.stack([only(step, exact) - only(step, plan) for step in range(plan.steps)])
    return flat(plain_gradient(policy, parameters, trajectory, upstream, plan)), rest


class Drawn(NamedTuple):
    """An audit of one step: how likely it is, and its products."""

    chance: float
    size: float
    projection: float
    missed: float


def every_audit(
    policy: nn.Module, trajectory: Trajectory, plan: Plan, rest: Tensor, **settings: object
) -> dict[int, Drawn]:
    """What an audit says of every step that it may draw: those whose residual ``rest`` [T, P] is not zero."""
    seen: dict[int, Drawn] = {}

    class Every(Meter):
        def audit(self, plan: Plan, sizes: Tensor, product: Callable[[int], None]) -> None:
            chances = step_chances(plan, sizes)
            for step in chances.nonzero().flatten().tolist():
                seen[step] = Drawn(float(chances[step]), *self.look(step, product))

    meter = Every(list(policy.parameters()), every=1)
    policy.zero_grad()
    accumulate_gradients(policy, trajectory, ADVANTAGES, plan, OBJECTIVE, audit=meter, **settings)  # type: ignore[arg-type]
    assert seen.keys() == set((rest.norm(dim=1) > 1e-12).nonzero().flatten().tolist())
    assert sum(one.chance for one in seen.values()) == pytest.approx(1)
    return seen


PLANS = {
    "causal": CAUSAL,
    "shifted": causal_plan(SIGMAS, [0, 2, 4], predict=True),
    "rows apart": dataclasses.replace(
        CAUSAL, weights=CAUSAL.weights * torch.tensor([1.0, 0.9, 1.1, 1.0])[:, None, None]
    ),
}


@pytest.mark.parametrize("upstream", ["closed_form", "autograd"])
@pytest.mark.parametrize("name", PLANS)
def test_the_projection_is_that_of_the_whole_residual(name: str, upstream: str) -> None:
    """The mean over all draws of ``<G, r_m> / p_m`` is ``<G, G_exact - G>``, whatever the residuals are."""
    policy, plan = MlpField(), PLANS[name]
    trajectory = make_rollout(policy)
    gradient, rest = residuals(policy, trajectory, plan)
    drawn = every_audit(policy, trajectory, plan, rest, upstream=upstream).values()
    for one in drawn:
        assert one.size == pytest.approx(gradient.square().sum().item(), rel=1e-10)
    assert sum(one.projection for one in drawn) == pytest.approx((gradient @ rest.sum(0)).item(), rel=1e-9)
    assert sum(one.missed for one in drawn) == pytest.approx(rest.square().sum().item(), rel=1e-9)


def test_the_distance_is_that_of_the_whole_residual_where_residuals_are_orthogonal() -> None:
    """Noise of different steps in different elements: ``J^T s = s z^T`` of ``v = M z`` has rows apart."""
    policy = PerSampleLinearField(0.3 * noise_like(6, 6, seed=1), samples=4)
    noise = torch.eye(6, dtype=torch.float64)[:, None, :].expand(6, 4, 6) * noise_like(6, 4, 1, seed=2)
    states = list(noise_like(6, 4, 6, seed=3))
    trajectory = trajectory_at(policy, states, dance_schedule(7)[:7], DanceSDE(0.7), noise)
    gradient, rest = residuals(policy, trajectory, CAUSAL)
    assert (rest @ rest.T - torch.diag(rest.square().sum(1))).abs().max() < 1e-12
    drawn = every_audit(policy, trajectory, CAUSAL, rest).values()
    whole = rest.sum(0)
    assert sum(one.missed for one in drawn) == pytest.approx(whole.square().sum().item(), rel=1e-10)
    cosine = torch.cosine_similarity(gradient, gradient + whole, dim=0).item()
    expected = next(iter(drawn)).size, sum(one.projection for one in drawn), sum(one.missed for one in drawn)
    assert fidelity_of([expected]).cosine == pytest.approx(cosine, rel=1e-10)


def test_samples_that_were_made_exact_have_no_residual() -> None:
    policy = MlpField()
    log_ratios = torch.zeros(6, 4, dtype=torch.float64)
    log_ratios[4, 0] = 0.1  # clipped: its advantage is positive
    trajectory = with_log_ratios(make_rollout(policy), log_ratios)
    nudge(policy, 1e-9)
    _, rest = residuals(policy, trajectory, CAUSAL)
    settings = {"upstream": "autograd", "partly_clipped": "exact"}
    drawn = every_audit(policy, trajectory, CAUSAL, rest, **settings)
    # the first part has no clipped step; in the last one the first sample is exact
    for step, alike in ((1, True), (5, False)):
        assert (drawn[step].missed == pytest.approx(rest[step].square().sum().item(), rel=1e-9)) is alike


@pytest.mark.parametrize("backward", ["sequential", "batched", "joint"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_gradients_generators_and_counts_are_those_without_an_audit(backward: str, checkpointing: bool) -> None:
    found = []
    for audited in (False, True):
        policy = MlpField(checkpointing=checkpointing, dropout=0.0)
        trajectory = make_rollout(policy)
        meter = Meter(list(policy.parameters()), every=1) if audited else None
        torch.manual_seed(5)
        reports = [
            accumulate_gradients(
                policy,
                trajectory,
                ADVANTAGES,
                CAUSAL,
                OBJECTIVE,
                backward=backward,
                audit=meter,  # type: ignore[arg-type]
            )
            for _ in range(2)
        ]
        # the second micro-batch adds to the first one's gradient, and is not audited
        assert [report.audit_passes for report in reports] == ([2, 0] if audited else [0, 0])
        counts = [(r.passes, r.forwards, r.backward_calls, r.loss) for r in reports]
        found.append((flat_gradient(policy), torch.get_rng_state(), counts))
    assert torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1])
    assert found[0][2] == found[1][2]


def test_a_network_that_draws_leaves_generators_alone() -> None:
    class Drawing(MlpField):
        def velocity(self, latents: Tensor, sigma: Tensor, rows: Tensor) -> Tensor:
            torch.rand(3)
            return super().velocity(latents, sigma, rows)

    states = []
    for audited in (False, True):
        policy = Drawing()
        trajectory = make_rollout(policy)
        torch.manual_seed(5)
        meter = Meter(list(policy.parameters()), every=1) if audited else None
        accumulate_gradients(policy, trajectory, ADVANTAGES, CAUSAL, OBJECTIVE, audit=meter)
        states.append(torch.get_rng_state())
    assert torch.equal(*states)


def test_one_audit_in_every_so_many_steps_and_a_resumed_meter_goes_on() -> None:
    def steps(meter: Meter, count: int) -> list[int]:
        made = []
        for _ in range(count):
            policy.zero_grad()
            made.append(
                accumulate_gradients(policy, trajectory, ADVANTAGES, CAUSAL, OBJECTIVE, audit=meter).audit_passes
            )
        return made

    policy = MlpField()
    trajectory = make_rollout(policy)
    whole = Meter(list(policy.parameters()), every=4, seed=2)
    made = steps(whole, 24)
    assert [sum(made[block : block + 4]) for block in range(0, 24, 4)] == [2] * 6
    assert len({made[block : block + 4].index(2) for block in range(0, 24, 4)}) > 1
    first = Meter(list(policy.parameters()), every=4, seed=2)
    steps(first, 10)
    resumed = Meter(list(policy.parameters()), every=4, seed=2)
    resumed.restore(json.loads(json.dumps(first.state())))
    assert steps(resumed, 14) == made[10:]
    assert resumed.state() == whole.state()
    assert resumed.fidelity() == whole.fidelity()


def test_gradients_set_to_zero_count_as_cleared() -> None:
    policy = MlpField()
    trajectory = make_rollout(policy)
    meter = Meter(list(policy.parameters()), every=1)
    for _ in range(3):
        policy.zero_grad(set_to_none=False)
        accumulate_gradients(policy, trajectory, ADVANTAGES, CAUSAL, OBJECTIVE, audit=meter)
    assert meter.fidelity().audits == 3


def test_an_exact_plan_has_cosine_one_and_costs_nothing() -> None:
    policy = MlpField()
    meter = Meter(list(policy.parameters()), every=1)
    report = accumulate_gradients(policy, make_rollout(policy), ADVANTAGES, exact_plan(SIGMAS), OBJECTIVE, audit=meter)
    assert (report.audit_passes, meter.fidelity().cosine) == (0, 1.0)


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (jagg_plan(SIGMAS, 3, 1.0), "does not look ahead, got 'jagg"),
        (causal_plan(SIGMAS, [2, 4]), "does not look ahead, got 'causal"),
        (endpoint_plan(SIGMAS, 3, 1.0), "uses every step, got 'endpoint"),
        (subsample_plan(SIGMAS, 2, torch.Generator().manual_seed(0)), "uses every step, got 'subsample"),
    ],
)
def test_plans_whose_residuals_say_nothing_are_refused_before_any_forward(plan: Plan, message: str) -> None:
    policy = MlpField()
    trajectory = make_rollout(policy)
    with pytest.raises(ValueError, match=message):
        accumulate_gradients(policy, trajectory, ADVANTAGES, plan, OBJECTIVE, audit=Meter(list(policy.parameters())))
    assert policy.calls == []


def test_given_upstream_gradients_are_refused() -> None:
    policy = MlpField()
    trajectory = make_rollout(policy)
    with pytest.raises(ValueError, match="audit must be None where upstream gradients are given"):
        accumulate_gradients(
            policy, trajectory, None, CAUSAL, None, trajectory.noise, audit=Meter(list(policy.parameters()))
        )


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"every": 0}, "every must be at least 1"),
        ({"keep": 2}, "keep must be at least 4"),
        ({"below": 1.0}, "below must be at least 0 and below 1, got 1.0"),
        ({"parameters": []}, "parameters must be the trained ones, got none"),
    ],
)
def test_settings_out_of_range_are_named(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Meter(**{"parameters": [torch.zeros(1)], **settings})  # type: ignore[arg-type]


def test_intervals_cover() -> None:
    """Audits of a plan whose true cosine is known: of 300 runs the interval misses it in about one of twenty."""
    generator = np.random.default_rng(0)
    size, projection, missed = 1.0, 0.02, 0.11
    cosine = (size + projection) / math.sqrt(size * (size + 2 * projection + missed))
    inside = 0
    for _ in range(300):
        n = 20
        audits = zip(
            size * generator.gamma(20, 1 / 20, n),
            projection + 0.15 * generator.standard_normal(n),
            missed * generator.gamma(1.5, 1 / 1.5, n),
            strict=True,
        )
        now = fidelity_of([(float(a), float(b), float(c)) for a, b, c in audits])
        assert now.low is not None and now.high is not None
        inside += now.low <= cosine <= now.high
    assert 0.90 < inside / 300 < 0.99


def test_few_audits_have_no_interval() -> None:
    now = fidelity_of([(1.0, 0.0, 0.1)] * 3)
    assert (now.low, now.high, now.audits) == (None, None, 3)
    assert now.cosine == pytest.approx(1 / math.sqrt(1.1))
    assert fidelity_of([]).cosine is None


@pytest.mark.parametrize("degrees", [3, 5, 10, 49])
def test_the_quantile_is_students(degrees: int) -> None:
    assert _student(degrees) == pytest.approx(stats.t.ppf(0.975, degrees), rel=1e-2)


def test_a_cosine_below_the_threshold_warns_once() -> None:
    policy = MlpField()
    trajectory = make_rollout(policy)
    meter = Meter(list(policy.parameters()), every=1, below=0.999999)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(12):
            policy.zero_grad()
            accumulate_gradients(policy, trajectory, ADVANTAGES, causal_plan(SIGMAS, [0]), OBJECTIVE, audit=meter)
    told = [str(one.message) for one in caught if one.category is LowFidelity]
    assert len(told) == 1
    assert "over" in told[0] and "below 0.999999" in told[0]
