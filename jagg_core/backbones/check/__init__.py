"""The contract of a backbone, checked on a loaded one: what the engine and the calibration take for granted."""

from jagg_core.backbones.check.run import CHECKS, Finding, check_backbone

__all__ = ["CHECKS", "Finding", "check_backbone"]
