"""Tables of reward curves: every run, held-out rewards, and how every arm compares with exact, paired by seed."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any

import numpy as np
import pandas as pd

from analysis.statistics.paired import Paired, holm, paired
from jagg_core.records import Cell, Record

MARGIN = 0.1
"""Share of exact's gain in reward within which an arm counts as equivalent to exact."""

EQUAL = 0.01
"""Share of exact's gain within which one seed of an arm counts as equal to exact's."""

LEVEL = 0.05
"""Of the p values, corrected for the number of comparisons in their table."""


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


def verdict(difference: Paired, corrected: float | None, margin: float) -> str:
    """Says how an arm's final reward compares with exact's.

    ``equivalent``: the whole 95 % interval lies within ``margin`` of zero. ``better``, ``worse``: ``corrected``, the p
    value after Holm's correction, is below `LEVEL`; "by less than the margin" where both hold. Else ``inconclusive``.
    """
    low, high = difference.low, difference.high
    within = low is not None and high is not None and -margin < low <= high < margin
    if corrected is not None and corrected < LEVEL:
        return ("better" if difference.mean > 0 else "worse") + (" by less than the margin" if within else "")
    return "equivalent" if within else "inconclusive"


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
    """Computes, by arm, exact's seconds over the arm's in the same turns, for update and step.

    The value is the median over seeds and the first ``updates`` updates, which all arms share. ``_min`` and ``_max``
    are the lowest and highest median of one seed: seeds may have run at different speeds of the machine.
    """
    names = ["update_s", "step_s"]
    turns = table[table["update"] <= updates].set_index(["arm", "seed", "update"])[names]
    ratios = turns.loc["exact"].reindex(turns.index.droplevel("arm")).to_numpy() / turns
    ratios = ratios.rename(columns={name: name.replace("_s", "_speed_up") for name in names})
    by_seed = ratios.groupby(["arm", "seed"]).median().groupby("arm")
    return ratios.groupby("arm").median().join([by_seed.min().add_suffix("_min"), by_seed.max().add_suffix("_max")])


def seconds(table: pd.DataFrame, updates: int) -> pd.DataFrame:
    """Computes the median seconds of an update and a step by arm, over the updates that all arms share."""
    return table[table["update"] <= updates].groupby("arm")[["update_s", "step_s"]].median()


def time_ratio(arm: pd.DataFrame, exact: pd.DataFrame, updates: int, speed_up: float) -> tuple[float | None, ...]:
    """Computes the arm's time to exact's final mean reward, over the time that exact itself needs to reach it first.

    Args:
        arm: held-out rewards, a row per evaluation and a column per seed.
        exact: likewise, of the same seeds.
        updates: at which exact's reward is the target.
        speed_up: of the arm's step.

    Returns:
        The ratio, and the ends of the middle 95 % of its values over all resamples of the seeds (all S^S of them up to
        five seeds, else 2,000); None where the reward is not reached.
    """
    seeds = len(exact.columns)
    if seeds <= 5:
        draws = [list(draw) for draw in product(range(seeds), repeat=seeds)]
    else:
        draws = np.random.default_rng(0).integers(seeds, size=(2000, seeds)).tolist()

    def ratio(draw: list[int]) -> float:
        ours, theirs = (frame.iloc[:, draw].mean(axis=1) for frame in (arm, exact))
        target = float(theirs.loc[updates])
        needed, without = (reached(list(curve.index), list(curve), target) for curve in (ours, theirs))
        return np.inf if needed is None or not without else needed / speed_up / without

    low, high = np.quantile([ratio(draw) for draw in draws], [0.025, 0.975], method="inverted_cdf")
    return tuple(float(x) if np.isfinite(x) else None for x in (ratio(list(range(seeds))), low, high))


def at_equal_time(arm: pd.DataFrame, exact: pd.Series, updates: int, speed_up: float) -> dict[str, Any]:
    """Compares an arm with exact's final reward after as much time as exact took, or at the arm's end if earlier.

    ``equal_time_share`` is the share of exact's time that the arm then has had.
    """
    affordable = updates * speed_up
    ends = min(affordable, float(arm.index[-1]))
    values = [float(np.interp(ends, arm.index.to_numpy(dtype=float), arm[seed])) for seed in arm]
    found = paired([value - exact[seed] for value, seed in zip(values, arm, strict=True)])
    return {
        "equal_time_updates": ends,
        "equal_time_share": ends / affordable,
        "equal_time_difference": found.mean,
        "equal_time_difference_low": found.low,
        "equal_time_difference_high": found.high,
    }


def arms(record: Record, table: pd.DataFrame, evaluated: pd.DataFrame) -> pd.DataFrame:
    """A row per arm: its cost, final held-out reward and difference to exact's at equal updates and at equal time."""
    settings = record.settings
    updates, trained = settings["updates"], settings["reward"]
    final = evaluated[evaluated["after"] == updates].pivot_table(
        index=["arm", "seed"], columns="reward", values="value"
    )
    curves = evaluated[evaluated["reward"] == trained].pivot_table(
        index="after", columns=["arm", "seed"], values="value"
    )
    passes: dict[str, int] = {cell.settings["arm"]: cell.values["passes"] for cell in runs(record)}
    spent, faster = seconds(table, updates), speed_ups(table, updates)
    exact_gain = float((curves["exact"].loc[updates] - curves["exact"].iloc[0]).mean())
    rows = []
    for arm in dict.fromkeys(table["arm"]):
        seeds = sorted(set(final.loc[arm].index) & set(final.loc["exact"].index))
        if not seeds:
            continue  # nothing to pair it with
        ours, exact = final.loc[arm].loc[seeds], final.loc["exact"].loc[seeds]
        apart = (ours[trained] - exact[trained]).tolist()
        found, step = paired(apart), float(faster.loc[arm, "step_speed_up"])
        own, theirs = (curves[name][seeds].dropna() for name in (arm, "exact"))
        needed = reached(list(own.index), list(own.mean(axis=1)), float(exact[trained].mean()))
        ratio, ratio_low, ratio_high = time_ratio(own, theirs, updates, step)
        row: dict[str, Any] = {"arm": arm, "passes": passes[arm], "seeds": len(seeds)}
        row |= (
            spent.loc[arm].to_dict() | {"backward_speed_up": passes["exact"] / passes[arm]} | faster.loc[arm].to_dict()
        )
        row |= {
            "final": float(ours[trained].mean()),
            "final_min": float(ours[trained].min()),
            "final_max": float(ours[trained].max()),
            "exact_gain": exact_gain,
            "margin": MARGIN * abs(exact_gain),
            "difference": found.mean,
            "difference_low": found.low,
            "difference_high": found.high,
            "p_value": None if arm == "exact" else found.p_value,
            "seeds_lower": sum(x < -EQUAL * abs(exact_gain) for x in apart),
            "seeds_higher": sum(x > EQUAL * abs(exact_gain) for x in apart),
            "updates_to_exact": needed,
            "time_to_exact": None if needed is None else needed / updates / step,
            "time_ratio": ratio,
            "time_ratio_low": ratio_low,
            "time_ratio_high": ratio_high,
        }
        row |= at_equal_time(own, exact[trained], updates, step)
        rows.append(row | {f"final {name}": float(ours[name].mean()) for name in settings["watched"]})
    corrected = holm([row["p_value"] for row in rows])
    for row, p_value in zip(rows, corrected, strict=True):
        difference = Paired(
            *(row[key] for key in ("difference", "difference_low", "difference_high", "p_value", "seeds"))
        )
        said = "" if row["arm"] == "exact" else verdict(difference, p_value, row["margin"])
        row |= {"p_corrected": p_value, "verdict": said}
    return pd.DataFrame(rows)


def watched(record: Record, evaluated: pd.DataFrame) -> pd.DataFrame:
    """A row per arm and watched reward after exact's updates: what training moved besides the trained reward.

    ``place`` says, after Holm's correction over the whole table, "higher than exact's", "lower than exact's" or "not
    resolved", without a claim which direction is good.
    """
    final = evaluated[evaluated["after"] == record.settings["updates"]]
    rows: list[dict[str, Any]] = []
    for name in record.settings["watched"]:
        part = final[final["reward"] == name].pivot_table(index="seed", columns="arm", values="value")
        for arm in [arm for arm in dict.fromkeys(final["arm"]) if arm != "exact"]:
            pairs = part[["exact", arm]].dropna()
            if not len(pairs):
                continue  # nothing to pair it with
            found = paired((pairs[arm] - pairs["exact"]).tolist())
            row = {"reward": name, "arm": arm, "seeds": len(pairs), "exact": float(pairs["exact"].mean())}
            difference = {"difference": found.mean, "difference_low": found.low, "difference_high": found.high}
            rows.append(row | difference | {"p_value": found.p_value})
    for row, p_value in zip(rows, holm([row["p_value"] for row in rows]), strict=True):
        resolved = p_value is not None and p_value < LEVEL
        side = "higher than exact's" if row["difference"] > 0 else "lower than exact's"
        row |= {"p_corrected": p_value, "place": side if resolved else "not resolved"}
    columns = ["reward", "arm", "seeds", "exact", "difference", "difference_low", "difference_high"]
    return pd.DataFrame(rows, columns=[*columns, "p_value", "p_corrected", "place"])


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
