"""Stable Diffusion 3.5: dual attention under checkpointing, three text encoders, positions that end."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from jagg_core import initial_latents
from jagg_core.backbones import load_backbone
from jagg_core.backbones.pretrained.sd3 import StableDiffusion3
from jagg_core.policy import has_reentrant_checkpointing
from jagg_core.schedule import dynamic_mu, sd3_schedule
from tests.backbones.pretrained.conftest import PROMPTS, TINY

Folders = Callable[[str], Path]
CLIP_TOKENS = 16


def load(path: Path, name: str = "sd3.5-medium", dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    backbone = load_backbone(name, dtype=dtype, path=str(path), **(TINY[name].options | options))
    assert isinstance(backbone, StableDiffusion3)
    return backbone


def velocity(backbone: StableDiffusion3, sigma: Tensor | None = None) -> Tensor:
    latents = initial_latents(backbone.latent_shape, 0, range(len(PROMPTS)))
    told = torch.tensor([0.9, 0.5, 0.2]) if sigma is None else sigma
    return backbone.policy(PROMPTS).velocity(latents, told, torch.arange(len(PROMPTS)))


@pytest.mark.parametrize("name", ["sd3.5-medium", "sd3.5-large"])
def test_checkpointing_changes_nothing(name: str, folders: Folders) -> None:
    plain, checkpointed = load(folders(name), name), load(folders(name), name)
    checkpointed.enable_gradient_checkpointing()
    assert checkpointed.transformer.is_gradient_checkpointing and not plain.transformer.is_gradient_checkpointing
    dual = [block.attn2 is not None for block in plain.blocks]
    assert dual == [name == "sd3.5-medium", False, False]
    found = [velocity(backbone) for backbone in (plain, checkpointed)]
    assert not has_reentrant_checkpointing(found[1])
    for backbone_velocity in found:
        backbone_velocity.square().sum().backward()
    torch.testing.assert_close(found[1], found[0], atol=1e-6, rtol=1e-6)
    for ours, theirs in zip(checkpointed.transformer.parameters(), plain.transformer.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, atol=1e-6, rtol=1e-4)


def test_both_attentions_of_a_dual_layer_are_adapted(folders: Folders) -> None:
    medium, large = (load(folders(name), name, lora_rank=2) for name in ("sd3.5-medium", "sd3.5-large"))
    adapted = {key.split(".lora_A")[0] for key, _ in medium.transformer.named_parameters() if "lora_A" in key}
    layer = {key.removeprefix("transformer_blocks.0.") for key in adapted if ".0." in key[:21]}
    assert layer == set(StableDiffusion3.lora_targets)
    assert not any("attn2" in key for key, _ in large.transformer.named_parameters())


def test_the_embedding_gets_the_exact_timestep_in_half_precision(folders: Folders) -> None:
    backbone, seen = load(folders("sd3.5-medium"), dtype=torch.bfloat16), []
    projection = backbone.transformer.time_text_embed.time_proj
    projection.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    sigma = torch.tensor([0.9991, 0.5003, 0.2007], dtype=torch.float64)
    with torch.no_grad():
        velocity(backbone, sigma)
    assert torch.equal(seen[0], torch.cat([sigma, sigma]).float() * 1000)


def test_text_is_both_clips_side_by_side_and_then_t5(folders: Folders) -> None:
    short, long = (load(folders("sd3.5-medium"), text_tokens=tokens).text(["a red fox"])[0] for tokens in (20, 24))
    assert short.tokens.shape == (CLIP_TOKENS + 20, 16) and long.tokens.shape == (CLIP_TOKENS + 24, 16)
    torch.testing.assert_close(short.tokens[:CLIP_TOKENS], long.tokens[:CLIP_TOKENS])
    assert short.pooled is not None and short.pooled.shape == (16,)
    first, second = short.pooled.chunk(2)  # both encoders have the same weights
    torch.testing.assert_close(first, second)


@pytest.mark.parametrize("side", ["height", "width"])
def test_sizes_beyond_the_positions_are_refused(side: str, folders: Folders) -> None:
    allowed: dict[str, Any] = {side: 48}
    beyond: dict[str, Any] = {side: 52}
    assert load(folders("sd3.5-medium"), **allowed).latent_shape.count(24) == 1
    with pytest.raises(ValueError, match=f"{side} must be at most 48, where the model's positions end, got 52"):
        load(folders("sd3.5-medium"), **beyond)


@pytest.mark.parametrize(("options", "message"), [({"height": 18}, "multiple of 4"), ({"frames": 5}, "must be 1")])
def test_sizes_that_do_not_fit_are_refused(options: dict[str, Any], message: str, folders: Folders) -> None:
    with pytest.raises(ValueError, match=message):
        load(folders("sd3.5-medium"), **options)


def test_the_schedule_has_a_fixed_shift(folders: Folders) -> None:
    backbone = load(folders("sd3.5-medium"))
    torch.testing.assert_close(backbone.schedule(10), sd3_schedule(10, shift=3.0), atol=1e-6, rtol=0)
    assert torch.equal(backbone.schedule(10), backbone.schedule(10))


def test_a_scheduler_that_shifts_with_the_size_is_followed(folders: Folders, tmp_path: Path) -> None:
    shutil.copytree(folders("sd3.5-medium"), tmp_path / "model")
    file = tmp_path / "model" / "scheduler" / "scheduler_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"use_dynamic_shifting": True}))
    backbone = load(tmp_path / "model")
    assert backbone.schedule_arguments(4) == {"mu": dynamic_mu(4 * 6)}
    assert not torch.allclose(backbone.schedule(4), sd3_schedule(4, shift=3.0), atol=1e-2)
