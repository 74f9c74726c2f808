"""Wan: frames, the VAE in fp32, one timestep per token or per sample, and two experts by sigma."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from jagg_core import initial_latents
from jagg_core.backbones import load_backbone
from jagg_core.backbones.pretrained.wan import Experts, Wan
from jagg_core.policy import has_reentrant_checkpointing
from jagg_core.schedule import sd3_schedule
from tests.backbones.pretrained.conftest import PROMPTS, TINY
from tests.backbones.pretrained.tiny_wan import BOUNDARY

Folders = Callable[[str], Path]
ONE, TOKENS, EXPERTS = "wan2.1-1.3b", "wan2.2-5b", "wan2.2-a14b"
EVERY = (ONE, TOKENS, EXPERTS)
DTYPES = (torch.float32, torch.bfloat16)


def load(path: Path, name: str = ONE, dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    backbone = load_backbone(name, dtype=dtype, path=str(path), **(TINY[name].options | options))
    assert isinstance(backbone, Wan)
    return backbone


def velocity(backbone: Wan, sigmas: Sequence[float], guidance: float = 5.0) -> Tensor:
    latents = initial_latents(backbone.latent_shape, 0, range(len(sigmas)))
    rows = torch.arange(len(sigmas))
    prompts = [PROMPTS[row % len(PROMPTS)] for row in rows]
    return backbone.policy(prompts, guidance).velocity(latents, torch.tensor(sigmas, dtype=torch.float64), rows)


def listen(module: nn.Module) -> list[Tensor]:
    """What the module will be given first in each call."""
    seen: list[Tensor] = []
    module.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    return seen


@pytest.mark.parametrize(("frames", "near"), [(6, 5), (8, 9), (0, 1), (-3, 1), (80, 81)])
def test_frames_come_in_fours_and_one(frames: int, near: int, folders: Folders) -> None:
    with pytest.raises(ValueError, match=rf"frames must be 4 k \+ 1, got {frames}; nearest: {near}$"):
        load(folders(ONE), frames=frames)


def test_sizes_that_do_not_fit_are_refused(folders: Folders) -> None:
    with pytest.raises(ValueError, match="width must be a positive multiple of 8, got 20; nearest: 16"):
        load(folders(ONE), width=20)
    with pytest.raises(ValueError, match="height must be a positive multiple of 16, got 24"):
        load(folders(TOKENS), TOKENS, height=24)  # its VAE makes a latent of twice as many pixels


@pytest.mark.parametrize(
    ("name", "frames", "shape"), [(ONE, 1, (4, 1, 4, 8)), (ONE, 9, (4, 3, 4, 8)), (TOKENS, 9, (6, 3, 2, 4))]
)
def test_latents_decode_to_the_frames_that_were_asked_for(
    name: str, frames: int, shape: tuple[int, ...], folders: Folders
) -> None:
    backbone = load(folders(name), name, frames=frames)
    assert backbone.latent_shape == shape
    assert backbone.decode_video(torch.zeros(1, *shape)).shape == (1, 3, frames, 16, 32)


def test_the_vae_stays_in_fp32(folders: Folders) -> None:
    full, half = (load(folders(ONE), dtype=dtype) for dtype in DTYPES)
    latents = initial_latents(full.latent_shape, 0, range(1))
    assert torch.equal(half.decode_video(latents), full.decode_video(latents))


def test_the_dtype_is_the_layers_not_that_of_the_tables(folders: Folders) -> None:
    backbone = load(folders(ONE), dtype=torch.bfloat16)
    assert backbone.transformer.scale_shift_table.dtype == torch.float32  # diffusers keeps it so
    assert backbone.dtype == torch.bfloat16 and backbone.policy(["a"]).signature()["dtype"] == "bfloat16"


def test_text_is_padded_with_zeros(folders: Folders) -> None:
    backbone = load(folders(ONE))
    tokens = backbone.text(["a"])[0].tokens
    read = int(tokens.any(dim=1).sum())
    assert tokens.shape == (24, 16) and 1 <= read < 5 and not tokens[read:].any()


def test_flow_shift_becomes_the_shift_of_euler(folders: Folders, tmp_path: Path) -> None:
    backbone = load(folders(ONE))
    assert backbone.configs.scheduler["_class_name"] == "UniPCMultistepScheduler"
    assert backbone.scheduler_config() == {"num_train_timesteps": 1000, "shift": 3.0}
    torch.testing.assert_close(backbone.schedule(10), sd3_schedule(10, shift=3.0), atol=1e-6, rtol=0)
    shutil.copytree(folders(ONE), tmp_path / "model")
    euler = {"_class_name": "FlowMatchEulerDiscreteScheduler", "shift": 5.0}
    (tmp_path / "model" / "scheduler" / "scheduler_config.json").write_text(json.dumps(euler))
    torch.testing.assert_close(load(tmp_path / "model").schedule(10), sd3_schedule(10, shift=5.0), atol=1e-6, rtol=0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_timestep_per_token_equals_one_per_sample(dtype: torch.dtype, folders: Folders) -> None:
    backbone = load(folders(TOKENS), TOKENS, dtype)
    seen = listen(backbone.transformer.condition_embedder.time_embedder)
    embedded = listen(backbone.transformer.condition_embedder.timesteps_proj)
    latents = initial_latents(backbone.latent_shape, 0, range(3)).to(dtype)
    tokens = latents[0, 0].numel() // 4
    sigma, text = torch.tensor([0.9991, 0.8747, 0.2003]), torch.stack([t.tokens for t in backbone.text(PROMPTS)])
    found = []
    with torch.no_grad():
        for timestep in (sigma, sigma[:, None].expand(-1, tokens)):
            with backbone.timestep.given(sigma):
                found.append(backbone.transformer(latents, timestep.to(dtype), text, return_dict=False)[0])
    torch.testing.assert_close(found[1], found[0], atol=1e-6, rtol=1e-6)
    assert torch.equal(embedded[0], sigma * 1000)
    assert torch.equal(embedded[1], (sigma * 1000).repeat_interleave(tokens))
    assert seen[0].shape[:-1] == (3,) and seen[1].shape[:-1] == (3, tokens)


@pytest.mark.parametrize("name", EVERY)
def test_checkpointing_changes_nothing(name: str, folders: Folders) -> None:
    plain, checkpointed = load(folders(name), name), load(folders(name), name)
    checkpointed.enable_gradient_checkpointing()
    networks = [m for m in checkpointed.transformer.modules() if hasattr(m, "is_gradient_checkpointing")]
    assert len(networks) == (2 if name == EXPERTS else 1) and all(m.is_gradient_checkpointing for m in networks)
    found = [velocity(backbone, [0.9, 0.5, 0.2]) for backbone in (plain, checkpointed)]
    assert not has_reentrant_checkpointing(found[1])
    for backbone_velocity in found:
        backbone_velocity.square().sum().backward()
    torch.testing.assert_close(found[1], found[0], atol=1e-6, rtol=1e-6)
    for ours, theirs in zip(checkpointed.transformer.parameters(), plain.transformer.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_sample_goes_to_the_expert_of_its_exact_sigma(dtype: torch.dtype, folders: Folders) -> None:
    backbone = load(folders(EXPERTS), EXPERTS, dtype)
    experts = (backbone.transformer.high, backbone.transformer.low)
    high, low = (listen(expert.condition_embedder.timesteps_proj) for expert in experts)
    below = 0.8749
    assert torch.tensor(below).bfloat16() == BOUNDARY  # what half precision would take it for
    sigmas = [0.3, BOUNDARY, below, 0.95]
    with torch.no_grad():
        together = velocity(backbone, sigmas, guidance=1.0)
    assert torch.equal(high[0], torch.tensor([BOUNDARY, 0.95]) * 1000)
    assert torch.equal(low[0], torch.tensor([0.3, below]) * 1000)
    latents = initial_latents(backbone.latent_shape, 0, range(4)).to(dtype)
    for row, expert in enumerate(experts[place] for place in (1, 0, 1, 0)):
        sigma, text = torch.tensor(sigmas[row : row + 1]), backbone.text([PROMPTS[row % 3]])[0].tokens
        with torch.no_grad(), backbone.timestep.given(sigma):
            alone = expert(latents[row : row + 1], sigma.to(dtype), text[None], return_dict=False)[0]
        error = (together[row] - alone[0]).float().norm() / alone.float().norm()
        assert error < (1e-5 if dtype == torch.float32 else 1e-2)


def test_a_batch_of_one_expert_leaves_the_other_alone(folders: Folders) -> None:
    backbone = load(folders(EXPERTS), EXPERTS)
    seen = listen(backbone.transformer.high.condition_embedder.timesteps_proj)
    velocity(backbone, [0.5, 0.2]).square().sum().backward()
    trained = [p.grad is not None for p in backbone.transformer.low.parameters()]
    assert seen == [] and all(trained) and all(p.grad is None for p in backbone.transformer.high.parameters())


def test_both_experts_are_sharded_and_adapted(folders: Folders) -> None:
    backbone = load(folders(EXPERTS), EXPERTS, lora_rank=2)
    transformer: Experts = backbone.transformer
    assert backbone.blocks == [*transformer.high.blocks, *transformer.low.blocks]  # type: ignore[misc]
    trained = [[key for key, p in e.named_parameters() if p.requires_grad] for e in (transformer.high, transformer.low)]
    assert trained[0] == trained[1] and len(trained[0]) > 0 and all("lora_" in key for key in trained[0])
    velocity(backbone, [0.9, 0.5]).square().sum().backward()
    gradients = {key: p.grad for key, p in transformer.named_parameters() if "lora_B" in key}
    assert all(gradient is not None and gradient.any() for gradient in gradients.values())


def test_a_folder_of_other_experts_is_refused(folders: Folders, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"holds two experts, of which this model has one; use wan2\.2-a14b"):
        load(folders(EXPERTS), ONE)
    with pytest.raises(ValueError, match=r"must hold two experts: no boundary_ratio in its model_index\.json"):
        load(folders(ONE), EXPERTS)
    shutil.copytree(folders(EXPERTS), tmp_path / "model", ignore=shutil.ignore_patterns("transformer_2"))
    with pytest.raises(ValueError, match=r"has no transformer_2/, which its model_index.json names"):
        load(tmp_path / "model", EXPERTS)
    (tmp_path / "model" / "model_index.json").unlink()
    with pytest.raises(ValueError, match=r"model_index\.json cannot be read as JSON"):
        load(tmp_path / "model", EXPERTS)
