"""The cross-gradient table against vectors computed one by one, and against updates that were really run."""

from __future__ import annotations

import io
import random
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from analysis.measure import spaces
from analysis.measure.cross_table import SpaceName, collect_table, plan_gradients, reachable_pairs
from analysis.measure.similarity import similarity, similarity_from_products
from analysis.measure.spaces import gram_matrix
from jagg_core import (
    ClippedSurrogate,
    OffPolicyError,
    Plan,
    ReplayMismatch,
    Trajectory,
    causal_plan,
    dance_schedule,
    devices,
    exact_plan,
    jagg_plan,
)
from jagg_core.objective import upstream_autograd
from jagg_core.plans import groups_of
from tests.jagg_core.fields import ADVANTAGES, MlpField, flat_gradient, gradient, make_rollout, nudge

MakePlan = Callable[[Tensor], Plan]
OBJECTIVE = ClippedSurrogate()


def cross_gradients(field: MlpField, trajectory: Trajectory, advantages: Tensor = ADVANTAGES) -> Tensor:
    """``J_i^T s_j`` for every pair, ``[T, T, P]``, each by a forward and a backward of its own."""
    steps, parameters = range(trajectory.steps), list(field.parameters())
    upstream = []
    for j in steps:
        velocity = field.velocity(trajectory.latents[j], trajectory.network_sigma(j), trajectory.rows)
        upstream.append(upstream_autograd(OBJECTIVE, trajectory, j, velocity, advantages).gradient)

    def pull(i: int, j: int) -> Tensor:
        velocity = field.velocity(trajectory.latents[i], trajectory.network_sigma(i), trajectory.rows)
        return torch.cat([g.flatten() for g in torch.autograd.grad(velocity, parameters, upstream[j])])

    return torch.stack([torch.stack([pull(i, j) for j in steps]) for i in steps])


def cosine(a: Tensor, b: Tensor) -> float:
    return float(a @ b / a.norm() / b.norm())


# The table


def test_the_gram_matrix_is_that_of_separate_gradients(field: MlpField) -> None:
    trajectory = make_rollout(field, steps=5)
    table = collect_table(field, trajectory, ADVANTAGES, OBJECTIVE)
    vectors = cross_gradients(field, trajectory).flatten(0, 1)
    assert table.pairs == tuple((i, j) for i in range(5) for j in range(5))
    expected = (vectors @ vectors.T).numpy()
    assert np.abs(table.gram - expected).max() < 1e-12 * np.abs(expected).max()
    assert np.array_equal(table.gram, table.gram.T)


def test_a_part_of_the_pairs_is_a_part_of_the_table(field: MlpField) -> None:
    trajectory = make_rollout(field, steps=6)
    whole = collect_table(field, trajectory, ADVANTAGES, OBJECTIVE)
    part = collect_table(field, trajectory, ADVANTAGES, OBJECTIVE, past=2, future=1)
    expected = [(i, j) for i in range(6) for j in range(6) if -1 <= j - i <= 2]
    assert sorted(part.pairs) == expected
    index = [whole.index[pair] for pair in part.pairs]
    np.testing.assert_allclose(part.gram, whole.gram[np.ix_(index, index)], rtol=1e-12)


@pytest.mark.parametrize(("past", "future", "count"), [(None, None, 36), (0, 0, 6), (1, 0, 11), (0, 1, 11), (5, 5, 36)])
def test_reach(past: int | None, future: int | None, count: int) -> None:
    pairs = reachable_pairs(6, past, future)
    assert len(pairs) == len(set(pairs)) == count
    assert {(i, i) for i in range(6)} <= set(pairs)
    if (past, future) == (1, 0):
        assert (3, 4) in pairs, "a knot before the step it serves"
        assert (4, 3) not in pairs


def test_cost_is_a_forward_per_step_and_a_backward_per_pair(field: MlpField) -> None:
    trajectory = make_rollout(field, steps=6)
    made: list[int] = []
    collect_table(field, trajectory, ADVANTAGES, OBJECTIVE, past=1, future=0, progress=made.append)
    assert made == [2, 2, 2, 2, 2, 1]
    assert len(field.calls) == 6
    assert all(call.grad for call in field.calls)


# Every plan from the table


@pytest.mark.parametrize("upstream", ["autograd", "closed_form"])
def test_similarity_is_that_of_updates_really_run(
    upstream: str, make_plan: MakePlan, field: MlpField, trajectory: Trajectory
) -> None:
    plan = make_plan(trajectory.sigmas)
    table = collect_table(field, trajectory, ADVANTAGES, OBJECTIVE)
    exact, _ = gradient(field, trajectory, ADVANTAGES, exact_plan(trajectory.sigmas), OBJECTIVE, upstream)
    estimate, _ = gradient(field, trajectory, ADVANTAGES, plan, OBJECTIVE, upstream)
    found = similarity(table, plan)
    assert found.cosine == pytest.approx(cosine(estimate, exact), abs=1e-10)
    assert found.norm_ratio == pytest.approx(float(estimate.norm() / exact.norm()), rel=1e-9)
    error = float((estimate - exact).norm() / exact.norm())
    assert found.rel_error == pytest.approx(error, rel=1e-6, abs=1e-9)
    if plan.passes == trajectory.steps:
        assert found == similarity(table, exact_plan(trajectory.sigmas))
    else:
        assert error > 0.01, "too close to exact to tell a mistake"


def test_contributions_of_groups_are_apart_and_add_up(
    make_plan: MakePlan, field: MlpField, trajectory: Trajectory
) -> None:
    plan = make_plan(trajectory.sigmas)
    table = collect_table(field, trajectory, ADVANTAGES, OBJECTIVE)
    cross = cross_gradients(field, trajectory)
    total = np.zeros(len(table.pairs))
    groups = [*groups_of(10, 4), range(8, 10)]
    for group in groups:
        contribution = table.vector(plan, group)
        total += contribution
        estimate = sum(
            plan.weights[position, j] * cross[knot, j] for position, knot in enumerate(plan.knots) for j in group
        )
        assert isinstance(estimate, Tensor)
        exact = torch.stack([cross[j, j] for j in group]).sum(0)
        found = similarity(table, plan, group)
        assert found.norm_ratio == pytest.approx(float(estimate.norm() / exact.norm()), rel=1e-9, abs=1e-12)
        assert found.rel_error == pytest.approx(float((estimate - exact).norm() / exact.norm()), rel=1e-6, abs=1e-9)
        if estimate.any():
            assert found.cosine == pytest.approx(cosine(estimate, exact), abs=1e-10)
        else:
            assert found.cosine is None
    np.testing.assert_allclose(total, table.vector(plan), atol=1e-15)


def test_a_pair_out_of_reach_is_an_error(field: MlpField, trajectory: Trajectory) -> None:
    table = collect_table(field, trajectory, ADVANTAGES, OBJECTIVE, past=3, future=1)
    with pytest.raises(ValueError, match="plan 'jagg' puts step 1 on knot 4, which was not collected"):
        table.vector(jagg_plan(trajectory.sigmas, 5, 1.0))
    with pytest.raises(ValueError, match="plan 'causal' puts step 4 on knot 0, which was not collected"):
        similarity(table, causal_plan(trajectory.sigmas, [0, 5]))
    whole = collect_table(field, trajectory, ADVANTAGES, OBJECTIVE)
    for plan in (causal_plan(trajectory.sigmas, [0, 4, 8]), jagg_plan(trajectory.sigmas, 3, 1.0)):
        if plan.anticipating:
            assert similarity(table, plan, range(3)).cosine is not None
        else:
            assert similarity(table, plan).cosine == pytest.approx(similarity(whole, plan).cosine, abs=1e-12)


def test_plans_for_other_steps_or_samples_are_refused(field: MlpField, trajectory: Trajectory) -> None:
    table = collect_table(field, trajectory, ADVANTAGES, OBJECTIVE, past=0, future=0)
    other = exact_plan(dance_schedule(10)[:-2])
    per_sample = Plan(tuple(range(10)), torch.eye(10).expand(4, -1, -1), name="own")
    for plan, shape in ((other, r"\[9, 9\]"), (per_sample, r"\[4, 10, 10\]")):
        message = rf"plan '{plan.name}' must have weights \[K, 10\], got {shape}"
        with pytest.raises(ValueError, match=message):
            table.vector(plan)
    for plan, found in (
        (other, r"\[K, 10\], got \[9, 9\]"),
        (replace(per_sample, weights=per_sample.weights[:3]), "4 samples"),
    ):
        with pytest.raises(ValueError, match=found):
            plan_gradients(field, trajectory, ADVANTAGES, OBJECTIVE, {"x": plan})


# Plans that share their passes


@pytest.mark.parametrize("upstream", ["autograd", "closed_form"])
def test_shared_gradients_are_those_of_updates_really_run(
    upstream: str, every_plan: dict[str, MakePlan], field: MlpField, trajectory: Trajectory
) -> None:
    plans = {name: make(trajectory.sigmas) for name, make in every_plan.items()}
    plans["predicted"] = causal_plan(trajectory.sigmas, [0, 2, 6], predict=True)
    own = torch.zeros(4, 10, 10, dtype=torch.float64)
    for sample, (knots, fed) in enumerate([((2, 7), (5, 9)), ((0, 3), (0, 4)), ((8,), (1,)), ((1, 9), (9, 2))]):
        for knot, step in zip(knots, fed, strict=True):
            own[sample, knot, step] = 1.5
    plans["per sample"] = Plan(tuple(range(10)), own, trajectory.sigmas)
    found = plan_gradients(field, trajectory, ADVANTAGES, OBJECTIVE, plans)
    forwards = len(field.calls)
    assert forwards == 10 + 3 + 2, "one per knot that any plan uses, per predicted knot, and for a sample's own knots"
    assert list(found) == list(plans)
    for name, plan in plans.items():
        expected, _ = gradient(field, trajectory, ADVANTAGES, plan, OBJECTIVE, upstream)
        assert (found[name] - expected).norm() < 1e-10 * expected.norm(), name


def test_shared_gradients_refuse_another_schedule(field: MlpField, trajectory: Trajectory) -> None:
    other = exact_plan(dance_schedule(11, shift=2.0)[:-2])
    with pytest.raises(ReplayMismatch, match="sigmas: first differing step is 1"):
        plan_gradients(field, trajectory, ADVANTAGES, OBJECTIVE, {"x": other})


# Measuring leaves no trace

Measure = Callable[[MlpField, Trajectory], object]
MEASURES: dict[str, Measure] = {
    "table": lambda field, t: collect_table(field, t, ADVANTAGES, OBJECTIVE),
    "plans": lambda field, t: plan_gradients(field, t, ADVANTAGES, OBJECTIVE, {"exact": exact_plan(t.sigmas)}),
    "side by side": lambda field, t: collect_table(field, t, ADVANTAGES, OBJECTIVE, workers=2),
    "projected": lambda field, t: collect_table(field, t, ADVANTAGES, OBJECTIVE, space="projected", dimension=50),
}
each_measure = pytest.mark.parametrize("measure", MEASURES.values(), ids=MEASURES)


@each_measure
@pytest.mark.parametrize("train", [True, False], ids=["train", "eval"])
def test_measuring_leaves_no_trace(measure: Measure, train: bool) -> None:
    field = MlpField(dropout=0.5)
    trajectory = make_rollout(field.eval(), steps=4)
    field.train(train)
    before = torch.tensor([0.1, -0.0, float("nan")], dtype=torch.float64).repeat(99)
    field.inner.grad = before[: field.inner.numel()].reshape(field.inner.shape).clone()
    kept, bits = field.inner.grad, field.inner.grad.view(torch.int64).clone()
    frozen = field.outer.requires_grad_(False)
    states = (torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist())  # type: ignore[index]
    version = field.inner._version
    measure(field, trajectory)
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    assert np.random.get_state()[1].tolist() == states[2]  # type: ignore[index]
    assert field.inner.grad is kept
    assert torch.equal(kept.view(torch.int64), bits)
    assert field.bias.grad is None
    assert frozen.grad is None
    assert not frozen.requires_grad
    assert field.training == field.dropout.training == train
    assert field.inner._version == version


@each_measure
def test_measuring_works_without_gradients_around_it(measure: Measure, field: MlpField) -> None:
    trajectory = make_rollout(field, steps=4)
    with torch.no_grad():
        measure(field, trajectory)
        assert not torch.is_grad_enabled()


# Refusals


@each_measure
def test_changed_weights_are_refused_before_any_forward(measure: Measure, field: MlpField) -> None:
    trajectory = make_rollout(field, steps=4)
    nudge(field, 1e-12)
    with pytest.raises(OffPolicyError, match="weights changed since the rollout"):
        measure(field, trajectory)
    assert field.calls == []


@each_measure
def test_other_settings_of_the_policy_are_refused(measure: Measure, field: MlpField) -> None:
    trajectory = replace(make_rollout(field, steps=4), signature={"guidance": "1.0"})
    field.signature = lambda: {"guidance": "3.5"}  # type: ignore[method-assign, assignment]
    with pytest.raises(ReplayMismatch, match=r"guidance: the rollout used '1\.0', the policy now has '3\.5'"):
        measure(field, trajectory)
    assert field.calls == []


@each_measure
def test_a_policy_without_trained_parameters_is_refused(measure: Measure, field: MlpField) -> None:
    trajectory = make_rollout(field.requires_grad_(False), steps=4)
    with pytest.raises(ValueError, match=r"policy must have parameters\(\) of which one requires gradients"):
        measure(field, trajectory)


class Checkpointed(MlpField):
    """Checkpointing of either kind; the reentrant one needs an input with a gradient: a trained one, or any."""

    def __init__(self, reentrant: bool, trained_input: bool) -> None:
        super().__init__()
        self.reentrant, self.trained_input = reentrant, trained_input
        self.before = nn.Parameter(torch.ones((), dtype=torch.float64))

    def velocity(self, latents: Tensor, sigma: Tensor, rows: Tensor) -> Tensor:
        x = torch.cat([latents.flatten(1), sigma[:, None], self.prompts[rows]], dim=1)
        x = x * self.before if self.trained_input else x.requires_grad_()
        recompute = torch.is_grad_enabled()
        hidden = checkpoint(self.block, x, use_reentrant=self.reentrant) if recompute else self.block(x)
        return (hidden @ self.outer.T).reshape(latents.shape)


@each_measure
@pytest.mark.parametrize("trained_input", [True, False])
def test_reentrant_checkpointing_is_refused(measure: Measure, trained_input: bool) -> None:
    """Without a trained input torch itself would say nothing, and the block would get no gradient."""
    field = Checkpointed(True, trained_input)
    trajectory = make_rollout(field, steps=4)
    with pytest.raises(ValueError, match=r"activation checkpointing must be non-reentrant \(use_reentrant=False\)"):
        measure(field, trajectory)
    assert [p.grad for p in field.parameters()] == [None] * 4


@pytest.mark.parametrize("trained_input", [True, False])
def test_other_checkpointing_equals_backward(trained_input: bool) -> None:
    field = Checkpointed(False, trained_input)
    trajectory = make_rollout(field, steps=4)
    plan = exact_plan(trajectory.sigmas)
    found = plan_gradients(field, trajectory, ADVANTAGES, OBJECTIVE, {"exact": plan})["exact"]
    expected, _ = gradient(field, trajectory, ADVANTAGES, plan, OBJECTIVE)
    assert (found - expected).norm() < 1e-12 * expected.norm()


def test_other_errors_of_the_backward_are_their_own(field: MlpField) -> None:
    trajectory = make_rollout(field, steps=4)
    field.velocity = lambda latents, sigma, rows: latents.detach()  # type: ignore[method-assign, assignment]
    with pytest.raises(RuntimeError, match="does not require grad"):
        collect_table(field, trajectory, ADVANTAGES, OBJECTIVE)


@pytest.mark.parametrize("space", ["exact", "projected", "auto"])
@pytest.mark.parametrize("proc", [True, False], ids=["meminfo", "sysconf"])
def test_too_little_memory_is_said_before_any_forward(
    proc: bool, space: SpaceName, field: MlpField, monkeypatch: pytest.MonkeyPatch
) -> None:
    trajectory = make_rollout(field, steps=4)

    def meminfo(_: str) -> io.StringIO:
        if not proc:
            raise OSError("no /proc here")
        return io.StringIO("MemTotal: 99999999 kB\nMemAvailable: 1 kB\n")

    monkeypatch.setattr(devices, "open", meminfo, raising=False)
    if not proc:
        monkeypatch.setattr(devices.os, "sysconf", lambda _: 32)
    with pytest.raises(
        MemoryError, match=r"the cross gradients take 0\.0 GiB, 0\.0 GiB are free here .* lower the reach"
    ):
        collect_table(field, trajectory, ADVANTAGES, OBJECTIVE, space=space)
    assert field.calls == []


def test_enough_memory_is_enough(field: MlpField, monkeypatch: pytest.MonkeyPatch) -> None:
    trajectory = make_rollout(field, steps=4)
    needed = 16 * sum(p.numel() for p in field.parameters()) * 8
    free = -(-needed * 10 // 9 // 1024) + 1
    monkeypatch.setattr(devices, "open", lambda _: io.StringIO(f"MemAvailable: {free} kB\n"), raising=False)
    assert collect_table(field, trajectory, ADVANTAGES, OBJECTIVE).gram.shape == (16, 16)
    monkeypatch.setattr(devices, "open", lambda _: io.StringIO(f"MemAvailable: {free - 3} kB\n"), raising=False)
    with pytest.raises(MemoryError):
        collect_table(field, trajectory, ADVANTAGES, OBJECTIVE, space="exact")
    assert collect_table(field, trajectory, ADVANTAGES, OBJECTIVE, dimension=20).dimension == 20, "projected instead"


# Inner products in any precision


def self_cosine(vector: Tensor) -> float:
    """Cosine of a vector with a copy of itself."""
    gram = gram_matrix(torch.stack([vector, vector.clone()]))
    difference = gram[0, 0] + gram[1, 1] - 2 * gram[0, 1]
    found = similarity_from_products(gram[0, 0], gram[1, 1], gram[0, 1], difference).cosine
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("size", "value", "dtype"),
    [
        (512, 1e-4, torch.float16),  # the sum of squares underflows
        (128, 1e3, torch.float16),  # it overflows
        (1_000_000, 1e-3, torch.bfloat16),  # it stops growing
        (4, 1e-24, torch.float32),
        (4, 1e24, torch.float32),
        (2, 3.4e38, torch.float32),
        (64, 1e-44, torch.float32),
        (300_000, 0.1, torch.float32),
    ],
    ids=str,
)
def test_a_vector_is_its_own_direction(size: int, value: float, dtype: torch.dtype) -> None:
    vector = torch.full((size,), value, dtype=dtype)
    assert 1 - 1e-6 <= self_cosine(vector) <= 1
    gram = gram_matrix(vector[None])
    assert gram.dtype == np.float64
    assert gram[0, 0] == pytest.approx(float(vector.double().square().sum()), rel=1e-6)


def test_squares_beyond_fp32() -> None:
    rows = torch.tensor([[2.0775e38, 3.0262e38], [1.0, 1.0]])
    gram = gram_matrix(rows)
    found = similarity_from_products(gram[0, 0], gram[1, 1], gram[0, 1], 1.0).cosine
    assert found == pytest.approx(0.983159, abs=1e-5)


@pytest.mark.parametrize("scales", [(1e30, 1e30), (1e-30, 1e-30), (1e30, 1e-30), (1.0, 1.0)])
def test_products_of_fp32_rows_of_any_scale(scales: tuple[float, float]) -> None:
    generator = torch.Generator().manual_seed(0)
    a, b = torch.randn(2, 100_000, generator=generator)
    rows = torch.stack([a * scales[0], (a + b) * scales[1]])
    exact = (rows.double() @ rows.double().T).numpy()
    np.testing.assert_allclose(gram_matrix(rows), exact, rtol=1e-6)


@pytest.mark.parametrize("chunk", [7, 64, 1000])
def test_blocks_and_chunks_make_no_difference(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spaces, "CHUNK", chunk)
    rows = torch.randn(130, 300, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    gram = gram_matrix(rows)
    np.testing.assert_allclose(gram, (rows @ rows.T).numpy(), rtol=1e-12, atol=1e-12)
    assert np.array_equal(gram, gram.T)


def test_a_row_of_zeros_has_products_of_zero() -> None:
    gram = gram_matrix(torch.tensor([[0.0, 0.0], [3.0, 4.0]]))
    assert gram.tolist() == [[0, 0], [0, pytest.approx(25, rel=1e-6)]]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_gradients_that_are_not_finite_are_refused(bad: float) -> None:
    rows = torch.ones(3, 5)
    rows[1, 2] = bad
    with pytest.raises(FloatingPointError, match="gradient 1 of 3 is not finite"):
        gram_matrix(rows)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tables_of_other_precisions(dtype: torch.dtype) -> None:
    reference = MlpField()
    field = MlpField(dtype=dtype)
    field.load_state_dict(reference.state_dict())
    reference.load_state_dict(field.state_dict())
    limit = {torch.float32: 1e-4, torch.bfloat16: 5e-2}[dtype]
    trajectory = make_rollout(field, dtype=torch.float32, steps=5)
    table = collect_table(field, trajectory, ADVANTAGES, OBJECTIVE)
    assert table.gram.dtype == np.float64
    plan = causal_plan(trajectory.sigmas, [0, 2])
    field.zero_grad()
    estimate, _ = gradient(field, trajectory, ADVANTAGES, plan, OBJECTIVE)
    exact, _ = gradient(field, trajectory, ADVANTAGES, exact_plan(trajectory.sigmas), OBJECTIVE)
    assert similarity(table, plan).cosine == pytest.approx(cosine(estimate, exact), abs=limit)
    assert similarity(table, exact_plan(trajectory.sigmas)).cosine == pytest.approx(1, abs=1e-12)


def test_a_table_of_advantages_that_vanish(field: MlpField) -> None:
    trajectory = make_rollout(field, steps=4)
    table = collect_table(field, trajectory, torch.zeros(4), OBJECTIVE)
    assert not table.gram.any()
    assert not flat_gradient(field).any()
