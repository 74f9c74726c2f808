"""Wan 2.1 and 2.2: text to video; UMT5 text, a VAE over time, classifier-free guidance, one transformer or two."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from jagg_core.backbones.pretrained.base import PretrainedBackbone
from jagg_core.backbones.pretrained.folder import ModelFolder
from jagg_core.backbones.pretrained.published import Configs, PublishedModel, Size
from jagg_core.backbones.pretrained.text import Text, TextBatch, TextShape
from jagg_core.backbones.repairs import ExactTimestep


def _exact_timestep(*transformers: Any) -> ExactTimestep:
    return ExactTimestep(*(t.condition_embedder.timesteps_proj for t in transformers), factor=1000)


class Wan(PretrainedBackbone):
    """diffusers' ``WanTransformer3DModel``. Latents are ``[C, (frames - 1) / 4 + 1, H/8, W/8]``, H/16 in Wan 2.2's 5B.

    All tokens of a sample have one timestep, also in the 5B, whose pipeline gives one to every token: the values are
    equal, and a modulation per token would take more memory than anything else.
    """

    transformer_class = "WanTransformer3DModel"
    pipeline_class = "WanPipeline"
    vae_class = "AutoencoderKLWan"
    block_lists = ("blocks",)
    lora_targets = ("to_q", "to_k", "to_v", "to_out.0", "ffn.net.0.proj", "ffn.net.2")
    tiny = MappingProxyType(
        {
            "patch_size": (1, 2, 2),
            "num_attention_heads": 2,
            "attention_head_dim": 8,
            "in_channels": 4,
            "out_channels": 4,
            "text_dim": 16,
            "freq_dim": 16,
            "ffn_dim": 32,
            "num_layers": 2,
            "rope_max_seq_len": 32,
        }
    )
    text_tokens = 512
    vae_dtype = torch.float32

    @classmethod
    def multiple(cls, configs: Configs) -> int:
        """Counts the VAE's pixels in a patch."""
        return _vae_pixels(configs) * int(configs.transformer["patch_size"][1])

    @classmethod
    def check_size(cls, configs: Configs, size: Size) -> None:
        """Checks also the frames: the VAE takes the first one by itself, the others in groups."""
        super().check_size(configs, Size(size.height, size.width))
        group = _vae_frames(configs)
        if size.frames < 1 or size.frames % group != 1 % group:
            near = max(0, round((size.frames - 1) / group)) * group + 1
            raise ValueError(f"frames must be {group} k + 1, got {size.frames}; nearest: {near}")

    @classmethod
    def shape_of(cls, configs: Configs, size: Size) -> tuple[int, ...]:
        pixels, frames = _vae_pixels(configs), (size.frames - 1) // _vae_frames(configs) + 1
        return int(configs.transformer["in_channels"]), frames, size.height // pixels, size.width // pixels

    @property
    def dtype(self) -> torch.dtype:
        """Returns the dtype that the transformer computes in; diffusers keeps its norms and tables in fp32."""
        return next(p.dtype for name, p in self.transformer.named_parameters() if "patch_embedding" in name)

    @classmethod
    def text_shape(cls, transformer: Mapping[str, Any], text_tokens: int) -> TextShape:
        return TextShape(text_tokens, transformer["text_dim"])

    def exact_timestep(self) -> ExactTimestep:
        return _exact_timestep(self._transformer)

    def scheduler_config(self) -> dict[str, Any]:
        """Returns Euler's scheduler at the ``flow_shift`` of the published one, UniPC."""
        config = super().scheduler_config()
        if "flow_shift" not in config or "shift" in config:
            return config
        return {"num_train_timesteps": config.get("num_train_timesteps", 1000), "shift": config["flow_shift"]}

    def encode(self, pipeline: Any, prompt: str) -> Text:
        """Encodes a prompt, padded with zeros to the full length, as in training."""
        tokens, _ = pipeline.encode_prompt(
            prompt, do_classifier_free_guidance=False, max_sequence_length=self.max_text_tokens
        )
        return Text(tokens[0])

    def call(self, latents: Tensor, sigma: Tensor, text: TextBatch, guidance: float | None) -> Tensor:
        velocity: Tensor = self._transformer(
            hidden_states=latents, timestep=sigma, encoder_hidden_states=text.tokens, return_dict=False
        )[0]
        return velocity

    def decode_latents(self, vae: Any, latents: Tensor) -> Tensor:
        mean, std = (latents.new_tensor(vae.config[name]).reshape(-1, 1, 1, 1) for name in _LATENT_STATISTICS)
        videos: Tensor = vae.decode(latents * std + mean, return_dict=False)[0]
        return videos

    @classmethod
    def without_networks(cls) -> dict[str, None]:
        return super().without_networks() | {"transformer_2": None}

    @classmethod
    def load_transformer(cls, folder: ModelFolder, dtype: torch.dtype) -> nn.Module:
        """Loads the transformer of a folder, on the CPU.

        Raises:
            ValueError: the folder has two experts.
        """
        if _boundary(folder) is not None:
            raise ValueError(f"path: {folder.path} holds two experts, of which this model has one; use wan2.2-a14b")
        return super().load_transformer(folder, dtype)


class Experts(nn.Module):
    """Two transformers as one: ``high`` for samples at sigma >= ``boundary``, ``low`` for the others of a batch.

    Sharded, every rank must give a call the same steps: a rank whose batch needs one expert would wait for the other.
    """

    def __init__(self, high: nn.Module, low: nn.Module, boundary: float) -> None:
        super().__init__()
        self.high, self.low, self.boundary = high, low, boundary
        self.timestep = _exact_timestep(high, low)

    @property
    def blocks(self) -> list[nn.Module]:
        """Returns the blocks of both."""
        return [*self._each[0].blocks, *self._each[1].blocks]

    @property
    def _each(self) -> tuple[Any, Any]:
        return self.high, self.low

    def forward(
        self, hidden_states: Tensor, timestep: Tensor, encoder_hidden_states: Tensor, return_dict: bool = False
    ) -> tuple[Tensor]:
        """Computes velocities in the batch's order. The exact sigma decides: half precision rounds to the boundary."""
        sigma = self.timestep.sigma()
        if sigma is None:  # called by something else than a policy
            sigma = timestep.float() / self.timestep.factor
        high = sigma * self.timestep.factor >= self.boundary * self.timestep.factor
        parts = [mask.nonzero().squeeze(1) for mask in (high, ~high)]
        velocities = []
        for expert, rows in zip(self._each, parts, strict=True):
            if len(rows):
                with self.timestep.given(sigma[rows]):
                    part = expert(hidden_states[rows], timestep[rows], encoder_hidden_states[rows], return_dict=False)
                velocities.append(part[0])
        return (torch.cat(velocities)[torch.cat(parts).argsort()],)

    def enable_gradient_checkpointing(self) -> None:
        """Turns it on for both, by diffusers' switch."""
        for expert in self._each:
            expert.enable_gradient_checkpointing()

    def add_adapter(self, config: Any) -> None:
        """Adds a LoRA to each, through diffusers' adapter interface."""
        for expert in self._each:
            expert.add_adapter(config)


class WanExperts(Wan):
    """Wan 2.2 A14B: an expert for high noise and one for low, both trained. One guidance for both."""

    def exact_timestep(self) -> ExactTimestep:
        timestep: ExactTimestep = self._transformer.timestep
        return timestep

    def parts(self) -> dict[str, nn.Module]:
        """Returns both experts by their names in the pipeline."""
        return {"transformer": self._transformer.high, "transformer_2": self._transformer.low}

    @classmethod
    def build(cls, model: PublishedModel) -> nn.Module:
        high, low = (super(WanExperts, cls).build(model) for _ in range(2))
        return Experts(high, low, BOUNDARY)

    @classmethod
    def load_transformer(cls, folder: ModelFolder, dtype: torch.dtype) -> nn.Module:
        """Loads both transformers of a folder, on the CPU.

        Raises:
            ValueError: the folder has only one.
        """
        boundary = _boundary(folder)
        if boundary is None:
            raise ValueError(f"path: {folder.path} must hold two experts: no boundary_ratio in its model_index.json")
        folder.require_class("transformer_2", cls.transformer_class)
        high, low = (folder.load(part, cls.transformer_class, dtype) for part in ("transformer", "transformer_2"))
        return Experts(high, low, boundary)


BOUNDARY = 0.875
"""Published sigma between the experts."""

_LATENT_STATISTICS = ("latents_mean", "latents_std")


def _vae_pixels(configs: Configs) -> int:
    return int(configs.vae.get("scale_factor_spatial", 8))


def _vae_frames(configs: Configs) -> int:
    return int(configs.vae.get("scale_factor_temporal", 4))


def _boundary(folder: ModelFolder) -> float | None:
    """Reads the sigma at which a pipeline changes between two experts; None for a pipeline of one.

    Raises:
        ValueError: the pipeline's index is missing or unreadable.
    """
    boundary: float | None = folder.index().get("boundary_ratio")
    return boundary


_CONFIG = {
    "patch_size": (1, 2, 2),
    "attention_head_dim": 128,
    "in_channels": 16,
    "out_channels": 16,
    "text_dim": 4096,
    "freq_dim": 256,
    "cross_attn_norm": True,
    "qk_norm": "rms_norm_across_heads",
    "eps": 1e-6,
    "rope_max_seq_len": 1024,
}
_14B = _CONFIG | {"num_attention_heads": 40, "ffn_dim": 13824, "num_layers": 40}

MODELS = (
    PublishedModel(
        name="wan2.1-1.3b",
        hub_id="Wan-AI/Wan2.1-T2V-1.3B-Diffusers",
        licence="Apache-2.0",
        parameters=1_418_996_800,
        config=_CONFIG | {"num_attention_heads": 12, "ffn_dim": 8960, "num_layers": 30},
        family=Wan,
        guidance="cfg",
        scale=5.0,
        size=Size(240, 416, 33),
        description="Wan 2.1 1.3B, text to video",
    ),
    PublishedModel(
        name="wan2.1-14b",
        hub_id="Wan-AI/Wan2.1-T2V-14B-Diffusers",
        licence="Apache-2.0",
        parameters=14_288_491_584,
        config=_14B,
        family=Wan,
        guidance="cfg",
        scale=5.0,
        size=Size(240, 416, 33),
        description="Wan 2.1 14B, text to video",
    ),
    PublishedModel(
        name="wan2.2-5b",
        hub_id="Wan-AI/Wan2.2-TI2V-5B-Diffusers",
        licence="Apache-2.0",
        parameters=4_999_787_712,
        config=(
            _CONFIG
            | {"num_attention_heads": 24, "ffn_dim": 14336, "num_layers": 30, "in_channels": 48, "out_channels": 48}
        ),
        family=Wan,
        vae={"scale_factor_spatial": 16, "scale_factor_temporal": 4},
        guidance="cfg",
        scale=5.0,
        size=Size(256, 416, 33),
        description="Wan 2.2 5B, text to video by a VAE of 16x16 pixels",
    ),
    PublishedModel(
        name="wan2.2-a14b",
        hub_id="Wan-AI/Wan2.2-T2V-A14B-Diffusers",
        licence="Apache-2.0",
        parameters=28_576_983_168,
        config=_14B,
        family=WanExperts,
        guidance="cfg",
        scale=4.0,
        size=Size(240, 416, 33),
        description="Wan 2.2 A14B, text to video, an expert for high noise and one for low",
        transformers=2,
    ),
)
