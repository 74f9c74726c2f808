"""What a run reads besides its settings. A resumed run must find all of it as it was."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from jagg_core.backbones import fingerprints_of
from jagg_core.rewards import reward_fingerprints
from jagg_core.strict_json import read_json

if TYPE_CHECKING:
    from jagg_core.grpo.trainer import GRPOTrainer


def inputs_of(trainer: GRPOTrainer) -> dict[str, str]:
    """Computes what tells each input of a run from others, by name; the same on any number of ranks."""
    config, learner = trainer.config, trainer.learner
    found = fingerprints_of(learner.backbone, config.model.backbone)
    found["schedule"] = " ".join(f"{sigma:.6g}" for sigma in trainer.sigmas.tolist())
    if learner.frozen_version is not None:
        found["frozen weights"] = str(learner.frozen_version)
    if config.plan.calibration:
        text = json.dumps(read_json(Path(config.plan.calibration)), sort_keys=True)
        found["calibration"] = hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
    for name, reward in {config.reward.name: trainer.reward, **trainer.watched}.items():
        found |= {f"reward {term}": told for term, told in reward_fingerprints(name, reward).items()}
    return found


def require_same(stored: Mapping[str, str], found: Mapping[str, str]) -> None:
    """Checks that a resumed run finds the inputs that it was begun with.

    Raises:
        ValueError: one has changed; names it and both values.
    """
    for name in {**stored, **found}:
        if stored.get(name) != found.get(name):
            raise ValueError(
                f"resume: {name} must be as the run was begun with, {stored.get(name)}, got {found.get(name)}: put it "
                "back, or take over the weights alone by a new run with warm_start"
            )
