"""The gradient of a micro-batch, by the upstream gradients that the settings name."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor
from torch.utils.benchmark.utils.timer import timer

from jagg_core.choices import UpstreamMode
from jagg_core.engine import Meter, Report, accumulate_gradients
from jagg_core.forward import awm_upstream, nft_upstream
from jagg_core.grpo.plans import make_plan
from jagg_core.grpo.sampling import Samples
from jagg_core.pathwise import adjoint_sweep, pathwise_upstream
from jagg_core.policy import VelocityPolicy
from jagg_core.rewards import differentiable
from jagg_core.seeding import derive_seed
from jagg_core.trajectory import Trajectory

if TYPE_CHECKING:
    from jagg_core.grpo.trainer import GRPOTrainer

FORWARD = ("awm", "nft")
"""Upstream gradients at re-noised samples."""


@dataclass
class Collected:
    """A micro-batch.

    Attributes:
        samples: prompts and numbers of its samples.
        policy: drew them.
        rollout: steps, or re-noised samples.
        steps: those that are trained, ``[B, T]``; None: all.
        rewards: ``[B]``.
        old: velocities of the policy as it was then, ``[T, B, *D]``, for DiffusionNFT.
    """

    samples: Samples
    policy: VelocityPolicy
    rollout: Trajectory
    steps: Tensor | None
    rewards: Tensor
    old: Tensor | None = None

    @property
    def trajectory(self) -> Trajectory:
        """The trained steps."""
        return self.rollout if self.steps is None else self.rollout.select(self.steps)


def plan_seed(trainer: GRPOTrainer) -> int:
    """Derives the seed of an update's random plans."""
    return derive_seed(trainer.config.run.seed, "plan", trainer.update)


def accumulate(
    trainer: GRPOTrainer, batch: Collected, advantages: Tensor, inside: range, samples: int, meter: Meter | None
) -> Report:
    """Adds the gradient of some samples of a micro-batch; the loss is the mean over ``samples`` and their steps.

    Args:
        trainer: its settings, plan and objective.
        batch: the micro-batch.
        advantages: of the micro-batch, or their slopes for pathwise gradients, ``[B]``.
        inside: places of the samples in the micro-batch.
        samples: of the optimizer step, over all ranks' shares of it.
        meter: audits this call, or not.
    """
    trajectory, given = batch.trajectory, trainer.plan
    scale = 1 / (samples * trajectory.steps)
    if given.upstream == "pathwise":
        return _pathwise(trainer, batch, advantages, scale)
    if len(inside) < trajectory.batch:
        trajectory = trajectory.cut(inside)
    advantages = advantages[inside.start : inside.stop]
    plan = make_plan(given, trajectory.sigmas, plan_seed(trainer), trajectory)
    if given.upstream in FORWARD:
        advantages = trainer.objective.clip_advantages(advantages).to(trajectory.latents)
        if batch.old is None:
            upstream = awm_upstream(trajectory, advantages)
        else:
            old, clip = batch.old[:, inside.start : inside.stop], trainer.config.objective.adv_clip
            upstream = nft_upstream(trajectory, advantages, old, beta=given.nft_beta, clip=clip)
        return accumulate_gradients(
            batch.policy, trajectory, None, plan, None, upstream, given.backward, scale=scale, clock=timer
        )
    reference = trainer.learner.reference(batch.samples.prompts) if trainer.objective.kl_beta > 0 else None
    return accumulate_gradients(
        batch.policy,
        trajectory,
        advantages,
        plan,
        trainer.objective,
        cast(UpstreamMode, given.upstream),
        given.backward,
        reference=reference,
        scale=scale,
        partly_clipped=given.partly_clipped,
        clock=timer,
        audit=meter,
    )


def _pathwise(trainer: GRPOTrainer, batch: Collected, slopes: Tensor, scale: float) -> Report:
    """Adds the gradient of a micro-batch by the reward's gradient along its rollout."""
    given, whole, trajectory = trainer.plan, batch.rollout, batch.trajectory
    reward = differentiable(trainer.reward, trainer.learner.backbone.decode, batch.samples.prompts)
    plan = make_plan(given, trajectory.sigmas, plan_seed(trainer), trajectory)
    knots = plan.knots if given.sweep == "knots" else ()
    adjoint = adjoint_sweep(batch.policy, whole, reward, sweep=given.sweep, knots=knots, schedule=trainer.sigmas)
    upstream = pathwise_upstream(whole, adjoint, slopes.to(whole.latents))
    if batch.steps is not None:
        upstream = upstream[batch.steps.T, torch.arange(whole.batch)]
    report = accumulate_gradients(
        batch.policy, trajectory, None, plan, None, upstream, given.backward, scale=scale, clock=timer
    )
    return replace(report, forwards=report.forwards + adjoint.forwards)
