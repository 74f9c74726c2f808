"""Pathwise upstream gradients: the policy gradient's expectation from the reward's gradient.

Stein's lemma (one integration by parts in the noise ``eps_j``) gives, for every knot k <= j,

    E[ J_k^T s_j ] = E[ J_k^T p_j ],    p_j = -(f_j / D) A'_i a_{j+1},    a_{j+1} = dR / dz_{j+1} along the rollout

with ``f_j = b_j`` for Gaussian log-probabilities and ``2 b_j c_j^2`` for CPS, ``A'_i`` the derivative of a sample's
advantage in that sample's reward, D latent elements, and the kernel ``z_{j+1} = alpha_j z_j + b_j v_j + c_j eps_j``.
The adjoint ``a`` runs from the decoded image backwards through the untrained last steps and the rollout:
``a_j = (alpha_j I + b_j dv_j/dz)^T a_{j+1}``. `docs/method.md` derives it. Plans that look ahead have an extra term,
which is missing here, and the reward has to be differentiable.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from jagg_core.checks import require_one_of
from jagg_core.choices import Sweep
from jagg_core.engine.modes import OffPolicyError
from jagg_core.plans.plan import check_knots, whole_knots
from jagg_core.policy import VelocityPolicy
from jagg_core.schedule import check_sigmas, network_sigma
from jagg_core.trajectory import ReplayMismatch, Trajectory, weights_version
from jagg_core.transitions import Coefficients, expand

REPLAY_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3}
"""Largest relative distance between the stored final samples and those that the sweep arrives at, by their dtype; a
half-precision network in another batch shape moves fp32 samples by less than ten times that."""


@dataclass(frozen=True, eq=False)
class Adjoint:
    """The reward's gradient along a rollout of ``T`` trained steps and ``B`` samples.

    Attributes:
        gradients: ``a_{j+1} = dR / dz_{j+1}`` of every trained step j, ``[T, B, *D]``.
        rewards: rewards of the final samples, ``[B]``.
        forwards: network evaluations of the sweep, each on the whole batch.
        pullbacks: vector-Jacobian products of the sweep in the latents.
    """

    gradients: Tensor
    rewards: Tensor
    forwards: int
    pullbacks: int

    @property
    def norms(self) -> Tensor:
        """Computes the root mean square of ``|a_{j+1}|`` over samples, ``[T]``; growth towards step 0 is a warning."""
        return self.gradients.flatten(2).double().square().sum(-1).mean(-1).sqrt()


def adjoint_sweep(
    policy: VelocityPolicy,
    trajectory: Trajectory,
    reward: Callable[[Tensor], Tensor],
    *,
    sweep: Sweep = "full",
    knots: Sequence[int] = (),
    schedule: Tensor | None = None,
) -> Adjoint:
    """Computes the reward's gradient at every state of a rollout, from the last to the first. Leaves ``.grad`` alone.

    Args:
        policy: the rollout's, with unchanged weights.
        trajectory: consecutive steps that all samples share. Micro-batches may be swept one by one.
        reward: final samples ``[B, *D]`` to values ``[B]`` with a graph; a sample's value depends on it alone. See
            `jagg_core.rewards.differentiable`.
        sweep: ``"full"`` differentiates the network at every step. ``"knots"`` only at ``knots``, whose Jacobian stands
            for the steps up to the next one. ``"frozen"`` not at all (``dv/dz = 0``, the stop-gradient of DRTune, arXiv
            2405.00760), which needs no forward. The last two are biased.
        knots: increasing steps that begin with 0; for ``"knots"`` alone.
        schedule: the whole one, ``[N + 1]``, where several deterministic steps follow the last trained one (a window).
            None: one deterministic step to sigma 0.

    Raises:
        ValueError: steps that are not consecutive or differ between samples, settings that do not fit each other, a
            reward without gradient or of another shape, a velocity without gradient in the latents.
        OffPolicyError: the weights are not the rollout's.
        ReplayMismatch: the deterministic steps do not arrive at the stored final samples.
        FloatingPointError: a gradient is not finite; names the place. It comes after the last product, for other ranks
            make as many.

    Example:
        >>> import torch
        >>> from jagg_core import DanceSDE, dance_schedule, initial_latents, rollout
        >>> class Scaled(torch.nn.Linear):
        ...     def velocity(self, latents, sigma, rows):
        ...         return self(latents)
        >>> policy = Scaled(4, 4)
        >>> noise = initial_latents((4,), seed=0, sample_ids=range(2))
        >>> trajectory = rollout(policy, dance_schedule(7), DanceSDE(0.3), noise, seed=0)
        >>> adjoint = adjoint_sweep(policy, trajectory, reward=lambda final: -final.square().mean(1))
        >>> adjoint.gradients.shape, adjoint.rewards.shape
        (torch.Size([6, 2, 4]), torch.Size([2]))
    """
    require_one_of("sweep", sweep, Sweep)
    if (sweep == "knots") != bool(knots):
        raise ValueError(f"knots must be given for sweep='knots' alone, got {list(knots)} for sweep={sweep!r}")
    sites = _sites(sweep, knots, trajectory.steps)
    tail = _tail(trajectory, schedule)
    version = weights_version(policy)
    if None not in (version, trajectory.weights_version) and version != trajectory.weights_version:
        raise OffPolicyError("the weights changed since the rollout: pathwise gradients of it would not be on policy")
    pull = _Pullback(policy, trajectory)
    rewards, adjoint = _reward_gradient(reward, trajectory.final)
    pull.note(adjoint, "the final samples")
    if sweep != "frozen":
        adjoint = _through_tail(pull, trajectory, tail, adjoint)
    gradients = torch.empty_like(trajectory.latents)
    for first, stop in reversed(sites):
        # the segment's steps share the Jacobian at `first`: one product serves them all
        share = torch.zeros((), dtype=torch.float64)
        passed = adjoint
        for step in reversed(range(first, stop)):
            gradients[step] = adjoint
            latent, velocity, _ = trajectory.transition.coefficients(
                trajectory.sigma(step), trajectory.next_sigma(step)
            )
            # what reaches z_first through v_step: b_step times all later alphas of the segment
            share = share + velocity * _product_after(trajectory, step, stop)
            adjoint = expand(latent, adjoint) * adjoint
        if first == 0:
            break
        if sweep != "frozen":
            timestep = trajectory.network_sigma(first)
            through, _ = pull(trajectory.latents[first], timestep, expand(share, passed) * passed, f"step {first}")
            adjoint = adjoint + through
    if pull.broken:
        raise FloatingPointError(f"the reward's gradient is not finite at {pull.broken}")
    return Adjoint(gradients, rewards, pull.forwards, pull.pullbacks)


def pathwise_upstream(trajectory: Trajectory, adjoint: Adjoint, slopes: Tensor) -> Tensor:
    """Computes the pathwise upstream gradients ``p_j``, ``[T, B, *D]``.

    Args:
        trajectory: the trajectory that was swept.
        adjoint: result of `adjoint_sweep`.
        slopes: derivative of each sample's advantage in that sample's reward, ``[B]``; `advantage_slopes` gives it.

    Raises:
        ValueError: slopes of another shape.
    """
    if slopes.shape != (trajectory.batch,):
        raise ValueError(f"slopes must have shape [{trajectory.batch}], got {list(slopes.shape)}")
    upstream = torch.empty_like(adjoint.gradients)
    for step, gradient in enumerate(adjoint.gradients):
        sigma, next_sigma = trajectory.sigma(step), trajectory.next_sigma(step)
        scale = _coefficients(trajectory, step).scale
        # the log-density's derivative is linear in the noise: its slope times c_j is f_j, for every kernel
        factor = trajectory.transition.dlogp_dvelocity(torch.ones((), dtype=torch.float64), sigma, next_sigma) * scale
        weight = -expand(slopes, gradient) / trajectory.elements
        upstream[step] = weight * expand(factor, gradient) * gradient
    return upstream


class _Pullback:
    """Vector-Jacobian products of the policy's velocity in the latents, counted.

    Attributes:
        broken: the first place whose gradient was not finite; empty if all were.
    """

    def __init__(self, policy: VelocityPolicy, trajectory: Trajectory) -> None:
        self._policy = policy
        self._rows = trajectory.rows.to(trajectory.latents.device)
        self.forwards = self.pullbacks = 0
        self.broken = ""

    def note(self, gradient: Tensor, where: str) -> None:
        """Remembers ``where`` if the gradient is the first that is not finite."""
        if not self.broken and not torch.isfinite(gradient).all():
            self.broken = where

    def velocity(self, latents: Tensor, timestep: Tensor) -> Tensor:
        """Computes the velocity ``[B, *D]`` without a graph."""
        self.forwards += 1
        with torch.no_grad():
            return self._policy.velocity(latents, timestep, self._rows).to(latents.dtype)

    def __call__(self, latents: Tensor, timestep: Tensor, vector: Tensor, where: str) -> tuple[Tensor, Tensor]:
        """Computes ``(dv/dz)^T vector`` and the velocity, each ``[B, *D]``, at ``latents`` [B, *D]."""
        self.forwards += 1
        self.pullbacks += 1
        with torch.enable_grad():
            state = latents.detach().clone().requires_grad_(True)
            velocity = self._policy.velocity(state, timestep, self._rows)
            if not velocity.requires_grad:
                raise ValueError("policy: the velocity has no gradient in the latents: is it computed under no_grad?")
            try:
                (gradient,) = torch.autograd.grad(velocity, state, vector.to(velocity.dtype), allow_unused=True)
            except RuntimeError as error:
                if "use_reentrant" not in str(error):
                    raise
                raise ValueError(
                    "policy: reentrant activation checkpointing has no gradient in the latents; set use_reentrant=False"
                ) from error
        gradient = torch.zeros_like(latents) if gradient is None else gradient.to(latents.dtype)
        self.note(gradient, where)
        return gradient, velocity.detach().to(latents.dtype)


def _reward_gradient(reward: Callable[[Tensor], Tensor], final: Tensor) -> tuple[Tensor, Tensor]:
    """Computes rewards ``[B]`` and their gradients ``[B, *D]`` in the final samples."""
    with torch.enable_grad():
        state = final.detach().clone().requires_grad_(True)
        values = reward(state)
        if values.shape != (len(final),):
            raise ValueError(f"reward must return shape [{len(final)}], got {list(values.shape)}")
        gradient = torch.autograd.grad(values.sum(), state, allow_unused=True)[0] if values.requires_grad else None
    if gradient is None:
        raise ValueError(
            "reward: it has no gradient in the final samples; a reward or decoder under no_grad, or one that counts or "
            "rounds, cannot be used pathwise: name a differentiable one"
        )
    return values.detach(), gradient.to(final.dtype)


def _sites(sweep: Sweep, knots: Sequence[int], steps: int) -> list[tuple[int, int]]:
    """Lists segments ``(first, stop)`` of steps that share the Jacobian at ``first``."""
    if sweep != "knots":
        return [(step, step + 1) for step in range(steps)]
    chosen = whole_knots(knots)
    check_knots(chosen, steps)
    if chosen[0] != 0:
        raise ValueError(f"knots must begin with step 0, got {chosen}")
    return list(zip(chosen, [*chosen[1:], steps], strict=True))


def _coefficients(trajectory: Trajectory, step: int) -> Coefficients:
    return trajectory.transition.coefficients(trajectory.sigma(step), trajectory.next_sigma(step))


def _product_after(trajectory: Trajectory, step: int, stop: int) -> Tensor:
    product = torch.ones((), dtype=torch.float64)
    for later in range(step + 1, stop):
        product = product * _coefficients(trajectory, later).latent
    return product


def _tail(trajectory: Trajectory, schedule: Tensor | None) -> Tensor:
    """Selects the sigmas of the deterministic steps after the last trained one, ``[n + 1]``."""
    if trajectory.sigmas.ndim != 1:
        raise ValueError(f"sigmas must have shape [T], all samples alike, got {list(trajectory.sigmas.shape)}")
    if not torch.equal(trajectory.sigmas[1:], trajectory.next_sigmas[:-1]):
        raise ValueError("trajectory must hold consecutive steps of the rollout: sweep it before steps are selected")
    last = trajectory.next_sigmas[-1]
    if schedule is None:
        return torch.stack([last, torch.zeros_like(last)])
    whole = check_sigmas(schedule, "schedule")
    after = (whole - last).abs().argmin()
    if whole.ndim != 1 or abs(float(whole[after] - last)) > 1e-6:
        raise ReplayMismatch(
            f"schedule must hold {last.item():.6g}, the sigma at which the last trained step ends; it does not"
        )
    return whole[int(after) :]


def _through_tail(pull: _Pullback, trajectory: Trajectory, tail: Tensor, adjoint: Tensor) -> Tensor:
    """Carries the adjoint from the final samples back to the state after the last trained step."""
    states = [trajectory.next_latents[-1]]

    def timestep(step: int) -> Tensor:
        sigma = network_sigma(tail[step], trajectory.timestep_mode).expand(trajectory.batch)
        return sigma.to(device=states[0].device, dtype=states[0].dtype)

    lengths = tail.diff()
    for step in range(len(lengths) - 1):
        states.append(states[-1] + expand(lengths[step], states[-1]) * pull.velocity(states[-1], timestep(step)))
    for step in reversed(range(len(lengths))):
        length = expand(lengths[step], adjoint)
        through, velocity = pull(states[step], timestep(step), length * adjoint, f"deterministic step {step}")
        if step == len(lengths) - 1 and not pull.broken:
            _require_final(states[step] + length * velocity, trajectory.final)
        adjoint = adjoint + through
    return adjoint


def _require_final(reached: Tensor, final: Tensor) -> None:
    limit = 10 * REPLAY_TOLERANCE.get(final.dtype, 1e-3)
    distance = float((reached - final).double().norm() / final.double().norm().clamp_min(1e-30))
    if not distance <= limit:
        raise ReplayMismatch(
            f"final samples: the deterministic steps arrive {distance:.2g} away from those stored (limit {limit:g}): "
            "give the rollout's schedule, weights and guidance"
        )
