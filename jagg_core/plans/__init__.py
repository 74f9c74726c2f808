"""Plans: every way to compute the update gradient, as data."""

from jagg_core.plans.constructors import (
    Outside,
    Weighting,
    causal_plan,
    endpoint_plan,
    exact_plan,
    groups_of,
    jagg_plan,
    routed_groups,
    spline_plan,
    subsample_plan,
)
from jagg_core.plans.plan import Plan, check_knots, whole_knots
from jagg_core.plans.registry import ESTIMATORS, Estimator, estimators, find_estimator, register_estimator

__all__ = [
    "ESTIMATORS",
    "Estimator",
    "Outside",
    "Plan",
    "Weighting",
    "causal_plan",
    "check_knots",
    "endpoint_plan",
    "estimators",
    "exact_plan",
    "find_estimator",
    "groups_of",
    "jagg_plan",
    "register_estimator",
    "routed_groups",
    "spline_plan",
    "subsample_plan",
    "whole_knots",
]
