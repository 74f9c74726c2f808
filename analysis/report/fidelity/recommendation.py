"""``calibration-*.json``: the plans to run on a backbone, from a stored record alone."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pandas as pd

from analysis.report.digits import rounded
from analysis.report.fidelity.direction import decisive, loss_text, pathwise
from analysis.report.fidelity.signal_tables import TOO_FEW
from analysis.report.fidelity.tables import per_group, routing, windows_of_paper
from analysis.statistics.intervals import CLAIM_BATCHES, mean_interval
from analysis.statistics.names import (
    PER_PROMPT,
    SHIFTED,
    USUAL,
    families_of,
    grouped_name,
    recommended_families,
    searched_families,
)
from jagg_core.plans import groups_of
from jagg_core.records import SCHEMA_VERSION, Cell, Record

Frames = Mapping[str, pd.DataFrame]

SUBSETS = ("subsample", "window", "half")
"""Families that train on a subset of the steps."""

INTERVAL_ENDS = {"value": "", "low": "_low", "high": "_high"}

OF_A_MOMENT = ("cpu_mhz", "device_mhz", "cuda_mhz", "load_average")
"""What a record's environment says of the moment it was made in."""


def calibration(record: Record, eta: float, frames: Frames | None = None) -> dict[str, Any]:
    """Plans for every number of passes, per-group cosines of the paper's rule, ``jagg_frac``, and what to run.

    ``frames``: tables of the record that are known already.

    Raises:
        ValueError: the record has no calibrated knots at this ``eta``.
    """
    cells = {c.name: c for c in record.cells if c.status == "ok"}
    knots = cells.get(f"eta={eta:g}/knots")
    if knots is None:
        raise ValueError(f"the record of {record.backbone} has no calibrated knots at eta {eta:g}")
    frames = {"pathwise": pathwise(record), **({} if frames is None else frames)}
    signal, direction = _at(frames.get("signal"), eta), _at(frames.get("pathwise"), eta)
    plans: dict[str, dict[str, Any]] = {}
    for family in searched_families(record, knots.values):
        plans[family] = {}
        borrowing = [f.name for f in families_of(record).values() if f.knots_of == family != f.name]
        for passes, found in knots.values[family].items():
            plans[family][passes] = {
                "knots": found["knots"],
                "calibration_cosine": found["cosine"],
                **_kept(record, eta, signal, direction, family, int(passes)),
            }
            for name in borrowing:
                key = "predicted" if name == SHIFTED else name
                plans[family][passes][key] = _kept(record, eta, signal, direction, name, int(passes))
    return {
        "kind": "calibration",
        "schema_version": SCHEMA_VERSION,
        "quick": record.settings.get("quick", False),
        "backbone": record.backbone,
        "signature": knots.values["signature"],
        "transition": knots.values["transition"],
        "timestep_mode": knots.values["timestep_mode"],
        "schedule": record.schedule,
        "threshold": record.settings["threshold"],
        "windows": rounded(_windows(record, eta, frames)),
        "plans": rounded(plans),
        "recommended": recommended(record, eta, frames),
        "seeds": {k: v for k, v in record.seeds.items() if k.endswith(f"eta={eta:g}")},
        # of the machine as it is, not as it was in a moment
        "environment": {k: v for k, v in record.environment.items() if k not in OF_A_MOMENT},
    }


def _windows(record: Record, eta: float, frames: Frames) -> dict[str, Any]:
    """``jagg_frac`` of the paper's rule and the cosines behind it, by window."""
    groups = frames["per_group"] if "per_group" in frames else per_group(record)
    fractions = _at(frames["routing"] if "routing" in frames else routing(record), eta)
    signal = _at(frames.get("signal"), eta)
    found: dict[str, Any] = {}
    for window, own in fractions.groupby("window") if len(fractions) else ():
        asked = own[own["asked_for"]].iloc[0]
        name = grouped_name(len(record.schedule), "jagg", int(window), 1.0)
        cells = groups[(groups["eta"] == eta) & (groups["estimator"] == name)]
        by_signal = frac_by_signal(record, signal, int(window))
        found[str(window)] = {
            "jagg_frac": asked["jagg_frac"],
            "jagg_frac_ci": [_number(asked["jagg_frac_low"]), _number(asked["jagg_frac_high"])],
            "sensitivity": [
                {"threshold": row["threshold"], "jagg_frac": row["jagg_frac"]} for _, row in own.iterrows()
            ],
            **({} if by_signal is None else {"jagg_frac_by_signal": by_signal["jagg_frac"]}),
            **({} if by_signal is None else {"jagg_frac_by_signal_ci": [by_signal["low"], by_signal["high"]]}),
            "per_group": [
                {
                    "cosine": _number(g["cosine"]),
                    "ci_low": _number(g["cosine_low"]),
                    "ci_high": _number(g["cosine_high"]),
                    "rel_error": _number(g["rel_error"]),
                    "norm_ratio": _number(g["norm_ratio"]),
                }
                for _, g in cells[cells["window"] == window].iterrows()
            ],
        }
    return found


def frac_by_signal(record: Record, signal: pd.DataFrame, window: int) -> dict[str, float] | None:
    """Largest leading share of groups up to which the paper's rule loses no more signal than allowed.

    ``low`` and ``high``: the same with the upper and the lower ends of the losses. None where a loss is undefined.
    """
    if not len(signal):
        return None
    target, count = record.settings["max_signal_loss"], len(groups_of(len(record.schedule), window))
    found = {"jagg_frac": 0.0, "low": 0.0, "high": 0.0}
    going = {"jagg_frac": "loss", "low": "loss_high", "high": "loss_low"}
    for routed in range(1, count + 1):
        row = signal[signal["estimator"] == grouped_name(len(record.schedule), "jagg", window, routed / count)]
        if not len(row) or pd.isna(row["loss"].iloc[0]):
            return None
        for key, column in list(going.items()):
            if row[column].iloc[0] <= target:
                found[key] = routed / count
            else:
                del going[key]
    return found


def recommended(record: Record, eta: float, frames: Frames) -> dict[str, Any]:
    """The plans to run, for a minimum cosine and, where it was measured, for a maximum loss of signal."""
    found: dict[str, Any] = {}
    for target in record.settings.get("min_cosine", 0.97), 0.99:
        cell = fewest_passes(record, eta, target, recommended_families(record))
        text = recommend(record, eta, target)
        if text is not None:
            key = f"cosine >= {target:g}"
            found[key] = {"text": text} | ({} if cell is None else _plan_of(cell))
    signal = _at(frames.get("signal"), eta)
    if len(signal):
        target = record.settings["max_signal_loss"]
        text, estimator = recommend_signal(record, signal, frames.get("pathwise"))
        about = {"eta": eta, "estimator": estimator}
        cells_of = (c for c in record.cells if all(c.settings.get(k) == v for k, v in about.items()))
        cell = next((c for c in cells_of if c.settings.get("centring") == PER_PROMPT or "upstream" in c.settings), None)
        found[f"signal loss <= {target:g}"] = {"text": text} | ({} if cell is None else _plan_of(cell))
    return found


def lines_to_paste(record: Record, eta: float, found: Mapping[str, Any], file: Path) -> list[str]:
    """Every plan of `recommended`, equal ones once: a training command with it, and the same in Python.

    ``file`` is the calibration that holds the plans.
    """
    targets: dict[tuple[str, int, bool], list[str]] = {}
    for target, plan in found.items():
        if "passes" in plan:
            targets.setdefault((plan["family"], plan["passes"], plan["predict"]), []).append(target)
    recipe = record.settings["recipe"]
    shared = ["--preset", record.settings["preset"]] if record.settings.get("preset") else []
    shared += ["--model.backbone", record.backbone, "--reward.name", record.settings["reward"]]
    for name, usual in (("device", "cpu"), ("dtype", "float32")):
        if record.settings.get(name, usual) != usual:
            shared += [f"--model.{name}", record.settings[name]]
    for flag, name in (("--model.options", "backbone_options"), ("--reward.options", "reward_options")):
        if record.settings.get(name):
            shared += [flag, json.dumps(record.settings[name])]
    if recipe["guidance"] is not None:
        shared += ["--model.guidance", f"{recipe['guidance']:g}"]
    shared += ["--rollout.steps", str(recipe["steps"]), "--rollout.eta", f"{eta:g}", "--rollout.trained", "all"]
    shared += ["--rollout.schedule", recipe.get("schedule", "dance"), "--rollout.shift", f"{recipe['shift']:g}"]
    for name, usual in USUAL.items():
        if record.settings.get("preset") or recipe.get(name, usual) != usual:
            shared += [f"--rollout.{name}", recipe.get(name, usual)]
    lines = []
    for (family, passes, predict), reached in targets.items():
        estimator = families_of(record)[family].source or family
        plan = ["--plan.estimator", estimator, "--plan.passes", str(passes)]
        options = f"family={estimator!r}, "
        if family == "causal":
            plan += ["--plan.predict", str(predict).lower()]
            options = f"predict={predict}, "
        command = ["python", "-m", "jagg_core", "train", *shared, *plan, "--plan.calibration", file.as_posix()]
        command += ["--out", f"results/{record.backbone.replace(':', '-')}-training"]
        call = f"Plan.from_calibration({file.as_posix()!r}, passes={passes}, {options}trajectory=trajectory)"
        lines += [f"# eta {eta:g}, {' and '.join(reached)}", shlex.join(command), call]
    return lines


def fewest_passes(record: Record, eta: float, target: float, families: tuple[str, ...]) -> Cell | None:
    """The plan of ``families`` with the fewest passes whose mean cosine is at least ``target`` by its lower bound.

    Each family is a sequence of tests from many passes to few that ends at the first one that fails, so that looking at
    many plans needs no correction; plans with equally many passes share the error of one test. A test is one-sided at
    2.5 %: two families together err in at most 5 %. With fewer than 8 batches nothing is claimed.
    """
    reached = []
    for family in families:
        last = None
        for cells in _by_passes(record, eta, family):
            best = max(cells, key=lambda cell: (_bound(cell, len(cells)), _mean(cell)))
            if _bound(best, len(cells)) < target:
                break
            last = best
        if last is not None:
            reached.append(last)
    return min(reached, key=lambda cell: (cell.settings["passes"], -_mean(cell)), default=None)


def _by_passes(record: Record, eta: float, family: str) -> list[list[Cell]]:
    """Judged plans of a family, those with equally many passes together, many passes first."""
    found: dict[int, list[Cell]] = {}
    for cell in record.cells:
        told = cell.settings.get("eta") == eta and cell.settings.get("family") == family
        if cell.status == "ok" and told and "cosine" in cell.samples:
            found.setdefault(cell.settings["passes"], []).append(cell)
    return [found[passes] for passes in sorted(found, reverse=True)]


def _bound(cell: Cell, plans: int) -> float:
    """Lower bound of a plan's mean cosine, tested together with as many plans; minus infinity from too few batches."""
    interval = mean_interval(cell.samples["cosine"], "cosine", 0.05 / plans)
    return -math.inf if interval.low is None or interval.n < CLAIM_BATCHES else interval.low


def _mean(cell: Cell) -> float:
    return mean_interval(cell.samples["cosine"]).value or 0.0


def _bound_text(record: Record, eta: float, cell: Cell) -> str:
    """``95 % lower bound 0.9917, n = 8``, as it was tested."""
    together = next(cells for cells in _by_passes(record, eta, cell.settings["family"]) if cell in cells)
    n = mean_interval(cell.samples["cosine"]).n
    return f"95 % lower bound {_bound(cell, len(together)):.4f}, n = {n}"


def recommend(record: Record, eta: float, target: float) -> str | None:
    """The plan with the fewest passes that reaches a mean cosine, in words; None without judged plans."""
    ours = recommended_families(record)
    judged = [cell for family in ours for cells in _by_passes(record, eta, family) for cell in cells]
    if not judged:
        return None
    where = f"eta {eta:g}, cosine of at least {target:g}: "
    most = max(mean_interval(cell.samples["cosine"]).n for cell in judged)
    if most < CLAIM_BATCHES:
        return f"{where}no claim, n = {most} batches; at least {CLAIM_BATCHES} are needed."
    best = fewest_passes(record, eta, target, ours)
    if best is None:
        kinds = _called([cell.settings["family"] for cell in judged])
        return f"{where}no {kinds} plan that was judged reaches it (n = {most} batches)."
    text = (
        f"{where}run the {_called([best.settings['family']])} plan with {best.settings['passes']} of "
        f"{len(record.schedule)} passes, {_knots_of(best)}: {_mean(best):.4f}, {_bound_text(record, eta, best)}"
    )
    windows = windows_of_paper(record, eta)
    if not windows:
        return text + "."
    paper = fewest_passes(record, eta, target, ("jagg",))
    if paper is None:
        return text + f"; the paper's rule does not reach it, judged at {windows}."
    return (
        text + f"; the paper's rule needs {paper.settings['passes']} ({paper.settings['label']}: "
        f"{_bound_text(record, eta, paper)}), judged at {windows}."
    )


def fewest_kept(signal: pd.DataFrame, families: tuple[str, ...]) -> pd.Series | None:
    """The row with the fewest passes that keeps the signal, each family tested from many passes to few."""
    reached = []
    for family in families:
        for _, rows in sorted(
            signal[signal["family"] == family].groupby("passes"), reverse=True, key=lambda one: one[0]
        ):
            kept = rows[rows["verdict"] == "kept"]
            if not len(kept):
                break
            reached.append(kept.sort_values("loss").iloc[0])
    return min(reached, key=lambda row: (row["passes"], row["loss"]), default=None)


def recommend_signal(
    record: Record, signal: pd.DataFrame, direction: pd.DataFrame | None = None
) -> tuple[str, str | None]:
    """The fewest passes that lose no more signal than allowed, in words, and the estimator's name.

    ``direction``: losses by pathwise gradients, which decide on the plans that they are known of.
    """
    settings = record.settings
    eta, target = signal["eta"].iloc[0], settings["max_signal_loss"]
    where = (
        f"eta {eta:g}, at most {target:.0%} of the learning signal lost in an update of {settings['update_samples']} "
    )
    where += f"samples (reward {settings['reward']}): "
    candidates, decided = recommended_families(record), decisive(signal, direction)
    ours = decided[decided["family"].isin(candidates)].sort_values("passes")
    if len(ours) and ours["loss"].isna().all():
        told = int(signal["samples"].iloc[0])
        return f"{where}the signal itself cannot be told from zero with {told} samples; take more of them.", None
    row = fewest_kept(decided, candidates)
    if row is None and len(ours) and (ours["verdict"] == TOO_FEW).any():
        return f"{where}no claim, n = {int(ours['n'].max())} batches; at least {CLAIM_BATCHES} are needed.", None
    if row is None:
        open_ones = ours[ours["verdict"] == "cannot be told apart"].dropna(subset=["samples_to_tell"])
        if not len(open_ones):
            return f"{where}none of the {_called(ours['family'].tolist())} plans that were measured.", None
        row = open_ones.loc[open_ones["samples_to_tell"].idxmin()]
        return (
            f"{where}cannot be told with {row['samples']} samples; about {int(row['samples_to_tell'])} would tell it "
            f"of '{row['label']}' ({_percent(row)}).",
            None,
        )
    text = f"{where}run '{row['label']}', {row['passes']} of {len(record.schedule)} passes ({_percent(row)})"
    paper = fewest_kept(signal, ("jagg",))
    if paper is not None:
        text += f"; the paper's rule needs {paper['passes']} ({paper['label']}: {_percent(paper)}), judged at "
        text += windows_of_paper(record, eta, PER_PROMPT)
    rival = fewest_kept(signal, SUBSETS)
    if rival is not None:
        text += f"; of the rivals '{rival['label']}' keeps it with {rival['passes']} passes ({_percent(rival)})"
    else:
        text += "; no method that trains on a subset of the steps is shown to keep it"
    return text + ".", str(row["estimator"])


def _percent(row: pd.Series) -> str:
    if isinstance(row.get("upstream"), str):
        return loss_text(row)
    return f"loss {row['loss']:.1%} [{row['loss_low']:.1%}, {row['loss_high']:.1%}], n = {int(row['n'])}"


def _called(families: Sequence[str]) -> str:
    """Names the families of some plans: ``causal``, or ``causal or nearest``; shifted knots are causal plans too."""
    return " or ".join(dict.fromkeys("causal" if name == SHIFTED else name for name in families)) or "causal"


def _knots_of(cell: Cell) -> str:
    return ("predicted " if cell.settings["family"] == SHIFTED else "") + f"knots {cell.settings['knots']}"


def _plan_of(cell: Cell) -> dict[str, Any]:
    """Describes a plan as `jagg_core.Plan.from_calibration` takes it; shifted knots are ``predict`` of causal."""
    shifted = cell.settings["family"] == SHIFTED
    return {
        "family": "causal" if shifted else cell.settings["family"],
        "passes": cell.settings["passes"],
        "predict": shifted,
        "knots": cell.settings["knots"],
    }


def _kept(
    record: Record, eta: float, signal: pd.DataFrame, direction: pd.DataFrame, family: str, passes: int
) -> dict[str, Any]:
    """Collects what a plan keeps: cosine on held-out rollouts, loss of signal (None where not measured), direction."""
    judged = [cells for cells in _by_passes(record, eta, family) if cells[0].settings["passes"] == passes]
    cosine = asdict(mean_interval(judged[0][0].samples["cosine"], "cosine")) if judged else None
    lost = _interval_of(direction, "lost", family, passes)
    kept = {"held_out_cosine": cosine, "signal_loss": _interval_of(signal, "loss", family, passes)}
    return kept if lost is None else {**kept, "direction_lost": lost}


def _interval_of(frame: pd.DataFrame, column: str, family: str, passes: int) -> dict[str, Any] | None:
    """Returns value and ends of a plan's interval in a table; None where the table has no such plan."""
    rows = frame[(frame["family"] == family) & (frame["passes"] == passes)] if len(frame) else frame
    return {key: _number(rows.iloc[0][f"{column}{end}"]) for key, end in INTERVAL_ENDS.items()} if len(rows) else None


def _at(frame: pd.DataFrame | None, eta: float) -> pd.DataFrame:
    return pd.DataFrame() if frame is None or not len(frame) else frame[frame["eta"] == eta]


def _number(value: float | None) -> float | None:
    """None for the NaN that pandas keeps for None."""
    return None if value is None or value != value else float(value)
