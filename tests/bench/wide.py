"""A backbone whose activations outweigh everything else, and one of blocks, for measurements in spawned processes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


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


class Deep(nn.Module):
    """Two small blocks between two projections."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(17, 32), nn.Linear(32, 16)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(32, 32), nn.SiLU()) for _ in range(2))
        self.checkpointing = False

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = x + (checkpoint(block, x, use_reentrant=False) if self.checkpointing else block(x))
        found: Tensor = self.last(x)
        return found


class Prompted(nn.Module):
    """A transformer behind learned prompts, which are not of it, as those of the shipped backbones."""

    def __init__(self, transformer: Deep) -> None:
        super().__init__()
        self.transformer, self.prompt = transformer, nn.Parameter(torch.zeros(17))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.transformer(x.to(self.prompt.dtype) + self.prompt)
        return found


class DeepBackbone:
    """A network of blocks, for counts; of a few thousand weights, so that passes take no time."""

    name, dataset, prompts, latent_shape = "deep", None, ("a", "b"), (16,)

    def __init__(self, device: torch.device | str, dtype: torch.dtype) -> None:
        self.device = torch.device(device)
        torch.manual_seed(0)
        self.module = Prompted(Deep()).to(device, dtype)
        self.transformer = self.module.transformer
        self.blocks = list(self.transformer.blocks)

    def policy(self, prompts: Sequence[str], guidance: float | None = None) -> WidePolicy:
        return WidePolicy(self.module, prompts)

    def decode(self, latents: Tensor) -> Tensor:
        return latents.float().sigmoid().reshape(-1, 1, 4, 4)

    def enable_gradient_checkpointing(self) -> None:
        self.transformer.checkpointing = True


def deep(device: torch.device | str, dtype: torch.dtype) -> DeepBackbone:
    return DeepBackbone(device, dtype)


def dies_on_rank_1(device: torch.device | str, dtype: torch.dtype) -> DeepBackbone:
    if dist.get_rank() == 1:
        raise MemoryError("no room on this rank")
    return DeepBackbone(device, dtype)
