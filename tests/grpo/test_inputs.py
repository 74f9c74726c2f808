"""A run resumes only with the prompts, frozen weights, rewards and calibration that it was begun with."""

from __future__ import annotations

import importlib
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from jagg_core.grpo import GRPOConfig, GRPOTrainer
from jagg_core.grpo.run import read, write
from jagg_core.rewards import load_reward, reward_fingerprints
from tests.grpo.runs import changed
from tests.grpo.test_trainer import CALIBRATION

BACKBONE = """
from pathlib import Path
import torch
from jagg_core.backbones import load_backbone

HERE = Path(__file__).parent

class Mine:
    def __init__(self, inner):
        self.inner = inner
        self.prompts = tuple((HERE / "prompts.txt").read_text().split())

    def __getattr__(self, name):
        return getattr(self.inner, name)

def load(device, dtype):
    inner = load_backbone("digits-flux", device, dtype, lora_rank=2)
    with torch.no_grad():
        inner.transformer.x_embedder.weight[0, 0] += float((HERE / "shift.txt").read_text())
    return Mine(inner)
"""
REWARD = "def mine(images, prompts):\n    return 2 * images.mean((1, 2, 3))\n"
FILES = {"prompts.txt": "3 7", "shift.txt": "0", "own_backbone.py": BACKBONE, "own_reward.py": REWARD}

Write = Callable[[str, str], None]


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    """Writes a file of the user's own, and forgets the modules imported before."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def edit(name: str, text: str) -> None:
        (tmp_path / name).write_text(text)
        for module in ("own_backbone", "own_reward"):
            sys.modules.pop(module, None)
        importlib.invalidate_caches()

    for name, text in FILES.items():
        edit(name, text)
    edit("calibration.json", CALIBRATION.read_text())
    return edit


def config_in(folder: Path) -> GRPOConfig:
    return changed(
        model={"backbone": "own_backbone:load", "ema_decay": 0.0},
        rollout={"steps": 21},
        reward={"name": "own_reward:mine"},
        plan={"knots": (), "calibration": str(folder / "calibration.json"), "passes": 5},
    )


@pytest.mark.parametrize(
    ("name", "file", "text"),
    [
        ("prompts", "prompts.txt", "3 7 1"),
        ("prompts", "prompts.txt", "3 8"),
        ("frozen weights", "shift.txt", "0.25"),
        ("backbone", "own_backbone.py", BACKBONE + "\n"),
        ("reward own_reward:mine", "own_reward.py", REWARD.replace("2 *", "3 *")),
        ("calibration", "calibration.json", json.dumps(json.loads(CALIBRATION.read_text()) | {"note": "another"})),
    ],
)
def test_what_changed_is_refused_by_name_with_both_values(
    name: str, file: str, text: str, tmp_path: Path, own: Write
) -> None:
    config = config_in(tmp_path)
    trainer = GRPOTrainer(config)
    path = write(trainer, tmp_path / "checkpoints")
    read(GRPOTrainer(config), path)
    own(file, text)
    later = GRPOTrainer(config)
    before, now = trainer.inputs[name], later.inputs[name]
    assert [key for key in trainer.inputs if trainer.inputs[key] != later.inputs[key]] == [name]
    told = f"resume: {name} must be as the run was begun with, {before}, got {now}: put it back"
    with pytest.raises(ValueError, match=f"^{re.escape(told)}"):
        read(later, path)


def test_a_calibration_may_be_formatted_anew_and_what_is_no_input_may_change(tmp_path: Path, own: Write) -> None:
    config = config_in(tmp_path)
    path = write(GRPOTrainer(config), tmp_path / "checkpoints")
    own("calibration.json", json.dumps(json.loads(CALIBRATION.read_text()), indent=3))
    read(GRPOTrainer(changed(config, run={"updates": 9})), path)


def test_the_weights_behind_a_kl_are_an_input_and_those_of_a_whole_training_are_not() -> None:
    whole, with_kl = (GRPOTrainer(changed(objective={"kl_beta": beta})) for beta in (0.0, 0.1))
    assert "frozen weights" not in whole.inputs
    assert with_kl.inputs["frozen weights"].isdigit()


def test_terms_of_a_reward_are_told_apart_by_source_and_weights(own: Write) -> None:
    name = "classifier+0.5*own_reward:mine"
    before = reward_fingerprints(name, load_reward(name, dataset="digits"))
    assert list(before) == ["classifier", "own_reward:mine"]
    assert ", version " in before["classifier"] and "version" not in before["own_reward:mine"]
    own("own_reward.py", REWARD + "SCALE = 2\n")
    after = reward_fingerprints(name, load_reward(name, dataset="digits"))
    assert [key for key in before if before[key] != after[key]] == ["own_reward:mine"]
    other = reward_fingerprints("classifier", load_reward("classifier", dataset="photos"))
    assert other["classifier"] != before["classifier"]
