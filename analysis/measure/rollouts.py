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


def make_batch(backbone: Backbone, reward: Reward, recipe: Recipe, eta: float, purpose: str, number: int) -> Batch:
    """Draws prompts, rolls out, scores, and centres the advantages per prompt.

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
