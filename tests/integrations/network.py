"""What the hosts have in common: a small network called as diffusers' transformers are, rollouts, loss, optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from torch import Tensor, nn

from jagg_core.transitions import Transition
from tests.jagg_core.literal import as_column, kernel_log_prob, kernel_step

Names = dict[str, Any]
"""What a host's script has as local names."""

Inner = Callable[[Names], None]
"""What runs in the place of a loop over trained steps."""

SHAPE = (2, 3)
"""Latent shape of one sample."""


class Transformer(nn.Module):
    """A tanh network with something to switch off as an adapter is. ``time_unit``: 1000 where 1 is told as 1000."""

    def __init__(self, dtype: torch.dtype, time_unit: float = 1.0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.inner = nn.Parameter(torch.randn(8, 11, generator=generator, dtype=torch.float64).to(dtype) / 3)
        self.outer = nn.Parameter(torch.randn(6, 8, generator=generator, dtype=torch.float64).to(dtype) / 3)
        self.base = nn.Parameter(torch.randn(6, 8, generator=generator, dtype=torch.float64).to(dtype) / 3, False)
        self.time_unit = time_unit
        self.with_adapter = True
        self.graphs: list[bool] = []

    def forward(
        self,
        hidden_states: Tensor,
        timestep: Tensor,
        encoder_hidden_states: Tensor,
        pooled_projections: Tensor,
        guidance: Tensor | None = None,
        txt_ids: Tensor | None = None,
        img_ids: Tensor | None = None,
        joint_attention_kwargs: None = None,
        return_dict: bool = False,
    ) -> tuple[Tensor]:
        self.graphs.append(torch.is_grad_enabled())
        text = encoder_hidden_states.mean(1)
        told = timestep[:, None] / self.time_unit + (0 if guidance is None else guidance[:, None] / 10)
        features = torch.cat([hidden_states.flatten(1), text, pooled_projections[:, :1], told], dim=1)
        outer = self.base + self.outer if self.with_adapter else self.base
        return ((torch.tanh(features @ self.inner.T) @ outer.T).reshape(hidden_states.shape),)

    @contextmanager
    def disable_adapter(self) -> Iterator[None]:
        self.with_adapter = False
        try:
            yield
        finally:
            self.with_adapter = True


def draw(seed: int, *shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


@torch.no_grad()
def sample_steps(
    velocity: Callable[[Tensor, Tensor], Tensor],
    schedule: Tensor,
    kernel: Transition,
    seed: int,
    batch: int,
    dtype: torch.dtype,
    sde: Tensor | None = None,
) -> Names:
    """What a host stores of its rollout, all steps but the last, batch first: ``[B, N - 1, ...]``.

    ``sde`` [B, N - 1] bool: the steps with noise; the others are deterministic.
    """
    state = draw(seed, batch, *SHAPE, dtype=dtype)
    found: dict[str, list[Tensor]] = {"latents": [], "next_latents": [], "log_probs": [], "velocities": []}
    for step in range(len(schedule) - 2):
        v = velocity(state, schedule[step].to(dtype).expand(batch))
        mean, scale = kernel_step(kernel, state, v, schedule[step], schedule[step + 1])
        after = mean + scale * draw(1000 * seed + step, batch, *SHAPE, dtype=dtype)
        if sde is not None:
            euler = state + as_column(schedule[step + 1] - schedule[step], state) * v
            after = torch.where(sde[:, step, None, None], after, euler)
        log_prob = kernel_log_prob(kernel, after, mean, scale)
        for name, value in zip(found, (state, after, log_prob, v), strict=True):
            found[name].append(value)
        state = after
    return {name: torch.stack(values, 1) for name, values in found.items()}


def surrogate(log_prob: Tensor, old: Tensor, advantages: Tensor, clip_range: float, adv_clip_max: float) -> Tensor:
    advantages = torch.clamp(advantages, -adv_clip_max, adv_clip_max)
    ratio = torch.exp(log_prob - old)
    unclipped = -advantages * ratio
    return torch.mean(torch.maximum(unclipped, -advantages * torch.clamp(ratio, 1.0 - clip_range, 1.0 + clip_range)))


def text_of(seed: int, batch: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return draw(seed, batch, 2, 3, dtype=dtype), draw(seed + 1, batch, 2, dtype=dtype)


def common(
    dtype: torch.dtype, accumulate: int | None = None, time_unit: float = 1.0, network: Transformer | None = None
) -> Names:
    """Model and optimizer, prepared by Accelerate if it counts ``accumulate`` contexts per optimizer step."""
    transformer = Transformer(dtype, time_unit) if network is None else network
    trained = [p for p in transformer.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.3, momentum=0.5)
    names: Names = {"torch": torch, "transformer": transformer, "optimizer": optimizer, "autocast": nullcontext}
    names |= {"dtype": dtype, "network": transformer, "optimizer_steps": []}
    optimizer.register_step_post_hook(lambda *_: names["optimizer_steps"].append(1))
    if accumulate is not None:
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulate)
        transformer, optimizer = accelerator.prepare(transformer, optimizer)
        names |= {"accelerator": accelerator, "transformer": transformer, "optimizer": optimizer}
    return names
