"""Checks the contract of a loaded backbone: what the engine and the calibration take for granted."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

import torch

from jagg_core.backbones.probe import SAMPLES, STEPS, Outcome, Probe, parameters_of, same, unchanged
from jagg_core.backbones.protocol import Backbone
from jagg_core.plans import causal_plan, exact_plan, jagg_plan
from jagg_core.policy import has_reentrant_checkpointing
from jagg_core.reference import relative_error
from jagg_core.rollouts import sample_ode
from jagg_core.schedule import dance_schedule

CHECKS: dict[str, Callable[[Probe], Outcome]] = {}
"""Every check by its name, in the order in which they run, which is the order of this file."""

REVERSED = -0.5
"""At sigma 1 a trained velocity holds the noise once, whatever the data; below this share the sign is reversed."""

GROWTH = 3.0
"""Norm of a finished sample over that of its noise, above which sampling is reported as suspicious."""

_PATH = re.compile(r"(?:^|[\s'\"(=:,])(?:~|\.{1,2}|[A-Za-z]:)?[/\\]")
"""Matches the start of a path (root, home, current folder, drive), not a slash inside a name."""


@dataclass(frozen=True)
class Finding:
    """The result of one check.

    Attributes:
        name: the check's name.
        ok: whether the contract holds. A text that starts with "warning" is ok, and yet worth a look.
        text: the result in words.
        value: the measured number that decided; None without one.
    """

    name: str
    ok: bool
    text: str
    value: float | None = None


def check_backbone(backbone: Backbone, progress: Callable[[Finding], None] | None = None) -> list[Finding]:
    """Checks a loaded backbone on four samples of two prompts. A check that raises is a failed finding.

    ``.grad``, the state of torch's random numbers and train or eval mode are left as they were. Gradient checkpointing
    is on afterwards, for a backbone has no way to turn it off. ``progress`` is called with each finding.
    """
    findings = []
    with unchanged(backbone):
        probe = Probe(backbone)
        for name, check in CHECKS.items():
            try:
                finding = Finding(name, *check(probe))
            except Exception as error:
                finding = Finding(name, False, f"raised {type(error).__name__}: {error}")
            findings.append(finding)
            if progress is not None:
                progress(finding)
    return findings


def _check(check: Callable[[Probe], Outcome]) -> Callable[[Probe], Outcome]:
    """Registers a check under the words of its name."""
    CHECKS[check.__name__.replace("_", " ")] = check
    return check


@_check
def shape(probe: Probe) -> Outcome:
    """A velocity has the shape of its latents."""
    latents, velocities = list(probe.latents.shape), list(probe.base.shape)
    if velocities != latents:
        return False, f"latents {latents} gave velocities {velocities}: their shapes must be equal", None
    return True, f"latents {latents} give velocities of the same shape", None


@_check
def finite(probe: Probe) -> Outcome:
    """No element of a velocity is NaN or infinite."""
    if bad := int((~torch.isfinite(probe.base)).sum()):
        return False, f"{bad} of {probe.base.numel()} elements of a velocity are NaN or infinite", float(bad)
    return True, "velocities are finite", None


@_check
def deterministic(probe: Probe) -> Outcome:
    """The same call gives the same velocity."""
    first, again = probe.velocity(), probe.velocity()
    if torch.equal(first, again):
        return True, "two equal calls give equal velocities", None
    modes = [module.training for module in probe.backbone.transformer.modules()]
    text = (
        f"two equal calls differ: dropout, or another random layer; {sum(modes)} of {len(modes)} modules "
        "are in train mode (a backbone is loaded in eval mode)"
    )
    return False, text, relative_error([again], [first])


@_check
def prompts(probe: Probe) -> Outcome:
    """A velocity follows its sample's prompt."""
    if len(set(probe.prompts)) == 1:
        return True, "warning: a single prompt, so nothing shows that velocities follow the prompts", None
    named = f"prompts {probe.prompts[0]!r} and {probe.prompts[1]!r}"
    alone = {p: probe.velocity(policy=probe.backbone.policy([p] * SAMPLES)) for p in probe.prompts[:2]}
    change = relative_error([alone[probe.prompts[1]]], [alone[probe.prompts[0]]])
    if not change > probe.tolerance:
        return False, f"{named} give the same velocities: the prompt is not used", change
    expected = torch.stack([alone[p][row] for row, p in enumerate(probe.prompts)])
    error = relative_error([probe.base], [expected])
    if not error <= probe.tolerance:
        return False, "in a batch with several prompts, a sample does not follow its prompt", error
    return True, f"{named} give different velocities", change


@_check
def rows(probe: Probe) -> Outcome:
    """A permuted batch gives permuted velocities."""
    order = list(reversed(range(SAMPLES)))
    error = relative_error([probe.velocity(order)], [probe.base[order]])
    likely = "conditioning must be picked by rows, and sigma taken row by row"
    return same(probe, error, "a permuted batch gives permuted velocities", likely)


@_check
def one_by_one(probe: Probe) -> Outcome:
    """A batch gives what its samples give one by one."""
    alone = torch.cat([probe.velocity([row]) for row in range(SAMPLES)])
    likely = "samples must not see each other (batch statistics?), and conditioning must be picked by rows"
    return same(probe, relative_error([alone], [probe.base]), "a batch equals its samples one by one", likely)


@_check
def batched_steps(probe: Probe) -> Outcome:
    """Several steps in one call give what separate calls give."""
    levels = [torch.full_like(probe.sigmas, sigma) for sigma in (0.9, 0.6, 0.3)]
    separate = torch.cat([probe.velocity(sigmas=level) for level in levels])
    together = probe.velocity(list(range(SAMPLES)) * len(levels), torch.cat(levels))
    error = relative_error([together], [separate])
    likely = "sigma must be taken row by row, and conditioning be picked by rows, which then repeat"
    return same(probe, error, "several steps in one call equal separate calls", likely)


@_check
def sigma(probe: Probe) -> Outcome:
    """A velocity depends on sigma."""
    high, low = (probe.velocity(sigmas=torch.full_like(probe.sigmas, sigma)) for sigma in (0.9, 0.3))
    change = relative_error([low], [high])
    if change > 0:
        return True, "two sigmas give different velocities", change
    return False, "two sigmas give the same velocity: sigma is not used", change


@_check
def sign(probe: Probe) -> Outcome:
    """A velocity is noise minus data, not the reverse."""
    velocity, noise = probe.velocity(sigmas=torch.ones_like(probe.sigmas)).double(), probe.latents.double()
    share = ((velocity * noise).sum() / noise.square().sum()).item()
    if share > REVERSED:
        return True, "share of noise in the velocity at sigma 1 (trained: about 1, untrained: about 0)", share
    if share <= REVERSED:  # false for NaN
        return False, "the sign is reversed: velocity is noise minus data; share of noise in it at sigma 1", share
    raise ValueError("the velocity at sigma 1 is not finite")


@_check
def sampling(probe: Probe) -> Outcome:
    """Samples of the ODE stay as large as their noise; only a warning, because the size of data is not known."""
    final = sample_ode(probe.policy, dance_schedule(STEPS), probe.latents).double()
    growth = (final.norm() / probe.latents.double().norm()).item()
    text = f"norm of samples after {STEPS} ODE steps over that of their noise"
    if growth > GROWTH:
        text = f"warning: {text}, above {GROWTH:g}: sign, scale of sigma, latents that are not normalised?"
    return True, text, growth


@_check
def no_grad(probe: Probe) -> Outcome:
    """A velocity is the same with and without a graph."""
    error = relative_error([probe.velocity_with_graph()], [probe.base])
    return same(probe, error, "velocities with and without a graph are equal", "a rollout runs without one")


@_check
def parameters(probe: Probe) -> Outcome:
    """``parameters()`` gives the same tensors every time, and some of them are trained."""
    first = probe.parameters
    probe.velocity()
    for again in (parameters_of(probe.policy), parameters_of(probe.backbone.policy(probe.prompts))):
        if len(again) != len(first) or any(a is not b for a, b in zip(first, again, strict=True)):
            return False, "parameters() must give the same tensors at every call, in the same order", None
    if not (trained := sum(p.requires_grad for p in first)):
        return False, f"none of the {len(first)} tensors of parameters() requires a gradient", 0.0
    return True, f"parameters() gives the same {len(first)} tensors every time, {trained} of them trained", None


@_check
def signature(probe: Probe) -> Outcome:
    """``signature()`` holds settings as text, the same for the same prompts and on every machine."""
    signature_of = getattr(probe.policy, "signature", None)
    if signature_of is None:
        return False, "the policy has no signature(): a replay under other settings would not be noticed", None
    settings = signature_of()
    if not isinstance(settings, dict) or not settings:
        return False, f"signature() must be a dict with at least one setting, got {settings!r}", None
    for key, value in settings.items():
        if not isinstance(key, str) or not isinstance(value, str):
            return False, f"signature() must be dict[str, str], got {key!r}: {value!r}", None
        if _PATH.search(value):
            return False, f"signature() has a path, which differs between machines: {key!r}: {value!r}", None
    again: dict[str, str] = probe.backbone.policy(probe.prompts).signature()  # type: ignore[attr-defined]
    if again != settings:
        return False, f"signature() differs between two policies of the same prompts: {settings} and {again}", None
    return True, f"signature() has {', '.join(settings)}", None


@_check
def every_parameter(probe: Probe) -> Outcome:
    """A gradient reaches every trained parameter."""
    trained = [(p, g) for p, g in zip(probe.parameters, probe.exact, strict=True) if p.requires_grad]
    if missing := [probe.name_of(p) for p, g in trained if g is None]:
        named = ", ".join(missing[:5]) + (f" and {len(missing) - 5} more" if len(missing) > 5 else "")
        text = f"{len(missing)} of {len(trained)} trained parameters get no gradient: {named}; detached, or not used?"
        return False, text, float(len(missing))
    zero = sum(not g.any() for _, g in trained if g is not None)
    note = f" ({zero} gradients are zero)" if zero else ""
    return True, f"a gradient reaches all {len(trained)} trained parameters{note}", None


@_check
def closed_form(probe: Probe) -> Outcome:
    """The closed form gives the update of autograd."""
    plan = exact_plan(probe.trajectory.sigmas)
    gradients = probe.gradient(plan, "closed_form", "sequential"), probe.plain(plan)
    likely = "a velocity of the replay differs from the rollout's"
    what = "upstream gradients in closed form and by autograd, and a plain loop, give the same update"
    return same(probe, max(relative_error(g, probe.exact) for g in gradients), what, likely)


@_check
def pairs(probe: Probe) -> Outcome:
    """The paper's rule on pairs of steps, which leaves nothing out, gives the exact update."""
    gradients = probe.gradient(jagg_plan(probe.trajectory.sigmas, window=2, jagg_frac=1.0), "autograd", "joint")
    likely = "this plan is exact by construction: the gradient does not repeat"
    return same(probe, relative_error(gradients, probe.exact), "the paper's rule at W = 2 equals exact", likely)


@_check
def joint(probe: Probe) -> Outcome:
    """One backward call from two graphs gives what two calls give."""
    plan = jagg_plan(probe.trajectory.sigmas, window=3, jagg_frac=1.0)
    together, apart = (probe.gradient(plan, "autograd", mode) for mode in ("joint", "sequential"))
    likely = "a forward must leave nothing behind that the backward of an earlier one needs"
    return same(probe, relative_error(together, apart), "two graphs in one backward call equal two calls", likely)


@_check
def batched(probe: Probe) -> Outcome:
    """Several steps in one pass give the exact update."""
    sigmas = probe.trajectory.sigmas
    gradients = probe.gradient(causal_plan(sigmas, knots=range(len(sigmas))), "closed_form", "batched")
    likely = "several steps in one pass must not see each other"
    what = "the causal plan with all knots, in one batched pass, equals exact"
    return same(probe, relative_error(gradients, probe.exact), what, likely)


@_check
def decode(probe: Probe) -> Outcome:
    """``decode`` gives images in [0, 1]."""
    with torch.no_grad():
        images = probe.backbone.decode(probe.trajectory.final)
    if images.ndim != 4 or len(images) != SAMPLES:
        return False, f"images must have shape [{SAMPLES}, C, H, W], got {list(images.shape)}", None
    if not torch.isfinite(images).all():
        return False, "images have NaN or infinite pixels", None
    low, high = images.min().item(), images.max().item()
    if low < 0 or high > 1:
        return False, f"images must lie in [0, 1], got {low:g} to {high:g}", low if low < 0 else high
    return True, f"images {list(images.shape)} lie in [0, 1]", None


@_check
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
