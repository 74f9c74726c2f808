"""Predicted costs as tables, a figure and a page, beside what the paper published."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd

from analysis.report import figures
from analysis.report.blocks import Block, all_figures, answers_table, draw_blocks, drawn_from, written
from analysis.report.page import render, write_tables_and_figures
from bench.arms import CLOSED_FORM, PAPER, name_of
from bench.cost import Machine, Update
from bench.matched import fitting, matched
from bench.work import PassWork
from jagg_core.files import write_atomically
from jagg_core.records import Cell, Record
from jagg_core.strict_json import RecordError, read_json

PUBLISHED = Path(__file__).resolve().parents[2] / "results" / "paper" / "published.json"
"""Figures of the paper, with their source."""

STAGES = {"training step": "step", "update stage": "update"}
"""What the paper's figures are of, by the names of `PARTS`."""

PARTS = ("group", "update", "step")
"""What is predicted, from the smallest to what a user waits for."""

SHARES = {"matched": ("with_checkpointing", "without", "several_steps"), "fitting": ("other", "step", "update_stage")}
"""Columns of shares, by table."""

TOLERATED = 0.03
"""Largest difference to a published reduction that needs no explanation."""


def costs(record: Record) -> pd.DataFrame:
    """Predicted seconds and speed-ups, one row per arm and number of devices.

    Raises:
        RecordError: no predictions in it.
    """
    rows = [_row(cell) for cell in record.cells if cell.status == "ok" and "ranks" in cell.settings]
    frame = pd.DataFrame(rows)
    if not len(frame):
        raise RecordError(f"the record of {record.backbone} has no predictions")
    exact = frame[frame["arm"] == "exact"].set_index("ranks")
    for part in PARTS:
        frame[f"{part}_speed_up"] = frame["ranks"].map(exact[f"{part}_s"]) / frame[f"{part}_s"]
    exact_backwards = frame["ranks"].map(exact["backwards"])
    frame["backward_speed_up"] = exact_backwards / frame["backwards"]
    return frame


def _row(cell: Cell) -> dict[str, Any]:
    """One prediction. Records of former versions call the arm a scheme."""
    settings = dict(cell.settings)
    name = settings.pop("scheme", settings.get("arm"))
    calibrated = settings.pop("calibrated", name.startswith("causal-"))
    return {"arm": name_of(name), "label": settings.pop("label"), "calibrated": calibrated} | settings | cell.values


def beside_the_paper(record: Record, table: pd.DataFrame) -> pd.DataFrame:
    """Published reductions of time beside predicted ones, on the smallest number of devices of the record.

    A figure of one backbone stands beside predictions for this backbone only. The second prediction leaves the
    forwards of the steps inside a group out, as closed-form upstream gradients allow.
    """
    fewest = table[table["ranks"] == table["ranks"].min()].set_index("arm")
    rows = []
    for figure in read_json(PUBLISHED)["figures"]:
        part = STAGES.get(figure["what"])
        if part is None or figure["backbone"] not in (None, record.backbone):
            continue
        predicted = {name: 1 - 1 / fewest.loc[name, f"{part}_speed_up"] for name in (PAPER, CLOSED_FORM)}
        rows.append(
            {
                "what": figure["what"],
                "algorithm": figure["algorithm"],
                "published": figure["reduction"],
                "predicted": predicted[PAPER],
                "predicted_without_inner_forwards": predicted[CLOSED_FORM],
            }
        )
    return pd.DataFrame(rows)


def fits(record: Record) -> pd.DataFrame:
    """The model against measured groups, one row per arm."""
    rows = []
    for cell in record.cells:
        if cell.name.startswith("measured-") and cell.status == "ok":
            about = {key: cell.values[key] for key in ("backbone", "window", "batch")}
            rows += [about | {"arm": arm} | found for arm, found in cell.values["arms"].items()]
    return pd.DataFrame(rows)


def matched_tables(record: Record) -> dict[str, pd.DataFrame]:
    """Savings of a step under matched settings, and every setting that fits the published savings of a step."""
    work = PassWork(**record.cell("work").values)
    update = Update(**record.settings["update"] | {"passes": tuple(record.settings["update"]["passes"])})
    machine = Machine(**record.settings["machine"])
    steps = [found["reduction"] for found in read_json(PUBLISHED)["figures"] if found["what"] == "training step"]
    return {
        "matched": pd.DataFrame(matched(work, update, machine)),
        "fitting": pd.DataFrame(fitting(work, steps, machine)),
    }


def noise(record: Record) -> list[str]:
    """Returns the noise warnings of the measured groups that the model was held against."""
    cells = [cell for cell in record.cells if cell.name.startswith("measured-") and cell.status == "ok"]
    return [f"{c.values['backbone']}: {warning}." for c in cells for warning in c.values.get("findings", [])]


def sentences(record: Record, table: pd.DataFrame, paper: pd.DataFrame) -> list[str]:
    """What the predictions say; backward, update and whole step together, never one alone."""
    said = []
    settings, machine = record.settings["update"], record.settings["machine"]
    for ranks, part in table.groupby("ranks", sort=False):
        row = part[part["arm"] == PAPER].iloc[0]
        causal = part["calibrated"]
        best = part.loc[part[~causal]["step_s"].idxmin()]
        said.append(
            f"{ranks} devices: the paper's scheme is {row['backward_speed_up']:.2f}x in backward passes, "
            f"{row['update_speed_up']:.2f}x in the update, {row['step_speed_up']:.2f}x in the whole step; "
            f"'{best['label']}' is {best['update_speed_up']:.2f}x and {best['step_speed_up']:.2f}x"
            + "".join(
                f"; '{plan['label']}' is {plan['update_speed_up']:.2f}x and {plan['step_speed_up']:.2f}x"
                for _, plan in part[causal].iterrows()
            )
            + "."
        )
    for _, row in paper.iterrows():
        gap = row["predicted"] - row["published"]
        text = (
            f"{row['what']}, {row['algorithm']}: {row['published']:.1%} less time published, {row['predicted']:.1%} "
            f"predicted from W = {settings['window']}, jagg_frac {settings['jagg_frac']:g}, {settings['steps']} steps, "
            f"{'with' if machine['checkpointing'] else 'without'} checkpointing"
        )
        if abs(gap) > TOLERATED:
            other = row["predicted_without_inner_forwards"]
            text += (
                f"; these differ by {abs(gap) * 100:.1f} points. Without the forwards of inner steps {other:.1%} are "
                "predicted: in doubt is whether the published stage counts them, or the window."
            )
        said.append(text if text.endswith(".") else text + ".")
    return said + noise(record)


def printable(frames: dict[str, pd.DataFrame]) -> dict[str, pd.DataFrame]:
    """Short tables for people; the CSV files hold every column."""
    table, paper, fitted = (frames[name] for name in ("costs", "beside_the_paper", "fits"))
    shown = {
        "costs": pd.DataFrame(
            {
                "devices": table["ranks"],
                "arm": table["label"],
                **{f"{part}, s": table[f"{part}_s"].map("{:.3g}".format) for part in PARTS},
                "backward passes": table["backward_speed_up"].map("{:.2f}x".format),
                **{f"{part} speed-up": table[f"{part}_speed_up"].map("{:.2f}x".format) for part in PARTS},
                "all-gathers": table["gathers"].map("{:g}".format),
                "reduce-scatters": table["scatters"].map("{:g}".format),
            }
        )
    }
    if len(paper):
        shares = ("published", "predicted", "predicted_without_inner_forwards")
        shown["beside_the_paper"] = paper.assign(**{name: paper[name].map("{:.1%}".format) for name in shares}).rename(
            columns={"predicted_without_inner_forwards": "predicted, without inner forwards"}
        )
    for name, columns in SHARES.items():
        if len(frames.get(name, ())):
            shown[name] = frames[name].assign(**{c: frames[name][c].map("{:.1%}".format) for c in columns})
            shown[name].columns = [column.replace("_", " ") for column in shown[name]]
    if len(fitted):
        times = {name: fitted[name].map("{:.4g}".format) for name in ("predicted_s", "measured_s")}
        shown["fits"] = fitted.assign(**times, error=fitted["error"].map("{:+.1%}".format))
    return shown


def answers(table: pd.DataFrame) -> list[str]:
    """Says which arm is predicted to be the fastest on the smallest number of devices, and what it saves."""
    part = table[table["ranks"] == table["ranks"].min()]
    row = part.loc[part["step_s"].idxmin()]
    devices = f"{row['ranks']} device" + ("s" if row["ranks"] > 1 else "")
    return [
        f"On {devices} '{row['label']}' is predicted to be the fastest.",
        "What it keeps is not predicted: python -m analysis calibrate measures it on this backbone.",
        f"It saves {1 - 1 / row['backward_speed_up']:.1%} of the backward passes, "
        f"{1 - 1 / row['update_speed_up']:.1%} of the update's time and {1 - 1 / row['step_speed_up']:.1%} of the "
        "training step's.",
    ]


BLOCKS = (
    Block(
        "By arm and number of devices",
        "costs",
        drawn_from("costs", "cost", lambda record, table: figures.cost_by_devices(table)),
        note="All-gathers and reduce-scatters: of all sharded parameters, in one update.",
        opened=True,
    ),
    Block(
        "Published and predicted",
        "beside_the_paper",
        note="Shares of time saved, on the smallest number of devices. arXiv 2607.17572.",
        opened=True,
    ),
    Block(
        "Share of a step saved, under matched settings",
        "matched",
        note=(
            "One device. Set a measurement against the column of its settings: with activation checkpointing, or "
            "without. Several steps: three optimizer steps per rollout, as DanceGRPO's public script makes them, with "
            "checkpointing. Two thirds of the samples are then off policy, and closed forms need a forward of every "
            "step for them."
        ),
    ),
    Block(
        "Settings that fit the published savings of a step",
        "fitting",
        note=(
            "The paper's scheme; other: time of a step outside rollout and update, as a share of those. The recipe of "
            "this page is one of several that fit, so it is not identified by the published figures."
        ),
    ),
    Block(
        "Predicted and measured groups",
        "fits",
        note=(
            "One forward and one backward are taken from the exact arm; the error says how far the model is off for "
            "the others."
        ),
    ),
    Block("Assumptions", body="assumptions.html", opened=True),
)
"""Of the page of predicted costs."""

EVIDENCE = ("By arm and number of devices", "Assumptions", "By arm and number of devices")


def write_cost_report(run: Path, record: Record) -> tuple[Path, dict[str, pd.DataFrame], list[str]]:
    """Writes tables, figure and ``report.html`` of a record of ``python -m bench cost``.

    Returns:
        Page, short tables, findings.

    Raises:
        RecordError: no predictions in it.
    """
    table = costs(record)
    frames = {"costs": table, "beside_the_paper": beside_the_paper(record, table), "fits": fits(record)}
    frames |= matched_tables(record)
    top = answers(table)
    frames["conclusions"] = answers_table(top, EVIDENCE)
    drawn = draw_blocks(BLOCKS, record, frames)
    pictures = write_tables_and_figures(run, frames, all_figures(drawn))
    shown = printable(frames) | {"conclusions": frames["conclusions"]}
    findings = sentences(record, table, frames["beside_the_paper"])
    page = render(
        title=f"What every arm would cost on {record.backbone}",
        top=top,
        shown=shown,
        blocks=BLOCKS,
        drawn=drawn,
        pictures=pictures,
        files=written(frames),
        record=record,
        findings=findings,
    )
    write_atomically(run / "report.html", page.encode())
    return run / "report.html", shown, findings
