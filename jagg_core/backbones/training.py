"""Rectified-flow training of the shipped backbones, from a seed.

Recipe: logit-normal sigma, AdamW with a one-cycle rate, gradient clip 1, 10 % of the prompts dropped, exponential
moving average of the weights. Needs the ``train`` extra.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from jagg_core.backbones.datasets import Crops, Labelled, digits, emoji, photos
from jagg_core.backbones.pixel import PixelSpec, save_pixel_weights
from jagg_core.checks import require_at_least


@dataclass(frozen=True)
class FlowTraining:
    """Settings of one training run."""

    steps: int
    batch: int = 64
    learning_rate: float = 1e-3
    ema_decay: float = 0.998
    prompt_dropout: float = 0.1
    seed: int = 0


RECIPES: dict[str, FlowTraining] = {
    "digits-flux": FlowTraining(steps=3000, batch=128),
    "photos-flux": FlowTraining(steps=2500, batch=64),
    "photos-qwen": FlowTraining(steps=2500, batch=64),
    "emoji-flux": FlowTraining(steps=2500, batch=32),
}
"""The settings that the shipped weights were trained with."""


def training_data(spec: PixelSpec) -> Crops | Labelled:
    """Loads the real images behind a specification."""
    if spec.dataset == "emoji":
        return emoji(spec.prompts, spec.size)
    return digits() if spec.dataset == "digits" else photos(spec.size)


def flow_loss(module: nn.Module, latents: Tensor, prompt_ids: Tensor, generator: torch.Generator) -> Tensor:
    """Computes the mean squared error of the velocity (noise minus data) at a logit-normal sigma; a scalar."""
    noise = torch.randn(latents.shape, generator=generator)
    sigma = torch.sigmoid(torch.randn(len(latents), generator=generator))
    blend = sigma[:, None, None]
    velocity = module(latents + blend * (noise - latents), sigma, prompt_ids)
    return (velocity - (noise - latents)).square().mean()


def one_cycle(optimizer: torch.optim.Optimizer, peak: float, steps: int) -> torch.optim.lr_scheduler.OneCycleLR:
    """Makes a one-cycle learning rate that peaks after a tenth of the steps."""
    # OneCycleLR divides by pct_start * total_steps - 1, which must not vanish
    pct_start = 0.1 if steps > 10 else 0.3
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=peak, total_steps=steps, pct_start=pct_start)


def train_pixel_backbone(
    spec: PixelSpec,
    settings: FlowTraining,
    path: Path,
    *,
    progress: Callable[[int, float], None] | None = None,
) -> float:
    """Trains from scratch and writes the averaged weights to ``path``. Returns the mean loss of the last 5 % of steps.

    ``progress(step, loss)`` is called after every step.

    Raises:
        FileNotFoundError: images to train on are not there; names the package that has them.
        ValueError: fewer than one step.
        FloatingPointError: the loss is not finite.
    """
    require_at_least(settings, steps=1, batch=1)
    data, rows = training_data(spec), spec.prompt_ids(spec.prompts)
    generator = torch.Generator().manual_seed(settings.seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings.seed)
        module = spec.build().train()
    averaged = deepcopy(module).eval().requires_grad_(False)
    optimizer = torch.optim.AdamW(module.parameters(), lr=settings.learning_rate, weight_decay=1e-2)
    schedule = one_cycle(optimizer, settings.learning_rate, settings.steps)
    losses: list[float] = []
    for step in range(settings.steps):
        images, labels = data.sample(settings.batch, generator)
        dropped = torch.rand(settings.batch, generator=generator) < settings.prompt_dropout
        prompt_ids = rows[labels]
        prompt_ids[dropped] = len(spec.words)
        loss = flow_loss(module, spec.encode(images), prompt_ids, generator)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        # a young average would remember the random start
        decay = min(settings.ema_decay, (1 + step) / (10 + step))
        torch._foreach_lerp_(list(averaged.parameters()), list(module.parameters()), 1 - decay)
        value = loss.item()
        if not value < float("inf"):
            raise FloatingPointError(f"the loss is {value} at step {step}")
        losses.append(value)
        if progress is not None:
            progress(step, value)
    tail = losses[-max(1, settings.steps // 20) :]
    final = sum(tail) / len(tail)
    save_pixel_weights(spec, averaged, path, {"loss": f"{final:.5f}", "settings": repr(settings)})
    return final
