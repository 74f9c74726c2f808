"""What causal plans lose of the expected gradient, by pathwise gradients on rollout batches.

Pathwise upstream gradients have the policy gradient's expectation under plans that do not look ahead, and far less
noise (`docs/method.md`). Plans that look ahead are left out: their expectation has a further term, the leak, which
pathwise gradients do not see.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from analysis.measure.cache import Arrays
from analysis.measure.estimators import NamedPlan, exact, predicted, with_knots
from analysis.measure.gradients import on_policy_upstream
from analysis.measure.job import Job
from analysis.measure.knot_search import Knots
from analysis.measure.rollouts import Batch, make_batch
from analysis.measure.signal_gradients import upstream_rows
from analysis.measure.study import Recipe
from analysis.statistics.learning_signal import products, stored_products
from jagg_core import ClippedSurrogate, group_advantages
from jagg_core.advantages import advantage_slopes
from jagg_core.backbones import Backbone
from jagg_core.pathwise import adjoint_sweep, pathwise_upstream
from jagg_core.plans import estimators
from jagg_core.records import recorded
from jagg_core.rewards import Reward, differentiable, load_reward, reward_fingerprints
from jagg_core.seeding import initial_latents

SCORE = "score"
"""Of a cell's name: the exact gradient by the score function, on the batches of the pathwise ones."""

POWER_BATCHES = 8
"""The first batches, on which the power of plans' policy gradients is measured: noise power is known from few."""


@dataclass(frozen=True)
class PathwiseRows:
    """Gradients of one batch.

    Attributes:
        rows: projected, ``[E + 1, dimension]``: of E estimators by pathwise upstream, then exact's by the score
            function.
        powers: squared norms of the policy gradient by the same E estimators, ``[E]``; NaN where not asked for.
        norms: root mean square of the adjoint by step, ``[T]``.
    """

    rows: Tensor
    powers: Tensor
    norms: Tensor


def pathwise_plans(sigmas: Tensor, knots: Knots, shifted: Sequence[int]) -> list[NamedPlan]:
    """Lists exact, then plans that do not look ahead: every number of passes as it is, ``shifted`` ones shifted too.

    Plans on the same states share passes; shifted knots are states that no other plan has, so each costs a forward.
    """
    chosen = [exact(sigmas)]
    for family in (e.name for e in estimators(searched=True, looks_ahead=False) if e.name in knots):
        counts = sorted((k for k in knots[family] if k < sigmas.shape[-1]), reverse=True)
        chosen += [with_knots(sigmas, family, knots[family][k]) for k in counts]
        chosen += predicted(sigmas, knots, [k for k in counts if k in shifted]) if family == "causal" else []
    return chosen


def pathwise_reward(reward: Reward, proxy: str, backbone: Backbone, device: str) -> tuple[Reward, str]:
    """Returns the reward whose pathwise gradients are taken, and why there are none; empty if there are.

    ``proxy``: name of the reward that is taken where ``reward`` has no gradient; empty for none.

    Raises:
        ValueError: the proxy has no gradient either, or there is no such reward.
    """
    reason = _no_gradient(reward, backbone)
    if not reason or not proxy:
        return reward, reason
    other = load_reward(proxy, dataset=backbone.dataset, device=device)
    if reason := _no_gradient(other, backbone):
        raise ValueError(f"proxy_reward must be differentiable, got {proxy}: {reason}")
    return other, ""


def _no_gradient(reward: Reward, backbone: Backbone) -> str:
    """Says in a sentence why the reward has no gradient in the latents; empty if it has one."""
    latents = initial_latents(backbone.latent_shape, 0, range(1)).to(backbone.device)
    value = differentiable(reward, backbone.decode, list(backbone.prompts[:1]))
    try:
        with torch.enable_grad():
            value(latents.requires_grad_(True))
    except ValueError as error:
        return str(error)
    return ""


def slopes_of(batch: Batch, samples: int, objective: ClippedSurrogate, **advantage: Any) -> Tensor:
    """Computes derivatives of the advantages in the samples' rewards, ``[B]``; 0 where the loss clips the advantage."""
    groups = torch.arange(len(batch.rewards), device=batch.rewards.device) // samples
    slopes = advantage_slopes(batch.rewards, groups, **advantage)
    advantages = group_advantages(batch.rewards, groups, **advantage)
    return torch.where(objective.clip_advantages(advantages) == advantages, slopes, 0.0)


def pathwise_rows(
    batch: Batch,
    value: Callable[[Tensor], Tensor],
    slopes: Tensor,
    objective: ClippedSurrogate,
    chosen: Sequence[NamedPlan],
    powered: set[str],
    dimension: int,
    seed: int,
    workers: int,
) -> PathwiseRows:
    """Computes the gradients of one batch; see `PathwiseRows`.

    Args:
        batch: its trajectory is swept.
        value: the reward as a function of final latents; see `jagg_core.rewards.differentiable`.
        slopes: see `slopes_of`.
        objective: of the policy gradient.
        chosen: estimators that do not look ahead, exact first.
        powered: names of those whose policy gradient is taken as well.
        dimension: of the projection, as ``seed`` shared by all batches.
        seed: likewise.
        workers: passes at a time.

    Raises:
        ValueError: an estimator that looks ahead, or a reward without gradient.
        FloatingPointError: a gradient that is not finite.
    """
    ahead = [e.name for e in chosen if e.anticipating]
    if ahead:
        raise ValueError(f"estimators must not look ahead for pathwise gradients, which miss their leak, got {ahead}")
    trajectory = batch.trajectory
    adjoint = adjoint_sweep(batch.policy, trajectory, value)
    pathwise = list(pathwise_upstream(trajectory, adjoint, slopes.to(trajectory.latents)))
    score = on_policy_upstream(batch.policy, trajectory, batch.advantages, objective)
    by_score = [e for e in chosen if e.name in powered]
    rows = upstream_rows(batch, [(pathwise, chosen), (score, by_score)], dimension, seed, workers)
    if not torch.isfinite(rows).all():
        raise FloatingPointError("a gradient is not finite")
    powers = torch.full((len(chosen),), torch.nan, dtype=torch.float64)
    squares = rows[len(chosen) :].double().square().sum(1).cpu()
    for place, estimator in enumerate(chosen):
        if estimator.name in powered:
            powers[place] = squares[[e.name for e in by_score].index(estimator.name)]
    of_exact = len(chosen) + [e.name for e in by_score].index(chosen[0].name)
    return PathwiseRows(torch.cat([rows[: len(chosen)], rows[of_exact, None]]), powers, adjoint.norms)


def measure_pathwise(
    job: Job,
    eta: float,
    knots: Knots,
    reward: Reward,
    recipe: Recipe,
    batches: int,
    powered: Sequence[int],
    projection: tuple[int, int],
) -> None:
    """Adds a cell per causal plan: inner products of its pathwise gradients and exact's over all pairs of batches.

    Args:
        job: gets the cells.
        eta: of the rollouts.
        knots: of the causal plans.
        reward: differentiable.
        recipe: of a batch.
        batches: their number.
        powered: passes of the plans whose policy gradient is taken as well, for its noise.
        projection: dimension and seed, shared by all batches.
    """
    plans = pathwise_plans(job.sigmas, knots, powered)
    names = {"exact", *(f"causal{kind}-{k}" for kind in ("", "-predicted") for k in powered)}
    dimension, seed = projection
    proxy = {} if reward is job.reward else reward_fingerprints(reward.name, reward)
    banks: list[Arrays] = []
    with recorded(job.record.cells, f"eta={eta:g}/pathwise", eta=eta, reward=reward.name, proxy=bool(proxy)) as cell:
        for number in tqdm(range(batches), desc=f"pathwise gradients, eta {eta:g}", unit="batch"):
            asked = names if number < POWER_BATCHES else {"exact"}

            def make(number: int = number, asked: set[str] = asked) -> Arrays:
                batch = make_batch(job.backbone, reward, recipe, eta, "pathwise", number)
                value = differentiable(reward, job.backbone.decode, batch.prompts)
                slopes = slopes_of(batch, recipe.samples, job.objective)
                made = pathwise_rows(batch, value, slopes, job.objective, plans, asked, dimension, seed, job.workers)
                return {name: tensor.cpu().numpy() for name, tensor in vars(made).items()}

            job.note_seed(eta, "pathwise", number, recipe)
            more = {"purpose": "pathwise", "number": number, "dimension": dimension, "projection": seed}
            more |= {"plans": [e.key for e in plans], "powered": sorted(asked), "proxy": proxy}
            banks.append(job.store.get(f"pathwise-{number}", job.key(eta, recipe, **more), make))
        norms = np.sqrt(np.mean([bank["norms"] ** 2 for bank in banks], axis=0))
        cell.values = {"batches": batches, "samples_per_batch": recipe.batch, "dimension": dimension}
        cell.values["adjoint_norms"] = norms.tolist()
    if job.record.cells[-1].status == "ok":
        _add_products(job, eta, plans, banks)


def _add_products(job: Job, eta: float, plans: Sequence[NamedPlan], banks: Sequence[Arrays]) -> None:
    """Puts the inner products of every estimator into the record, exact's by the score function last."""
    exact_rows = np.stack([bank["rows"][0] for bank in banks])
    for place, estimator in enumerate([*plans, plans[0]]):
        last = place == len(plans)
        name, upstream = (SCORE, "score function") if last else (estimator.name, "pathwise")
        about = {**estimator.describe(), "eta": eta, "upstream": upstream}
        with recorded(job.record.cells, f"eta={eta:g}/pathwise/{name}", **about) as cell:
            rows = np.stack([bank["rows"][place] for bank in banks])
            cell.samples = stored_products(products(rows, exact_rows), of_exact=place == 0)
            powers = [] if last else [float(bank["powers"][place]) for bank in banks[:POWER_BATCHES]]
            if powers and not np.isnan(powers).any():
                cell.samples["score_powers"] = [float(f"{power:.6g}") for power in powers]
