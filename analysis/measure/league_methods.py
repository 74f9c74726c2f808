"""Methods of the league: a rollout, an upstream gradient and a plan each. A new one is an entry of `METHODS`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from analysis.measure.estimators import grouped
from analysis.measure.gradients import on_policy_upstream
from analysis.measure.job import Job
from analysis.measure.league_settings import League
from analysis.measure.pathwise import slopes_of
from analysis.measure.rivals import FAST_WINDOW, MIX_WINDOW, per_sample_plan
from analysis.measure.rollouts import Batch, start
from jagg_core import Plan, causal_plan, exact_plan, rollout, sample_ode, subsample_plan
from jagg_core.choices import Sweep
from jagg_core.forward import awm_upstream, forward_states, nft_upstream, velocities
from jagg_core.pathwise import adjoint_sweep, pathwise_upstream
from jagg_core.plans.calibration import read_plan
from jagg_core.rewards import differentiable
from jagg_core.seeding import generator_for

REFERENCE = "pathwise"
"""The method whose expected gradient is the reference: that of all steps of the full sampler."""


@dataclass(frozen=True)
class Setting:
    """What methods are given: the loaded backbone and reward, and the settings."""

    job: Job
    settings: League

    def knots_on(self, sigmas: Tensor, passes: int) -> list[int]:
        """Returns the calibrated knots with so many passes, on another schedule the steps nearest to them in sigma."""
        plan = read_plan(self.settings.calibration_file, passes)
        calibrated, levels = torch.as_tensor(plan.sigmas).tolist(), sigmas.tolist()
        if len(calibrated) == len(levels):
            return list(plan.knots)
        free = list(range(1, len(levels)))
        for knot in plan.knots[1:]:
            free.remove(min(free, key=lambda step, level=calibrated[knot]: abs(levels[step] - level)))  # type: ignore[misc]
        return sorted(set(range(len(sigmas))) - set(free))


@dataclass(frozen=True)
class Rollout:
    """Which states a method trains on: a batch by its seed, for so many network evaluations of a sample."""

    label: str
    evaluations: int
    make: Callable[[Setting, int], Batch]


@dataclass(frozen=True)
class Upstream:
    """Which upstream gradients it takes there.

    Attributes:
        label: in tables.
        make: returns ``[B, *D]`` for every step; takes the advantages, ``[B]``.
        evaluations: of one step, without the pass itself.
        uses_advantages: whether advantages of 1 make sense, which show the leak.
    """

    label: str
    make: Callable[[Setting, Batch, Tensor], Sequence[Tensor]]
    evaluations: int = 0
    uses_advantages: bool = True


@dataclass(frozen=True)
class Method:
    """A row of the league.

    Attributes:
        name: in records and flags.
        label: in tables and figures.
        rollout: see `Rollout`.
        upstream: see `Upstream`.
        plan: made for every batch, so that random ones are drawn again.
    """

    name: str
    label: str
    rollout: Rollout
    upstream: Upstream
    plan: Callable[[Setting, Batch], Plan]


def _sde(setting: Setting, seed: int, steps: int, shared: bool = False, size: int = 0, stop: int = 0) -> Batch:
    """Rolls out by the SDE: everywhere, or in a random window of ``size`` steps that begins before ``stop``."""
    job, recipe = setting.job, replace(setting.settings.recipe, steps=steps + 1)
    begun = start(job.backbone, recipe, seed, shared_noise=shared)
    window = None
    if size:
        first = int(torch.randint(stop, (), generator=generator_for(seed, "league", "window")))
        window = range(first, first + size)
    trajectory = rollout(
        begun.policy,
        recipe.sigmas(job.backbone),
        recipe.kernel(setting.settings.eta),
        begun.latents,
        seed,
        timestep_mode=recipe.timestep_mode,
        window=window,
    )
    return begun.scored(trajectory, job.backbone, job.reward)


def _noised(setting: Setting, seed: int, steps: int, states: int) -> Batch:
    """Samples by the ODE and mixes fresh noise into the samples."""
    job, recipe = setting.job, replace(setting.settings.recipe, steps=steps)
    begun = start(job.backbone, recipe, seed)
    mode = recipe.timestep_mode
    final = sample_ode(begun.policy, recipe.sigmas(job.backbone), begun.latents, timestep_mode=mode)
    noised = forward_states(begun.policy, final, states, seed, shift=recipe.shift, timestep_mode=mode)
    return begun.scored(noised, job.backbone, job.reward)


def sde(steps: int, *, shared: bool = False) -> Rollout:
    """Takes SDE steps, all of them trained, but for a last deterministic one."""
    text = ", one initial noise per prompt" if shared else ""
    return Rollout(f"SDE, {steps} steps{text}", steps + 1, partial(_sde, steps=steps, shared=shared))


def window(steps: int, size: int, stop: int) -> Rollout:
    """Takes SDE steps in a window that begins at random, deterministic ones elsewhere."""
    make = partial(_sde, steps=steps - 1, size=size, stop=stop)
    return Rollout(f"SDE in {size} of {steps} steps, else ODE", steps, make)


def noised(steps: int, states: int) -> Rollout:
    """Draws samples by the ODE, and mixes noise of ``states`` levels into each."""
    return Rollout(f"ODE, {steps} steps; {states} noised", steps, partial(_noised, steps=steps, states=states))


def _score(setting: Setting, batch: Batch, advantages: Tensor) -> Sequence[Tensor]:
    return on_policy_upstream(batch.policy, batch.trajectory, advantages, setting.job.objective)


def _pathwise(setting: Setting, batch: Batch, _: Tensor, sweep: Sweep) -> Sequence[Tensor]:
    job = setting.job
    value = differentiable(job.reward, job.backbone.decode, batch.prompts)
    slopes = slopes_of(batch, setting.settings.recipe.samples, job.objective)
    adjoint = adjoint_sweep(batch.policy, batch.trajectory, value, sweep=sweep)
    return list(pathwise_upstream(batch.trajectory, adjoint, slopes.to(batch.trajectory.latents)))


def _awm(_: Setting, batch: Batch, advantages: Tensor) -> Sequence[Tensor]:
    states = batch.trajectory
    old, gradient = velocities(batch.policy, states), awm_upstream(states, advantages)
    return [gradient(step, states.latents[step], old[step]) for step in range(states.steps)]


def _nft(_: Setting, batch: Batch, advantages: Tensor) -> Sequence[Tensor]:
    states = batch.trajectory
    old = velocities(batch.policy, states)
    gradient = nft_upstream(states, advantages, old)
    return [gradient(step, states.latents[step], old[step]) for step in range(states.steps)]


SCORE = Upstream("score function", _score)
PATHWISE = Upstream("pathwise", partial(_pathwise, sweep="full"), 2, uses_advantages=False)
FROZEN = Upstream("pathwise, network left out", partial(_pathwise, sweep="frozen"), uses_advantages=False)
AWM = Upstream("AWM", _awm)
NFT = Upstream("DiffusionNFT", _nft, 1)  # the old policy's velocity: from the second update on it is another
FULL_STEPS = 20
"""Trained steps of the full sampler."""

FULL = sde(FULL_STEPS)


def _exact(_: Setting, batch: Batch) -> Plan:
    return exact_plan(batch.trajectory.sigmas)


def causal(passes: int, *, shifted: bool = True) -> Callable[[Setting, Batch], Plan]:
    """Takes causal plans on the calibrated knots."""

    def make(setting: Setting, batch: Batch) -> Plan:
        sigmas = batch.trajectory.sigmas
        return causal_plan(sigmas, setting.knots_on(sigmas, passes), predict=shifted)

    return make


def paper(frac: float, size: int = 4, family: str = "jagg") -> Callable[[Setting, Batch], Plan]:
    """Takes the paper's rule, or its ablation, on the first ``frac`` of groups of ``size`` steps."""
    return lambda _, batch: grouped(batch.trajectory.sigmas, family, size, frac).plans[0]


def _random(_: Setting, batch: Batch, count: int = 8) -> Plan:
    return subsample_plan(batch.trajectory.sigmas, count, generator_for(batch.seed, "league", "steps"))


def _fraction(setting: Setting, batch: Batch, share: float = 0.6) -> Plan:
    sigmas = batch.trajectory.sigmas
    generator = generator_for(batch.seed, "league", "fraction")
    return per_sample_plan(sigmas, round(share * len(sigmas)), batch.trajectory.batch, generator)


def frontier(steps: Sequence[int], passes: Sequence[int]) -> Iterator[Method]:
    """Yields exact and causal plans on rollouts of fewer sampling steps, every pair of the two numbers."""
    for count in steps:
        text = f"{count} sampling steps"
        yield Method(f"steps-{count}", f"{text}, exact", sde(count), SCORE, _exact)
        for some in (k for k in passes if k < count):
            label = f"{text}, causal, {some} shifted knots"
            yield Method(f"steps-{count}-causal-{some}", label, sde(count), SCORE, causal(some))


METHODS: dict[str, Method] = {
    method.name: method
    for method in (
        Method("exact", "exact", FULL, SCORE, _exact),
        Method("paper-0.6", "the paper's recipe (W = 4, 3 of 5 groups)", FULL, SCORE, paper(0.6)),
        Method("paper-1.0", "the paper's rule, W = 4, all groups", FULL, SCORE, paper(1.0)),
        Method("paper-w7", "the paper's rule, W = 7, all groups", FULL, SCORE, paper(1.0, 7)),
        Method("paper-w12", "the paper's rule, W = 12, all groups", FULL, SCORE, paper(1.0, 12)),
        Method("causal-8", "causal, 8 shifted knots", FULL, SCORE, causal(8)),
        Method("causal-5", "causal, 5 shifted knots", FULL, SCORE, causal(5)),
        Method("causal-5-unshifted", "causal, 5 knots", FULL, SCORE, causal(5, shifted=False)),
        Method("causal-3", "causal, 3 shifted knots", FULL, SCORE, causal(3)),
        Method("causal-2", "causal, 2 shifted knots", FULL, SCORE, causal(2)),
        *frontier((10, 5), (5, 3)),
        Method("fraction-0.6", "0.6 of the steps, random per sample (DanceGRPO)", FULL, SCORE, _fraction),
        Method("mixgrpo", "MixGRPO's window, 4 of 25", window(25, MIX_WINDOW, 21), SCORE, _exact),
        Method("flow-grpo-fast", "Flow-GRPO-Fast's window, 2 of 20", window(20, FAST_WINDOW, 9), SCORE, _exact),
        Method("random-8", "8 random steps", FULL, SCORE, _random),
        Method("endpoint-only", "ends of groups only, W = 4", FULL, SCORE, paper(1.0, 4, "endpoint")),
        Method("shared-noise", "exact, one initial noise per prompt", sde(20, shared=True), SCORE, _exact),
        Method("awm-5", "AWM, 5 states", noised(10, 5), AWM, _exact),
        Method("nft-5", "DiffusionNFT, 5 states", noised(10, 5), NFT, _exact),
        Method(REFERENCE, "pathwise, exact (the reference)", FULL, PATHWISE, _exact),
        Method("pathwise-causal-5", "pathwise, causal, 5 shifted knots", FULL, PATHWISE, causal(5)),
        Method("frozen", "stop-gradient sweep, exact", FULL, FROZEN, _exact),
        Method("frozen-causal-5", "stop-gradient sweep, causal, 5 shifted knots", FULL, FROZEN, causal(5)),
    )
}
"""By name, in the order of the table."""
