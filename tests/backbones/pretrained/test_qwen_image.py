"""What is special about Qwen-Image: text of its own length, a call that has moved, guidance that keeps the norm."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers.models.transformers import transformer_qwenimage
from torch import Tensor, nn

from jagg_core import initial_latents
from jagg_core.backbones import load_backbone
from jagg_core.backbones.pretrained.qwen_image import VARIANTS, QwenImage, text_lengths
from jagg_core.backbones.pretrained.text import Text, TextBatch
from jagg_core.schedule import qwen_image_schedule
from tests.backbones.pretrained.conftest import PROMPTS, TINY

Folders = Callable[[str], Path]
GRID = (4, 6)
SUFFIX = 5
"""Tokens of the template behind the prompt."""


def load(path: Path, dtype: torch.dtype = torch.float32, **options: Any) -> QwenImage:
    backbone = load_backbone("qwen-image", dtype=dtype, path=str(path), **(TINY["qwen-image"].options | options))
    assert isinstance(backbone, QwenImage)
    return backbone


@pytest.fixture
def backbone(folders: Folders) -> QwenImage:
    return load(folders("qwen-image"))


def velocity(backbone: QwenImage, guidance: float | None = None, prompts: tuple[str, ...] = PROMPTS) -> Tensor:
    latents = initial_latents(backbone.latent_shape, 0, range(len(prompts)))
    sigma = torch.linspace(0.9991, 0.2, len(prompts))
    with torch.no_grad():
        return backbone.policy(prompts, guidance).velocity(latents, sigma, torch.arange(len(prompts)))


class Stub(nn.Module):
    """The transformer behind another signature; keeps what it was given."""

    def __init__(self, transformer: nn.Module) -> None:
        super().__init__()
        self.inner = transformer
        self.given: dict[str, Any] = {}

    def run(self, arguments: dict[str, Any]) -> Any:
        self.given = arguments
        return self.inner(**arguments)


class Requires(Stub):
    """diffusers before 0.37: positions are as many as the largest length."""

    def forward(self, txt_seq_lens: list[int] | None = None, **arguments: Any) -> Any:
        assert max(txt_seq_lens) == arguments["encoder_hidden_states"].shape[1]  # type: ignore[arg-type]
        return self.run(arguments)


class Ignores(Stub):
    """diffusers 0.37 and 0.38."""

    def forward(self, txt_seq_lens: list[int] | None = None, **arguments: Any) -> Any:
        return self.run(arguments)


class Rejects(Stub):
    """diffusers from 0.39 on."""

    def forward(
        self,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor,
        encoder_hidden_states_mask: Tensor | None,
        timestep: Tensor,
        img_shapes: list[Any],
        return_dict: bool,
    ) -> Any:
        return self.run({key: value for key, value in locals().items() if key not in ("self", "__class__")})


@pytest.mark.parametrize("stub", [Requires, Ignores, Rejects])
def test_text_lengths_are_told_to_a_transformer_that_takes_them(stub: type[Stub], backbone: QwenImage) -> None:
    expected = velocity(backbone)
    behind = stub(backbone.transformer)
    backbone._transformer = behind
    torch.testing.assert_close(velocity(backbone), expected, atol=0, rtol=0)
    assert behind.given["encoder_hidden_states_mask"].dtype == torch.bool
    assert behind.given["img_shapes"] == [[(1, *GRID)]] * 2 * len(PROMPTS)


def test_lengths_cover_the_padding_of_a_batch_of_short_prompts() -> None:
    texts = TextBatch.stack([Text(torch.ones(length, 2)) for length in (3, 2, 7)])
    assert text_lengths(Requires(nn.Identity()), texts[torch.tensor([1, 0])]) == {"txt_seq_lens": [7, 7]}


def test_a_release_that_does_not_use_the_mask_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(transformer_qwenimage, "compute_text_seq_len_from_mask")
    equal, padded = (TextBatch.stack([Text(torch.ones(n, 2)) for n in lengths]) for lengths in ((3, 3), (3, 2)))
    assert text_lengths(Requires(nn.Identity()), equal) == {"txt_seq_lens": [3, 3]}
    with pytest.raises(ValueError, match=r"diffusers 0\.37"):
        text_lengths(Requires(nn.Identity()), padded)
    assert text_lengths(Rejects(nn.Identity()), padded) == {}


def test_a_prompt_is_encoded_at_its_own_length(backbone: QwenImage) -> None:
    assert [len(text.tokens) for text in backbone.text(["a red fox", "a"])] == [9 + SUFFIX, 1 + SUFFIX]


def test_text_tokens_cut_a_prompt(folders: Folders, backbone: QwenImage) -> None:
    cut = load(folders("qwen-image"), text_tokens=4)
    (short,), (whole,) = cut.text(["a red fox"]), backbone.text(["a red fox"])
    torch.testing.assert_close(short.tokens, whole.tokens[:4])


def test_padding_is_not_read(backbone: QwenImage) -> None:
    latents, sigma = initial_latents(backbone.latent_shape, 0, range(2)), torch.tensor([0.7, 0.7])
    texts = TextBatch.stack(backbone.text(PROMPTS[:2]))
    assert texts.mask is not None
    other = TextBatch(texts.tokens.masked_fill(~texts.mask.unsqueeze(-1), 3.0), texts.mask)
    with torch.no_grad():
        found, expected = (backbone.call(latents, sigma, text, None) for text in (other, texts))
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-6)


def test_the_schedule_is_the_fields(backbone: QwenImage) -> None:
    torch.testing.assert_close(backbone.schedule(10), qwen_image_schedule(10, GRID[0] * GRID[1]), atol=1e-6, rtol=0)


def test_one_step_is_refused(backbone: QwenImage) -> None:
    with pytest.raises(ValueError, match=r"steps must be at least 2 .* got 1"):
        backbone.schedule(1)


def test_guidance_keeps_the_norm_of_every_token(backbone: QwenImage) -> None:
    conditional, unconditional = torch.randn(2, 3, 24, 16, generator=torch.Generator().manual_seed(0)).double()
    found = backbone.combine(conditional, unconditional, 4.0)
    torch.testing.assert_close(found.norm(dim=-1), conditional.norm(dim=-1))
    direction = unconditional + 4 * (conditional - unconditional)
    torch.testing.assert_close(
        found / found.norm(dim=-1, keepdim=True), direction / direction.norm(dim=-1, keepdim=True)
    )


def test_guidance_against_the_prompt_itself_is_none(folders: Folders) -> None:
    backbone = load(folders("qwen-image"), negative_prompt=PROMPTS[0])
    prompts = PROMPTS[:1] * 2
    torch.testing.assert_close(velocity(backbone, 4.0, prompts), velocity(backbone, 1.0, prompts))


def test_the_network_gets_sigma_in_full_precision(folders: Folders) -> None:
    backbone, seen = load(folders("qwen-image"), torch.bfloat16), []
    transformer: Any = backbone.transformer
    transformer.time_text_embed.time_proj.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    velocity(backbone, guidance=1.0)
    torch.testing.assert_close(seen, [torch.linspace(0.9991, 0.2, len(PROMPTS))], atol=0, rtol=0)


@pytest.mark.parametrize("lora_rank", [0, 2])
def test_what_nothing_reads_is_frozen(lora_rank: int, folders: Folders) -> None:
    backbone = load(folders("qwen-image"), lora_rank=lora_rank)
    trained = [(n, p) for n, p in backbone.transformer.named_parameters() if lora_rank == 0 or "lora_" in n]
    frozen = {name for name, p in trained if not p.requires_grad}
    end = ("transformer_blocks.1.attn.to_add_out.", "transformer_blocks.1.txt_mlp.")
    assert frozen == {name for name, _ in trained if name.startswith(end)} != set()
    for _, parameter in trained:
        parameter.requires_grad_(True)
    latents = initial_latents(backbone.latent_shape, 0, range(1))
    backbone.policy(["a"], 1.0).velocity(latents, torch.tensor([0.5]), torch.tensor([0])).sum().backward()
    assert {name for name, p in trained if p.grad is None} == frozen


def test_lora_adapts_every_layer_it_names(folders: Folders) -> None:
    backbone = load(folders("qwen-image"), lora_rank=2)
    adapted = [name.split(".lora_A")[0] for name, _ in backbone.transformer.named_parameters() if "lora_A" in name]
    blocks, targets = len(backbone.blocks), backbone.lora_targets
    assert sorted(adapted) == sorted(f"transformer_blocks.{block}.{t}" for block in range(blocks) for t in targets)


@pytest.mark.parametrize("variant", VARIANTS)
def test_other_models_of_the_class_are_refused(variant: str, folders: Folders, tmp_path: Path) -> None:
    folder = shutil.copytree(folders("qwen-image"), tmp_path / "variant")
    config = folder / "transformer" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {variant: True}))
    with pytest.raises(ValueError, match=f"path: .*{variant}.* must be"):
        load(folder)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"height": 18}, "height must be a positive multiple of 4, got 18; nearest: 16"),
        ({"frames": 5}, "frames must be 1"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(options: dict[str, Any], message: str, folders: Folders) -> None:
    with pytest.raises(ValueError, match=message):
        load(folders("qwen-image"), **options)


def test_more_text_than_the_pipeline_reads_is_refused(folders: Folders) -> None:
    with pytest.raises(ValueError, match="text_tokens must be at most 1024 for qwen-image, got 2000"):
        load(folders("qwen-image"), text_tokens=2000)
