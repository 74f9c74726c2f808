"""Small class-conditional transformers on pixels, trained by rectified flow and shipped with the package.

They use diffusers' transformer classes at a small size: the architecture is a text-to-image model's, the scale is not.
A prompt is a class name from a fixed list; it enters as one text token and as pooled projection.
"""

from __future__ import annotations

import hashlib
import json
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

from jagg_core.backbones.lora import add_lora, check_lora
from jagg_core.backbones.pretrained.prompts import read_prompts
from jagg_core.backbones.repairs import ExactTimestep
from jagg_core.files import write_tensors
from jagg_core.policy import guided


@dataclass(frozen=True)
class PixelSpec(ABC):
    """A shipped backbone: images, packing, transformer size.

    Latents are ``[tokens, channels]`` with ``tokens = (size / patch)^2`` and ``channels = image_channels patch^2``:
    pixels in [0, 1], shifted by ``mean``, divided by ``std``, and packed in patches row by row.
    """

    name: str
    dataset: Literal["digits", "photos", "emoji"]
    prompts: tuple[str, ...]
    image_channels: int
    size: int
    patch: int
    mean: float
    std: float
    heads: int = 3
    head_dim: int = 32
    rope_axes: tuple[int, int, int] = (8, 12, 12)
    text_dim: int = 64

    @abstractmethod
    def build(self) -> PixelModule:
        """Builds the module with random weights."""

    @property
    def words(self) -> tuple[str, ...]:
        """Lists what has a row in the table of embeddings: here whole prompts."""
        return self.prompts

    def prompt_ids(self, prompts: Sequence[str]) -> Tensor:
        """Looks up prompts in the table of embeddings: rows ``[N]``.

        Raises:
            ValueError: a prompt that the backbone was not trained on.
        """
        unknown = sorted({p for p in prompts if p not in self.prompts}, key=str)
        if unknown:
            raise ValueError(f"prompts must be of {list(self.prompts)} for {self.name}, got {unknown!r}")
        return torch.tensor([self.prompts.index(p) for p in prompts])

    @property
    def side(self) -> int:
        """Counts tokens per image side."""
        return self.size // self.patch

    @property
    def latent_shape(self) -> tuple[int, int]:
        """Computes ``(tokens, channels)`` of one sample."""
        return self.side**2, self.image_channels * self.patch**2

    def encode(self, images: Tensor) -> Tensor:
        """Converts images ``[N, C, H, W]`` in [0, 1] to packed latents ``[N, tokens, channels]``."""
        n, channels, p, side = len(images), self.image_channels, self.patch, self.side
        patches = ((images - self.mean) / self.std).reshape(n, channels, side, p, side, p)
        return patches.permute(0, 2, 4, 1, 3, 5).reshape(n, side * side, channels * p * p)

    def decode(self, latents: Tensor) -> Tensor:
        """Converts packed latents ``[N, tokens, channels]`` to images ``[N, C, H, W]``, clamped to [0, 1], fp32."""
        n, channels, p, side = len(latents), self.image_channels, self.patch, self.side
        patches = latents.float().reshape(n, side, side, channels, p, p).permute(0, 3, 1, 4, 2, 5)
        return (patches.reshape(n, channels, self.size, self.size) * self.std + self.mean).clamp(0, 1)


class PixelModule(nn.Module, ABC):
    """A diffusers transformer with a table of embeddings, of prompts or words, in the place of text encoders.

    The last row of the table is the empty prompt, used for classifier-free guidance.
    """

    transformer: Any  # a diffusers model, which carries no types
    block_lists: ClassVar[tuple[str, ...]]
    """Attributes of the transformer that hold its blocks."""
    lora_targets: ClassVar[tuple[str, ...]]
    """Names of the linear layers that LoRA adapts, as peft matches them."""

    def __init__(self, transformer: nn.Module, timestep_factor: float, words: int, width: int) -> None:
        super().__init__()
        self.transformer = transformer
        self.prompt_table = nn.Embedding(words + 1, width)
        self.timestep = ExactTimestep(self.transformer.time_text_embed, factor=timestep_factor)

    def forward(self, latents: Tensor, sigma: Tensor, prompt_ids: Tensor) -> Tensor:
        """Computes velocities ``[N, tokens, channels]`` at ``latents``, ``sigma`` [N] in [0, 1], rows of the table."""
        dtype = self.transformer.dtype
        with self.timestep.given(sigma):
            return self.call(latents.to(dtype), sigma.to(dtype), self.prompt_table(prompt_ids).to(dtype))

    @abstractmethod
    def call(self, latents: Tensor, sigma: Tensor, prompts: Tensor) -> Tensor:
        """Computes the transformer's output, all in its dtype; ``prompts`` are rows ``[N, width]`` of the table."""


class PixelPolicy:
    """A `VelocityPolicy` over a `PixelModule`: the prompts of a rollout, and optional classifier-free guidance."""

    def __init__(self, module: PixelModule, prompt_ids: Tensor, empty: int, guidance: float, name: str) -> None:
        self.module = module
        self.prompt_ids = prompt_ids
        self.empty = empty
        self.guidance = guidance
        self.name = name

    def velocity(self, latents: Tensor, sigma: Tensor, rows: Tensor) -> Tensor:
        """Computes velocities ``[N, tokens, channels]``, guided if the policy is."""
        ids = self.prompt_ids[rows]
        if self.guidance == 1.0:
            return self.module(latents, sigma, ids)
        both = self.module(
            torch.cat([latents, latents]), torch.cat([sigma, sigma]), torch.cat([ids, torch.full_like(ids, self.empty)])
        )
        conditional, unconditional = both.chunk(2)
        return guided(conditional, unconditional, self.guidance)

    def parameters(self) -> list[nn.Parameter]:
        """Returns the transformer's parameters; the prompt table plays the frozen text encoder."""
        return list(self.module.transformer.parameters())

    def signature(self) -> dict[str, str]:
        """Returns the settings that a replay must share with the rollout."""
        prompts = hashlib.blake2b(json.dumps(self.prompt_ids.tolist()).encode(), digest_size=8).hexdigest()
        dtype = str(self.parameters()[0].dtype).removeprefix("torch.")
        return {"backbone": self.name, "guidance": repr(self.guidance), "dtype": dtype, "prompts": prompts}


class PixelBackbone:
    """A shipped backbone, loaded: the module, its prompts and its pixels."""

    def __init__(self, spec: PixelSpec, module: PixelModule, prompts: tuple[str, ...] | None = None) -> None:
        self.spec = spec
        self.module = module
        self.prompts = spec.prompts if prompts is None else prompts
        """Prompts to sample from: those that the backbone was trained on, or others that it can read."""

    @property
    def name(self) -> str:
        """Returns the registered name."""
        return self.spec.name

    @property
    def dataset(self) -> str | None:
        """Names the data set whose classifier can judge the samples; None without one."""
        return self.spec.dataset

    @property
    def latent_shape(self) -> tuple[int, ...]:
        """Returns the shape of one sample's latents."""
        return self.spec.latent_shape

    @property
    def device(self) -> torch.device:
        """Returns the device of the weights."""
        return next(self.module.parameters()).device

    @property
    def transformer(self) -> nn.Module:
        """Returns the diffusers transformer, which is trained, sharded and checkpointed."""
        transformer: nn.Module = self.module.transformer
        return transformer

    @property
    def blocks(self) -> list[nn.Module]:
        """Returns the transformer's blocks in order, for ``fully_shard`` and for activation checkpointing."""
        return [block for name in self.module.block_lists for block in getattr(self.module.transformer, name)]

    def policy(self, prompts: Sequence[str], guidance: float | None = None) -> PixelPolicy:
        """Makes a policy for these prompts, one per sample. ``guidance`` None is 1: none.

        Raises:
            ValueError: a prompt that `PixelSpec.prompt_ids` refuses; no prompts; a guidance that is not finite.
        """
        if len(prompts) == 0:
            raise ValueError("prompts must have at least one, got none")
        if isinstance(prompts, str):
            raise ValueError(f"prompts must be a sequence of strings for {self.name}, got {prompts!r}")
        scale = 1.0 if guidance is None else float(guidance)
        if not math.isfinite(scale):
            raise ValueError(f"guidance must be finite, got {scale}")
        ids = self.spec.prompt_ids(prompts).to(self.device)
        return PixelPolicy(self.module, ids, len(self.spec.words), scale, self.name)

    def decode(self, latents: Tensor) -> Tensor:
        """Decodes latents ``[N, tokens, channels]`` to images ``[N, C, H, W]`` in [0, 1], fp32."""
        return self.spec.decode(latents)

    def enable_gradient_checkpointing(self) -> None:
        """Makes the backward recompute the blocks' activations, by diffusers' switch."""
        self.module.transformer.enable_gradient_checkpointing()


def weights_path(name: str) -> Path:
    """Returns the file of the shipped weights of ``name``."""
    return Path(str(files("jagg_core.backbones").joinpath("weights", f"{name}.safetensors")))


def build_pixel_backbone(
    spec: PixelSpec,
    device: torch.device | str,
    dtype: torch.dtype,
    *,
    lora_rank: int = 0,
    lora_alpha: int | None = None,
    prompts: str | None = None,
) -> PixelBackbone:
    """Loads a backbone with its shipped weights, in eval mode.

    Args:
        spec: the backbone.
        device: device of the weights.
        dtype: dtype of the weights.
        lora_rank: above 0, train a LoRA of this rank instead of the weights. Needs peft.
        lora_alpha: its scale; default: twice the rank.
        prompts: a text file with a prompt per line, to sample from; default: those that it was trained on.

    Raises:
        FileNotFoundError: the weights are missing; says how to rebuild them.
        ValueError: rank or alpha out of range, weights of another configuration, a file that cannot be read, or a
            prompt that `PixelSpec.prompt_ids` refuses.
    """
    check_lora(lora_rank, lora_alpha)
    given = None if prompts is None else read_prompts(prompts)
    spec.prompt_ids(given or ())
    path = weights_path(spec.name)
    if not path.exists():
        raise FileNotFoundError(f"{path} is missing; rebuild it with: python -m jagg_core backbones train {spec.name}")
    with safe_open(path, framework="pt") as file:
        stored = (file.metadata() or {}).get("spec")
    if stored != spec_json(spec):
        raise ValueError(f"{path} was trained with another configuration than {spec.name} has now: retrain it")
    with torch.random.fork_rng(devices=[]):  # the weights it starts with are drawn
        module = spec.build()
    module.load_state_dict({key: value.float() for key, value in load_file(path).items()})
    module = module.to(device=device, dtype=dtype).eval()
    if lora_rank > 0:
        add_lora(module.transformer, module.lora_targets, lora_rank, lora_alpha)
    return PixelBackbone(spec, module, given)


def spec_json(spec: PixelSpec) -> str:
    """Writes the configuration as canonical JSON, as stored in the weights' metadata."""
    return json.dumps(asdict(spec), sort_keys=True)


def save_pixel_weights(spec: PixelSpec, module: nn.Module, path: Path, notes: dict[str, str]) -> None:
    """Writes the weights in half precision (fp16) with the configuration and ``notes`` in the metadata."""
    tensors = {key: value.detach().half() for key, value in module.state_dict().items()}
    write_tensors(path, tensors, {"spec": spec_json(spec), **notes})
