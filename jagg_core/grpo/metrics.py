"""Figures of an update, and the seconds of its stages."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from torch.utils.benchmark.utils.timer import timer

STAGES = ("rollout", "reward", "forward", "upstream", "backward", "audit", "optimizer")
"""What the seconds of an update are counted for. Each includes its communication: waiting for slower ranks too."""


@dataclass
class Metrics:
    """Figures of an update, over all ranks where not said otherwise.

    Attributes:
        update: its number, from 1.
        reward_mean: over the samples.
        reward_std: over the samples.
        groups_without_signal: prompts whose samples all have advantage zero.
        loss: of the last optimizer step, this rank.
        log_ratio_max: largest magnitude over optimizer steps, this rank.
        clipped_share: mean over them, this rank.
        grad_norm: before clipping, of the last optimizer step; None if it was skipped.
        learning_rate: of the last optimizer step.
        passes: differentiated passes over a sample in a pass over the rollout, those of the plan; more where samples
            that are partly clipped were made exact. Mean over micro-batches.
        micro_batches: how often the plan was run: micro-batches of all optimizer steps, this rank.
        forwards: forwards of all of them, each over a micro-batch.
        audits: what the running cosine is from; see `jagg_core.engine.Meter`.
        audit_passes: differentiated passes of this update's audits, in neither ``passes`` nor ``forwards``.
        audit_cosine: running cosine of the plan's gradient to exact; None before the first audit.
        audit_cosine_low: lower end of its 95 % interval; None with too few audits.
        audit_cosine_high: upper end.
        skipped: why the update was skipped; empty if it was not.
        total_s: seconds of the update as a whole, evaluation and checkpoint apart; this rank.
        seconds: by stage, and of them in collectives (``communication``, see `CollectiveClock`); this rank.
    """

    update: int
    reward_mean: float | None = None
    reward_std: float | None = None
    groups_without_signal: int = 0
    loss: float | None = None
    log_ratio_max: float | None = None
    clipped_share: float | None = None
    grad_norm: float | None = None
    learning_rate: float = 0.0
    passes: float = 0
    micro_batches: int = 0
    forwards: int = 0
    audits: int = 0
    audit_passes: int = 0
    audit_cosine: float | None = None
    audit_cosine_low: float | None = None
    audit_cosine_high: float | None = None
    skipped: str = ""
    total_s: float = 0.0
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(STAGES, 0.0))

    def row(self) -> dict[str, float | int | str | None]:
        """As figures by name, for a log; ``reason`` is why it was skipped."""
        values = {k: v for k, v in vars(self).items() if k not in ("seconds", "skipped")}
        skipped = {"skipped": int(bool(self.skipped)), "reason": self.skipped}
        return values | skipped | {f"{k}_s": v for k, v in self.seconds.items()}


@contextmanager
def timed(metrics: Metrics, stage: str) -> Iterator[None]:
    """Add the seconds of the body to a stage, also if it fails."""
    start = timer()
    try:
        yield
    finally:
        metrics.seconds[stage] += timer() - start
