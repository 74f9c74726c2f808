"""Checks that settings share."""

from __future__ import annotations


def require_at_least(settings: object, **minimum: int) -> None:
    """Raise ValueError, naming the setting and what was found, unless each attribute is at least its minimum."""
    for name, low in minimum.items():
        value = getattr(settings, name)
        if not value >= low:
            raise ValueError(f"{name} must be at least {low}, found {value}")
