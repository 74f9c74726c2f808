"""Activation checkpointing of a real transformer: diffusers' Flux, two blocks small (cases 1.5 and 4.8)."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from jagg_core.engine import accumulate_gradients
from jagg_core.objective import ClippedSurrogate
from jagg_core.plans import exact_plan, jagg_plan
from jagg_core.rollouts import rollout
from jagg_core.schedule import dance_schedule
from jagg_core.trajectory import Trajectory
from jagg_core.transitions import DanceSDE
from tests.jagg_core.fields import ADVANTAGES, flat_gradient, relative_error

TOKENS, CHANNELS, STEPS = 4, 4, 6


class FluxField(nn.Module):
    """A Flux transformer with one double and one single block, and a call count per block."""

    def __init__(self) -> None:
        super().__init__()
        from diffusers import FluxTransformer2DModel

        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.transformer = FluxTransformer2DModel(
                patch_size=1,
                in_channels=CHANNELS,
                num_layers=1,
                num_single_layers=1,
                attention_head_dim=16,
                num_attention_heads=2,
                joint_attention_dim=8,
                pooled_projection_dim=8,
                axes_dims_rope=(4, 6, 6),
            )
            self.register_buffer("prompts", torch.randn(4, 8))
        ids = torch.zeros(TOKENS, 3)
        ids[:, 1] = torch.arange(TOKENS)
        self.register_buffer("image_ids", ids)
        self.block_calls: Counter[str] = Counter()
        for name in ("transformer_blocks", "single_transformer_blocks"):
            block = getattr(self.transformer, name)[0]
            block.forward = self._counted(name, block.forward)

    def _counted(self, name: str, forward: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            self.block_calls[name] += 1
            return forward(*args, **kwargs)

        return counted

    def velocity(self, latents: Tensor, sigma: Tensor, rows: Tensor) -> Tensor:
        """See `jagg_core.policy.VelocityPolicy`."""
        text = self.prompts[rows]
        return self.transformer(
            hidden_states=latents,
            encoder_hidden_states=text.unsqueeze(1),
            pooled_projections=text,
            timestep=sigma,
            img_ids=self.image_ids,
            txt_ids=torch.zeros(1, 3),
            return_dict=False,
        )[0]


@pytest.fixture(scope="module")
def flux() -> Iterator[tuple[FluxField, Trajectory]]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # diffusers' import is not what is tested
        policy = FluxField().eval()
    latents = torch.randn(4, TOKENS, CHANNELS, generator=torch.Generator().manual_seed(1))
    yield policy, rollout(policy, dance_schedule(STEPS + 1), DanceSDE(0.7), latents, seed=0)


def update(policy: FluxField, trajectory: Trajectory, upstream: str, backward: str) -> tuple[Tensor, Counter[str]]:
    """Gradient of two JAGG groups of three steps, and the calls of each block that it took."""
    policy.zero_grad()
    policy.block_calls.clear()
    plan = jagg_plan(trajectory.sigmas, 3, 1.0)
    accumulate_gradients(policy, trajectory, ADVANTAGES, plan, ClippedSurrogate(), upstream, backward)  # type: ignore[arg-type]
    return flat_gradient(policy), Counter(policy.block_calls)


@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
def test_checkpointing_recomputes_and_changes_nothing(flux: tuple[FluxField, Trajectory], training: bool) -> None:
    policy, trajectory = flux
    policy.train(training)
    policy.transformer.disable_gradient_checkpointing()
    expected, plain_calls = update(policy, trajectory, "autograd", "joint")
    assert plain_calls == {"transformer_blocks": STEPS, "single_transformer_blocks": STEPS}
    policy.transformer.enable_gradient_checkpointing()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found, calls = update(policy, trajectory, "autograd", "joint")
    # two inner steps without a graph run a block once, the four ends twice
    assert calls == {"transformer_blocks": 2 + 2 * 4, "single_transformer_blocks": 2 + 2 * 4}
    assert [str(w.message) for w in caught] == []
    assert relative_error(found, expected) < 1e-6
    assert (expected.abs() > 0).double().mean() > 0.5


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize(("backward", "calls"), [("sequential", 4), ("joint", 4), ("batched", 1)])
def test_closed_form_only_runs_the_ends(
    flux: tuple[FluxField, Trajectory], checkpointing: bool, backward: str, calls: int
) -> None:
    policy, trajectory = flux
    policy.eval()
    policy.transformer.disable_gradient_checkpointing()
    expected = update(policy, trajectory, "autograd", "joint")[0]
    if checkpointing:
        policy.transformer.enable_gradient_checkpointing()
    found, counted = update(policy, trajectory, "closed_form", backward)
    per_block = calls * (2 if checkpointing else 1)
    assert counted == {"transformer_blocks": per_block, "single_transformer_blocks": per_block}
    assert relative_error(found, expected) < 1e-5


def test_every_parameter_that_exact_reaches_is_reached(flux: tuple[FluxField, Trajectory]) -> None:
    """Case 7.6, on a real model."""
    policy, trajectory = flux
    policy.transformer.disable_gradient_checkpointing()
    reached = []
    for plan in (exact_plan(trajectory.sigmas), jagg_plan(trajectory.sigmas, 3, 1.0)):
        policy.zero_grad()
        accumulate_gradients(policy, trajectory, ADVANTAGES, plan, ClippedSurrogate())
        reached.append({n for n, p in policy.named_parameters() if p.grad is not None and p.grad.abs().max() > 0})
    assert reached[0] == reached[1]
    assert len(reached[0]) > 20
