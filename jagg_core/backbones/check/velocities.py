"""Checks of velocities: shape, what they depend on and what not, and their sign."""

from __future__ import annotations

import torch

from jagg_core.backbones.check.probe import SAMPLES, STEPS, Outcome, Probe, same
from jagg_core.reference import relative_error
from jagg_core.schedule import dance_schedule
from jagg_core.trajectory import sample_ode

REVERSED = -0.5
"""At sigma 1 a trained velocity holds the noise once, whatever the data; below this share the sign is reversed."""

GROWTH = 3.0
"""Norm of a finished sample over that of its noise, above which sampling is reported as suspicious."""


def shape(probe: Probe) -> Outcome:
    """A velocity has the shape of its latents."""
    expected, found = list(probe.latents.shape), list(probe.base.shape)
    if found != expected:
        return False, f"latents {expected} gave velocities {found}: their shapes must be equal", None
    return True, f"latents {expected} give velocities of the same shape", None


def finite(probe: Probe) -> Outcome:
    """No element of a velocity is NaN or infinite."""
    bad = int((~torch.isfinite(probe.base)).sum())
    if bad:
        return False, f"{bad} of {probe.base.numel()} elements of a velocity are NaN or infinite", float(bad)
    return True, "velocities are finite", None


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


def prompts(probe: Probe) -> Outcome:
    """A velocity follows its own sample's prompt."""
    if len(set(probe.prompts)) == 1:
        return True, "warning: a single prompt, so nothing shows that velocities follow the prompts", None
    named = f"prompts {probe.prompts[0]!r} and {probe.prompts[1]!r}"
    alone = {p: probe.velocity(policy=probe.backbone.policy([p] * SAMPLES)) for p in probe.prompts[:2]}
    change = relative_error([alone[probe.prompts[1]]], [alone[probe.prompts[0]]])
    if not change > probe.tolerance:
        return False, f"{named} give the same velocities: the prompt is not used", change
    own = torch.stack([alone[p][row] for row, p in enumerate(probe.prompts)])
    error = relative_error([probe.base], [own])
    if not error <= probe.tolerance:
        return False, "a sample of a batch with several prompts does not follow its own prompt", error
    return True, f"{named} give different velocities", change


def rows(probe: Probe) -> Outcome:
    """A permuted batch gives permuted velocities."""
    order = list(reversed(range(SAMPLES)))
    error = relative_error([probe.velocity(order)], [probe.base[order]])
    likely = "conditioning must be picked by rows, and sigma taken row by row"
    return same(probe, error, "a permuted batch gives permuted velocities", likely)


def one_by_one(probe: Probe) -> Outcome:
    """A batch gives what its samples give one by one."""
    alone = torch.cat([probe.velocity([row]) for row in range(SAMPLES)])
    likely = "samples must not see each other (batch statistics?), and conditioning must be picked by rows"
    return same(probe, relative_error([alone], [probe.base]), "a batch equals its samples one by one", likely)


def batched_steps(probe: Probe) -> Outcome:
    """Several steps in one call give what separate calls give."""
    everyone = list(range(SAMPLES))
    told = [torch.full_like(probe.sigmas, sigma) for sigma in (0.9, 0.6, 0.3)]
    separate = torch.cat([probe.velocity(everyone, sigma) for sigma in told])
    error = relative_error([probe.velocity(everyone * len(told), torch.cat(told))], [separate])
    likely = "sigma must be taken row by row, and conditioning be picked by rows, which then repeat"
    return same(probe, error, "several steps in one call equal separate calls", likely)


def sigma(probe: Probe) -> Outcome:
    """A velocity depends on sigma."""
    everyone = list(range(SAMPLES))
    high, low = (probe.velocity(everyone, torch.full_like(probe.sigmas, sigma)) for sigma in (0.9, 0.3))
    change = relative_error([low], [high])
    if change > 0:
        return True, "two sigmas give different velocities", change
    return False, "two sigmas give the same velocity: sigma is not used", change


def sign(probe: Probe) -> Outcome:
    """A velocity is noise minus data, not the reverse."""
    everyone = list(range(SAMPLES))
    velocity, noise = probe.velocity(everyone, torch.ones_like(probe.sigmas)).double(), probe.latents.double()
    share = ((velocity * noise).sum() / noise.square().sum()).item()
    if share > REVERSED:
        return True, "share of noise in the velocity at sigma 1 (trained: about 1, untrained: about 0)", share
    if share <= REVERSED:
        return False, "the sign is reversed: velocity is noise minus data; share of noise in it at sigma 1", share
    raise ValueError("the velocity at sigma 1 is not finite")


def sampling(probe: Probe) -> Outcome:
    """Samples of the ODE stay as large as their noise; a warning, for nobody knows how large data are."""
    final = sample_ode(probe.policy, dance_schedule(STEPS), probe.latents).double()
    growth = (final.norm() / probe.latents.double().norm()).item()
    text = f"norm of samples after {STEPS} ODE steps over that of their noise"
    if growth > GROWTH:
        text = f"warning: {text}, above {GROWTH:g}: sign, scale of sigma, latents that are not normalised?"
    return True, text, growth


def no_grad(probe: Probe) -> Outcome:
    """A velocity is the same with and without a graph."""
    error = relative_error([probe.velocity_with_graph()], [probe.base])
    return same(probe, error, "velocities with and without a graph are equal", "a rollout runs without one")
