"""Base of text-to-image and text-to-video models in diffusers' layout; a family adds one short file."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib.metadata import version
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from jagg_core.backbones.pretrained.folder import LOCAL, ModelFolder
from jagg_core.backbones.pretrained.policy import PretrainedPolicy
from jagg_core.backbones.pretrained.prompts import PROMPTS
from jagg_core.backbones.pretrained.published import Calls, Configs, PublishedModel, Size
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

DECODED_AT_ONCE = 4
"""Latents that go through the VAE together; it needs more memory for an image than the transformer."""


class PretrainedBackbone(ABC):
    """A `jagg_core.backbones.Backbone` over a model folder. A subclass adds what its architecture needs.

    Latents are the input of the pipeline's transformer: packed tokens for most models, else ``[C, (F,) H, W]``.
    """

    transformer_class: ClassVar[str]
    """Name of the diffusers class that is trained."""
    pipeline_class: ClassVar[str]
    """Name of the diffusers pipeline whose encoders encode the prompts."""
    vae_class: ClassVar[str]
    """Name of the diffusers class that decodes."""
    block_lists: ClassVar[tuple[str, ...]]
    """Attributes of the transformer that hold its blocks, which are sharded and checkpointed."""
    lora_targets: ClassVar[tuple[str, ...]]
    """Names of the linear layers that LoRA adapts, as peft matches them."""
    tiny: ClassVar[Mapping[str, Any]]
    """A transformer configuration with a few thousand parameters and every kind of layer, for tests."""
    text_tokens: ClassVar[int]
    """Default of the most tokens of a prompt."""
    most_text_tokens: ClassVar[int | None] = None
    """Most tokens that the pipeline allows; None: any number."""
    negative_prompt: ClassVar[str] = ""
    """Default of the prompt that classifier-free guidance leads away from."""
    vae_dtype: ClassVar[torch.dtype | None] = None
    """Dtype of the VAE; None is the transformer's."""

    dataset: str | None = None
    """No shipped classifier knows these models' images."""

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
        shape = self.text_shape(configs.transformer, self.max_text_tokens)
        self.text = RandomTexts(shape, self.dtype) if folder is None else self._store(folder)

    # What a family defines

    @classmethod
    @abstractmethod
    def multiple(cls, configs: Configs) -> int:
        """Returns the pixels by which height and width must be divisible."""

    @classmethod
    @abstractmethod
    def shape_of(cls, configs: Configs, size: Size) -> tuple[int, ...]:
        """Computes the shape of one sample's latents."""

    @classmethod
    def check_size(cls, configs: Configs, size: Size) -> None:
        """Checks a requested size.

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
        """Computes the shape in which the pipeline encodes a prompt of ``text_tokens`` tokens."""

    @abstractmethod
    def exact_timestep(self) -> ExactTimestep:
        """Names the transformer's time embedding and its factor of sigma."""

    @abstractmethod
    def encode(self, pipeline: Any, prompt: str) -> Text:
        """Encodes a prompt by the pipeline, without padding that the model would not read."""

    @abstractmethod
    def call(self, latents: Tensor, sigma: Tensor, text: TextBatch, guidance: float | None) -> Tensor:
        """Computes the velocity ``[N, *latent_shape]``; all in the transformer's dtype, ``sigma`` [N] in [0, 1].

        ``guidance`` is None for a model that does not embed it.
        """

    def decode_latents(self, vae: Any, latents: Tensor) -> Tensor:
        """Decodes to images ``[N, 3, H, W]`` or videos ``[N, 3, F, H, W]`` in [-1, 1], in the VAE's dtype."""
        images: Tensor = vae.decode(latents / vae.config.scaling_factor + vae.config.shift_factor, return_dict=False)[0]
        return images

    def schedule_arguments(self, steps: int) -> dict[str, Any]:
        """Returns the pipeline's arguments of the scheduler's ``set_timesteps``, without the number of steps."""
        return {}

    def combine(self, conditional: Tensor, unconditional: Tensor, scale: float) -> Tensor:
        """Combines two velocities by the pipeline's classifier-free guidance; fp32."""
        return guided(conditional, unconditional, scale)

    def unread(self) -> Sequence[nn.Module]:
        """Returns modules whose output is not read, such as the end of a text stream; they are frozen."""
        return ()

    # What all share

    @property
    def name(self) -> str:
        """Returns the registered name."""
        return self.model.name

    @property
    def latent_shape(self) -> tuple[int, ...]:
        """Returns the shape of one sample's latents."""
        return self.shape_of(self.configs, self.size)

    @property
    def device(self) -> torch.device:
        """Returns the device of the weights."""
        return next(self.transformer.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        """Returns the dtype that the transformer computes in."""
        return next(p.dtype for name, p in self.transformer.named_parameters() if "lora_" not in name)

    @property
    def transformer(self) -> nn.Module:
        """Returns the diffusers transformer, which is trained, sharded and checkpointed."""
        transformer: nn.Module = self._transformer
        return transformer

    @property
    def text_fingerprint(self) -> str:
        """Identifies the text encoders by a digest."""
        return "random" if self.folder is None else self.folder.text_fingerprint

    def fingerprints(self) -> dict[str, str]:
        """Identifies text encoders and VAE by digests."""
        vae = "random" if self.folder is None else self.folder.vae_fingerprint
        return {"text encoders": self.text_fingerprint, "VAE": vae}

    @property
    def parameters(self) -> int:
        """Counts the transformer's parameters without those of a LoRA."""
        return sum(p.numel() for name, p in self.transformer.named_parameters() if "lora_" not in name)

    @property
    def blocks(self) -> list[nn.Module]:
        """Returns the transformer's blocks in order, for ``fully_shard`` and for activation checkpointing."""
        return [block for name in self.block_lists for block in getattr(self._transformer, name)]

    def enable_gradient_checkpointing(self) -> None:
        """Makes the backward recompute the blocks' activations, by diffusers' switch."""
        self._transformer.enable_gradient_checkpointing()

    def policy(self, prompts: Sequence[str], guidance: float | None = None) -> PretrainedPolicy:
        """Makes a policy for these prompts, one per sample. ``guidance`` None is the model's usual one.

        Raises:
            ValueError: no prompts, or a guidance that the model cannot follow.
        """
        if isinstance(prompts, str) or len(prompts) == 0:
            raise ValueError(f"prompts must be a sequence of at least one prompt, got {prompts!r}")
        scale = float(self.model.scale if guidance is None else guidance)
        if not 0 < scale < math.inf:
            raise ValueError(f"guidance must be positive and finite, got {scale}")
        if self.model.guidance == "none" and scale != 1:
            raise ValueError(f"guidance must be 1 for {self.name}, which is distilled, got {scale}")
        return PretrainedPolicy(self, tuple(prompts), scale)

    def schedule(self, steps: int) -> Tensor:
        """Computes the sigmas of the pipeline's scheduler, ``[steps + 1]``, fp64, the last one 0.

        Raises:
            ValueError: fewer steps than the scheduler can do, or a model without its folder.
        """
        import diffusers

        if self.folder is None:
            raise ValueError(f"schedule must be dance for {self.name} with random weights, which has no scheduler")
        if steps < 1:
            raise ValueError(f"steps must be at least 1, got {steps}")
        scheduler = diffusers.FlowMatchEulerDiscreteScheduler.from_config(self.scheduler_config())
        scheduler.set_timesteps(**({"num_inference_steps": steps} | self.schedule_arguments(steps)))
        return check_sigmas(scheduler.sigmas)

    def scheduler_config(self) -> dict[str, Any]:
        """Returns the configuration of a flow-matching scheduler that equals the folder's."""
        return {key: value for key, value in self.configs.scheduler.items() if not key.startswith("_")}

    def decode(self, latents: Tensor) -> Tensor:
        """Decodes latents ``[N, *latent_shape]`` to images ``[N, 3, H, W]`` in [0, 1], fp32; a video's middle frame."""
        frames = self.decode_video(latents)
        return frames[:, :, frames.shape[2] // 2]

    def decode_video(self, latents: Tensor) -> Tensor:
        """Decodes latents ``[N, *latent_shape]`` to frames ``[N, 3, F, H, W]`` in [0, 1], fp32; F is 1 for images."""
        if self._vae is None:
            self._vae = self._load_vae()
        parts = latents.to(self.device, self._vae.dtype).split(DECODED_AT_ONCE)
        images = torch.cat([self.decode_latents(self._vae, part).float() for part in parts])
        frames = images.unsqueeze(2) if images.ndim == 4 else images
        return (frames / 2 + 0.5).clamp(0, 1)

    @classmethod
    def load_transformer(cls, folder: ModelFolder, dtype: torch.dtype) -> nn.Module:
        """Loads the transformer of a folder, on the CPU."""
        transformer: nn.Module = folder.load("transformer", cls.transformer_class, dtype)
        return transformer

    @classmethod
    def build(cls, model: PublishedModel) -> nn.Module:
        """Builds the transformer of a published configuration, with random weights."""
        import diffusers

        transformer: nn.Module = getattr(diffusers, cls.transformer_class).from_config(dict(model.config))
        return transformer

    def _load_vae(self) -> Any:
        if self.folder is None:
            raise ValueError(f"{self.name} with random weights has no VAE: its samples cannot be decoded")
        vae = self.folder.load("vae", self.vae_class, self.vae_dtype or self.dtype)
        return vae.to(self.device).eval().requires_grad_(False)

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
        """Names the parts of the pipeline that encoding a prompt does not need."""
        return {"transformer": None, "vae": None}
