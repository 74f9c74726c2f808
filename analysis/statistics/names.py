"""Names that measuring and reporting share: metrics, centrings, grouped estimators, families of estimators."""

from __future__ import annotations

from analysis.statistics.intervals import Scale
from jagg_core.plans import ESTIMATORS, groups_of, routed_groups

SCALES: dict[str, Scale] = {"cosine": "cosine", "rel_error": "positive", "norm_ratio": "positive"}
"""Metrics of an estimate against exact, with the scale on which the interval of their mean is taken."""

METRICS = tuple(SCALES)

PER_PROMPT = "per prompt"

CENTRINGS = (PER_PROMPT, "global", "none", "ones")
"""How advantages come from rewards; see `analysis.measure.signal_gradients.ADVANTAGES`."""

USUAL = {"transition": "dance", "timestep_mode": "float"}
"""What rollouts have where a record, or the key of a stored table, does not name it."""

COMPARED_PASSES = (8, 5)
"""Of the causal plans that the shipped calibrations are compared by."""

COMPARED_WINDOWS = (4, 5)
"""Of the paper's rule, likewise."""

Style = tuple[str, str, str]

RIVALS: dict[str, tuple[str, Style]] = {
    "causal-shipped": ("causal, knots of the shipped calibration", ("#52be80", "d", "--")),
    "window": ("windows of MixGRPO and Flow-GRPO-Fast", ("#b7950b", "s", ":")),
    "half": ("high- or low-noise half only", ("#873600", "<", ":")),
}
"""Families that are compared with the registered estimators: label, and colour, marker and line."""


def families() -> list[str]:
    """Lists every family that a record may hold: the registered estimators, then the rivals."""
    return [*ESTIMATORS, *RIVALS]


def family_style(family: str) -> Style:
    """Returns colour, marker and line of a family.

    Raises:
        KeyError: an unknown family.
    """
    return ESTIMATORS[family].style if family in ESTIMATORS else RIVALS[family][1]


def family_label(family: str) -> str:
    """Returns the label of a family in legends.

    Raises:
        KeyError: an unknown family.
    """
    return ESTIMATORS[family].label if family in ESTIMATORS else RIVALS[family][0]


def grouped_name(steps: int, family: str, window: int, frac: float) -> str:
    """Names a grouped estimator by the share of groups that it routes: fractions that route as many are one plan."""
    groups = len(groups_of(steps, window))
    return f"{family}-w{window}-f{routed_groups(groups, frac) / groups:g}"
