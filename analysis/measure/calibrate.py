"""The calibration: how much of a trajectory may be approximated on a backbone, and which plan to run.

Computes and stores; `analysis.report.write` draws from what is stored, and
`analysis.report.fidelity.recommendation` says what to run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.benchmark.utils.timer import timer
from tqdm import tqdm

from analysis.measure.cache import Arrays
from analysis.measure.estimators import NamedPlan, measured
from analysis.measure.job import Job
from analysis.measure.knot_search import Knots
from analysis.measure.pathwise import measure_pathwise, pathwise_reward
from analysis.measure.rivals import per_sample, rivals
from analysis.measure.rollouts import check_prompts, rollout_seed
from analysis.measure.signal_gradients import SIDE_PASSES, bank_rows, main_plans, side_plans, watched_plans
from analysis.measure.study import Calibrate
from analysis.statistics.learning_signal import products, stored_products
from analysis.statistics.names import CENTRINGS, PER_PROMPT
from jagg_core import Plan, accumulate_gradients
from jagg_core.records import Cell, Record, recorded
from jagg_core.rewards import score
from jagg_core.rollouts import rollout
from jagg_core.seeding import derive_seed, generator_for
from jagg_core.trajectory import Trajectory

SUBSAMPLED = (8, 5, 2)
"""Passes of the subsampling that the learning signal of plans is compared with."""

OUTPUTS = ("record.json", "calibration-*.json", "report.html", "tables/*.csv", "figures/*.png", "figures/*.svg")
"""What a calibration's folder holds, with ``collected/``."""


def start(settings: Calibrate, out: Path) -> Job:
    """Loads the backbone and checks its reference; tables are kept in ``out/collected``.

    Raises:
        NotReproducible: the exact gradient differs from itself.
        ValueError: a proxy reward without gradient.
    """
    job = Job(settings, out, "calibrate", store=out / "collected")
    check_prompts(settings.signal_recipe, job.backbone)
    pathwise_reward(job.reward, settings.proxy_reward, job.backbone, settings.device)
    for pattern in OUTPUTS:
        for old in out.glob(pattern):
            old.unlink()
    for eta in settings.etas:
        job.check_reference(eta)
    return job


def collect(settings: Calibrate, out: Path) -> Record:
    """Makes the tables of calibration and evaluation rollouts that ``out/collected`` does not hold yet."""
    job = start(settings, out)
    for eta in settings.etas:
        judge_plans(job, settings, eta)
    return job.record


def judge_plans(job: Job, settings: Calibrate, eta: float) -> Knots | None:
    """Searches knots and judges plans on them; None if the search failed."""
    knots = job.search_knots(eta)
    if knots is not None:
        job.evaluate(eta, knots, few_passes(job, settings, knots))
    return knots


def few_passes(job: Job, settings: Calibrate, knots: Knots) -> list[NamedPlan]:
    """Makes the plans whose signal is measured and that may be recommended, to be judged by their cosine as well."""
    return measured(job.sigmas, knots, settings.signal_passes, recommended=True)


def run(settings: Calibrate, out: Path) -> Record:
    """Calibrates and writes ``out/record.json``; what ``out/collected`` holds of an earlier run is used again.

    Every cell that fails is recorded as failed, the others still run. Returns the record.

    Raises:
        NotReproducible: the exact gradient differs from itself.
    """
    job = start(settings, out)
    for eta in settings.etas:
        knots = judge_plans(job, settings, eta)
        if knots is not None:
            measure_signal(job, settings, eta, knots)
            bias_of_causal_plans(job, settings, eta, knots)
            time_updates(job, settings, eta, knots)
    return job.record


def measure_signal(job: Job, settings: Calibrate, eta: float, knots: Knots) -> None:
    """Adds a cell per estimator and centring: inner products of its gradients and exact's over all pairs of batches."""
    recipe, count = settings.signal_recipe, settings.signal_batches
    main = main_plans(job.sigmas, settings.windows, settings.jagg_frac, knots, settings.signal_passes)
    names = {e.name for e in main}
    side = [e for e in side_plans(job.sigmas, settings.windows, knots) if e.name not in names]
    watched = watched_plans([*main, *side], job.sigmas, settings.windows, settings.jagg_frac)
    banks: dict[tuple[str, str], list[np.ndarray]] = {}
    about: dict[str, NamedPlan] = {}
    seed = derive_seed(settings.recipe.seed, "signal", "projection")
    with recorded(job.record.cells, f"eta={eta:g}/signal", eta=eta) as cell:
        for number in tqdm(range(count), desc=f"learning signal, eta {eta:g}", unit="batch"):
            batch_seed = rollout_seed(recipe, eta, "signal", number)
            chosen = {PER_PROMPT: [*main, *rivals(job.sigmas, SUBSAMPLED, batch_seed)]}
            if number < settings.contender_batches:
                chosen[PER_PROMPT] += [*side, *per_sample(job.sigmas, recipe.batch, SIDE_PASSES, batch_seed)]
            if number < settings.centring_batches:
                chosen |= {centring: watched for centring in CENTRINGS if centring != PER_PROMPT}

            def make(number: int = number, chosen: dict[str, list[NamedPlan]] = chosen) -> Arrays:
                batch = job.batch(eta, "signal", number, recipe)
                rows = bank_rows(batch, job.objective, chosen, settings.signal_dimension, seed, job.workers)
                return {"rows": rows.cpu().numpy()}

            job.note_seed(eta, "signal", number, recipe)
            plans = {centring: [e.key for e in some] for centring, some in chosen.items()}
            key = job.key(eta, recipe, number=number, dimension=settings.signal_dimension, projection=seed, plans=plans)
            rows = iter(job.store.get(f"signal-{number}", key, make)["rows"])
            for centring, some in chosen.items():
                for estimator in some:
                    about[estimator.name] = estimator
                    banks.setdefault((centring, estimator.name), []).append(next(rows))
        cell.values = {"batches": count, "samples_per_batch": recipe.batch, "dimension": settings.signal_dimension}
    for (centring, name), rows_of in banks.items() if job.record.cells[-1].status == "ok" else ():
        estimator = about[name]
        where = f"eta={eta:g}/signal/{centring}/{name}"
        with recorded(job.record.cells, where, **estimator.describe(), eta=eta, centring=centring) as cell:
            inner = products(np.stack(rows_of), np.stack(banks[centring, "exact"]))
            cell.values = {"batches": inner.m}
            cell.samples = stored_products(inner, of_exact=name == "exact")
    job.save()


def bias_of_causal_plans(job: Job, settings: Calibrate, eta: float, knots: Knots) -> None:
    """Adds cells of pathwise gradients; one with the reason alone where the reward has no gradient."""
    if not settings.pathwise_batches:
        return
    reward, reason = pathwise_reward(job.reward, settings.proxy_reward, job.backbone, settings.device)
    if reason:
        about = {"eta": eta, "reward": reward.name}
        job.record.cells.append(Cell(f"eta={eta:g}/pathwise", settings=about, values={"reason": reason}))
    else:
        projection = settings.signal_dimension, derive_seed(settings.recipe.seed, "signal", "projection")
        recipe, batches = settings.pathwise_recipe, settings.pathwise_batches
        measure_pathwise(job, eta, knots, reward, recipe, batches, settings.signal_passes, projection)
    job.save()


def time_updates(job: Job, settings: Calibrate, eta: float, knots: Knots) -> None:
    """Times rollout, reward and updates by several plans in seconds, interleaved round by round."""
    recipe = settings.signal_recipe
    with recorded(job.record.cells, f"eta={eta:g}/times", eta=eta, batch=recipe.batch) as cell:
        batch = job.batch(eta, "signal", 0, recipe)
        main = main_plans(job.sigmas, settings.windows, settings.jagg_frac, knots, settings.signal_passes)
        timed = {e.name: e.plans[0] for e in main}
        arms: dict[str, Callable[[], Any]] = {
            "rollout": lambda: _roll_out_again(batch.trajectory, batch.policy),
            "reward": lambda: score(job.reward, job.backbone.decode(batch.trajectory.final), batch.prompts),
        }
        for name, plan in timed.items():
            arms[name] = lambda plan=plan: _update(job, batch, plan)  # type: ignore[misc]
        samples: dict[str, list[float | None]] = {f"{name}_s": [] for name in arms}
        for number in tqdm(range(settings.timing_rounds + 1), desc=f"time updates, eta {eta:g}", unit="round"):
            for name in round_order(list(arms), recipe.seed, number):
                begin = timer()
                arms[name]()
                if number:  # the first round warms up
                    samples[f"{name}_s"].append(timer() - begin)
        cell.samples = samples
    job.save()


def round_order(names: Sequence[str], seed: int, number: int) -> list[str]:
    """Draws the order of a round of timings by its number: no arm follows the same one in every round."""
    places = torch.randperm(len(names), generator=generator_for(seed, "times", number)).tolist()
    return [names[place] for place in places]


def _update(job: Job, batch: Any, plan: Plan) -> None:
    accumulate_gradients(batch.policy, batch.trajectory, batch.advantages, plan, job.objective)
    for parameter in batch.policy.parameters():
        parameter.grad = None


def _roll_out_again(trajectory: Trajectory, policy: Any) -> None:
    sigmas = torch.cat([trajectory.sigmas, trajectory.next_sigmas[-1:], torch.zeros(1, dtype=torch.float64)])
    mode = trajectory.timestep_mode
    rollout(policy, sigmas, trajectory.transition, trajectory.latents[0], 0, timestep_mode=mode)
