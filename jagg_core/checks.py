"""Checks that settings share."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, get_args

if TYPE_CHECKING:
    import torch


def require_at_least(settings: object, **minimum: int) -> None:
    """Raises ValueError with the setting and its value unless each attribute is at least its minimum."""
    for name, low in minimum.items():
        value = getattr(settings, name)
        if not value >= low:
            raise ValueError(f"{name} must be at least {low}, got {value}")


def require_one_of(name: str, value: object, allowed: object) -> None:
    """Raises ValueError unless ``value`` is one of the choices of a Literal type, or of a tuple."""
    choices = allowed if isinstance(allowed, tuple) else get_args(allowed)
    if value not in choices:
        raise ValueError(f"{name} must be one of {list(choices)}, got {value!r}")


def require_positive(settings: object, *names: str) -> None:
    """Raises ValueError unless each attribute is positive and finite."""
    for name in names:
        value = getattr(settings, name)
        if not 0 < value < math.inf:
            raise ValueError(f"{name} must be positive and finite, got {value}")


def require_device(device: torch.device | str) -> torch.device:
    """Returns the device of that name.

    Raises:
        ValueError: no such device on this machine, or this build of torch does not reach it; names those that it has.
    """
    import torch

    from jagg_core.devices import accelerator_names

    try:
        made = torch.device(device)
        torch.empty(0, device=made)
    except (AssertionError, RuntimeError) as error:
        names = accelerator_names()
        allowed = ["cpu", *(name.partition(":")[0] for name in names[:1]), *names]
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise ValueError(
            f"device {str(device)!r} cannot be used here: {reason}; allowed: {', '.join(allowed)}"
        ) from error
    return made
