"""Predicted times of a group, an update and a training step, from counted work and a few figures of the machine.

For a group of W steps an arm runs forwards, backwards, all-gathers and reduce-scatters. A forward is 1, a backward 2,
and 3 where activations are recomputed (gradient checkpointing). Under full sharding (FSDP2) a forward and a backward
each gather all parameters once, and a backward scatters all gradients once, whatever the batch. The joint backward of
two graphs gathers for both and scatters once, as counted.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.arms import ARMS, Arm, Tally, arms_of
from bench.noise import median_of, noise_findings
from jagg_core.checks import require_at_least
from jagg_core.environment import command_line
from jagg_core.records import Cell, Record
from jagg_core.strict_json import RecordError

if TYPE_CHECKING:
    from bench.work import PassWork

RECOMPUTE = 1.0
"""Forwards that gradient checkpointing adds to a backward."""


@dataclass(frozen=True)
class Machine:
    """Figures of the machine and the run; the defaults are assumptions to replace.

    Attributes:
        tflops: reached per device in the model's dtype, in 10^12 per second.
        bandwidth: of a collective per device, in 10^9 bytes per second.
        overlap: share of the compute time under which communication can hide.
        parameter_bytes: per gathered parameter (bf16).
        gradient_bytes: per scattered gradient (fp32).
        samples: per device and pass.
        checkpointing: whether activations are recomputed in the backward.
        other: reward, optimizer and the like, as a share of the exact step's rollout and update; no arm changes it.

    Raises:
        ValueError: a figure out of range.
    """

    tflops: float = 400.0
    bandwidth: float = 200.0
    overlap: float = 0.9
    parameter_bytes: float = 2.0
    gradient_bytes: float = 4.0
    samples: int = 1
    checkpointing: bool = True
    other: float = 0.0

    def __post_init__(self) -> None:
        for name in ("tflops", "bandwidth", "parameter_bytes", "gradient_bytes"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")
        if not 0 <= self.overlap <= 1:
            raise ValueError(f"overlap must be between 0 and 1, got {self.overlap}")
        if not 0 <= self.other < math.inf:
            raise ValueError(f"other must be at least 0, got {self.other}")
        require_at_least(self, samples=1)


@dataclass(frozen=True)
class Update:
    """The update: T of ``steps`` sampling steps (all but the last), in groups of W, or by plans of so many passes.

    Attributes:
        steps: sampling steps.
        window: steps W of a group.
        jagg_frac: share of the groups, from the first, that the paper's recipe approximates.
        passes: of plans that know no groups; numbers above T are left out of the predictions.

    Raises:
        ValueError: a setting out of range.
    """

    steps: int = 21
    window: int = 4
    jagg_frac: float = 0.6
    passes: tuple[int, ...] = (8, 5)

    def __post_init__(self) -> None:
        from jagg_core.plans import groups_of, routed_groups

        require_at_least(self, steps=2, window=1)
        groups_of(self.trained, self.window)
        routed_groups(1, self.jagg_frac)
        if min(self.passes, default=1) < 1:
            raise ValueError(f"passes must be at least 1, got {list(self.passes)}")

    @property
    def trained(self) -> int:
        """Trained steps T."""
        return self.steps - 1

    def arms(self) -> list[Arm]:
        """Lists the arms that are predicted; plans with more passes than trained steps are left out."""
        return list(arms_of("cost", [passes for passes in self.passes if passes <= self.trained]))

    def tally(self, arm: Arm) -> Tally:
        """Tallies an update: approximated groups, then all other steps, left-over ones included."""
        from jagg_core.plans import groups_of, routed_groups

        assert arm.tally is not None
        if arm.passes is not None:
            return arm.tally(arm.passes)
        groups = groups_of(self.trained, self.window)
        count = routed_groups(len(groups), self.jagg_frac) if arm.routed else len(groups)
        total = arm.tally(self.window).times(count)
        whole, left = divmod(self.trained - count * self.window, self.window)
        total += arm.rest(self.window).times(whole)
        if left:
            total += arm.rest(left)
        return replace(total, scatters=1) if arm.deferred else total

    def group(self, arm: Arm) -> Tally:
        """Tallies W steps: for a plan without groups, their share of the update."""
        assert arm.tally is not None
        if arm.passes is not None:
            return self.tally(arm).times(self.window / self.trained)
        return arm.tally(self.window)


@dataclass(frozen=True)
class Prediction:
    """Seconds of a group, an update and a training step on ``ranks`` devices."""

    arm: Arm
    ranks: int
    group: float
    update: float
    step: float
    tally: Tally = field(repr=False)

    @property
    def cell(self) -> Cell:
        """Its cell of a record."""
        about = {"arm": self.arm.name, "label": self.arm.label, "calibrated": self.arm.passes is not None}
        times = {"group_s": self.group, "update_s": self.update, "step_s": self.step}
        name = f"{self.arm.name}/ranks={self.ranks}"
        return Cell(name, settings=about | {"ranks": self.ranks}, values=times | asdict(self.tally))


def seconds(tally: Tally, work: PassWork, machine: Machine, ranks: int) -> float:
    """Computes the time of a tally: compute, and the communication that does not hide under it."""
    backward = work.backward + (RECOMPUTE * work.forward if machine.checkpointing else 0.0)
    operations = machine.samples * (tally.forwards * work.forward + tally.backwards * backward)
    compute = operations / (machine.tflops * 1e12)
    moved = tally.gathers * machine.parameter_bytes + tally.scatters * machine.gradient_bytes
    communication = moved * work.parameters * (ranks - 1) / ranks / (machine.bandwidth * 1e9)
    return compute + max(0.0, communication - machine.overlap * compute)


def check_ranks(ranks: Sequence[int]) -> None:
    """Raises ValueError unless ``ranks`` are different numbers of at least 1."""
    if not ranks or min(ranks) < 1 or len(set(ranks)) < len(ranks):
        raise ValueError(f"ranks must be different numbers of at least 1, got {list(ranks)}")


def predict(work: PassWork, update: Update, machine: Machine, ranks: Sequence[int]) -> list[Prediction]:
    """Predicts the times of every arm on every number of devices.

    Raises:
        ValueError: a number of devices below 1.
    """
    check_ranks(ranks)
    predictions = []
    for count in ranks:
        rollout = seconds(Tally(update.steps, 0, update.steps, 0), work, machine, count)
        exact = seconds(update.tally(ARMS["exact"]), work, machine, count)
        other = machine.other * (rollout + exact)
        for arm in update.arms():
            tally = update.tally(arm)
            spent = seconds(tally, work, machine, count)
            group = seconds(update.group(arm), work, machine, count)
            predictions.append(Prediction(arm, count, group, spent, rollout + spent + other, tally))
    return predictions


def fit(record: Record) -> dict[str, Any]:
    """Holds the model against a measured group: seconds of one forward and one backward are taken from exact.

    Returns them, and by arm the relative error to the measured median: 0.1 is a prediction ten percent too long.

    Raises:
        RecordError: not a record of ``python -m bench group``, or its exact arm failed.
    """
    cells = {cell.name: cell for cell in record.cells if cell.status == "ok"}
    if record.kind != "group-speed" or "exact" not in cells or "window" not in record.settings:
        raise RecordError(f"kind must be that of python -m bench group, with an exact arm, got {record.kind!r}")
    window = int(record.settings["window"])
    samples = cells["exact"].samples
    forward, backward = (median_of(samples[f"{phase}_s"]) / window for phase in ("forward", "backward"))
    errors = {}
    for arm in arms_of("group"):
        if arm.tally is not None and arm.name != "exact" and arm.name in cells:
            tally = arm.tally(window)
            predicted = tally.forwards * forward + tally.backwards * backward
            measured = median_of(cells[arm.name].samples["total_s"])
            errors[arm.name] = {"predicted_s": predicted, "measured_s": measured, "error": predicted / measured - 1}
    about = {"backbone": record.backbone, "window": window, "batch": record.settings.get("batch")}
    return about | {"forward_s": forward, "backward_s": backward, "arms": errors, "findings": noise_findings(record)}


@dataclass(frozen=True)
class CostStudy:
    """Settings of ``python -m bench cost``.

    Attributes:
        backbone: registered, or yours as module:function; a published configuration is counted without its weights.
        backbone_options: option=value of its loader, such as height=720 width=720.
        guidance: scale; None is the backbone's usual one, 1 where a recipe trains without.
        ranks: numbers of devices.
        measured: records of ``python -m bench group`` to hold the model against.

    Raises:
        ValueError: a setting out of range; raised before anything is counted.
    """

    backbone: str = "flux-dev"
    backbone_options: tuple[str, ...] = ()
    guidance: float | None = None
    ranks: tuple[int, ...] = (1, 8, 64, 512, 1024)
    measured: tuple[str, ...] = ()
    update: Update = field(default_factory=Update)
    machine: Machine = field(default_factory=Machine)

    def __post_init__(self) -> None:
        from bench.work import is_published
        from jagg_core.backbones import read_options

        options = read_options(self.backbone, self.backbone_options)
        weights = sorted({"path", "revision"} & options.keys())
        if weights and is_published(self.backbone):
            raise ValueError(
                "backbone_options must leave weights out, as the published configuration is counted, got "
                + " and ".join(weights)
            )
        check_ranks(self.ranks)


def run_cost_study(settings: CostStudy) -> Record:
    """Counts, predicts, and holds the model against measured groups. Returns the record.

    Raises:
        ValueError: a backbone that cannot be counted; see `bench.work.count_work`.
        RecordError: a measured record of another kind.
    """
    from bench.work import count_work
    from jagg_core.backbones import read_options

    fitted = [fit(Record.read(Path(path))) for path in settings.measured]
    work = count_work(settings.backbone, read_options(settings.backbone, settings.backbone_options), settings.guidance)
    record = Record("cost", command_line(), settings.backbone, asdict(settings), seeds={})
    record.cells.append(Cell("work", values=asdict(work)))
    record.cells += [one.cell for one in predict(work, settings.update, settings.machine, settings.ranks)]
    for number, one_fit in enumerate(fitted):
        record.cells.append(Cell(f"measured-{number}", values=one_fit))
    return record
