"""Two results against each other, of any kind of record; and all records of a folder as one table.

The rule. Times: the ratio of medians, second over first, with a bootstrap interval; FASTER or SLOWER where the whole
interval lies beyond the noise floor, SAME where the ratio does not, else UNDECIDED (`bench.compare`). All else: the
difference of two estimates with intervals, whose half widths add in quadrature, as if the two runs were independent:
too wide where they share seeds. SAME where the whole interval lies within the margin, a share of the first value;
HIGHER or LOWER where it leaves out 0; else UNDECIDED. Numbers without an interval (counts, predictions) are compared as
they are.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from analysis.report.run_tables import ends, logged, read_runs
from bench.compare import MACHINE, compare_times
from bench.noise import NOISY, median_of, noise_floor, times_of
from jagg_core.records import Cell, Record
from jagg_core.strict_json import RecordError

KEYS = (
    *("eta", "estimator", "arm", "method", "scheme", "family", "reward", "block", "window", "group", "passes"),
    *("upstream", "centring", "devices", "layout", "backbone", "phase", "part"),
)
"""Columns that say what a row is of."""

MARGIN = 0.01
"""Share of the first value within which two estimates count as the same."""

UNDECIDED = "UNDECIDED"

COLUMNS = ["table", "of", "quantity", "first", "second", "change", "low", "high", "verdict"]


def load_records(folder: Path | str) -> pd.DataFrame:
    """Loads every record below a folder as one table, a row per number.

    Columns: ``path`` below the folder, ``kind``, ``backbone``, ``commit``, ``cell``, ``status``, ``quantity`` (names
    inside values are joined by dots), ``sample`` (its place in a list of samples, None for a value) and ``value``.
    Cells that failed have one row without a quantity.

    Raises:
        RecordError: a damaged record, or none at all.
    """
    rows: list[dict[str, Any]] = []
    root = Path(folder)
    for path in sorted(root.rglob("*.json")):
        try:
            record = Record.read(path)
        except RecordError:
            if path.name == "record.json":
                raise
            continue  # a calibration file, a manifest
        about = {
            "path": path.relative_to(root).as_posix(),
            "kind": record.kind,
            "backbone": record.backbone,
            "commit": record.environment.get("commit"),
        }
        for cell in record.cells:
            named = about | {"cell": cell.name, "status": cell.status}
            numbers = [{"quantity": q, "sample": i, "value": v} for q, i, v in _numbers(cell)]
            rows += [named | number for number in numbers or [{"quantity": None, "sample": None, "value": None}]]
    if not rows:
        raise RecordError(f"{root} holds no records")
    return pd.DataFrame(rows)


def _numbers(cell: Cell) -> Iterator[tuple[str, int | None, float | None]]:
    for name, samples in cell.samples.items():
        yield from ((name, place, sample) for place, sample in enumerate(samples))

    def inside(name: str, value: Any) -> Iterator[tuple[str, int | None, float | None]]:
        if isinstance(value, dict):
            for key, item in value.items():
                yield from inside(f"{name}.{key}" if name else key, item)
        elif isinstance(value, (int, float)):
            yield name, None, float(value)

    yield from inside("", cell.values)


def compare(first: Path, second: Path, margin: float = MARGIN) -> tuple[pd.DataFrame, list[str]]:
    """Compares two run folders or record files. Returns a row per quantity, and warnings.

    Raises:
        ValueError: a margin that is not positive.
        RecordError: no record, or records of different kinds.
    """
    if not margin > 0:
        raise ValueError(f"margin must be positive, got {margin}")
    if all((path / "metrics.csv").exists() and not (path / "record.json").exists() for path in (first, second)):
        return _rows(list(_of_runs(first, second))), []
    one, other = (Record.read(path / "record.json" if path.is_dir() else path) for path in (first, second))
    if one.kind != other.kind:
        raise RecordError(f"records must be of one kind, got {one.kind!r} ({first}) and {other.kind!r} ({second})")
    rows = [*_times(one, other), *(_estimates(first, second, margin) if first.is_dir() and second.is_dir() else ())]
    if not rows:
        rows = list(_values(one, other, margin))
    return _rows(rows), warnings_of(one, other)


def _rows(rows: list[dict[str, Any]]) -> pd.DataFrame:
    return pd.DataFrame(rows, columns=COLUMNS)


def warnings_of(first: Record, second: Record) -> list[str]:
    """Says in which settings, and in what of their machines, two records differ."""
    texts = []
    pairs = [(n, first.settings.get(n), second.settings.get(n)) for n in {**first.settings, **second.settings}]
    different = {"backbone": (first.backbone, second.backbone)} | {n: (a, b) for n, a, b in pairs}
    for name, (a, b) in different.items():
        if a != b and len(f"{a}{b}") < 200:
            texts.append(f"{name} differs: {a!r} and {b!r}")
        elif a != b:
            texts.append(f"{name} differs")
    for name in (*MACHINE, "torch", "commit"):
        a, b = (record.environment.get(name, record.environment.get("packages", {})) for record in (first, second))
        a, b = (x.get(name) if isinstance(x, dict) else x for x in (a, b))
        if a != b:
            texts.append(f"{name} differs: {a!r} and {b!r}")
    return texts


def _times(first: Record, second: Record) -> Iterator[dict[str, Any]]:
    """Cells with seconds."""
    others = {cell.name: cell for cell in second.cells if "total_s" in cell.samples}
    timed = [cell for cell in first.cells if "total_s" in cell.samples]
    floor = max(map(_floor, (first, second)))
    for cell in timed:
        if cell.name in others:
            yield _timed("times", cell.name, "total_s", times_of(cell), times_of(others[cell.name]), floor)
        else:
            yield _row("times", cell.name, "total_s", None, None, None, None, None, "MISSING")


def _floor(record: Record) -> float:
    try:
        return noise_floor(record)
    except RecordError:
        return NOISY  # exact was not timed twice, so nothing finer can be resolved


def _timed(
    table: str, of: str, name: str, first: Sequence[float], second: Sequence[float], floor: float
) -> dict[str, Any]:
    verdict, ratio = compare_times(first, second, floor)
    word = UNDECIDED if verdict == "ambiguous" else verdict.upper()
    return _row(table, of, name, median_of(first), median_of(second), ratio.value, ratio.low, ratio.high, word)


def _of_runs(first: Path, second: Path) -> Iterator[dict[str, Any]]:
    """Seconds of an update and rewards at the end of two training runs; one seed each has no interval of rewards."""
    runs = [read_runs([path]) for path in (first, second)]
    logs = [logged(run) for run in runs]
    updates = [log[log["log"] == "metrics"] for log in logs]
    for name in updates[0]["figure"].unique():
        a, b = (log[log["figure"] == name]["value"].tolist() for log in updates)
        if name.endswith("_s") and min(len(a), len(b)) > 1 and min(*a, *b) > 0:
            yield _timed("run", "update", name, a, b, NOISY)
    a, b = (ends(run, log).set_index("reward")["ends"] for run, log in zip(runs, logs, strict=True))
    for reward in a.index.intersection(b.index):
        yield _row("run", reward, "at the end", a[reward], b[reward], b[reward] - a[reward], None, None, UNDECIDED)


def _estimates(first: Path, second: Path, margin: float) -> Iterator[dict[str, Any]]:
    """Every quantity with an interval in the tables that both folders have."""
    for path in sorted((first / "tables").glob("*.csv")):
        twin = second / "tables" / path.name
        if not twin.exists() or not path.read_text().strip() or not twin.read_text().strip():
            continue
        one, other = pd.read_csv(path), pd.read_csv(twin)
        keys = [k for k in KEYS if k in one.columns and k in other.columns]
        quantities = [q for q in one.columns if f"{q}_low" in one.columns and f"{q}_low" in other.columns]
        if not keys or not quantities:
            continue
        both = one.drop_duplicates(keys).merge(other.drop_duplicates(keys), on=keys, suffixes=("", " b"), how="left")
        for _, row in both.iterrows():
            naming = [k for k in keys if k != "family" or "estimator" not in keys]
            of = ", ".join(f"{row[k]:g}" if isinstance(row[k], float) else str(row[k]) for k in naming)
            for name in quantities:
                yield _estimate(path.stem, of, name, row, margin)


def _estimate(table: str, of: str, name: str, row: pd.Series, margin: float) -> dict[str, Any]:
    a, b = row[name], row[f"{name} b"]
    if pd.isna(a) or pd.isna(b):
        return _row(table, of, name, None if pd.isna(a) else a, None if pd.isna(b) else b, None, None, None, "MISSING")
    change = b - a
    # an end of the difference is one run's end against the other's: half widths are not symmetric
    down = math.hypot(b - row[f"{name}_low b"], row[f"{name}_high"] - a)
    up = math.hypot(row[f"{name}_high b"] - b, a - row[f"{name}_low"])
    low, high = change - down, change + up
    verdict = UNDECIDED
    if max(abs(low), abs(high)) <= margin * abs(a):
        verdict = "SAME"
    elif low > 0 or high < 0:
        verdict = "HIGHER" if low > 0 else "LOWER"
    return _row(table, of, name, a, b, change, low, high, verdict)


def _values(first: Record, second: Record, margin: float) -> Iterator[dict[str, Any]]:
    """Numbers of cells that both records have, for records without times or intervals; of samples the medians."""
    others = {(cell.name, name): value for cell in second.cells for name, value in _single(cell).items()}
    for cell in first.cells:
        for name, value in _single(cell).items():
            other = others.get((cell.name, name))
            if other is None:
                continue
            verdict = "HIGHER" if other > value else "LOWER"
            if abs(other - value) <= margin * abs(value):
                verdict = "SAME"
            yield _row("values", cell.name, name, value, other, other - value, None, None, verdict)


def _single(cell: Cell) -> dict[str, float]:
    values = {name: value for name, place, value in _numbers(cell) if place is None and value is not None}
    medians = {
        name: median_of(samples) for name, samples in cell.samples.items() if any(s is not None for s in samples)
    }
    return values | medians


def _row(*values: Any) -> dict[str, Any]:
    return dict(zip(COLUMNS, values, strict=True))


def shown(frame: pd.DataFrame, *, every: bool = False) -> pd.DataFrame:
    """Makes the table to print: what certainly changed, or ``every`` row."""
    kept = frame if every else frame[~frame["verdict"].isin(["SAME", "MISSING", UNDECIDED])]

    def text(row: pd.Series) -> str:
        if pd.isna(row["low"]):
            return "" if pd.isna(row["change"]) else f"{row['change']:.4g}"
        return f"{row['change']:.4g} [{row['low']:.4g}, {row['high']:.4g}]"

    number = "{:.5g}".format
    return pd.DataFrame(
        {
            "verdict": kept["verdict"],
            "of": kept["table"] + ": " + kept["of"],
            "quantity": kept["quantity"],
            "first": kept["first"].map(lambda v: "" if pd.isna(v) else number(v)),
            "second": kept["second"].map(lambda v: "" if pd.isna(v) else number(v)),
            "ratio of times, or difference": [text(row) for _, row in kept.iterrows()],
        }
    )


def markdown(frame: pd.DataFrame) -> str:
    """Formats a table for a pull request."""
    lines = [list(frame.columns), ["---"] * len(frame.columns), *frame.astype(str).to_numpy().tolist()]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)
