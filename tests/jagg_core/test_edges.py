"""What the report says step by step, and refusals at the edges of the public functions."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from jagg_core.engine import accumulate_gradients
from jagg_core.objective import ClippedSurrogate, NoGroupSignal, group_advantages
from jagg_core.plan import Plan, causal_plan, exact_plan
from jagg_core.schedule import dance_schedule, network_sigma
from jagg_core.seeding import derive_seed
from jagg_core.trajectory import rollout, sample_ode
from jagg_core.transitions import DanceSDE
from tests.jagg_core.fields import ADVANTAGES, MlpField, make_rollout


def test_report_names_the_largest_ratio_of_every_step() -> None:
    field = MlpField()
    trajectory = make_rollout(field)
    moved = trajectory.log_probs.clone()
    moved[3, 1] -= 0.25
    trajectory = replace(trajectory, log_probs=moved, weights_version=None)
    plan = exact_plan(trajectory.sigmas)
    report = accumulate_gradients(field, trajectory, ADVANTAGES, plan, ClippedSurrogate(), upstream="autograd")
    assert sorted(report.log_ratio_by_step) == list(range(trajectory.steps))
    assert report.log_ratio_by_step[3] == pytest.approx(0.25)
    assert max(v for k, v in report.log_ratio_by_step.items() if k != 3) < 1e-9


@pytest.mark.parametrize("backward", ["joint", "sequential"])
def test_a_limit_of_rows_needs_batched_passes(backward: str) -> None:
    field = MlpField()
    trajectory = make_rollout(field)
    arguments = (trajectory, ADVANTAGES, causal_plan(trajectory.sigmas, [0, 3]), ClippedSurrogate(), "auto", backward)
    with pytest.raises(ValueError, match="max_rows limits batched passes"):
        accumulate_gradients(field, *arguments, max_rows=8)  # type: ignore[arg-type]


def test_a_rollout_refuses_a_velocity_of_another_shape() -> None:
    class Flat:
        def velocity(self, latents: torch.Tensor, sigma: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
            return latents.mean(1, keepdim=True)

    with pytest.raises(ValueError, match=r"velocity must have shape \[2, 3\], found \[2, 1\]"):
        rollout(Flat(), dance_schedule(4), DanceSDE(0.7), torch.zeros(2, 3), seed=0)


def test_ode_sampling_refuses_what_a_rollout_refuses() -> None:
    class Broken:
        def velocity(self, latents: torch.Tensor, sigma: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
            return latents / 0 if float(sigma[0]) < 0.9 else latents[:1]

    with pytest.raises(ValueError, match="velocity must have shape"):
        sample_ode(Broken(), dance_schedule(4), torch.ones(2, 3))
    with pytest.raises(FloatingPointError, match="not finite at step"):
        sample_ode(Broken(), dance_schedule(4), torch.ones(1, 3))


def test_a_scale_that_is_not_finite_is_refused_before_any_gradient() -> None:
    field = MlpField()
    trajectory = make_rollout(field)
    plan = exact_plan(trajectory.sigmas)
    with pytest.raises(ValueError, match="scale must be finite"):
        accumulate_gradients(field, trajectory, ADVANTAGES, plan, ClippedSurrogate(), scale=float("nan"))
    assert all(p.grad is None for p in field.parameters())


def test_plans_refuse_fractional_knots_no_weights_and_sites_of_another_batch() -> None:
    sigmas = dance_schedule(7)[:-2]
    with pytest.raises(ValueError, match="whole numbers"):
        causal_plan(sigmas, [0, 3.7])  # type: ignore[list-item]
    field = MlpField()
    trajectory = make_rollout(field)
    with pytest.raises(ValueError, match="at least one weight must differ from 0"):
        accumulate_gradients(field, trajectory, ADVANTAGES, Plan((0,), torch.zeros(1, 6)), ClippedSurrogate())
    plan = Plan((0,), torch.ones(1, 6), knot_sigmas=torch.full((3, 1), 0.5))
    with pytest.raises(ValueError, match="knot_sigmas are for 3 samples"):
        accumulate_gradients(field, trajectory, ADVANTAGES, plan, ClippedSurrogate())


def test_eps_of_advantages_is_checked() -> None:
    with pytest.raises(ValueError, match="eps must be at least 0"):
        group_advantages(torch.tensor([1.0, 2.0]), torch.tensor([0, 0]), eps=-0.5)


def test_a_prompt_with_one_valid_sample_has_no_signal() -> None:
    rewards = torch.tensor([1.0, float("nan"), 3.0, 5.0])
    with pytest.warns(NoGroupSignal):
        group_advantages(rewards, torch.tensor([0, 0, 1, 1]), nan="exclude")


def test_dance_grids_in_fp32_truncate_as_dancegrpo_does() -> None:
    steps = network_sigma(dance_schedule(10, 3.0, torch.float32), "trunc_fp32") * 1000
    assert [round(float(steps[i])) for i in (3, 9)] == [874, 250]


def test_parts_of_a_purpose_do_not_run_together() -> None:
    assert derive_seed(0, "a/b") != derive_seed(0, "a", "b")
    assert derive_seed(0, "a\\", "b") != derive_seed(0, "a\\/b")
