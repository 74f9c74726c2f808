"""The page of training runs: one that one can watch while it goes, or several beside each other."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from analysis.report import run_tables
from analysis.report.blocks import Block, written
from analysis.report.page import data_uri, render, write_tables_and_figures
from analysis.report.run_figures import RUNS_DRAWN, make_figures
from analysis.report.run_tables import Run
from jagg_core.files import write_atomically
from jagg_core.grpo.log import pictures_in
from jagg_core.strict_json import read_json

FALL = 2
"""Usual changes between evaluations that a watched reward has to fall by before a page names it."""
PICTURES = 3
"""Pictures of a run: of its beginning, middle and end."""
WIDTHS = (480, 240, 120)
"""Pixels to which they are reduced: the largest with which all are within `PICTURE_BYTES`."""
PICTURE_BYTES = 700_000


def _interval(row: pd.Series, name: str, form: str) -> str:
    """A value with its interval, if there is one."""
    value, low, high = (row.get(key) for key in (name, f"{name}_low", f"{name}_high"))
    if value is None or pd.isna(value):
        return ""
    return f"{value:{form}}" + ("" if low is None or pd.isna(low) else f" [{low:{form}}, {high:{form}}]")


def sentences(runs: Sequence[Run], frames: dict[str, pd.DataFrame]) -> list[str]:
    """Says in three lines what was learned, what it cost, and what to look at."""
    return [_learned(runs, frames), _cost(frames), _health(runs, frames)]


def _learned(runs: Sequence[Run], frames: dict[str, pd.DataFrame]) -> str:
    reward, ends, arms = runs[0].reward, frames["ends"], frames["arms"]
    selected = ends[ends["reward"] == reward]
    if selected.empty:
        return "Reward: these runs share no update at which it is known."
    kind = "held out" if selected["held_out"].iloc[0] else "training samples"
    first, last = int(selected["first"].iloc[0]), int(selected["last"].iloc[0])
    parts = []
    for _, row in arms.iterrows():
        part = selected[selected["arm"] == row["arm"]]
        seeds = f"{row['seeds']} seed" + ("s" if row["seeds"] > 1 else "")
        name = f"{row['arm']}: " if len(arms) > 1 else ""
        text = f"{name}from {part['begins'].mean():.4g} to {_interval(row, reward, '.4g')} ({seeds})"
        difference = _interval(row, f"{reward} difference", "+.3g")
        if difference:
            text += f", {difference} beside the first"
            low, high = (row.get(f"{reward} difference_{end}") for end in ("low", "high"))
            resolved = low is not None and high is not None and (low > 0 or high < 0)
            text += "" if resolved else ", not resolved"
        parts.append(text)
    return f"Reward {reward}, {kind}, updates {first} to {last}: " + "; ".join(parts) + "."


def _cost(frames: dict[str, pd.DataFrame]) -> str:
    parts = []
    for _, row in frames["arms"].iterrows():
        selected = frames["seconds"][frames["seconds"]["arm"] == row["arm"]]
        stages = selected.drop(columns=["arm", "update"]).sum()
        large = (stages / max(stages.sum(), 1e-12)).sort_values(ascending=False)[:3]
        shares = ", ".join(f"{name} {share:.0%}" for name, share in large.items())
        name = f"{row['arm']}: " if len(frames["arms"]) > 1 else ""
        ratio = _interval(row, "seconds_ratio", ".2f")
        beside = f", {ratio} of the first's" if ratio else ""
        parts.append(f"{name}{row['passes']:.3g} passes, {_interval(row, 'seconds', '.3g')} s{beside} ({shares})")
    return "An update: " + "; ".join(parts) + "."


def _health(runs: Sequence[Run], frames: dict[str, pd.DataFrame]) -> str:
    """Names what a trainer would stop a run for; each with its figures."""
    table, several = frames["log"], len(runs) > 1
    result = []
    for run in runs:
        selected = table[(table["arm"] == run.arm) & (table["seed"] == run.seed) & (table["log"] == "metrics")]

        def of(figure: str, selected: pd.DataFrame = selected) -> pd.Series:
            return selected.loc[selected["figure"] == figure, "value"]

        where = f" ({run.arm}, seed {run.seed})" if several else ""
        updates = len(run.logs["metrics"])
        if of("skipped").sum():
            result.append(f"{int(of('skipped').sum())} of {updates} updates were skipped{where}")
        without = int((of("groups_without_signal") > 0).sum())
        if without:
            result.append(f"{without} of {updates} updates had prompts without signal{where}")
        if len(of("clipped_share")) and of("clipped_share").max() > 0.5:
            result.append(f"up to {of('clipped_share').max():.0%} of the samples' steps were clipped{where}")
        limit = float(run.config["optimizer"]["max_grad_norm"])
        above = int((of("grad_norm") > limit).sum())
        if 2 * above > updates:
            result.append(f"the gradient was scaled down in {above} of {updates} updates{where}")
        for name, part in _watched(frames["log"], run).items():
            fall = part.iloc[0] - part.iloc[-1]
            if len(part) > 2 and fall > FALL * part.diff().abs().median():
                result.append(f"{name}, watched, fell from {part.iloc[0]:.4g} to {part.iloc[-1]:.4g}{where}")
    return "Look at: " + ("; ".join(result) or "nothing; no update was skipped or without signal") + "."


def _watched(table: pd.DataFrame, run: Run) -> dict[str, pd.Series]:
    """Gives the held-out rewards of a run that nothing rewards, by name and update."""
    selected = table[(table["arm"] == run.arm) & (table["seed"] == run.seed) & (table["log"] == "evaluation")]
    selected = selected[~selected["figure"].isin([run.reward, "evaluation_s"])]
    return {str(name): part.set_index("update")["value"] for name, part in selected.groupby("figure", sort=False)}


def pictures_of(runs: Sequence[Run]) -> list[tuple[Run, dict[int, str]]]:
    """Gives pictures of the first runs' samples as data, by update."""
    chosen = []
    for run in runs[:RUNS_DRAWN]:
        there = list(pictures_in(run.folder / "samples").items())
        places = sorted({round(i * (len(there) - 1) / (PICTURES - 1)) for i in range(PICTURES)}) if there else []
        chosen.append((run, dict(there[place] for place in places)))
    for width in WIDTHS:
        result = [
            (run, {update: data_uri(_reduced(path, width)) for update, path in some.items()}) for run, some in chosen
        ]
        if sum(len(data) for _, some in result for data in some.values()) <= PICTURE_BYTES:
            break
    return [one for one in result if one[1]]


def _reduced(path: Path, width: int) -> bytes:
    from PIL import Image

    picture = Image.open(path)
    picture.thumbnail((width, 4 * width))
    buffer = io.BytesIO()
    picture.save(buffer, format="PNG", optimize=True)
    return buffer.getvalue()


def printable(runs: Sequence[Run], frames: dict[str, pd.DataFrame]) -> dict[str, pd.DataFrame]:
    """Gives the short table for people; the CSV files hold every column."""
    rows = []
    rewards = list(dict.fromkeys(frames["ends"]["reward"]))
    for _, row in frames["arms"].iterrows():
        shown: dict[str, Any] = {name: row[name] for name in ("arm", "seeds", "updates", "skipped")}
        shown["passes"] = f"{row['passes']:.3g}"
        for reward in rewards:
            part = frames["ends"][(frames["ends"]["arm"] == row["arm"]) & (frames["ends"]["reward"] == reward)]
            shown[reward] = f"{part['begins'].mean():.4g} to {_interval(row, reward, '.4g')}"
            if len(frames["arms"]) > 1:
                shown[f"{reward}, difference"] = _interval(row, f"{reward} difference", "+.3g")
        shown["seconds"] = _interval(row, "seconds", ".3g")
        rows.append(shown)
    return {"arms": pd.DataFrame(rows)}


LINES = "Lines: means over seeds. Bands: 95 % t intervals over seeds; none for one seed."

SHOWN = (
    (
        "reward",
        "Reward",
        "Training samples have SDE noise and new prompts at every update; held-out samples are drawn from the same "
        "noise "
        "and prompts at every evaluation, by the ODE sampler. " + LINES,
    ),
    (
        "watched",
        "Watched rewards",
        "Nothing rewards these: one that falls is the price of the trained one. It is named on top where it fell by "
        "more "
        "than twice a usual change between evaluations. " + LINES,
    ),
    (
        "policy",
        "The update",
        "The first optimizer step of a rollout is on policy: its ratio is 1 and nothing is clipped. A prompt whose "
        "samples have equal rewards gives no signal. " + LINES,
    ),
    ("further", "Further figures of the log", LINES),
    ("seconds", "Seconds", "Each stage includes its communication. Other: what the total has and no stage."),
    (
        "knots",
        "Knots that were searched anew",
        "Bars: steps at which the network is differentiated. Dotted lines: updates before which they were searched.",
    ),
    (
        "recalibration",
        "Cosine before and after each search",
        "On the rollouts of the search itself, so that the cosine of the new knots is optimistic. " + LINES,
    ),
)
"""Figures of the page in their order: name, title, and what it says about them."""

COMPARED = Block(
    "Runs compared",
    "arms",
    note=(
        "Rewards: at the first and the last update that all runs share. Brackets: 95 % t intervals over seeds; none "
        "for one seed. Differences are to the first row, by shared seeds. Seconds: medians over updates, without "
        "evaluation and checkpoint; runs that were timed at different moments share no noise, so <code>python -m "
        "bench update</code> gives the ratio to quote."
    ),
    opened=True,
)


def write_run_report(folders: Sequence[Path], out: Path) -> tuple[Path, dict[str, pd.DataFrame], list[str]]:
    """Writes tables, figures and ``report.html`` of training runs. Returns page, short tables, three lines.

    Raises:
        ValueError: not the folder of a run, a log that cannot be read, or two runs with one seed and equal settings.
    """
    runs = run_tables.read_runs(folders)
    frames = run_tables.all_tables(runs)
    made = make_figures(runs, frames, run_tables.further(frames["log"]))
    drawn = [{name: made[name]} for name, _, _ in SHOWN if name in made]
    blocks = [Block(title, note=note, opened=True) for name, title, note in SHOWN if name in made]
    samples, prompts = pictures_of(runs), runs[0].folder / "samples" / "prompts.json"
    texts = [Block("Samples", body="run_samples.html", opened=True)] if samples else []
    texts.append(Block("Runs", body="run_list.html"))
    pictures = write_tables_and_figures(out, frames, made)
    shown, lines = printable(runs, frames), sentences(runs, frames)
    page = render(
        title=f"{runs[0].config['model']['backbone']} trained on {runs[0].reward}"
        + (f": {len(runs)} runs" if len(runs) > 1 else ""),
        top=lines,
        shown=shown,
        blocks=[COMPARED, *blocks, *texts],
        drawn=[{}, *drawn, *[{} for _ in texts]],
        pictures=pictures,
        files=written(frames),
        runs=runs,
        samples=samples,
        prompts=read_json(prompts) if prompts.exists() else [],
    )
    write_atomically(out / "report.html", page.encode())
    return out / "report.html", shown, lines
