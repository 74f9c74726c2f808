"""Time of one group of steps by estimator: every arm is verified against a plain loop, then timed, interleaved."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.benchmark.utils.timer import timer

from bench.arms import Arm, Clock, arms_of
from bench.compiling import compile_blocks
from bench.noise import note_noise
from bench.settings import GroupBench
from bench.timing import clear, time_in_rounds, verify_arms
from jagg_core import (
    ClippedSurrogate,
    DanceSDE,
    Plan,
    Trajectory,
    VelocityPolicy,
    accumulate_gradients,
    exact_plan,
    initial_latents,
    rollout,
)
from jagg_core.backbones import Backbone, load_backbone, read_options, schedule_of
from jagg_core.devices import make_current
from jagg_core.environment import command_line, environment
from jagg_core.objective import upstream_closed_form
from jagg_core.records import Record
from jagg_core.seeding import derive_seed, generator_for


@dataclass(frozen=True)
class Group:
    """Consecutive steps of a rollout that every arm works on.

    Attributes:
        policy, trajectory, advantages: as the engine takes them.
        parameters: trained ones.
        upstream: closed-form ``s_j`` of every step, for bare calls and the plain loop.
    """

    policy: VelocityPolicy
    trajectory: Trajectory
    advantages: Tensor
    parameters: Sequence[Tensor]
    upstream: Sequence[Tensor]

    @property
    def rows(self) -> Tensor:
        """Samples of the rollout, on the device of its latents."""
        return self.trajectory.rows.to(self.trajectory.latents.device)

    @property
    def asynchronous(self) -> bool:
        """Whether calls return before the device is done, so that reading a clock waits for it."""
        return self.trajectory.latents.device.type != "cpu"


@dataclass(frozen=True)
class ArmRun:
    """An arm on a group, ready to run.

    Attributes:
        arm, group: what runs, and on what.
        plan: on all steps of the group; its gradient is the arm's.
        calls: steps and plan of every call of the engine, in order.
    """

    arm: Arm
    group: Group
    plan: Plan
    calls: tuple[tuple[Trajectory, Plan], ...]

    def __call__(self, clock: Clock | None = None) -> dict[str, float]:
        """Adds the gradient into ``.grad``. Returns seconds by phase with a clock; an arm may have no phases."""
        if self.arm.bare is not None:
            return self.arm.bare(self.group, clock)
        seconds: dict[str, float] = {}
        for number in range(len(self.calls)):
            for phase, spent in self.call(number, clock).items():
                seconds[phase] = seconds.get(phase, 0.0) + spent
        return seconds

    def call(self, number: int, clock: Clock | None = None) -> dict[str, float]:
        """Makes one call of the engine. Returns its seconds by phase."""
        trajectory, plan = self.calls[number]
        report = accumulate_gradients(
            self.group.policy,
            trajectory,
            self.group.advantages,
            plan,
            ClippedSurrogate(),
            self.arm.upstream,
            self.arm.backward,
            clock=clock,
        )
        return report.seconds


def run_of(arm: Arm, group: Group, seed: int = 0) -> ArmRun:
    """Prepares an arm on one group; ``seed`` draws random steps. A deferred arm makes its last step a call by itself.

    Raises:
        ValueError: see `bench.arms.Arm.plan`.
    """
    trajectory = group.trajectory
    plan = arm.plan(trajectory.sigmas, trajectory.steps, seed=seed)
    if not arm.deferred:
        return ArmRun(arm, group, plan, ((trajectory, plan),))
    end = trajectory.steps - 1
    parts = [trajectory.select(steps) for steps in (range(end), range(end, end + 1))]
    return ArmRun(arm, group, plan, tuple((part, exact_plan(part.sigmas)) for part in parts))


def time_arm(run: ArmRun) -> dict[str, float]:
    """Times an arm: seconds of the whole, ``total_s``, and of its phases.

    On a device that works asynchronously the phases are of a second call, where a clock between them would wait. So a
    total waits for the device at its ends alone, however short its kernels are. The wait adds some ten microseconds to
    every phase of the second call, which is nothing against a pass through a network.
    """
    group = run.group
    clear(group.parameters)
    start = timer()
    phases = run(None if group.asynchronous else timer)
    total = timer() - start
    if group.asynchronous:
        clear(group.parameters)
        phases = run(timer)
    return {"total_s": total, **{f"{phase}_s": seconds for phase, seconds in phases.items()}}


def run_group_bench(settings: GroupBench, progress: Callable[[str], None] | None = None) -> Record:
    """Verifies, then times every arm. Arms take turns in every round, in an order that is drawn each time.

    An arm that fails is recorded as failed and left out of the rounds.
    """
    where = environment()
    group = load_group(settings)
    runs = {arm.name: run_of(arm, group, settings.seed) for arm in arms_of("group")}

    def execute(name: str) -> dict[str, float]:
        return time_arm(runs[name])

    cells = verify_arms(runs, execute, settings, progress)
    time_in_rounds(cells, execute, settings.rounds, settings.seed, progress)
    clear(group.parameters)
    record = Record(
        kind="group-speed",
        command=command_line(),
        backbone=settings.backbone,
        settings=dict(vars(settings)),
        seeds={"rollout": [settings.seed]},
        schedule=group.trajectory.sigmas.tolist(),
        environment=where,
        cells=cells,
    )
    note_noise(record)
    return record


def load_group(settings: GroupBench) -> Group:
    """Loads the backbone, and returns its rollout's first group with advantages."""
    return group_of(settings, load(settings), settings.window)


def group_of(settings: GroupBench, backbone: Backbone, steps: int | None = None) -> Group:
    """Rolls a loaded backbone out, and returns its first ``steps``, or all. Blocks are compiled after the rollout."""
    policy, trajectory, advantages = workload(settings, backbone)
    compile_blocks(backbone, settings.compile)
    if steps is not None:
        trajectory = trajectory.select(range(steps))
    parameters = [p for p in backbone.transformer.parameters() if p.requires_grad]
    objective = ClippedSurrogate()
    upstream = [upstream_closed_form(objective, trajectory, j, advantages).gradient for j in range(trajectory.steps)]
    return Group(policy, trajectory, advantages, parameters, upstream)


def load(settings: GroupBench) -> Backbone:
    """Loads the backbone, with gradient checkpointing if asked for. The timer then waits for its GPU."""
    options = read_options(settings.backbone, settings.backbone_options)
    backbone = load_backbone(settings.backbone, settings.device, getattr(torch, settings.dtype), **options)
    make_current(torch.device(settings.device))
    if settings.checkpointing:
        backbone.enable_gradient_checkpointing()
    return backbone


def workload(settings: GroupBench, backbone: Backbone) -> tuple[VelocityPolicy, Trajectory, Tensor]:
    """Makes a rollout, with standard normal advantages: times do not depend on their values."""
    policy = backbone.policy(prompts_of(backbone, settings.batch), settings.guidance)
    seed = derive_seed(settings.seed, "bench")
    # everything outside the network runs in the dtype of the latents, at least fp32
    precision = torch.promote_types(torch.float32, getattr(torch, settings.dtype))
    latents = initial_latents(backbone.latent_shape, seed, range(settings.batch)).to(backbone.device, precision)
    sigmas = schedule_of(backbone, settings.schedule, settings.steps, settings.shift)
    trajectory = rollout(policy, sigmas, DanceSDE(settings.eta), latents, seed)
    advantages = torch.randn(settings.batch, generator=generator_for(seed, "advantages")).to(backbone.device)
    return policy, trajectory, advantages


def prompts_of(backbone: Backbone, count: int) -> list[str]:
    """Returns a prompt per sample, taken in turn."""
    return [backbone.prompts[i % len(backbone.prompts)] for i in range(count)]
