"""Tables of training runs: every logged figure by update, means over seeds with intervals, and what is compared."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from analysis.statistics.paired import Paired, paired
from jagg_core.grpo import GRPOConfig
from jagg_core.grpo.log import read_rows
from jagg_core.grpo.metrics import STAGES
from jagg_core.grpo.run import FREE
from jagg_core.strict_json import plain, read_json

LOGS = ("metrics", "evaluation", "recalibration")
DRAWN = {
    *("reward_mean", "reward_std", "groups_without_signal", "loss", "log_ratio_max", "clipped_share", "grad_norm"),
    *("learning_rate", "passes", "micro_batches", "forwards", "skipped"),
}
"""Columns of ``metrics.csv`` that have a place on the page; others, such as a meter's, are drawn as they are."""

SHARE = 10
"""A tenth of the updates stands for the beginning and the end of a curve of training rewards."""


@dataclass(frozen=True)
class Run:
    """A training run as its folder holds it.

    Attributes:
        folder: of the run.
        arm: what tells its settings from those of the other runs; equal for runs that differ in the seed alone.
        seed: of the run.
        config: its settings by section and name.
        logs: rows of its CSV files, by their names.
    """

    folder: Path
    arm: str
    seed: int
    config: dict[str, dict[str, Any]]
    logs: dict[str, list[dict[str, str]]]

    @property
    def reward(self) -> str:
        """The trained reward."""
        return str(self.config["reward"]["name"])


def read_runs(folders: Sequence[Path]) -> list[Run]:
    """Reads runs, in their order.

    Raises:
        ValueError: not the folder of a run, a log that cannot be read, or two runs with one seed and equal settings.
    """
    configs = [_config(folder) for folder in folders]
    flat = [_decisive(config) for config in configs]
    differing = [key for key in flat[0] if any(one.get(key) != flat[0][key] for one in flat)]
    runs: list[Run] = []
    for folder, config, settings in zip(folders, configs, flat, strict=True):
        words = [_worded(key, settings.get(key)) for key in differing]
        arm = ", ".join(word for word in words if word) or (_worded("plan.estimator", settings["plan.estimator"]))
        logs = {path.stem: read_rows(path) for path in sorted(folder.glob("*.csv"))}
        if not logs.get("metrics"):
            raise ValueError(f"{folder / 'metrics.csv'} must have at least one update, got none")
        run = Run(folder, arm, int(config["run"]["seed"]), config, logs)
        for other in runs:
            if (other.arm, other.seed) == (run.arm, run.seed):
                raise ValueError(f"runs must differ in seed or settings, got {other.folder} and {run.folder}")
        runs.append(run)
    return runs


def _config(folder: Path) -> dict[str, dict[str, Any]]:
    path = folder / "config.json"
    if not path.exists():
        raise ValueError(f"{folder} must be the folder of a training run or of a record, got no config.json")
    stored = read_json(path)
    defaults = plain(asdict(GRPOConfig()))
    if not isinstance(stored, dict) or not all(isinstance(stored.get(section), dict) for section in defaults):
        raise ValueError(f"{path} must be the configuration of a run")
    return {section: values | stored[section] for section, values in defaults.items()}


def _decisive(config: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Settings that decide what is computed, the seed apart."""
    return {
        f"{section}.{name}": value
        for section, values in config.items()
        for name, value in values.items()
        if section != "parallel" and name not in FREE.get(section, ()) and (section, name) != ("run", "seed")
    }


def _worded(key: str, value: Any) -> str:
    if value in ("", None, [], 0, False):
        return ""
    name = key.partition(".")[2]
    text = " ".join(map(str, value)) if isinstance(value, list) else str(value)
    return text if key == "plan.estimator" else name.replace("_", " ") + (f" {text}" if value is not True else "")


def logged(runs: Sequence[Run]) -> pd.DataFrame:
    """Lists every number of every log: arm, seed, log, figure, update, value."""
    rows = [
        (run.arm, run.seed, log, figure, int(row["update"]), number)
        for run in runs
        for log, table in run.logs.items()
        for row in table
        for figure, text in row.items()
        if figure != "update" and (number := _number(text)) is not None
    ]
    return pd.DataFrame(rows, columns=["arm", "seed", "log", "figure", "update", "value"])


def _number(text: str) -> float | None:
    try:
        result = float(text)
    except ValueError:
        return None
    return result if math.isfinite(result) else None


def by_update(table: pd.DataFrame) -> pd.DataFrame:
    """Computes means over an arm's seeds with 95 % t intervals; they are empty for one seed."""
    rows = []
    for (arm, log, figure, update), part in table.groupby(["arm", "log", "figure", "update"], sort=False):
        result = paired(part["value"].tolist())
        rows.append((arm, log, figure, update, result.n, result.mean, result.low, result.high))
    return pd.DataFrame(rows, columns=["arm", "log", "figure", "update", "n", "mean", "low", "high"])


def knots(runs: Sequence[Run]) -> pd.DataFrame:
    """Lists the knots of runs that search them anew: from which update on, and their cosines to exact."""
    columns = ["arm", "seed", "update", "knots", "cosine_before", "cosine"]
    rows: list[tuple[Any, ...]] = []
    for run in runs:
        searched = run.logs.get("recalibration", [])
        if searched:
            rows.append((run.arm, run.seed, 0, searched[0]["knots_before"], None, None))
        for row in searched:
            cosines = (_number(row["cosine_before"]), _number(row["cosine"]))
            rows.append((run.arm, run.seed, int(row["update"]), row["knots"], *cosines))
    return pd.DataFrame(rows, columns=columns)


def seconds(table: pd.DataFrame) -> pd.DataFrame:
    """Computes mean seconds over seeds by arm, update and stage; ``other`` is what is in the total and in no stage."""
    part = table[(table["log"] == "metrics") & table["figure"].isin([f"{stage}_s" for stage in (*STAGES, "total")])]
    wide = part.pivot_table(index=["arm", "update"], columns="figure", values="value", sort=False).reset_index()
    wide.columns = [str(name).removesuffix("_s") for name in wide.columns]
    known = [stage for stage in STAGES if stage in wide]
    wide["other"] = (wide["total"] - wide[known].sum(axis=1)).clip(lower=0) if "total" in wide else 0.0
    return wide[["arm", "update", *known, "other"]]


def ends(runs: Sequence[Run], table: pd.DataFrame) -> pd.DataFrame:
    """Lists what each run begins and ends with, a row for each reward.

    Held-out rewards are those of the first and the last evaluation that all runs have. Where there is none, training
    rewards are means over the first and the last tenth of the updates that all runs have.
    """
    rows = []
    held = table[(table["log"] == "evaluation") & (table["figure"] != "evaluation_s")]
    trained = table[(table["log"] == "metrics") & (table["figure"] == "reward_mean")]
    held_out = not held.empty
    source = held if held_out else trained.assign(figure=runs[0].reward)
    shared = set.intersection(*(set(_of(source, run)["update"]) for run in runs))
    if not shared:
        return pd.DataFrame(columns=["arm", "seed", "reward", "held_out", "first", "last", "begins", "ends"])
    first, last = min(shared), max(shared)
    width = 1 if held_out else max(1, len(shared) // SHARE)
    ordered = sorted(shared)
    for run in runs:
        for reward, part in _of(source, run).groupby("figure", sort=False):
            values = part.set_index("update")["value"]
            begins, finishes = (values.reindex(some).mean() for some in (ordered[:width], ordered[-width:]))
            rows.append((run.arm, run.seed, reward, held_out, first, last, begins, finishes))
    return pd.DataFrame(rows, columns=["arm", "seed", "reward", "held_out", "first", "last", "begins", "ends"])


def _of(table: pd.DataFrame, run: Run) -> pd.DataFrame:
    return table[(table["arm"] == run.arm) & (table["seed"] == run.seed)]


def arms(runs: Sequence[Run], table: pd.DataFrame, reached: pd.DataFrame) -> pd.DataFrame:
    """Compares arms: rewards at the end, their difference to the first arm by shared seeds, and seconds of an update.

    Intervals are 95 % t intervals over seeds, empty below two. ``seconds`` is the geometric mean over seeds of medians
    over updates; ``seconds_ratio`` is over the first arm's, by shared seeds.
    """
    rows = []
    names = list(dict.fromkeys(run.arm for run in runs))
    metrics = table[table["log"] == "metrics"]
    paced = metrics[metrics["figure"] == "total_s"].groupby(["arm", "seed"])["value"].median()
    for arm in names:
        logged_rows = metrics[metrics["arm"] == arm]
        of_arm = [run for run in runs if run.arm == arm]
        row: dict[str, Any] = {
            "arm": arm,
            "seeds": len(of_arm),
            "updates": min(len(run.logs["metrics"]) for run in of_arm),
            "skipped": int(logged_rows.loc[logged_rows["figure"] == "skipped", "value"].sum()),
            "passes": logged_rows.loc[(logged_rows["figure"] == "passes") & (logged_rows["value"] > 0), "value"].mean(),
        }
        for reward, part in reached.groupby("reward", sort=False):
            final = part.set_index(["arm", "seed"])["ends"]
            row |= _columns(str(reward), paired(final[arm].tolist())) if arm in final.index else {}
            if arm != names[0]:
                shared = sorted(set(final[arm].index) & set(final[names[0]].index))
                if shared:
                    difference = (final[arm][shared] - final[names[0]][shared]).tolist()
                    row |= _columns(f"{reward} difference", paired(difference))
        if arm in paced.index:
            row |= _geometric("seconds", paced[arm])
            if arm != names[0] and names[0] in paced.index:
                ratios = (paced[arm] / paced[names[0]]).dropna()
                row |= _geometric("seconds_ratio", ratios) if len(ratios) else {}
        rows.append(row)
    return pd.DataFrame(rows)


def _geometric(name: str, values: pd.Series) -> dict[str, float | None]:
    logs = _columns(name, paired([math.log(value) for value in values]))
    return {key: None if value is None else math.exp(value) for key, value in logs.items()}


def _columns(name: str, result: Paired) -> dict[str, float | None]:
    return {name: result.mean, f"{name}_low": result.low, f"{name}_high": result.high}


def further(table: pd.DataFrame) -> list[tuple[str, str]]:
    """Lists logs and figures that have no other place on the page, such as those of a meter, and are not all zero."""
    there = table[table["value"].notna() & (table["value"] != 0)]
    result = dict.fromkeys(zip(there["log"], there["figure"], strict=True))
    return [
        (log, figure)
        for log, figure in result
        if not figure.endswith("_s")
        and log not in ("evaluation", "recalibration")
        and (log != "metrics" or figure not in DRAWN)
        and not (figure.endswith(("_low", "_high")) and (log, figure.rpartition("_")[0]) in result)
    ]


def all_tables(runs: Sequence[Run]) -> dict[str, pd.DataFrame]:
    """Makes every table, by the name of its file."""
    table = logged(runs)
    reached = ends(runs, table)
    return {
        "log": table,
        "by_update": by_update(table),
        "ends": reached,
        "arms": arms(runs, table, reached),
        "seconds": seconds(table),
        "knots": knots(runs),
    }
