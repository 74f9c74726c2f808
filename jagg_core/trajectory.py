"""The record of a rollout that an update replays."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from jagg_core.policy import VelocityPolicy
from jagg_core.schedule import TimestepMode, check_sigmas, network_sigma
from jagg_core.transitions import Transition, expand


class ReplayMismatch(ValueError):
    """A trajectory is replayed under other settings than it was made with."""


@dataclass(frozen=True)
class Trajectory:
    """The trained steps of a rollout, from high noise to low. ``T`` steps, ``B`` samples, latents of shape ``D``.

    Attributes:
        latents: state before each step, ``[T, B, *D]``, at least fp32, detached.
        next_latents: the sampled state after each step, ``[T, B, *D]``.
        noise: the standard normal draw of each step, ``[T, B, *D]``.
        log_probs: log-probability of ``next_latents`` under the rollout's policy, ``[T, B]``.
        sigmas, next_sigmas: ``[T]``, or ``[B, T]`` where samples are trained on different steps; fp64 on the CPU.
        transition: the kernel that made the steps.
        timestep_mode: how sigma became the network's timestep.
        final: the finished samples after the untrained last step, ``[B, *D]``.
        rows: which of the policy's samples each row is, ``[B]``, on the CPU.
        weights_version: fingerprint of the policy's parameters; None if the policy does not show them.
        signature: the policy's settings, as it names them.
        order: place that each step had where a trainer stored it, ``[B, T]``, on the CPU. None: they are in order.
        graphs: velocities ``[B, *D]`` with the graph of the rollout's forward, by step; good for one backward.
            Parts of a trajectory have none.
    """

    latents: Tensor
    next_latents: Tensor
    noise: Tensor
    log_probs: Tensor
    sigmas: Tensor
    next_sigmas: Tensor
    transition: Transition
    timestep_mode: TimestepMode
    final: Tensor
    rows: Tensor
    weights_version: int | None = None
    signature: dict[str, str] = field(default_factory=dict)
    order: Tensor | None = None
    graphs: dict[int, Tensor] = field(default_factory=dict)

    @property
    def steps(self) -> int:
        """Counts the trained steps T."""
        return self.latents.shape[0]

    @property
    def batch(self) -> int:
        """Counts the samples B."""
        return self.latents.shape[1]

    @property
    def elements(self) -> int:
        """Counts the latent elements of one sample, over which log-probabilities are averaged."""
        return self.latents[0, 0].numel()

    @property
    def knows_noise(self) -> bool:
        """Tells whether the draws are known; ``noise`` is NaN where a trainer stored neither them nor velocities."""
        return not bool(self.noise[0, 0].isnan().all())

    def sigma(self, step: int) -> Tensor:
        """Returns sigma of ``step``: a scalar, or ``[B]`` where samples differ. fp64 on the CPU."""
        return self.sigmas[..., step]

    def next_sigma(self, step: int) -> Tensor:
        """Returns sigma after ``step``, shaped as `sigma`."""
        return self.next_sigmas[..., step]

    def network_sigma(self, step: int) -> Tensor:
        """Returns the network's timestep at ``step``, ``[B]``, on the latents' device and in their dtype."""
        timestep = network_sigma(self.sigma(step), self.timestep_mode).expand(self.batch)
        return timestep.to(device=self.latents.device, dtype=self.latents.dtype)

    def mean(self, step: int) -> Tensor:
        """Computes the mean of the rollout's transition at ``step``, ``[B, *D]``, without a forward."""
        scale = self.transition.coefficients(self.sigma(step), self.next_sigma(step)).scale
        return self.next_latents[step] - expand(scale, self.noise[step]) * self.noise[step]

    def velocity(self, step: int) -> Tensor:
        """Recovers the rollout's velocity at ``step``, ``[B, *D]``, from the stored step, without a forward."""
        a, b, _ = self.transition.coefficients(self.sigma(step), self.next_sigma(step))
        latents = self.latents[step]
        return (self.mean(step) - expand(a, latents) * latents) / expand(b, latents)

    def site(self, step: int, sigma: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Returns where a Jacobian is taken for ``step``: latents ``[B, *D]`` and the network's timestep ``[B]``.

        With ``sigma`` (a scalar or ``[B]``) the state is carried there along the rollout's velocity.
        """
        latents = self.latents[step]
        if sigma is None:
            return latents, self.network_sigma(step)
        timestep = network_sigma(sigma, self.timestep_mode).expand(self.batch)
        moved = latents + expand(sigma - self.sigma(step), latents) * self.velocity(step)
        return moved, timestep.to(device=latents.device, dtype=latents.dtype)

    def select(self, steps: Sequence[int] | Tensor) -> Trajectory:
        """Selects steps: ``[S]`` for all samples alike, or ``[B, S]``, a row per sample; increasing.

        The result has no ``order``: what goes with its steps is given in their order, from high noise to low.

        Raises:
            ValueError: steps that are empty, repeated, out of order or out of range.
        """
        index = torch.as_tensor(steps, dtype=torch.long).cpu()
        if index.ndim not in (1, 2) or index.shape[-1] == 0 or (index.ndim == 2 and len(index) != self.batch):
            raise ValueError(f"steps must have shape [S] or [{self.batch}, S] with S >= 1, got {list(index.shape)}")
        if index.min() < 0 or index.max() >= self.steps or (index.diff(dim=-1) <= 0).any():
            raise ValueError(f"steps must increase within 0..{self.steps - 1}, got {index.tolist()}")
        if index.ndim == 1:
            pick: tuple[Tensor, ...] = (index,)
            sigmas, next_sigmas = self.sigmas[..., index], self.next_sigmas[..., index]
        else:
            pick = (index.T, torch.arange(self.batch))
            shape = (self.batch, self.steps)
            sigmas = self.sigmas.expand(shape).gather(1, index)
            next_sigmas = self.next_sigmas.expand(shape).gather(1, index)
        return replace(
            self,
            latents=self.latents[pick],
            next_latents=self.next_latents[pick],
            noise=self.noise[pick],
            log_probs=self.log_probs[pick],
            sigmas=sigmas,
            next_sigmas=next_sigmas,
            order=None,
            graphs={},
        )

    def split(self, size: int) -> list[Trajectory]:
        """Splits the trajectory into micro-batches of at most ``size`` samples.

        Raises:
            ValueError: ``size`` below 1.
        """
        if size < 1:
            raise ValueError(f"size must be at least 1, got {size}")
        return [self.cut(range(start, min(start + size, self.batch))) for start in range(0, self.batch, size)]

    def cut(self, samples: range) -> Trajectory:
        """Selects consecutive samples.

        Raises:
            ValueError: none of them, or not ``start..stop - 1`` within the batch.
        """
        if len(samples) == 0 or samples.step != 1 or samples[0] < 0 or samples[-1] >= self.batch:
            raise ValueError(f"samples must be a range within 0..{self.batch - 1}, got {samples}")
        cut = slice(samples.start, samples.stop)
        per_row = self.sigmas.ndim == 2
        return replace(
            self,
            latents=self.latents[:, cut],
            next_latents=self.next_latents[:, cut],
            noise=self.noise[:, cut],
            log_probs=self.log_probs[:, cut],
            sigmas=self.sigmas[cut] if per_row else self.sigmas,
            next_sigmas=self.next_sigmas[cut] if per_row else self.next_sigmas,
            final=self.final[cut],
            rows=self.rows[cut],
            order=None if self.order is None else self.order[cut],
            graphs={},
        )

    def require(
        self,
        *,
        sigmas: Tensor | None = None,
        transition: Transition | None = None,
        timestep_mode: TimestepMode | None = None,
        signature: dict[str, str] | None = None,
    ) -> None:
        """Checks that a replay agrees with the rollout; what is None is not checked.

        Raises:
            ReplayMismatch: names the setting, both values, and for sigmas or timesteps the first step that differs.
        """
        if sigmas is not None:
            other = check_sigmas(sigmas)
            if other.shape[-1] != self.steps:
                raise ReplayMismatch(f"sigmas: the rollout has {self.steps} trained steps, got {other.shape[-1]}")
            if other.ndim == 2 and len(other) != self.batch:
                raise ReplayMismatch(f"sigmas: the rollout has {self.batch} samples, got {len(other)}")
            _same_steps("sigmas", self.sigmas, other, 1e-6)
        if timestep_mode is not None and timestep_mode != self.timestep_mode:
            ours, theirs = (network_sigma(self.sigmas, mode) * 1000 for mode in (self.timestep_mode, timestep_mode))
            _same_steps(f"timestep_mode: rollout {self.timestep_mode}, replay {timestep_mode}", ours, theirs, 0.0)
            raise ReplayMismatch(f"timestep_mode: the rollout used {self.timestep_mode!r}, got {timestep_mode!r}")
        if transition is not None and transition != self.transition:
            detail = ""
            if transition.convention != self.transition.convention:
                detail = f" (log-prob conventions {self.transition.convention} and {transition.convention})"
            raise ReplayMismatch(f"transition: the rollout used {self.transition}, got {transition}{detail}")
        for key in sorted(self.signature.keys() & (signature or {}).keys()):
            if self.signature[key] != (signature or {})[key]:
                raise ReplayMismatch(
                    f"{key}: the rollout used {self.signature[key]!r}, the policy now has {(signature or {})[key]!r}"
                )


def _same_steps(what: str, ours: Tensor, theirs: Tensor, tolerance: float) -> None:
    ours, theirs = (x.reshape(-1, x.shape[-1]) for x in torch.broadcast_tensors(ours, theirs))
    differs = (ours - theirs).abs() > tolerance
    if differs.any():
        step = int(differs.any(0).nonzero()[0])
        row = int(differs[:, step].nonzero()[0])
        a, b = ours[row, step].item(), theirs[row, step].item()
        raise ReplayMismatch(f"{what}: first differing step is {step}, rollout {a:.6g}, got {b:.6g}")


def weights_version(policy: VelocityPolicy) -> int | None:
    """Computes a fingerprint of the policy's parameters on this rank by `bits_version`; None without any."""
    parameters = getattr(policy, "parameters", None)
    return None if parameters is None else bits_version(parameters())


@torch.no_grad()
def bits_version(tensors: Iterable[Tensor]) -> int | None:
    """Computes a fingerprint of tensors, as this rank holds them, from the sum of each one's bits.

    None without any tensor.
    """
    total = 0
    sums: list[Tensor] = []
    for tensor in tensors:
        local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        integer = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[local.element_size()]
        sums.append(local.detach().contiguous().view(integer).sum(dtype=torch.int64))
    if not sums:
        return None
    for position, value in enumerate(torch.stack(sums).tolist()):
        total = (total * 1000003 + value + position) % (1 << 63)
    return total


def policy_signature(policy: VelocityPolicy) -> dict[str, str]:
    """Returns the policy's ``signature()``, or an empty one."""
    signature = getattr(policy, "signature", None)
    return {} if signature is None else dict(signature())


def at_least_fp32(tensor: Tensor) -> Tensor:
    """Raises fp16 and bf16 to fp32; fp32 and fp64 stay."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))
