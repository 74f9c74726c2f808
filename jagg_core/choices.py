"""Choices of settings, in a module without torch, so that the help of a command does not wait for it."""

from __future__ import annotations

from typing import Literal

ScheduleName = Literal["dance", "own"]
"""Sigmas of a rollout: DanceGRPO's grid, or those of the backbone's sampler."""

TimestepMode = Literal["float", "trunc_fp32", "trunc_fp64", "round"]
"""The network's timestep: sigma itself, or an integer of 1000 steps (DanceGRPO truncates)."""

UpstreamMode = Literal["auto", "autograd", "closed_form", "interpolated"]
"""Source of the upstream gradients in `jagg_core.engine.accumulate_gradients`."""

BackwardMode = Literal["auto", "joint", "batched", "sequential"]
"""How the knots of a plan share backward calls in `jagg_core.engine.accumulate_gradients`."""

PartlyClipped = Literal["exact", "keep"]
"""Treatment of samples that are clipped at some steps of a group in `jagg_core.engine.accumulate_gradients`."""

Sweep = Literal["full", "knots", "frozen"]
"""Steps at which the sweep of `jagg_core.pathwise` differentiates the network."""

SHIPPED = ("digits-flux", "emoji-flux", "photos-flux", "photos-qwen")
"""Backbones whose weights come with the package; `jagg_core.backbones.registry.TRAINED` can rebuild them."""

CLASSIFIED = ("digits", "photos", "emoji")
"""Data sets of `jagg_core.rewards.classifier.CLASSIFIERS`."""

DTYPES = ("float64", "float32", "bfloat16", "float16")
"""Dtypes of networks that can be verified, by a tolerance in `jagg_core.reference.TOLERANCE`."""
