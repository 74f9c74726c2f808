"""Time of one group of steps by estimator: every arm is verified against a plain loop, then timed, interleaved."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.benchmark.utils.timer import timer

from bench.rounds import time_in_rounds
from jagg_core import (
    ClippedSurrogate,
    DanceSDE,
    Plan,
    Trajectory,
    VelocityPolicy,
    accumulate_gradients,
    endpoint_plan,
    exact_plan,
    initial_latents,
    jagg_plan,
    rollout,
)
from jagg_core.backbones import Backbone, ScheduleName, check_schedule, load_backbone, read_options, schedule_of
from jagg_core.checks import require_at_least
from jagg_core.objective import upstream_closed_form
from jagg_core.records import Cell, Record, command_line, environment, recorded
from jagg_core.seeding import derive_seed, generator_for

PHASES = ("forward", "upstream", "backward")
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 5e-2}
"""Largest relative error of an arm's gradient against the plain loop of the same plan, by dtype of the network."""


@dataclass(frozen=True)
class GroupBench:
    """Settings of a run.

    Raises:
        ValueError: a setting out of range.
    """

    backbone: str = "digits-flux"
    backbone_options: tuple[str, ...] = ()
    window: int = 5
    batch: int = 16
    rounds: int = 15
    warmup: int = 1
    eta: float = 0.7
    steps: int = 21
    shift: float = 3.0
    schedule: ScheduleName = "dance"
    guidance: float | None = None
    checkpointing: bool = False
    device: str = "cpu"
    dtype: str = "float32"
    seed: int = 0

    def __post_init__(self) -> None:
        read_options(self.backbone, self.backbone_options)
        require_at_least(self, window=2, batch=1, rounds=2, warmup=1, steps=3)
        if self.window > self.steps - 1:
            raise ValueError(f"window must be at most the {self.steps - 1} trained steps, found {self.window}")
        DanceSDE(self.eta)
        check_schedule(self.schedule, self.steps, self.shift)
        if getattr(torch, self.dtype, None) not in TOLERANCE:
            names = [str(dtype).removeprefix("torch.") for dtype in TOLERANCE]
            raise ValueError(f"dtype must be one of {names}, found {self.dtype!r}")


@dataclass(frozen=True)
class Arm:
    """One way to get a group's gradient: a plan, and how the engine runs it. No plan: the bare model calls of exact."""

    name: str
    plan: Plan | None
    upstream: str = "autograd"
    backward: str = "sequential"


def arms_for(sigmas: Tensor, window: int) -> list[Arm]:
    """The arms, on a single group of ``window`` steps with these ``sigmas``."""
    exact, jagg = exact_plan(sigmas), jagg_plan(sigmas, window, 1.0)
    return [
        Arm("exact", exact),
        Arm("exact-again", exact),
        Arm("exact-bare", None),
        Arm("exact-batched", exact, "autograd", "batched"),
        Arm("paper-joint", jagg, "autograd", "joint"),
        Arm("closed-form-sequential", jagg, "closed_form", "sequential"),
        Arm("closed-form-batched", jagg, "closed_form", "batched"),
        Arm("endpoint-only", endpoint_plan(sigmas, window), "autograd", "sequential"),
    ]


def plain_gradient(
    policy: VelocityPolicy, parameters: Sequence[Tensor], trajectory: Trajectory, upstream: list[Tensor], plan: Plan
) -> list[Tensor]:
    """The plan's gradient by a plain loop over its knots, the twin of the engine."""
    total = [torch.zeros_like(p) for p in parameters]
    rows = trajectory.rows.to(trajectory.latents.device)
    for i, knot in enumerate(plan.knots):
        aggregated = torch.zeros_like(upstream[0])
        for j in range(plan.steps):
            aggregated += float(plan.weights[i, j]) * upstream[j]
        velocity = policy.velocity(*trajectory.site(knot, plan.knot_sigma(i)), rows)
        found = torch.autograd.grad(velocity, parameters, aggregated.to(velocity.dtype), allow_unused=True)
        for sums, gradient in zip(total, found, strict=True):
            if gradient is not None:
                sums += gradient
    return total


def relative_error(found: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """``|found - expected| / |expected|`` over all parameters, accumulated in fp64."""
    difference = [(a.double() - b.double()).norm() for a, b in zip(found, expected, strict=True)]
    return float(torch.stack(difference).norm() / torch.stack([b.double().norm() for b in expected]).norm())


def run_group_bench(settings: GroupBench, progress: Callable[[str], None] | None = None) -> Record:
    """Verify, then time every arm. Arms take turns in every round; their order is drawn anew each time.

    An arm that fails is recorded as failed and left out of the rounds.
    """
    backbone = load(settings)
    policy, trajectory, advantages = workload(settings, backbone)
    trajectory = trajectory.select(range(settings.window))
    objective = ClippedSurrogate()
    parameters = [p for p in backbone.transformer.parameters() if p.requires_grad]
    upstream = [upstream_closed_form(objective, trajectory, j, advantages).gradient for j in range(trajectory.steps)]
    arms = arms_for(trajectory.sigmas, settings.window)
    rows = trajectory.rows.to(trajectory.latents.device)

    def execute(arm: Arm) -> dict[str, float]:
        for parameter in parameters:
            parameter.grad = None
        start = timer()
        if arm.plan is None:
            for step in range(trajectory.steps):
                velocity = policy.velocity(trajectory.latents[step], trajectory.told_sigma(step), rows)
                torch.autograd.backward(velocity, upstream[step].to(velocity.dtype))
            return {"total_s": timer() - start}
        arguments: tuple[Any, ...] = (policy, trajectory, advantages, arm.plan, objective, arm.upstream, arm.backward)
        report = accumulate_gradients(*arguments, clock=timer, partly_clipped="keep")
        return {"total_s": timer() - start, **{f"{phase}_s": report.seconds[phase] for phase in PHASES}}

    cells: list[Cell] = []
    for arm in arms:
        with recorded(cells, arm.name, upstream=arm.upstream, backward=arm.backward) as cell:
            plan = arm.plan if arm.plan is not None else exact_plan(trajectory.sigmas)
            expected = plain_gradient(policy, parameters, trajectory, upstream, plan)
            for _ in range(settings.warmup):
                execute(arm)
            error = relative_error(
                [p.grad if p.grad is not None else torch.zeros_like(p) for p in parameters], expected
            )
            limit = TOLERANCE[getattr(torch, settings.dtype)]
            if not error <= limit:
                raise ArithmeticError(f"gradient differs from the plain loop by {error:.2g} (limit {limit:g})")
            cell.values = {"relative_error": error, "passes": plan.passes}
        if progress is not None:
            progress(f"verified {arm.name}")
    by_name = {arm.name: arm for arm in arms}
    time_in_rounds(cells, lambda name: execute(by_name[name]), settings.rounds, settings.seed, progress)
    for parameter in parameters:
        parameter.grad = None
    return Record(
        kind="group-speed",
        command=command_line(),
        backbone=settings.backbone,
        settings=dict(vars(settings)),
        seeds={"rollout": [settings.seed]},
        schedule=trajectory.sigmas.tolist(),
        environment=environment(),
        cells=cells,
    )


def load_group(settings: GroupBench) -> tuple[VelocityPolicy, Trajectory, Tensor]:
    """Load the backbone; its rollout's first group, and advantages."""
    policy, trajectory, advantages = workload(settings, load(settings))
    return policy, trajectory.select(range(settings.window)), advantages


def load(settings: GroupBench) -> Backbone:
    """The backbone, with gradient checkpointing if asked for."""
    options = read_options(settings.backbone, settings.backbone_options)
    backbone = load_backbone(settings.backbone, settings.device, getattr(torch, settings.dtype), **options)
    if settings.checkpointing:
        backbone.enable_gradient_checkpointing()
    return backbone


def workload(settings: GroupBench, backbone: Backbone) -> tuple[VelocityPolicy, Trajectory, Tensor]:
    """A rollout, with standard normal advantages: timing does not depend on their values."""
    prompts = [backbone.prompts[i % len(backbone.prompts)] for i in range(settings.batch)]
    policy = backbone.policy(prompts, settings.guidance)
    seed = derive_seed(settings.seed, "bench")
    # everything outside the network runs in the dtype of the latents, at least fp32
    precision = torch.promote_types(torch.float32, getattr(torch, settings.dtype))
    latents = initial_latents(backbone.latent_shape, seed, range(settings.batch)).to(backbone.device, precision)
    sigmas = schedule_of(backbone, settings.schedule, settings.steps, settings.shift)
    trajectory = rollout(policy, sigmas, DanceSDE(settings.eta), latents, seed)
    advantages = torch.randn(settings.batch, generator=generator_for(seed, "advantages")).to(backbone.device)
    return policy, trajectory, advantages
