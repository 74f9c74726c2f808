"""Time of a training step by estimator: rollout, decoding and reward, the update of each way, and the optimizer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.benchmark.utils.timer import timer

from bench.compiling import compile_blocks, compile_seconds, compiled_graphs, require_graphs, uncompiled
from bench.group import clear, gradient, load, prompts_of, verify, workload
from bench.noise import note_noise
from bench.rounds import time_in_rounds
from bench.settings import UpdateBench
from bench.speed_ups import PARTS
from jagg_core import (
    ClippedSurrogate,
    DanceSDE,
    Plan,
    Trajectory,
    VelocityPolicy,
    accumulate_gradients,
    exact_plan,
    jagg_plan,
)
from jagg_core.backbones import Backbone, read_options, schedule_of
from jagg_core.environment import command_line, environment
from jagg_core.objective import upstream_closed_form
from jagg_core.plans import groups_of, routed_groups
from jagg_core.records import Cell, Record, recorded
from jagg_core.reference import plain_gradient
from jagg_core.rewards import Reward, load_reward, score
from jagg_core.rollouts import rollout

REWARDS = {"digits": "ink", "photos": "redness"}
"""Reward by the data set that the samples look like, where none is asked for. Without a data set: decoding alone."""


@dataclass(frozen=True)
class Part:
    """Steps of an update that one call of the engine takes, and how."""

    steps: range
    plan: Plan
    upstream: str = "autograd"
    backward: str = "sequential"


@dataclass(frozen=True)
class Way:
    """A way to make an update: its parts, one after the other, and the plan on all steps that they amount to."""

    name: str
    plan: Plan
    parts: tuple[Part, ...]


def ways(trajectory: Trajectory, settings: UpdateBench) -> list[Way]:
    """Exact (twice, for the noise floor), the paper's recipe to the letter and in closed form, and calibrated plans."""
    sigmas, steps = trajectory.sigmas, range(trajectory.steps)
    exact, jagg = exact_plan(sigmas), jagg_plan(sigmas, settings.window, settings.jagg_frac)
    found = [Way(name, exact, (Part(steps, exact),)) for name in ("exact", "exact-again")]
    found.append(Way("exact-closed-form", exact, (Part(steps, exact, "closed_form"),)))
    found.append(Way("paper", jagg, tuple(paper_parts(sigmas, settings.window, settings.jagg_frac))))
    for backward in ("sequential", "batched"):
        found.append(Way(f"jagg-closed-form-{backward}", jagg, (Part(steps, jagg, "closed_form", backward),)))
    for passes in settings.passes:
        plan = Plan.from_calibration(settings.calibration, passes, predict=True, trajectory=trajectory)
        for backward in ("sequential", "batched"):
            found.append(Way(f"causal-{passes}-{backward}", plan, (Part(steps, plan, "closed_form", backward),)))
    return found


def paper_parts(sigmas: Tensor, window: int, jagg_frac: float) -> list[Part]:
    """The paper's scheme: a joint backward per approximated group, then all other steps one by one."""
    groups = groups_of(len(sigmas), window)
    count = routed_groups(len(groups), jagg_frac)
    found = [Part(g, jagg_plan(sigmas[g.start : g.stop], window, 1.0), backward="joint") for g in groups[:count]]
    rest = range(count * window, len(sigmas))
    return [*found, Part(rest, exact_plan(sigmas[rest.start :]))] if len(rest) else found


def run_update_bench(settings: UpdateBench, progress: Callable[[str], None] | None = None) -> Record:
    """Verify every way's gradient against a plain loop over its plan, then time them and the other parts, interleaved.

    A way or part that fails is recorded as failed and left out of the rounds. ``compile_s``: see `run_group_bench`.
    """
    where = environment()
    backbone = load(settings)
    reward = _reward(settings, backbone)
    policy, trajectory, advantages = workload(settings, backbone)
    compile_blocks(backbone, settings.compile)
    sigmas = schedule_of(backbone, settings.schedule, settings.steps, settings.shift)
    objective = ClippedSurrogate()
    parameters = [p for p in backbone.transformer.parameters() if p.requires_grad]
    upstream = [upstream_closed_form(objective, trajectory, j, advantages).gradient for j in range(trajectory.steps)]
    runs: dict[str, Callable[[], object]] = {}
    cells: list[Cell] = []
    graphs = compiled_graphs()
    compared = ways(trajectory, settings)
    for number, way in enumerate(compared, 1):
        runs[way.name] = _runner(way, policy, trajectory, advantages)
        with recorded(cells, way.name) as cell:
            before = compile_seconds()
            with uncompiled(settings.compile):
                expected = plain_gradient(policy, parameters, trajectory, upstream, way.plan)
            clear(parameters)
            runs[way.name]()
            require_graphs(settings.compile, graphs)
            error = verify(gradient(parameters), expected, settings.dtype)
            compiling = compile_seconds() - before
            cell.values = {"relative_error": error, "passes": way.plan.passes, "compile_s": compiling}
        if progress is not None:
            progress(f"verified {way.name}, {number} of {len(compared)} ways")
    optimizer = Optimizer(parameters, gradient(parameters))
    runs["rollout"] = lambda: rollout(policy, sigmas, DanceSDE(settings.eta), trajectory.latents[0], settings.seed)
    runs["reward"] = lambda: _judge(backbone, reward, trajectory.final)
    runs["optimizer"] = optimizer.step
    said = {"reward": {"reward": reward.name if reward is not None else None}}

    def execute(name: str) -> dict[str, float]:
        clear(parameters)
        if name == "optimizer":
            optimizer.prepare()
        start = timer()
        runs[name]()
        return {"total_s": timer() - start}

    for name in PARTS:
        if name == "reward" and read_options(settings.backbone, settings.backbone_options).get("random_weights"):
            cells.append(Cell(name, "skipped", "a model with random weights has no decoder"))
            continue
        with recorded(cells, name, **said.get(name, {})) as cell:
            before = compile_seconds()
            execute(name)
            cell.values = {"compile_s": compile_seconds() - before}
    time_in_rounds(cells, execute, settings.rounds, settings.seed, progress)
    clear(parameters)
    record = Record(
        kind="update-speed",
        command=command_line(),
        backbone=settings.backbone,
        settings=dict(vars(settings)),
        seeds={"rollout": [settings.seed]},
        schedule=trajectory.sigmas.tolist(),
        environment=where,
        cells=cells,
    )
    note_noise(record)
    return record


def _reward(settings: UpdateBench, backbone: Backbone) -> Reward | None:
    name = settings.reward or REWARDS.get(backbone.dataset or "")
    return load_reward(name, dataset=backbone.dataset, device=settings.device) if name else None


def _judge(backbone: Backbone, reward: Reward | None, latents: Tensor) -> None:
    """Decode, and score if there is a reward."""
    images = backbone.decode(latents)
    if reward is not None:
        score(reward, images, prompts_of(backbone, len(latents)))


class Optimizer:
    """The optimizer's part of a training step, on copies of the parameters: those that are timed stay the rollout's.

    AdamW at 1e-5 with weight decay 1e-4, gradient norm clipped to 1.
    """

    def __init__(self, parameters: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
        self.gradients = gradients
        self.copies = [p.detach().clone().requires_grad_() for p in parameters]
        self.adamw = torch.optim.AdamW(self.copies, lr=1e-5, weight_decay=1e-4)

    def prepare(self) -> None:
        """Gradients as an update leaves them."""
        for copy, given in zip(self.copies, self.gradients, strict=True):
            copy.grad = given.clone()

    def step(self) -> None:
        """What is timed."""
        torch.nn.utils.clip_grad_norm_(self.copies, 1.0)
        self.adamw.step()
        self.adamw.zero_grad()


def _runner(way: Way, policy: VelocityPolicy, trajectory: Trajectory, advantages: Tensor) -> Callable[[], None]:
    parts = [(part, trajectory.select(part.steps)) for part in way.parts]

    def run() -> None:
        for part, steps in parts:
            modes: dict[str, Any] = {"upstream": part.upstream, "backward": part.backward, "partly_clipped": "keep"}
            accumulate_gradients(policy, steps, advantages, part.plan, ClippedSurrogate(), **modes)

    return run
