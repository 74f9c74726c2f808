"""Ways to get the gradient of a group of steps: plans that the engine runs, and bare model calls to hold it against."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from jagg_core import (
    ClippedSurrogate,
    Plan,
    Trajectory,
    VelocityPolicy,
    accumulate_gradients,
    endpoint_plan,
    exact_plan,
    jagg_plan,
    subsample_plan,
)
from jagg_core.objective import upstream_autograd
from jagg_core.seeding import generator_for

PHASES = ("forward", "upstream", "backward")


@dataclass(frozen=True)
class Group:
    """What every arm works on: one group of steps of a rollout.

    Attributes:
        policy, trajectory, advantages: as the engine takes them.
        parameters: trained ones.
        upstream: closed-form ``s_j`` of every step, of the bare calls and the plain loop.
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


Clock = Callable[[], float]


@dataclass(frozen=True)
class Arm:
    """One way to get a group's gradient.

    Attributes:
        name: of its cell.
        plan: what the engine runs; None where ``bare`` calls the model without it.
        upstream, backward: modes of the engine.
        bare: model calls; take the group and a clock or None, return seconds by phase.
        twin: plan that ``bare`` amounts to.
    """

    name: str
    plan: Plan | None
    upstream: str = "autograd"
    backward: str = "sequential"
    bare: Callable[[Group, Clock | None], dict[str, float]] | None = field(default=None, repr=False)
    twin: Plan | None = None

    @property
    def amounts_to(self) -> Plan:
        """The plan whose gradient this arm gives."""
        plan = self.plan or self.twin
        assert plan is not None
        return plan


def arms_for(sigmas: Tensor, window: int, seed: int = 0) -> list[Arm]:
    """The arms, on a single group of ``window`` steps with these ``sigmas``; ``seed`` draws the steps of subsample."""
    exact, jagg = exact_plan(sigmas), jagg_plan(sigmas, window, 1.0)
    two = subsample_plan(sigmas, 2, generator_for(seed, "subsample"))
    return [
        Arm("exact", exact),
        Arm("exact-again", exact),
        Arm("exact-bare", None, bare=_exact_calls, twin=exact),
        Arm("exact-batched", exact, "autograd", "batched"),
        Arm("prototype", None, bare=_prototype_calls, twin=jagg_plan(sigmas, window, 1.0, "index")),
        Arm("paper-joint", jagg, "autograd", "joint"),
        Arm("closed-form-sequential", jagg, "closed_form", "sequential"),
        Arm("closed-form-batched", jagg, "closed_form", "batched"),
        Arm("endpoint-only", endpoint_plan(sigmas, window), "autograd", "sequential"),
        Arm("subsample", two, "closed_form", "sequential"),
    ]


def _exact_calls(group: Group, clock: Clock | None) -> dict[str, float]:
    """Forward and backward of every step, ``s_j`` being given: the least that exact can cost. No phases."""
    for step, given in enumerate(group.upstream):
        velocity = group.policy.velocity(*group.trajectory.site(step), group.rows)
        torch.autograd.backward(velocity, given.to(velocity.dtype))
    return {}


def _prototype_calls(group: Group, clock: Clock | None) -> dict[str, float]:
    """The authors' prototype: all steps forward without a graph, then both ends again, each with its backward."""
    trajectory, rows, last = group.trajectory, group.rows, group.trajectory.steps - 1
    now = clock or (lambda: 0.0)
    seconds = dict.fromkeys(PHASES, 0.0)
    start = now()
    with torch.no_grad():
        velocities = [group.policy.velocity(*trajectory.site(step), rows) for step in range(trajectory.steps)]
    middle = now()
    totals = {0: torch.zeros_like(trajectory.latents[0]), last: torch.zeros_like(trajectory.latents[0])}
    for step, velocity in enumerate(velocities):
        found = upstream_autograd(ClippedSurrogate(), trajectory, step, velocity, group.advantages).gradient
        totals[0] += (1 - step / last) * found
        totals[last] += step / last * found
    seconds["upstream"] = now() - middle
    seconds["forward"] = middle - start
    for knot, total in totals.items():
        start = now()
        velocity = group.policy.velocity(*trajectory.site(knot), rows)
        middle = now()
        torch.autograd.backward(velocity, total.to(velocity.dtype))
        seconds["forward"] += middle - start
        seconds["backward"] += now() - middle
    return seconds


def run_arm(arm: Arm, group: Group, clock: Clock | None = None) -> dict[str, float]:
    """Add the arm's gradient into ``.grad``. With a clock it returns seconds by phase; bare exact has no phases."""
    if arm.bare is not None:
        return arm.bare(group, clock)
    modes: tuple[Any, ...] = (ClippedSurrogate(), arm.upstream, arm.backward)
    report = accumulate_gradients(
        group.policy, group.trajectory, group.advantages, arm.amounts_to, *modes, partly_clipped="keep", clock=clock
    )
    return report.seconds
