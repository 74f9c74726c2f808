"""What diffusers' models need to be trained: their dtype, exact timesteps, no parameter that nothing reads."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

_SIGMA: ContextVar[Tensor | None] = ContextVar("sigma", default=None)
"""What the running forward was told; of its own in every thread."""


class ExactTimestep:
    """Give a transformer's time embedding sigma in fp32, whatever dtype the transformer rounded it to.

    diffusers casts sigma, or sigma times 1000, to the model's dtype: in bf16 that is off by up to 4 of 1000 steps.
    ``embeddings`` (of one transformer or several) take the timestep as first argument, ``[N]`` or one per token, and
    are to see ``sigma * factor``.
    """

    def __init__(self, *embeddings: nn.Module, factor: float) -> None:
        self.factor = factor
        for embedding in embeddings:
            embedding.register_forward_pre_hook(self._replace)

    @contextmanager
    def tell(self, sigma: Tensor) -> Iterator[None]:
        """Sigma [N] in [0, 1] of the forwards inside, in this thread. Outside, the transformer runs as it is."""
        before = _SIGMA.set(sigma)
        try:
            yield
        finally:
            _SIGMA.reset(before)

    def told(self) -> Tensor | None:
        """Sigma [N] of the running forward, fp32; None if none was told."""
        sigma = _SIGMA.get()
        return None if sigma is None else sigma.float()

    def _replace(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        sigma, (rounded, *others) = self.told(), args
        if sigma is None:
            return args
        if len(sigma) == 0 or len(rounded) % len(sigma):
            raise ValueError(f"{len(sigma)} sigmas were told for a forward with {len(rounded)} timesteps")
        return ((sigma * self.factor).repeat_interleave(len(rounded) // len(sigma)), *others)


def unread_text_stream(transformer: Any) -> list[nn.Module]:
    """The parts of a Qwen-Image transformer's last block whose output nothing reads: its text stream's end.

    They get no gradient, which distributed wrappers and optimizers take for a fault: freeze them.
    """
    last = transformer.transformer_blocks[-1]
    return [last.attn.to_add_out, last.txt_mlp]


def dtype_argument(dtype: torch.dtype) -> dict[str, torch.dtype]:
    """``from_pretrained``'s argument for the dtype, which has moved: ``dtype`` where the old name is deprecated."""
    moved = hasattr(import_module("diffusers.utils.deprecation_utils"), "_resolve_dtype")
    return {"dtype" if moved else "torch_dtype": dtype}
