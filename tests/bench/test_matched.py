"""Savings under matched settings, by hand: a forward is 1, a backward 2, and 3 where activations are recomputed."""

from __future__ import annotations

import pytest

from bench.cost import Machine, Update
from bench.matched import fitting, matched
from bench.work import PassWork

WORK = PassWork(forward=1e12, backward=2e12, parameters=1)


def test_savings_of_a_step_by_hand() -> None:
    """Exact's step: 21 + 20 * 4 = 101 with checkpointing, 21 + 20 * 3 = 81 without."""
    rows = {row["plan"]: row for row in matched(WORK, Update(), Machine())}
    by_hand = {
        "the paper's rule, first groups": (18 / 101, 12 / 81, 18 / 101),
        "the same plan, closed-form s": (24 / 101, 18 / 81, (24 + 2 * 18) / 303),
        "the paper's rule, all groups": (30 / 101, 20 / 81, 30 / 101),
        "all groups, closed-form s": (40 / 101, 30 / 81, (40 + 2 * 30) / 303),
        "causal, 8 knots, closed-form s": (48 / 101, 36 / 81, (48 + 2 * 36) / 303),
        "causal, 8 shifted knots, closed-form s": (48 / 101, 36 / 81, (48 + 2 * 28) / 303),
        "causal, 5 knots, closed-form s": (60 / 101, 45 / 81, (60 + 2 * 45) / 303),
        "causal, 5 shifted knots, closed-form s": (60 / 101, 45 / 81, (60 + 2 * 40) / 303),
    }
    assert rows.keys() == by_hand.keys()
    for plan, expected in by_hand.items():
        found = [rows[plan][name] for name in ("with_checkpointing", "without", "several_steps")]
        assert found == pytest.approx(list(expected)), plan


def test_the_recipe_is_one_of_several_that_fit() -> None:
    rows = fitting(WORK, (0.173, 0.182), Machine())
    keys = {(row["sampled"], row["trained"], row["window"], row["groups"], row["other"]) for row in rows}
    assert {(21, 20, 4, "3 of 5", 0.0), (16, 9, 3, "3 of 3", 0.0), (21, 20, 4, "4 of 5", 0.34)} <= keys
    assert all(0.173 <= round(row["step"], 3) <= 0.182 for row in rows)
    [both] = [row for row in rows if (row["window"], row["groups"], row["trained"]) == (4, "4 of 5", 20)]
    assert both["update_stage"] == pytest.approx(24 / 80)
