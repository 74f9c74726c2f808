"""The configuration: one tree, from YAML, presets and flags; what it refuses before anything is loaded."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from jagg_core.backbones import list_backbones
from jagg_core.grpo import PRESETS, GRPOConfig, preset
from jagg_core.grpo.command import configure
from jagg_core.strict_json import plain
from tests.grpo.runs import changed

CALIBRATION = Path(__file__).parents[2] / "results/reference/digits-flux-calibration/calibration-eta0.7.json"
OUT = ["--out", "runs/x"]


def read(*argv: str) -> GRPOConfig:
    return configure([*OUT, *argv])[1]


def test_flags_override_a_file_and_a_file_overrides_a_preset(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("rollout:\n  steps: 9\n  eta: 0.5\noptimizer:\n  learning_rate: 1e-3\n")
    found = read("--preset", "dancegrpo", "--config", str(path), "--rollout.eta", "0.4")
    assert (found.rollout.eta, found.rollout.steps, found.rollout.fraction) == (0.4, 9, 0.6)
    assert found.optimizer.learning_rate == 1e-3


def test_a_file_may_name_the_preset(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("preset: flow-grpo\nrollout:\n  eta: 0.5\n")
    found = read("--config", str(path))
    assert (found.rollout.transition, found.rollout.samples, found.rollout.eta) == ("flow", 24, 0.5)
    path.write_text("preset: flow-grqo\n")
    with pytest.raises(ValueError, match="flow-grqo"):
        read("--config", str(path))


@pytest.mark.parametrize(
    ("section", "settings", "message"),
    [
        ("plan", {"knots": (0, 5, 3)}, r"knots must increase strictly, got \[0, 5, 3\]"),
        ("plan", {"knots": (0, 5, 5)}, r"knots must increase strictly, got \[0, 5, 5\]"),
        ("plan", {"knots": (-1,)}, r"knots must lie in 0\.\.-?\d+, got \[-1\]"),
        ("model", {"guidance": float("nan")}, "guidance must be finite, got nan"),
    ],
)
def test_what_no_run_can_use_is_refused(section: str, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        changed(**{section: settings})


def test_a_stored_configuration_is_read_back(tmp_path: Path) -> None:
    config = changed(rollout={"trained": "window", "window_range": (0, 3)}, plan={"knots": (0, 1)})
    path = tmp_path / "config.json"
    path.write_text(json.dumps(plain(asdict(config))))
    assert read("--config", str(path)) == config


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--rollout.stepz", "3"], "rollout.stepz"),
        (["--rollout.steps", "many"], "rollout.steps"),
        (["--plan.estimator", "magic"], "estimator must be one of .*'causal'"),
        (["--preset", "magic"], "magic"),
    ],
    ids=["unknown", "type", "choice", "preset"],
)
def test_a_flag_that_cannot_be_read_is_named_in_one_line(argv: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        read(*argv)
    assert len(str(caught.value).splitlines()) == 1


FILES = [
    ("rollout:\n  stepz: 9\n", "stepz"),
    ("run:\n  seed: 1\nmodel:\n  dtype: bfloat16\nrun:\n  updates: 3\n", "'run' stands in line 1 and again in line 5"),
    ("run:\n  seed: 1\n  seed: 2\n", "key 'seed' stands in line 2 and again in line 3"),
    ('{"run": {"seed": 1}, "run": {"seed": 2}}', "key 'run' stands in line 1 and again in line 1"),
    ("run:\n  timeout: 10:00\n", "line 2: a number must be decimal, got 10:00"),
    ("run:\n  seed: +010\n", r"line 2: a number must be decimal, got \+010"),
    ("plan:\n  knots: [0, 1:30]\n", "line 2: a number must be decimal, got 1:30"),
    ("run: [1\nx: 2", "line 2: expected ',' or ']'"),
    ("optimizer:\n", "optimizer must have a value, got nothing"),
    ("plan:\n  knots: [0, null]\n", "plan.knots"),
    ("run:\n  wandb: on\n", "run.wandb"),
]


@pytest.mark.parametrize(("text", "message"), FILES, ids=[text[:30] for text, _ in FILES])
def test_a_file_that_cannot_be_read_names_key_and_line(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match=message) as caught:
        read("--config", str(path))
    assert len(str(caught.value).splitlines()) == 1


SETTINGS = [(section, name) for section, values in asdict(GRPOConfig()).items() for name in values]


@pytest.mark.parametrize(("section", "name"), SETTINGS, ids=[".".join(one) for one in SETTINGS])
def test_a_setting_without_a_value_is_refused_by_name(section: str, name: str, tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    for nothing in ("", " null", " ~"):
        path.write_text(f"{section}:\n  {name}:{nothing}\n")
        if (section, name) == ("model", "guidance"):
            assert read("--config", str(path)).model.guidance is None
            continue
        with pytest.raises(ValueError, match=rf"{section}\.{name} must have a value, got nothing"):
            read("--config", str(path))


def test_numbers_mean_what_they_look_like(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("run:\n  seed: 010\n  updates: 08\noptimizer:\n  learning_rate: 1e-3\n  epsilon: 1.5E-8\n")
    found = read("--config", str(path), "--run.timeout", "0100")
    assert (found.run.seed, found.run.updates, found.run.timeout) == (10, 8, 100)
    assert (found.optimizer.learning_rate, found.optimizer.epsilon) == (1e-3, 1.5e-8)
    for flags in (["--run.timeout", "10:00"], ["--run.timeout=10:00"], ["--run.timeout", "+010"]):
        with pytest.raises(ValueError, match=r"run\.timeout: a number must be decimal"):
            read(*flags)


def test_a_file_may_share_parts(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("run: &run\n  seed: 3\n  updates: 2\n")
    assert read("--config", str(path)).run.seed == 3
    path.write_text("model: {guidance: &g 2.5}\nrollout: {shift: *g}\n")
    assert read("--config", str(path)).rollout.shift == 2.5


REFUSED: list[tuple[dict[str, dict[str, Any]], str]] = [
    ({"model": {"dtype": "int8"}}, "dtype must be one of"),
    ({"model": {"dtype": "float16"}}, "'bfloat16', 'float64'], got 'float16'"),
    ({"model": {"ema_decay": 1.0}}, "ema_decay must be at least 0 and below 1, got 1.0"),
    ({"model": {"backbone": "digits"}}, "did you mean"),
    ({"rollout": {"samples": 1}}, "samples must be at least 2"),
    ({"rollout": {"eta": 0.0}}, "eta of DanceSDE must be positive"),
    ({"rollout": {"fraction": 1.5}}, "fraction must be above 0 and at most 1, got 1.5"),
    ({"rollout": {"trained": "window", "window_range": (0, 4)}}, r"window_range must lie in 0..3 .*\[0, 4\]"),
    ({"rollout": {"timestep_mode": "floor"}}, "timestep_mode must be one of"),
    ({"plan": {"estimator": "jagg", "window": 9, "knots": ()}}, "window must be between 1 and the 4 trained steps"),
    ({"plan": {"estimator": "subsample", "passes": 5, "knots": ()}}, "passes must be at most the 4 trained steps"),
    ({"plan": {"knots": (0, 4)}}, r"knots must be below the 4 trained steps, got \[0, 4\]"),
    ({"plan": {"knots": ()}}, "estimator causal needs either knots or a calibration"),
    ({"plan": {"estimator": "jagg", "jagg_frac": "calibrated", "knots": ()}}, "needs a calibration file, got none"),
    ({"plan": {"estimator": "spline", "predict": True}}, "predict is for the estimator causal, got spline"),
    ({"objective": {"clip_range": 0.0}}, "clip_range must be positive, got 0.0"),
    ({"optimizer": {"learning_rate": 0.0}}, "learning_rate must be positive and finite, got 0.0"),
    ({"optimizer": {"beta2": 1.0}}, "beta2 must be at least 0 and below 1, got 1.0"),
    ({"run": {"updates": 0}}, "updates must be at least 1, got 0"),
    ({"reward": {"name": "inkk"}}, "unknown reward 'inkk', nearest is 'ink'"),
    ({"run": {"eval_rewards": ("inkk",)}}, "unknown reward 'inkk', nearest is 'ink'"),
    ({"reward": {"options": ("pickscore.path=x",)}}, r"\['pickscore.path=x'\] are for none of the rewards"),
    ({"plan": {"recalibrate_every": 3, "estimator": "spline"}}, "recalibrate_every is for the estimator causal"),
    (
        {"plan": {"recalibrate_every": 3, "knots": (0, 1)}, "rollout": {"trained": "window", "window_range": (0, 3)}},
        "recalibrate_every needs trained 'all', got 'window'",
    ),
    ({"plan": {"recalibrate_every": 3, "recalibrate": "nowhere:f"}}, "there is no module 'nowhere'"),
]


@pytest.mark.parametrize(("sections", "message"), REFUSED, ids=[message[:40] for _, message in REFUSED])
def test_settings_that_cannot_be_are_refused(sections: dict[str, dict[str, Any]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        changed(**sections)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tensorboard": True}, r"tensorboard is not installed: pip install 'jagg-core\[log\]'"),
        ({"wandb": "project"}, "wandb is not installed: pip install wandb"),
    ],
    ids=["tensorboard", "wandb"],
)
def test_a_logger_that_is_not_installed_is_refused(
    settings: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in settings:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ValueError, match=message):
        changed(run=settings)


def test_a_calibration_of_another_kernel_is_refused() -> None:
    calibrated = {"estimator": "jagg", "jagg_frac": "calibrated", "calibration": str(CALIBRATION), "knots": ()}
    fitting = {"steps": 21}
    assert changed(plan=calibrated, rollout=fitting)
    for plan, rollout, message in (
        ({"window": 7}, {}, "no jagg_frac for window 7"),
        ({}, {"timestep_mode": "trunc_fp32"}, "timestep_mode: calibrated with float, this run has trunc_fp32"),
        ({}, {"eta": 0.3}, r"transition: calibrated with DanceSDE\(eta=0.7\), this run has DanceSDE\(eta=0.3\)"),
        ({"calibration": str(CALIBRATION.with_name("record.json"))}, {}, "no jagg_frac for window 4"),
    ):
        with pytest.raises(ValueError, match=message):
            changed(plan=calibrated | plan, rollout=fitting | rollout)


def test_samples_and_shards_must_divide_evenly() -> None:
    with pytest.raises(ValueError, match="multiple of ranks \\* steps_per_rollout = 6, got 4"):
        changed(optimizer={"steps_per_rollout": 2}).check_ranks(3)
    with pytest.raises(ValueError, match="shards must divide the 4 ranks, got 3"):
        changed(parallel={"shards": 3}).check_ranks(4)
    with pytest.raises(ValueError, match=r"keep_graphs is for one rank.* got 2"):
        changed(plan={"keep_graphs": True}).check_ranks(2)


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("backbone", [entry.name for entry in list_backbones()])
def test_every_preset_fits_every_backbone(name: str, backbone: str) -> None:
    sections = preset(name, backbone)
    assert changed(GRPOConfig(), **{**sections, "model": {"backbone": backbone, **sections.get("model", {})}})


def test_presets_are_the_published_recipes() -> None:
    dance = read("--preset", "dancegrpo", "--model.backbone", "flux-dev")
    assert (dance.rollout.steps, dance.rollout.eta, dance.rollout.samples) == (16, 0.3, 12)
    assert (dance.rollout.trained, dance.rollout.trained_steps, dance.rollout.same_noise) == ("random", 9, True)
    assert (dance.objective.clip_range, dance.optimizer.learning_rate) == (1e-4, 1e-5)
    assert read("--preset", "dancegrpo", "--model.backbone", "qwen-image").rollout.steps == 20
    flow = read("--preset", "flow-grpo", "--model.backbone", "sd3.5-medium")
    assert (flow.rollout.steps, flow.rollout.eta, flow.model.guidance, flow.objective.kl_beta) == (10, 0.7, 4.5, 0.04)
    assert flow.objective.kl_form == "std", "flow_grpo divides by the std without sqrt(-dt)"
    fast = read("--preset", "flow-grpo-fast", "--model.backbone", "flux-dev")
    assert (fast.rollout.transition, fast.rollout.trained_steps, fast.objective.clip_range) == ("cps", 3, 1e-5)
    mix = read("--preset", "mixgrpo", "--model.backbone", "flux-dev")
    assert (mix.rollout.steps, mix.rollout.window_size, mix.rollout.window_interval) == (25, 4, 25)
