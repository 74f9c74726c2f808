"""Where the elements of parameters lie over ranks, and what ranks decide together.

FSDP2 cuts a parameter along its first dimension: what a rank holds is a contiguous piece of the flat parameter,
possibly an empty one. Sums over elements are then sums over the pieces.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def on_any_rank(here: bool, device: torch.device) -> bool:
    """Whether something is true on this or any other rank of the default process group."""
    if not (dist.is_available() and dist.is_initialized()):
        return here
    flag = torch.tensor(int(here), device=device)
    dist.all_reduce(flag, op=dist.ReduceOp.MAX)
    return bool(flag.item())


@dataclass(frozen=True)
class Piece:
    """Elements ``start .. start + size - 1`` of a flat parameter, held by this rank.

    ``counted``: whether this rank is the one of its replicas that counts in sums over ranks.
    """

    start: int
    size: int
    counted: bool


class Sharding:
    """How parameters lie over ranks. Plain tensors: whole on this rank, which is on its own.

    Attributes:
        mesh: the device mesh of FSDP2's parameters; None for plain tensors.
        pieces: what this rank holds of each parameter.
        sizes: elements of each whole parameter.

    Raises:
        ValueError: plain and sharded parameters together, different meshes, or sharding along another dimension.
    """

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        meshes = [getattr(p, "device_mesh", None) for p in parameters]
        if any(mesh != meshes[0] for mesh in meshes):
            raise ValueError("parameters must all be sharded over one device mesh, or all be plain tensors")
        self.mesh: Any = meshes[0] if meshes else None
        self.sizes = [p.numel() for p in parameters]
        self.pieces = [_piece(p) for p in parameters]

    @property
    def ranks(self) -> int:
        """Ranks that share one batch: FSDP2's gradients are means over them."""
        return 1 if self.mesh is None else int(self.mesh.size())

    def sum(self, tensor: Tensor) -> Tensor:
        """Sum over the ranks of the mesh, in place."""
        for dim in range(0 if self.mesh is None else self.mesh.ndim):
            dist.all_reduce(tensor, group=self.mesh.get_group(dim))
        return tensor

    def any(self, here: bool, device: torch.device) -> bool:
        """Whether something is true on any rank of the mesh."""
        return bool(self.sum(torch.tensor(float(here), device=device)).item() > 0)


def _piece(parameter: Any) -> Piece:
    if not hasattr(parameter, "placements"):
        return Piece(0, parameter.numel(), True)
    rows, start, counted = int(parameter.shape[0]) if parameter.ndim else 1, 0, True
    sharded = False
    for dim, placement in enumerate(parameter.placements):
        coordinate, count = parameter.device_mesh.get_local_rank(dim), parameter.device_mesh.size(dim)
        if placement.is_replicate():
            counted &= coordinate == 0
        elif type(placement).__name__ == "Shard" and placement.is_shard(0) and not sharded:
            sharded = True
            chunk = -(-rows // count)  # as torch.chunk cuts
            start = min(coordinate * chunk, rows)
        else:
            raise ValueError(f"parameters must be sharded once, along dimension 0, or replicated; found {placement}")
    local = parameter.to_local()
    return Piece(start * (parameter.numel() // max(rows, 1)), local.numel(), counted)
