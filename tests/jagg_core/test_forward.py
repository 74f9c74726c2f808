"""Forward-process upstream gradients, held against the losses by plain autograd in fp64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from jagg_core import accumulate_gradients, exact_plan
from jagg_core.forward import awm_upstream, forward_states, nft_upstream, velocities
from jagg_core.trajectory import Trajectory

ADVANTAGES = torch.tensor([1.3, -0.4, -7.0, 0.2, 0.9], dtype=torch.float64)
"""One is beyond the clip of DiffusionNFT."""


class Field(nn.Module):
    """A small network that knows sigma."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.inner, self.outer = nn.Linear(7, 9), nn.Linear(9, 6)
        self.double()

    def velocity(self, latents: Tensor, sigma: Tensor, rows: Tensor) -> Tensor:
        return self.outer(torch.tanh(self.inner(torch.cat([latents, sigma[:, None]], 1))))


def states_of(policy: Field, count: int = 4) -> Trajectory:
    final = torch.randn(5, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    return forward_states(policy, final, count, seed=1)


def gradient(policy: Field) -> Tensor:
    return torch.cat([p.grad.flatten() for p in policy.parameters() if p.grad is not None])


def by_autograd(policy: Field, states: Trajectory, loss: Callable[[Tensor, Tensor, int], Tensor]) -> Tensor:
    """Gradient of the sum over states and samples of ``loss(velocity, t, step)`` [B]."""
    total = torch.zeros((), dtype=torch.float64)
    for step in range(states.steps):
        t = states.sigmas[:, step, None]
        state = (1 - t) * states.final + t * states.noise[step]
        total = total + loss(policy.velocity(state, t[:, 0], states.rows), t, step).sum()
    found = torch.autograd.grad(total, list(policy.parameters()))
    return torch.cat([g.flatten() for g in found])


def test_awm_is_the_gradient_of_its_loss() -> None:
    policy = Field(0)
    states = states_of(policy)
    plan = exact_plan(states.sigmas)
    report = accumulate_gradients(policy, states, None, plan, None, awm_upstream(states, ADVANTAGES))
    assert (report.passes, report.forwards) == (4, 4)

    def loss(velocity: Tensor, t: Tensor, step: int) -> Tensor:
        return ADVANTAGES * (velocity - (states.noise[step] - states.final)).square().mean(1)

    assert (gradient(policy) - by_autograd(policy, states, loss)).norm() < 1e-12 * gradient(policy).norm()


def nft_loss(states: Trajectory, old: Tensor, beta: float) -> Callable[[Tensor, Tensor, int], Tensor]:
    """DiffusionNFT's loss as its paper has it."""

    def loss(velocity: Tensor, t: Tensor, step: int) -> Tensor:
        mixed = (1 - t) * states.final + t * states.noise[step]
        r = ((ADVANTAGES / 5).clamp(-1, 1) + 1) / 2
        total = torch.zeros(5, dtype=torch.float64)
        for share, sign in ((r, 1), (1 - r, -1)):
            implicit = old[step] + sign * beta * (velocity - old[step])
            error = mixed - t * implicit - states.final
            total = total + share * error.square().mean(1) / error.detach().abs().mean(1)
        return 5 * total / beta

    return loss


@pytest.mark.parametrize("beta", [1.0, 0.1])
@pytest.mark.parametrize("off_policy", [False, True])
def test_nft_is_the_gradient_of_its_loss(beta: float, off_policy: bool) -> None:
    policy, before = Field(0), Field(1 if off_policy else 0)
    states = states_of(policy)
    old = velocities(before, states)
    upstream = nft_upstream(states, ADVANTAGES, old, beta=beta)
    accumulate_gradients(policy, states, None, exact_plan(states.sigmas), None, upstream)
    expected = by_autograd(policy, states, nft_loss(states, old, beta))
    assert (gradient(policy) - expected).norm() < 1e-12 * expected.norm()


def test_on_policy_nft_is_awm_with_other_weights() -> None:
    policy = Field(0)
    states = states_of(policy)
    v = velocities(policy, states)
    nft, awm = nft_upstream(states, ADVANTAGES, v), awm_upstream(states, ADVANTAGES.clamp(-5, 5))
    for step in range(states.steps):
        t = states.sigmas[:, step, None]
        weight = t * (v[step] - (states.noise[step] - states.final)).abs().mean(1, keepdim=True)
        one, other = (source(step, states.latents[step], v[step]) for source in (nft, awm))
        assert (one - other * t**2 / weight).abs().max() < 1e-12


def test_levels_are_stratified_and_a_sample_keeps_its_stream() -> None:
    policy = Field(0)
    whole = states_of(policy, 8)
    u = whole.sigmas / (3 - 2 * whole.sigmas)
    assert torch.equal((u * 8).floor().flip(1), torch.arange(8.0, dtype=torch.float64).expand(5, 8))
    part = forward_states(policy, whole.final[2:], 8, seed=1, sample_ids=[2, 3, 4])
    assert torch.equal(part.latents, whole.latents[:, 2:])
    assert torch.equal(part.sigmas, whole.sigmas[2:])


def test_what_does_not_fit_is_refused() -> None:
    policy = Field(0)
    with pytest.raises(ValueError, match="states must be at least 1, got 0"):
        states_of(policy, 0)
    with pytest.raises(ValueError, match="sample_ids must name 2 samples, got 1"):
        forward_states(policy, torch.zeros(2, 6), 1, seed=0, sample_ids=[0])
    states = states_of(policy)
    with pytest.raises(ValueError, match="beta and clip must be positive, got 0"):
        nft_upstream(states, ADVANTAGES, states.latents, beta=0.0)
    with pytest.raises(ValueError, match=r"old must have shape \[4, 5, 6\], got \[5, 6\]"):
        nft_upstream(states, ADVANTAGES, states.final)
