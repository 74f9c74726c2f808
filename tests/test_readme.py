"""The README's code runs, the files it points to exist, and its headline table is what the records say."""

from __future__ import annotations

import json
import re
from pathlib import Path
from statistics import median

import pandas as pd
import pytest
import torch

from bench.cost import Machine, Update, predict
from bench.speed_ups import update_speed_ups
from bench.work import PassWork
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


def test_it_takes_ten_minutes_to_read() -> None:
    """At 230 words a minute."""
    assert len(README.split()) < 2300


# The table on top: plan, passes, published, predicted, measured, cosine, reward

TABLE = [[part.strip() for part in line.strip("|").split("|")] for line in README.splitlines() if line[:1] == "|"][2:9]
ROWS = {
    "paper": ("paper", "paper", ("jagg-w4-f0.6", 0.7), "paper-0.6"),
    "closed": ("closed-sequential", "jagg-closed-form-sequential", ("jagg-w4-f0.6", 0.7), "paper-0.6"),
    "causal-8": ("causal-8-sequential", "causal-8-sequential", 8, "causal-8"),
    "causal-5": ("causal-5-sequential", "causal-5-sequential", 5, "causal-5"),
    "paper, all": ("paper-all", None, ("jagg-w4-f1", 0.7), "paper-1.0"),
    "paper, best": ("causal-8-sequential", None, "jagg", None),
    "random": ("causal-8-sequential", None, ("subsample-8", 0.7), "subsample-8"),
}
"""Names of each row in the cost model, the record of updates, the main job or the calibration, and the curves."""


def percent(saved: float) -> str:
    return f"{saved:.1%}".replace("%", " %")


def predicted(name: str) -> str:
    """Share of a training step of Flux that is saved on one device, with checkpointing: whatever a pass costs."""
    work = PassWork(forward=1e12, backward=2e12, parameters=1)
    settings = {"paper-all": Update(jagg_frac=1.0)}.get(name, Update())
    times = {p.scheme: p.step for p in predict(work, settings, Machine(), [1])}
    return percent(1 - times[name.replace("-all", "")] / times["exact"])


def cosine(where: tuple[str, float] | int | str) -> str:
    """Of the main job, of the calibration with predicted knots, or of the best of a family at 8 passes."""
    if isinstance(where, str):
        plans_judged = pd.read_csv(REFERENCE / "photos-flux-calibration" / "tables" / "pareto.csv")
        return f"{plans_judged.query('family == @where and passes == 8')['cosine'].max():.3f}"
    if isinstance(where, int):
        plans = json.loads((REFERENCE / "photos-flux-calibration" / "calibration-eta0.7.json").read_text())["plans"]
        return f"{plans['causal'][str(where)]['predicted']['held_out_cosine']['value']:.3f}"
    frame = pd.read_csv(REFERENCE / "photos-flux" / "tables" / "whole_update.csv")
    [value] = frame[(frame["estimator"] == where[0]) & (frame["eta"] == where[1])]["cosine"]
    return f"{value:.3f}"


def reward(arm: str) -> str:
    """Differences to exact by backbone, as far as the arm was trained there; bold where they are worse."""
    said = []
    for name in ("digits-flux", "photos-flux", "photos-qwen"):
        rows = pd.read_csv(REFERENCE / f"{name}-curves" / "tables" / "arms.csv").set_index("arm")
        if arm in rows.index:
            text = f"{rows.loc[arm, 'difference']:+.3f}"
            said.append(f"**{text}**" if rows.loc[arm, "verdict"].startswith("worse") else text)
    return ", ".join(said)


@pytest.mark.parametrize(("row", "found"), list(zip(ROWS, TABLE, strict=True)), ids=list(ROWS))
def test_the_headline_is_what_the_records_say(row: str, found: list[str]) -> None:
    in_model, in_updates, at, arm = ROWS[row]
    _, _, _, said_predicted, said_measured, said_cosine, said_reward = found
    assert said_predicted == predicted(in_model)
    assert said_cosine == cosine(at)
    if arm:
        assert said_reward == reward(arm)
    if in_updates:
        record = Record.read(REFERENCE / "bench" / "update-photos-flux.json")
        [step] = [found["step"].value for found in update_speed_ups(record) if found["way"] == in_updates]
        assert said_measured == f"{1 - 1 / step:.0%}".replace("%", " %")


def test_the_rollouts_share_of_a_step() -> None:
    cells = {cell.name: cell for cell in Record.read(REFERENCE / "bench" / "update-photos-flux.json").cells}
    times = {name: median(cells[name].samples["total_s"]) for name in ("rollout", "reward", "exact", "optimizer")}
    assert f"{times['rollout'] / sum(times.values()):.0%}".replace("%", " %") in README


def sharpness(backbone: str) -> tuple[pd.Series, pd.Series]:
    """By arm: its difference to exact's as a share of that, as README has it, and where it lies."""
    frame = pd.read_csv(REFERENCE / f"{backbone}-curves" / "tables" / "watched.csv")
    rows = frame[frame["reward"] == "sharpness"].set_index("arm")
    return (rows["difference"] / rows["exact"]).map(lambda share: f"{share:+.0%}".replace("%", " %")), rows["place"]


def test_what_training_did_to_sharpness() -> None:
    share, places = sharpness("photos-flux")
    other, _ = sharpness("photos-qwen")
    said = re.findall(r"[+-]\d+ %", README[README.index("makes images noisier") :].split("Calibrate")[0])
    assert said == [share["paper-1.0"], share["paper-0.6"], share["causal-8"], other["paper-1.0"]]
    assert share["causal-8"] == share["causal-5"]
    assert list(places.index[places == "higher than exact's"]) == ["paper-1.0"]


def test_both_photographs_end_lower_with_the_papers_rule_on_all_groups() -> None:
    """A difference below one percent of exact's gain counts as none."""
    assert "lower than exact's in seven of eight seeds and equal in one" in README
    for name, lower in (("photos-flux", 3), ("photos-qwen", 4)):
        rows = pd.read_csv(REFERENCE / f"{name}-curves" / "tables" / "arms.csv").set_index("arm")
        assert rows.loc["paper-1.0", ["seeds", "seeds_lower", "seeds_higher"]].tolist() == [4, lower, 0]
