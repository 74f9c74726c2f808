"""Short tables for people; the CSV files hold every column."""

from __future__ import annotations

from typing import Any

import pandas as pd

from analysis.report import figures
from analysis.statistics.names import CENTRINGS, COMPARED_PASSES, COMPARED_WINDOWS
from analysis.statistics.parameter_kinds import ordered_blocks


def interval_text(row: Any, name: str, digits: int = 3) -> str:
    """``0.991 [0.988, 0.993]``; ``undefined`` where there is no value."""
    value, low, high = (row[key] for key in (name, f"{name}_low", f"{name}_high"))
    if pd.isna(value):
        return "undefined"
    text = f"{value:.{digits}f}"
    return text if pd.isna(low) else f"{text} [{low:.{digits}f}, {high:.{digits}f}]"


def with_n(row: Any, name: str, digits: int = 3) -> str:
    """``0.991 [0.988, 0.993], n = 8``."""
    text = interval_text(row, name, digits)
    return text if pd.isna(row[name]) else f"{text}, n = {int(row['n'])}"


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
                "n": whole["n"],
                "cosine": [interval_text(r, "cosine", 4) for _, r in whole.iterrows()],
                "relative error": [interval_text(r, "rel_error") for _, r in whole.iterrows()],
                "norm ratio": [interval_text(r, "norm_ratio") for _, r in whole.iterrows()],
            }
        )
    groups = frames["per_group"]
    if len(groups):
        shared = groups.groupby(["eta", "window", "estimator"])["n"]
        groups = groups.assign(text=[interval_text(r, "cosine") for _, r in groups.iterrows()])
        groups = groups.assign(n=_spans(shared.transform("min"), shared.transform("max")))
        wide = groups.pivot_table(
            index=["eta", "window", "passes", "label", "n"], columns="group", values="text", aggfunc="first", sort=False
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
                "asked for": routing["asked_for"].map({True: "yes", False: ""}),
                "jagg_frac": [interval_text(r, "jagg_frac", 2) for _, r in routing.iterrows()],
                "n": routing["n"],
            }
        )
    blocks = frames["blocks"]
    if len(blocks):
        shared = blocks.groupby(["eta", "estimator"])["n"]
        wide = blocks.assign(text=[interval_text(r, "cosine", 4) for _, r in blocks.iterrows()])
        wide = wide.assign(n=_spans(shared.transform("min"), shared.transform("max")))
        wide = wide.pivot_table(index=["eta", "passes", "label", "n"], columns="block", values="text", aggfunc="first")
        wide = wide[ordered_blocks(list(wide.columns))].reset_index().rename(columns={"label": "estimator"})
        shown["blocks"] = wide.sort_values(["eta", "passes"], ascending=False)
    floor = frames["floor"]
    if len(floor):
        shown["floor"] = pd.DataFrame(
            {
                "eta": floor["eta"].map("{:g}".format),
                "the exact gradient computed": floor["computed"].map({"again": "again", "halves": "in half batches"}),
                "1 - cosine": floor["distance"].map("{:.1e}".format),
                "relative error": floor["rel_error"].map("{:.1e}".format),
            }
        )
    shown |= _printable_signal(frames)
    leak = frames["leak"]
    if len(leak):
        shown["leak"] = pd.DataFrame(
            {
                "estimator": leak["label"],
                "passes": leak["passes"],
                "looks ahead": leak["anticipating"].map({True: "yes", False: "no"}),
                "|mu|^2 / V": [interval_text(r, "share") for _, r in leak.iterrows()],
                "p value": leak["p_text"],
                "n": leak["n"],
            }
        )
    compared = frames["side_by_side"]
    if len(compared):
        columns: dict[str, Any] = {"backbone": compared["backbone"], "eta": compared["eta"].map("{:g}".format)}
        for window in COMPARED_WINDOWS:
            name = f"jagg_frac_w{window}"
            columns[f"jagg_frac, W = {window}"] = [interval_text(r, name, 2) for _, r in compared.iterrows()]
        for passes in COMPARED_PASSES:
            name = f"causal_{passes}"
            columns[f"cosine of causal, {passes} passes"] = [interval_text(r, name) for _, r in compared.iterrows()]
        if "n" in compared:
            columns["n"] = compared["n"].map(_whole)
        columns |= {name: compared[name].map(_whole) for name in compared.columns if name.startswith("passes for ")}
        shown["side_by_side"] = pd.DataFrame(columns)
    speed = frames["speed"]
    if len(speed):
        milliseconds = {
            f"{phase} ms": (speed[f"{phase}_s"] * 1000).map(lambda v: "" if pd.isna(v) else f"{v:.1f}")
            for phase in ("total", "forward", "upstream", "backward")
        }
        shown["speed"] = pd.DataFrame(
            {
                "backbone": speed["backbone"],
                "arm": figures.arm_labels(speed),
                **milliseconds,
                "speed-up": [interval_text(r, "speed_up", 2) for _, r in speed.iterrows()],
                "n (rounds)": speed["n"],
            }
        )
    if len(frames["failures"]):
        shown["failures"] = frames["failures"]
    return shown


def _printable_signal(frames: dict[str, pd.DataFrame]) -> dict[str, pd.DataFrame]:
    shown: dict[str, pd.DataFrame] = {}
    signal = frames.get("signal", pd.DataFrame())
    if len(signal):
        shown["signal"] = pd.DataFrame(
            {
                "eta": signal["eta"].map("{:g}".format),
                "passes": signal["passes"],
                "estimator": signal["label"],
                "looks ahead": signal["anticipating"].map({True: "yes", False: "no"}),
                "n": signal["n"],
                "signal": [interval_text(r, "signal") for _, r in signal.iterrows()],
                "difference to exact": [interval_text(r, "difference", 4) for _, r in signal.iterrows()],
                "loss in the update": [interval_text(r, "loss") for _, r in signal.iterrows()],
                "the loss is": signal["verdict"],
                "samples to tell": signal["samples_to_tell"].map(_whole),
                "squared bias": [interval_text(r, "bias2") for _, r in signal.iterrows()],
            }
        )
        cost: dict[str, Any] = {k: shown["signal"][k] for k in ("eta", "passes", "estimator")}
        for name, title in (
            ("update_cost", "update, passes"),
            ("measured_update_cost", "update, measured"),
            ("step_cost", "step, passes"),
            ("measured_step_cost", "step, measured"),
        ):
            cost[f"cost of the {title}"] = signal[name].map(_share)
            cost[f"signal kept per cost of the {title}"] = signal[f"kept_per_{name}"].map(_ratio)
        shown["signal_cost"] = pd.DataFrame(cost)
    direction = frames.get("pathwise", pd.DataFrame())
    if len(direction):
        shown["pathwise"] = _printable_direction(direction, signal)
    pairs = frames.get("pairs", pd.DataFrame())
    if len(pairs):
        shown["pairs"] = _printable_pairs(pairs)
    centring = frames.get("centring", pd.DataFrame())
    if len(centring):
        text = [
            f"{interval_text(r, 'share')} ({r['p_text']}), n = {r['n']}"
            if r["centring"] == "ones"
            else ("" if r["estimator"] == "exact" else f"{interval_text(r, 'bias2')}; {with_n(r, 'difference')}")
            for _, r in centring.iterrows()
        ]
        wide = centring.assign(text=text).pivot_table(
            index=["eta", "passes", "label"], columns="centring", values="text", aggfunc="first"
        )
        wide = wide[[c for c in CENTRINGS if c in wide.columns]].reset_index()
        shown["centring"] = wide.rename(columns={"label": "estimator", "none": "not centred", "ones": "all 1"})
    return shown


def _printable_direction(direction: pd.DataFrame, signal: pd.DataFrame) -> pd.DataFrame:
    """Losses by pathwise gradients; beside the loss in the update that by the score function, where both are known."""
    by_score = {(r["eta"], r["estimator"]): r for _, r in signal.iterrows()}
    losses = ["" if pd.isna(r["loss"]) else interval_text(r, "loss") for _, r in direction.iterrows()]
    checks = [by_score.get((r["eta"], r["estimator"])) for _, r in direction.iterrows()]
    return pd.DataFrame(
        {
            "eta": direction["eta"].map("{:g}".format),
            "passes": direction["passes"],
            "estimator": direction["label"],
            "upstream": direction["upstream"],
            "n": direction["n"],
            "cosine of expected gradients": [interval_text(r, "cosine", 4) for _, r in direction.iterrows()],
            "direction lost": [interval_text(r, "lost", 4) for _, r in direction.iterrows()],
            "signal of one batch": [interval_text(r, "share") for _, r in direction.iterrows()],
            "loss in the update": losses,
            "by the score function": ["" if row is None else with_n(row, "loss") for row in checks],
            "the signal is": ["" if pd.isna(r["loss"]) else r["verdict"] for _, r in direction.iterrows()],
        }
    )


def _printable_pairs(pairs: pd.DataFrame) -> pd.DataFrame:
    """Pairs of plans; those whose difference is undefined in one row for each eta and number of samples."""
    undefined = pairs["difference"].isna()
    told = pairs[~undefined]
    shown = pd.DataFrame(
        {
            "eta": told["eta"].map("{:g}".format),
            "plan": told["plan"],
            "passes": told["plan_passes"],
            "beside": told["beside"],
            "its passes": told["beside_passes"],
            "difference in share kept": [interval_text(r, "difference") for _, r in told.iterrows()],
            "n": told["n"],
            "the plan": told["verdict"],
            "samples": told["samples"],
            "more samples to tell": told["more_samples"].map(_whole),
        }
    )
    merged = [
        dict.fromkeys(shown.columns, "")
        | {
            "eta": f"{eta:g}",
            "plan": f"{len(own)} pairs of plans",
            "difference in share kept": "undefined",
            "the plan": own["verdict"].iloc[0],
            "samples": samples,
        }
        for (eta, samples), own in pairs[undefined].groupby(["eta", "samples"], sort=False)
    ]
    return pd.DataFrame([*shown.to_dict("records"), *merged]) if merged else shown


def _spans(fewest: pd.Series, most: pd.Series) -> list[str]:
    """``8``, or ``6 to 8`` where some batches are undefined."""
    return [f"{a}" if a == b else f"{a} to {b}" for a, b in zip(fewest, most, strict=True)]


def _whole(value: float) -> str:
    return "" if pd.isna(value) else f"{int(value)}"


def _share(value: float) -> str:
    return "" if pd.isna(value) else f"{value:.0%}"


def _ratio(value: float) -> str:
    return "" if pd.isna(value) else f"{value:.2f}"
