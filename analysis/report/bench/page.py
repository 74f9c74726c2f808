"""The page of a bench run: what JAGG costs and gains on a machine, beside the paper's figures and the cost model's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pandas as pd
from markupsafe import Markup, escape
from matplotlib.figure import Figure

from analysis.report.bench.figures import speed_up_intervals, step_bars
from analysis.report.bench.paper import beside_the_paper, saved
from analysis.report.bench.printable import printable, share_text
from analysis.report.bench.run import BROKEN, Measured, read_run
from analysis.report.blocks import Block, Frames, all_figures, answers_table, draw_blocks, written
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


METHOD = Block(
    "How it was measured",
    before=(
        "Measured by <code>python -m bench run</code>, every cell in a process of its own; every gradient was checked "
        "against a plain loop before it was timed. Times say nothing of how good a gradient is: <code>python -m "
        "analysis reproduce</code> and <code>calibrate</code> do. Intervals are 95 % percentile bootstrap intervals "
        "over interleaved rounds; speed-ups are ratios of medians to exact in the same rounds."
    ),
    opened=True,
)

STATUS = Block(
    "Status of every cell",
    "cells",
    body="broken_cells.html",
    note=(
        "Failed: it was tried, and its error is given; what other arms of it measured is shown all the same. Skipped: "
        "it cannot be measured here, or the run ended before it. Missing, damaged: the record of the cell is."
    ),
)

COMPARED = Block(
    "Published, predicted and measured",
    "beside_the_paper",
    note=(
        "Shares of time saved over exact. <b>The measured column is of another backbone and another machine than the "
        "published one:</b> it is the paper's scheme with the settings of this run that are nearest to W = 4, "
        "jagg_frac 0.6; for the backward of a group, the backward phase of its joint backward. {{ published.inferred "
        "}} A training step of the paper has its rewards and its optimizer, and larger models spend other shares of a "
        "step in them.{% if unpredicted %} No prediction for {{ unpredicted | join(', ') }} lies in this folder. {% "
        "for backbone in unpredicted %}<code>python -m bench cost --backbone {{ backbone }} --backbone-options "
        "height=720 width=720 --out FOLDER/cost-{{ backbone }}</code>{{ ', ' if not loop.last }}{% endfor %} makes "
        "it, where FOLDER is this folder; then build this page again.{% endif %}"
    ),
    opened=True,
)

KINDS = {
    "update": Block(
        "Whole updates and training steps",
        draw=lambda record, frames: {},
        note="A step is the update with what its table lists around it; no way of making the update changes that.",
    ),
    "group": Block(
        "Time of one group",
        draw=lambda record, frames: {},
        note=(
            "Medians. Exact timed again is the noise floor: what lies inside its interval is no difference. Exact "
            "over its bare model calls is what the engine adds. The model takes one forward and one backward from "
            "exact, and its error says how far it is off for the others."
        ),
    ),
    "memory": Block("Peak memory of one group", note="Beyond the loaded model, its rollout and its gradients."),
    "collectives": Block(
        "Collectives of one group",
        note=(
            "Counted per sharded unit: under FSDP2 a transformer block, or what is left of the transformer. Seconds "
            "are of the slowest rank, those of each kind of collective from rounds of their own without overlap."
        ),
    ),
}
"""By kind of cell: what stands before its tables."""


def blocks_of(cells: Sequence[Measured]) -> list[Block]:
    """Lists the blocks of the page: for every kind its figure and remarks, then every cell with its table."""
    blocks = [COMPARED]
    for kind, head in KINDS.items():
        of_kind = [one for one in cells if one.kind == kind]
        if not of_kind:
            continue

        def draw(record: Record, frames: Frames, kind: str = kind) -> dict[str, Figure]:
            return make_figures([one for one in cells if one.kind == kind])

        blocks.append(replace(head, draw=draw if head.draw else None, opened=True))
        for one in of_kind:
            remarks = [*one.findings, *(f"{arm.name}: {arm.status}: {arm.reason}" for arm in one.not_ok)]
            if not len(one.table):
                why = ", without times of exact" if one.status == "ok" else ""
                remarks.insert(0, f"No table: {one.status}{why}.")
            text = Markup("<br>").join(map(escape, remarks)).replace("{", "&#123;")
            table = one.name if len(one.table) else ""
            blocks.append(Block(one.name, table, note=str(text), csv=FRAMES[kind], opened=bool(table)))
    return [*blocks, STATUS, METHOD]


EVIDENCE = ("Whole updates and training steps", "How it was measured", "Whole updates and training steps")


def answers(cells: Sequence[Measured]) -> list[str]:
    """Says which arm was the fastest in a whole update, that its gradient was checked, and what it saves."""
    for one in _with_table(cells, "update"):
        rows = one.table[~one.table["arm"].isin(["exact", "exact-again"])].dropna(subset="update_s")
        if len(rows):
            row = rows.loc[rows["update_s"].idxmin()]
            saves = [
                f"{share:.1%} of the {what}"
                for what, column in (
                    ("backward passes", "backward_speed_up"),
                    ("update's time", "update_speed_up"),
                    ("training step's", "step_speed_up"),
                )
                if (share := saved(row[column])) is not None
            ]
            return [
                f"In {one.name} '{label_of(row['arm'], row['passes'])}' is the fastest of {len(rows) + 1} arms.",
                "Its gradient was checked against a plain loop; whether it keeps exact's signal this run does not say.",
                f"It saves {', '.join(saves)}." if saves else "",
            ]
    return ["No whole update was timed: this run names no plan.", "", ""]


def write_bench_report(run: Path, record: Record) -> tuple[Path, dict[str, pd.DataFrame], list[str]]:
    """Writes tables, figures and ``report.html`` of a run of ``python -m bench run``.

    Cells that failed, were skipped, or whose file is missing or damaged are listed, and leave the others alone.

    Returns:
        Page, short tables, findings.
    """
    cells = read_run(run, record)
    paper = beside_the_paper(cells)
    top = answers(cells)
    frames = all_tables(cells, paper) | {"conclusions": answers_table(top, EVIDENCE)}
    blocks, findings = blocks_of(cells), sentences(cells, paper)
    drawn = draw_blocks(blocks, record, frames)
    pictures = write_tables_and_figures(run, frames, all_figures(drawn))
    shown = printable(cells, frames) | {"conclusions": frames["conclusions"]}
    page = render(
        title=f"What JAGG costs and gains on this machine: preset {record.backbone}",
        top=[line for line in top if line],
        shown=shown,
        blocks=blocks,
        drawn=drawn,
        pictures=pictures,
        files=written(frames),
        record=record,
        findings=findings,
        broken=[one for one in cells if one.status in BROKEN],
        unpredicted=without_prediction(paper),
        published=read_json(PUBLISHED),
    )
    write_atomically(run / "report.html", page.encode())
    return run / "report.html", shown, findings
