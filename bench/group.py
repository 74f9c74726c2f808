"""Time of one group of steps by estimator: every arm is verified against a plain loop, then timed, interleaved."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.utils.benchmark.utils.timer import timer

from bench.arms import Arm, Group, arms_for, run_arm
from bench.compiling import compile_blocks, compile_seconds, compiled_graphs, require_graphs, uncompiled
from bench.noise import note_noise
from bench.rounds import time_in_rounds
from bench.settings import GroupBench
from jagg_core import ClippedSurrogate, DanceSDE, Trajectory, VelocityPolicy, initial_latents, rollout
from jagg_core.backbones import Backbone, load_backbone, read_options, schedule_of
from jagg_core.environment import command_line, environment
from jagg_core.objective import upstream_closed_form
from jagg_core.records import Cell, Record, recorded
from jagg_core.reference import TOLERANCE, plain_gradient, relative_error
from jagg_core.seeding import derive_seed, generator_for


def time_arm(arm: Arm, group: Group) -> dict[str, float]:
    """Seconds of an arm, ``total_s``, and of its phases: of a second call where a clock between them would wait.

    So a total waits for the device at its ends alone, however short its kernels are. To every phase of the second call
    the wait adds what it takes to launch anew, some ten microseconds: nothing beside a pass through a network, which is
    why phases need no events of the device.
    """
    clear(group.parameters)
    start = timer()
    phases = run_arm(arm, group, None if group.asynchronous else timer)
    total = timer() - start
    if group.asynchronous:
        clear(group.parameters)
        phases = run_arm(arm, group, timer)
    return {"total_s": total, **{f"{phase}_s": seconds for phase, seconds in phases.items()}}


def clear(parameters: Sequence[Tensor]) -> None:
    """Let go of all gradients."""
    for parameter in parameters:
        parameter.grad = None


def gradient(parameters: Sequence[Tensor]) -> list[Tensor]:
    """What is in ``.grad``; zeros where there is nothing."""
    return [p.grad if p.grad is not None else torch.zeros_like(p) for p in parameters]


def verify(actual: Sequence[Tensor], expected: Sequence[Tensor], dtype: str) -> float:
    """Computes the relative error of a gradient.

    Raises:
        ArithmeticError: it is beyond the `TOLERANCE` of the network's ``dtype``.
    """
    error, limit = relative_error(actual, expected), TOLERANCE[getattr(torch, dtype)]
    if not error <= limit:
        raise ArithmeticError(f"gradient differs from the plain loop by {error:.2g} (limit {limit:g})")
    return error


def run_group_bench(settings: GroupBench, progress: Callable[[str], None] | None = None) -> Record:
    """Verify, then time every arm. Arms take turns in every round; their order is drawn anew each time.

    An arm's warm-up calls the network with and without a graph as the arm does, so that whatever is compiled or set up
    at a first call is so before the rounds; ``compile_s`` is what torch.compile took of it. An arm that fails is
    recorded as failed and left out of the rounds.
    """
    where = environment()
    group = load_group(settings)
    sigmas = group.trajectory.sigmas
    arms = {arm.name: arm for arm in arms_for(sigmas, settings.window, settings.seed)}
    cells: list[Cell] = []
    graphs = compiled_graphs()
    for number, arm in enumerate(arms.values(), 1):
        with recorded(cells, arm.name, upstream=arm.upstream, backward=arm.backward) as cell:
            plan, before = arm.amounts_to, compile_seconds()
            with uncompiled(settings.compile):
                expected = plain_gradient(group.policy, group.parameters, group.trajectory, group.upstream, plan)
            for _ in range(settings.warmup):
                time_arm(arm, group)
            require_graphs(settings.compile, graphs)
            error = verify(gradient(group.parameters), expected, settings.dtype)
            compiling = compile_seconds() - before
            cell.values = {"relative_error": error, "passes": plan.passes, "compile_s": compiling}
        if progress is not None:
            progress(f"verified {arm.name}, {number} of {len(arms)} arms")
    time_in_rounds(cells, lambda name: time_arm(arms[name], group), settings.rounds, settings.seed, progress)
    clear(group.parameters)
    record = Record(
        kind="group-speed",
        command=command_line(),
        backbone=settings.backbone,
        settings=dict(vars(settings)),
        seeds={"rollout": [settings.seed]},
        schedule=sigmas.tolist(),
        environment=where,
        cells=cells,
    )
    note_noise(record)
    return record


def load_group(settings: GroupBench) -> Group:
    """Load the backbone; its rollout's first group, and advantages."""
    backbone = load(settings)
    policy, trajectory, advantages = workload(settings, backbone)
    compile_blocks(backbone, settings.compile)
    trajectory = trajectory.select(range(settings.window))
    parameters = [p for p in backbone.transformer.parameters() if p.requires_grad]
    objective = ClippedSurrogate()
    upstream = [upstream_closed_form(objective, trajectory, j, advantages).gradient for j in range(trajectory.steps)]
    return Group(policy, trajectory, advantages, parameters, upstream)


def load(settings: GroupBench) -> Backbone:
    """The backbone, with gradient checkpointing if asked for. Its GPU becomes the one that the timer waits for."""
    options = read_options(settings.backbone, settings.backbone_options)
    backbone = load_backbone(settings.backbone, settings.device, getattr(torch, settings.dtype), **options)
    device = torch.device(settings.device)
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)
    if settings.checkpointing:
        backbone.enable_gradient_checkpointing()
    return backbone


def workload(settings: GroupBench, backbone: Backbone) -> tuple[VelocityPolicy, Trajectory, Tensor]:
    """A rollout, with standard normal advantages: timing does not depend on their values."""
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
    """A prompt per sample, taken in turn."""
    return [backbone.prompts[i % len(backbone.prompts)] for i in range(count)]
