"""Samples from held-out noise: their rewards, and pictures of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import adaptive_avg_pool2d

from jagg_core.distributed import FirstError, gathered, in_step, raise_together, rank, ranks
from jagg_core.grpo.sampling import Samples, samples_of
from jagg_core.rewards import score_in_update
from jagg_core.rollouts import sample_ode
from jagg_core.seeding import derive_seed

if TYPE_CHECKING:
    from jagg_core.grpo.trainer import GRPOTrainer

SIDE = 256
"""Pixels of a side to which larger images are reduced for a picture."""


@dataclass(frozen=True)
class HeldOut:
    """What held-out samples give.

    Attributes:
        rewards: means over the samples, by name; empty where they were not asked for.
        images: [N, C, H, W] in [0, 1], the samples of a prompt after each other; None where not asked for.
    """

    rewards: dict[str, float]
    images: Tensor | None


def held_out_prompts(trainer: GRPOTrainer) -> list[str]:
    """Lists the prompts of the held-out samples, each once per row of a picture."""
    pool: Sequence[str] = trainer.learner.backbone.prompts
    return [pool[i % len(pool)] for i in range(trainer.config.run.eval_prompts)]


@torch.no_grad()
def held_out(trainer: GRPOTrainer, *, score: bool = True, draw: bool = True) -> HeldOut:
    """Samples held-out noise by the ODE sampler, with the averaged weights if there are.

    Prompts and noise are the same at every call, and no generator of the training is used. Called on every rank.

    Args:
        trainer: whose policy samples.
        score: give mean rewards.
        draw: give images, at most `SIDE` pixels high and wide.

    Raises:
        RewardNotFinite, FloatingPointError: a value is not finite.
        RewardFailed: a reward raised another error. A decoder's is raised as it is.
        RankFailed: in their place on several ranks; names the ranks and their errors.
    """
    given, backbone = trainer.config.run, trainer.learner.backbone
    rewards = {trainer.config.reward.name: trainer.reward} | trainer.watched if score else {}
    samples_here = samples_of(held_out_prompts(trainer), given.eval_samples, rank(), ranks())
    values: dict[str, list[Tensor]] = {name: [] for name in rewards}
    pictures: list[Tensor] = []
    broken = FirstError()
    with trainer.learner.averaged():
        for samples in samples_here.split(trainer.config.rollout.micro_batch):
            with broken.keep(FloatingPointError):
                final = _final(trainer, samples)
            if broken.error is None:
                with broken.keep(Exception):
                    images = backbone.decode(final)
                    for name, reward in rewards.items():
                        values[name].append(score_in_update(reward, images, samples.prompts, trainer.update))
                    if draw:
                        pictures.append(_reduced(images))
            if broken.error is not None and ranks() == 1:
                break
    raise_together(broken.error, backbone.device)
    means = {name: float(gathered(torch.cat(scores)).mean()) for name, scores in values.items()}
    return HeldOut(means, gathered(torch.cat(pictures)) if draw else None)


def _final(trainer: GRPOTrainer, samples: Samples) -> Tensor:
    given, policy = trainer.config.rollout, trainer.learner.policy(samples.prompts)
    seed = derive_seed(trainer.config.run.seed, "evaluation")
    latents = trainer.latents(seed, samples.ids)
    with in_step(policy, latents, given.steps):
        return sample_ode(policy, trainer.sigmas, latents, timestep_mode=given.timestep_mode)


def _reduced(images: Tensor) -> Tensor:
    high, wide = images.shape[-2:]
    share = SIDE / max(high, wide)
    return adaptive_avg_pool2d(images, (round(high * share), round(wide * share))) if share < 1 else images
