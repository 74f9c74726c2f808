"""The page of training runs, from folders written by hand and from one that was trained."""

from __future__ import annotations

import json
import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch

from analysis.__main__ import main
from analysis.report.run import pictures_of, sentences, write_run_report
from analysis.report.run_tables import all_tables, arms, by_update, ends, knots, logged, read_runs
from analysis.report.write import write_report
from jagg_core.grpo import train
from jagg_core.grpo.log import Log, Pictures
from jagg_core.strict_json import plain
from tests.grpo.runs import changed


def stored(folder: Path, *, seed: int = 0, gain: float = 0.1, pace: float = 2.0, **sections: dict[str, Any]) -> Path:
    """A folder as training leaves it: four updates, two evaluations, of which the reward grows by ``gain``."""
    run = {"seed": seed, "eval_every": 2, "eval_rewards": ("sharpness",)}
    config = changed(run=run | sections.pop("run", {}), **sections)
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(plain(asdict(config))))
    metrics, evaluation = Log(folder / "metrics.csv", 0), Log(folder / "evaluation.csv", 0)
    for update in range(1, 5):
        figures = {"reward_mean": 0.3 + gain * update, "log_ratio_max": 0.0, "clipped_share": 0.0, "grad_norm": 0.5}
        stages = {"total_s": pace, "rollout_s": pace / 4, "backward_s": pace / 2}
        counts = {"groups_without_signal": 0, "passes": 2, "skipped": 0, "reason": ""}
        metrics.add({"update": update, **figures, **counts, **stages})
        if update % 2 == 0:
            evaluation.add({"update": update, "ink": 0.2 + gain * update, "sharpness": 0.5, "evaluation_s": 1.0})
    return folder


def lines_of(*folders: Path) -> list[str]:
    runs = read_runs(folders)
    return sentences(runs, all_tables(runs))


def test_a_run_that_was_trained_has_a_page(tmp_path: Path) -> None:
    run = {"updates": 2, "eval_every": 1, "eval_prompts": 2, "eval_samples": 2, "samples_every": 1}
    plan = {"knots": (0, 2), "recalibrate_every": 1}
    train(changed(run={**run, "eval_rewards": ("sharpness",)}, plan=plan), tmp_path)
    page, shown, lines = write_report(tmp_path)
    text = page.read_text()
    assert page == tmp_path / "report.html" and len(text) < 2e6
    assert not re.search(r"""(?:src|href)=["'](?!data:|tables/|figures/|#)""", text)
    names = {"reward", "policy", "watched", "seconds", "knots", "recalibration"}
    assert {path.stem for path in (tmp_path / "figures").glob("*.png")} == names
    assert text.count("<img") == len(names) + 3 and "after update 0" in text
    assert len(lines) == 3 and lines[0].startswith("Reward ink, held out, updates 1 to 2: from ")
    assert list(shown["arms"]["arm"]) == ["causal"]
    log = pd.read_csv(tmp_path / "tables/log.csv")
    for name in ("metrics", "evaluation"):
        for _, row in pd.read_csv(tmp_path / f"{name}.csv").drop(columns="reason", errors="ignore").iterrows():
            of = log[(log["log"] == name) & (log["update"] == row["update"])].set_index("figure")["value"]
            assert of.to_dict() == pytest.approx(row.drop("update").dropna().to_dict(), rel=1e-5)


def test_seeds_become_means_with_intervals_and_arms_are_compared_by_shared_seeds(tmp_path: Path) -> None:
    exact = {"estimator": "exact", "knots": ()}
    gains = {0: (0.1, 0.2), 1: (0.2, 0.4)}
    folders = [stored(tmp_path / f"exact-{s}", seed=s, gain=g[0], plan=exact) for s, g in gains.items()]
    folders += [stored(tmp_path / f"causal-{s}", seed=s, gain=g[1], pace=1.0) for s, g in gains.items()]
    runs = read_runs(folders)
    assert [run.arm for run in runs] == ["exact", "exact", "causal, knots 0 2", "causal, knots 0 2"]
    table = logged(runs)
    means = by_update(table)
    row = means[(means["arm"] == "exact") & (means["figure"] == "ink") & (means["update"] == 4)].iloc[0]
    half = 12.7062047 * 0.2  # t with one degree of freedom times the standard error of 0.6 and 1.0
    assert (row["n"], row["mean"]) == (2, pytest.approx(0.8))
    assert (row["low"], row["high"]) == (pytest.approx(0.8 - half), pytest.approx(0.8 + half))
    result = arms(runs, table, ends(runs, table)).iloc[1]
    half = 12.7062047 * 0.2  # of the differences 0.4 and 0.8
    assert result["ink difference"] == pytest.approx(0.6)
    assert result["ink difference_low"] == pytest.approx(0.6 - half)
    assert result["sharpness difference"] == 0
    assert (result["seconds"], result["seconds_ratio"]) == (pytest.approx(1), pytest.approx(0.5))
    page, _, lines = write_run_report(folders, tmp_path / "page")
    assert "not resolved" in lines[0] and "0.50 [0.50, 0.50] of the first's" in lines[1]
    assert page.parent == tmp_path / "page" and not (folders[0] / "report.html").exists()


def test_without_evaluations_the_training_samples_stand_for_the_reward(tmp_path: Path) -> None:
    folder = stored(tmp_path / "run")
    (folder / "evaluation.csv").unlink()
    runs = read_runs([folder])
    [row] = ends(runs, logged(runs)).to_dict("records")
    assert (row["held_out"], row["begins"], row["ends"]) == (False, pytest.approx(0.4), pytest.approx(0.7))
    assert lines_of(folder)[0].startswith("Reward ink, training samples, updates 1 to 4: from 0.4 to 0.7")


def test_columns_of_a_meter_and_other_logs_are_drawn(tmp_path: Path) -> None:
    folder = stored(tmp_path / "run")
    log = Log(folder / "metrics.csv", 4)
    log.add({"update": 5, "reward_mean": 0.9, "meter": 0.03, "meter_low": 0.01, "meter_high": 0.05, "total_s": 2.0})
    Log(folder / "audit.csv", 0).add({"update": 3, "cosine": 0.98})
    text = write_report(folder)[0].read_text()
    assert "Further figures" in text
    drawn = (folder / "figures/further.svg").read_text()
    assert "<!-- meter -->" in drawn and "<!-- cosine -->" in drawn and "<!-- meter low -->" not in drawn


def test_what_a_trainer_would_stop_a_run_for_is_named(tmp_path: Path) -> None:
    folder = stored(tmp_path / "run")
    assert lines_of(folder)[2] == "Look at: nothing; no update was skipped or without signal."
    evaluation, metrics = Log(folder / "evaluation.csv", 4), Log(folder / "metrics.csv", 4)
    for update, sharpness in ((6, 0.4), (8, 0.3), (10, 0.2)):
        evaluation.add({"update": update, "ink": 1.0, "sharpness": sharpness, "evaluation_s": 1.0})
    metrics.add({"update": 5, "skipped": 1, "reason": "nan", "total_s": 1.0, "groups_without_signal": 2})
    [_, _, result] = lines_of(folder)
    assert "1 of 5 updates were skipped" in result and "1 of 5 updates had prompts without signal" in result
    assert "sharpness, watched, fell from 0.5 to 0.2" in result


def test_knots_are_listed_from_the_first_update_on(tmp_path: Path) -> None:
    folder = stored(tmp_path / "run")
    row = {"update": 2, "knots_before": "0 2", "knots": "0 3", "cosine_before": 0.8, "cosine": 0.9}
    Log(folder / "recalibration.csv", 0).add(row)
    assert knots(read_runs([folder]))[["update", "knots"]].values.tolist() == [[0, "0 2"], [2, "0 3"]]


def test_large_pictures_are_reduced_for_the_page(tmp_path: Path) -> None:
    folder = stored(tmp_path / "run")
    pictures = Pictures(folder / "samples", 0, (), ["a cat"])
    for update in range(5):
        pictures.add(update, torch.rand(3, 900, 900, generator=torch.Generator().manual_seed(update)))
    [(_, some)] = pictures_of(read_runs([folder]))
    assert list(some) == [0, 2, 4]
    assert sum(map(len, some.values())) < 700_000


def test_a_run_without_a_figure_for_the_reward_has_sentences(tmp_path: Path) -> None:
    one, other = stored(tmp_path / "one"), stored(tmp_path / "other", seed=1)
    (other / "evaluation.csv").write_text("update,ink\n3,0.5\n")
    assert lines_of(one, other)[0] == "Reward: these runs share no update at which it is known."


def test_folders_that_are_no_runs_and_equal_runs_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one, other = stored(tmp_path / "one"), stored(tmp_path / "other")
    for folders, message in (
        ([one, tmp_path], "must be the folder of a training run or of a record, got no config.json"),
        ([one, other], f"runs must differ in seed or settings, got {one} and {other}"),
    ):
        with pytest.raises(ValueError, match=re.escape(message)):
            read_runs(folders)
    with pytest.raises(SystemExit):
        main(["report", str(one), str(other)])
    assert "out must be the folder of the page for 2 runs, got none" in capsys.readouterr().err
    (one / "metrics.csv").write_text("update,total_s\n")
    with pytest.raises(ValueError, match=r"metrics\.csv must have at least one update, got none"):
        write_report(one)


def test_a_run_of_an_older_version_takes_the_defaults_of_newer_settings(tmp_path: Path) -> None:
    folder = stored(tmp_path / "old", seed=1)
    config = json.loads((folder / "config.json").read_text())
    for section, name in (("run", "samples_every"), ("plan", "sweep")):
        del config[section][name]
    (folder / "config.json").write_text(json.dumps(config))
    runs = read_runs([stored(tmp_path / "new"), folder])
    assert [run.arm for run in runs] == ["causal", "causal"]
