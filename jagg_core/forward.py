"""Forward-process upstream gradients: what AWM and DiffusionNFT train at re-noised final samples.

Both take any sampler's final samples ``x0``, mix fresh noise ``eps`` into them, ``x_t = (1 - t) x0 + t eps``, and ask
what the velocity ``v`` should be there. D is the number of latent elements, A a sample's advantage, and
``e = v - (eps - x0)``:

    AWM   loss  A |e|^2 / D                                              s = 2 A e / D
    NFT   loss  c / beta * (r |x_pos - x0|^2 / w_pos + (1 - r) |x_neg - x0|^2 / w_neg) / D

with ``x_pos = x_t - t (beta v + (1 - beta) v_old)``, ``x_neg = x_t - t ((1 + beta) v_old - beta v)``, the clipped
advantage ``r = (A / c + 1) / 2`` for A in [-c, c], and weights ``w``, the mean absolute error of ``x_pos`` and
``x_neg``, that have no gradient. Where ``v = v_old`` the NFT gradient is AWM's times ``t^2 / w``.

Sources: AWM, arXiv 2509.25050; DiffusionNFT, arXiv 2509.16117. Stratified noise levels are those of AWM's trainer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from jagg_core.choices import TimestepMode
from jagg_core.policy import VelocityPolicy
from jagg_core.schedule import check_sigmas
from jagg_core.seeding import generator_for
from jagg_core.trajectory import Trajectory, at_least_fp32, policy_signature, weights_version
from jagg_core.transitions import DanceSDE, expand

LEAST_WEIGHT = 1e-5
"""Smallest weight ``w`` of DiffusionNFT, as in its trainer."""


@torch.no_grad()
def forward_states(
    policy: VelocityPolicy,
    final: Tensor,
    states: int,
    seed: int,
    *,
    shift: float = 3.0,
    sample_ids: Sequence[int] | None = None,
    timestep_mode: TimestepMode = "float",
) -> Trajectory:
    """Mixes fresh noise into final samples ``[B, *D]``, at ``states`` noise levels per sample.

    Levels are stratified: one uniform draw in each of ``states`` equal parts of (0, 1), then the time shift. The noise
    of every level is drawn separately. The result takes given upstream gradients alone, as it has no transition
    probabilities.

    Args:
        policy: gives the signature and the version of the weights.
        final: of any sampler; half precision is raised to fp32.
        states: noise levels of a sample, T of the trajectory.
        seed: of levels and noise; every sample has a stream.
        shift: ``t = shift u / (1 + (shift - 1) u)``.
        sample_ids: names of the samples for their streams, ``0..B-1`` by default.
        timestep_mode: how sigma becomes the network's timestep.

    Raises:
        ValueError: fewer than one state, a shift that is not positive, or ids that do not match.

    Example:
        >>> import torch
        >>> from jagg_core.forward import forward_states
        >>> class Decay:
        ...     def velocity(self, latents, sigma, rows):
        ...         return latents
        >>> states = forward_states(Decay(), torch.zeros(2, 4), states=3, seed=0)
        >>> states.latents.shape, states.sigmas.shape
        (torch.Size([3, 2, 4]), torch.Size([2, 3]))
    """
    if states < 1:
        raise ValueError(f"states must be at least 1, got {states}")
    if not shift > 0:
        raise ValueError(f"shift must be positive, got {shift}")
    ids = list(range(len(final))) if sample_ids is None else list(sample_ids)
    if len(ids) != len(final):
        raise ValueError(f"sample_ids must name {len(final)} samples, got {len(ids)}")
    clean = at_least_fp32(final.detach())
    levels, draws = [], []
    for one in ids:
        stream = generator_for(seed, "forward", one)
        # from the noisiest part to the cleanest, the order of every trajectory
        parts = torch.arange(states - 1, -1, -1, dtype=torch.float64)
        uniform = (parts + torch.rand(states, generator=stream, dtype=torch.float64)) / states
        levels.append((shift * uniform / (1 + (shift - 1) * uniform)).clamp(1e-3, 1))
        draws.append(torch.randn((states, *clean.shape[1:]), generator=stream, dtype=clean.dtype))
    sigmas = check_sigmas(torch.stack(levels))
    noise = torch.stack(draws, dim=1).to(clean.device)
    mixed = torch.stack([(1 - (t := expand(sigmas[:, j], clean))) * clean + t * noise[j] for j in range(states)])
    return Trajectory(
        latents=mixed,
        next_latents=clean.expand_as(mixed),
        noise=noise,
        log_probs=clean.new_zeros((states, len(clean))),
        sigmas=sigmas,
        next_sigmas=torch.zeros_like(sigmas),
        transition=DanceSDE(1.0),  # never asked
        timestep_mode=timestep_mode,
        final=clean,
        rows=torch.arange(len(clean)),
        weights_version=weights_version(policy),
        signature=policy_signature(policy),
    )


@torch.no_grad()
def velocities(policy: VelocityPolicy, states: Trajectory) -> Tensor:
    """Computes the policy's velocities at every state, ``[T, B, *D]``: those of the old policy, for `nft_upstream`."""
    rows = states.rows.to(states.latents.device)
    return torch.stack([policy.velocity(*states.site(j), rows).to(states.latents) for j in range(states.steps)])


def awm_upstream(states: Trajectory, advantages: Tensor) -> Callable[[int, Tensor, Tensor], Tensor]:
    """Builds the upstream gradient of AWM for `jagg_core.accumulate_gradients`, on policy.

    Args:
        states: of `forward_states`.
        advantages: ``[B]``.
    """

    def gradient(step: int, latents: Tensor, velocity: Tensor) -> Tensor:
        error = velocity - (states.noise[step] - states.final)
        return 2 / states.elements * expand(advantages, error) * error

    return gradient


def nft_upstream(
    states: Trajectory, advantages: Tensor, old: Tensor, *, beta: float = 1.0, clip: float = 5.0
) -> Callable[[int, Tensor, Tensor], Tensor]:
    """Builds the upstream gradient of DiffusionNFT for `jagg_core.accumulate_gradients`.

    Args:
        states: of `forward_states`.
        advantages: ``[B]``.
        old: velocities of the old policy, ``[T, B, *D]``; see `velocities`.
        beta: strength of the contrast.
        clip: advantages are clipped to it, and mapped to [0, 1].

    Raises:
        ValueError: ``beta`` or ``clip`` that is not positive, or velocities of another shape.
    """
    if not (beta > 0 and clip > 0):
        raise ValueError(f"beta and clip must be positive, got {beta} and {clip}")
    if old.shape != states.latents.shape:
        raise ValueError(f"old must have shape {list(states.latents.shape)}, got {list(old.shape)}")
    wanted = (advantages.clamp(-clip, clip) / clip + 1) / 2

    def gradient(step: int, latents: Tensor, velocity: Tensor) -> Tensor:
        t = expand(states.sigma(step), latents)
        positive = latents - t * (beta * velocity + (1 - beta) * old[step]) - states.final
        negative = latents - t * ((1 + beta) * old[step] - beta * velocity) - states.final
        shares = [expand(share, latents) for share in (wanted, 1 - wanted)]
        pull, push = (share * error / _weight(error) for share, error in zip(shares, (positive, negative), strict=True))
        return 2 * clip / states.elements * t * (push - pull)

    return gradient


def _weight(error: Tensor) -> Tensor:
    """Computes the mean absolute error per sample, as a factor of ``[B, *D]``."""
    return expand(error.flatten(1).abs().mean(1).clamp_min(LEAST_WEIGHT), error)
