"""A backbone whose activations outweigh everything else, for measurements in spawned processes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn


class WidePolicy:
    """One hidden layer of 4096: 16 KiB of activations per sample and layer."""

    def __init__(self, net: nn.Module, prompts: Sequence[str]) -> None:
        self.net = net
        self.prompts = list(prompts)

    def velocity(self, latents: Tensor, sigma: Tensor, rows: Tensor) -> Tensor:
        found: Tensor = self.net(torch.cat([latents, sigma[:, None]], dim=1))
        return found

    def parameters(self) -> list[nn.Parameter]:
        return list(self.net.parameters())

    def signature(self) -> dict[str, str]:
        return {"backbone": "wide", "prompts": repr(self.prompts)}


class WideBackbone:
    """Grey images of 4x4 pixels."""

    name, dataset, prompts, latent_shape = "wide", None, ("a", "b"), (16,)

    def __init__(self, device: torch.device | str, dtype: torch.dtype) -> None:
        self.device = torch.device(device)
        torch.manual_seed(0)
        self.transformer = nn.Sequential(nn.Linear(17, 4096), nn.SiLU(), nn.Linear(4096, 16)).to(device, dtype)

    def policy(self, prompts: Sequence[str], guidance: float | None = None) -> WidePolicy:
        return WidePolicy(self.transformer, prompts)

    def decode(self, latents: Tensor) -> Tensor:
        return latents.float().sigmoid().reshape(-1, 1, 4, 4)

    def enable_gradient_checkpointing(self) -> None:
        raise AssertionError("not asked for")


def load(device: torch.device | str, dtype: torch.dtype) -> WideBackbone:
    return WideBackbone(device, dtype)


def broken(device: torch.device | str, dtype: torch.dtype) -> WideBackbone:
    raise MemoryError("no room for this model")
