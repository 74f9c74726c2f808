"""The report: tables as CSV, figures as PNG and SVG, and one self-contained HTML page, all from stored records."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import pandas as pd
from jinja2 import Environment, PackageLoader, StrictUndefined
from matplotlib.figure import Figure

from analysis import figures, tables
from analysis.calibration import calibration, recommend
from jagg_core.records import Record, RecordError, write_atomically, write_json


def interval_text(row: Any, name: str, digits: int = 3) -> str:
    """``0.991 [0.988, 0.993]``; ``undefined`` where there is no value."""
    value, low, high = (row[key] for key in (name, f"{name}_low", f"{name}_high"))
    if pd.isna(value):
        return "undefined"
    text = f"{value:.{digits}f}"
    return text if pd.isna(low) else f"{text} [{low:.{digits}f}, {high:.{digits}f}]"


def printable(frames: dict[str, pd.DataFrame]) -> dict[str, pd.DataFrame]:
    """Short tables for people, by title key; the CSV files hold every column."""
    shown: dict[str, pd.DataFrame] = {}
    whole = frames["whole_update"]
    if len(whole):
        shown["whole_update"] = pd.DataFrame(
            {
                "eta": whole["eta"].map("{:g}".format),
                "passes": whole["passes"],
                "estimator": whole["label"],
                "looks ahead": whole["anticipating"].map({True: "yes", False: "no"}),
                "cosine": [interval_text(r, "cosine", 4) for _, r in whole.iterrows()],
                "relative error": [interval_text(r, "rel_error") for _, r in whole.iterrows()],
                "norm ratio": [interval_text(r, "norm_ratio") for _, r in whole.iterrows()],
            }
        )
    groups = frames["per_group"]
    if len(groups):
        groups = groups.assign(text=[interval_text(r, "cosine") for _, r in groups.iterrows()])
        wide = groups.pivot_table(
            index=["eta", "window", "passes", "label"], columns="group", values="text", aggfunc="first", sort=False
        )
        wide.columns = [f"group {c}" for c in wide.columns]
        wide = wide.reset_index().rename(columns={"label": "estimator", "window": "W"}).fillna("")
        shown["per_group"] = wide.sort_values(["eta", "W", "passes"], ascending=[False, True, False])
    routing = frames["routing"]
    if len(routing):
        shown["routing"] = pd.DataFrame(
            {
                "eta": routing["eta"].map("{:g}".format),
                "W": routing["window"],
                "threshold on the mean cosine": routing["threshold"],
                "jagg_frac": [interval_text(r, "jagg_frac", 2) for _, r in routing.iterrows()],
            }
        )
    leak = frames["leak"]
    if len(leak):
        shown["leak"] = pd.DataFrame(
            {
                "estimator": leak["label"],
                "passes": leak["passes"],
                "looks ahead": leak["anticipating"].map({True: "yes", False: "no"}),
                "squared mean / noise": leak["ratio"].map("{:.2f}".format),
                "p value": leak["p_value"].map("{:.4f}".format),
                "batches": leak["n"],
            }
        )
    speed = frames["speed"]
    if len(speed):
        milliseconds = {
            f"{phase} ms": (speed[f"{phase}_s"] * 1000).map(lambda v: "" if pd.isna(v) else f"{v:.1f}")
            for phase in ("total", "forward", "upstream", "backward")
        }
        shown["speed"] = pd.DataFrame(
            {
                "backbone": speed["backbone"],
                "arm": speed["arm"].map(lambda a: figures.ARM_LABELS.get(a, a)),
                **milliseconds,
                "speed-up": [interval_text(r, "speed_up", 2) for _, r in speed.iterrows()],
            }
        )
    if len(frames["failures"]):
        shown["failures"] = frames["failures"]
    return shown


def paper_estimator(record: Record) -> str:
    """Name of the paper's recipe in this record: its first window, routed by ``jagg_frac``."""
    return f"jagg-w{record.settings['windows'][0]}-f{record.settings['jagg_frac']:g}"


def findings(record: Record, frames: dict[str, pd.DataFrame]) -> list[str]:
    """What the numbers say, in sentences; each only if its cells exist."""
    said = []
    steps = len(record.schedule)
    front = frames["pareto"]
    for eta in record.settings["etas"] if len(front) else ():
        part = front[front["eta"] == eta]
        paper = part[part["estimator"] == paper_estimator(record)]
        causal = part[(part["family"] == "causal") & part["best"]].sort_values("passes")
        if len(paper) and len(causal):
            row = paper.iloc[0]
            said.append(
                f"eta {eta:g}: the paper's recipe takes {row['passes']} of {steps} passes at cosine "
                f"{interval_text(row, 'cosine', 4)}."
            )
            said += [text for target in (0.97, 0.99) if (text := recommend(record, eta, target)) is not None]
            jagg = part[(part["family"] == "jagg") & part["best"]]
            both = jagg.merge(causal, on="passes", suffixes=("_jagg", "_causal"))
            below = both[both["cosine_causal"] < both["cosine_jagg"]]["passes"].unique().tolist()
            where = f"except at {', '.join(map(str, below))} passes" if below else "at every one of them"
            said.append(
                f"eta {eta:g}: against the paper's rule with its best window and fraction at the same number of passes "
                f"({both['passes'].min()} to {both['passes'].max()}), causal's mean cosine is not lower {where}."
                if len(both)
                else f"eta {eta:g}: no common numbers of passes to compare."
            )
    for _, row in frames["leak"].iterrows() if len(frames["leak"]) else ():
        if row["family"] == "causal" or row["estimator"] == f"jagg-w{record.settings['windows'][0]}-f1":
            verdict = "is not zero" if row["p_value"] < 0.05 else "cannot be told from zero"
            said.append(
                f"Leak: with all advantages 1, the mean gradient of '{row['label']}' {verdict} "
                f"(ratio {row['ratio']:.2f}, p = {row['p_value']:.4f}, {row['n']} batches)."
            )
    for name, part in frames["speed"].groupby("backbone", sort=False) if len(frames["speed"]) else ():
        by_arm = {row["arm"]: row for _, row in part.iterrows()}
        shown = [
            f"{figures.ARM_LABELS[arm]} {interval_text(by_arm[arm], 'speed_up', 2)}x"
            for arm in ("paper-joint", "closed-form-sequential", "closed-form-batched")
            if arm in by_arm
        ]
        text = f"Speed, one group on {name} against exact: {'; '.join(shown)}."
        if {"exact", "exact-bare"} <= by_arm.keys():
            overhead = by_arm["exact"]["fastest_s"] / by_arm["exact-bare"]["fastest_s"] - 1
            text += f" Engine over its bare model calls, fastest rounds: {overhead * 100:+.1f} %."
        said.append(text)
    return said


def make_figures(record: Record, frames: dict[str, pd.DataFrame]) -> dict[str, Figure]:
    """Every figure that the tables allow, by the name of its file."""
    made: dict[str, Figure] = {}
    if len(frames["per_group"]):
        for window in record.settings["windows"]:
            made[f"cosine_per_group_w{window}"] = figures.cosine_per_group(frames["per_group"], window)
    if len(frames["pareto"]):
        made["pareto"] = figures.pareto_front(frames["pareto"], paper_estimator(record))
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
            write_json(run / f"calibration-eta{eta:g}.json", calibration(record, eta))
    return run / "report.html", shown, said


def _data_uri(png: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(png).decode()
