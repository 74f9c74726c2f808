"""The report: tables as CSV, figures as PNG and SVG, and one self-contained HTML page, all from stored records."""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from analysis.report.bench.page import write_bench_report
from analysis.report.blocks import all_figures, draw_blocks, written
from analysis.report.checked import read_record, told
from analysis.report.cost import write_cost_report
from analysis.report.curves import write_curve_report
from analysis.report.fidelity import signal_tables, tables
from analysis.report.fidelity.blocks import SAMPLES, STUDY
from analysis.report.fidelity.conclusions import conclusions, headline
from analysis.report.fidelity.direction import pathwise
from analysis.report.fidelity.printable import printable
from analysis.report.fidelity.recommendation import calibration, lines_to_paste
from analysis.report.fidelity.sentences import findings
from analysis.report.league import write_league_report
from analysis.report.page import data_uri, render, write_tables_and_figures
from analysis.report.run import write_run_report
from analysis.statistics.names import families_of, showing
from bench.noise import noise_findings
from jagg_core.files import write_atomically
from jagg_core.records import Record
from jagg_core.strict_json import RecordError, write_json


def write_report(run: Path) -> tuple[Path, dict[str, pd.DataFrame], list[str]]:
    """Rebuild tables, figures and ``report.html`` of a run folder. Returns the page, the short tables, the findings.

    Raises:
        ValueError: a training run whose log cannot be read.
        RecordError: no record, or a damaged one; names its file and, as far as that is known, the field.
    """
    if not (run / "record.json").exists():
        if (run / "metrics.csv").exists():
            return write_run_report([run], run)
        raise RecordError(f"{run} holds no record.json: is it the folder of a finished run?")
    record = read_record(run / "record.json")
    with told(run / "record.json"), showing(families_of(record)):
        return _write(run, record)


def named_folder(record: Record, run: Path) -> Path:
    """The run folder as the command that made the record names it, so that lines of the page run where that one did."""
    command = list(record.command)
    return Path(command[command.index("--out") + 1]) if "--out" in command[:-1] else run


def _write(run: Path, record: Record) -> tuple[Path, dict[str, pd.DataFrame], list[str]]:
    if record.kind == "cost":
        return write_cost_report(run, record)
    if record.kind == "bench":
        return write_bench_report(run, record)
    if record.kind == "curves":
        return write_curve_report(run, record)
    if record.kind == "league":
        return write_league_report(run, record)
    speeds = [read_record(path) for path in sorted(run.glob("speed-*.json"))]
    frames = tables.all_tables(record, speeds)
    if record.kind == "calibrate":
        frames |= signal_tables.all_tables(record)
        if len(found := pathwise(record)):
            frames["pathwise"] = found
    frames["conclusions"] = conclusions(record, frames)
    blocks = (*STUDY, SAMPLES) if (run / "samples.png").exists() else STUDY
    drawn = draw_blocks(blocks, record, frames)
    pictures = write_tables_and_figures(run, frames, all_figures(drawn))
    shown = printable(frames) | {"conclusions": frames["conclusions"]}
    said = findings(record, frames)
    said += [f"Speed, one group on {one.backbone}: {warning}." for one in speeds for warning in noise_findings(one)]
    folder = named_folder(record, run)
    lines: list[str] = []
    on_page: list[str] = []
    for eta in record.settings["etas"]:
        if any(c.name == f"eta={eta:g}/knots" and c.status == "ok" for c in record.cells):
            file = run / f"calibration-eta{eta:g}.json"
            found = calibration(record, eta, frames)
            write_json(file, found)
            lines += lines_to_paste(record, eta, found["recommended"], file)
            # the plan of the page's first line is the last target, by learning signal
            first = dict(reversed(found["recommended"].items()))
            on_page += lines_to_paste(record, eta, first, folder / file.name)
    samples = run / "samples.png"
    page = render(
        title=f"Aggregated gradients against exact ones: {record.backbone}",
        top=headline(record, frames),
        shown=shown,
        record=record,
        blocks=blocks,
        drawn=drawn,
        pictures=pictures,
        files=written(frames),
        findings=said,
        commands=list(zip(on_page[::3], on_page[1::3], on_page[2::3], strict=True)),
        samples=data_uri(samples.read_bytes()) if samples.exists() else None,
        sample_cell=next((c for c in record.cells if c.name == "samples" and c.status == "ok"), None),
    )
    write_atomically(run / "report.html", page.encode())
    return run / "report.html", shown, said + lines
