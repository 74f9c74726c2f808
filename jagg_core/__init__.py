"""JAGG: cheaper update gradients for reinforcement learning of flow-matching transformers.

Every estimator of the update gradient is a `Plan`; `accumulate_gradients` runs any of them.
"""

from typing import TYPE_CHECKING

from jagg_core.imports import lazy_names

if TYPE_CHECKING:
    from jagg_core.advantages import NoGroupSignal, group_advantages
    from jagg_core.backbones import load_backbone
    from jagg_core.engine import OffPolicyError, RatioNoise, Report, accumulate_gradients
    from jagg_core.objective import ClippedSurrogate
    from jagg_core.plans import (
        Plan,
        causal_plan,
        endpoint_plan,
        exact_plan,
        jagg_plan,
        spline_plan,
        subsample_plan,
    )
    from jagg_core.policy import ClassifierFreeGuidance, VelocityPolicy
    from jagg_core.rollouts import rollout, sample_ode
    from jagg_core.schedule import dance_schedule, flux_schedule, qwen_image_schedule, sd3_schedule
    from jagg_core.seeding import initial_latents
    from jagg_core.trajectory import ReplayMismatch, Trajectory
    from jagg_core.transitions import CPS, DanceSDE, FlowSDE, Transition

_HOMES = {
    "advantages": (
        "NoGroupSignal",
        "group_advantages",
    ),
    "backbones": ("load_backbone",),
    "engine": (
        "OffPolicyError",
        "RatioNoise",
        "Report",
        "accumulate_gradients",
    ),
    "objective": ("ClippedSurrogate",),
    "plans": (
        "Plan",
        "causal_plan",
        "endpoint_plan",
        "exact_plan",
        "jagg_plan",
        "spline_plan",
        "subsample_plan",
    ),
    "policy": (
        "ClassifierFreeGuidance",
        "VelocityPolicy",
    ),
    "schedule": (
        "dance_schedule",
        "flux_schedule",
        "qwen_image_schedule",
        "sd3_schedule",
    ),
    "rollouts": (
        "rollout",
        "sample_ode",
    ),
    "seeding": ("initial_latents",),
    "trajectory": (
        "ReplayMismatch",
        "Trajectory",
    ),
    "transitions": (
        "CPS",
        "DanceSDE",
        "FlowSDE",
        "Transition",
    ),
}
__getattr__, __dir__ = lazy_names(__name__, _HOMES)

__version__ = "0.1.0"

__all__ = [
    "CPS",
    "ClassifierFreeGuidance",
    "ClippedSurrogate",
    "DanceSDE",
    "FlowSDE",
    "NoGroupSignal",
    "OffPolicyError",
    "Plan",
    "RatioNoise",
    "ReplayMismatch",
    "Report",
    "Trajectory",
    "Transition",
    "VelocityPolicy",
    "accumulate_gradients",
    "causal_plan",
    "dance_schedule",
    "endpoint_plan",
    "exact_plan",
    "flux_schedule",
    "group_advantages",
    "initial_latents",
    "jagg_plan",
    "load_backbone",
    "qwen_image_schedule",
    "rollout",
    "sample_ode",
    "sd3_schedule",
    "spline_plan",
    "subsample_plan",
]
