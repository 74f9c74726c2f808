"""Velocities of a pretrained model: the prompts of a rollout, and their guidance."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from jagg_core.backbones.pretrained.text import TextBatch

if TYPE_CHECKING:
    from jagg_core.backbones.pretrained.base import PretrainedBackbone


class PretrainedPolicy:
    """A `jagg_core.policy.VelocityPolicy` over a `PretrainedBackbone`: the prompts of a rollout, and their guidance."""

    def __init__(self, backbone: PretrainedBackbone, prompts: tuple[str, ...], scale: float) -> None:
        self.backbone = backbone
        self.prompts = prompts
        self.scale = scale
        self.embeds = backbone.model.guidance == "embedded"
        self.contrasts = backbone.model.guidance == "cfg" and scale != 1
        distinct = list(dict.fromkeys(prompts))
        texts = backbone.text([*distinct, backbone.negative] if self.contrasts else distinct)
        self._texts = TextBatch.stack(texts).to(backbone.device)
        places = {prompt: place for place, prompt in enumerate(distinct)}
        self._places = torch.tensor([places[prompt] for prompt in prompts], device=backbone.device)
        self._negative = len(distinct)

    def velocity(self, latents: Tensor, sigma: Tensor, rows: Tensor) -> Tensor:
        """Computes velocities ``[N, *latent_shape]``; fp32 where guidance combines two."""
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
        guidance = self.scale if self.embeds else None
        with backbone.timestep.given(sigma):
            return backbone.call(latents.to(dtype), sigma.to(dtype), self._texts[places], guidance)

    def parameters(self) -> list[nn.Parameter]:
        """Returns the transformer's parameters, frozen ones included."""
        return list(self.backbone.transformer.parameters())

    def signature(self) -> dict[str, str]:
        """Returns the settings that a replay must share with the rollout."""
        backbone = self.backbone
        negative = backbone.negative if self.contrasts else None
        text = [self.prompts, negative, backbone.max_text_tokens, backbone.text_fingerprint]
        return {
            "backbone": backbone.name,
            "guidance": repr(self.scale),
            "dtype": str(backbone.dtype).removeprefix("torch."),
            "size": f"{backbone.size.height}x{backbone.size.width}x{backbone.size.frames}",
            "parameters": str(backbone.parameters),
            "prompts": hashlib.blake2b(json.dumps(text).encode(), digest_size=8).hexdigest(),
        }
