"""Time of a whole update by estimator, beside the rollout that goes before it: what a training step is made of."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.utils.benchmark.utils.timer import timer

from bench.group import TOLERANCE, GroupBench, load, plain_gradient, relative_error, workload
from bench.rounds import time_in_rounds
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
from jagg_core.backbones import schedule_of
from jagg_core.objective import upstream_closed_form
from jagg_core.plan import groups_of, routed_groups
from jagg_core.records import Cell, Record, command_line, environment, recorded
from jagg_core.trajectory import rollout

ROLLOUT = "rollout"
"""Name of the cell that times a rollout without gradients."""


@dataclass(frozen=True)
class UpdateBench(GroupBench):
    """Settings: those of a group, the paper's fraction of groups, and a calibration whose causal plans are timed.

    Raises:
        ValueError: a setting out of range, or passes that were not calibrated.
    """

    backbone: str = "photos-flux"
    window: int = 4
    batch: int = 6
    rounds: int = 7
    jagg_frac: float = 0.6
    calibration: str = ""
    passes: tuple[int, ...] = (8, 5)

    def __post_init__(self) -> None:
        super().__post_init__()
        routed_groups(1, self.jagg_frac)
        if self.calibration:
            for passes in self.passes:
                Plan.from_calibration(self.calibration, passes, predict=True)


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
    for passes in settings.passes if settings.calibration else ():
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
    """Verify every way's gradient against a plain loop over its plan, then time them and a rollout, interleaved.

    A way that fails is recorded as failed and left out of the rounds.
    """
    backbone = load(settings)
    policy, trajectory, advantages = workload(settings, backbone)
    sigmas = schedule_of(backbone, settings.schedule, settings.steps, settings.shift)
    objective = ClippedSurrogate()
    parameters = [p for p in backbone.transformer.parameters() if p.requires_grad]
    upstream = [upstream_closed_form(objective, trajectory, j, advantages).gradient for j in range(trajectory.steps)]
    runs: dict[str, Callable[[], object]] = {
        ROLLOUT: lambda: rollout(policy, sigmas, DanceSDE(settings.eta), trajectory.latents[0], settings.seed)
    }
    cells: list[Cell] = []
    for way in ways(trajectory, settings):
        runs[way.name] = _runner(way, policy, trajectory, advantages)
        with recorded(cells, way.name) as cell:
            expected = plain_gradient(policy, parameters, trajectory, upstream, way.plan)
            _clear(parameters)
            runs[way.name]()
            found = [p.grad if p.grad is not None else torch.zeros_like(p) for p in parameters]
            error, limit = relative_error(found, expected), TOLERANCE[getattr(torch, settings.dtype)]
            if not error <= limit:
                raise ArithmeticError(f"gradient differs from the plain loop by {error:.2g} (limit {limit:g})")
            cell.values = {"relative_error": error, "passes": way.plan.passes}
        if progress is not None:
            progress(f"verified {way.name}")
    cells.append(Cell(ROLLOUT))

    def execute(name: str) -> dict[str, float]:
        _clear(parameters)
        start = timer()
        runs[name]()
        return {"total_s": timer() - start}

    time_in_rounds(cells, execute, settings.rounds, settings.seed, progress)
    _clear(parameters)
    return Record(
        kind="update-speed",
        command=command_line(),
        backbone=settings.backbone,
        settings=dict(vars(settings)),
        seeds={"rollout": [settings.seed]},
        schedule=trajectory.sigmas.tolist(),
        environment=environment(),
        cells=cells,
    )


def _runner(way: Way, policy: VelocityPolicy, trajectory: Trajectory, advantages: Tensor) -> Callable[[], None]:
    parts = [(part, trajectory.select(part.steps)) for part in way.parts]

    def run() -> None:
        for part, steps in parts:
            modes: dict[str, Any] = {"upstream": part.upstream, "backward": part.backward, "partly_clipped": "keep"}
            accumulate_gradients(policy, steps, advantages, part.plan, ClippedSurrogate(), **modes)

    return run


def _clear(parameters: Sequence[Tensor]) -> None:
    for parameter in parameters:
        parameter.grad = None


def speed_ups(record: Record) -> list[dict[str, Any]]:
    """Speed-up over exact of every way: in backward passes, of the update, and of rollout and update together."""
    times = {c.name: median(t for t in c.samples["total_s"] if t is not None) for c in record.cells if c.status == "ok"}
    rolled = times.pop(ROLLOUT)
    passes = {cell.name: cell.values["passes"] for cell in record.cells if cell.status == "ok" and cell.values}
    return [
        {
            "way": name,
            "passes": passes[name],
            "seconds": time,
            "backward": passes["exact"] / passes[name],
            "update": times["exact"] / time,
            "step": (rolled + times["exact"]) / (rolled + time),
        }
        for name, time in times.items()
    ]
