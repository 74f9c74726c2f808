"""The README's code runs, the files it points to exist, and its table is what the records say."""

from __future__ import annotations

import re
from pathlib import Path

import pandas as pd
import torch

from bench.speed_ups import update_speed_ups
from jagg_core.backbones.check import check_backbone
from jagg_core.records import Record

ROOT = Path(__file__).parents[1]
REFERENCE = ROOT / "results" / "reference"
README = (ROOT / "README.md").read_text()
BACKBONES = (ROOT / "docs" / "backbones.md").read_text()
CODE = re.compile(r"```python\n(.*?)```", re.DOTALL)


def run(code: str) -> dict[str, object]:
    names: dict[str, object] = {}
    exec(compile(code, "README.md", "exec"), names)
    return names


def test_the_trainer_example_leaves_gradients(capsys) -> None:  # type: ignore[no-untyped-def]
    [trainer] = CODE.findall(README)
    names = run(trainer)
    assert capsys.readouterr().out.split() == ["8", "closed_form", "batched"]
    parameters = names["policy"].parameters()  # type: ignore[attr-defined]
    assert sum(p.grad is not None and bool(p.grad.any()) for p in parameters) > 100


def test_the_backbone_example_is_short_and_keeps_the_contract() -> None:
    [backbone] = CODE.findall(BACKBONES)
    assert len(backbone.splitlines()) <= 35
    load = run(backbone)["load"]
    findings = check_backbone(load("cpu", torch.float32))  # type: ignore[operator]
    assert [finding for finding in findings if not finding.ok] == []


def test_linked_files_exist() -> None:
    links = [link for link in re.findall(r"\]\(([^)]+)\)", README) if "://" not in link]
    assert len(links) >= 8
    assert [link for link in links if not (ROOT / link).exists()] == []


def test_it_is_short() -> None:
    assert len(README.splitlines()) <= 135


# The table: plan, passes, step time saved, cosine


def headline() -> list[list[str]]:
    """The rows as the records have them."""
    calibration = REFERENCE / "photos-flux-calibration" / "tables"
    whole = pd.read_csv(calibration / "whole_update.csv")
    front = pd.read_csv(calibration / "pareto.csv").query("passes == 8")
    recipe = whole[(whole["family"] == "jagg") & (whole["passes"] == 14) & whole["label"].str.contains("W=4, 3 of 5")]
    paper = front[front["family"] == "jagg"].sort_values("cosine").tail(1)
    shifted = {passes: whole.query("family == 'causal-predicted' and passes == @passes") for passes in (8, 5)}
    return [
        row("the paper's recipe, to the letter (W = 4, 3 of 5 groups; inferred)", recipe, saved("paper-joint")),
        row(f"the paper's rule, best window for 8 passes ({grouping(paper)})", paper, "not timed"),
        row("the paper's linear weights on searched knots", front[front["family"] == "spline"], "not timed"),
        row("**causal**, searched and shifted knots", shifted[8], saved("causal-8-sequential")),
        row("**causal**, searched and shifted knots", shifted[5], saved("causal-5-sequential")),
    ]


def row(name: str, frame: pd.DataFrame, step: str) -> list[str]:
    [found] = frame.to_dict("records")
    assert found["n"] == 8
    low, high = found["cosine_low"], found["cosine_high"]
    return [name, str(found["passes"]), step, f"{found['cosine']:.4f} [{low:.4f}, {high:.4f}]"]


def grouping(frame: pd.DataFrame) -> str:
    """Window and groups of the paper's rule, from its label."""
    [label] = frame["label"]
    window, groups = re.search(r"W=(\d+), (\d+ of \d+) groups?", label).groups()  # type: ignore[union-attr]
    return f"W = {window}, {groups} groups"


def saved(arm: str) -> str:
    """Share of exact's time of a whole step, with interval."""
    [step] = [found["step"] for found in SPEED_UPS if found["arm"] == arm]
    assert step.n == 7
    return f"{1 - 1 / step.value:.0%} [{1 - 1 / step.low:.0%}, {1 - 1 / step.high:.0%}]".replace("%", " %")


def noise() -> str:
    return saved("exact-again")


SPEED_UPS = list(update_speed_ups(Record.read(REFERENCE / "bench" / "update-photos-flux.json")))


def test_the_table_is_what_the_records_say() -> None:
    lines = README[README.index("| plan | passes of 20") :].splitlines()[2:]
    rows = [[part.strip() for part in line.strip("|").split("|")] for line in lines[:5]]
    assert rows == headline()
    assert lines[5] == ""
    assert f"against itself saves {noise()}." in " ".join(README.split())
