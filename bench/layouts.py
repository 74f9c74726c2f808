"""Ways to lay a transformer out over ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from bench.settings import Layout
from jagg_core.sharding import shard


def lay_out(
    blocks: Sequence[nn.Module],
    transformer: nn.Module,
    layout: Layout,
    dtype: torch.dtype,
    shards: int = 0,
    some_unused: bool = False,
) -> int:
    """Shards every block and the rest of the transformer, or replicates the transformer. The module stays in place.

    Args:
        blocks: of the transformer.
        transformer: parameters are the same on all ranks.
        layout: see `Layout`.
        dtype: of the network.
        shards: ranks that share a copy, under ``"hsdp"``.
        some_unused: whether some parameters get no gradient, which DistributedDataParallel has to know.

    Returns:
        Units: modules that are gathered and reduced separately; one under ``"ddp"``.
    """
    if layout == "ddp":
        from torch.distributed._composable.replicate import replicate

        device = next(transformer.parameters()).device
        replicated: Any = replicate(transformer, device_id=device, find_unused_parameters=some_unused)
        if dist.get_backend() == "fake":
            replicated.register_comm_hook(None, _reduce)
        return 1
    shard(blocks, transformer, dtype, shards if layout == "hsdp" else 0)
    if layout == "fsdp-no-reshard":
        sharded: Any = transformer
        sharded.set_reshard_after_forward(False)
    return len(blocks) + 1


def _reduce(state: None, bucket: Any) -> torch.futures.Future[torch.Tensor]:
    """Reduces a bucket as DistributedDataParallel does; its default needs a result, and the fake group has none."""
    dist.all_reduce(bucket.buffer())
    done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done


# DistributedDataParallel compares the classes themselves, which are strings here
_reduce.__annotations__ = {"bucket": dist.GradBucket, "return": torch.futures.Future[torch.Tensor]}


@contextmanager
def without_reduction(transformer: Any) -> Iterator[None]:
    """Keeps the gradients of backwards to this rank. Nothing changes for a transformer that is not laid out."""
    switch = getattr(transformer, "set_requires_gradient_sync", lambda on: None)
    switch(False)
    try:
        yield
    finally:
        switch(True)
