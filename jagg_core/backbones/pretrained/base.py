"""What text-to-image and text-to-video models in diffusers' layout have in common; a family adds one short file."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import version
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from jagg_core.backbones.pretrained.folder import ModelFolder, require_whole
from jagg_core.backbones.pretrained.policy import PretrainedPolicy
from jagg_core.backbones.pretrained.prompts import PROMPTS
from jagg_core.backbones.pretrained.text import (
    PromptEncoder,
    RandomTexts,
    Text,
    TextBatch,
    TextShape,
    TextStore,
    cache_folder,
)
from jagg_core.backbones.repairs import ExactTimestep, dtype_argument
from jagg_core.policy import guided
from jagg_core.schedule import check_sigmas

GuidanceMode = Literal["embedded", "cfg", "none"]
"""How a model is guided: by a number it embeds, by a second velocity without the prompt, or not at all."""

Calls = Literal["batched", "separate"]
"""Whether the two velocities of classifier-free guidance are one call of twice the batch, or two calls."""

DECODED_AT_ONCE = 4
"""Latents that go through the VAE together; it needs more memory for an image than the transformer."""


@dataclass(frozen=True)
class Size:
    """What is drawn: pixels, and frames of a video (1 for images)."""

    height: int
    width: int
    frames: int = 1


@dataclass(frozen=True)
class PublishedModel:
    """A model as it was published.

    Attributes:
        name: under which it is registered.
        hub_id: where its weights are.
        licence: what the model card names.
        parameters: of the transformer (of all transformers, where there are two).
        config: of the transformer, as published.
        family: what loads it.
        guidance: how it is guided.
        scale: guidance that its makers or the field's trainers use; 1 is none.
        size: that the field's trainers use.
        description: one line.
        transformers: how many of this configuration there are.
        vae: what the shape of latents depends on, of the VAE's configuration.
    """

    name: str
    hub_id: str
    licence: str
    parameters: int
    config: Mapping[str, Any]
    family: type[PretrainedBackbone]
    guidance: GuidanceMode
    scale: float
    size: Size
    description: str
    transformers: int = 1
    vae: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Configs:
    """Configurations of the parts of a model folder, as diffusers stores them."""

    transformer: Mapping[str, Any]
    vae: Mapping[str, Any]
    scheduler: Mapping[str, Any] = field(default_factory=dict)


class PretrainedBackbone(ABC):
    """A `jagg_core.backbones.Backbone` over a model folder. A subclass says what its architecture needs.

    Latents are what the pipeline hands its transformer: packed tokens for most models, else ``[C, (F,) H, W]``.
    """

    transformer_class: ClassVar[str]
    """Name of the diffusers class that is trained."""
    pipeline_class: ClassVar[str]
    """Name of the diffusers pipeline whose encoders encode the prompts."""
    vae_class: ClassVar[str]
    """Name of the diffusers class that decodes."""
    block_lists: ClassVar[tuple[str, ...]]
    """Attributes of the transformer that hold its blocks: what is sharded and checkpointed."""
    lora_targets: ClassVar[tuple[str, ...]]
    """Names of the linear layers that LoRA adapts, as peft matches them."""
    tiny: ClassVar[Mapping[str, Any]]
    """A transformer configuration with a few thousand parameters and every kind of layer, for tests."""
    text_tokens: ClassVar[int]
    """Tokens a prompt may have, unless ``text_tokens`` is given."""
    most_text_tokens: ClassVar[int | None] = None
    """What the pipeline allows; None: anything."""
    negative_prompt: ClassVar[str] = ""
    """What classifier-free guidance contrasts the prompt with."""
    vae_dtype: ClassVar[torch.dtype | None] = None
    """In which the VAE decodes; None is the transformer's."""

    dataset: str | None = None
    """No shipped classifier knows what these models draw."""

    def __init__(
        self,
        model: PublishedModel,
        folder: ModelFolder | None,
        configs: Configs,
        transformer: nn.Module,
        size: Size,
        *,
        prompts: tuple[str, ...] = PROMPTS,
        negative_prompt: str | None = None,
        text_tokens: int | None = None,
        calls: Calls = "batched",
    ) -> None:
        self.model = model
        self.folder = folder
        self.configs = configs
        self._transformer: Any = transformer
        self.size = size
        self.prompts = prompts
        self.negative = self.negative_prompt if negative_prompt is None else negative_prompt
        self.calls = calls
        self.max_text_tokens = self.text_tokens if text_tokens is None else text_tokens
        self.timestep = self.exact_timestep()
        self._vae: Any = None
        self.text: TextStore | RandomTexts = self._random_texts() if folder is None else self._store(folder)

    # What a family says of itself

    @classmethod
    @abstractmethod
    def multiple(cls, configs: Configs) -> int:
        """What height and width must be divisible by, in pixels."""

    @classmethod
    @abstractmethod
    def shape_of(cls, configs: Configs, size: Size) -> tuple[int, ...]:
        """Shape of one sample's latents."""

    @classmethod
    def check_size(cls, configs: Configs, size: Size) -> None:
        """Check a size that a user asked for.

        Raises:
            ValueError: it does not fit the model.
        """
        multiple = cls.multiple(configs)
        for name in ("height", "width"):
            value = getattr(size, name)
            if not isinstance(value, int):
                raise ValueError(f"{name} must be a whole number of pixels, got {value!r}")
            if value < multiple or value % multiple:
                near = max(1, round(value / multiple)) * multiple
                raise ValueError(f"{name} must be a positive multiple of {multiple}, got {value}; nearest: {near}")
        if size.frames != 1:
            raise ValueError(f"frames must be 1 for a model of images, got {size.frames}")

    @classmethod
    @abstractmethod
    def text_shape(cls, transformer: Mapping[str, Any], text_tokens: int) -> TextShape:
        """Shape of a prompt of ``text_tokens`` tokens, as the pipeline encodes it for this configuration."""

    @abstractmethod
    def exact_timestep(self) -> ExactTimestep:
        """The transformer's time embedding, and what it multiplies sigma with."""

    @abstractmethod
    def encode(self, pipeline: Any, prompt: str) -> Text:
        """A prompt through the pipeline's own encoders, without padding that the model would not read."""

    @abstractmethod
    def call(self, latents: Tensor, sigma: Tensor, text: TextBatch, guidance: float | None) -> Tensor:
        """The transformer's velocity ``[N, *latent_shape]``; all in its dtype, ``sigma`` [N] in [0, 1].

        ``guidance``: for a model that embeds it, None else.
        """

    @abstractmethod
    def decode_latents(self, vae: Any, latents: Tensor) -> Tensor:
        """Images ``[N, 3, H, W]`` or videos ``[N, 3, F, H, W]`` in [-1, 1], in the VAE's dtype."""

    def schedule_arguments(self, steps: int) -> dict[str, Any]:
        """What the pipeline gives the scheduler's ``set_timesteps`` besides the number of steps."""
        return {}

    def embedded(self, latents: Tensor, guidance: float | None) -> Tensor | None:
        """``guidance`` as a transformer with ``guidance_embeds`` takes it, ``[N]`` fp32; None for one without.

        Raises:
            ValueError: the transformer embeds guidance and there is none.
        """
        if not self._transformer.config.guidance_embeds:
            return None
        if guidance is None:
            raise ValueError(f"guidance: {self.name} embeds it and needs a number; usual: {self.model.scale}")
        return latents.new_full([len(latents)], guidance, dtype=torch.float32)

    def combine(self, conditional: Tensor, unconditional: Tensor, scale: float) -> Tensor:
        """Classifier-free guidance of two velocities, as the pipeline does it; fp32."""
        return guided(conditional, unconditional, scale)

    def unread(self) -> Sequence[nn.Module]:
        """Modules whose output nothing reads, such as the end of a text stream. They get no gradient and are frozen."""
        return ()

    # What all have

    @property
    def name(self) -> str:
        """Registered name."""
        return self.model.name

    @property
    def latent_shape(self) -> tuple[int, ...]:
        """Shape of one sample's latents."""
        return self.shape_of(self.configs, self.size)

    @property
    def device(self) -> torch.device:
        """Device of the weights."""
        return next(self.transformer.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        """Dtype that the transformer computes in."""
        return next(p.dtype for name, p in self.transformer.named_parameters() if "lora_" not in name)

    @property
    def transformer(self) -> nn.Module:
        """The diffusers transformer that is trained, sharded and checkpointed."""
        transformer: nn.Module = self._transformer
        return transformer

    @property
    def text_fingerprint(self) -> str:
        """What tells one model's text encoders from another's."""
        return "random" if self.folder is None else self.folder.text_fingerprint

    def fingerprints(self) -> dict[str, str]:
        """What tells the parts beside the transformer from another folder's, by name."""
        vae = "random" if self.folder is None else self.folder.vae_fingerprint
        return {"text encoders": self.text_fingerprint, "VAE": vae}

    @property
    def parameters(self) -> int:
        """Parameters of the transformer, without those of a LoRA."""
        return sum(p.numel() for name, p in self.transformer.named_parameters() if "lora_" not in name)

    @property
    def blocks(self) -> list[nn.Module]:
        """The transformer's blocks in order, for ``fully_shard`` and for activation checkpointing."""
        return [block for name in self.block_lists for block in getattr(self._transformer, name)]

    def enable_gradient_checkpointing(self) -> None:
        """Recompute block activations in the backward (diffusers' own switch)."""
        self._transformer.enable_gradient_checkpointing()

    def policy(self, prompts: Sequence[str], guidance: float | None = None) -> PretrainedPolicy:
        """A policy for these prompts, one per sample. ``guidance`` None is the model's usual one.

        Raises:
            ValueError: no prompts, or a guidance that the model cannot follow.
        """
        if isinstance(prompts, str) or len(prompts) == 0:
            raise ValueError(f"prompts must be a sequence of at least one prompt, got {prompts!r}")
        scale = float(self.model.scale if guidance is None else guidance)
        if not 0 < scale < math.inf:
            raise ValueError(f"guidance must be positive and finite, got {scale}")
        if self.model.guidance == "none" and scale != 1:
            raise ValueError(f"guidance: {self.name} is distilled to be used without; allowed: 1, got {scale}")
        return PretrainedPolicy(self, tuple(prompts), scale)

    def schedule(self, steps: int) -> Tensor:
        """Sigmas of the pipeline's own scheduler, ``[steps + 1]``, fp64, the last one 0.

        Raises:
            ValueError: fewer steps than the scheduler can do, or a model without its folder.
        """
        import diffusers

        if self.folder is None:
            raise ValueError(f"schedule: {self.name} with random weights has none of its own; allowed: dance")
        if steps < 1:
            raise ValueError(f"steps must be at least 1, got {steps}")
        scheduler = diffusers.FlowMatchEulerDiscreteScheduler.from_config(self.scheduler_config())
        scheduler.set_timesteps(**({"num_inference_steps": steps} | self.schedule_arguments(steps)))
        return check_sigmas(scheduler.sigmas)

    def scheduler_config(self) -> dict[str, Any]:
        """Configuration of the flow-matching scheduler that the folder's own scheduler amounts to."""
        return {key: value for key, value in self.configs.scheduler.items() if not key.startswith("_")}

    def decode(self, latents: Tensor) -> Tensor:
        """Latents ``[N, *latent_shape]`` to images ``[N, 3, H, W]`` in [0, 1], fp32. Of a video the middle frame."""
        images = self.decode_video(latents)
        return images[:, :, images.shape[2] // 2]

    def decode_video(self, latents: Tensor) -> Tensor:
        """Latents ``[N, *latent_shape]`` to frames ``[N, 3, F, H, W]`` in [0, 1], fp32; an image is one frame."""
        if self._vae is None:
            self._vae = self._load_vae()
        vae = self._vae
        parts = latents.to(self.device, vae.dtype).split(DECODED_AT_ONCE)
        images = torch.cat([self.decode_latents(vae, part).float() for part in parts])
        frames = images.unsqueeze(2) if images.ndim == 4 else images
        return (frames / 2 + 0.5).clamp(0, 1)

    @classmethod
    def load_transformer(cls, folder: ModelFolder, dtype: torch.dtype) -> nn.Module:
        """The transformer of a folder, on the CPU."""
        import diffusers

        load = getattr(diffusers, cls.transformer_class).from_pretrained
        transformer: nn.Module = load(folder.path, subfolder="transformer", **dtype_argument(dtype), **LOCAL)
        return require_whole(transformer, folder, "transformer")

    @classmethod
    def build(cls, model: PublishedModel) -> nn.Module:
        """The transformer of a published configuration, with random weights."""
        import diffusers

        transformer: nn.Module = getattr(diffusers, cls.transformer_class).from_config(dict(model.config))
        return transformer

    def _load_vae(self) -> Any:
        import diffusers

        folder = self.folder
        if folder is None:
            raise ValueError(f"{self.name} with random weights has no VAE: its samples cannot be decoded")
        load = getattr(diffusers, self.vae_class).from_pretrained
        vae = load(folder.path, subfolder="vae", **dtype_argument(self.vae_dtype or self.dtype), **LOCAL)
        return require_whole(vae, folder, "vae").to(self.device).eval().requires_grad_(False)

    def _random_texts(self) -> RandomTexts:
        shape = self.text_shape(self.configs.transformer, self.max_text_tokens)
        return RandomTexts(shape, self.dtype)

    def _store(self, folder: ModelFolder) -> TextStore:
        key = (type(self).__name__, str(self.max_text_tokens), str(self.dtype), folder.text_fingerprint)
        versions = (version("diffusers"), version("transformers"))
        encoder = partial(self._load_encoder, folder)
        return TextStore((*key, *versions), encoder, (*self.prompts, self.negative), cache_folder())

    def _load_encoder(self, folder: ModelFolder) -> Callable[[str], Text]:
        import diffusers

        load = getattr(diffusers, self.pipeline_class).from_pretrained
        parts = self.without_networks() | dtype_argument(self.dtype) | LOCAL
        pipeline = load(folder.path, **parts).to(self.device)
        # several tokenizers are numbered, and the last feeds the encoder that reads most tokens
        names = sorted(name for name in pipeline.components if name.startswith("tokenizer"))
        return PromptEncoder(partial(self.encode, pipeline), pipeline.components[names[-1]], self.max_text_tokens)

    @classmethod
    def without_networks(cls) -> dict[str, Any]:
        """Parts of the pipeline that encoding a prompt does not need."""
        return {"transformer": None, "vae": None}


LOCAL: dict[str, Any] = {"local_files_only": True, "use_safetensors": True}
"""Every part is read from the folder alone, and never unpickled."""
