"""Mistakes in how ranks were started, met before any work: other settings, or a folder that is not shared.

What one rank can see alone (variables of ``torchrun``, devices) is checked by `jagg_core.distributed.join`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

import torch
import torch.distributed as dist

from jagg_core.distributed import rank, ranks, texts_of_ranks


def require_same_settings(settings: Mapping[str, Any]) -> None:
    """Checks that every rank was started with the same settings, which may be nested. Called on every rank.

    Raises:
        ValueError: some setting differs; raised on every rank, in one line.
    """
    if ranks() == 1:
        return
    every: list[dict[str, str]] = [{}] * ranks()
    dist.all_gather_object(every, dict(_flat(settings)))
    for number, other in enumerate(every):
        for name in sorted(every[0].keys() | other.keys()):
            one, two = every[0].get(name, "nothing"), other.get(name, "nothing")
            if one != two:
                raise ValueError(
                    f"{name} must be the same on all ranks, got {one} on rank 0 and {two} on rank {number}"
                )


def _flat(settings: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, str]]:
    for name, value in settings.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{before}{name}.")
        else:
            yield f"{before}{name}", repr(value)


def require_shared(folder: Path, device: torch.device) -> None:
    """Checks that a folder of the first rank is the same folder on every rank. Called on every rank.

    Raises:
        ValueError: some ranks do not see what the first writes there; raised on every rank, in one line.
    """
    if ranks() == 1:
        return
    name: list[str] = [""]
    with ExitStack() as held:
        if rank() == 0:
            file = held.enter_context(NamedTemporaryFile(dir=folder, prefix=".seen-by-ranks-"))
            name = [Path(file.name).name]
        dist.broadcast_object_list(name, device=device)
        seen = (folder / name[0]).exists()
        unseen = texts_of_ranks("" if seen else str(folder.absolute()), device)
    if unseen:
        raise ValueError(f"out must be a folder that all ranks share, got one that some do not see: {unseen}")
