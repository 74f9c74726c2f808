"""The page of a bench run: what JAGG costs and gains on a machine, beside the paper's figures and the cost model's."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure

from analysis.report.bench.figures import speed_up_intervals, step_bars
from analysis.report.bench.paper import beside_the_paper
from analysis.report.bench.printable import printable, share_text
from analysis.report.bench.run import BROKEN, Measured, read_run
from analysis.report.cost import PUBLISHED
from analysis.report.fidelity.printable import interval_text
from analysis.report.page import render, write_tables_and_figures
from bench.arms import HEADLINE, PAPER, label_of
from bench.noise import noise_findings, noise_floor
from bench.speed_ups import PARTS
from jagg_core.files import write_atomically
from jagg_core.records import Record
from jagg_core.strict_json import read_json

FRAMES = {"group": "groups", "memory": "memory", "collectives": "collectives", "update": "updates"}
"""File names of the tables, by kind of cell."""


def all_tables(cells: Sequence[Measured], paper: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """Every table by the name of its file: what became of the cells, a table per kind, and the paper's figures."""
    status = [{"cell": one.name, "kind": one.kind, "status": one.status, "reason": one.reason} for one in cells]
    frames = {"cells": pd.DataFrame(status, columns=["cell", "kind", "status", "reason"])}
    for kind, name in FRAMES.items():
        made = [one.table.assign(cell=one.name) for one in _with_table(cells, kind)]
        frames[name] = pd.concat(made, ignore_index=True) if made else pd.DataFrame()
    return frames | {"beside_the_paper": paper}


def make_figures(cells: Sequence[Measured]) -> dict[str, Figure]:
    """Every figure that the cells allow, by the name of its file."""
    made: dict[str, Figure] = {}
    groups = {one.name: one.table[one.table["arm"] != "exact"] for one in _with_table(cells, "group")}
    compared = {name: table.dropna(subset="speed_up") for name, table in groups.items()}
    timed = {one.name: one.table.dropna(subset="update_s") for one in _with_table(cells, "update")}
    for name, draw, tables in (("speed_ups", speed_up_intervals, compared), ("steps", step_bars, timed)):
        drawn = {cell: table for cell, table in tables.items() if len(table)}
        if drawn:
            made[name] = draw(drawn)
    return made


def _with_table(cells: Sequence[Measured], kind: str) -> list[Measured]:
    return [one for one in cells if one.kind == kind and len(one.table)]


def sentences(cells: Sequence[Measured], paper: pd.DataFrame) -> list[str]:
    """What the run says; backward, update and whole step together, never one alone."""
    statuses = [one.status for one in cells if one.kind != "cost"]
    others = [f"{statuses.count(s)} {s}" for s in dict.fromkeys(statuses) if s != "ok"]
    said = [f"{statuses.count('ok')} of {len(statuses)} cells were measured" + _listed("; ", others) + "."]
    about = {"update": _update_sentence, "group": _group_sentence, "memory": _memory_sentence}
    for kind, sentence in about.items():
        said += [f"{one.name}: {sentence(one.table, one.record)}." for one in _with_table(cells, kind) if one.record]
    for one in cells:
        said += [f"{one.name}: {warning}." for warning in (noise_findings(one.record) if one.record else ())]
    return said + _paper_sentences(paper)


def _listed(before: str, parts: Sequence[str]) -> str:
    return before + ", ".join(parts) if parts else ""


def _update_sentence(table: pd.DataFrame, record: Record) -> str:
    def speed_ups(row: pd.Series) -> str:
        return (
            f"{row['backward_speed_up']:.2f}x in backward passes, {interval_text(row, 'update_speed_up', 2)} in the "
            f"update, {interval_text(row, 'step_speed_up', 2)} in the step"
        )

    told, rows = [], table[~table["arm"].isin(["exact", "exact-again"])]
    for _, row in rows[rows["arm"] == PAPER].iterrows():
        told.append(f"the paper's scheme is {speed_ups(row)}")
    if len(rows):
        fastest = rows.loc[rows["update_s"].idxmin()]
        told.append(f"the fastest, '{label_of(fastest['arm'], fastest['passes'])}', is {speed_ups(fastest)}")
    parts = [part for part in PARTS if f"{part}_s" in table]
    return "; ".join([*told, f"a step is here {' + '.join([*parts, 'update'])}"])


def _group_sentence(table: pd.DataFrame, record: Record) -> str:
    rows, told = table.set_index("arm"), []
    for arm in [arm for arm in HEADLINE if arm in rows.index]:
        told.append(f"{label_of(arm)} is {interval_text(rows.loc[arm], 'speed_up', 2)} times as fast as exact")
    if "exact-again" in rows.index:
        told.append(f"noise floor {noise_floor(record):.1%}")
    if "exact-bare" in rows.index:
        told.append(f"exact takes {interval_text(rows.loc['exact-bare'], 'speed_up', 3)} times its bare model calls")
    return "; ".join(told) if told else "exact alone was timed"


def _memory_sentence(table: pd.DataFrame, record: Record) -> str:
    rows = table[table["ratio"].notna() & table["arm"].isin(HEADLINE)]
    told = [f"{label_of(row['arm'])} {row['ratio']:.2f}" for _, row in rows.iterrows()]
    return _listed("peak memory over exact's: ", told) or "there is nothing to compare with exact"


def _paper_sentences(paper: pd.DataFrame) -> list[str]:
    said = []
    for (what, algorithm, backbone), rows in paper.groupby(["what", "algorithm", "backbone"], sort=False, dropna=False):
        name = ", ".join(str(part) for part in (what, algorithm, backbone) if not pd.isna(part))
        parts = [f"{rows['published'].iloc[0]:.1%} less published"]
        if not pd.isna(rows["predicted"].iloc[0]):
            parts.append(f"{rows['predicted'].iloc[0]:.1%} predicted for {rows['predicted_for'].iloc[0]}")
        measured = rows[rows["measured"].notna()]
        for _, row in measured.iterrows():
            parts.append(f"{share_text(row)} measured on {row['measured_on']}")
        if not len(measured):
            parts.append("not measured in this run")
        said.append(f"{name}: {'; '.join(parts)}.")
    return said


def without_prediction(paper: pd.DataFrame) -> list[str]:
    """Backbones of published figures for which the folder holds no prediction."""
    return list(dict.fromkeys(paper.loc[paper["predicted"].isna(), "backbone"].dropna()))


def write_bench_report(run: Path, record: Record) -> tuple[Path, dict[str, pd.DataFrame], list[str]]:
    """Tables, figures and ``report.html`` of a run of ``python -m bench run``. Returns page, short tables, findings.

    Cells that failed, were skipped, or whose file is missing or damaged are told, and leave the others alone.
    """
    cells = read_run(run, record)
    paper = beside_the_paper(cells)
    frames, said = all_tables(cells, paper), sentences(cells, paper)
    pictures = write_tables_and_figures(run, frames, make_figures(cells))
    shown = printable(cells, frames)
    page = render(
        "bench.html",
        shown=shown,
        record=record,
        cells=cells,
        broken=[one for one in cells if one.status in BROKEN],
        findings=said,
        pictures=pictures,
        unpredicted=without_prediction(paper),
        published=read_json(PUBLISHED),
    )
    write_atomically(run / "report.html", page.encode())
    return run / "report.html", shown, said
