"""Rollout batches of a backbone, each named by a purpose and a number."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from analysis.measure.study import Recipe
from jagg_core import Trajectory, VelocityPolicy, group_advantages, initial_latents, rollout
from jagg_core.backbones import Backbone
from jagg_core.rewards import Reward, score
from jagg_core.seeding import derive_seed, generator_for


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
    """Derives the seed of a batch; batches of different purposes never share one."""
    return derive_seed(recipe.seed, "rollout", repr(eta), purpose, number)


def check_prompts(recipe: Recipe, backbone: Backbone) -> None:
    """Raises ValueError unless the backbone has as many prompts as a batch draws."""
    if recipe.prompts > len(backbone.prompts):
        raise ValueError(f"prompts must be at most {len(backbone.prompts)} for {backbone.name}, got {recipe.prompts}")


@dataclass(frozen=True)
class Start:
    """What a rollout begins with: prompts of B samples, their numbers ``[B]``, and noise ``[B, *D]``."""

    seed: int
    policy: VelocityPolicy
    prompts: list[str]
    prompt_ids: Tensor
    latents: Tensor

    def scored(self, trajectory: Trajectory, backbone: Backbone, reward: Reward) -> Batch:
        """Scores the final samples and centres the advantages per prompt."""
        rewards = score(reward, backbone.decode(trajectory.final), self.prompts)
        advantages = group_advantages(rewards, self.prompt_ids.to(rewards.device))
        return Batch(self.seed, self.policy, trajectory, self.prompts, rewards, advantages)


def start(backbone: Backbone, recipe: Recipe, seed: int, *, shared_noise: bool = False) -> Start:
    """Draws prompts and noise; with ``shared_noise`` all samples of a prompt begin with the same.

    Raises:
        ValueError: more prompts per batch than the backbone has.
    """
    check_prompts(recipe, backbone)
    chosen = torch.randperm(len(backbone.prompts), generator=generator_for(seed, "prompts"))[: recipe.prompts]
    prompt_ids = chosen.repeat_interleave(recipe.samples)
    prompts = [backbone.prompts[i] for i in prompt_ids.tolist()]
    ids = [i - i % recipe.samples if shared_noise else i for i in range(recipe.batch)]
    latents = initial_latents(backbone.latent_shape, seed, ids).to(backbone.device)
    return Start(seed, backbone.policy(prompts, recipe.guidance), prompts, prompt_ids, latents)


def make_batch(backbone: Backbone, reward: Reward, recipe: Recipe, eta: float, purpose: str, number: int) -> Batch:
    """Draws prompts, rolls out, scores, and centres the advantages per prompt.

    Raises:
        ValueError: more prompts per batch than the backbone has.
    """
    begun = start(backbone, recipe, rollout_seed(recipe, eta, purpose, number))
    trajectory = rollout(
        begun.policy,
        recipe.sigmas(backbone),
        recipe.kernel(eta),
        begun.latents,
        begun.seed,
        timestep_mode=recipe.timestep_mode,
    )
    return begun.scored(trajectory, backbone, reward)
