"""What each rank does in test_sharding.py. A module of its own, since spawned processes import it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from jagg_core import ClippedSurrogate, Trajectory, accumulate_gradients, causal_plan, dance_schedule, initial_latents
from jagg_core.backbones import load_backbone
from jagg_core.backbones.pretrained import PretrainedBackbone
from jagg_core.rollouts import rollout
from jagg_core.transitions import DanceSDE
from tests.spawning import grouped

RANKS = 2
PROMPTS = ("a red fox", "a spoon")
ADVANTAGES = torch.tensor([1.0, -0.5])


def trajectory_of(backbone: PretrainedBackbone) -> Trajectory:
    """Rolled out by whatever the backbone is now."""
    latents = initial_latents(backbone.latent_shape, 0, range(len(PROMPTS)))
    return rollout(backbone.policy(PROMPTS), dance_schedule(5), DanceSDE(0.7), latents, seed=0)


def gradient_of(backbone: PretrainedBackbone, trajectory: Trajectory) -> dict[str, Tensor]:
    """The causal plan's gradient, whole, by parameter."""
    plan = causal_plan(trajectory.sigmas, knots=[0, 2])
    accumulate_gradients(backbone.policy(PROMPTS), trajectory, ADVANTAGES, plan, ClippedSurrogate())
    found = {}
    for name, parameter in backbone.transformer.named_parameters():
        if parameter.grad is not None:
            gradient: Any = parameter.grad
            found[name] = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient.clone()
            parameter.grad = None
    return found


def compare(name: str, options: dict[str, Any]) -> dict[str, float]:
    """Relative errors of the sharded backbone to the plain one: of the final latents, and of the gradient."""
    from torch.distributed.fsdp import fully_shard

    backbone = load_backbone(name, **options)
    assert isinstance(backbone, PretrainedBackbone)
    backbone.enable_gradient_checkpointing()
    plain = trajectory_of(backbone)
    expected = gradient_of(backbone, plain)
    for block in backbone.blocks:
        fully_shard(block)
    fully_shard(backbone.transformer)
    sharded = trajectory_of(backbone)
    found = gradient_of(backbone, sharded)
    assert found.keys() == expected.keys()
    difference = sum((found[key] - expected[key]).double().square().sum() for key in expected)
    size = sum(gradient.double().square().sum() for gradient in expected.values())
    drift = (sharded.final - plain.final).norm() / plain.final.norm()
    return {"final": float(drift), "gradient": float(difference / size) ** 0.5}


def work(rank: int, folder: Path) -> dict[str, dict[str, float]]:
    """Compare every backbone that ``todo.json`` names; every rank has the same samples."""
    todo = json.loads((folder / "todo.json").read_text())
    with grouped(folder / "rendezvous", rank, RANKS):
        return {name: compare(name, options) for name, options in todo.items()}
