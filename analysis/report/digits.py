"""Digits of stored figures: as many as every processor agrees on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

DIGITS = 6
"""Significant digits. Further ones differ between processors, whose kernels add in another order."""


def rounded(value: Any) -> Any:
    """Rounds every float in nested lists and dicts to `DIGITS` significant digits; leaves the rest as it is."""
    if isinstance(value, Mapping):
        return {key: rounded(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(item) for item in value]
    return float(f"{value:.{DIGITS}g}") if isinstance(value, float) else value
