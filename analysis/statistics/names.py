"""Names that measuring and reporting share: metrics, centrings, grouped estimators, families of estimators."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import asdict, dataclass
from typing import Any

from analysis.statistics.intervals import Scale
from jagg_core.plans import ESTIMATORS, find_estimator, groups_of, routed_groups
from jagg_core.records import Record
from jagg_core.strict_json import RecordError

SCALES: dict[str, Scale] = {"cosine": "cosine", "rel_error": "positive", "norm_ratio": "positive"}
"""Metrics of an estimate against exact, with the scale on which the interval of their mean is taken."""

METRICS = tuple(SCALES)

PER_PROMPT = "per prompt"

CENTRINGS = (PER_PROMPT, "global", "none", "ones")
"""How advantages come from rewards; see `analysis.measure.signal_gradients.ADVANTAGES`."""

USUAL = {"transition": "dance", "timestep_mode": "float"}
"""What rollouts have where a record, or the key of a stored table, does not name it."""

SHIFTED = "causal-predicted"
"""The family of causal plans with shifted knots."""

COMPARED_PASSES = (8, 5)
"""Of the causal plans that the shipped calibrations are compared by."""

COMPARED_WINDOWS = (4, 5)
"""Of the paper's rule, likewise."""

Style = tuple[str, str, str]

PLAIN: Style = ("#2c3e50", "h", "-.")
"""Colour, marker and line of a family of which nothing is stored."""


@dataclass(frozen=True)
class Family:
    """Describes a family of plans to tables, figures and recommendations, without the code that builds its plans.

    A record stores those of its run, so that it is read without the modules of its estimators.

    Attributes:
        name: in records and tables.
        label: in legends.
        style: colour, marker and line.
        kind: what its constructor takes; see `jagg_core.plans.registry.Kind`. ``rival``: trains on a subset of the
            steps, for comparison.
        knots_of: the family whose searched knots it takes; empty if it takes none.
        in_front: whether it is drawn in the Pareto front.
        recommended: whether a calibration may recommend it.
        source: ``module:object`` of an estimator of another project, as flags take it.
    """

    name: str
    label: str
    style: Style = PLAIN
    kind: str = "knots"
    knots_of: str = ""
    in_front: bool = False
    recommended: bool = False
    source: str = ""

    def describe(self) -> dict[str, Any]:
        """Returns what a record stores."""
        return asdict(self) | {"style": list(self.style)}


RIVALS = {
    family.name: family
    for family in (
        Family("causal-shipped", "causal, knots of the shipped calibration", ("#52be80", "d", "--")),
        Family("window", "windows of MixGRPO and Flow-GRPO-Fast", ("#b7950b", "s", ":"), "rival"),
        Family("half", "high- or low-noise half only", ("#873600", "<", ":"), "rival"),
    )
}
"""Families that are compared with the registered estimators."""

_shown: ContextVar[Mapping[str, Family] | None] = ContextVar("shown", default=None)


def registered_families(sources: Sequence[str] = ()) -> dict[str, Family]:
    """Returns the families of this process by name: the registered estimators, then the rivals.

    ``sources``: estimators of other projects, as ``module:object``.
    """
    named = {find_estimator(source).name: source for source in sources}
    ours = {
        name: Family(name, e.label, e.style, e.kind, e.knots_of, e.in_front, e.recommended, named.get(name, ""))
        for name, e in ESTIMATORS.items()
    }
    return ours | RIVALS


def families_of(record: Record) -> dict[str, Family]:
    """Returns the families of a record by name, as it stores them.

    A record of before they were stored has the registered ones, and those that its cells name if it was made with
    ``estimators`` of another project.

    Raises:
        RecordError: a stored family that lacks a field or has one of another kind.
    """
    stored = record.settings.get("families")
    if stored is None:
        others = [cell.settings.get("family") for cell in record.cells] if record.settings.get("estimators") else []
        return {str(name): Family(str(name), str(name), in_front=True) for name in others if name} | (
            registered_families()
        )
    found = {}
    for name, values in stored.items():
        try:
            made = Family(**{**values, "style": tuple(values["style"])})
        except (KeyError, TypeError) as error:
            raise RecordError(f"settings.families.{name} must describe a family, got {values!r}") from error
        texts = (made.name, made.label, made.kind, made.knots_of, made.source, *made.style)
        flags = (made.in_front, made.recommended)
        if len(made.style) != 3 or not all(isinstance(t, str) for t in texts) or not {*map(type, flags)} == {bool}:
            raise RecordError(f"settings.families.{name} must describe a family, got {values!r}")
        found[name] = made
    return found


def searched_families(record: Record, knots: Mapping[str, Any]) -> list[str]:
    """Lists the families with searched knots that a record holds.

    ``knots``: values of its cell of knots. A family that was registered later is in neither, and is left out; one whose
    plans were judged is listed, so that its missing knots are noticed.
    """
    judged = {cell.settings.get("family") for cell in record.cells}
    searched = [name for name, family in families_of(record).items() if family.knots_of == name]
    return [name for name in searched if name in knots or name in judged]


def recommended_families(record: Record) -> tuple[str, ...]:
    """Lists the families of a record that its calibration may recommend."""
    return tuple(name for name, family in families_of(record).items() if family.recommended)


@contextmanager
def showing(families: Mapping[str, Family]) -> Iterator[None]:
    """Lets `family_style`, `family_label` and `families` answer for the families of a record."""
    token = _shown.set(families)
    try:
        yield
    finally:
        _shown.reset(token)


def families() -> dict[str, Family]:
    """Returns the families that are shown, by name: those of `showing`, else those of this process."""
    return dict(_shown.get() or registered_families())


def family_style(family: str) -> Style:
    """Returns colour, marker and line of a family; `PLAIN` if it is unknown."""
    return families()[family].style if family in families() else PLAIN


def family_label(family: str) -> str:
    """Returns the label of a family in legends; its name if it is unknown."""
    return families()[family].label if family in families() else family


def grouped_name(steps: int, family: str, window: int, frac: float) -> str:
    """Names a grouped estimator by the share of groups that it routes: fractions that route as many are one plan."""
    groups = len(groups_of(steps, window))
    return f"{family}-w{window}-f{routed_groups(groups, frac) / groups:g}"
