"""Checks of what a backbone shows of itself: its parameters, its settings, its images."""

from __future__ import annotations

import re

import torch

from jagg_core.backbones.check.probe import SAMPLES, Outcome, Probe, parameters_of

_PATH = re.compile(r"(?:^|[\s'\"(=:,])(?:~|\.{1,2}|[A-Za-z]:)?[/\\]")
"""The start of a path: from the root, the home, the current folder, or a drive; not a slash inside a name."""


def same_parameters(probe: Probe) -> Outcome:
    """``parameters()`` gives the same tensors every time, and some of them are trained."""
    first = probe.parameters
    probe.velocity()
    for again in (parameters_of(probe.policy), parameters_of(probe.backbone.policy(probe.prompts))):
        if len(again) != len(first) or any(a is not b for a, b in zip(first, again, strict=True)):
            return False, "parameters() must give the same tensors at every call, in the same order", None
    trained = sum(p.requires_grad for p in first)
    if trained == 0:
        return False, f"none of the {len(first)} tensors of parameters() requires a gradient", 0.0
    return True, f"parameters() gives the same {len(first)} tensors every time, {trained} of them trained", None


def signature(probe: Probe) -> Outcome:
    """``signature()`` holds settings as text, the same for the same prompts and on every machine."""
    tell = getattr(probe.policy, "signature", None)
    if tell is None:
        return False, "the policy has no signature(): a replay under other settings would not be noticed", None
    found = tell()
    if not isinstance(found, dict) or not found:
        return False, f"signature() must be a dict with at least one setting, found {found!r}", None
    for key, value in found.items():
        if not isinstance(key, str) or not isinstance(value, str):
            return False, f"signature() must be dict[str, str], found {key!r}: {value!r}", None
        if _PATH.search(value):
            return False, f"signature() has a path, which differs between machines: {key!r}: {value!r}", None
    again: dict[str, str] = probe.backbone.policy(probe.prompts).signature()  # type: ignore[attr-defined]
    if again != found:
        return False, f"signature() differs between two policies of the same prompts: {found} and {again}", None
    return True, f"signature() tells {', '.join(found)}", None


def decode(probe: Probe) -> Outcome:
    """``decode`` gives images in [0, 1]."""
    with torch.no_grad():
        images = probe.backbone.decode(probe.trajectory.final)
    if images.ndim != 4 or len(images) != SAMPLES:
        return False, f"images must have shape [{SAMPLES}, C, H, W], found {list(images.shape)}", None
    if not torch.isfinite(images).all():
        return False, "images have NaN or infinite pixels", None
    low, high = images.min().item(), images.max().item()
    if low < 0 or high > 1:
        return False, f"images must lie in [0, 1], found {low:g} to {high:g}", low if low < 0 else high
    return True, f"images {list(images.shape)} lie in [0, 1]", None
