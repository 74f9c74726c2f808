"""What the report says step by step, and refusals at the edges of the public functions."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from jagg_core.advantages import NoGroupSignal, group_advantages
from jagg_core.engine import accumulate_gradients
from jagg_core.images import image_grid
from jagg_core.objective import ClippedSurrogate
from jagg_core.plans import Plan, causal_plan, exact_plan
from jagg_core.rollouts import rollout, sample_ode
from jagg_core.schedule import dance_schedule, network_sigma, time_shift
from jagg_core.seeding import derive_seed
from jagg_core.strict_json import RecordError
from jagg_core.transitions import DanceSDE
from tests.jagg_core.fields import ADVANTAGES, MlpField, make_rollout


def test_report_has_the_ratio_of_every_sample_and_step() -> None:
    field = MlpField()
    trajectory = make_rollout(field)
    moved = trajectory.log_probs.clone()
    moved[3, 1] -= 0.25
    trajectory = replace(trajectory, log_probs=moved, weights_version=None)
    plan = exact_plan(trajectory.sigmas)
    report = accumulate_gradients(field, trajectory, ADVANTAGES, plan, ClippedSurrogate(), upstream="autograd")
    expected = torch.zeros(trajectory.batch, trajectory.steps).double()
    expected[1, 3] = 0.25
    torch.testing.assert_close(report.log_ratios, expected)


def test_ratios_that_were_not_evaluated_are_those_of_the_closed_form() -> None:
    field = MlpField()
    trajectory = make_rollout(field)
    weights = torch.tensor([[0.0, 1, 1, 0, 0, 0], [0, 0, 0, 1, 1, 1]])
    plan = Plan.from_weights(trajectory.sigmas, [1, 3], weights, "without the first step")
    report = accumulate_gradients(field, trajectory, ADVANTAGES, plan, ClippedSurrogate(), upstream="closed_form")
    assert report.log_ratios.isnan().all(0).nonzero().flatten().tolist() == [0]
    assert report.log_ratios[:, 1:].abs().max() < 1e-9


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

    with pytest.raises(ValueError, match=r"velocity must have shape \[2, 3\], got \[2, 1\]"):
        rollout(Flat(), dance_schedule(4), DanceSDE(0.7), torch.zeros(2, 3), seed=0)


def test_ode_sampling_refuses_what_a_rollout_refuses() -> None:
    class Broken:
        def velocity(self, latents: torch.Tensor, sigma: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
            return latents / 0 if float(sigma[0]) < 0.9 else latents[:1]

    with pytest.raises(ValueError, match="velocity must have shape"):
        sample_ode(Broken(), dance_schedule(4), torch.ones(2, 3))
    with pytest.raises(FloatingPointError, match="not finite at step"):
        sample_ode(Broken(), dance_schedule(4), torch.ones(1, 3))


def test_ode_sampling_refuses_what_is_no_schedule_and_no_batch() -> None:
    field = MlpField()
    latents = torch.zeros(4, 3, 2)
    for sigmas, shape in ((dance_schedule(3).expand(4, -1), [4, 4]), (torch.ones(1), [1])):
        with pytest.raises(
            ValueError, match=re.escape(f"sigmas must have shape [N + 1] with N >= 1 steps, got {shape}")
        ):
            sample_ode(field, sigmas, latents)
    for wrong in (latents[:0], latents.long()):
        with pytest.raises(ValueError, match=r"latents must be floating point \[B, ...\], B >= 1, got"):
            sample_ode(field, dance_schedule(3), wrong)
    assert field.calls == []


@pytest.mark.parametrize("graph_at", [(2,), (0, 3), (-1,)])
def test_a_rollout_refuses_graphs_of_steps_that_it_does_not_keep(graph_at: tuple[int, ...]) -> None:
    """Steps are counted from the window's first."""
    field = MlpField()
    with pytest.raises(ValueError, match=r"graph_at must lie within the kept steps 0..1, got \["):
        rollout(field, dance_schedule(7), DanceSDE(0.7), torch.zeros(4, 3, 2), 0, window=range(2, 4), graph_at=graph_at)
    assert field.calls == []


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


@pytest.mark.parametrize("settings", [{"centre": "batch"}, {"centre": "none"}, {"centre": "prompt", "scale": "none"}])
def test_a_batch_of_one_sample_has_no_signal(settings: dict[str, str]) -> None:
    with pytest.warns(NoGroupSignal, match="has a single sample, so its advantage is 0"):
        found = group_advantages(torch.tensor([3.0]), torch.tensor([0]), **{"scale": "batch"} | settings)  # type: ignore[arg-type]
    assert found.tolist() == [0]


def test_dance_grids_in_fp32_truncate_as_dancegrpo_does() -> None:
    sigmas = time_shift(torch.linspace(1, 0, 11, dtype=torch.float32), 3.0)
    steps = network_sigma(sigmas, "trunc_fp32") * 1000
    assert [round(float(steps[i])) for i in (3, 9)] == [874, 250]


def test_prediction_is_for_calibrated_causal_plans(tmp_path: Path) -> None:
    plans = {family: {"2": {"knots": [0, 3]}} for family in ("causal", "spline")}
    settings = {"transition": "", "timestep_mode": "float", "signature": {}}
    calibration = {"kind": "calibration", "plans": plans, "schedule": dance_schedule(7)[:-1].tolist(), **settings}
    path = tmp_path / "calibration.json"
    path.write_text(json.dumps(calibration))
    assert Plan.from_calibration(path, 2, predict=True).knot_sigmas is not None
    assert Plan.from_calibration(path, 2, family="spline").knots == (0, 3)
    with pytest.raises(ValueError, match="predict must be False for families other than causal"):
        Plan.from_calibration(path, 2, family="spline", predict=True)
    for damaged in ({"plans": {"causal": {"2": {}}}}, {"plans": [1]}, {"schedule": "none"}):
        path.write_text(json.dumps(calibration | damaged))
        with pytest.raises(RecordError, match="damaged calibration file"):
            Plan.from_calibration(path, 2)


def test_parts_of_a_purpose_do_not_run_together() -> None:
    assert derive_seed(0, "a/b") != derive_seed(0, "a", "b")
    assert derive_seed(0, "a\\", "b") != derive_seed(0, "a\\/b")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_sheet_refuses_pixels_that_are_not_finite(value: float) -> None:
    """A decoder that overflows in half precision must not pass for black pictures."""
    images = torch.zeros(3, 1, 2, 2)
    images[1, 0, 1, 0] = value
    with pytest.raises(ValueError, match="images must be finite, got NaN or infinite pixels in sample 1"):
        image_grid(images, 3)
