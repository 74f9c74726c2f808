"""Rollout batches of a backbone, each named by a purpose and a number."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from analysis.statistics.names import USUAL
from jagg_core import Trajectory, Transition, VelocityPolicy, group_advantages, initial_latents, rollout
from jagg_core.backbones import Backbone, ScheduleName, check_schedule, schedule_of
from jagg_core.checks import require_at_least, require_one_of
from jagg_core.rewards import Reward, score
from jagg_core.schedule import TimestepMode
from jagg_core.seeding import derive_seed, generator_for
from jagg_core.transitions import TRANSITIONS


@dataclass(frozen=True)
class Recipe:
    """How rollouts are made. The defaults are DanceGRPO's kernel and shift; steps and eta are ours.

    Attributes:
        steps: sampling steps.
        shift: time shift of the schedule "dance".
        schedule: sigmas; "own" are those of the backbone's sampler.
        transition: kernel of the SDE steps, as the trainer has it.
        timestep_mode: what the network is told instead of sigma, as the trainer has it.
        prompts: of a rollout batch.
        samples: per prompt.
        guidance: scale; None is the backbone's usual one.
        seed: of prompts, latents and noise.

    Raises:
        ValueError: a setting out of range.
    """

    steps: int = 21
    shift: float = 3.0
    schedule: ScheduleName = "dance"
    transition: Literal["dance", "flow", "cps"] = "dance"
    timestep_mode: TimestepMode = "float"
    prompts: int = 2
    samples: int = 3
    guidance: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        require_at_least(self, steps=3, prompts=1, samples=2)
        check_schedule(self.schedule, self.steps, self.shift)
        require_one_of("transition", self.transition, tuple(TRANSITIONS))
        require_one_of("timestep_mode", self.timestep_mode, TimestepMode)
        if self.guidance is not None and not math.isfinite(self.guidance):
            raise ValueError(f"guidance must be finite, found {self.guidance}")

    @property
    def batch(self) -> int:
        """Samples per rollout batch."""
        return self.prompts * self.samples

    def sigmas(self, backbone: Backbone) -> Tensor:
        """The schedule of a rollout, ``[steps + 1]``."""
        return schedule_of(backbone, self.schedule, self.steps, self.shift)

    def kernel(self, eta: float) -> Transition:
        """The SDE steps' kernel.

        Raises:
            ValueError: ``eta`` out of range for it.
        """
        return TRANSITIONS[self.transition](eta)

    def key(self) -> dict[str, Any]:
        """By what a stored table is found."""
        return {name: v for name, v in asdict(self).items() if name not in USUAL or v != USUAL[name]}


@dataclass(frozen=True)
class Batch:
    """One rollout batch with its rewards and per-prompt advantages, each ``[B]``."""

    seed: int
    policy: VelocityPolicy
    trajectory: Trajectory
    prompts: list[str]
    rewards: Tensor
    advantages: Tensor


def rollout_seed(recipe: Recipe, eta: float, purpose: str, number: int) -> int:
    """The seed of a batch; batches of different purposes never share one."""
    return derive_seed(recipe.seed, "rollout", repr(eta), purpose, number)


def check_prompts(recipe: Recipe, backbone: Backbone) -> None:
    """Raise ValueError unless the backbone has as many prompts as a batch draws."""
    if recipe.prompts > len(backbone.prompts):
        raise ValueError(f"prompts must be at most {len(backbone.prompts)} for {backbone.name}, found {recipe.prompts}")


def make_batch(backbone: Backbone, reward: Reward, recipe: Recipe, eta: float, purpose: str, number: int) -> Batch:
    """Draw prompts, roll out, score, and centre the advantages per prompt.

    Raises:
        ValueError: more prompts per batch than the backbone has.
    """
    check_prompts(recipe, backbone)
    seed = rollout_seed(recipe, eta, purpose, number)
    chosen = torch.randperm(len(backbone.prompts), generator=generator_for(seed, "prompts"))[: recipe.prompts]
    prompt_ids = chosen.repeat_interleave(recipe.samples)
    prompts = [backbone.prompts[i] for i in prompt_ids.tolist()]
    policy = backbone.policy(prompts, recipe.guidance)
    latents = initial_latents(backbone.latent_shape, seed, range(recipe.batch)).to(backbone.device)
    trajectory = rollout(
        policy, recipe.sigmas(backbone), recipe.kernel(eta), latents, seed, timestep_mode=recipe.timestep_mode
    )
    rewards = score(reward, backbone.decode(trajectory.final), prompts)
    return Batch(seed, policy, trajectory, prompts, rewards, group_advantages(rewards, prompt_ids.to(rewards.device)))
