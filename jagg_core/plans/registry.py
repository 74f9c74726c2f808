"""Estimators by name. Each is declared once, here; tables, figures, searches and trainers read this registry."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch

from jagg_core.checks import require_one_of
from jagg_core.imports import import_object
from jagg_core.plans.constructors import (
    causal_plan,
    endpoint_plan,
    exact_plan,
    jagg_plan,
    spline_plan,
    subsample_plan,
)
from jagg_core.plans.plan import Plan

Kind = Literal["exact", "groups", "knots", "random"]
"""What a constructor takes besides sigmas: nothing; window and jagg_frac; knots; a count and a generator."""


@dataclass(frozen=True)
class Estimator:
    """A way to compute the update gradient.

    Attributes:
        name: in records, tables, flags and figures.
        label: in legends and tables.
        kind: what ``build`` takes; see `Kind`.
        build: constructor of the plan. By kind: ``(sigmas)``, ``(sigmas, window, jagg_frac)``, ``(sigmas, knots)`` or
            ``(sigmas, count, generator)``.
        looks_ahead: whether a knot's state may contain the noise of a step that it serves, which biases the gradient.
        style: colour, marker and line of its figures.
        knots_of: for knots: the estimator whose searched knots it takes; its name if they are searched for it.
        in_front: whether it is judged at every number of passes and drawn in the Pareto front and the heat map.
        recommended: whether its learning signal is measured at every number of passes, and a calibration may
            recommend it. Not for what looks ahead.

    Raises:
        ValueError: an unknown kind, searched knots for an estimator that takes none, or a recommended one that looks
            ahead.
    """

    name: str
    label: str
    kind: Kind
    build: Callable[..., Plan]
    looks_ahead: bool
    style: tuple[str, str, str] = ("#2c3e50", "h", "-.")
    knots_of: str = ""
    in_front: bool = False
    recommended: bool = False

    def __post_init__(self) -> None:
        require_one_of("kind", self.kind, Kind)
        if self.kind == "knots" and not self.knots_of:
            object.__setattr__(self, "knots_of", self.name)
        if self.kind != "knots" and self.knots_of:
            raise ValueError(
                f"knots_of must be empty but for estimators of kind knots, got {self.knots_of!r} for kind {self.kind!r}"
            )
        if self.recommended and self.looks_ahead:
            raise ValueError(f"recommended must be False for an estimator that looks ahead, got True for {self.name!r}")

    @property
    def searched(self) -> bool:
        """Whether knots are searched for it."""
        return self.knots_of == self.name


ESTIMATORS: dict[str, Estimator] = {
    estimator.name: estimator
    for estimator in (
        Estimator(
            "jagg", "JAGG (paper)", "groups", jagg_plan, looks_ahead=True, style=("#c0392b", "o", "-"), in_front=True
        ),
        Estimator(
            "jagg-index",
            "JAGG, index weights",
            "groups",
            partial(jagg_plan, weighting="index"),
            looks_ahead=True,
            style=("#e59866", "s", "--"),
        ),
        Estimator("endpoint", "endpoint-only", "groups", endpoint_plan, looks_ahead=False, style=("#7f8c8d", "v", ":")),
        Estimator(
            "subsample", "random steps", "random", subsample_plan, looks_ahead=False, style=("#8e44ad", "x", "-.")
        ),
        Estimator(
            "causal",
            "causal, searched knots",
            "knots",
            causal_plan,
            looks_ahead=False,
            style=("#1e8449", "D", "-"),
            in_front=True,
            recommended=True,
        ),
        Estimator(
            "spline",
            "linear weights, searched knots",
            "knots",
            spline_plan,
            looks_ahead=True,
            style=("#2980b9", "^", "--"),
            in_front=True,
        ),
        Estimator(
            "causal-predicted",
            "causal, shifted knots",
            "knots",
            partial(causal_plan, predict=True),
            looks_ahead=False,
            style=("#145a32", "P", ":"),
            knots_of="causal",
            recommended=True,
        ),
        Estimator("exact", "exact", "exact", exact_plan, looks_ahead=False, style=("black", "*", "-")),
    )
}
"""By name. Estimators of other packages come in by `register_estimator` or as ``module:object``."""


def register_estimator(estimator: Estimator) -> Estimator:
    """Adds an estimator, so that every table, figure, search and trainer of this process has it.

    Raises:
        ValueError: another estimator has the name.
    """
    if ESTIMATORS.get(estimator.name, estimator) != estimator:
        raise ValueError(f"estimator {estimator.name!r} is registered already: give it another name")
    ESTIMATORS[estimator.name] = estimator
    return estimator


def find_estimator(name: str) -> Estimator:
    """Returns the registered estimator of a name, or registers what ``module:object`` names.

    The object is an `Estimator`, or a constructor ``(sigmas, knots) -> Plan``; that becomes an estimator with searched
    knots, named as the function. It may be recommended if its plans on a trial schedule do not look ahead.

    Raises:
        ValueError: an unknown name, or an object that is neither.
    """
    if ":" not in name:
        require_one_of("estimator", name, tuple(ESTIMATORS))
        return ESTIMATORS[name]
    named = import_object(name, "estimator", f"{', '.join(ESTIMATORS)} or module:object")
    if isinstance(named, Estimator):
        return register_estimator(named)
    if isinstance(named, type) or not callable(named):
        raise ValueError(
            f"estimator {name!r} must be an Estimator or a constructor (sigmas, knots) -> Plan, got {named!r}"
        )
    title = getattr(named, "__name__", name.rpartition(":")[2]).removesuffix("_plan").replace("_", "-")
    ahead = looks_ahead(named)
    return register_estimator(
        Estimator(title, title, "knots", named, looks_ahead=ahead, in_front=True, recommended=not ahead)
    )


def looks_ahead(build: Callable[..., Plan]) -> bool:
    """Says whether plans of a constructor ``(sigmas, knots) -> Plan`` look ahead, by those on a trial schedule.

    True where it refuses the trial: a bias has to be expected.
    """
    sigmas = torch.linspace(1.0, 0.1, 8, dtype=torch.float64)
    try:
        return any(build(sigmas, knots).anticipating for knots in ((0, 4), (0, 1, 6), (0, 2, 5, 7)))
    except (ArithmeticError, LookupError, RuntimeError, TypeError, ValueError):
        return True


def estimators(**wanted: bool | str) -> Iterable[Estimator]:
    """Yields the registered estimators with these properties, in the registry's order."""
    for estimator in ESTIMATORS.values():
        if all(getattr(estimator, name) == value for name, value in wanted.items()):
            yield estimator
