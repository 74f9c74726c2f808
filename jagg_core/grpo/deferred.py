"""Gradients that stay on their rank until an optimizer step needs the mean over all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from jagg_core.devices import free_memory
from jagg_core.distributed import on_any_rank


class DeferredGradients:
    """Reduces FSDP2's gradients once per optimizer step instead of after every backward.

    Between `keep` and `reduce`, backwards add up whole gradients on each rank (``set_requires_gradient_sync``). At the
    end of any backward FSDP2 reduces what all units of a transformer hold, also units that it did not reach: so
    `reduce` makes one through a unit of its own that has no weights. How many came before does not matter.

    Made after sharding and before the first forward, at which FSDP2 looks for its units.

    Attributes:
        nbytes: of the unreduced gradients, which each rank keeps whole: 4 per trained parameter, 8 under fp64.

    Raises:
        ValueError: on some rank they do not fit.
    """

    def __init__(self, transformer: Any, parameters: Sequence[Tensor]) -> None:
        from torch.distributed.fsdp import fully_shard

        self._transformer, self._parameters = transformer, list(parameters)
        first: Any = parameters[0]
        self.nbytes = sum(p.numel() * p.element_size() for p in parameters)
        free = free_memory(first.device)
        if on_any_rank(free is not None and self.nbytes > free, first.device):
            left = "an unknown amount" if free is None else f"{free / 2**30:.2f} GiB"
            raise ValueError(
                f"defer_gradient_sync keeps {self.nbytes / 2**30:.2f} GiB of unreduced gradients on every rank, got "
                f"{left} free on this one: train a LoRA, or leave it off"
            )
        transformer.add_module("gradient_sync", fully_shard(nn.Identity(), mesh=first.device_mesh))
        self._probe = torch.zeros(1, device=first.device, requires_grad=True)

    def keep(self) -> None:
        """From here on, backwards leave their gradients on the rank."""
        self._transformer.set_requires_gradient_sync(False)

    def reduce(self) -> None:
        """Put the mean over ranks of what was kept into ``.grad``, as later backwards do again. Called on every rank.

        Raises:
            RuntimeError: this version of FSDP2 reduced nothing.
        """
        self._transformer.set_requires_gradient_sync(True)
        self._transformer.gradient_sync(self._probe).sum().backward()
        if all(parameter.grad is None for parameter in self._parameters):
            raise RuntimeError(f"defer_gradient_sync does not work with torch {torch.__version__}: leave it off")
