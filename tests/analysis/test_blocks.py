"""Blocks by name, on real names of diffusers' transformers and of peft's adapters."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from analysis.statistics.parameter_kinds import OTHER, RULES, block_of, ordered_blocks, parameter_blocks
from tests.jagg_core.fields import MlpField


def flux(diffusers: Any) -> nn.Module:
    return diffusers.FluxTransformer2DModel(
        patch_size=1,
        in_channels=4,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=8,
        pooled_projection_dim=8,
        guidance_embeds=True,
        axes_dims_rope=(4, 4, 8),
    )


def qwen_image(diffusers: Any) -> nn.Module:
    return diffusers.QwenImageTransformer2DModel(
        patch_size=2,
        in_channels=16,
        out_channels=4,
        num_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=8,
        axes_dims_rope=(4, 4, 8),
    )


def sd3(diffusers: Any) -> nn.Module:
    return diffusers.SD3Transformer2DModel(
        sample_size=4,
        patch_size=1,
        in_channels=4,
        out_channels=4,
        num_layers=2,
        attention_head_dim=8,
        num_attention_heads=2,
        joint_attention_dim=8,
        caption_projection_dim=16,
        pooled_projection_dim=8,
        pos_embed_max_size=4,
        dual_attention_layers=(0,),
        qk_norm="rms_norm",
    )


def wan(diffusers: Any) -> nn.Module:
    return diffusers.WanTransformer3DModel(
        patch_size=(1, 2, 2),
        num_attention_heads=2,
        attention_head_dim=12,
        in_channels=4,
        out_channels=4,
        text_dim=8,
        freq_dim=16,
        ffn_dim=16,
        num_layers=1,
        cross_attn_norm=True,
        qk_norm="rms_norm_across_heads",
    )


@pytest.mark.parametrize("build", [flux, qwen_image, sd3, wan])
def test_every_parameter_but_some_norms_has_a_block(build: Callable[[Any], nn.Module]) -> None:
    with warnings.catch_warnings(), torch.random.fork_rng():
        warnings.simplefilter("ignore")  # diffusers' import is not what is tested
        import diffusers

        names = [name for name, _ in build(diffusers).named_parameters()]
    found = {name: block_of(name) for name in names}
    assert set(found.values()) - {OTHER} == {"modulation", "attention", "MLP", "embedders"}
    unknown = [name for name, block in found.items() if block == OTHER]
    assert [name for name in unknown if not re.search(r"(^|[._])norm\d?\.(weight|bias)$", name)] == []
    for name, block in found.items():
        if re.search(r"\battn\d?\.(to|add)_", name):
            assert block == "attention", name
        if re.search(r"\.net\.\d", name):
            assert block == "MLP", name


EXPECTED = {
    # Flux
    "transformer_blocks.0.norm1_context.linear.weight": "modulation",
    "transformer_blocks.0.attn.norm_added_q.weight": "attention",
    "transformer_blocks.0.attn.to_add_out.bias": "attention",
    "transformer_blocks.0.ff_context.net.0.proj.weight": "MLP",
    "single_transformer_blocks.0.norm.linear.weight": "modulation",
    "single_transformer_blocks.12.proj_mlp.weight": "MLP",
    "single_transformer_blocks.12.proj_out.bias": "MLP",
    "norm_out.linear.weight": "modulation",
    "proj_out.weight": "embedders",
    "context_embedder.bias": "embedders",
    "x_embedder.weight": "embedders",
    "time_text_embed.guidance_embedder.linear_1.weight": "embedders",
    # Qwen-Image
    "transformer_blocks.0.img_mod.1.weight": "modulation",
    "transformer_blocks.0.txt_mlp.net.2.bias": "MLP",
    "img_in.weight": "embedders",
    "txt_in.bias": "embedders",
    "txt_norm.weight": "other",
    # Stable Diffusion 3
    "transformer_blocks.1.attn2.to_out.0.weight": "attention",
    "pos_embed.proj.weight": "embedders",
    # Wan
    "scale_shift_table": "modulation",
    "blocks.0.scale_shift_table": "modulation",
    "condition_embedder.time_proj.weight": "modulation",
    "condition_embedder.time_embedder.linear_2.bias": "embedders",
    "patch_embedding.weight": "embedders",
    "blocks.0.attn2.norm_k.weight": "attention",
    "blocks.0.ffn.net.0.proj.weight": "MLP",
    "blocks.0.norm2.weight": "other",
    # peft
    "transformer_blocks.0.attn.to_q.lora_A.default.weight": "LoRA A",
    "transformer_blocks.0.ff.net.0.proj.lora_B.default.weight": "LoRA B",
    "base_model.model.single_transformer_blocks.3.proj_out.lora_A.learner.weight": "LoRA A",
    "base_model.model.transformer_blocks.0.norm1.linear.lora_B.default.weight": "LoRA B",
    "prompt_table.lora_embedding_A.default": "LoRA A",
    "prompt_table.lora_embedding_B.default": "LoRA B",
    "transformer_blocks.0.attn.to_q.base_layer.weight": "attention",
    "": "other",
}


@pytest.mark.parametrize(("name", "block"), EXPECTED.items())
def test_block_of(name: str, block: str) -> None:
    assert block_of(name) == block


def test_blocks_come_in_the_order_of_the_rules() -> None:
    known = [block for _, block in RULES]
    assert ordered_blocks([*reversed(known), *known]) == known
    assert ordered_blocks(["zebra", OTHER, "MLP", "all", "LoRA B"]) == ["LoRA B", "MLP", "all", OTHER, "zebra"]
    assert ordered_blocks([]) == []


class Policy:
    """Shows only some parameters of a module."""

    def __init__(self, shown: list[Tensor]) -> None:
        self.shown = shown

    def parameters(self) -> list[Tensor]:
        return self.shown

    def velocity(self, latents: Tensor, sigma: Tensor, rows: Tensor) -> Tensor:
        raise AssertionError("names need no forward")


def test_only_the_policys_own_parameters_have_a_block() -> None:
    module = nn.ModuleDict({"attn": nn.Linear(2, 2), "ff": nn.Linear(2, 2)})
    attention, feed_forward = module["attn"], module["ff"]
    outside = nn.Parameter(torch.ones(2))
    policy = Policy([attention.weight, feed_forward.bias, outside])
    assert parameter_blocks(policy, module) == {attention.weight: "attention", feed_forward.bias: "MLP"}


def test_a_policy_without_parameters_has_no_blocks() -> None:
    field = MlpField()
    hidden = Policy([])
    assert parameter_blocks(hidden, field) == {}
    assert set(parameter_blocks(field, field).values()) == {OTHER}
    assert len(parameter_blocks(field, field)) == 3
