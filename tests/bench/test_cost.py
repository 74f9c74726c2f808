"""The cost model: known ratios, what is left over, collectives, and the paper's figures from stated assumptions."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from bench.__main__ import main
from bench.arms import ARMS, Tally, in_one_pass, one_by_one
from bench.cost import (
    Machine,
    Prediction,
    Update,
    fit,
    predict,
    seconds,
)
from bench.work import PassWork, count_work
from jagg_core.backbones import list_backbones
from jagg_core.records import Cell, Record
from jagg_core.strict_json import RecordError
from tests.bench import wide

WORK = PassWork(forward=1e12, backward=2e12, parameters=1_000_000_000)
ALONE = Machine(tflops=1.0)
"""A forward takes a second; on one device nothing is communicated."""

PUBLISHED = json.loads((Path(__file__).parents[2] / "results" / "paper" / "published.json").read_text())["figures"]


@pytest.mark.parametrize(
    ("arm", "units"),
    [("exact", 20), ("prototype", 13), ("paper-joint", 11), ("closed-form-sequential", 8), ("closed-form-batched", 8)],
)
def test_units_of_a_group_of_five(arm: str, units: float) -> None:
    """Forward 1, backward 3 with checkpointing."""
    assert seconds(Update(window=5).group(ARMS[arm]), WORK, ALONE, 1) == pytest.approx(units)


def test_without_checkpointing_a_backward_is_two_forwards() -> None:
    plain = replace(ALONE, checkpointing=False)
    assert seconds(one_by_one(5), WORK, plain, 1) == pytest.approx(15)
    assert seconds(Update(window=5).group(ARMS["paper-joint"]), WORK, plain, 1) == pytest.approx(9)


def test_samples_and_rate_scale_time() -> None:
    assert seconds(one_by_one(1), WORK, replace(ALONE, samples=6), 1) == pytest.approx(24)
    assert seconds(one_by_one(1), WORK, replace(ALONE, tflops=2.0), 1) == pytest.approx(2)


def test_a_plan_without_groups_costs_its_passes() -> None:
    update = Update(steps=21, window=4, passes=(8,))
    found = {arm.name: arm for arm in update.arms()}
    assert update.tally(found["causal-8-sequential"]) == Tally(8, 8, 16, 8)
    assert update.tally(found["causal-8-batched"]) == Tally(8, 8, 2, 1)
    assert update.group(found["causal-8-sequential"]).forwards == pytest.approx(8 * 4 / 20)
    times = {p.arm.name: p.step for p in predict(WORK, update, ALONE, [1])}
    assert times["causal-8-sequential"] == pytest.approx(21 + 8 * 4)


def test_no_plan_has_more_passes_than_steps() -> None:
    calibrated = [arm.name for arm in Update(steps=6, passes=(8, 5)).arms() if arm.passes is not None]
    assert calibrated == ["causal-5-sequential", "causal-5-batched"]
    with pytest.raises(ValueError, match=r"passes must be at least 1, got \[8, 0\]"):
        Update(passes=(8, 0))


def test_left_over_steps_are_exact() -> None:
    update = Update(steps=23, window=4, jagg_frac=0.6)  # 22 trained: 5 groups, 3 of them approximated, 2 steps left
    assert update.tally(ARMS["paper-joint"]) == Tally(12 + 10, 6 + 10, 3 * 6 + 2 * 10, 3 + 10)
    assert update.tally(ARMS["exact"]) == one_by_one(22)
    assert update.tally(ARMS["exact-batched"]) == in_one_pass(4).times(5) + in_one_pass(2)
    assert update.tally(ARMS["exact-deferred"]) == Tally(22, 22, 44, 1)


@pytest.mark.parametrize("frac", [0.0, 1.0])
def test_the_ends_of_jagg_frac(frac: float) -> None:
    tally = Update(steps=21, window=5, jagg_frac=frac).tally(ARMS["closed-form-batched"])
    assert tally == (one_by_one(20) if frac == 0 else in_one_pass(2).times(4))


def test_speed_ups_of_parts_and_of_the_whole_step() -> None:
    """Rollout and other 60, forwards 10, backwards 20; half of the backwards saved: 2, 1.5 and 1.125."""
    work, update = PassWork(2.5e12, 5e12, 1), Update(steps=5, window=4, jagg_frac=1.0)
    rollout, trained = 5 * 2.5, 4 * 7.5
    machine = Machine(tflops=1.0, checkpointing=False, other=(60 - rollout) / (rollout + trained))
    found = {p.arm.name: p for p in predict(work, update, machine, [1])}
    exact, paper = found["exact"], found["paper-joint"]
    assert exact.step == pytest.approx(90)
    assert exact.tally.backwards / paper.tally.backwards == 2
    assert exact.update / paper.update == pytest.approx(1.5)
    assert exact.step / paper.step == pytest.approx(1.125)


def test_communication_that_does_not_hide() -> None:
    machine = Machine(tflops=1.0, bandwidth=1.0, overlap=0.0, checkpointing=False)
    # 2 bytes per gathered parameter, 4 per scattered gradient, half of each from the other rank
    assert seconds(one_by_one(1), WORK, machine, 2) == pytest.approx(3 + (2 * 2 + 4) / 2)
    assert seconds(one_by_one(1), WORK, machine, 1) == pytest.approx(3)
    hidden = replace(machine, overlap=1.0)
    assert seconds(one_by_one(1), WORK, hidden, 2) == pytest.approx(3 + (4 - 3))
    assert seconds(one_by_one(1), WORK, replace(hidden, bandwidth=2.0), 2) == pytest.approx(3)


def test_one_pass_for_both_ends_gathers_once() -> None:
    slow = Machine(bandwidth=1.0, overlap=0.0)
    found = {p.arm.name: p.group for p in predict(WORK, Update(), slow, [8])}
    assert found["closed-form-batched"] < found["closed-form-sequential"] < found["paper-joint"] < found["exact"]
    assert found["exact-batched"] < found["exact"]
    whole = {p.arm.name: p.update for p in predict(WORK, Update(), slow, [8])}
    assert whole["exact-deferred"] < whole["exact"]


def reduction(predictions: list[Prediction], arm: str, what: str) -> float:
    """Computes the share of exact's time that an arm saves of ``what`` (update or step)."""
    times = {p.arm.name: getattr(p, what) for p in predictions}
    return float(1 - times[arm] / times["exact"])


@pytest.mark.parametrize("figure", [f for f in PUBLISHED if f["what"] == "training step"], ids=lambda f: f["backbone"])
def test_the_published_steps_follow_from_the_assumptions(figure: dict[str, float]) -> None:
    """W = 4, 3 of 5 groups, checkpointing, nothing beside rollout and update: within 3 points."""
    found = predict(WORK, Update(steps=21, window=4, jagg_frac=0.6), ALONE, [1])
    assert reduction(found, "paper-joint", "step") == pytest.approx(figure["reduction"], abs=0.03)


def test_the_published_update_stage_is_that_without_inner_forwards() -> None:
    """With them 22.5 % are predicted, 7 points below what is published; without, 30.0 %."""
    [figure] = [f for f in PUBLISHED if f["what"] == "update stage"]
    found = predict(WORK, Update(steps=21, window=4, jagg_frac=0.6), ALONE, [1])
    assert reduction(found, "paper-joint", "update") == pytest.approx(0.225)
    assert reduction(found, "closed-form-sequential", "update") == pytest.approx(figure["reduction"], abs=0.03)


@pytest.mark.parametrize(
    ("build", "match"),
    [
        (lambda: Machine(tflops=0), "tflops must be positive, got 0"),
        (lambda: Machine(bandwidth=float("nan")), "bandwidth must be positive, got nan"),
        (lambda: Machine(overlap=1.5), r"overlap must be between 0 and 1, got 1\.5"),
        (lambda: Machine(other=-1), "other must be at least 0, got -1"),
        (lambda: Machine(samples=0), "samples must be at least 1, got 0"),
        (lambda: Update(steps=1), "steps must be at least 2, got 1"),
        (lambda: Update(window=21), "window must be between 1 and the 20 trained steps, got 21"),
        (lambda: Update(jagg_frac=2), "jagg_frac must be between 0 and 1, got 2"),
        (lambda: predict(WORK, Update(), ALONE, [8, 0]), r"ranks must be different numbers .* got \[8, 0\]"),
        (lambda: predict(WORK, Update(), ALONE, []), r"ranks must be different numbers of at least 1, got \[\]"),
    ],
)
def test_settings_out_of_range(build: object, match: str) -> None:
    assert callable(build)
    with pytest.raises(ValueError, match=match):
        build()


# The command


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Counting a full-size model takes half a minute; here it is told."""
    asked: list[object] = []

    def count(*arguments: object) -> PassWork:
        asked.append(arguments)
        return WORK

    monkeypatch.setattr("bench.work.count_work", count)
    return asked


def group_record(path: Path, **totals: float) -> Path:
    """A record of ``bench group``: a forward of 1 s, a backward of 2 s, W = 5, and other arms' totals."""
    cells = [Cell("exact", samples={"forward_s": [5.0, 5.0, 9.0], "backward_s": [10.0] * 3, "total_s": [15.0] * 3})]
    cells += [Cell(name, samples={"total_s": [total]}) for name, total in totals.items()]
    Record("group-speed", [], "digits-flux", {"window": 5, "batch": 4}, {}, cells=cells).write(path)
    return path


def test_the_command(tmp_path: Path, counted: list[object], capsys: pytest.CaptureFixture[str]) -> None:
    measured = group_record(tmp_path / "speed.json", **{"paper-joint": 10.0, "closed-form-batched": 6.0})
    options = ["--backbone-options", "height=720", "--backbone-options", "width=720", "--ranks", "1", "64"]
    settings = ["--window", "5", "--tflops", "1", "--guidance", "1", "--measured", str(measured)]
    main(["cost", "--backbone", "qwen-image", *options, *settings, "--out", str(tmp_path / "run")])
    assert counted == [("qwen-image", {"height": 720, "width": 720}, 1.0)]
    record = Record.read(tmp_path / "run" / "record.json")
    assert (record.kind, record.backbone) == ("cost", "qwen-image")
    assert record.cell("work").values["forward"] == 1e12
    assert record.cell("exact/ranks=1").values["update_s"] == pytest.approx(80)
    assert len(record.cells) == 1 + 2 * len(Update().arms()) + 1
    fitted = record.cell("measured-0").values
    assert (fitted["forward_s"], fitted["backward_s"]) == (1.0, 2.0)
    assert fitted["arms"]["paper-joint"] == {"predicted_s": 9.0, "measured_s": 10.0, "error": pytest.approx(-0.1)}
    assert fitted["arms"]["closed-form-batched"]["error"] == pytest.approx(0)
    printed = capsys.readouterr().out
    assert "64 devices" in printed and "closed-form-batched" in printed


@pytest.mark.parametrize(
    ("flags", "match"),
    [
        (["--backbone", "flux"], "did you mean 'flux-dev'"),
        (["--backbone-options", "hight=720"], "did you mean 'height'"),
        (
            ["--backbone-options", "path=/models/FLUX"],
            "backbone_options must leave weights out, as the published configuration is counted, got path",
        ),
        (["--ranks", "0"], "ranks must be different numbers of at least 1"),
        (["--overlap", "2"], "overlap must be between 0 and 1, got 2"),
        (["--window", "50"], "window must be between 1 and the 20 trained steps, got 50"),
        (["--measured", "nowhere.json"], "nowhere.json"),
    ],
)
def test_what_the_command_refuses(
    flags: list[str], match: str, counted: list[object], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["cost", *flags, "--out", str(tmp_path / "run")])
    assert caught.value.code == 2 and match in capsys.readouterr().err
    assert counted == []


@pytest.mark.parametrize("name", ["digits-flux", "photos-qwen", "tests.bench.wide:deep"])
def test_models_with_weights_of_their_own_are_counted(name: str, tmp_path: Path) -> None:
    """The shipped ones, and yours, which know no random weights."""
    main(["cost", "--backbone", name, "--ranks", "1", "--out", str(tmp_path)])
    work = Record.read(tmp_path / "record.json").cell("work").values
    entry = next((e for e in list_backbones() if e.name == name), None)
    assert work["parameters"] == (entry.parameters if entry else 17 * 32 + 32 + 2 * (32 * 32 + 32) + 32 * 16 + 16)
    assert work["forward"] > 0 and work["backward"] / work["forward"] == pytest.approx(2, rel=0.03)


def test_a_pass_is_counted_by_hand() -> None:
    """17 inputs, two blocks of 32, 16 outputs; and the gradient of every input, as prompts are learned."""
    work = count_work("tests.bench.wide:deep", {})
    assert work == PassWork(2 * (17 * 32 + 2 * 32 * 32 + 32 * 16), 4 * (17 * 32 + 2 * 32 * 32 + 32 * 16), 3216)


def test_a_model_that_the_meta_device_cannot_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    def reads_weights(device: str, dtype: torch.dtype) -> object:
        return torch.empty(2, device=device).cpu()

    monkeypatch.setattr(wide, "load", reads_weights)
    with pytest.raises(ValueError, match=r"backbone .*wide:load' cannot be counted on the device meta in bf"):
        count_work("tests.bench.wide:load", {})


WITHOUT_WEIGHTS = """
import logging
from bench.group import load
from bench.settings import GroupBench
try:
    load(GroupBench("flux-dev", backbone_options=("path=/nowhere",)))
except ValueError as error:
    print(error)
logging.getLogger("transformers.utils.import_utils").warning("something else of the same source")
"""


@pytest.mark.slow
def test_what_transformers_says_of_torchvision_is_not_passed_on() -> None:
    """The only one of its remarks."""
    done = subprocess.run([sys.executable, "-c", WITHOUT_WEIGHTS], capture_output=True, text=True, timeout=200)
    assert "/nowhere" in done.stdout
    assert "torchvision" not in done.stderr and "something else of the same source" in done.stderr


def test_a_record_of_something_else_is_no_measurement(tmp_path: Path) -> None:
    Record("reproduce", [], "digits-flux", {}, {}).write(tmp_path / "record.json")
    with pytest.raises(RecordError, match=r"kind must be that of python -m bench group, .*got 'reproduce'"):
        fit(Record.read(tmp_path / "record.json"))


@pytest.mark.parametrize("name", ["digits-flux", "photos-flux"])
def test_the_model_on_stored_measurements(name: str) -> None:
    """Within a third of the measured time for every arm, on a noisy machine where batching gains what it can."""
    stored = Path(__file__).parents[2] / "results" / "reference" / "photos-flux" / f"speed-{name}.json"
    found = fit(Record.read(stored))
    assert found["forward_s"] < found["backward_s"]
    assert {"paper-joint", "closed-form-sequential"} <= found["arms"].keys()
    assert all(abs(found["arms"][arm]["error"]) < 1 / 3 for arm in ("paper-joint", "closed-form-sequential"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "options", "teraflop", "billions"),
    [("flux-dev", {}, 37.3, 11.90), ("qwen-image", {"text_tokens": 256}, 34.9, 20.43)],
)
def test_counted_work_of_full_size_models(
    name: str, options: dict[str, object], teraflop: float, billions: float
) -> None:
    """At 720x720, without guidance by a second velocity."""
    guidance = {} if name == "flux-dev" else {"guidance": 1.0}
    work = count_work(name, options | {"height": 720, "width": 720}, **guidance)
    assert work.forward == pytest.approx(teraflop * 1e12, rel=2e-3)
    assert work.backward / work.forward == pytest.approx(2, rel=2e-3)
    assert work.parameters / 1e9 == pytest.approx(billions, abs=0.01)
