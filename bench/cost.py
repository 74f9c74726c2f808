"""Predicted times of a group, an update and a training step, from counted work and a few figures of the machine.

A group of W steps costs every scheme some forwards, backwards, all-gathers and reduce-scatters. A forward is 1, a
backward 2, and 3 where activations are recomputed (gradient checkpointing). Under full sharding (FSDP2) a forward and a
backward each gather all parameters once, and a backward scatters all gradients once, whatever the batch; how often the
joint backward of two graphs does so was observed, not assumed: it gathers for both and scatters once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from jagg_core.checks import require_at_least

if TYPE_CHECKING:
    from bench.work import PassWork

RECOMPUTE = 1.0
"""Forwards that gradient checkpointing adds to a backward."""


@dataclass(frozen=True)
class Tally:
    """What a scheme runs: passes of one step each, and collectives over all sharded units."""

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
        """``count`` of these."""
        return Tally(*(count * part for part in (self.forwards, self.backwards, self.gathers, self.scatters)))


def one_by_one(passes: int) -> Tally:
    """Forward and backward, one step after the other."""
    return Tally(passes, passes, 2 * passes, passes)


def in_one_pass(passes: int) -> Tally:
    """The same steps as one batch."""
    return Tally(passes, passes, 2, 1)


@dataclass(frozen=True)
class Scheme:
    """A way to get a group's gradient.

    Attributes:
        label: for people.
        group: what it runs for a group of W steps.
        rest: what it runs for so many steps that are not approximated.
        routed: whether ``jagg_frac`` says which groups it approximates; else all of them.
        scatters_once: gradients are scattered once per update, and kept unsharded until then.
        passes: of the whole update, for a plan that knows no groups; ``group`` then runs so many.
    """

    label: str
    group: Callable[[int], Tally]
    rest: Callable[[int], Tally] = one_by_one
    routed: bool = False
    scatters_once: bool = False
    passes: int | None = None


SCHEMES: dict[str, Scheme] = {
    "exact": Scheme("exact, one step at a time", one_by_one),
    "exact-batched": Scheme("exact, a group's steps in one pass", in_one_pass, rest=in_one_pass),
    "exact-deferred": Scheme("exact, gradients scattered once per update", one_by_one, scatters_once=True),
    "prototype": Scheme("the authors' prototype: W + 2 forwards", lambda w: Tally(w + 2, 2, w + 4, 2), routed=True),
    "paper": Scheme("JAGG (paper), joint backward", lambda w: Tally(w, 2, w + 2, 1), routed=True),
    "closed-sequential": Scheme("JAGG, closed-form s, ends one after the other", lambda w: one_by_one(2), routed=True),
    "closed-batched": Scheme("JAGG, closed-form s, both ends in one pass", lambda w: in_one_pass(2), routed=True),
    "endpoint-only": Scheme("endpoint-only", lambda w: one_by_one(2), routed=True),
}
"""By name, in the order of the tables; those of an `Update` are in `schemes`."""


def schemes(update: Update) -> dict[str, Scheme]:
    """`SCHEMES`, and plans of so many passes that know no groups: causal ones, or random steps, in closed form."""
    found = dict(SCHEMES)
    ways = (("sequential", one_by_one, "one after the other"), ("batched", in_one_pass, "in one pass"))
    for passes in update.passes:
        for name, run, how in ways if passes <= update.trained else ():
            found[f"causal-{passes}-{name}"] = Scheme(f"causal, {passes} passes, {how}", run, passes=passes)
    return found


@dataclass(frozen=True)
class Machine:
    """Figures of the machine and the run; the defaults are assumptions to replace.

    Attributes:
        tflops: reached per device in the model's dtype, in 10^12 per second.
        bandwidth: of a collective per device, in 10^9 bytes per second.
        overlap: share of the compute time under which communication can hide.
        parameter_bytes: per gathered parameter (bf16).
        gradient_bytes: per scattered gradient (fp32).
        samples: per device and pass.
        checkpointing: whether activations are recomputed in the backward.
        other: reward, optimizer and the like, as a share of the exact step's rollout and update; no scheme changes it.

    Raises:
        ValueError: a figure out of range.
    """

    tflops: float = 400.0
    bandwidth: float = 200.0
    overlap: float = 0.9
    parameter_bytes: float = 2.0
    gradient_bytes: float = 4.0
    samples: int = 1
    checkpointing: bool = True
    other: float = 0.0

    def __post_init__(self) -> None:
        for name in ("tflops", "bandwidth", "parameter_bytes", "gradient_bytes"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")
        if not 0 <= self.overlap <= 1:
            raise ValueError(f"overlap must be between 0 and 1, got {self.overlap}")
        if not 0 <= self.other < math.inf:
            raise ValueError(f"other must be at least 0, got {self.other}")
        require_at_least(self, samples=1)


@dataclass(frozen=True)
class Update:
    """What is trained: T of ``steps`` sampling steps (all but the last), in groups of W, or by plans of so many passes.

    Attributes:
        steps: sampling steps.
        window: steps W of a group.
        jagg_frac: share of the groups, from the first, that the paper's recipe approximates.
        passes: of plans that know no groups; numbers above T are left out of the predictions.

    Raises:
        ValueError: a setting out of range.
    """

    steps: int = 21
    window: int = 4
    jagg_frac: float = 0.6
    passes: tuple[int, ...] = (8, 5)

    def __post_init__(self) -> None:
        from jagg_core.plans import groups_of, routed_groups

        require_at_least(self, steps=2, window=1)
        groups_of(self.trained, self.window)
        routed_groups(1, self.jagg_frac)
        if min(self.passes, default=1) < 1:
            raise ValueError(f"passes must be at least 1, got {list(self.passes)}")

    @property
    def trained(self) -> int:
        """Trained steps T."""
        return self.steps - 1

    def tally(self, scheme: Scheme) -> Tally:
        """What a scheme runs in an update: approximated groups, then all other steps, left-over ones included."""
        from jagg_core.plans import groups_of, routed_groups

        if scheme.passes is not None:
            return scheme.group(scheme.passes)
        groups = groups_of(self.trained, self.window)
        count = routed_groups(len(groups), self.jagg_frac) if scheme.routed else len(groups)
        total = scheme.group(self.window).times(count)
        exact = self.trained - count * self.window
        whole, left = divmod(exact, self.window)
        total += scheme.rest(self.window).times(whole)
        if left:
            total += scheme.rest(left)
        return Tally(total.forwards, total.backwards, total.gathers, 1) if scheme.scatters_once else total

    def group(self, scheme: Scheme) -> Tally:
        """What a scheme runs for W steps: for a plan without groups, their share of the update."""
        if scheme.passes is not None:
            return self.tally(scheme).times(self.window / self.trained)
        return scheme.group(self.window)


@dataclass(frozen=True)
class Prediction:
    """Seconds on ``ranks`` devices."""

    scheme: str
    label: str
    ranks: int
    group: float
    update: float
    step: float
    tally: Tally = field(repr=False)


def seconds(tally: Tally, work: PassWork, machine: Machine, ranks: int) -> float:
    """Time of what a scheme runs: compute, and the communication that does not hide under it."""
    backward = work.backward + (RECOMPUTE * work.forward if machine.checkpointing else 0.0)
    operations = machine.samples * (tally.forwards * work.forward + tally.backwards * backward)
    compute = operations / (machine.tflops * 1e12)
    moved = tally.gathers * machine.parameter_bytes + tally.scatters * machine.gradient_bytes
    communication = moved * work.parameters * (ranks - 1) / ranks / (machine.bandwidth * 1e9)
    return compute + max(0.0, communication - machine.overlap * compute)


def check_ranks(ranks: Sequence[int]) -> None:
    """Raise ValueError unless every number of devices is at least 1, and there is one."""
    if not ranks or min(ranks) < 1 or len(set(ranks)) < len(ranks):
        raise ValueError(f"ranks must be different numbers of at least 1, got {list(ranks)}")


def predict(work: PassWork, update: Update, machine: Machine, ranks: Sequence[int]) -> list[Prediction]:
    """Times of every scheme on every number of devices.

    Raises:
        ValueError: a number of devices below 1.
    """
    check_ranks(ranks)
    found = []
    for count in ranks:
        rollout = seconds(Tally(update.steps, 0, update.steps, 0), work, machine, count)
        exact = seconds(update.tally(SCHEMES["exact"]), work, machine, count)
        other = machine.other * (rollout + exact)
        for name, scheme in schemes(update).items():
            tally = update.tally(scheme)
            spent = seconds(tally, work, machine, count)
            group = seconds(update.group(scheme), work, machine, count)
            found.append(Prediction(name, scheme.label, count, group, spent, rollout + spent + other, tally))
    return found


def reduction(predictions: Sequence[Prediction], scheme: str, ranks: int, what: str) -> float:
    """Share of exact's time that ``scheme`` saves of ``what`` (group, update or step)."""
    times: dict[str, float] = {p.scheme: getattr(p, what) for p in predictions if p.ranks == ranks}
    return 1 - times[scheme] / times["exact"]


def as_values(prediction: Prediction) -> dict[str, Any]:
    """A prediction as a record keeps it."""
    tally = prediction.tally
    return {
        "group_s": prediction.group,
        "update_s": prediction.update,
        "step_s": prediction.step,
        "forwards": tally.forwards,
        "backwards": tally.backwards,
        "gathers": tally.gathers,
        "scatters": tally.scatters,
    }
