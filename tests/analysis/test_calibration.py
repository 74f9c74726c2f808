"""Calibration files: made from a record, loaded back as plans, refused where they do not belong."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from analysis.report.fidelity.recommendation import calibration, fewest_passes, lines_to_paste, recommend
from analysis.statistics.intervals import mean_interval
from analysis.statistics.names import METRICS
from jagg_core import DanceSDE, Plan, ReplayMismatch, Trajectory, causal_plan, dance_schedule, rollout
from jagg_core.grpo.command import configure
from jagg_core.records import Cell, Record
from jagg_core.strict_json import RecordError, write_json

SIGMAS = dance_schedule(10)[:-2]


class Still:
    """A field at rest that names its backbone."""

    def velocity(self, latents: torch.Tensor, sigma: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(latents)

    def signature(self) -> dict[str, str]:
        return {"backbone": "still", "dtype": "float32"}


def trajectory_of(steps: int = 10, eta: float = 0.7) -> Trajectory:
    return rollout(Still(), dance_schedule(steps), DanceSDE(eta), torch.zeros(2, 3), seed=0)


def judged(name: str, family: str, passes: int, cosines: list[float], **settings: object) -> Cell:
    about = {"eta": 0.7, "estimator": name, "label": name, "family": family, "passes": passes, "anticipating": False}
    cosines = [cosine for cosine in cosines for _ in range(3)]
    samples = {metric: cosines for metric in METRICS}
    if "window" in settings:
        samples |= {f"w3.group{g}.{m}": [0.9 + 0.01 * g] * 9 for g in range(3) for m in METRICS}
    return Cell(f"eta=0.7/{name}", settings={**about, "headline": "window" in settings, **settings}, samples=samples)


@pytest.fixture
def record() -> Record:
    knots = {"causal": {"2": [0, 5], "4": [0, 3, 5, 7]}, "spline": {"3": [0, 4, 8]}}
    values = {family: {k: {"knots": v, "cosine": 0.9} for k, v in found.items()} for family, found in knots.items()}
    settings = {"transition": "DanceSDE(eta=0.7)", "timestep_mode": "float", "signature": {"backbone": "still"}}
    cells = [
        Cell("eta=0.7/knots", values={**values, **settings}),
        judged("causal-2", "causal", 2, [0.95, 0.96, 0.97], knots=[0, 5]),
        judged("causal-4", "causal", 4, [0.99, 0.992, 0.994], knots=[0, 3, 5, 7]),
        judged("jagg-w3-f1", "jagg", 6, [0.98, 0.981, 0.982], window=3, jagg_frac=1.0),
    ]
    return Record(
        kind="reproduce",
        command=[],
        backbone="still",
        settings={"threshold": 0.9, "windows": [3], "etas": [0.7]},
        seeds={"calibration eta=0.7": [1], "calibration eta=0.3": [2]},
        schedule=SIGMAS.tolist(),
        cells=cells,
    )


@pytest.fixture
def path(record: Record, tmp_path: Path) -> Path:
    data = calibration(record, 0.7)
    write_json(tmp_path / "calibration.json", data)
    return tmp_path / "calibration.json"


def test_plan_comes_back(path: Path) -> None:
    plan = Plan.from_calibration(path, passes=4, trajectory=trajectory_of())
    expected = causal_plan(SIGMAS, [0, 3, 5, 7])
    assert plan.knots == expected.knots
    assert torch.equal(plan.weights, expected.weights)
    assert plan.sigmas is not None
    assert torch.equal(plan.sigmas, SIGMAS)


def test_file_holds_groups_fraction_and_held_out_cosines(record: Record) -> None:
    data = calibration(record, 0.7)
    window = data["windows"]["3"]
    assert window["jagg_frac"] == 1.0
    # three whole groups of three steps, cosines as planted
    assert [g["cosine"] for g in window["per_group"]] == pytest.approx([0.90, 0.91, 0.92])
    assert data["plans"]["causal"]["4"]["held_out_cosine"]["value"] == pytest.approx(0.992)
    assert data["plans"]["spline"]["3"]["held_out_cosine"] is None
    assert data["seeds"] == {"calibration eta=0.7": [1]}
    json.dumps(data, allow_nan=False)


def test_a_plan_with_predicted_knots_comes_back(path: Path) -> None:
    plan = Plan.from_calibration(path, passes=4, predict=True, trajectory=trajectory_of())
    expected = causal_plan(SIGMAS, [0, 3, 5, 7], predict=True)
    assert plan.knots == expected.knots
    assert plan.knot_sigmas is not None
    assert expected.knot_sigmas is not None
    assert torch.equal(plan.knot_sigmas, expected.knot_sigmas)


def test_how_the_fraction_depends_on_the_threshold(record: Record) -> None:
    """Cosines of the three groups are 0.90, 0.91 and 0.92."""
    spoilt = record.cell("eta=0.7/jagg-w3-f1").samples
    spoilt["w3.group2.cosine"] = [0.86] * 9
    window = calibration(record, 0.7)["windows"]["3"]
    assert window["jagg_frac"] == pytest.approx(2 / 3)
    assert window["jagg_frac_ci"] == pytest.approx([2 / 3, 2 / 3])
    found = {row["threshold"]: row["jagg_frac"] for row in window["sensitivity"]}
    assert found == {0.8: 1, 0.85: 1, 0.9: pytest.approx(2 / 3), 0.95: 0, 0.97: 0, 0.99: 0}
    record.settings["threshold"] = 0.905
    other = calibration(record, 0.7)["windows"]["3"]
    assert other["jagg_frac"] == 0
    assert [row["threshold"] for row in other["sensitivity"]] == [0.8, 0.85, 0.9, 0.905, 0.95, 0.97, 0.99]
    # nothing is said of a signal that was not measured
    assert "jagg_frac_by_signal" not in window


def test_what_is_recommended_is_the_plan_that_the_text_names(record: Record) -> None:
    record.settings["min_cosine"] = 0.94
    found = calibration(record, 0.7)["recommended"]
    assert set(found) == {"cosine >= 0.94", "cosine >= 0.99"}
    assert {k: v for k, v in found["cosine >= 0.94"].items() if k != "text"} == {
        "family": "causal",
        "passes": 2,
        "predict": False,
        "knots": [0, 5],
    }
    record.cells.append(judged("causal-predicted-3", "causal-predicted", 3, [0.995, 0.996, 0.997], knots=[0, 3, 6]))
    moved = calibration(record, 0.7)["recommended"]["cosine >= 0.99"]
    assert "run the causal plan with 3 of 9 passes, predicted knots [0, 3, 6]" in moved["text"]
    assert [moved[key] for key in ("family", "passes", "predict", "knots")] == ["causal", 3, True, [0, 3, 6]]


def test_nothing_that_is_good_enough_is_said_in_words_alone(record: Record) -> None:
    record.settings["min_cosine"] = 0.9999
    found = calibration(record, 0.7)["recommended"]["cosine >= 0.9999"]
    assert list(found) == ["text"]
    assert "no causal plan that was judged" in found["text"]


def test_refused_where_it_does_not_belong(path: Path) -> None:
    for trajectory, word in (
        (trajectory_of(steps=12), "sigmas"),
        (trajectory_of(eta=0.3), "transition"),
        (replace(trajectory_of(), signature={"backbone": "other"}), "backbone"),
        (replace(trajectory_of(), timestep_mode="round"), "timestep_mode"),
    ):
        with pytest.raises(ReplayMismatch, match=word):
            Plan.from_calibration(path, passes=4, trajectory=trajectory)


def test_unknown_passes_family_and_files(path: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"passes must be one of \[2, 4\], got 3"):
        Plan.from_calibration(path, passes=3)
    with pytest.raises(ValueError, match="family must be one of"):
        Plan.from_calibration(path, passes=4, family="exact")
    (tmp_path / "other.json").write_text("{}")
    with pytest.raises(RecordError, match="not a calibration file"):
        Plan.from_calibration(tmp_path / "other.json", passes=4)
    (tmp_path / "damaged.json").write_text('{"kind": "calibration"}')
    with pytest.raises(RecordError, match="damaged"):
        Plan.from_calibration(tmp_path / "damaged.json", passes=4)


def test_no_knots_no_calibration(record: Record) -> None:
    with pytest.raises(ValueError, match=r"no calibrated knots at eta 0\.3"):
        calibration(record, 0.3)


def test_recommendation_takes_the_fewest_passes_whose_lower_end_reaches(record: Record) -> None:
    low = recommend(record, 0.7, 0.94)
    assert low is not None
    assert "with 2 of 9 passes, knots [0, 5]" in low
    bound = mean_interval(record.cell("eta=0.7/jagg-w3-f1").samples["cosine"], "cosine").low
    paper = f"the paper's rule needs 6 (jagg-w3-f1: 95 % lower bound {bound:.4f}, n = 9), judged at W = 3."
    assert low.endswith(paper)
    bound = mean_interval(record.cell("eta=0.7/causal-2").samples["cosine"], "cosine").low
    assert f"0.9600, 95 % lower bound {bound:.4f}, n = 9; " in low
    high = recommend(record, 0.7, 0.985)
    assert high is not None
    assert "with 4 of 9 passes" in high
    assert high.endswith("; the paper's rule does not reach it, judged at W = 3.")
    none = recommend(record, 0.7, 0.999)
    assert none is not None
    assert none.endswith("no causal plan that was judged reaches it (n = 9 batches).")
    assert recommend(record, 0.3, 0.9) is None


def test_a_sequence_of_tests_ends_at_the_first_that_fails(record: Record) -> None:
    """A plan with fewer passes that happens to be above is not looked for behind one that is not."""
    record.cells.append(judged("causal-3", "causal", 3, [0.90, 0.91, 0.92], knots=[0, 4, 8]))
    best = fewest_passes(record, 0.7, 0.94, ("causal",))
    assert best is not None
    assert best.settings["passes"] == 4


def test_plans_with_equally_many_passes_share_the_error_of_a_test(record: Record) -> None:
    alone = mean_interval(record.cell("eta=0.7/jagg-w3-f1").samples["cosine"], "cosine").low
    assert alone is not None
    assert fewest_passes(record, 0.7, alone - 1e-9, ("jagg",)) is not None
    for number in range(5):
        record.cells.append(judged(f"jagg-{number}", "jagg", 6, [0.5, 0.6, 0.7], window=3, jagg_frac=1.0))
    assert fewest_passes(record, 0.7, alone - 1e-9, ("jagg",)) is None


def test_too_few_batches_are_no_claim(record: Record) -> None:
    for cell in record.cells:
        cell.samples = {name: samples[:7] for name, samples in cell.samples.items()}
    assert recommend(record, 0.7, 0.5) == (
        "eta 0.7, cosine of at least 0.5: no claim, n = 7 batches; at least 8 are needed."
    )
    assert list(calibration(record, 0.7)["recommended"]["cosine >= 0.97"]) == ["text"]


def test_a_quick_calibration_warns_where_it_is_used(record: Record, tmp_path: Path) -> None:
    record.settings["quick"] = True
    write_json(tmp_path / "c.json", calibration(record, 0.7))
    with pytest.warns(UserWarning, match="of a quick run, not for use"):
        Plan.from_calibration(tmp_path / "c.json", passes=4)


def test_measured_numbers_have_the_digits_that_are_stable(record: Record) -> None:
    record.cell("eta=0.7/causal-4").samples["cosine"] = [0.99 + 1e-9 * k for k in range(9)]
    data = calibration(record, 0.7)
    assert data["plans"]["causal"]["4"]["held_out_cosine"]["value"] == 0.99
    assert data["schedule"] == record.schedule, "settings are not rounded"


def test_without_a_window_of_the_paper_nothing_is_said_of_its_rule(record: Record) -> None:
    record.cells = [c for c in record.cells if c.settings.get("family") != "jagg"]
    text = recommend(record, 0.7, 0.94)
    assert text is not None
    assert "paper" not in text


REFERENCE = Path(__file__).parents[2] / "results" / "reference"


@pytest.mark.parametrize("name", ["digits-flux-calibration", "photos-qwen-calibration"])
def test_the_lines_to_paste_run(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command is what the trainer takes, and the Python line gives the plan that is recommended."""
    monkeypatch.chdir(REFERENCE.parents[1])
    record = Record.read(REFERENCE / name / "record.json")
    file = Path("results/reference") / name / "calibration-eta0.7.json"
    found = json.loads(file.read_text())["recommended"]
    lines = lines_to_paste(record, 0.7, found, file)
    named = {(plan["passes"], plan["predict"]) for plan in found.values() if "passes" in plan}
    assert len(lines) == 3 * len(named) > 0
    for comment, command, call in zip(lines[::3], lines[1::3], lines[2::3], strict=True):
        [target, *_] = [key for key in found if key in comment]
        start, argv = shlex.split(command)[:4], shlex.split(command)[4:]
        assert start == ["python", "-m", "jagg_core", "train"]
        config = configure(argv)[1]
        assert (config.model.backbone, config.reward.name) == (record.backbone, record.settings["reward"])
        assert (config.rollout.steps, config.rollout.eta, config.rollout.trained) == (21, 0.7, "all")
        assert (config.plan.passes, config.plan.predict) == (found[target]["passes"], found[target]["predict"])
        plan = eval(call, {"Plan": Plan, "trajectory": None})
        assert list(plan.knots) == found[target]["knots"]


def test_the_lines_to_paste_run_where_the_calibration_was_made() -> None:
    record = Record.read(REFERENCE / "photos-flux-calibration" / "record.json")
    record.settings |= {"device": "cuda", "dtype": "bfloat16"}
    file = REFERENCE / "photos-flux-calibration" / "calibration-eta0.7.json"
    command = lines_to_paste(record, 0.7, json.loads(file.read_text())["recommended"], file)[1]
    model = configure(shlex.split(command)[4:])[1].model
    assert (model.device, model.dtype) == ("cuda", "bfloat16")


def test_lines_of_a_preset_train_by_that_preset() -> None:
    """With all else that the preset sets, such as its learning rate."""
    record = Record.read(REFERENCE / "photos-flux-calibration" / "record.json")
    file = REFERENCE / "photos-flux-calibration" / "calibration-eta0.7.json"
    record.settings["preset"] = "flow-grpo"
    argv = shlex.split(lines_to_paste(record, 0.7, json.loads(file.read_text())["recommended"], file)[1])[4:]
    assert argv[:2] == ["--preset", "flow-grpo"]
    by_preset = configure(argv)[1]
    plain = configure([*argv[2:]])[1]
    assert by_preset.optimizer != plain.optimizer
    assert by_preset.rollout.transition == "dance"  # as in this record, not the preset's own
    assert (by_preset.rollout.steps, by_preset.rollout.trained) == (21, "all")


def test_what_recommends_no_plan_has_no_lines(record: Record) -> None:
    changed = replace(record, settings=record.settings | {"recipe": {"steps": 10, "shift": 3.0, "guidance": None}})
    changed.settings["reward"] = "ink"
    assert lines_to_paste(changed, 0.7, {"cosine >= 0.97": {"text": "none"}}, Path("c.json")) == []


def test_lines_name_guidance_and_options_where_there_are_any(record: Record) -> None:
    recipe = {"steps": 10, "shift": 2.5, "guidance": 3.5, "schedule": "flux"}
    recipe |= {"transition": "cps", "timestep_mode": "trunc_fp32"}
    settings = {"recipe": recipe, "reward": "ink", "backbone_options": ["path=a b", "lora_rank=4"]}
    changed = replace(record, settings=record.settings | settings)
    plan = {"text": "", "family": "causal", "passes": 2, "predict": True, "knots": [0, 5]}
    [comment, command, call] = lines_to_paste(changed, 0.7, {"a": plan, "b": plan}, Path("some folder/c.json"))
    assert comment == "# eta 0.7, a and b"
    words = shlex.split(command)
    for flag, value in (
        ("--model.guidance", "3.5"),
        ("--model.options", '["path=a b", "lora_rank=4"]'),
        ("--rollout.schedule", "flux"),
        ("--rollout.shift", "2.5"),
        ("--rollout.transition", "cps"),
        ("--rollout.timestep_mode", "trunc_fp32"),
        ("--plan.predict", "true"),
        ("--plan.calibration", "some folder/c.json"),
    ):
        assert words[words.index(flag) + 1] == value
    assert call == "Plan.from_calibration('some folder/c.json', passes=2, predict=True, trajectory=trajectory)"
