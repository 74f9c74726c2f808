"""What is special about FLUX.2: positions in four coordinates, batch statistics, its schedule, guidance."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from jagg_core import initial_latents
from jagg_core.backbones import load_backbone
from jagg_core.backbones.pretrained.flux2 import Flux2, batch_statistics, positions
from jagg_core.backbones.pretrained.packed import unpack
from tests.backbones.pretrained.conftest import PROMPTS, TINY

Folders = Callable[[str], Path]
SIGMAS = torch.tensor([0.9, 0.5, 0.2])


def load(folders: Folders, name: str, **options: Any) -> Flux2:
    tiny = TINY["flux2-dev"].options
    backbone = load_backbone(name, path=str(folders(options.pop("folder", name))), **(tiny | options))
    assert isinstance(backbone, Flux2)
    return backbone


def velocity(backbone: Flux2, guidance: float | None = None, sigmas: Tensor = SIGMAS) -> Tensor:
    latents = initial_latents(backbone.latent_shape, 0, range(3))
    with torch.no_grad():
        return backbone.policy(PROMPTS, guidance).velocity(latents, sigmas, torch.arange(3))


def arguments_of(module: torch.nn.Module) -> list[tuple[Any, ...]]:
    """Positional arguments of the calls that follow."""
    seen: list[tuple[Any, ...]] = []
    module.register_forward_pre_hook(lambda module, args: seen.append(args))
    return seen


def test_positions_are_those_of_the_pipeline() -> None:
    from diffusers import Flux2Pipeline

    ours = positions(3, 5, 1, torch.device("cpu")), positions(1, 1, 700, torch.device("cpu"))
    theirs = (
        Flux2Pipeline._prepare_latent_ids(torch.zeros(1, 2, 3, 5))[0],
        Flux2Pipeline._prepare_text_ids(torch.zeros(1, 700, 2))[0],
    )
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    assert positions(1, 1, 700, torch.device("cpu"))[-1].tolist() == [0, 0, 0, 699]  # half precision has no 699


def test_unpacking_is_that_of_the_pipeline() -> None:
    from diffusers import Flux2Pipeline

    latents = torch.randn(2, 8, 6, 10)
    packed = Flux2Pipeline._pack_latents(Flux2Pipeline._patchify_latents(latents))
    assert torch.equal(unpack(packed, 3, 5), latents)


def test_decoding_undoes_the_batch_statistics(folders: Folders) -> None:
    backbone = load(folders, "flux2-dev")
    latents = initial_latents(backbone.latent_shape, 0, range(2))
    images, vae = backbone.decode(latents), backbone._vae
    mean, std = batch_statistics(vae)
    with torch.no_grad():
        undone = vae.decode(unpack(latents * std + mean, 4, 6), return_dict=False)[0]
    torch.testing.assert_close(images, (undone / 2 + 0.5).clamp(0, 1))
    vae.bn.running_mean.zero_()
    assert not torch.allclose(backbone.decode(latents), images, atol=1e-3)


@pytest.mark.parametrize("name", ["flux2-dev", "flux2-klein-base-4b"])
def test_the_shift_follows_tokens_and_steps(name: str, folders: Folders) -> None:
    from diffusers.pipelines.flux2.pipeline_flux2 import compute_empirical_mu

    backbone = load(folders, name)
    for steps in (4, 28):
        mu = torch.tensor(compute_empirical_mu(image_seq_len=24, num_steps=steps), dtype=torch.float64)
        grid = torch.linspace(1, 1 / steps, steps, dtype=torch.float64)
        expected = torch.cat([mu.exp() / (mu.exp() + 1 / grid - 1), torch.zeros(1, dtype=torch.float64)])
        torch.testing.assert_close(backbone.schedule(steps), expected, atol=1e-6, rtol=0)
    assert backbone.schedule_arguments(4)["mu"] != backbone.schedule_arguments(28)["mu"]
    larger = load(folders, name, height=32)
    assert larger.schedule_arguments(4)["mu"] != backbone.schedule_arguments(4)["mu"]


def test_guidance_reaches_its_embedding_times_1000_for_every_row(folders: Folders) -> None:
    backbone = load(folders, "flux2-dev")
    seen = arguments_of(backbone.transformer.get_submodule("time_guidance_embed"))
    velocity(backbone)
    velocity(backbone, guidance=2.5)
    usual, lower = (args[1] for args in seen)
    assert usual.tolist() == [4000.0] * 3 and lower.tolist() == [2500.0] * 3
    assert not torch.equal(velocity(backbone), velocity(backbone, guidance=2.5))


def test_a_prompt_has_one_guidance_alone_and_in_a_batch(folders: Folders) -> None:
    backbone = load(folders, "flux2-dev")
    latents = initial_latents(backbone.latent_shape, 0, range(3))
    with torch.no_grad():
        alone = backbone.policy([PROMPTS[1]], 2.5).velocity(latents[1:2], SIGMAS[1:2], torch.zeros(1).long())
    torch.testing.assert_close(velocity(backbone, 2.5)[1:2], alone, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["flux2-dev", "flux2-klein-4b"])
def test_the_time_embedding_sees_sigma_in_fp32(name: str, dtype: torch.dtype, folders: Folders) -> None:
    backbone = load(folders, name, dtype=dtype)
    embedding: Any = backbone.transformer.get_submodule("time_guidance_embed")
    seen = arguments_of(embedding.timestep_embedder)
    sigmas = torch.tensor([0.9999, 0.50123, 0.00456])
    velocity(backbone, sigmas=sigmas)
    (found,) = seen[0]
    assert torch.equal(found, embedding.time_proj(sigmas * 1000).to(dtype))
    rounded = sigmas.bfloat16() * 1000
    assert not torch.equal(found, embedding.time_proj(rounded).to(dtype))


def test_klein_needs_no_guidance(folders: Folders) -> None:
    with pytest.raises(ValueError, match=r"guidance must be 1 for flux2-klein-4b, which is distilled, got 4"):
        load(folders, "flux2-klein-4b").policy(PROMPTS, 4.0)
    base = load(folders, "flux2-klein-base-4b")
    torch.testing.assert_close(velocity(base, 1.0), velocity(load(folders, "flux2-klein-4b"), 1.0))
    assert not torch.allclose(velocity(base, 1.0), velocity(base), atol=1e-3)


def test_a_folder_of_dev_is_not_one_of_klein(folders: Folders) -> None:
    with pytest.raises(ValueError, match="must hold a Flux2KleinPipeline, got Flux2Pipeline: another model's"):
        load(folders, "flux2-klein-4b", folder="flux2-dev")


def test_lora_reaches_the_fused_layers_of_single_stream_blocks(folders: Folders) -> None:
    backbone = load(folders, "flux2-klein-4b", lora_rank=2)
    adapted = {key.split(".lora_A")[0] for key, _ in backbone.transformer.named_parameters() if "lora_A" in key}
    for place in range(2):
        assert f"single_transformer_blocks.{place}.attn.to_qkv_mlp_proj" in adapted
        assert f"single_transformer_blocks.{place}.attn.to_out" in adapted
    assert "transformer_blocks.0.attn.to_out.0" in adapted and "proj_out" not in adapted


@pytest.mark.parametrize("side", ["height", "width"])
def test_sizes_are_whole_tokens(side: str, folders: Folders) -> None:
    with pytest.raises(ValueError, match=f"{side} must be a positive multiple of 4, got 18"):
        load(folders, "flux2-dev", **{side: 18})


def test_checkpointing_gives_the_same_gradient(folders: Folders) -> None:
    plain, recomputed = load(folders, "flux2-klein-4b"), load(folders, "flux2-klein-4b")
    recomputed.enable_gradient_checkpointing()
    latents = initial_latents(plain.latent_shape, 0, range(3))
    for backbone in (plain, recomputed):
        backbone.policy(PROMPTS).velocity(latents, SIGMAS, torch.arange(3)).square().sum().backward()
    for (key, a), b in zip(plain.transformer.named_parameters(), recomputed.transformer.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, atol=1e-6, rtol=1e-5, msg=key)
