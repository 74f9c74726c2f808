"""Arms: ways to compute the update gradient that are timed, measured, counted or predicted. Each is declared once.

Every command, table and figure reads `ARMS`. torch is imported inside functions, because help must not wait for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal

from jagg_core.checks import require_one_of
from jagg_core.choices import BackwardMode, UpstreamMode

if TYPE_CHECKING:
    from torch import Tensor

    from bench.group import Group
    from jagg_core import Plan

Bench = Literal["group", "update", "memory", "collectives", "cost"]
"""Commands of ``python -m bench`` that have arms."""

PHASES = ("forward", "upstream", "backward")

Clock = Callable[[], float]


@dataclass(frozen=True)
class Tally:
    """Passes of one step each, and collectives over all sharded units."""

    forwards: float
    backwards: float
    gathers: float
    scatters: float

    def __add__(self, other: Tally) -> Tally:
        return Tally(
            self.forwards + other.forwards,
            self.backwards + other.backwards,
            self.gathers + other.gathers,
            self.scatters + other.scatters,
        )

    def times(self, count: float) -> Tally:
        """Multiplies every entry by ``count``."""
        return Tally(*(count * part for part in (self.forwards, self.backwards, self.gathers, self.scatters)))


def one_by_one(passes: int) -> Tally:
    """Tallies a forward and a backward per step, one step after the other."""
    return Tally(passes, passes, 2 * passes, passes)


def in_one_pass(passes: int) -> Tally:
    """Tallies the same steps as one batch."""
    return Tally(passes, passes, 2, 1)


@dataclass(frozen=True)
class Arm:
    """A way to compute the update gradient.

    Attributes:
        name: in records, tables, flags and figures; ``{passes}`` stands for the number of passes of a calibrated plan.
        label: in legends and tables; likewise.
        estimator: its plan's, see `jagg_core.plans.ESTIMATORS`.
        benches: commands that have it.
        upstream, backward: modes of the engine.
        knots: steps of an estimator of kind knots; without them its plan comes from a calibration file.
        tally: what it runs for a group of W steps, or for so many passes; None for arms that others are compared with.
        rest: what it runs for so many steps that are not approximated.
        deferred: gradients are reduced once, after the last backward, and kept on the rank until then.
        bare: model calls without the engine; take the group and a clock or None, return seconds by phase.
        former: other names of the arm in stored records.
        passes: of a calibrated plan.

    Raises:
        ValueError: an unknown bench, or a cost without a tally.
    """

    name: str
    label: str
    estimator: str
    benches: tuple[Bench, ...] = ("group", "memory", "collectives", "cost")
    upstream: UpstreamMode = "autograd"
    backward: BackwardMode = "sequential"
    knots: tuple[int, ...] = ()
    tally: Callable[[int], Tally] | None = None
    rest: Callable[[int], Tally] = one_by_one
    deferred: bool = False
    bare: Callable[[Group, Clock | None], dict[str, float]] | None = field(default=None, repr=False)
    former: tuple[str, ...] = ()
    passes: int | None = None

    def __post_init__(self) -> None:
        for bench in self.benches:
            require_one_of("benches", bench, Bench)
        if "cost" in self.benches and self.tally is None:
            raise ValueError(f"arm {self.name!r} must have a tally to be in bench 'cost', got None")

    @property
    def calibrated(self) -> bool:
        """Whether its plans come from a calibration file."""
        return "{passes}" in self.name

    @property
    def routed(self) -> bool:
        """Whether ``jagg_frac`` decides which groups it approximates; else it approximates all of them."""
        from jagg_core.plans import ESTIMATORS

        return ESTIMATORS[self.estimator].kind == "groups"

    def at(self, passes: int) -> Arm:
        """Returns the arm of a calibrated plan with ``passes`` passes."""
        return replace(
            self, name=self.name.format(passes=passes), label=self.label.format(passes=passes), passes=passes
        )

    def plan(self, sigmas: Tensor, window: int, jagg_frac: float = 1.0, seed: int = 0) -> Plan:
        """Builds its plan for the steps ``sigmas`` [T].

        Args:
            sigmas: noise levels of the trained steps.
            window: steps W of a group.
            jagg_frac: share of the groups that are approximated, from the first.
            seed: draws random steps, as many as the paper's rule has passes.

        Raises:
            ValueError: see the estimator's constructor.
        """
        from jagg_core.plans import ESTIMATORS, jagg_plan
        from jagg_core.seeding import generator_for

        estimator = ESTIMATORS[self.estimator]
        if estimator.kind == "groups":
            return estimator.build(sigmas, window, jagg_frac)
        if estimator.kind == "knots":
            return estimator.build(sigmas, list(self.knots))
        if estimator.kind == "random":
            passes = jagg_plan(sigmas, window, jagg_frac).passes
            return estimator.build(sigmas, passes, generator_for(seed, estimator.name))
        return estimator.build(sigmas)


def _exact_calls(group: Group, clock: Clock | None) -> dict[str, float]:
    """Runs forward and backward of every step with ``s_j`` given: the least that exact can cost. No phases."""
    import torch

    for step, given in enumerate(group.upstream):
        velocity = group.policy.velocity(*group.trajectory.site(step), group.rows)
        torch.autograd.backward(velocity, given.to(velocity.dtype))
    return {}


def _prototype_calls(group: Group, clock: Clock | None) -> dict[str, float]:
    """Runs the authors' prototype: all steps forward without a graph, then both ends again, each with its backward."""
    import torch

    from jagg_core import ClippedSurrogate
    from jagg_core.objective import upstream_autograd

    trajectory, rows, last = group.trajectory, group.rows, group.trajectory.steps - 1
    now = clock or (lambda: 0.0)
    seconds = dict.fromkeys(PHASES, 0.0)
    start = now()
    with torch.no_grad():
        velocities = [group.policy.velocity(*trajectory.site(step), rows) for step in range(trajectory.steps)]
    middle = now()
    totals = {0: torch.zeros_like(trajectory.latents[0]), last: torch.zeros_like(trajectory.latents[0])}
    for step, velocity in enumerate(velocities):
        upstream = upstream_autograd(ClippedSurrogate(), trajectory, step, velocity, group.advantages).gradient
        totals[0] += (1 - step / last) * upstream
        totals[last] += step / last * upstream
    seconds["upstream"] = now() - middle
    seconds["forward"] = middle - start
    for knot, total in totals.items():
        start = now()
        velocity = group.policy.velocity(*trajectory.site(knot), rows)
        middle = now()
        torch.autograd.backward(velocity, total.to(velocity.dtype))
        seconds["forward"] += middle - start
        seconds["backward"] += now() - middle
    return seconds


PAPER = "paper-joint"
"""The paper's scheme to the letter."""

CLOSED_FORM = "closed-form-sequential"
"""The same plan without forwards at inner steps."""

HEADLINE = (PAPER, CLOSED_FORM, "closed-form-batched")
"""Arms that the first sentences of a page name."""

ARMS: dict[str, Arm] = {
    arm.name: arm
    for arm in (
        Arm("exact", "exact", "exact", ("group", "update", "memory", "collectives", "cost"), tally=one_by_one),
        Arm("exact-again", "exact, timed again (noise floor)", "exact", ("group", "update")),
        Arm("exact-bare", "exact, bare model calls", "exact", ("group",), bare=_exact_calls),
        Arm(
            "exact-batched",
            "exact, all steps in one pass",
            "exact",
            backward="batched",
            tally=in_one_pass,
            rest=in_one_pass,
        ),
        Arm(
            "exact-deferred",
            "exact, gradients scattered once",
            "exact",
            ("collectives", "cost"),
            tally=one_by_one,
            deferred=True,
        ),
        Arm("exact-closed-form", "exact, closed-form s", "exact", ("update",), "closed_form"),
        Arm(
            "prototype",
            "the authors' prototype (W + 2 forwards)",
            "jagg-index",
            ("group", "collectives", "cost"),
            tally=lambda w: Tally(w + 2, 2, w + 4, 2),
            bare=_prototype_calls,
        ),
        Arm(
            PAPER,
            "paper JAGG (joint backward)",
            "jagg",
            ("group", "update", "memory", "collectives", "cost"),
            backward="joint",
            # one call for two graphs gathers for each and scatters once, as counted
            tally=lambda w: Tally(w, 2, w + 2, 1),
            former=("paper",),
        ),
        Arm(
            CLOSED_FORM,
            "JAGG, closed-form s, sequential",
            "jagg",
            ("group", "update", "memory", "collectives", "cost"),
            "closed_form",
            tally=lambda w: one_by_one(2),
            former=("jagg-closed-form-sequential", "closed-sequential"),
        ),
        Arm(
            "closed-form-batched",
            "JAGG, closed-form s, batched",
            "jagg",
            ("group", "update", "memory", "collectives", "cost"),
            "closed_form",
            "batched",
            tally=lambda w: in_one_pass(2),
            former=("jagg-closed-form-batched", "closed-batched"),
        ),
        Arm("endpoint-only", "endpoint-only", "endpoint", tally=lambda w: one_by_one(2)),
        Arm(
            "subsample",
            "random steps, as many passes as JAGG",
            "subsample",
            ("group", "collectives"),
            "closed_form",
            tally=lambda w: one_by_one(2),
        ),
        Arm(
            "causal-{passes}-sequential",
            "causal, {passes} passes, sequential",
            "causal-predicted",
            ("update", "cost"),
            "closed_form",
            tally=one_by_one,
        ),
        Arm(
            "causal-{passes}-batched",
            "causal, {passes} passes, batched",
            "causal-predicted",
            ("update", "cost"),
            "closed_form",
            "batched",
            tally=in_one_pass,
        ),
    )
}
"""By name, in the order of the tables."""


def arms_of(bench: Bench, passes: Sequence[int] = ()) -> Iterator[Arm]:
    """Yields the arms of a command: those without a calibration, then those of every number of ``passes``."""
    arms = [arm for arm in ARMS.values() if bench in arm.benches]
    yield from (arm for arm in arms if not arm.calibrated)
    for count in passes:
        yield from (arm.at(count) for arm in arms if arm.calibrated)


def find_arm(name: str, passes: int | None = None) -> Arm | None:
    """Returns the arm that a record calls ``name``; ``passes`` are those of its plan. None: an arm of another suite."""
    for arm in ARMS.values():
        one = arm.at(passes) if arm.calibrated and passes is not None else arm
        if name in (one.name, *one.former):
            return one
    return None


def name_of(name: str) -> str:
    """Returns the registered name for an arm of a stored record."""
    arm = find_arm(name)
    return name if arm is None else arm.name


def label_of(name: str, passes: int | None = None) -> str:
    """Returns the label of an arm that a record calls ``name``; without an entry the name itself."""
    arm = find_arm(name, None if passes is None else int(passes))
    return name if arm is None else arm.label
