"""A run of the cost model: what is asked, counted, predicted, and held against measurements."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path

from bench.cost import Machine, Update, as_values, check_ranks, predict
from bench.fit import fit
from jagg_core.environment import command_line
from jagg_core.records import Cell, Record


@dataclass(frozen=True)
class CostStudy:
    """What is predicted.

    Attributes:
        backbone: registered, or your own as module:function; a published configuration is counted without its weights.
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
                f"backbone_options: the published configuration is counted, of no folder, got {' and '.join(weights)}"
            )
        check_ranks(self.ranks)


def run_cost_study(settings: CostStudy) -> Record:
    """Count, predict, and hold the model against what was measured. Returns the record.

    Raises:
        ValueError: a backbone that cannot be counted; see `bench.work.count_work`.
        RecordError: a measured record that is none.
    """
    from bench.work import count_work
    from jagg_core.backbones import read_options

    fitted = [fit(Record.read(Path(path))) for path in settings.measured]
    work = count_work(settings.backbone, read_options(settings.backbone, settings.backbone_options), settings.guidance)
    record = Record("cost", command_line(), settings.backbone, asdict(settings), seeds={})
    record.cells.append(Cell("work", values=asdict(work)))
    for made in predict(work, settings.update, settings.machine, settings.ranks):
        told = {"scheme": made.scheme, "label": made.label, "ranks": made.ranks}
        record.cells.append(Cell(f"{made.scheme}/ranks={made.ranks}", settings=told, values=as_values(made)))
    for number, found in enumerate(fitted):
        record.cells.append(Cell(f"measured-{number}", values=found))
    return record
