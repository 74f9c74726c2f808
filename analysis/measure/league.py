"""The league: methods on their rollouts, judged by one reference, the expected gradient of the full sampler.

A method is a rollout (which states), an upstream gradient (which ``s_j`` there) and a plan (which Jacobians, which
weights). `docs/method.md` has the frame. Work counts network evaluations: a forward is 1, a backward 2.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

from analysis.measure.cache import Arrays
from analysis.measure.estimators import NamedPlan
from analysis.measure.job import Job
from analysis.measure.league_methods import FULL_STEPS, METHODS, REFERENCE, SCORE, Method, Setting, frontier
from analysis.measure.league_settings import League
from analysis.measure.pathwise import pathwise_reward
from analysis.measure.rollouts import rollout_seed
from analysis.measure.signal_gradients import upstream_rows
from analysis.statistics.learning_signal import products, stored_products
from jagg_core.hub import fingerprint
from jagg_core.imports import import_object, source_fingerprint
from jagg_core.records import Record, recorded
from jagg_core.seeding import derive_seed

PASS = 3
"""Network evaluations of a forward and a backward."""


def chosen_methods(settings: League) -> list[Method]:
    """Returns the methods that are asked for, all of the registry for none; the reference comes first.

    Raises:
        ValueError: an unknown name, or ``module:object`` that names no `Method`.
    """
    chosen = {REFERENCE: METHODS[REFERENCE]}
    added = {m.name: m for m in frontier([n for n in settings.steps if n != FULL_STEPS], settings.passes)}
    chosen |= added if settings.methods else METHODS | added
    for name in settings.methods:
        method = METHODS.get(name)
        if method is None:
            named = import_object(name, "methods", f"{', '.join(METHODS)} or module:object")
            if not isinstance(named, Method):
                raise ValueError(
                    f"methods must be analysis.measure.league_methods.Method objects, got {name} = {named!r}"
                )
            method = named
        chosen[method.name] = method
    return list(chosen.values())


def run(settings: League, out: Path) -> Record:
    """Measures every method and writes ``out/record.json`` after each; one that fails is recorded as failed.

    Gradients are kept in ``out/collected``: an interrupted run goes on from there.

    Raises:
        ValueError: an unknown method, or a reward without gradient.
    """
    methods = chosen_methods(settings)
    job = Job(settings.study, out, "league", out / "collected")
    if reason := pathwise_reward(job.reward, "", job.backbone, settings.device)[1]:
        raise ValueError(f"reward must be differentiable for the league's reference, got {settings.reward}: {reason}")
    job.record.settings = asdict(settings) | {"reference": REFERENCE}
    setting = Setting(job, settings)
    reference: np.ndarray | None = None
    for method in tqdm(methods, desc="league", unit="method"):
        with recorded(job.record.cells, method.name, label=method.label) as cell:
            banks = [_gradients(setting, method, number) for number in range(settings.batches)]
            rows = np.stack([bank["rows"] for bank in banks])
            if reference is None:
                reference = rows[:, 0]
            passes, trained, kept = (int(value) for value in banks[0]["counts"])
            upstream = method.upstream
            update = PASS * passes + upstream.evaluations * trained
            work = method.rollout.evaluations + update
            cell.settings |= {"rollout": method.rollout.label, "upstream": upstream.label}
            cell.values = {"passes": passes, "update_evaluations": update, "step_evaluations": work}
            cell.values["kept_graph_evaluations"] = work - passes if kept else None
            cell.samples = stored_products(products(rows[:, 0], reference), of_exact=method.name == REFERENCE)
            if upstream.uses_advantages:
                ones = rows[:, 1].astype(np.float64)
                cell.samples["ones"] = [float(f"{value:.6g}") for value in (ones @ ones.T).flatten().tolist()]
        job.save()
        if reference is None:
            raise ValueError(f"the league's reference could not be measured: {job.record.cells[0].reason}")
    return job.record


def _gradients(setting: Setting, method: Method, number: int) -> Arrays:
    """Projected gradients of one batch: with its advantages, and with advantages 1; and the plan's counts."""
    job, settings = setting.job, setting.settings
    recipe = settings.recipe
    seed = rollout_seed(recipe, settings.eta, "league", number)
    projection = derive_seed(recipe.seed, "league", "projection")

    def make() -> Arrays:
        batch = method.rollout.make(setting, seed)
        plan = method.plan(setting, batch)
        one = NamedPlan(method.name, method.label, "", (plan,), {})
        asked = [(list(method.upstream.make(setting, batch, batch.advantages)), [one])]
        if method.upstream.uses_advantages:
            asked.append((list(method.upstream.make(setting, batch, torch.ones_like(batch.advantages))), [one]))
        rows = upstream_rows(batch, asked, settings.dimension, projection, job.workers)
        if not torch.isfinite(rows).all():
            raise FloatingPointError(f"a gradient of {method.name} is not finite")
        # graphs of a rollout's forwards serve plans whose knots are its states, and losses that need no new ones
        kept = method.upstream is SCORE and plan.knot_sigmas is None
        counts = np.array([one.passes, batch.trajectory.steps, int(kept)])
        return {"rows": rows.cpu().numpy(), "counts": counts}

    job.note_seed(settings.eta, "league", number, recipe)
    code = source_fingerprint(__name__, *(getattr(f, "__module__", "") for f in (method.plan, method.upstream.make)))
    identity = [method.label, method.rollout.label, method.upstream.label, code]
    identity.append(fingerprint([settings.calibration_file]))
    more = {"purpose": "league", "number": number, "method": [method.name, *identity]}
    more |= {"dimension": settings.dimension, "projection": projection}
    return job.store.get(f"league-{method.name}-{number}", job.key(settings.eta, recipe, **more), make)
