"""Loads a published model from its folder, or with random weights to measure time and memory."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

from jagg_core.backbones.lora import add_lora, check_lora
from jagg_core.backbones.pretrained.base import PretrainedBackbone
from jagg_core.backbones.pretrained.folder import ModelFolder, find_folder
from jagg_core.backbones.pretrained.prompts import PROMPTS, read_prompts
from jagg_core.backbones.pretrained.published import Calls, Configs, PublishedModel
from jagg_core.backbones.pretrained.quiet import without_torchvision
from jagg_core.checks import require_one_of
from jagg_core.devices import fork_rng


def configs_of(folder: ModelFolder) -> Configs:
    """Reads the configurations of a folder's parts.

    Raises:
        ValueError: one is missing or unreadable.
    """
    return Configs(folder.config("transformer"), folder.config("vae"), folder.config("scheduler"))


def _require_classes(model: PublishedModel) -> None:
    """Raises ValueError unless the installed libraries have the model's classes."""
    install = "pip install -U 'jagg-core[pretrained]'"
    try:
        import diffusers
        import transformers  # noqa: F401 (the text encoders are its models)
    except ImportError as error:
        raise ValueError(f"backbone {model.name!r} needs diffusers and transformers: {install}") from error
    for name in (model.family.transformer_class, model.family.pipeline_class, model.family.vae_class):
        with without_torchvision():  # a class is imported when it is looked for
            exists = hasattr(diffusers, name)
        if not exists:
            raise ValueError(
                f"backbone {model.name!r} needs {name}, which the installed diffusers {diffusers.__version__} has not: "
                f"{install}"
            )


def _require_variant(model: PublishedModel, configs: Configs) -> None:
    """Raises ValueError for another variant of the model, with the same classes."""
    wanted, embeds = model.config.get("guidance_embeds"), configs.transformer.get("guidance_embeds")
    if wanted is not None and bool(embeds) != wanted:
        raise ValueError(
            f"path: guidance_embeds of the transformer must be {wanted} for {model.name}, got {embeds}: another "
            "variant's folder?"
        )


def load_pretrained(
    model: PublishedModel,
    device: torch.device | str,
    dtype: torch.dtype,
    *,
    path: str | None = None,
    revision: str | None = None,
    height: int | None = None,
    width: int | None = None,
    frames: int | None = None,
    prompts: str | None = None,
    negative_prompt: str | None = None,
    text_tokens: int | None = None,
    calls: Calls = "batched",
    lora_rank: int = 0,
    lora_alpha: int | None = None,
    random_weights: bool = False,
) -> PretrainedBackbone:
    """Loads a model in eval mode.

    Args:
        model: model to load.
        device: device of the transformer, the VAE and, while they encode, the text encoders.
        dtype: dtype of all of them, except VAEs that need fp32.
        path: a local folder in diffusers' layout, or another hub id of the same architecture.
        revision: branch, tag or commit of the hub.
        height: height in pixels.
        width: width in pixels.
        frames: frames of a video.
        prompts: a text file with a prompt per line, to sample from; default: `PROMPTS`.
        negative_prompt: for classifier-free guidance; default: the family's.
        text_tokens: tokens a prompt may have; default: the family's.
        calls: whether guidance makes one batched call or two.
        lora_rank: above 0, train a LoRA of this rank instead of the weights. Needs peft.
        lora_alpha: its scale; default: twice the rank.
        random_weights: build the published configuration without any file, to measure time and memory. Prompts are
            random too, of ``text_tokens`` tokens, and nothing can be decoded.

    Raises:
        ValueError: an option out of range, no access, or a folder that is not this model's; before weights are read.
    """
    require_one_of("calls", calls, Calls)
    if text_tokens is not None and text_tokens < 1:
        raise ValueError(f"text_tokens must be at least 1, got {text_tokens}")
    check_lora(lora_rank, lora_alpha)
    most = model.family.most_text_tokens
    if text_tokens is not None and most is not None and text_tokens > most:
        raise ValueError(f"text_tokens must be at most {most} for {model.name}, got {text_tokens}")
    if negative_prompt is not None and model.guidance != "cfg":
        raise ValueError(f"negative_prompt must be None for {model.name}, which has no classifier-free guidance")
    texts = PROMPTS if prompts is None else read_prompts(prompts)
    family = model.family
    _require_classes(model)
    wanted = {"height": height, "width": width, "frames": frames}
    size = replace(model.size, **{name: value for name, value in wanted.items() if value is not None})
    folder = None
    if random_weights:
        if path is not None or revision is not None:
            raise ValueError(f"path and revision must be None with random_weights, got {path!r} and {revision!r}")
        configs = Configs(model.config, model.vae)
        family.check_size(configs, size)
        transformer = random_transformer(model, device, dtype)
    else:
        folder = find_folder(model.hub_id, path, revision)
        folder.require_class("transformer", family.transformer_class)
        folder.require_class("vae", family.vae_class)
        folder.require_pipeline(family.pipeline_class)
        configs = configs_of(folder)
        _require_variant(model, configs)
        family.check_size(configs, size)
        folder.check_weights()
        transformer = family.load_transformer(folder, dtype).to(device)
    backbone = family(
        model,
        folder,
        configs,
        transformer.eval(),
        size,
        prompts=texts,
        negative_prompt=negative_prompt,
        text_tokens=text_tokens,
        calls=calls,
    )
    if lora_rank > 0:
        add_lora(transformer, family.lora_targets, lora_rank, lora_alpha)
    for module in backbone.unread():
        module.requires_grad_(False)
    return backbone


def random_transformer(
    model: PublishedModel, device: torch.device | str, dtype: torch.dtype, seed: int = 0
) -> nn.Module:
    """Builds the published transformer with random weights on ``device`` (meta too) in ``dtype``."""
    usual = torch.get_default_dtype()
    with fork_rng(torch.device(device)), torch.device(device):
        torch.manual_seed(seed)
        torch.set_default_dtype(dtype)
        try:
            return model.family.build(model)
        finally:
            torch.set_default_dtype(usual)
