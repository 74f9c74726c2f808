"""GRPO training with any plan: `GRPOTrainer`, its configuration, and runs with checkpoints."""

from jagg_core.grpo.config import GRPOConfig
from jagg_core.grpo.metrics import Metrics
from jagg_core.grpo.presets import PRESETS, preset
from jagg_core.grpo.run import train
from jagg_core.grpo.trainer import GRPOTrainer, TrainingStopped

__all__ = ["PRESETS", "GRPOConfig", "GRPOTrainer", "Metrics", "TrainingStopped", "preset", "train"]
