"""What is special about Z-Image: reversed time and output, texts of their own length, guidance that 1 turns off."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from jagg_core import initial_latents
from jagg_core.backbones import load_backbone
from jagg_core.backbones.pretrained.z_image import ZImage
from tests.backbones.pretrained.conftest import PROMPTS, TINY

Folders = Callable[[str], Path]
SIGMAS = torch.tensor([0.9, 0.5, 0.2])


def load(folders: Folders, name: str = "z-image-turbo", **options: Any) -> ZImage:
    backbone = load_backbone(name, path=str(folders(name)), **(TINY[name].options | options))
    assert isinstance(backbone, ZImage)
    return backbone


def velocity(backbone: ZImage, guidance: float | None = None, sigmas: Tensor = SIGMAS) -> Tensor:
    latents = initial_latents(backbone.latent_shape, 0, range(3))
    with torch.no_grad():
        return backbone.policy(PROMPTS, guidance).velocity(latents, sigmas, torch.arange(3))


def outputs_of(backbone: ZImage, prompt: str, latents: Tensor, sigma: float) -> Tensor:
    """The network's own output for one sample, as the pipeline calls it."""
    (text,) = backbone.text([prompt])
    with torch.no_grad():
        output: Tensor = backbone._transformer([latents.unsqueeze(1)], torch.tensor([1 - sigma]), [text.tokens])[0][0]
    return output.squeeze(1)


def test_the_velocity_is_the_negated_output(folders: Folders) -> None:
    backbone = load(folders)
    latents = initial_latents(backbone.latent_shape, 0, range(3))
    found = velocity(backbone)
    for row, prompt in enumerate(PROMPTS):
        theirs = -outputs_of(backbone, prompt, latents[row], SIGMAS[row].item())
        torch.testing.assert_close(found[row], theirs, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_time_embedding_sees_one_minus_sigma_in_fp32(dtype: torch.dtype, folders: Folders) -> None:
    backbone = load(folders, dtype=dtype)
    seen: list[Tensor] = []
    embedding = backbone.transformer.get_submodule("t_embedder")
    embedding.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    sigmas = torch.tensor([1.0, 0.50123, 0.00456])
    velocity(backbone, sigmas=sigmas)
    torch.testing.assert_close(seen[0], (1 - sigmas) * 1000, atol=0, rtol=0)
    assert seen[0].dtype == torch.float32 and seen[0][0] == 0


def test_texts_of_a_batch_keep_their_length(folders: Folders) -> None:
    backbone = load(folders)
    seen: list[list[Tensor]] = []
    backbone.transformer.register_forward_pre_hook(lambda module, args: seen.append(args[2]))
    velocity(backbone)
    lengths = [len(text.tokens) for text in backbone.text(list(PROMPTS))]
    assert [len(text) for text in seen[0]] == lengths
    padded = [-(-length // 32) * 32 for length in lengths]
    assert len(set(lengths)) == 3 and len(set(padded)) == 2  # one length up to 32 tokens, and a longer one


def test_padding_is_read_and_learned(folders: Folders) -> None:
    backbone = load(folders)
    before, transformer = velocity(backbone), backbone._transformer
    latents = initial_latents(backbone.latent_shape, 0, range(3))
    backbone.policy(PROMPTS).velocity(latents, SIGMAS, torch.arange(3)).square().sum().backward()
    for token in (transformer.x_pad_token, transformer.cap_pad_token):
        assert token.grad is not None and token.grad.abs().max() > 0
        kept = token.detach().clone()
        with torch.no_grad():
            token.neg_()
        assert not torch.allclose(velocity(backbone), before, atol=1e-4)
        with torch.no_grad():
            token.copy_(kept)


def test_guidance_of_one_is_none(folders: Folders) -> None:
    base = load(folders, "z-image")
    alone, plain = velocity(base, 1.0), velocity(load(folders), 1.0)
    torch.testing.assert_close(alone, plain)
    torch.testing.assert_close(velocity(base, 1.001), alone, atol=1e-2, rtol=0)
    assert not torch.allclose(velocity(base), alone, atol=1e-2)


def test_guidance_is_one_more_than_the_pipelines(folders: Folders) -> None:
    base = load(folders, "z-image")
    latents = initial_latents(base.latent_shape, 0, range(3))
    sigma, theirs = 0.5, 2.0
    with_prompt, without = (outputs_of(base, prompt, latents[0], sigma) for prompt in (PROMPTS[0], ""))
    expected = -(with_prompt + theirs * (with_prompt - without))
    found = velocity(base, theirs + 1, torch.full([3], sigma))[0]
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_turbo_refuses_guidance(folders: Folders) -> None:
    with pytest.raises(ValueError, match=r"guidance must be 1 for z-image-turbo, which is distilled, got 4"):
        load(folders).policy(PROMPTS, 4.0)


def test_the_schedule_is_shifted_by_the_folders_constant(folders: Folders) -> None:
    for name, shift in (("z-image-turbo", 3.0), ("z-image", 6.0)):
        grid = torch.linspace(1, 1 / 8, 8, dtype=torch.float64)
        expected = torch.cat([shift * grid / (1 + (shift - 1) * grid), torch.zeros(1, dtype=torch.float64)])
        torch.testing.assert_close(load(folders, name).schedule(8), expected, atol=1e-6, rtol=0)


def test_a_prompt_is_cut_at_text_tokens(folders: Folders) -> None:
    short = load(folders, text_tokens=8)
    assert [len(text.tokens) for text in short.text(list(PROMPTS))] == [8, 8, 4]


def test_sizes_are_whole_tokens(folders: Folders) -> None:
    with pytest.raises(ValueError, match="width must be a positive multiple of 4, got 18"):
        load(folders, width=18)
    assert load(folders, width=20, height=12).latent_shape == (4, 6, 10)
