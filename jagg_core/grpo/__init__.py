"""GRPO training with any plan: `GRPOTrainer`, its configuration, and runs with checkpoints."""

from typing import TYPE_CHECKING

from jagg_core.imports import lazy_names

if TYPE_CHECKING:
    from jagg_core.grpo.config import GRPOConfig
    from jagg_core.grpo.metrics import Metrics
    from jagg_core.grpo.presets import PRESETS, preset
    from jagg_core.grpo.run import train
    from jagg_core.grpo.trainer import GRPOTrainer, TrainingStopped

_HOMES = {
    "config": ("GRPOConfig",),
    "metrics": ("Metrics",),
    "presets": (
        "PRESETS",
        "preset",
    ),
    "run": ("train",),
    "trainer": (
        "GRPOTrainer",
        "TrainingStopped",
    ),
}
__getattr__, __dir__ = lazy_names(__name__, _HOMES)

__all__ = ["PRESETS", "GRPOConfig", "GRPOTrainer", "Metrics", "TrainingStopped", "preset", "train"]
