"""The choices of settings, by name: apart from what they choose, as the help of a command must not wait for torch."""

from __future__ import annotations

from typing import Literal

ScheduleName = Literal["dance", "own"]
"""Which sigmas a rollout takes: DanceGRPO's grid, or those of the backbone's sampler."""

TimestepMode = Literal["float", "trunc_fp32", "trunc_fp64", "round"]
"""How sigma becomes the network's timestep: as it is, or as an integer of 1000 steps (DanceGRPO truncates)."""

UpstreamMode = Literal["auto", "autograd", "closed_form", "interpolated"]
"""Where upstream gradients come from; see `jagg_core.engine.accumulate_gradients`."""

BackwardMode = Literal["auto", "joint", "batched", "sequential"]
"""How the knots of a plan share backward calls; see `jagg_core.engine.accumulate_gradients`."""

PartlyClipped = Literal["exact", "keep"]
"""What becomes of samples that are clipped at some steps of a group; see `jagg_core.engine.accumulate_gradients`."""

Sweep = Literal["full", "knots", "frozen"]
"""Where the sweep of `jagg_core.pathwise` differentiates the network."""

SHIPPED = ("digits-flux", "photos-flux", "photos-qwen")
"""Backbones whose weights come with the package; `jagg_core.backbones.registry.TRAINED` has what rebuilds them."""

DTYPES = ("float64", "float32", "bfloat16", "float16")
"""Of networks that can be verified: `jagg_core.reference.TOLERANCE` has a tolerance for each."""
