"""Tables of reward curves: every run, held-out rewards, and a verdict on every arm beside exact."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
from scipy import stats

from jagg_core.records import Cell, Record

INSIDE = "inside exact's band"
VERDICTS = (INSIDE, f"lower, {INSIDE}", f"higher, {INSIDE}", "better", "worse", "inconclusive")
"""What an arm's final reward may be called beside exact's."""


def runs(record: Record) -> list[Cell]:
    """Runs that ended well."""
    return [cell for cell in record.cells if cell.status == "ok"]


def training(record: Record) -> pd.DataFrame:
    """A row per run and update: the reward of the samples that were trained on, and seconds."""
    rows = []
    for cell in runs(record):
        about = {"arm": cell.settings["arm"], "seed": cell.settings["seed"]}
        names = [name for name in ("reward", "grad_norm", "update_s", "step_s") if name in cell.samples]
        for place in range(len(cell.samples["reward"])):
            rows.append(about | {"update": place + 1} | {name: cell.samples[name][place] for name in names})
    return pd.DataFrame(rows)


def held_out(record: Record) -> pd.DataFrame:
    """A row per run, evaluation and reward."""
    rows = []
    for cell in runs(record):
        about = {"arm": cell.settings["arm"], "seed": cell.settings["seed"]}
        for name, values in cell.samples.items():
            if name.startswith("held_out "):
                reward = name.removeprefix("held_out ")
                for after, value in zip(cell.samples["evaluated_after"], values, strict=True):
                    rows.append(about | {"after": int(after or 0), "reward": reward, "value": value})
    return pd.DataFrame(rows)


def verdict(arm: Sequence[float], exact: Sequence[float]) -> tuple[str, float, float | None, float | None]:
    """Final rewards of an arm beside exact's, seed by seed: one of `VERDICTS`, the mean difference, its 95 % interval.

    An arm is inside the range of exact's own seeds if exact's mean stays in it with the difference added, as far as the
    interval reaches: it is surely no further from exact than another seed is. An interval that leaves zero out says
    lower or higher while the arm's mean is in the range, else worse or better; all else is inconclusive.
    """
    difference = np.array(arm) - np.array(exact)
    mean = float(difference.mean())
    if len(difference) < 2:
        return "inconclusive", mean, None, None
    half = float(stats.t.ppf(0.975, len(difference) - 1) * difference.std(ddof=1) / np.sqrt(len(difference)))
    low, high = mean - half, mean + half
    inside = min(exact) <= np.mean(arm) <= max(exact)
    surely = min(exact) <= np.mean(exact) + low and np.mean(exact) + high <= max(exact)
    if low > 0:
        found = f"higher, {INSIDE}" if inside else "better"
    elif high < 0:
        found = f"lower, {INSIDE}" if inside else "worse"
    else:
        found = INSIDE if surely else "inconclusive"
    return found, mean, low, high


def reached(after: Sequence[int], values: Sequence[float], target: float) -> float | None:
    """Updates until a curve first reaches ``target``, interpolated between evaluations; None if it never does."""
    for place, value in enumerate(values):
        if value >= target:
            if place == 0:
                return float(after[0])
            before, step = values[place - 1], after[place] - after[place - 1]
            return after[place - 1] + step * (target - before) / (value - before)
    return None


def speed_ups(table: pd.DataFrame, updates: int) -> pd.DataFrame:
    """Median over seeds and updates of exact's seconds over an arm's in the same turn, by arm: update and step."""
    names = ["update_s", "step_s"]
    turns = table[table["update"] <= updates].set_index(["arm", "seed", "update"])[names]
    ratios = turns.loc["exact"].reindex(turns.index.droplevel("arm")).to_numpy() / turns
    return ratios.groupby("arm").median().rename(columns={name: name.replace("_s", "_speed_up") for name in names})


def arms(record: Record, table: pd.DataFrame, evaluated: pd.DataFrame) -> pd.DataFrame:
    """A row per arm: its cost, its final held-out reward, the verdict, and seconds until exact's final reward."""
    settings = record.settings
    final = evaluated[(evaluated["after"] == settings["updates"])].pivot_table(
        index=["arm", "seed"], columns="reward", values="value"
    )
    trained = settings["reward"]
    passes: dict[str, int] = {cell.settings["arm"]: cell.values["passes"] for cell in runs(record)}
    seconds, faster = table.groupby("arm")[["update_s", "step_s"]].median(), speed_ups(table, settings["updates"])
    curves = evaluated[evaluated["reward"] == trained].groupby(["arm", "after"])["value"].mean()
    target = float(curves["exact"].loc[settings["updates"]])
    rows = []
    for arm in dict.fromkeys(table["arm"]):
        seeds = sorted(set(final.loc[arm].index) & set(final.loc["exact"].index))
        if not seeds:
            continue  # nothing to pair it with
        ours, exact = final.loc[arm].loc[seeds], final.loc["exact"].loc[seeds]
        said, mean, low, high = verdict(list(ours[trained]), list(exact[trained]))
        curve = curves[arm]
        needed = reached(list(curve.index), list(curve), target)
        row: dict[str, Any] = {
            "arm": arm,
            "passes": passes[arm],
            "seeds": len(seeds),
            "update_s": seconds.loc[arm, "update_s"],
            "step_s": seconds.loc[arm, "step_s"],
            "backward_speed_up": passes["exact"] / passes[arm],
            "update_speed_up": faster.loc[arm, "update_speed_up"],
            "step_speed_up": faster.loc[arm, "step_speed_up"],
            "final": float(ours[trained].mean()),
            "final_min": float(ours[trained].min()),
            "final_max": float(ours[trained].max()),
            "difference": mean,
            "difference_low": low,
            "difference_high": high,
            "verdict": "" if arm == "exact" else said,
            "updates_to_exact": needed,
            "time_to_exact": None
            if needed is None
            else needed / settings["updates"] / float(faster.loc[arm, "step_speed_up"]),
        }
        rows.append(row | {f"final {name}": float(ours[name].mean()) for name in settings["watched"]})
    return pd.DataFrame(rows)


def watched(record: Record, evaluated: pd.DataFrame) -> pd.DataFrame:
    """A row per arm and watched reward after exact's updates: what training moved beside the trained reward.

    ``place`` is `verdict`'s, without a claim which direction is good: "above exact's band", "below exact's band".
    """
    words = {"better": "above exact's band", "worse": "below exact's band"}
    rows = []
    for name in record.settings["watched"]:
        last = evaluated[(evaluated["after"] == record.settings["updates"]) & (evaluated["reward"] == name)]
        final = last.pivot(index="seed", columns="arm", values="value")
        for arm in (arm for arm in dict.fromkeys(last["arm"]) if arm != "exact"):
            pairs = final[[arm, "exact"]].dropna()
            if not len(pairs):
                continue  # nothing to pair it with
            place, mean, low, high = verdict(list(pairs[arm]), list(pairs["exact"]))
            row = {"reward": name, "arm": arm, "seeds": len(pairs), "exact": float(pairs["exact"].mean())}
            difference = {"difference": mean, "difference_low": low, "difference_high": high}
            rows.append(row | difference | {"place": words.get(place, place)})
    columns = ["reward", "arm", "seeds", "exact", "difference", "difference_low", "difference_high", "place"]
    return pd.DataFrame(rows, columns=columns)


def all_tables(record: Record) -> dict[str, pd.DataFrame]:
    """Every table by the name of its file; empty ones where no run of exact ended well."""
    failures = pd.DataFrame(
        [{"cell": c.name, "status": c.status, "reason": c.reason} for c in record.cells if c.status != "ok"],
        columns=["cell", "status", "reason"],
    )
    table, evaluated = training(record), held_out(record)
    if not len(table) or "exact" not in set(table["arm"]):
        return {"failures": failures}
    return {
        "training": table,
        "held_out": evaluated,
        "arms": arms(record, table, evaluated),
        "watched": watched(record, evaluated),
        "failures": failures,
    }
