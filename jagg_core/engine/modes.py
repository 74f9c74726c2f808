"""Modes of an update: the source of its upstream gradients, and how its knots share passes and backward calls."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from jagg_core.checks import require_one_of
from jagg_core.choices import BackwardMode, PartlyClipped, UpstreamMode
from jagg_core.distributed import on_any_rank
from jagg_core.plans import Plan
from jagg_core.policy import VelocityPolicy
from jagg_core.trajectory import Trajectory, weights_version

AUTO_ELEMENTS = 2**20
"""``backward="auto"`` batches knots while a pass holds at most this many latent elements: a rule of shapes alone, so
that ranks with equal shapes make equal numbers of passes. Eight samples of Flux at 720x720."""


class OffPolicyError(ValueError):
    """The closed form needs the rollout's policy, and the policy has changed."""


@dataclass(frozen=True)
class Modes:
    """How one update runs.

    Attributes:
        upstream, backward: the modes; ``"auto"`` is decided.
        knots_per_pass: most knots in one pass.
        on_policy: whether the weights are the rollout's, on every rank; None if it is not known.
        exact_where_mixed: whether samples that are partly clipped get a pass per step.
    """

    upstream: UpstreamMode | Literal["given"]
    backward: BackwardMode
    knots_per_pass: int
    on_policy: bool | None
    exact_where_mixed: bool


def choose_modes(
    policy: VelocityPolicy,
    trajectory: Trajectory,
    plan: Plan,
    upstream: UpstreamMode | Literal["given"],
    backward: BackwardMode,
    partly_clipped: PartlyClipped,
    max_rows: int | None,
) -> Modes:
    """Decides what is ``"auto"``. The settings are those of `jagg_core.engine.accumulate_gradients`.

    Raises:
        ValueError: settings that do not fit each other.
        OffPolicyError: closed form off policy, or where that is not known.
    """
    require_one_of("partly_clipped", partly_clipped, PartlyClipped)
    require_one_of("backward", backward, BackwardMode)
    batch = trajectory.batch
    if max_rows is not None and max_rows < batch:
        raise ValueError(f"max_rows must be at least the batch of {batch}, got {max_rows}")
    if max_rows is not None and backward in ("joint", "sequential"):
        raise ValueError(f"max_rows limits batched passes, but backward is {backward!r}")
    _require_noise(trajectory, plan, upstream)
    on_policy = _same_weights(policy, trajectory)
    if upstream == "closed_form":
        _require_on_policy(on_policy, plan)
    if upstream == "interpolated":
        _require_interpolating(plan)
    if upstream == "auto":
        upstream = "closed_form" if on_policy and trajectory.knows_noise else "autograd"
    fitting = plan.passes if max_rows is None else max_rows // batch
    if backward == "auto":
        fitting = min(fitting, AUTO_ELEMENTS // (batch * trajectory.elements))
        backward = "batched" if fitting > 1 else "sequential"
    return Modes(
        upstream=upstream,
        backward=backward,
        knots_per_pass=fitting if backward == "batched" else 1,
        on_policy=on_policy,
        exact_where_mixed=upstream == "autograd" and partly_clipped == "exact",
    )


def _same_weights(policy: VelocityPolicy, trajectory: Trajectory) -> bool | None:
    """Compares the weights with the rollout's, on every rank; None if the policy or the rollout has no fingerprint."""
    version = weights_version(policy)
    if version is None or trajectory.weights_version is None:
        return None
    return not on_any_rank(version != trajectory.weights_version, trajectory.latents.device)


def _require_noise(trajectory: Trajectory, plan: Plan, upstream: str) -> None:
    if upstream not in ("closed_form", "interpolated") and plan.knot_sigmas is None:
        return
    if not trajectory.knows_noise:
        if plan.knot_sigmas is not None:
            raise ValueError(f"plan {plan.name!r} has shifted knots, which need the rollout's noise or velocities")
        raise ValueError(f"upstream={upstream!r} needs the rollout's noise or velocities, which were not stored")


def _require_on_policy(on_policy: bool | None, plan: Plan) -> None:
    if on_policy is False:
        raise OffPolicyError(
            "upstream='closed_form' is legal only on policy, but the weights changed since the rollout: "
            "use upstream='autograd'"
        )
    if on_policy is None and plan.knot_sigmas is not None:
        raise OffPolicyError(
            "upstream='closed_form' with shifted knots needs a policy with parameters(), also at the rollout: "
            "away from the rollout's states there is no ratio to check"
        )


def _require_interpolating(plan: Plan) -> None:
    if plan.knot_sigmas is not None:
        raise ValueError("upstream='interpolated' needs velocities at states of the rollout, not shifted knots")
    sums = plan.weights.sum(-2)
    if not torch.allclose(sums, torch.ones_like(sums)):
        raise ValueError(
            "upstream='interpolated' must have a plan whose weights sum to 1 for every step, got "
            f"{sums.min():g} to {sums.max():g} in plan {plan.name!r}"
        )
