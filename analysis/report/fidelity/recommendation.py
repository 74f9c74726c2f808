"""``calibration-*.json``: the plans to run on a backbone, from a stored record alone."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pandas as pd

from analysis.measure.knot_search import PLANS
from analysis.measure.rollouts import USUAL
from analysis.measure.signal_gradients import PER_PROMPT
from analysis.report.digits import rounded
from analysis.report.fidelity.tables import per_group, routing, windows_of_paper
from analysis.statistics.intervals import bootstrap
from jagg_core.plans import groups_of
from jagg_core.records import SCHEMA_VERSION, Cell, Record

Frames = Mapping[str, pd.DataFrame]

OURS = ("causal", "causal-predicted")
"""Families that may be recommended: what looks ahead is not."""

OF_A_MOMENT = ("cpu_mhz", "cuda_mhz", "load_average")
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
    frames = {} if frames is None else frames
    signal = _at(frames.get("signal"), eta)
    plans: dict[str, dict[str, Any]] = {}
    for family in PLANS:
        plans[family] = {}
        for passes, found in knots.values[family].items():
            plans[family][passes] = {
                "knots": found["knots"],
                "calibration_cosine": found["cosine"],
                "held_out_cosine": _cosine(cells.get(f"eta={eta:g}/{family}-{passes}")),
                "signal_loss": _loss(signal, f"{family}-{passes}"),
            }
            if family == "causal":
                plans[family][passes]["predicted"] = {
                    "held_out_cosine": _cosine(cells.get(f"eta={eta:g}/causal-predicted-{passes}")),
                    "signal_loss": _loss(signal, f"causal-predicted-{passes}"),
                }
    return {
        "kind": "calibration",
        "schema_version": SCHEMA_VERSION,
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
        cells = groups[(groups["eta"] == eta) & (groups["estimator"] == f"jagg-w{window}-f1")]
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
        row = signal[signal["estimator"] == f"jagg-w{window}-f{routed / count:g}"]
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
        cell = fewest_passes(record, eta, target, OURS)
        text = recommend(record, eta, target)
        if text is not None:
            key = f"cosine >= {target:g}"
            found[key] = {"text": text} | ({} if cell is None else _plan_of(cell))
    signal = _at(frames.get("signal"), eta)
    if len(signal):
        target = record.settings["max_signal_loss"]
        text, estimator = recommend_signal(record, signal)
        cell = None if estimator is None else record.cell(f"eta={eta:g}/signal/per prompt/{estimator}")
        found[f"signal loss <= {target:g}"] = {"text": text} | ({} if cell is None else _plan_of(cell))
    return found


def lines_to_paste(record: Record, eta: float, found: Mapping[str, Any], file: Path) -> list[str]:
    """Every plan of `recommended`, equal ones once: a training command with it, and the same in Python.

    ``file`` is the calibration that holds the plans.
    """
    targets: dict[tuple[int, bool], list[str]] = {}
    for target, plan in found.items():
        if "passes" in plan:
            targets.setdefault((plan["passes"], plan["predict"]), []).append(target)
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
    for (passes, predict), reached in targets.items():
        plan = ["--plan.estimator", "causal", "--plan.passes", str(passes), "--plan.predict", str(predict).lower()]
        command = ["python", "-m", "jagg_core", "train", *shared, *plan, "--plan.calibration", file.as_posix()]
        command += ["--out", f"results/{record.backbone.replace(':', '-')}-training"]
        call = f"Plan.from_calibration({file.as_posix()!r}, passes={passes}, predict={predict}, trajectory=trajectory)"
        lines += [f"# eta {eta:g}, {' and '.join(reached)}", shlex.join(command), call]
    return lines


def fewest_passes(record: Record, eta: float, target: float, families: tuple[str, ...]) -> Cell | None:
    """The judged plan of ``families`` with the fewest passes whose held-out cosine is surely at least ``target``."""
    reached = []
    for cell in record.cells:
        if cell.status == "ok" and cell.settings.get("eta") == eta and "cosine" in cell.samples:
            low = bootstrap(cell.samples["cosine"]).low
            if cell.settings["family"] in families and low is not None and low >= target:
                reached.append(cell)
    return min(reached, key=lambda cell: cell.settings["passes"], default=None)


def recommend(record: Record, eta: float, target: float) -> str | None:
    """The fewest passes whose held-out cosine is surely at least ``target``, in words; None without judged plans."""
    cells = [c for c in record.cells if c.status == "ok" and c.settings.get("eta") == eta]
    if not any("cosine" in c.samples and c.settings["family"] in OURS for c in cells):
        return None
    best = fewest_passes(record, eta, target, OURS)
    if best is None:
        return f"eta {eta:g}: no causal plan that was judged keeps the cosine above {target:g}."
    interval = bootstrap(best.samples["cosine"])
    text = (
        f"eta {eta:g}, cosine surely above {target:g}: run the causal plan with {best.settings['passes']} of "
        f"{len(record.schedule)} passes, {_knots_of(best)}: {interval.value:.4f} "
        f"[{interval.low:.4f}, {interval.high:.4f}]"
    )
    windows = windows_of_paper(record, eta)
    if not windows:
        return text + "."
    paper = fewest_passes(record, eta, target, ("jagg",))
    if paper is None:
        return text + f"; the paper's rule does not reach it, judged at {windows}."
    return (
        text + f"; the paper's rule needs {paper.settings['passes']} ({paper.settings['label']}), judged at {windows}."
    )


def recommend_signal(record: Record, signal: pd.DataFrame) -> tuple[str, str | None]:
    """The fewest passes that surely lose no more signal than allowed, in words, and the estimator's name."""
    settings = record.settings
    eta, target = signal["eta"].iloc[0], settings["max_signal_loss"]
    where = (
        f"eta {eta:g}, at most {target:.0%} of the learning signal lost in an update of {settings['update_samples']} "
    )
    where += f"samples (reward {settings['reward']}): "
    ours = signal[signal["family"].isin(OURS)].sort_values("passes")
    if len(ours) and ours["loss"].isna().all():
        told = int(signal["samples"].iloc[0])
        return f"{where}the signal itself cannot be told from zero with {told} samples; take more of them.", None
    kept = ours[ours["verdict"] == "kept"]
    if not len(kept):
        open_ones = ours[ours["verdict"] == "cannot be told apart"].dropna(subset=["samples_to_tell"])
        if not len(open_ones):
            return f"{where}none of the causal plans that were measured.", None
        row = open_ones.loc[open_ones["samples_to_tell"].idxmin()]
        return (
            f"{where}cannot be told with {row['samples']} samples; about {int(row['samples_to_tell'])} would tell it "
            f"of '{row['label']}' ({_percent(row)}).",
            None,
        )
    row = kept.iloc[0]
    text = f"{where}run '{row['label']}', {row['passes']} of {len(record.schedule)} passes ({_percent(row)})"
    others = signal[(signal["family"] == "jagg") & (signal["verdict"] == "kept")].sort_values("passes")
    if len(others):
        text += f"; the paper's rule needs {others['passes'].iloc[0]} ({others['label'].iloc[0]}), judged at "
        text += windows_of_paper(record, eta, PER_PROMPT)
    rivals = signal[signal["family"].isin(["subsample", "window", "half"]) & (signal["verdict"] == "kept")]
    if len(rivals):
        best = rivals.sort_values("passes").iloc[0]
        text += f"; of the rivals '{best['label']}' surely keeps it with {best['passes']} passes"
    else:
        text += "; none of the rivals that train on some steps only surely keeps it"
    return text + ".", str(row["estimator"])


def _percent(row: pd.Series) -> str:
    return f"loss {row['loss']:.1%} [{row['loss_low']:.1%}, {row['loss_high']:.1%}]"


def _knots_of(cell: Cell) -> str:
    return ("predicted " if cell.settings["family"] == "causal-predicted" else "") + f"knots {cell.settings['knots']}"


def _plan_of(cell: Cell) -> dict[str, Any]:
    predict = cell.settings["family"] == "causal-predicted"
    return {
        "family": "causal",
        "passes": cell.settings["passes"],
        "predict": predict,
        "knots": cell.settings["knots"],
    }


def _cosine(cell: Cell | None) -> dict[str, Any] | None:
    return None if cell is None else asdict(bootstrap(cell.samples["cosine"]))


def _loss(signal: pd.DataFrame, estimator: str) -> dict[str, Any] | None:
    row = signal[signal["estimator"] == estimator] if len(signal) else signal
    if not len(row):
        return None
    one = row.iloc[0]
    return {key: _number(one[name]) for key, name in (("value", "loss"), ("low", "loss_low"), ("high", "loss_high"))}


def _at(frame: pd.DataFrame | None, eta: float) -> pd.DataFrame:
    return pd.DataFrame() if frame is None or not len(frame) else frame[frame["eta"] == eta]


def _number(value: float | None) -> float | None:
    """None for the NaN that pandas keeps for None."""
    return None if value is None or value != value else float(value)
