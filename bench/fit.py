"""The cost model held against measured groups: one forward and one backward are taken from exact, all else is told."""

from __future__ import annotations

from typing import Any

from bench.cost import SCHEMES
from bench.noise import median_of, noise_findings
from jagg_core.records import Record
from jagg_core.strict_json import RecordError

MEASURED = {
    "exact-batched": "exact-batched",
    "prototype": "prototype",
    "paper-joint": "paper",
    "closed-form-sequential": "closed-sequential",
    "closed-form-batched": "closed-batched",
    "endpoint-only": "endpoint-only",
    "subsample": "closed-sequential",
}
"""Arms of ``python -m bench group``, and what the model calls them, or what runs as much."""


def fit(record: Record) -> dict[str, Any]:
    """Seconds of one forward and one backward by the exact arm, and the model's error on every other arm.

    The error is relative to the measured median: 0.1 is a prediction ten percent too long.

    Raises:
        RecordError: not a record of ``python -m bench group``, or its exact arm failed.
    """
    cells = {cell.name: cell for cell in record.cells if cell.status == "ok"}
    if record.kind != "group-speed" or "exact" not in cells or "window" not in record.settings:
        raise RecordError(f"a record of python -m bench group with an exact arm is needed, got kind {record.kind!r}")
    window = int(record.settings["window"])
    samples = cells["exact"].samples
    forward, backward = (median_of(samples[f"{phase}_s"]) / window for phase in ("forward", "backward"))
    errors = {}
    for arm, scheme in MEASURED.items():
        if arm in cells:
            tally = SCHEMES[scheme].group(window)
            predicted = tally.forwards * forward + tally.backwards * backward
            measured = median_of(cells[arm].samples["total_s"])
            errors[arm] = {"predicted_s": predicted, "measured_s": measured, "error": predicted / measured - 1}
    found = {"backbone": record.backbone, "window": window, "batch": record.settings.get("batch")}
    return found | {"forward_s": forward, "backward_s": backward, "arms": errors, "findings": noise_findings(record)}
