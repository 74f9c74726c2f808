"""CLIPScore, PickScore and HPSv2.1 with their published weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from jagg_core.checks import require_at_least, require_one_of
from jagg_core.hub import fingerprint
from jagg_core.rewards.base import check_images
from jagg_core.rewards.preference.conversion import convert_open_clip
from jagg_core.rewards.preference.files import (
    CONFIG,
    PREPROCESSOR,
    PROCESSOR_FILES,
    TOKENIZER,
    VOCABULARY,
    Source,
    find_source,
    read_tensors,
    weight_files,
)
from jagg_core.rewards.preference.network import ClipNetwork, build_model, load_tokenizer, read_config
from jagg_core.rewards.preference.preprocessing import Fit, read_preprocessing

Value = Callable[[Tensor, float], Tensor]
"""A reward from cosines ``[N]`` and the network's logit scale."""

Dtype = Literal["float32", "bfloat16", "float16"]

_SAFETENSORS = ("model.safetensors", "model.safetensors.index.json")
_LAION = "laion/CLIP-ViT-H-14-laion2B-s32B-b79K"


@dataclass(frozen=True)
class Published:
    """A published reward.

    Attributes:
        name: name of the reward.
        hub_id: hub id of the weights.
        variants: scales of the reward; the first one is the default, and the reward's name holds any other.
        processor: hub id of tokenizer, preprocessing and configuration; None: with the weights.
        weights: possible names of the weights' file.
        open_clip: whether the tensors have open_clip's names.
        fit: way from an image to a square.
    """

    name: str
    hub_id: str
    variants: Mapping[str, Value]
    processor: str | None = None
    weights: tuple[str, ...] = _SAFETENSORS
    open_clip: bool = False
    fit: Fit = "crop"


CLIPSCORE = Published(
    "clipscore",
    "openai/clip-vit-large-patch14",
    {
        "raw": lambda cosine, scale: cosine,
        "clamped": lambda cosine, scale: cosine.clamp(min=0),
        "x100": lambda cosine, scale: 100 * cosine,
        "x2.5": lambda cosine, scale: 2.5 * cosine,
    },
)
"""Cosine of Radford et al.'s CLIP, "Learning transferable visual models" (2021); any other CLIP by ``path``.

``raw`` for training: clamped at 0, a group of negative cosines would teach nothing. ``x100`` and ``x2.5`` are the
scales of published tables, with negative values kept. CLIPScore as Hessel et al. define it (2021) is
``2.5*clipscore.clamped``.
"""

PICKSCORE = Published(
    "pickscore",
    "yuvalkirstain/PickScore_v1",
    {"raw": lambda cosine, scale: scale * cosine, "normalised": lambda cosine, scale: scale * cosine / 26},
    processor=_LAION,
)
"""Kirstain et al., "Pick-a-Pic" (2023): logit scale times cosine, about 22; ``normalised`` by 26, as flow_grpo does."""

HPSV21 = Published(
    "hpsv2.1",
    "xswu/HPSv2",
    {"raw": lambda cosine, scale: cosine},
    processor=_LAION,
    weights=("HPS_v2.1_compressed.pt", "HPS_v2.1_compressed.safetensors"),
    open_clip=True,
    fit="pad",
)
"""Wu et al., "Human Preference Score v2" (2023), version 2.1: the cosine, as img_score.py of the package hpsv2 1.2.0.

Its tokenizer is CLIP's, but resolves HTML entities and repairs broken Unicode first; here prompts are taken as they
are.
"""


@dataclass(frozen=True)
class PreferenceSettings:
    """Settings of loading a published reward.

    Attributes:
        published: the reward.
        path: a local folder, or another hub id, with files of the published names.
        revision: branch, tag or commit of the hub, of the weights.
        processor: folder or hub id of tokenizer, preprocessor_config.json and config.json. Default: the folder of the
            weights if it has a tokenizer, else the published one.
        variant: scale of the reward; default: the published one.
        dtype: dtype of the weights. Cosines are computed in fp32.
        batch_size: images, or prompts, of one pass.

    Raises:
        ValueError: an option out of range.
    """

    published: Published
    _: KW_ONLY
    path: str | None = None
    revision: str | None = None
    processor: str | None = None
    variant: str | None = None
    dtype: Dtype = "float32"
    batch_size: int = 32

    def __post_init__(self) -> None:
        if self.variant is not None:
            require_one_of(f"variant of {self.published.name}", self.variant, tuple(self.published.variants))
        require_one_of("dtype", self.dtype, Dtype)
        require_at_least(self, batch_size=1)


class PreferenceReward:
    """A published reward, loaded. RGB images only.

    Attributes:
        name: name of the reward, with a variant that is not the default; `load_reward` reads it again.
        version: hub id and commit of the weights, or name of the local folder, and a digest of the files.
    """

    def __init__(self, name: str, version: str, network: ClipNetwork, value: Value) -> None:
        self.name = name
        self.version = version
        self.network = network
        self.value = value

    def __call__(self, images: Tensor, prompts: Sequence[str]) -> Tensor:
        """Computes the reward of every image, ``[N]``.

        Raises:
            ValueError: the images are not RGB, or not as many as prompts.
        """
        check_images(images, self.name, channels=(3,))
        if len(images) != len(prompts):
            raise ValueError(f"prompts: one per image is needed, got {len(prompts)} for {len(images)} images")
        return self.value(self.network.cosines(images, prompts), self.network.logit_scale)


def load_preference(settings: PreferenceSettings, device: torch.device | str = "cpu") -> PreferenceReward:
    """Loads a published reward.

    Raises:
        ValueError: transformers is missing; a file is missing, damaged or another network's (names it and the remedy);
            no access to the hub. All but the tensors is checked before they are read.
    """
    published = settings.published
    try:
        import transformers  # noqa: F401 (asked for before anything is fetched)
    except ImportError as error:
        raise ValueError(
            f"reward {published.name!r} needs transformers: pip install -U 'jagg-core[rewards]'"
        ) from error
    weights, files = _find_weights(settings)
    processor = _find_processor(settings, weights)
    tokenizer = load_tokenizer(processor)
    # open_clip's weights come without a configuration
    configured = processor if published.open_clip else weights
    config = read_config(configured, "processor" if published.open_clip else "path", tokenizer)
    if published.open_clip:
        _require_gelu(config, configured.folder / CONFIG)
    preprocess = read_preprocessing(
        processor.require("processor", PREPROCESSOR), config.vision_config.image_size, published.fit
    )
    settings_files = {configured.folder / CONFIG, *(processor.folder / name for name in PROCESSOR_FILES)}
    version = fingerprint([*files, *sorted(file for file in settings_files if file.is_file())])
    state = read_tensors(files)
    if published.open_clip:
        state = convert_open_clip(state, config, str(files[0]))
    network = ClipNetwork(build_model(config, state, files[0]), tokenizer, preprocess, settings.batch_size)
    default = next(iter(published.variants))
    variant = settings.variant or default
    titles = dict.fromkeys([weights.title, processor.title])
    return PreferenceReward(
        published.name if variant == default else f"{published.name}.{variant}",
        f"{' + '.join(titles)} {version}",
        network.to(device, getattr(torch, settings.dtype)),
        published.variants[variant],
    )


def _find_weights(settings: PreferenceSettings) -> tuple[Source, list[Path]]:
    published = settings.published
    patterns = [*published.weights, "model-*.safetensors", CONFIG]
    if published.open_clip:
        patterns = list(published.weights)
    elif published.processor is None:
        patterns += PROCESSOR_FILES
    source = find_source("path", settings.path or published.hub_id, patterns, settings.revision)
    return source, weight_files(source, *published.weights)


def _find_processor(settings: PreferenceSettings, weights: Source) -> Source:
    published = settings.published
    if settings.processor is not None:
        return find_source("processor", settings.processor, PROCESSOR_FILES)
    complete = any((weights.folder / name).is_file() for name in (TOKENIZER, VOCABULARY[0]))
    if published.processor is None or (complete and not weights.commit):
        return weights
    return find_source("processor", published.processor, PROCESSOR_FILES)


def _require_gelu(config: Any, file: Path) -> None:
    """Raises ValueError for another activation than ViT-H-14's, which shapes do not show."""
    acts = {config.text_config.hidden_act, config.vision_config.hidden_act}
    if acts != {"gelu"}:
        raise ValueError(f"processor: hidden_act in {file} must be gelu for open_clip's ViT-H-14, got {sorted(acts)}")
