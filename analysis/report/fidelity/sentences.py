"""What the numbers say, in sentences, from stored records alone."""

from __future__ import annotations

import pandas as pd

from analysis.report.fidelity.direction import direction_sentences
from analysis.report.fidelity.printable import with_n
from analysis.report.fidelity.recommendation import recommend, recommend_signal
from analysis.report.fidelity.signal_tables import TOO_FEW, UNTOLD
from analysis.report.fidelity.tables import windows_of_paper
from analysis.statistics.names import families_of, grouped_name, recommended_families
from bench.arms import HEADLINE, label_of
from jagg_core.records import Record


def paper_estimator(record: Record) -> str:
    """Name of the paper's recipe in this record: its first window, routed by ``jagg_frac``."""
    settings = record.settings
    return grouped_name(len(record.schedule), "jagg", settings["windows"][0], settings["jagg_frac"])


QUICK = "Quick run, not for use: every part with few rollouts, no number of it says anything about the backbone."


def findings(record: Record, frames: dict[str, pd.DataFrame]) -> list[str]:
    """What the numbers say, in sentences; each only if its cells exist."""
    said = [QUICK] if record.settings.get("quick") else []
    steps = len(record.schedule)
    families = families_of(record)
    searched = [name for name in recommended_families(record) if families[name].knots_of == name]
    front = frames["pareto"]
    for eta in record.settings["etas"] if len(front) else ():
        part = front[front["eta"] == eta]
        paper = part[part["estimator"] == paper_estimator(record)]
        if len(paper) and part["family"].isin(searched).any():
            row = paper.iloc[0]
            said.append(
                f"eta {eta:g}: the paper's recipe takes {row['passes']} of {steps} passes at cosine "
                f"{with_n(row, 'cosine', 4)}."
            )
            targets = sorted({0.97, 0.99, record.settings.get("min_cosine", 0.99)})
            said += [text for target in targets if (text := recommend(record, eta, target)) is not None]
            jagg = part[(part["family"] == "jagg") & part["best"]]
            for family, ours in part[part["family"].isin(searched) & part["best"]].groupby("family", sort=False):
                said.append(
                    f"eta {eta:g}: " + _against_the_rule(str(family), ours, jagg, windows_of_paper(record, eta))
                )
    said += _fractions(frames["routing"])
    for cell in record.cells:
        if cell.name.endswith("/shipped") and cell.status == "ok":
            for text in (one["text"] for one in cell.values["recommended"].values()):
                said.append(f"Shipped calibration of {record.backbone}, {text}")
    signal = frames.get("signal", pd.DataFrame())
    for _, part in signal.groupby("eta", sort=False) if len(signal) else ():
        said.append(recommend_signal(record, part, frames.get("pathwise"))[0])
    said += direction_sentences(record, frames.get("pathwise", pd.DataFrame()))
    said += _pairs(frames.get("pairs", pd.DataFrame()), record)
    said += _leaks(frames.get("centring", pd.DataFrame()))
    for _, row in frames["leak"].iterrows() if len(frames["leak"]) else ():
        all_groups = grouped_name(steps, "jagg", record.settings["windows"][0], 1.0)
        if row["family"] in searched or row["estimator"] in (all_groups, paper_estimator(record)):
            verdict = "is not zero" if row["p_value"] < 0.05 else "cannot be told from zero"
            recipe = " (the paper's recipe)" if row["estimator"] == paper_estimator(record) else ""
            said.append(
                f"Leak: with all advantages 1, the mean gradient of '{row['label']}'{recipe} {verdict} ({_leak(row)})."
            )
    for name, part in frames["speed"].groupby("backbone", sort=False) if len(frames["speed"]) else ():
        by_arm = {row["arm"]: row for _, row in part.iterrows()}
        shown = [f"{label_of(arm)} {with_n(by_arm[arm], 'speed_up', 2)} rounds" for arm in HEADLINE if arm in by_arm]
        text = f"Speed, one group on {name} against exact: {'; '.join(shown)}."
        if {"exact", "exact-bare"} <= by_arm.keys():
            overhead = by_arm["exact"]["fastest_s"] / by_arm["exact-bare"]["fastest_s"] - 1
            text += f" Engine over its bare model calls, fastest rounds: {overhead * 100:+.1f} %."
        said.append(text)
    return said


def _against_the_rule(family: str, ours: pd.DataFrame, rule: pd.DataFrame, windows: str) -> str:
    """Compares a family's best plans with those of the paper's rule at equal passes."""
    both = rule.merge(ours.sort_values("passes"), on="passes", suffixes=("_rule", "_ours"))
    if not len(both):
        return "no common numbers of passes to compare."
    below = both[both["cosine_ours"] < both["cosine_rule"]]["passes"].unique().tolist()
    where = f"lower at {', '.join(map(str, below))} passes" if below else "at least as high at all of them"
    others = ", at least as high at the others" if 0 < len(below) < both["passes"].nunique() else ""
    return (
        f"against the paper's rule with its best fraction and window of {windows} at the same number of passes "
        f"({both['passes'].min()} to {both['passes'].max()}), {family}'s mean cosine is {where}{others}."
    )


def _pairs(pairs: pd.DataFrame, record: Record) -> list[str]:
    """Compares every plan that may be recommended with the paper's recipe, and says how many more samples would tell.

    Undefined differences share a sentence.
    """
    if not len(pairs):
        return []
    paper, said = paper_estimator(record), []
    undefined: dict[tuple[float, int, int], list[str]] = {}
    ours = recommended_families(record)
    own_names = {cell.settings.get("estimator") for cell in record.cells if cell.settings.get("family") in ours}
    for _, row in pairs[(pairs["beside_name"] == paper) & pairs["plan_name"].isin(own_names)].iterrows():
        plan = f"'{row['plan']}' ({row['plan_passes']} passes)"
        if pd.isna(row["difference"]):
            undefined.setdefault((row["eta"], row["beside_passes"], row["samples"]), []).append(plan)
            continue
        text = f"eta {row['eta']:g}, {plan} beside {_recipe(record, row['beside_passes'])}: "
        measured = f"difference in the share of the signal that is kept {with_n(row, 'difference')}"
        if row["verdict"] == TOO_FEW:
            text += f"{row['verdict']}; {measured}."
        elif row["verdict"] != UNTOLD:
            text += f"it {row['verdict']} of the signal; {measured}, from {row['samples']} samples."
        else:
            more = "" if pd.isna(row["more_samples"]) else f"; about {int(row['more_samples'])} more would tell"
            text += f"which is better cannot be told with {row['samples']} samples{more}; {measured}."
        said.append(text)
    for (eta, passes, samples), plans in undefined.items():
        named = plans[0] if len(plans) == 1 else f"{len(plans)} plans ({', '.join(plans)})"
        said.append(
            f"eta {eta:g}, {named} beside {_recipe(record, passes)}: undefined, as the signal cannot be told from zero "
            f"with {samples} samples; take more of them."
        )
    return said


def _recipe(record: Record, passes: int) -> str:
    return f"the paper's recipe ({passes} passes) in an update of {record.settings['update_samples']} samples"


def _fractions(routing: pd.DataFrame) -> list[str]:
    """``jagg_frac`` at the threshold that was asked for, a sentence per eta."""
    said = []
    for eta, part in routing[routing["asked_for"]].groupby("eta", sort=False) if len(routing) else ():
        each = [f"{with_n(row, 'jagg_frac', 2)} (W = {row['window']})" for _, row in part.iterrows()]
        said.append(
            f"eta {eta:g}: jagg_frac that keeps every approximated group of the paper's rule at a cosine of "
            f"{part['threshold'].iloc[0]:g}: {', '.join(each)}."
        )
    return said


def _leaks(centring: pd.DataFrame) -> list[str]:
    """Plans whose mean gradient does not vanish when all advantages are 1."""
    said = []
    for eta, part in centring[centring["centring"] == "ones"].groupby("eta", sort=False) if len(centring) else ():
        each = [f"'{row['label']}' {_leak(row)}" for _, row in part.iterrows()]
        said.append(f"eta {eta:g}: the leak, with all advantages 1 (none: 0): {'; '.join(each)}.")
    return said


def _leak(row: pd.Series) -> str:
    """``|mu|^2 / V = 2.05 [1.3, 2.8], n = 8, p <= 0.0078``."""
    return f"|mu|^2 / V = {with_n(row, 'share')}, {row['p_text']}"
