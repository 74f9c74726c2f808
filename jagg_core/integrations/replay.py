"""What a trainer stored of its rollout, as a trajectory; its network, as a policy."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor

from jagg_core.engine import RatioNoise
from jagg_core.policy import guided
from jagg_core.schedule import TimestepMode, check_sigmas, network_sigma
from jagg_core.trajectory import ReplayMismatch, Trajectory, at_least_fp32
from jagg_core.transitions import Coefficients, Transition, expand

RATIO_TOLERANCE = 1e-4
"""Log-probabilities that differ by more from those of the stored tensors give a warning: usual clip ranges are 1e-4."""

LOG_PROB_TOLERANCE = 1e-2
"""Stored log-probabilities may differ by this much from those of the stored noise: latents kept in bf16 do."""

SAME_SIGMA = 1e-6
"""Sigmas that differ by less are one: fp32 rounds them."""


class HostPolicy:
    """A trainer's forward as a `jagg_core.policy.VelocityPolicy`.

    Args:
        velocity: function of latents ``[N, *D]``, sigma ``[N]`` in [0, 1] and rows ``[N]`` that gives the velocity
            ``[N, *D]``; with ``guidance`` the pair (with prompt, without) of one. Autocast belongs inside.
        parameters: the trained ones, so that the weights of an update can be compared with the rollout's. None: not.
        guidance: scale of classifier-free guidance; None: the velocity is taken as it comes.
        settings: what a replay must share with the rollout, by name.
        compute_dtype: of the network, where neither its velocities nor its parameters show it: Accelerate returns fp32
            from a network under autocast, and a LoRA in fp32 may sit in one in bf16. Ratios on policy are held to it.

    Raises:
        ValueError: parameters that DeepSpeed partitions (ZeRO-3): they are empty between passes and tell nothing.
    """

    def __init__(
        self,
        velocity: Callable[[Tensor, Tensor, Tensor], Tensor | tuple[Tensor, Tensor]],
        parameters: Iterable[Tensor] | None = None,
        guidance: float | None = None,
        settings: Mapping[str, str] | None = None,
        compute_dtype: torch.dtype | None = None,
    ) -> None:
        self.compute_dtype = compute_dtype
        self._velocity = velocity
        self._parameters = [] if parameters is None else list(parameters)
        if any(hasattr(parameter, "ds_id") for parameter in self._parameters):
            raise ValueError("parameters must be None under DeepSpeed ZeRO-3, which empties them between passes")
        self.guidance = None if guidance is None else float(guidance)
        self._settings = dict(settings or {})

    @classmethod
    def from_mean(
        cls,
        mean: Callable[[Tensor, Tensor, Tensor], Tensor],
        schedule: Tensor,
        transition: Transition,
        parameters: Iterable[Tensor] | None = None,
    ) -> HostPolicy:
        """Builds a policy from a trainer's function for the mean of a step, which holds network, guidance and kernel.

        The velocity is ``(mean - a z) / b`` with the kernel's coefficients a and b.

        Args:
            mean: function of latents ``[N, *D]``, steps of the schedule ``[N]`` and rows ``[N]`` that gives the mean of
                the states after these steps, ``[N, *D]``.
            schedule: ``[N + 1]``, decreasing.
            transition: the kernel that the mean is of.
            parameters: as for the class.
        """
        sigmas = check_sigmas(schedule, "schedule")

        def velocity(latents: Tensor, sigma: Tensor, rows: Tensor) -> Tensor:
            distance = (sigmas[:-1] - sigma.double().cpu()[:, None]).abs()
            if (distance.amin(1) > SAME_SIGMA).any():
                raise ValueError(f"sigma must be one of the schedule's under from_mean, got {sigma.tolist()}")
            steps = distance.argmin(1)
            a, b, _ = transition.coefficients(sigmas[steps], sigmas[steps + 1])
            return (mean(latents, steps.to(latents.device), rows) - expand(a, latents) * latents) / expand(b, latents)

        return cls(velocity, parameters)

    def velocity(self, latents: Tensor, sigma: Tensor, rows: Tensor) -> Tensor:
        """Computes velocities by the host's network."""
        velocity = self._velocity(latents, sigma, rows)
        if isinstance(velocity, tuple) != (self.guidance is not None):
            given = "a pair" if isinstance(velocity, tuple) else "one velocity"
            raise ValueError(f"guidance is {self.guidance}, but the policy's function gives {given}")
        return guided(velocity[0], velocity[1], self.guidance) if self.guidance is not None else velocity  # type: ignore[return-value]

    def parameters(self) -> list[Tensor]:
        """Returns the parameters as given."""
        return self._parameters

    def signature(self) -> dict[str, str]:
        """Returns the settings, and the guidance."""
        return {**self._settings, "guidance": repr(self.guidance)}


def host_trajectory(
    latents: Tensor,
    next_latents: Tensor,
    log_probs: Tensor,
    schedule: Tensor,
    transition: Transition,
    *,
    steps: Tensor | None = None,
    velocity: Tensor | None = None,
    mean: Tensor | None = None,
    noise: Tensor | None = None,
    normalised: bool = True,
    timestep_mode: TimestepMode = "float",
    rows: Tensor | None = None,
    weights_version: int | None = None,
    signature: Mapping[str, str] | None = None,
) -> Trajectory:
    """Builds a trajectory from the tensors that a trainer stored, batch first and in any order of steps.

    The closed form, interpolated upstream gradients and shifted knots need the noise of the rollout: as it is, or
    from the rollout's means or velocities, which give ``(next - mean) / scale``. With none the update runs the network
    at every step (``upstream="autograd"``). With one of them, log-probabilities are checked against it.

    Args:
        latents: state before each step, ``[B, S, *D]``; kept in fp32 at least. All others are taken to its device.
        next_latents: state after each step, ``[B, S, *D]``.
        log_probs: of the rollout, ``[B, S]``.
        schedule: the whole one, ``[N + 1]``, decreasing.
        transition: the kernel of the rollout.
        steps: which steps of the schedule were stored, ``[S]``, or ``[B, S]`` where samples differ; sorted here from
            high noise to low, row by row. None: the first S. The last step only under a kernel with noise there.
        velocity: of the rollout, guided if it was, ``[B, S, *D]``.
        mean: of the rollout's steps, ``[B, S, *D]``, where a trainer stores that.
        noise: of the rollout, ``[B, S, *D]``.
        normalised: False for Gaussian log-probabilities without ``-log(scale) - log(2 pi) / 2``, as DanceGRPO has them.
        timestep_mode: how sigma becomes the network's timestep; see `jagg_core.schedule.network_sigma`.
        rows: which of the policy's samples each row is, ``[B]``; 0..B-1 by default.
        weights_version: what `jagg_core.integrations.weights_version` gave for the policy at the rollout. Without
            velocity, mean and noise it does not allow the closed form, but an update by the same weights whose
            log-probabilities are others is refused: the network got another timestep, guidance or prompt.
        signature: what ``policy.signature()`` gave then.

    Returns:
        A trajectory of S steps. Its ``final`` is the state after the last of them. Its ``order`` is what `plan_update`
        brings advantages ``[B, S]`` into its order with: give them as the trainer stored them, as all else here.

    Raises:
        ValueError: shapes or steps that do not fit, an option that needs the noise without it.
        ReplayMismatch: log-probabilities that are not those of the noise: another eta, kernel, schedule or convention,
            or states that were rounded after the log-probability was taken.
    """
    if latents.ndim < 3 or latents.shape != next_latents.shape or log_probs.shape != latents.shape[:2]:
        raise ValueError(
            "latents and next_latents must have shape [B, S, ...] and log_probs [B, S], got "
            f"{list(latents.shape)}, {list(next_latents.shape)} and {list(log_probs.shape)}"
        )
    if 0 in log_probs.shape:
        raise ValueError(f"log_probs must hold at least one sample and one step, got {list(log_probs.shape)}")
    kept = {name: x for name, x in (("velocity", velocity), ("mean", mean), ("noise", noise)) if x is not None}
    for name, given in kept.items():
        if given.shape != latents.shape:
            raise ValueError(f"{name} must have the shape {list(latents.shape)} of latents, got {list(given.shape)}")
    if len(kept) > 1:
        raise ValueError(f"{' and '.join(kept)} say the same: give one of them")
    if not normalised and transition.convention != "gaussian":
        raise ValueError(f"normalised must be True for {type(transition).__name__}, which has no normalising term")
    schedule = check_sigmas(schedule, "schedule")
    if schedule.ndim != 1:
        raise ValueError(f"schedule must have shape [N + 1], got {list(schedule.shape)}")
    network_sigma(schedule, timestep_mode)
    batch, count = latents.shape[:2]
    if rows is not None and rows.shape != (batch,):
        raise ValueError(f"rows must have shape [{batch}], got {list(rows.shape)}")
    has_noise = bool(transition.coefficients(schedule[-2], schedule[-1]).scale > 0)
    stored = _steps(steps, batch, count, len(schedule) - 1 - (not has_noise))
    order = stored.argsort(dim=-1)
    stored = stored.gather(-1, order)
    ordered = order.expand(batch, count)

    def in_order(values: Tensor) -> Tensor:
        there = ordered.to(values.device)
        chosen = values.detach()[torch.arange(batch, device=there.device)[:, None], there]
        return at_least_fp32(chosen.to(latents.device)).transpose(0, 1)

    before, after, log_probs = in_order(latents), in_order(next_latents), in_order(log_probs)
    # without noise: NaN, so that it can never be used unnoticed
    drawn = after.new_full((), math.nan).expand_as(after) if noise is None else in_order(noise).to(after.dtype)
    sigmas, next_sigmas = schedule[stored], schedule[stored + 1]
    coefficients = [transition.coefficients(sigmas[..., j], next_sigmas[..., j]) for j in range(count)]
    stored_velocity_or_mean = mean if velocity is None else velocity
    if stored_velocity_or_mean is not None:
        means = in_order(stored_velocity_or_mean).to(after.dtype)
        drawn = torch.empty_like(after)
        for j, (a, b, scale) in enumerate(coefficients):
            if velocity is not None:
                means[j] = expand(a, after[j]) * before[j] + expand(b, after[j]) * means[j]
            drawn[j] = (after[j] - means[j]) / expand(scale, after[j])
    if not normalised:
        constants = [-(scale.log() + math.log(2 * math.pi) / 2) for _, _, scale in coefficients]
        log_probs = log_probs + torch.stack([c.expand(batch) for c in constants]).to(log_probs)
    trajectory = Trajectory(
        latents=before,
        next_latents=after,
        noise=drawn,
        log_probs=log_probs.to(before.dtype),
        sigmas=sigmas,
        next_sigmas=next_sigmas,
        transition=transition,
        timestep_mode=timestep_mode,
        final=after[-1],
        rows=torch.arange(batch) if rows is None else rows.detach().cpu(),
        weights_version=weights_version,
        signature=dict(signature or {}),
        order=ordered.cpu(),
    )
    stored_as = {"latents": latents, "next_latents": next_latents, **kept}
    off = _check_log_probs(trajectory, coefficients) if kept else None
    _check_precision({name: x.dtype for name, x in stored_as.items()}, off)
    return trajectory


def _check_precision(dtypes: dict[str, torch.dtype], off: float | None) -> None:
    """Names the tensors in half precision where ratios feel it. ``off``: largest error of a log-probability, if known.

    Raises:
        ReplayMismatch: states of two precisions: those in half precision were rounded after the log-probability.
    """
    half = {name: str(dtype).removeprefix("torch.") for name, dtype in dtypes.items() if dtype.itemsize < 4}
    named = " and ".join(f"{name} are {dtype}" for name, dtype in half.items())
    mixed = len({"latents", "next_latents"} & half.keys()) == 1
    measured = "not measurable without velocity, mean or noise" if off is None else f"up to {off:.1g}"
    if mixed and (off is None or off > RATIO_TOLERANCE):
        raise ReplayMismatch(
            f"{named}, the other states are not: log-probabilities were taken before the rounding, and differ from "
            f"those of the stored states ({measured}); store latents and next_latents as the log-probability saw them"
        )
    if off is not None and off > RATIO_TOLERANCE:
        why = named or "the trainer's arithmetic is in half precision, or its log_probs are"
        warnings.warn(
            f"log-probabilities differ from the stored ones by {measured}: {why}; ratios are off by as much on policy",
            RatioNoise,
            stacklevel=3,
        )


def _check_log_probs(trajectory: Trajectory, coefficients: Sequence[Coefficients]) -> float:
    """Computes the largest difference of log-probabilities to those of the noise."""
    log_probs = [
        trajectory.transition.log_prob(trajectory.next_latents[j], trajectory.mean(j), step.scale)
        for j, step in enumerate(coefficients)
    ]
    off = (torch.stack(log_probs) - trajectory.log_probs).abs()
    wrong = ~(off <= LOG_PROB_TOLERANCE)
    if wrong.any():
        step, row = wrong.nonzero()[0].tolist()
        raise ReplayMismatch(
            f"log_probs: stored {trajectory.log_probs[step, row].item():.6g}, but the rollout's noise under "
            f"{trajectory.transition} gives {log_probs[step][row].item():.6g} at step {step} of sample {row}: another "
            "eta, kernel or schedule, or log-probabilities without their normalising term (setting normalised)"
        )
    return off.max().item()


def _steps(steps: Tensor | None, batch: int, count: int, trainable: int) -> Tensor:
    """Returns the stored steps on the CPU, ``[S]`` or ``[B, S]``, checked to be of the first ``trainable``."""
    stored = torch.arange(count) if steps is None else torch.as_tensor(steps, dtype=torch.long).cpu()
    if stored.shape not in ((count,), (batch, count)):
        raise ValueError(f"steps must have shape [{count}] or [{batch}, {count}], got {list(stored.shape)}")
    if stored.min() < 0 or stored.max() >= trainable:
        raise ValueError(
            f"steps must lie in 0..{trainable - 1}, the steps that have noise, got {int(stored.min())} to "
            f"{int(stored.max())}"
        )
    if (stored.sort(dim=-1).values.diff(dim=-1) == 0).any():
        raise ValueError(f"steps must differ from one another within a sample, got {stored.tolist()}")
    return stored
