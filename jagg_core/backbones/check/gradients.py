"""Checks of gradients: every way to the same update gives the same, with and without recomputed activations."""

from __future__ import annotations

from jagg_core.backbones.check.probe import Outcome, Probe, same
from jagg_core.plans import causal_plan, exact_plan, jagg_plan
from jagg_core.policy import has_reentrant_checkpointing
from jagg_core.reference import relative_error


def every_parameter(probe: Probe) -> Outcome:
    """A gradient reaches every trained parameter."""
    trained = [(p, g) for p, g in zip(probe.parameters, probe.exact, strict=True) if p.requires_grad]
    missing = [probe.name_of(p) for p, g in trained if g is None]
    if missing:
        named = ", ".join(missing[:5]) + (f" and {len(missing) - 5} more" if len(missing) > 5 else "")
        text = f"{len(missing)} of {len(trained)} trained parameters get no gradient: {named}; detached, or not used?"
        return False, text, float(len(missing))
    zero = sum(not g.any() for _, g in trained if g is not None)
    note = f" (of {zero} of them it is zero)" if zero else ""
    return True, f"a gradient reaches all {len(trained)} trained parameters{note}", None


def closed_form(probe: Probe) -> Outcome:
    """The closed form gives the update of autograd."""
    plan = exact_plan(probe.trajectory.sigmas)
    gradients = probe.gradient(plan, "closed_form", "sequential"), probe.plain(plan)
    likely = "a velocity of the replay differs from the rollout's"
    what = "upstream gradients in closed form and by autograd, and a plain loop, give the same update"
    return same(probe, max(relative_error(g, probe.exact) for g in gradients), what, likely)


def pairs(probe: Probe) -> Outcome:
    """The paper's rule on pairs of steps, which leaves nothing out, gives the exact update."""
    found = probe.gradient(jagg_plan(probe.trajectory.sigmas, window=2, jagg_frac=1.0), "autograd", "joint")
    likely = "this plan is exact by construction: the gradient does not repeat"
    return same(probe, relative_error(found, probe.exact), "the paper's rule at W = 2 equals exact", likely)


def joint(probe: Probe) -> Outcome:
    """One backward call from two graphs gives what two calls give."""
    plan = jagg_plan(probe.trajectory.sigmas, window=3, jagg_frac=1.0)
    together, apart = (probe.gradient(plan, "autograd", mode) for mode in ("joint", "sequential"))
    likely = "a forward must leave nothing behind that the backward of an earlier one needs"
    return same(probe, relative_error(together, apart), "two graphs in one backward call equal two calls", likely)


def batched(probe: Probe) -> Outcome:
    """Several steps in one pass give the exact update."""
    sigmas = probe.trajectory.sigmas
    found = probe.gradient(causal_plan(sigmas, knots=range(len(sigmas))), "closed_form", "batched")
    likely = "several steps in one pass must not see each other"
    what = "the causal plan with all knots, in one batched pass, equals exact"
    return same(probe, relative_error(found, probe.exact), what, likely)


def checkpointing(probe: Probe) -> Outcome:
    """Recomputed activations change nothing."""
    before, exact = probe.velocity_with_graph().detach(), probe.exact
    probe.backbone.enable_gradient_checkpointing()
    after = Probe(probe.backbone)
    velocity = after.velocity_with_graph()
    if has_reentrant_checkpointing(velocity):
        return False, "gradient checkpointing must be non-reentrant (use_reentrant=False): autograd.grad needs it", None
    error = max(relative_error([velocity], [before]), relative_error(after.exact, exact))
    what = "gradient checkpointing changes neither velocities nor gradients"
    return same(probe, error, what, "reentrant, or the recomputed forward differs?")
