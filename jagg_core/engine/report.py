"""The report of an update: its passes, losses, ratios and times."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from jagg_core.objective import ClippedSurrogate, Upstream


class RatioNoise(UserWarning):
    """On policy, yet log ratios exceed the clip range: half precision with another batch shape, or dropout."""


@dataclass(frozen=True)
class Report:
    """Counts and figures of one `accumulate_gradients`.

    Shares and log ratios are over the (sample, step) pairs that were evaluated.

    Attributes:
        loss: the scaled loss, summed over samples and steps (those of weight zero excluded).
        mean_loss: mean over samples and steps of the loss as it is, before ``scale``, and its two terms:
            ``policy_loss``, and ``kl`` before it is multiplied by ``kl_beta``.
        ratio_mean: mean of the ratio. approx_kl: mean of half the squared log ratio.
        log_ratio_mean, log_ratio_max: of log ratios to the rollout: mean, and largest magnitude.
        log_ratio_p99: 99th percentile of their magnitude.
        clipped_share: pairs without surrogate gradient.
        outside_clip_above, outside_clip_below: pairs whose ratio left the clip range above, and below.
        partly_clipped: (sample, part) pairs that were made exact, with some steps clipped and some not.
        passes: differentiated passes over steps, each one forward and one backward of the batch.
        forwards: forwards of the batch, with and without graph. reference_forwards: of the reference policy.
        backward_calls: calls of ``torch.autograd.backward``, or of ``backward_fn``.
        audit_passes: differentiated passes of an audit (`jagg_core.engine.Meter`), in none of the counts above.
        upstream, backward: the modes that ran. anticipating: see `Plan.anticipating`.
        log_ratios: ``[B, T]``, for a trainer's figures: 0 where the closed form takes the ratio as 1, NaN at steps
            of weight zero.
        seconds: per phase (forward, upstream, backward, and audit where there was one), if a clock was given.
    """

    loss: float
    mean_loss: float
    policy_loss: float
    kl: float
    ratio_mean: float
    approx_kl: float
    log_ratio_mean: float
    log_ratio_max: float
    log_ratio_p99: float
    clipped_share: float
    outside_clip_above: float
    outside_clip_below: float
    partly_clipped: int
    passes: int
    forwards: int
    reference_forwards: int
    backward_calls: int
    upstream: str
    backward: str
    anticipating: bool
    log_ratios: Tensor = field(default_factory=lambda: torch.empty(0, 0), repr=False, compare=False)
    seconds: dict[str, float] = field(default_factory=dict)
    audit_passes: int = 0


def figures_of(
    known: dict[int, Upstream], log_ratios: dict[int, Tensor], scale: float, objective: ClippedSurrogate
) -> dict[str, float]:
    """Computes the report's loss, log ratios and shares, from upstream gradients and log ratios ``[B]`` by step."""
    log_ratio = torch.stack(list(log_ratios.values()))
    magnitude, offset, (low, high) = log_ratio.abs().flatten(), log_ratio.exp() - 1, objective.ratio_bounds
    above, below = (offset > high).double(), (offset < low).double()
    loss, kl = torch.stack([u.loss for u in known.values()]), torch.stack([u.kl for u in known.values()])
    figures = {
        "loss": scale * loss.sum(),
        "mean_loss": loss.mean(),
        "policy_loss": (loss - objective.kl_beta * kl).mean(),
        "kl": kl.mean(),
        "ratio_mean": 1 + offset.mean(),
        "approx_kl": log_ratio.square().mean() / 2,
        "log_ratio_mean": log_ratio.mean(),
        "log_ratio_max": magnitude.max(),
        "log_ratio_p99": torch.quantile(magnitude, 0.99),
        "clipped_share": torch.stack([u.clipped for u in known.values()]).double().mean(),
        "outside_clip_above": above.mean(),
        "outside_clip_below": below.mean(),
    }
    # one transfer from the device for all of them
    return dict(zip(figures, torch.stack([x.double() for x in figures.values()]).tolist(), strict=True))


def ratios_of(known: dict[int, Upstream], log_ratios: dict[int, Tensor], steps: int) -> Tensor:
    """Collects log ratios ``[B, steps]``: as evaluated, else as the upstream gradients hold them, else NaN."""
    by_step = {step: upstream.log_ratio for step, upstream in known.items()} | log_ratios
    missing = torch.full_like(next(iter(by_step.values())), torch.nan)
    return torch.stack([by_step.get(step, missing) for step in range(steps)], 1)
