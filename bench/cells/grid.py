"""Which cells pytest times: a grid of settings, arms and phases."""

from __future__ import annotations

from dataclasses import dataclass, fields
from itertools import product
from typing import Any, get_args, get_type_hints

import pytest

from bench.arms import PHASES, arms_of
from bench.settings import BACKENDS, GroupBench

WITHOUT_PHASES = "exact-bare"
"""The arm of which only the total is timed."""


@dataclass(frozen=True)
class Grid:
    """Values to combine; the defaults are a smoke run.

    Attributes:
        backbone: registered, or yours as module:function.
        window: steps W of the group.
        batch: samples of the rollout.
        dtype: the network computes in.
        checkpointing: off or on: recompute activations in the backward.
        compile: off, or a backend of torch.compile for the transformer's blocks.
        device: such as cpu, cuda or cuda:1.
        arm: see ``python -m bench group``.
        phase: part of an arm that is timed; total is all of it.
        rounds: times that every cell is timed.
        warmup: rounds before those that count.

    Raises:
        ValueError: a setting out of range, or an arm or phase that does not exist.
    """

    backbone: tuple[str, ...] = ("digits-flux",)
    window: tuple[int, ...] = (3,)
    batch: tuple[int, ...] = (2,)
    dtype: tuple[str, ...] = ("float32",)
    checkpointing: tuple[str, ...] = ("off",)
    compile: tuple[str, ...] = ("off",)
    device: tuple[str, ...] = ("cpu",)
    arm: tuple[str, ...] = tuple(arm.name for arm in arms_of("group"))
    phase: tuple[str, ...] = ("total", *PHASES)
    rounds: int = 5
    warmup: int = 1

    def __post_init__(self) -> None:
        switched: dict[str, tuple[str, ...]] = {"checkpointing": ("off", "on"), "compile": ("off", *BACKENDS)}
        allowed = {"arm": Grid.arm, "phase": Grid.phase} | switched
        for name, values in allowed.items():
            unknown = [value for value in getattr(self, name) if value not in values]
            if unknown:
                raise ValueError(f"{name} must be of {list(values)}, got {unknown[0]!r}")
        self.settings()

    def settings(self) -> list[GroupBench]:
        """Lists the groups to load, in order."""
        names = ("backbone", "device", "dtype", "checkpointing", "compile", "window", "batch")
        shared: dict[str, Any] = {"rounds": self.rounds, "warmup": self.warmup}
        combined: list[dict[str, Any]] = [
            dict(zip(names, one, strict=True)) for one in product(*(dict.fromkeys(getattr(self, n)) for n in names))
        ]
        for one in combined:
            one["checkpointing"] = one["checkpointing"] == "on"
            one["compile"] = None if one["compile"] == "off" else one["compile"]
        return [GroupBench(**one, **shared) for one in combined]

    def cells(self) -> list[GridCell]:
        """Lists all cells, group by group."""
        return [
            GridCell(settings, arm, phase)
            for settings in self.settings()
            for arm in dict.fromkeys(self.arm)
            for phase in dict.fromkeys(self.phase)
            if arm != WITHOUT_PHASES or phase == "total"
        ]


@dataclass(frozen=True)
class GridCell:
    """One arm's phase on one group."""

    settings: GroupBench
    arm: str
    phase: str

    @property
    def name(self) -> str:
        """Readable and stable: ``closed-form-batched-total-digits-flux-W5-float32-b16``."""
        s = self.settings
        more = ["checkpointing"] * s.checkpointing + ([f"compile-{s.compile}"] if s.compile is not None else [])
        more += [s.device.replace(":", "-")] * (s.device != "cpu")
        return "-".join([self.arm, self.phase, s.backbone, f"W{s.window}", s.dtype, f"b{s.batch}", *more])


GRID = pytest.StashKey[Grid]()
"""Where pytest keeps the grid of a session."""


def read_grid(given: dict[str, str | None]) -> Grid:
    """Reads a grid from text: values are separated by commas, None is the default.

    Raises:
        ValueError: a value of another type, or as `Grid`.
    """
    chosen: dict[str, Any] = {}
    types = get_type_hints(Grid)
    for field in fields(Grid):
        text = given.get(field.name)
        if text is None:
            continue
        kind = next(iter(get_args(types[field.name])), types[field.name])
        try:
            values = tuple(kind(part.strip()) for part in text.split(","))
        except ValueError as error:
            raise ValueError(f"{field.name} must be of type {kind.__name__}, got {text!r}") from error
        if not isinstance(field.default, tuple) and len(values) != 1:
            raise ValueError(f"{field.name} must be one value, got {text!r}")
        chosen[field.name] = values if isinstance(field.default, tuple) else values[0]
    return Grid(**chosen)
