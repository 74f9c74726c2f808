"""Repairs of diffusers' models for training: exact timesteps, unread parameters, the argument for the dtype."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

_SIGMA: ContextVar[Tensor | None] = ContextVar("sigma", default=None)
"""Sigma of the running forward, in this thread."""


class ExactTimestep:
    """Gives a transformer's time embedding sigma in fp32, whatever dtype the transformer rounded it to.

    diffusers casts sigma, or sigma times 1000, to the model's dtype: in bf16 that is off by up to 4 of 1000 steps.
    ``embeddings`` (of one transformer or several) take the timestep as first argument, ``[N]`` or one per token, and
    are to see ``sigma * factor``.
    """

    def __init__(self, *embeddings: nn.Module, factor: float) -> None:
        self.factor = factor
        for embedding in embeddings:
            embedding.register_forward_pre_hook(self._replace)

    @contextmanager
    def given(self, sigma: Tensor) -> Iterator[None]:
        """Sets sigma [N] in [0, 1] for the forwards in the body, in this thread."""
        before = _SIGMA.set(sigma)
        try:
            yield
        finally:
            _SIGMA.reset(before)

    def sigma(self) -> Tensor | None:
        """Returns sigma [N] of the running forward, fp32; None outside of `given`."""
        sigma = _SIGMA.get()
        return None if sigma is None else sigma.float()

    def _replace(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        sigma, (rounded, *others) = self.sigma(), args
        if sigma is None:
            return args
        if len(sigma) == 0 or len(rounded) % len(sigma):
            raise ValueError(f"timesteps must be a multiple of the {len(sigma)} sigmas given, got {len(rounded)}")
        return ((sigma * self.factor).repeat_interleave(len(rounded) // len(sigma)), *others)


def unread_text_stream(transformer: Any) -> list[nn.Module]:
    """Returns the parts of a Qwen-Image transformer whose output is not read: the end of its last text stream.

    They get no gradient, which distributed wrappers and optimizers take for a fault: freeze them.
    """
    last = transformer.transformer_blocks[-1]
    return [last.attn.to_add_out, last.txt_mlp]


def dtype_argument(dtype: torch.dtype) -> dict[str, torch.dtype]:
    """Gives the dtype to ``from_pretrained`` under its name: ``dtype`` where ``torch_dtype`` is deprecated."""
    moved = hasattr(import_module("diffusers.utils.deprecation_utils"), "_resolve_dtype")
    return {"dtype" if moved else "torch_dtype": dtype}
