"""Plans as data: every constructor's weights, routing, components and refusals."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from jagg_core.plans import (
    Plan,
    causal_plan,
    check_knots,
    constructors,
    endpoint_plan,
    exact_plan,
    groups_of,
    jagg_plan,
    routed_groups,
    spline_plan,
    subsample_plan,
)
from jagg_core.plans import plan as plan_module
from jagg_core.schedule import check_sigmas, dance_schedule
from tests.jagg_core.fields import PLANS, full_weights

T = 20
SIGMAS = dance_schedule(T + 1)[:T]


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


CONSTRUCTORS: dict[str, Callable[[Tensor], Plan]] = {
    "exact": exact_plan,
    "jagg": lambda s: jagg_plan(s, 5, 0.75),
    "jagg-all": lambda s: jagg_plan(s, 4, 1.0),
    "jagg-index": lambda s: jagg_plan(s, 5, 1.0, "index"),
    "endpoint": lambda s: endpoint_plan(s, 5, 0.75),
    "subsample": lambda s: subsample_plan(s, 6, seeded()),
    "spline": lambda s: spline_plan(s, [2, 7, 11, 14, 17]),
    "spline-linear": lambda s: spline_plan(s, [2, 7, 11, 14, 17], "linear"),
    "causal": lambda s: causal_plan(s, [0, 7, 11, 14, 17]),
    "causal-lead-in": lambda s: causal_plan(s, [2, 7, 11, 14, 17]),
}
each_constructor = pytest.mark.parametrize("name", CONSTRUCTORS)


@each_constructor
def test_shapes(name: str) -> None:
    plan = CONSTRUCTORS[name](SIGMAS)
    assert plan.steps == T
    assert plan.passes == len(plan.knots)
    assert plan.weights.shape == (plan.passes, T)
    assert plan.weights.dtype == torch.float64
    assert plan.sigmas is not None
    assert torch.equal(plan.sigmas, SIGMAS)
    assert plan.name in name


INTERPOLATING = [name for name in CONSTRUCTORS if name not in ("endpoint", "subsample")]


@pytest.mark.parametrize("name", INTERPOLATING)
def test_every_step_is_spent_once(name: str) -> None:
    weights = CONSTRUCTORS[name](SIGMAS).weights
    torch.testing.assert_close(weights.sum(0), torch.ones(T, dtype=torch.float64), atol=1e-14, rtol=0)


@pytest.mark.parametrize("name", [name for name in INTERPOLATING if name not in ("causal", "causal-lead-in", "spline")])
def test_interpolation_keeps_the_mean_sigma(name: str) -> None:
    """Linear interpolation in sigma reproduces sigma itself; index weights do not."""
    plan = CONSTRUCTORS[name](SIGMAS)
    error = (SIGMAS[list(plan.knots)] @ plan.weights - SIGMAS).abs().max().item()
    assert error > 1e-3 if name == "jagg-index" else error < 1e-14


@each_constructor
def test_a_knot_keeps_its_own_step(name: str) -> None:
    plan = CONSTRUCTORS[name](SIGMAS)
    own = full_weights(plan)[list(plan.knots), list(plan.knots)]
    expected = T / 6 if name == "subsample" else 1.0
    assert own.tolist() == pytest.approx([expected] * plan.passes, abs=0)


# Groups and routing


@pytest.mark.parametrize("window", [1, 2])
@pytest.mark.parametrize("weighting", ["sigma", "index"])
def test_groups_of_one_and_two_are_exact(window: int, weighting: str) -> None:
    plan = jagg_plan(SIGMAS, window, 1.0, weighting)  # type: ignore[arg-type]
    assert plan.knots == tuple(range(T))
    assert torch.equal(plan.weights, torch.eye(T, dtype=torch.float64))


def test_no_routing_is_exact() -> None:
    assert torch.equal(jagg_plan(SIGMAS, 5, 0.0).weights, torch.eye(T, dtype=torch.float64))


@pytest.mark.parametrize(
    ("window", "frac", "passes"),
    [(4, 0.6, 14), (4, 1.0, 10), (5, 0.75, 11), (5, 1.0, 8), (5, 0.0, 20), (20, 1.0, 2), (1, 1.0, 20)],
)
def test_passes_of_the_papers_rule(window: int, frac: float, passes: int) -> None:
    assert jagg_plan(SIGMAS, window, frac).passes == passes
    assert endpoint_plan(SIGMAS, window, frac).passes == passes


def test_weights_by_hand() -> None:
    sigmas = torch.tensor([1.0, 0.9, 0.6, 0.5, 0.3, 0.1], dtype=torch.float64)
    plan = jagg_plan(sigmas, 3, 0.5)
    assert plan.knots == (0, 2, 3, 4, 5)
    expected = [
        [1, 0.75, 0, 0, 0, 0],
        [0, 0.25, 1, 0, 0, 0],
        [0, 0, 0, 1, 0, 0],
        [0, 0, 0, 0, 1, 0],
        [0, 0, 0, 0, 0, 1],
    ]
    torch.testing.assert_close(plan.weights, torch.tensor(expected, dtype=torch.float64), atol=1e-15, rtol=0)
    index = jagg_plan(sigmas, 3, 0.5, "index")
    assert index.weights[:2, 1].tolist() == [0.5, 0.5]
    endpoint = endpoint_plan(sigmas, 3, 0.5)
    assert endpoint.knots == plan.knots
    assert endpoint.weights[:, 1].tolist() == [0] * 5
    assert torch.equal(endpoint.weights[:, [0, 2, 3, 4, 5]], torch.eye(5, dtype=torch.float64))


@pytest.mark.parametrize("window", [3, 4, 7])
def test_index_weights_are_the_prototypes(window: int) -> None:
    weights = full_weights(jagg_plan(SIGMAS, window, 1.0, "index"))
    for group in groups_of(T, window):
        for j, step in enumerate(group):
            assert weights[group[-1], step].item() == pytest.approx(j / (window - 1), abs=1e-15)


@pytest.mark.parametrize(("steps", "window", "left"), [(14, 4, 2), (13, 5, 3), (20, 7, 6), (9, 9, 0)])
def test_left_over_steps_are_exact(steps: int, window: int, left: int) -> None:
    sigmas = dance_schedule(steps + 1)[:steps]
    weights = full_weights(jagg_plan(sigmas, window, 1.0))
    whole = steps - left
    assert torch.equal(weights[whole:, whole:], torch.eye(left, dtype=torch.float64))
    assert not weights[:whole, whole:].any()
    assert not weights[whole:, :whole].any()
    assert jagg_plan(sigmas, window, 1.0).passes == 2 * (steps // window) + left


@pytest.mark.parametrize(
    ("steps", "window", "expected"),
    [(6, 3, [(0, 1, 2), (3, 4, 5)]), (7, 3, [(0, 1, 2), (3, 4, 5)]), (3, 3, [(0, 1, 2)]), (2, 1, [(0,), (1,)])],
)
def test_groups(steps: int, window: int, expected: list[tuple[int, ...]]) -> None:
    assert [tuple(group) for group in groups_of(steps, window)] == expected


@pytest.mark.parametrize(
    ("groups", "frac", "routed"),
    [
        (50, 0.58, 29),  # int(50 * 0.58) is 28
        (5, 0.6, 3),
        (4, 0.75, 3),
        (4, 0.6, 2),
        (5, 0.5, 3),  # half up
        (4, 0.625, 3),
        (25, 0.58, 15),  # 14.5, but 14.499999999999998 in floating point
        (4, 0.0, 0),
        (4, 0.1, 0),
        (4, 1.0, 4),
        (1, 0.49, 0),
    ],
)
def test_routed_groups(groups: int, frac: float, routed: int) -> None:
    assert routed_groups(groups, frac) == routed


def test_the_noisiest_groups_are_routed() -> None:
    weights = full_weights(jagg_plan(SIGMAS, 5, 0.5))
    assert not torch.equal(weights[:5, :5], torch.eye(5, dtype=torch.float64))
    assert torch.equal(weights[10:, 10:], torch.eye(10, dtype=torch.float64))


# Subsampling


def test_subsampling_is_unbiased() -> None:
    draws, count = 4000, 6
    generator = seeded(1)
    total = torch.zeros(T, T, dtype=torch.float64)
    for _ in range(draws):
        total += full_weights(subsample_plan(SIGMAS, count, generator))
    mean = total / draws
    error = math.sqrt((T / count - 1) / draws)  # of a diagonal entry: T/k with probability k/T, else 0
    assert (mean.diagonal() - 1).abs().max() < 5 * error
    assert not (mean - torch.diag(mean.diagonal())).any()


def test_subsampling_follows_its_generator() -> None:
    first, again, other = (subsample_plan(SIGMAS, 6, seeded(seed)).knots for seed in (0, 0, 1))
    assert first == again != other
    before = torch.get_rng_state()
    subsample_plan(SIGMAS, 6, seeded())
    assert torch.equal(torch.get_rng_state(), before)


def test_subsampling_everything_is_exact() -> None:
    assert torch.equal(subsample_plan(SIGMAS, T, seeded()).weights, torch.eye(T, dtype=torch.float64))


# Spline and causal


def test_spline_by_hand() -> None:
    sigmas = torch.tensor([1.0, 0.9, 0.6, 0.5, 0.3, 0.1], dtype=torch.float64)
    constant = spline_plan(sigmas, [1, 4])
    expected = [[1, 1, 0.5, 1 / 3, 0, 0], [0, 0, 0.5, 2 / 3, 1, 1]]
    torch.testing.assert_close(constant.weights, torch.tensor(expected, dtype=torch.float64), atol=1e-15, rtol=0)
    linear = spline_plan(sigmas, [1, 4], "linear")
    expected = [[7 / 6, 1, 0.5, 1 / 3, 0, -1 / 3], [-1 / 6, 0, 0.5, 2 / 3, 1, 4 / 3]]
    torch.testing.assert_close(linear.weights, torch.tensor(expected, dtype=torch.float64), atol=1e-15, rtol=0)


def test_spline_extrapolates_from_the_outer_segments() -> None:
    weights = full_weights(spline_plan(SIGMAS, [3, 8, 15], "linear"))
    assert weights[[3, 8], 0].abs().min() > 0
    assert weights[15, :3].abs().max() == 0
    assert weights[[8, 15], 19].abs().min() > 0
    assert weights[3, 16:].abs().max() == 0


@pytest.mark.parametrize("outside", ["constant", "linear"])
def test_spline_over_all_steps_is_exact(outside: str) -> None:
    plan = spline_plan(SIGMAS, range(T), outside)  # type: ignore[arg-type]
    assert torch.equal(plan.weights, torch.eye(T, dtype=torch.float64))


def test_spline_on_group_ends_is_the_papers_rule_with_shared_ends() -> None:
    """With the ends of one group as knots, inside it the spline is JAGG."""
    assert torch.equal(spline_plan(SIGMAS, [0, T - 1]).weights, jagg_plan(SIGMAS, T, 1.0).weights)


def test_a_spline_with_one_knot_is_constant() -> None:
    assert spline_plan(SIGMAS, [4]).weights.tolist() == [[1.0] * T]


def test_causal_by_hand() -> None:
    weights = causal_plan(SIGMAS[:7], [1, 3, 4]).weights
    expected = [[1, 1, 1, 0, 0, 0, 0], [0, 0, 0, 1, 0, 0, 0], [0, 0, 0, 0, 1, 1, 1]]
    assert weights.tolist() == expected


def test_causal_over_all_steps_is_exact() -> None:
    assert torch.equal(causal_plan(SIGMAS, range(T)).weights, torch.eye(T, dtype=torch.float64))


# Anticipation


@pytest.mark.parametrize(
    ("plan", "anticipating"),
    [
        (exact_plan(SIGMAS), False),
        (jagg_plan(SIGMAS, 1, 1.0), False),
        (jagg_plan(SIGMAS, 2, 1.0), False),
        (jagg_plan(SIGMAS, 5, 0.0), False),
        (jagg_plan(SIGMAS, 3, 1.0), True),
        (jagg_plan(SIGMAS, 3, 1.0, "index"), True),
        (endpoint_plan(SIGMAS, 5, 1.0), False),
        (subsample_plan(SIGMAS, 6, seeded()), False),
        (spline_plan(SIGMAS, [0, 19]), True),
        (spline_plan(SIGMAS, [0]), False),
        (spline_plan(SIGMAS, [1]), True),
        (causal_plan(SIGMAS, [0, 7, 11]), False),
        (causal_plan(SIGMAS, [0]), False),
        (causal_plan(SIGMAS, [1, 7, 11]), True),
        (Plan((1,), torch.tensor([[0.0, 1.0, 1.0]])), False),
        (Plan((1,), torch.tensor([[[0.0, 1.0, 0.0]], [[-0.1, 1.0, 0.0]]])), True),
    ],
)
def test_a_plan_knows_whether_it_anticipates(plan: Plan, anticipating: bool) -> None:
    assert plan.anticipating is anticipating


# Components


def test_components_are_groups() -> None:
    assert jagg_plan(SIGMAS[:11], 4, 0.5).components() == [
        ([0, 1], [0, 1, 2, 3]),
        *(([position], [position + 2]) for position in range(2, 9)),
    ]


def test_components_follow_shared_steps() -> None:
    chain = spline_plan(SIGMAS[:8], [0, 3, 7])
    assert chain.components() == [([0, 1, 2], list(range(8)))]
    assert causal_plan(SIGMAS[:8], [2, 5]).components() == [([0], [0, 1, 2, 3, 4]), ([1], [5, 6, 7])]
    crossing = Plan((0, 1, 2, 3), torch.tensor([[1, 0, 0, 1], [0, 1, 0, 0], [0, 0, 1, 0], [1, 0, 0, 1]]))
    assert crossing.components() == [([0, 3], [0, 3]), ([1], [1]), ([2], [2])]


def test_components_hold_for_all_rows() -> None:
    weights = torch.eye(3).repeat(2, 1, 1)
    weights[1, 0, 1] = 0.5
    assert Plan((0, 1, 2), weights).components() == [([0, 1], [0, 1]), ([2], [2])]


def test_components_lose_inner_steps_where_the_plan_does() -> None:
    parts = endpoint_plan(SIGMAS[:10], 5, 1.0).components()
    assert parts == [([0], [0]), ([1], [4]), ([2], [5]), ([3], [9])]


# Weights of any rule


def test_from_weights_builds_what_the_constructors_build() -> None:
    causal = causal_plan(SIGMAS, [0, 5, 12])
    plan = Plan.from_weights(SIGMAS, [0, 5, 12], causal.weights, "mine")
    assert (plan.knots, plan.name, plan.anticipating) == (causal.knots, "mine", False)
    assert torch.equal(plan.weights, causal.weights)


@pytest.mark.parametrize(
    ("sigmas", "knots", "message"),
    [
        (SIGMAS.flip(0), [0, 5, 12], "sigmas"),
        (SIGMAS, [0, 5, 5], "knots must increase strictly"),
        (SIGMAS, [0, 5], r"weights must have shape \[K, T\]"),
        (SIGMAS, [0, 5, 1.5], "knots must be whole numbers"),
    ],
)
def test_from_weights_refuses_what_is_no_plan(sigmas: Tensor, knots: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Plan.from_weights(sigmas, knots, torch.eye(3, T), "mine")


# Rows of a batch on different steps

ROWS = torch.stack([dance_schedule(26)[:20], dance_schedule(26)[5:25], torch.linspace(1, 0.05, T, dtype=torch.float64)])


@pytest.mark.parametrize("name", [name for name in CONSTRUCTORS if name != "subsample"])
def test_per_row_weights_are_each_rows_own(name: str) -> None:
    together = CONSTRUCTORS[name](ROWS)
    shared = together.weights.expand(3, -1, -1)
    for row in range(3):
        alone = CONSTRUCTORS[name](ROWS[row])
        assert together.knots == alone.knots
        torch.testing.assert_close(shared[row], alone.weights, atol=1e-15, rtol=0)
    assert together.sigmas is not None
    assert torch.equal(together.sigmas, ROWS)
    assert together.steps == T
    if name in ("jagg", "spline"):
        assert not torch.equal(shared[0], shared[2]), "the rows are meant to differ"


# Refusals


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: causal_plan(SIGMAS, []), "knots must not be empty, got none"),
        (lambda: spline_plan(SIGMAS, []), "knots must not be empty"),
        (lambda: causal_plan(SIGMAS, [0, 20]), r"knots must lie in 0..19, got \[0, 20\]"),
        (lambda: spline_plan(SIGMAS, [-1, 4]), r"knots must lie in 0..19, got \[-1, 4\]"),
        (lambda: causal_plan(SIGMAS, [0, 5, 5]), r"knots must increase strictly, got \[0, 5, 5\]"),
        (lambda: spline_plan(SIGMAS, [7, 3]), r"knots must increase strictly, got \[7, 3\]"),
        (lambda: spline_plan(SIGMAS, [3], "linear"), r"knots must be at least two for outside='linear', got \[3\]"),
        (lambda: spline_plan(SIGMAS, [3], "cubic"), "outside must be one of .*'linear'.* got 'cubic'"),
        (lambda: jagg_plan(SIGMAS, 0), "window must be between 1 and the 20 trained steps, got 0"),
        (lambda: jagg_plan(SIGMAS, 21), "window must be between 1 and the 20 trained steps, got 21"),
        (lambda: endpoint_plan(SIGMAS, 21), "window must be between 1 and the 20"),
        (lambda: jagg_plan(SIGMAS, 5, -0.1), "jagg_frac must be between 0 and 1, got -0.1"),
        (lambda: jagg_plan(SIGMAS, 5, 1.1), "jagg_frac must be between 0 and 1, got 1.1"),
        (lambda: jagg_plan(SIGMAS, 5, math.nan), "jagg_frac must be between 0 and 1, got nan"),
        (lambda: jagg_plan(SIGMAS, 5, 0.6, "time"), "weighting must be one of .*'index'.* got 'time'"),
        (lambda: subsample_plan(SIGMAS, 0, seeded()), "count must be between 1 and the 20 trained steps, got 0"),
        (lambda: subsample_plan(SIGMAS, 21, seeded()), "count must be between 1 and the 20 trained steps, got 21"),
        (lambda: exact_plan(SIGMAS.flip(0)), "sigmas must decrease strictly"),
        (lambda: jagg_plan(torch.empty(0)), "sigmas must have shape"),
        (lambda: Plan((), torch.zeros(0, 4)), "knots must not be empty"),
        (lambda: Plan((0, 1), torch.zeros(1, 4)), r"with K = 2 knots and T >= 1, got \[1, 4\]"),
        (lambda: Plan((0,), torch.zeros(4)), r"got \[4\]"),
        (lambda: Plan((0,), torch.zeros(1, 0)), r"got \[1, 0\]"),
        (lambda: Plan((0,), torch.zeros(1, 1, 1, 4)), r"got \[1, 1, 1, 4\]"),
        (lambda: Plan((4,), torch.zeros(1, 4)), r"knots must lie in 0..3, got \[4\]"),
        (lambda: Plan((1, 0), torch.zeros(2, 4)), "knots must increase strictly"),
        (lambda: Plan((0,), torch.tensor([[1.0, math.nan]])), r"weights must be finite, got nan at \[0, 1\]"),
        (lambda: Plan((0,), torch.tensor([[1.0, math.inf]])), "weights must be finite"),
        (lambda: Plan((0,), torch.ones(1, 3), SIGMAS[:4]), "sigmas must have 3 steps as the weights have, got 4"),
        (lambda: check_knots([2], 2), r"knots must lie in 0..1, got \[2\]"),
    ],
)
def test_what_is_no_plan_is_refused(make: Callable[[], Plan], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_a_plan_detaches_its_weights() -> None:
    weights = torch.ones(1, 2, requires_grad=True)
    assert not Plan((0,), weights).weights.requires_grad


@pytest.mark.parametrize("name", [*PLANS, "causal-predicted"])
def test_sigmas_are_checked_once_per_plan(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    entered = []

    def counted(sigmas: Tensor, name: str = "sigmas") -> Tensor:
        entered.append(name)
        return check_sigmas(sigmas, name)

    for module in (constructors, plan_module):
        monkeypatch.setattr(module, "check_sigmas", counted)
    make = (PLANS | {"causal-predicted": lambda sigmas: causal_plan(sigmas, [0, 2], predict=True)})[name]
    plan = make(dance_schedule(7)[:-1])
    assert entered == ["sigmas"] and plan.sigmas is not None
