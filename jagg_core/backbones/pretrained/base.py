"""What text-to-image and text-to-video models in diffusers' layout have in common; a family adds one short file."""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any, ClassVar, Literal, get_args

import torch
from torch import Tensor, nn

from jagg_core.backbones.pretrained.folder import ModelFolder, find_folder
from jagg_core.backbones.pretrained.lora import add_lora
from jagg_core.backbones.pretrained.prompts import PROMPTS, read_prompts
from jagg_core.backbones.pretrained.text import Text, TextBatch, TextStore, cache_folder
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
        folder: ModelFolder,
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
        self.configs = configs_of(folder)
        self._transformer: Any = transformer
        self.size = size
        self.prompts = prompts
        self.negative = self.negative_prompt if negative_prompt is None else negative_prompt
        self.calls = calls
        self.max_text_tokens = self.text_tokens if text_tokens is None else text_tokens
        self.timestep = self.exact_timestep()
        self._vae: Any = None
        key = (type(self).__name__, str(self.max_text_tokens), str(self.dtype), folder.text_fingerprint)
        versions = (version("diffusers"), version("transformers"))
        self.text = TextStore((*key, *versions), self._load_encoder, self.device, cache_folder())

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
            if value < multiple or value % multiple:
                near = max(1, round(value / multiple)) * multiple
                raise ValueError(f"{name} must be a positive multiple of {multiple}, found {value}; nearest: {near}")
        if size.frames != 1:
            raise ValueError(f"frames must be 1 for a model of images, found {size.frames}")

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
            raise ValueError(f"prompts must be a sequence of at least one prompt, found {prompts!r}")
        scale = self.model.scale if guidance is None else guidance
        if not scale > 0:
            raise ValueError(f"guidance must be positive, found {scale}")
        if self.model.guidance == "none" and scale != 1:
            raise ValueError(f"guidance: {self.name} is distilled to be used without; allowed: 1, found {scale}")
        return PretrainedPolicy(self, tuple(prompts), scale)

    def schedule(self, steps: int) -> Tensor:
        """Sigmas of the pipeline's own scheduler, ``[steps + 1]``, fp64, the last one 0."""
        import diffusers

        scheduler = diffusers.FlowMatchEulerDiscreteScheduler.from_config(self.scheduler_config())
        if steps < 1:
            raise ValueError(f"steps must be at least 1, found {steps}")
        scheduler.set_timesteps(**({"num_inference_steps": steps} | self.schedule_arguments(steps)))
        return check_sigmas(scheduler.sigmas)

    def scheduler_config(self) -> dict[str, Any]:
        """Configuration of the flow-matching scheduler that the folder's own scheduler amounts to."""
        return {key: value for key, value in self.configs.scheduler.items() if not key.startswith("_")}

    @torch.no_grad()
    def decode(self, latents: Tensor) -> Tensor:
        """Latents ``[N, *latent_shape]`` to images ``[N, 3, H, W]`` in [0, 1], fp32. Of a video the middle frame."""
        images = self.decode_video(latents)
        return images[:, :, images.shape[2] // 2]

    @torch.no_grad()
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
        return transformer

    def _load_vae(self) -> Any:
        import diffusers

        self.folder.require_class("vae", self.vae_class)
        load = getattr(diffusers, self.vae_class).from_pretrained
        vae = load(self.folder.path, subfolder="vae", **dtype_argument(self.vae_dtype or self.dtype), **LOCAL)
        return vae.to(self.device).eval().requires_grad_(False)

    def _load_encoder(self) -> Callable[[str], Text]:
        import diffusers

        load = getattr(diffusers, self.pipeline_class).from_pretrained
        pipeline = load(self.folder.path, **self.without_networks(), **dtype_argument(self.dtype), **LOCAL).to(
            self.device
        )
        return lambda prompt: self.encode(pipeline, prompt)

    @classmethod
    def without_networks(cls) -> dict[str, None]:
        """Parts of the pipeline that encoding a prompt does not need."""
        return {"transformer": None, "vae": None}


LOCAL = {"local_files_only": True, "use_safetensors": True}
"""Every part is read from the folder alone, and never unpickled."""


class PretrainedPolicy:
    """A `jagg_core.policy.VelocityPolicy` over a `PretrainedBackbone`: the prompts of a rollout, and their guidance."""

    def __init__(self, backbone: PretrainedBackbone, prompts: tuple[str, ...], scale: float) -> None:
        self.backbone = backbone
        self.prompts = prompts
        self.scale = scale
        self.embeds = backbone.model.guidance == "embedded"
        self.contrasts = backbone.model.guidance == "cfg" and scale != 1
        distinct = list(dict.fromkeys(prompts))
        self._texts = TextBatch.stack(backbone.text([*distinct, backbone.negative] if self.contrasts else distinct))
        places = {prompt: place for place, prompt in enumerate(distinct)}
        self._places = torch.tensor([places[prompt] for prompt in prompts], device=backbone.device)
        self._negative = len(distinct)

    def velocity(self, latents: Tensor, sigma: Tensor, rows: Tensor) -> Tensor:
        """See `jagg_core.policy.VelocityPolicy`. fp32 where guidance combines two velocities."""
        places = self._places[rows]
        if not self.contrasts:
            return self._call(latents, sigma, places)
        negative = torch.full_like(places, self._negative)
        if self.backbone.calls == "batched":
            both = self._call(torch.cat([latents, latents]), torch.cat([sigma, sigma]), torch.cat([places, negative]))
            conditional, unconditional = both.chunk(2)
        else:
            conditional, unconditional = (self._call(latents, sigma, p) for p in (places, negative))
        return self.backbone.combine(conditional.float(), unconditional.float(), self.scale)

    def _call(self, latents: Tensor, sigma: Tensor, places: Tensor) -> Tensor:
        backbone, dtype = self.backbone, self.backbone.dtype
        backbone.timestep.tell(sigma)
        guidance = self.scale if self.embeds else None
        return backbone.call(latents.to(dtype), sigma.to(dtype), self._texts[places], guidance)

    def parameters(self) -> list[nn.Parameter]:
        """The transformer's parameters, frozen ones included."""
        return list(self.backbone.transformer.parameters())

    def signature(self) -> dict[str, str]:
        """What a replay must have in common with the rollout."""
        backbone = self.backbone
        told = [self.prompts, backbone.negative if self.contrasts else None, backbone.max_text_tokens]
        return {
            "backbone": backbone.name,
            "guidance": repr(self.scale),
            "dtype": str(backbone.dtype).removeprefix("torch."),
            "size": f"{backbone.size.height}x{backbone.size.width}x{backbone.size.frames}",
            "prompts": hashlib.blake2b(json.dumps(told).encode(), digest_size=8).hexdigest(),
        }


def configs_of(folder: ModelFolder) -> Configs:
    """The configurations of a folder's parts.

    Raises:
        ValueError: one is missing or unreadable.
    """
    return Configs(folder.config("transformer"), folder.config("vae"), folder.config("scheduler"))


def _require_classes(model: PublishedModel) -> None:
    """Raise ValueError unless the installed libraries have what the model needs."""
    install = "pip install -U 'jagg-core[pretrained]'"
    try:
        import diffusers
        import transformers  # noqa: F401 (the text encoders are its models)
    except ImportError as error:
        raise ValueError(f"backbone {model.name!r} needs diffusers and transformers: {install}") from error
    for name in (model.family.transformer_class, model.family.pipeline_class, model.family.vae_class):
        if not hasattr(diffusers, name):
            raise ValueError(
                f"backbone {model.name!r} needs {name}, which the installed diffusers {diffusers.__version__} has not: "
                f"{install}"
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
) -> PretrainedBackbone:
    """Load a model in eval mode.

    Args:
        model: what to load.
        device: for the transformer, the VAE and, while they encode, the text encoders.
        dtype: of all of them, but for VAEs that need fp32.
        path: a local folder in diffusers' layout, or another hub id of the same architecture.
        revision: branch, tag or commit of the hub.
        height: in pixels.
        width: in pixels.
        frames: of a video.
        prompts: a text file with a prompt per line, to draw from; default: a few of ours.
        negative_prompt: for classifier-free guidance; default: the family's.
        text_tokens: tokens a prompt may have; default: the family's.
        calls: whether guidance makes one batched call or two.
        lora_rank: above 0, train a LoRA of this rank instead of the weights. Needs peft.
        lora_alpha: its scale; default: twice the rank.

    Raises:
        ValueError: an option out of range, no access, or a folder that is not this model's; before weights are read.
    """
    if calls not in get_args(Calls):
        raise ValueError(f"calls must be one of {list(get_args(Calls))}, found {calls!r}")
    for name, value, low in (("text_tokens", text_tokens, 1), ("lora_rank", lora_rank, 0)):
        if value is not None and value < low:
            raise ValueError(f"{name} must be at least {low}, found {value}")
    if lora_alpha is not None and not (lora_rank > 0 and lora_alpha > 0):
        raise ValueError(f"lora_alpha must be positive, beside a lora_rank, found {lora_alpha} at rank {lora_rank}")
    most = model.family.most_text_tokens
    if text_tokens is not None and most is not None and text_tokens > most:
        raise ValueError(f"text_tokens must be at most {most} for {model.name}, found {text_tokens}")
    texts = PROMPTS if prompts is None else read_prompts(prompts)
    family = model.family
    _require_classes(model)
    folder = find_folder(model.hub_id, path, revision)
    folder.require_class("transformer", family.transformer_class)
    default = model.size
    size = Size(
        *(
            d if v is None else v
            for v, d in zip((height, width, frames), (default.height, default.width, default.frames), strict=True)
        )
    )
    family.check_size(configs_of(folder), size)
    folder.check_weights()
    transformer = family.load_transformer(folder, dtype).to(device).eval()
    backbone = family(
        model,
        folder,
        transformer,
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
