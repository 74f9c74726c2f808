"""The examples in docstrings run, and give what they show."""

from __future__ import annotations

import doctest
import importlib

import pytest

EXAMPLES = [
    ("jagg_core.engine.update", "accumulate_gradients"),
    ("jagg_core.forward", "forward_states"),
    ("jagg_core.pathwise", "adjoint_sweep"),
    ("jagg_core.plans.constructors", "causal_plan"),
    ("jagg_core.plans.constructors", "jagg_plan"),
    ("jagg_core.plans.plan", "Plan.from_weights"),
    ("jagg_core.rollouts", "rollout"),
]


@pytest.mark.parametrize(("module", "name"), EXAMPLES, ids=[name for _, name in EXAMPLES])
def test_an_example_runs(module: str, name: str) -> None:
    examples = {test.name: test for test in doctest.DocTestFinder().find(importlib.import_module(module))}
    example = examples[f"{module}.{name}"]
    assert example.examples, "no example"
    report: list[str] = []
    assert doctest.DocTestRunner().run(example, out=report.append).failed == 0, "".join(report)
