"""Audits of a training run: what they leave alone, what is logged, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from jagg_core.grpo import GRPOTrainer, train
from jagg_core.grpo.log import read_rows
from tests.grpo.runs import SMALL, changed, differing, tensors

AUDITED = changed(run={"audit_every": 2})


def test_a_run_with_audits_is_the_run_without(tmp_path: Path) -> None:
    plain, audited = train(SMALL, tmp_path / "plain"), train(AUDITED, tmp_path / "audited")
    assert differing(tensors(plain), tensors(audited)) == []
    rows = read_rows(tmp_path / "audited/metrics.csv")
    made = [int(row["audit_passes"]) for row in rows]
    assert [sum(made[block : block + 2]) for block in (0, 2, 4)] == [2, 2, 2]
    assert [int(row["audits"]) for row in rows][-1] == 3
    assert 0.5 < float(rows[-1]["audit_cosine"]) <= 1
    assert all((float(row["audit_s"]) > 0) is (passes > 0) for row, passes in zip(rows, made, strict=True))
    [passes] = {row["passes"] for row in rows}
    assert passes == "2"


def test_a_resumed_run_goes_on_with_its_audits(tmp_path: Path) -> None:
    whole = train(AUDITED, tmp_path / "whole")
    train(changed(AUDITED, run={"updates": 3}), tmp_path / "run")
    resumed = train(AUDITED, tmp_path / "run", resume=True)
    assert whole.meter is not None and resumed.meter is not None
    assert resumed.meter.state() == whole.meter.state()
    columns = [
        name for name in read_rows(tmp_path / "run/metrics.csv")[0] if name.startswith("audit") and name[-2:] != "_s"
    ]
    assert len(columns) == 5
    for ours, theirs in zip(*(read_rows(tmp_path / f"{name}/metrics.csv") for name in ("run", "whole")), strict=True):
        assert [ours[name] for name in columns] == [theirs[name] for name in columns]


def test_a_run_begun_without_audits_resumes_with_them(tmp_path: Path) -> None:
    train(changed(run={"updates": 3}), tmp_path)
    resumed = train(AUDITED, tmp_path, resume=True)
    assert resumed.meter is not None and resumed.meter.fidelity().audits >= 1


@pytest.mark.parametrize(
    "sections",
    [
        {"model": {"options": ("lora_rank=2",), "ema_decay": 0.0}},
        {"model": {"dtype": "bfloat16"}},
        {"optimizer": {"steps_per_rollout": 2, "epochs": 2}, "objective": {"clip_range": 1.0}},
        {"plan": {"predict": True}},
        {"plan": {"keep_graphs": True}},
        {"rollout": {"trained": "random", "fraction": 0.8}},
    ],
    ids=["lora", "half", "off policy", "shifted", "graphs", "random"],
)
def test_every_kind_of_update_is_audited(sections: dict[str, dict[str, Any]]) -> None:
    trainer = GRPOTrainer(changed(**sections, run={"audit_every": 1}))
    metrics = trainer.step()
    assert metrics.audits == trainer.learner.steps
    assert metrics.audit_cosine is not None and 0 < metrics.audit_cosine <= 1


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ({"estimator": "jagg", "knots": (), "window": 4, "jagg_frac": 1.0}, "does not look ahead, got 'jagg"),
        ({"estimator": "spline", "knots": (0, 3)}, "does not look ahead, got 'spline"),
        ({"knots": (1, 2)}, "does not look ahead, got 'causal"),
        ({"estimator": "subsample", "knots": (), "passes": 2}, "uses every step, got 'subsample"),
    ],
)
def test_plans_without_a_meter_are_refused(plan: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        changed(AUDITED, plan=plan)


def test_pathwise_gradients_are_refused() -> None:
    with pytest.raises(ValueError, match="audit_every is for the policy gradient: upstream must not be pathwise"):
        changed(AUDITED, plan={"upstream": "pathwise"}, rollout={"samples": 3})


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"audit_every": -1}, "audit_every must be at least 0"), ({"audit_below": 1.0}, "audit_below must be at least 0")],
)
def test_settings_out_of_range_are_named(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        changed(run=settings)
