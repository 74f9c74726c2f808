"""Parameters over ranks: sharding by FSDP2, and where the elements lie then.

FSDP2 cuts a parameter along its first dimension: a rank holds a contiguous piece of the flat parameter, possibly an
empty one. Sums over elements are then sums over the pieces.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from jagg_core.distributed import ranks


def shard(blocks: Sequence[nn.Module], transformer: nn.Module, dtype: torch.dtype, shards: int = 0) -> None:
    """Shards every block, and the rest of the transformer, over the default process group by FSDP2.

    The weights stay in their dtype; they are gathered in ``dtype``, and gradients are reduced in fp32 at least. The
    trained weights of a block must share a dtype, the frozen ones may have others (torch 2.8 and newer). No weights
    stay gathered after a forward. ``shards``: ranks that share a copy of the weights; fewer than all make copies
    (HSDP), 0 is all.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    # a block may return a view of a tensor; no code here writes into it
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor", UserWarning)
    first = next(transformer.parameters())
    count = shards or ranks()
    shape, names = ((count,), ("shard",)) if count == ranks() else ((ranks() // count, count), ("replicate", "shard"))
    mesh = init_device_mesh(first.device.type, shape, mesh_dim_names=names)
    reduced = torch.promote_types(dtype, torch.float32)
    precision = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=reduced)
    for module in (*blocks, transformer):
        fully_shard(module, mesh=mesh, reshard_after_forward=True, mp_policy=precision)


@dataclass(frozen=True)
class Piece:
    """Elements ``start .. start + size - 1`` of a flat parameter, held by this rank.

    ``counted``: whether this rank, of its replicas, counts in sums over ranks.
    """

    start: int
    size: int
    counted: bool


class Sharding:
    """How parameters lie over ranks. Plain tensors are whole on this rank alone.

    Attributes:
        mesh: the device mesh of FSDP2's parameters; None for plain tensors.
        pieces: this rank's piece of each parameter.
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
        """Counts the ranks that share one batch: FSDP2's gradients are means over them."""
        return 1 if self.mesh is None else int(self.mesh.size())

    def sum(self, tensor: Tensor) -> Tensor:
        """Sums over the ranks of the mesh, in place."""
        for dim in range(0 if self.mesh is None else self.mesh.ndim):
            dist.all_reduce(tensor, group=self.mesh.get_group(dim))
        return tensor

    def any(self, here: bool, device: torch.device) -> bool:
        """Tells whether ``here`` is true on any rank of the mesh."""
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
            raise ValueError(f"parameters must be sharded once, along dimension 0, or replicated; got {placement}")
    local = parameter.to_local()
    return Piece(start * (parameter.numel() // max(rows, 1)), local.numel(), counted)
