"""FLUX.1: guidance that is embedded or not, positions, and the timestep in half precision."""

from __future__ import annotations

import logging
import pickle
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch

from jagg_core import initial_latents, sample_ode
from jagg_core.backbones import load_backbone
from jagg_core.backbones.pretrained import PretrainedBackbone
from jagg_core.backbones.pretrained.packed import grid_ids, token_shift, unpack
from jagg_core.schedule import flux_schedule
from tests.backbones.pretrained.conftest import FLUX_OPTIONS

Folders = Callable[[str], Path]


def load(folders: Folders, name: str, dtype: torch.dtype = torch.float32, **options: Any) -> PretrainedBackbone:
    backbone = load_backbone(name, dtype=dtype, path=str(folders(name)), **(FLUX_OPTIONS | options))
    assert isinstance(backbone, PretrainedBackbone)
    return backbone


def seen_by(backbone: PretrainedBackbone, samples: int, guidance: float | None, sigma: float = 0.5) -> tuple[Any, ...]:
    """What the time embedding is given in one call."""
    seen: list[tuple[Any, ...]] = []
    hook = backbone.transformer.get_submodule("time_text_embed").register_forward_pre_hook(
        lambda _, args: seen.append(args)
    )
    policy = backbone.policy(["a cat"] * samples, guidance)
    latents = initial_latents(backbone.latent_shape, 0, range(samples))
    with torch.no_grad():
        policy.velocity(latents, torch.full((samples,), sigma), torch.arange(samples))
    hook.remove()
    return seen[0]


@pytest.mark.parametrize("samples", [1, 3])
def test_embedded_guidance_has_one_number_per_sample(samples: int, folders: Folders) -> None:
    timestep, guidance, pooled = seen_by(load(folders, "flux-dev"), samples, None)
    assert timestep.tolist() == [500.0] * samples
    assert guidance.tolist() == [3500.0] * samples  # diffusers multiplies by 1000, as it does with the timestep
    assert pooled.shape == (samples, 16)


def test_guidance_moves_the_velocity(folders: Folders) -> None:
    backbone = load(folders, "flux-dev")
    latents, sigma, rows = initial_latents(backbone.latent_shape, 0, range(1)), torch.tensor([0.5]), torch.tensor([0])
    one, four = (backbone.policy(["a cat"], g).velocity(latents, sigma, rows) for g in (1.0, 4.0))
    assert not torch.allclose(one, four, atol=1e-4)


def test_schnell_embeds_none(folders: Folders) -> None:
    assert len(seen_by(load(folders, "flux-schnell"), 2, None)) == 2  # timestep and pooled text, no guidance
    with pytest.raises(ValueError, match=r"guidance must be 1 for flux-schnell, which is distilled, got 3\.5"):
        load(folders, "flux-schnell").policy(["a cat"], 3.5)


def test_missing_guidance_says_what_to_do(folders: Folders) -> None:
    backbone = load(folders, "flux-dev")
    text = backbone.policy(["a cat"])._texts
    with pytest.raises(ValueError, match=r"guidance must be a number for flux-dev, got None; usual: 3\.5"):
        backbone.call(initial_latents(backbone.latent_shape, 0, range(1)), torch.tensor([0.5]), text, None)


@pytest.mark.parametrize("guidance", [0.0, -1.0, float("nan"), float("inf")])
def test_guidance_out_of_range(guidance: float, folders: Folders) -> None:
    with pytest.raises(ValueError, match="guidance must be positive and finite, got"):
        load(folders, "flux-dev").policy(["a cat"], guidance)


@pytest.mark.parametrize("prompts", ["a cat", [], ()])
def test_prompts_are_a_sequence(prompts: Any, folders: Folders) -> None:
    with pytest.raises(ValueError, match="prompts must be a sequence of at least one prompt"):
        load(folders, "flux-dev").policy(prompts)


@pytest.mark.parametrize("sigma", [0.9643, 0.0029])
def test_the_timestep_is_not_rounded_in_bf16(sigma: float, folders: Folders) -> None:
    timestep, _, _ = seen_by(load(folders, "flux-dev", torch.bfloat16), 2, None, sigma)
    torch.testing.assert_close(timestep, torch.full((2,), sigma * 1000), rtol=1e-6, atol=0)


def test_no_deprecated_shape_of_positions(folders: Folders, caplog: pytest.LogCaptureFixture) -> None:
    """Positions with a batch dimension are deprecated, and warn at every forward."""
    logger = logging.getLogger("diffusers")
    backbone = load(folders, "flux-dev")
    logger.addHandler(caplog.handler)
    try:
        sample_ode(
            backbone.policy(["a"] * 2), backbone.schedule(16), initial_latents(backbone.latent_shape, 0, range(2))
        )
    finally:
        logger.removeHandler(caplog.handler)
    assert [record.message for record in caplog.records] == []


def test_positions_and_packing_are_the_pipelines() -> None:
    from diffusers import FluxPipeline

    ids = FluxPipeline._prepare_latent_image_ids(1, 3, 5, "cpu", torch.float32)
    assert torch.equal(grid_ids(3, 5, torch.device("cpu")), ids)
    pixels = torch.arange(2 * 4 * 6 * 10.0).reshape(2, 4, 6, 10)
    packed = FluxPipeline._pack_latents(pixels, 2, 4, 6, 10)
    assert torch.equal(unpack(packed, 3, 5), pixels)


def test_the_schedule_is_the_folders_own(folders: Folders) -> None:
    dev, schnell = load(folders, "flux-dev"), load(folders, "flux-schnell")
    torch.testing.assert_close(dev.schedule(8), flux_schedule(8, dev.latent_shape[0]), atol=1e-6, rtol=0)
    assert token_shift(schnell.configs, 256) == {}
    torch.testing.assert_close(schnell.schedule(4), torch.tensor([1, 0.75, 0.5, 0.25, 0]).double(), atol=1e-6, rtol=0)
    assert dev.schedule(8).tolist() == dev.schedule(8).tolist()  # asked twice, shifted once
    with pytest.raises(ValueError, match="steps must be at least 1, got 0"):
        dev.schedule(0)


def test_a_folder_with_dynamic_shifting_needs_mu(folders: Folders) -> None:
    from diffusers import FlowMatchEulerDiscreteScheduler

    scheduler = FlowMatchEulerDiscreteScheduler.from_config(load(folders, "flux-dev").scheduler_config())
    with pytest.raises(ValueError, match="mu"):
        scheduler.set_timesteps(4)


def test_signatures_tell_settings_apart(folders: Folders) -> None:
    one, wide = load(folders, "flux-dev"), load(folders, "flux-dev", width=16)
    told = one.policy(["a"]).signature()
    assert told["guidance"] == "3.5" and told["size"] == "16x24x1" and str(one.folder.path) not in repr(told)
    others = [one.policy(["b"]), one.policy(["a"], 2.0), one.policy(["a", "a"]), wide.policy(["a"])]
    assert all(policy.signature() != told for policy in others)
    # a plan that was calibrated on the weights serves a LoRA of them; a replay tells them apart by the weights
    assert load(folders, "flux-dev", lora_rank=2).policy(["a"]).signature() == told
    assert one.policy(["a"], 4).signature() == one.policy(["a"], 4.0).signature()


def test_a_pipeline_on_the_trained_transformer_is_left_alone(folders: Folders) -> None:
    """What a policy told its transformer ends with the call."""
    import diffusers

    backbone = load(folders, "flux-dev")
    plain = diffusers.FluxPipeline.from_pretrained(folders("flux-dev"))
    latents = initial_latents(backbone.latent_shape, 0, range(1))
    settings = {"num_inference_steps": 3, "height": 16, "width": 24, "max_sequence_length": 24, "latents": latents}

    def run() -> torch.Tensor:
        found: torch.Tensor = plain("a cat", output_type="latent", return_dict=False, **settings)[0]
        return found

    plain.set_progress_bar_config(disable=True)
    expected = run()
    plain.transformer = backbone.transformer
    assert torch.equal(run(), expected)
    backbone.policy(["a"] * 3).velocity(latents.repeat(3, 1, 1), torch.full((3,), 0.1), torch.arange(3))
    assert torch.equal(run(), expected)


def test_sigmas_that_do_not_fit_the_forward(folders: Folders) -> None:
    backbone = load(folders, "flux-dev")
    policy, latents = backbone.policy(["a"] * 3), initial_latents(backbone.latent_shape, 0, range(3))
    refusal = pytest.raises(ValueError, match="timesteps must be a multiple of the 2 sigmas given, got 3")
    with refusal, backbone.timestep.given(torch.ones(2)):
        backbone.call(latents, torch.ones(3), policy._texts[torch.zeros(3).long()], 3.5)


@pytest.mark.parametrize("copy", [deepcopy, lambda made: pickle.loads(pickle.dumps(made))], ids=["deepcopy", "pickle"])
def test_copies_are_of_their_own(copy: Callable[[Any], Any], folders: Folders) -> None:
    backbone = load(folders, "flux-dev")
    again = copy(backbone)
    latents, sigma = initial_latents(backbone.latent_shape, 0, range(1)), torch.tensor([0.5])
    with torch.no_grad():
        first = backbone.policy(["a"]).velocity(latents, sigma, torch.tensor([0]))
        assert torch.equal(again.policy(["a"]).velocity(latents, sigma, torch.tensor([0])), first)
        next(again.transformer.parameters()).add_(1)
        assert torch.equal(backbone.policy(["a"]).velocity(latents, sigma, torch.tensor([0])), first)
