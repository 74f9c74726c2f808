"""Plans with predicted knots in the cross-gradient table: extra rows that agree with the engine."""

from __future__ import annotations

import pytest
import torch

from analysis.measure.cross_table import collect_table, plan_gradients
from analysis.measure.similarity import similarity
from jagg_core import ClippedSurrogate, causal_plan, exact_plan
from tests.jagg_core.fields import ADVANTAGES, MlpField, gradient, make_rollout


def test_row_agrees_with_the_engine_and_leaves_the_pairs_alone() -> None:
    field = MlpField()
    trajectory = make_rollout(field)
    plans = [causal_plan(trajectory.sigmas, knots, predict=True) for knots in ([0, 3], [0, 2, 4])]
    made: list[int] = []
    table = collect_table(field, trajectory, ADVANTAGES, ClippedSurrogate(), predicted=plans, progress=made.append)
    assert sum(made) == 36 + 2 + 3
    plain = collect_table(field, trajectory, ADVANTAGES, ClippedSurrogate())
    torch.testing.assert_close(torch.tensor(table.gram[:36, :36]), torch.tensor(plain.gram), rtol=1e-12, atol=0)
    exact, _ = gradient(field, trajectory, ADVANTAGES, exact_plan(trajectory.sigmas), ClippedSurrogate())
    for plan in plans:
        expected, _ = gradient(field, trajectory, ADVANTAGES, plan, ClippedSurrogate())
        found = similarity(table, plan)
        assert found.cosine == pytest.approx(float(torch.cosine_similarity(expected, exact, dim=0)), abs=1e-10)
        assert found.rel_error == pytest.approx(float((expected - exact).norm() / exact.norm()), rel=1e-8)
        assert found.norm_ratio == pytest.approx(float(expected.norm() / exact.norm()), rel=1e-10)
        shared = plan_gradients(field, trajectory, ADVANTAGES, ClippedSurrogate(), {"p": plan})["p"]
        torch.testing.assert_close(shared, expected, rtol=1e-10, atol=1e-12)


def test_what_was_not_collected_is_refused() -> None:
    field = MlpField()
    trajectory = make_rollout(field)
    plan = causal_plan(trajectory.sigmas, [0, 3], predict=True)
    table = collect_table(field, trajectory, ADVANTAGES, ClippedSurrogate(), predicted=[plan])
    with pytest.raises(ValueError, match=r"not collected at knots \(0, 2\)"):
        table.vector(causal_plan(trajectory.sigmas, [0, 2], predict=True))
    with pytest.raises(ValueError, match="not collected step by step"):
        table.vector(plan, range(3))
