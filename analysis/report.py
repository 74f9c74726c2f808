"""The report: tables as CSV, figures as PNG and SVG, and one self-contained HTML page, all from stored records."""

from __future__ import annotations

import base64
from pathlib import Path

import pandas as pd
from jinja2 import Environment, PackageLoader, StrictUndefined
from matplotlib.figure import Figure

from analysis import figures, signal_tables, tables
from analysis.calibration import calibration
from analysis.findings import findings, paper_estimator
from analysis.printable import printable
from jagg_core.records import Record, RecordError, write_atomically, write_json


def make_figures(record: Record, frames: dict[str, pd.DataFrame]) -> dict[str, Figure]:
    """Every figure that the tables allow, by the name of its file."""
    made: dict[str, Figure] = {}
    if len(frames["per_group"]):
        for window in record.settings["windows"]:
            made[f"cosine_per_group_w{window}"] = figures.cosine_per_group(frames["per_group"], window)
    if len(frames["pareto"]):
        made["pareto"] = figures.pareto_front(frames["pareto"], paper_estimator(record))
    if len(frames["cross"]):
        made["cross"] = figures.past_and_future(frames["cross"])
    if len(frames["knots"]):
        made["knots"] = figures.knot_placement(frames["knots"], record.schedule)
    if len(frames["blocks"]):
        made["blocks"] = figures.block_heat_map(frames["blocks"])
    if len(frames.get("signal", ())):
        made["signal_cost"] = figures.signal_per_cost(frames["signal"], record.settings["update_samples"])
    if len(frames.get("by_batch", ())):
        made["signal_batch"] = figures.loss_by_batch(frames["by_batch"], record.settings["max_signal_loss"])
    if len(frames["leak"]):
        made["leak"] = figures.leak_bars(frames["leak"])
    if len(frames["speed"]):
        made["speed"] = figures.speed_bars(frames["speed"])
    return made


def write_report(run: Path) -> tuple[Path, dict[str, pd.DataFrame], list[str]]:
    """Rebuild tables, figures and ``report.html`` of a run folder. Returns the page, the short tables, the findings.

    Raises:
        RecordError: no record, or a damaged one.
    """
    if not (run / "record.json").exists():
        raise RecordError(f"{run} holds no record.json: is it the folder of a finished run?")
    record = Record.read(run / "record.json")
    frames = tables.all_tables(record, [Record.read(path) for path in sorted(run.glob("speed-*.json"))])
    if record.kind == "calibrate":
        frames |= signal_tables.all_tables(record)
    for name, frame in frames.items():
        write_atomically(run / "tables" / f"{name}.csv", frame.to_csv(index=False).encode())
    pictures = {}
    for name, figure in make_figures(record, frames).items():
        for kind, content in figures.rendered(figure).items():
            write_atomically(run / "figures" / f"{name}.{kind}", content)
            if kind == "png":
                pictures[name] = _data_uri(content)
    shown, said = printable(frames), findings(record, frames)
    samples = run / "samples.png"
    environment = Environment(loader=PackageLoader("analysis"), autoescape=True, undefined=StrictUndefined)
    page = environment.get_template("report.html").render(
        record=record,
        steps=len(record.schedule),
        findings=said,
        tables={name: frame.to_html(index=False, border=0, escape=True) for name, frame in shown.items()},
        pictures=pictures,
        samples=_data_uri(samples.read_bytes()) if samples.exists() else None,
        sample_cell=next((c for c in record.cells if c.name == "samples" and c.status == "ok"), None),
    )
    write_atomically(run / "report.html", page.encode())
    for eta in record.settings["etas"]:
        if any(c.name == f"eta={eta:g}/knots" and c.status == "ok" for c in record.cells):
            write_json(run / f"calibration-eta{eta:g}.json", calibration(record, eta, frames))
    return run / "report.html", shown, said


def _data_uri(png: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(png).decode()
