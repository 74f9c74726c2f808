"""A calibration for a trainer's preset: made by naming it, accepted by a training run of it and refused by others."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from analysis.__main__ import main, parser, settings_from
from analysis.measure.study import Calibrate, Recipe, Study
from analysis.report import figures
from jagg_core import Plan
from jagg_core.backbones import registry
from jagg_core.grpo import PRESETS, GRPOConfig, GRPOTrainer, preset
from jagg_core.grpo.command import configure
from jagg_core.records import Record
from jagg_core.strict_json import read_json
from tests.backbones.stub import STUB

pytestmark = pytest.mark.filterwarnings("ignore:.*of a quick run")

PRESET = "dancegrpo"


@pytest.fixture(scope="module", autouse=True)
def stub() -> Iterator[None]:
    """The stub in the registry, and no pictures, which take most of a report's time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(registry._REGISTRY, "stub", STUB)
        patch.setattr(figures, "rendered", lambda figure: {"png": b"", "svg": b""})
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the command line makes for the preset."""
    out = tmp_path_factory.mktemp("preset")
    arguments = ["--preset", PRESET, "--backbone", "stub", "--reward", "ink", "--quick", "--out", str(out)]
    main(["collect", *arguments])
    return out


def training(folder: Path, *flags: str) -> GRPOConfig:
    """A training run of the preset with the calibration of ``folder``."""
    plan = ["--plan.estimator", "causal", "--plan.passes", "5"]
    plan += ["--plan.calibration", str(folder / "calibration-eta0.3.json"), "--rollout.trained", "all"]
    small = ["--rollout.prompts", "1", "--rollout.samples", "2"]
    model = ["--model.backbone", "stub", "--reward.name", "ink", "--out", str(folder)]
    return configure([*model, *plan, *small, *flags, "--preset", PRESET])[1]


def test_a_run_of_the_preset_takes_it(folder: Path) -> None:
    config = training(folder)
    assert config.rollout.timestep_mode == "trunc_fp32"
    trainer = GRPOTrainer(config)
    metrics = trainer.step()
    assert metrics.skipped == ""
    [(_, trajectory, _)] = trainer.batches("update")
    plan = Plan.from_calibration(config.plan.calibration, 5, trajectory=trajectory)
    assert plan.passes == 5


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--rollout.timestep_mode", "float"], "timestep_mode: calibrated with trunc_fp32, this run has float"),
        (["--rollout.transition", "flow"], r"transition: calibrated with DanceSDE\(eta=0.3\), this run has FlowSDE"),
        (["--rollout.steps", "12"], "15 trained steps, .* this run has 11"),
        (["--rollout.shift", "1.5"], "calibrate with the same steps, shift and schedule"),
    ],
    ids=["timestep_mode", "transition", "steps", "shift"],
)
def test_a_run_of_other_rollouts_refuses_it(flags: list[str], message: str, folder: Path) -> None:
    with pytest.raises(ValueError, match=message):
        GRPOTrainer(training(folder, *flags))


def test_the_record_and_the_file_say_how_rollouts_were_made(folder: Path) -> None:
    record = Record.read(folder / "record.json")
    asked = {"steps": 16, "shift": 3.0, "schedule": "dance", "transition": "dance", "timestep_mode": "trunc_fp32"}
    assert asked.items() <= record.settings["recipe"].items()
    assert record.settings["etas"] == [0.3]
    data = read_json(folder / "calibration-eta0.3.json")
    assert (data["transition"], data["timestep_mode"]) == ("DanceSDE(eta=0.3)", "trunc_fp32")


# From a name to settings


def settings(*arguments: str) -> Study:
    return settings_from(parser().parse_args(["calibrate", *arguments]))


@pytest.mark.parametrize("name", sorted(PRESETS))
@pytest.mark.parametrize("backbone", ["digits-flux", "flux-dev", "qwen-image", "sd3.5-medium"])
def test_rollouts_are_those_of_a_training_run(name: str, backbone: str) -> None:
    """Held against the trainer's own reading of the preset."""
    model = ["--model.backbone", backbone, "--reward.name", "ink"]
    config = configure(["--out", "run", *model, "--preset", name])[1]
    found = settings("--preset", name, "--backbone", backbone, "--reward", "ink")
    ours, theirs = asdict(found.recipe), asdict(config.rollout)
    shared = ours.keys() & theirs.keys() - {"prompts", "samples"}
    assert shared == {"steps", "schedule", "shift", "transition", "timestep_mode"}
    assert {key: ours[key] for key in shared} == {key: theirs[key] for key in shared}
    assert found.etas == (config.rollout.eta,)
    assert found.recipe.guidance == config.model.guidance


def test_nothing_else_comes_from_a_preset() -> None:
    """A setting of presets that is new should be looked at: must a calibration share it?"""
    known = {"samples", "same_noise", "trained", "fraction", "window_size", "window_range", "window_interval"}
    known |= {"steps", "schedule", "shift", "transition", "timestep_mode", "eta"}
    for name in PRESETS:
        for backbone in ("flux", "qwen-image", "sd3.5", "wan2.1"):
            found = preset(name, backbone)
            assert found["rollout"].keys() <= known
            assert found.get("model", {}).keys() <= {"guidance"}


def test_flags_come_before_a_preset_and_a_preset_before_quick() -> None:
    found = settings("--quick", "--preset", PRESET)
    assert found.etas == (0.3,)
    assert found.calibration_batches == (1,)
    found = settings("--preset", PRESET, "--etas", "0.5", "--steps", "9", "--timestep-mode", "round", "--reward", "ink")
    recipe = Recipe(steps=9, timestep_mode="round")
    assert found == Calibrate(etas=(0.5,), reward="ink", recipe=recipe, preset=PRESET)
    assert settings("--preset", "flow-grpo", "--backbone", "flux-dev", "--guidance", "1").recipe.guidance == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"timestep_mode": "truncated"}, "timestep_mode must be one of .*got 'truncated'"),
        ({"transition": "ode"}, "transition must be one of .*got 'ode'"),
    ],
)
def test_unknown_names_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(Recipe(), **changes)


def test_an_eta_that_the_kernel_does_not_know_is_refused() -> None:
    with pytest.raises(ValueError, match=r"eta of CPS must be positive and at most 1, got 1\.2"):
        Calibrate(etas=(0.7, 1.2), recipe=Recipe(transition="cps"))
