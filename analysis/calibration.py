"""``calibration-*.json``: the plans to run on a backbone, from a stored record alone."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from analysis.knots import PLANS
from analysis.statistics import Interval, bootstrap
from analysis.tables import per_group, routing
from jagg_core.records import SCHEMA_VERSION, Cell, Record


def calibration(record: Record, eta: float) -> dict[str, Any]:
    """Plans for every number of passes, per-group cosines of the paper's rule, and ``jagg_frac``, at one noise level.

    Raises:
        ValueError: the record has no calibrated knots at this ``eta``.
    """
    cells = {c.name: c for c in record.cells if c.status == "ok"}
    knots = cells.get(f"eta={eta:g}/knots")
    if knots is None:
        raise ValueError(f"the record of {record.backbone} has no calibrated knots at eta {eta:g}")
    plans: dict[str, dict[str, Any]] = {}
    for family in PLANS:
        plans[family] = {}
        for passes, found in knots.values[family].items():
            judged = cells.get(f"eta={eta:g}/{family}-{passes}")
            held_out = asdict(bootstrap(judged.samples["cosine"])) if judged is not None else None
            plans[family][passes] = {
                "knots": found["knots"],
                "calibration_cosine": found["cosine"],
                "held_out_cosine": held_out,
            }
    groups, fractions = per_group(record), routing(record)
    by_window: dict[str, Any] = {}
    for _, row in fractions[fractions["eta"] == eta].iterrows() if len(fractions) else ():
        window = int(row["window"])
        own = groups[(groups["eta"] == eta) & (groups["estimator"] == f"jagg-w{window}-f1")]
        own = own[own["window"] == window]
        by_window[str(window)] = {
            "jagg_frac": row["jagg_frac"],
            "jagg_frac_ci": [_number(row["jagg_frac_low"]), _number(row["jagg_frac_high"])],
            "per_group": [
                {
                    "cosine": _number(g["cosine"]),
                    "ci_low": _number(g["cosine_low"]),
                    "ci_high": _number(g["cosine_high"]),
                    "rel_error": _number(g["rel_error"]),
                    "norm_ratio": _number(g["norm_ratio"]),
                }
                for _, g in own.iterrows()
            ],
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
        "windows": by_window,
        "plans": plans,
        "seeds": {k: v for k, v in record.seeds.items() if k.endswith(f"eta={eta:g}")},
        "environment": record.environment,
    }


def recommend(record: Record, eta: float, target: float) -> str | None:
    """The fewest passes whose held-out cosine is surely at least ``target``, in words; None without judged plans."""
    cells = [c for c in record.cells if c.status == "ok" and c.settings.get("eta") == eta]
    found = [c for c in cells if "cosine" in c.samples]
    steps = len(record.schedule)
    best: dict[str, tuple[Cell, Interval] | None] = {}
    for family in ("causal", "jagg"):
        reached = []
        for cell in found:
            interval = bootstrap(cell.samples["cosine"])
            if cell.settings["family"] == family and interval.low is not None and interval.low >= target:
                reached.append((cell, interval))
        best[family] = min(reached, key=lambda pair: pair[0].settings["passes"], default=None)
    if not any(cell.settings["family"] == "causal" for cell in found):
        return None
    if best["causal"] is None:
        return f"eta {eta:g}: no causal plan that was judged keeps the cosine above {target:g}."
    cell, interval = best["causal"]
    text = (
        f"eta {eta:g}, cosine surely above {target:g}: run the causal plan with {cell.settings['passes']} of {steps} "
    )
    text += f"passes, knots {cell.settings['knots']}: {interval.value:.4f} [{interval.low:.4f}, {interval.high:.4f}]"
    if best["jagg"] is None:
        return text + "; the paper's rule does not reach it with any window and fraction that was judged."
    paper = best["jagg"][0]
    return text + f"; the paper's rule needs {paper.settings['passes']} ({paper.settings['label']})."


def _number(value: float | None) -> float | None:
    """None for the NaN that pandas keeps for None."""
    return None if value is None or value != value else float(value)
