"""A study at work: a loaded backbone and its reward, tables of its rollouts, and the record that grows.

Every part writes its cells and stores the record; a part that fails is recorded as failed, the others still run.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from analysis.measure import estimators
from analysis.measure.cache import Arrays, Store
from analysis.measure.cross_table import CrossTable, collect_table, plan_gradients, reachable_pairs
from analysis.measure.estimators import NamedPlan, mean_of_draws
from analysis.measure.knot_search import Knots, KnotSearch, searched
from analysis.measure.rollouts import Batch, check_prompts, make_batch, rollout_seed
from analysis.measure.similarity import Similarity, cross_cosines, similarity, similarity_from_products
from analysis.measure.spaces import gram_matrix, inner_product_error
from analysis.measure.study import Recipe, Study
from analysis.statistics.intervals import leak_test
from analysis.statistics.names import METRICS, registered_families
from analysis.statistics.parameter_kinds import ordered_blocks, parameter_blocks
from jagg_core import ClippedSurrogate, Plan, exact_plan
from jagg_core.backbones import Backbone, fingerprints_of, load_backbone
from jagg_core.devices import fork_rng
from jagg_core.environment import command_line, environment
from jagg_core.files import write_atomically
from jagg_core.images import image_grid, png_bytes
from jagg_core.plans import groups_of
from jagg_core.records import Record, recorded
from jagg_core.rewards import load_reward, reward_fingerprints, reward_versions
from jagg_core.seeding import derive_seed
from jagg_core.trajectory import policy_signature, weights_version

PARETO_PASSES = range(4, 15)
TABLE_FORMAT = 1
"""Of stored tables; another number makes them again."""

REPRODUCIBLE = {"float64": 1e-9, "float32": 1e-5, "bfloat16": 1e-2, "float16": 1e-2}
"""Largest relative difference of an exact gradient that is computed twice, by dtype of the model."""


class NotReproducible(ValueError):
    """The exact gradient is zero, not finite, or differs from itself: there is nothing to compare with."""


def fresh_lora_note(backbone: Backbone) -> str:
    """Says what a calibration of an untrained LoRA leaves out; empty for other backbones."""
    ends = [p for name, p in backbone.transformer.named_parameters() if "lora_B" in name and p.requires_grad]
    if not ends or any(bool(p.detach().any()) for p in ends):
        return ""
    return (
        f"the LoRA of {backbone.name} is fresh: its B is 0, so its A has no gradient yet and every figure is of B "
        "alone; calibrate again after an update"
    )


class Job:
    """What the main job and the calibration share. ``store`` is a folder that keeps tables; None: they are not kept."""

    def __init__(self, settings: Study, out: Path, kind: str, store: Path | None = None) -> None:
        recipe = settings.recipe
        self.settings = settings
        self.out = out
        self.store = Store(store)
        self.backbone = load_backbone(
            settings.backbone, settings.device, getattr(torch, settings.dtype), **settings.loading
        )
        check_prompts(recipe, self.backbone)
        self.reward = load_reward(
            settings.reward, dataset=self.backbone.dataset, device=settings.device, options=settings.reward_options
        )
        self.reward_versions = reward_versions(self.reward)
        self.sigmas = recipe.sigmas(self.backbone)[:-2]
        self.objective = ClippedSurrogate()
        automatic = min(4, torch.get_num_threads()) if self.backbone.device.type == "cpu" else 1
        self.workers = settings.workers or automatic
        if note := fresh_lora_note(self.backbone):
            tqdm.write(f"note: {note}", file=sys.stderr)
        policy = self.backbone.policy(self.backbone.prompts[:1], recipe.guidance)
        self.blocks = parameter_blocks(policy, self.backbone.transformer)
        signature = policy_signature(policy)
        self.signature = {k: v for k, v in signature.items() if k != "prompts"}
        # names of rewards and prompts alone would let a changed one read the tables of the old
        self.inputs = {
            "first prompt": signature.get("prompts"),  # holds what it was encoded with
            **fingerprints_of(self.backbone, settings.backbone),
            **reward_fingerprints(settings.reward, self.reward),
        }
        # where a model lies says nothing of it
        places = ("path=", "prompts=", "revision=", "weights=")
        self.options = [o for o in settings.backbone_options if not o.startswith(places)]
        self.weights = weights_version(policy)
        families = {name: f.describe() for name, f in registered_families(settings.estimators).items()}
        self.record = Record(
            kind=kind,
            command=command_line(),
            backbone=settings.backbone,
            settings=asdict(settings) | {"families": families},
            seeds={},
            schedule=self.sigmas.tolist(),
            environment=environment() | ({"rewards": self.reward_versions} if self.reward_versions else {}),
        )

    def batch(self, eta: float, purpose: str, number: int, recipe: Recipe | None = None) -> Batch:
        """Makes a rollout batch; its seed goes into the record."""
        recipe = recipe or self.settings.recipe
        self.note_seed(eta, purpose, number, recipe)
        return make_batch(self.backbone, self.reward, recipe, eta, purpose, number)

    def note_seed(self, eta: float, purpose: str, number: int, recipe: Recipe) -> None:
        """Puts the seed of a batch into the record."""
        seed = rollout_seed(recipe, eta, purpose, number)
        seeds = self.record.seeds.setdefault(f"{purpose} eta={eta:g}", [])
        if seed not in seeds:
            seeds.append(seed)

    def key(self, eta: float, recipe: Recipe, **more: Any) -> dict[str, Any]:
        """Returns what numbers of rollouts depend on."""
        return {
            "backbone": self.backbone.name,
            "weights": self.weights,
            "signature": self.signature,
            "options": self.options,
            "reward": self.settings.reward,
            "inputs": self.inputs,
            "objective": repr(self.objective),
            "format": TABLE_FORMAT,
            "eta": eta,
            "recipe": recipe.key(),
            **more,
        }

    def tables(self, eta: float, purpose: str, predicted: Sequence[Plan] = ()) -> list[CrossTable]:
        """Returns cross-gradient tables of the rollout batches of a purpose; those without any advantage are left out.

        Raises:
            ValueError: no batch had any advantage.
        """
        settings = self.settings
        count = settings.batches(purpose, eta)
        passes = len(self.sigmas) ** 2 + sum(plan.passes for plan in predicted)
        tables: list[CrossTable] = []
        with tqdm(total=count * passes, desc=f"{purpose} rollouts, eta {eta:g}", unit="pass") as bar:
            for number in range(count):

                def collect(number: int = number) -> Arrays:
                    batch = self.batch(eta, purpose, number)
                    if not batch.advantages.any():
                        return {"grams": np.zeros((0, 0, 0))}
                    table = collect_table(
                        batch.policy,
                        batch.trajectory,
                        batch.advantages,
                        self.objective,
                        predicted=predicted,
                        blocks=self.blocks,
                        space=settings.space,
                        dimension=settings.dimension,
                        workers=self.workers,
                        progress=bar.update,
                    )
                    return table_arrays(table)

                self.note_seed(eta, purpose, number, settings.recipe)
                knots = [plan.knots for plan in predicted]
                more = {"purpose": purpose, "number": number, "predicted": knots}
                more |= {"space": settings.space, "dimension": settings.dimension}
                arrays = self.store.get(f"{purpose}-{number}", self.key(eta, settings.recipe, **more), collect)
                bar.update((number + 1) * passes - bar.n)
                if arrays["grams"].size:
                    tables.append(table_from(arrays, len(self.sigmas), knots))
        if not tables:
            raise ValueError(f"none of the {count} {purpose} batches has any advantage: the reward does not vary")
        return tables

    def check_reference(self, eta: float) -> None:
        """Checks how well the exact gradient is known: computed again, and from half batches, which rounds differently.

        Raises:
            NotReproducible: the gradient is zero or not finite, or the same computation gives another one (dropout, for
                one).
        """
        again, largest = None, None
        with recorded(self.record.cells, f"eta={eta:g}/floor", eta=eta) as cell:
            batch = self.batch(eta, "evaluation", 0)
            plans = {"exact": exact_plan(self.sigmas)}
            advantages = torch.ones_like(batch.advantages) if not batch.advantages.any() else batch.advantages

            def gradient(size: int, seed: int) -> torch.Tensor:
                total = torch.zeros(())
                with fork_rng(self.backbone.device):
                    torch.manual_seed(seed)  # active dropout shows only under another seed
                    for part, share in zip(batch.trajectory.split(size), advantages.split(size), strict=True):
                        parts = plan_gradients(batch.policy, part, share, self.objective, plans, workers=self.workers)
                        total = total + parts["exact"]
                return total

            whole = gradient(len(advantages), 0)
            largest = float(whole.abs().max())
            again = _similarity_of(gradient(len(advantages), 1), whole)
            halves = _similarity_of(gradient(-(-len(advantages) // 2), 0), whole)
            cell.values = {"again": asdict(again), "halves": asdict(halves)}
        self.save()
        limit = REPRODUCIBLE[self.settings.dtype]
        if largest is not None and not 0 < largest < math.inf:
            what, cause = "not finite", "a velocity or its derivative overflows"
            if largest == 0:
                what, cause = "zero", "the velocity depends on no trained parameter (a last layer that begins at 0?)"
            raise NotReproducible(
                f"the exact gradient of {self.backbone.name} is {what}, so there is nothing to compare with: {cause}"
            )
        if again is not None and (again.rel_error is None or again.rel_error > limit):
            raise NotReproducible(
                f"the exact gradient of {self.backbone.name} differs from itself by {again.rel_error} "
                f"(limit {limit:g}): is dropout active?"
            )

    def search_knots(self, eta: float) -> Knots | None:
        """Searches the best knots on calibration rollouts; None if that failed."""
        knots: Knots = {}
        with recorded(self.record.cells, f"eta={eta:g}/knots", eta=eta) as cell:
            tables = self.tables(eta, "calibration")
            cell.values = {
                **self.settings.made_with(eta),
                "signature": {k: v for k, v in self.signature.items() if k != "dtype"},
                "batches": len(tables),
                **_accuracy(tables),
            }
            for family, make in tqdm(searched().items(), desc=f"search knots, eta {eta:g}"):
                search = KnotSearch(tables, self.sigmas, make)
                knots[family] = search.search()
                cell.values[family] = {
                    str(k): {"knots": list(v), "cosine": search.score(v)} for k, v in knots[family].items()
                }
        self.save()
        return knots if len(knots) == len(searched()) else None

    def evaluate(self, eta: float, knots: Knots, more: Sequence[NamedPlan] = ()) -> None:
        """Adds a cell per estimator: similarity to exact on held-out rollouts, whole update, every group and block.

        The paper's rule is judged at every window. ``more``: further estimators.
        """
        settings = self.settings
        tables: list[CrossTable] = []
        predicted = estimators.predicted(self.sigmas, knots, settings.predicted_passes)
        with recorded(self.record.cells, f"eta={eta:g}/evaluation", eta=eta) as cell:
            tables = self.tables(eta, "evaluation", [e.plans[0] for e in predicted])
            cell.values = {
                "batches": len(tables),
                "without_advantage": settings.batches("evaluation", eta) - len(tables),
                **_accuracy(tables),
            }
        if tables:
            seed = derive_seed(settings.recipe.seed, "subsample")
            main = estimators.headline(self.sigmas, settings.windows, settings.jagg_frac, knots, seed)
            main += [*predicted, *more]
            windows = range(3, 1 + len(self.sigmas))
            chosen = {e.name: e for e in estimators.pareto(self.sigmas, windows, knots, PARETO_PASSES)}
            chosen |= {e.name: e for e in main}
            headline = {e.name for e in main}
            for estimator in tqdm(chosen.values(), desc=f"judge estimators, eta {eta:g}"):
                name = f"eta={eta:g}/{estimator.name}"
                with recorded(self.record.cells, name, **estimator.describe(), eta=eta) as cell:
                    cell.settings["headline"] = estimator.name in headline
                    by_group = estimator.name in headline and "whole_update_only" not in estimator.settings
                    cell.samples = judge(tables, estimator, settings.windows if by_group else ())
                    if estimator.name in headline:
                        cell.samples |= judge_blocks(tables, estimator)
            with recorded(self.record.cells, f"eta={eta:g}/cross", eta=eta) as cell:
                cell.values = cross_values(tables)
        self.save()

    def test_leak(self, eta: float, knots: Knots, batches: int) -> None:
        """Tests one estimator of every kind for its leak: with all advantages 1 the mean gradient should be zero."""
        settings = self.settings
        seed = derive_seed(settings.recipe.seed, "leak", "subsample")
        tested = estimators.leak_plans(self.sigmas, settings.windows, settings.jagg_frac, knots, seed)
        gradients: dict[str, list[torch.Tensor]] = {e.name: [] for e in tested}
        with recorded(self.record.cells, f"eta={eta:g}/leak", eta=eta):
            for number in tqdm(range(batches), desc=f"leak test, eta {eta:g}", unit="batch"):
                batch = self.batch(eta, "leak", number)
                ones = torch.ones_like(batch.advantages)
                plans = {e.name: e.plans_of(number)[0] for e in tested}
                by_plan = plan_gradients(
                    batch.policy, batch.trajectory, ones, self.objective, plans, workers=self.workers
                )
                for name, gradient in by_plan.items():
                    gradients[name].append(gradient)
        if self.record.cells[-1].status == "ok":
            for estimator in tested:
                name = f"eta={eta:g}/leak/{estimator.name}"
                with recorded(self.record.cells, name, **estimator.describe(), eta=eta) as cell:
                    gram = gram_matrix(torch.stack(gradients[estimator.name]))
                    cell.samples = {"gram": gram.flatten().tolist()}
                    leak = leak_test(gram)
                    cell.values = {"share": leak.share.value, "p_value": leak.p_value, "n": batches}
        self.save()

    def contact_sheet(self) -> None:
        """Writes one SDE rollout batch as a picture, a row per prompt."""
        eta = self.settings.etas[0]
        with recorded(self.record.cells, "samples", eta=eta) as cell:
            batch = self.batch(eta, "evaluation", 0)
            images = self.backbone.decode(batch.trajectory.final)
            sheet = image_grid(images, columns=self.settings.recipe.samples)
            write_atomically(self.out / "samples.png", png_bytes(sheet))
            cell.values = {"prompts": batch.prompts, "rewards": batch.rewards.tolist(), "seed": batch.seed}
        self.save()

    def save(self) -> None:
        """Writes the record as it is now."""
        self.record.write(self.out / "record.json")


def judge(tables: list[CrossTable], estimator: NamedPlan, windows: tuple[int, ...]) -> dict[str, list[float | None]]:
    """Computes each metric of the whole update and of each group of each window, one value per rollout batch."""
    parts: dict[str, range | None] = {"": None}
    for window in windows:
        for number, group in enumerate(groups_of(tables[0].steps, window)):
            parts[f"w{window}.group{number}."] = group
    samples: dict[str, list[float | None]] = {}
    for prefix, steps in parts.items():
        for number, table in enumerate(tables):
            similarities = [similarity(table, plan, steps) for plan in estimator.plans_of(number)]
            for metric in METRICS:
                value = mean_of_draws([getattr(one, metric) for one in similarities])
                samples.setdefault(prefix + metric, []).append(value)
    return samples


def judge_blocks(tables: list[CrossTable], estimator: NamedPlan) -> dict[str, list[float | None]]:
    """Computes raw samples of the whole update, one per rollout batch, in each block of parameters alone."""
    samples: dict[str, list[float | None]] = {}
    for block in ordered_blocks(list(tables[0].grams)) if len(tables[0].grams) > 1 else ():
        for number, table in enumerate(tables):
            similarities = [similarity(table, plan, block=block) for plan in estimator.plans_of(number)]
            for metric in METRICS:
                value = mean_of_draws([getattr(one, metric) for one in similarities])
                samples.setdefault(f"block.{block}.{metric}", []).append(value)
    return samples


def cross_values(tables: list[CrossTable]) -> dict[str, Any]:
    """Computes the mean cosine of every ``C[i, j]`` to ``C[j, j]`` over the tables; None where all are undefined."""
    cosines = np.stack([cross_cosines(table) for table in tables])
    defined = ~np.isnan(cosines)
    count = defined.sum(0)
    total = np.where(defined, cosines, 0.0).sum(0)
    rows = [[float(t / n) if n else None for t, n in zip(*row, strict=True)] for row in zip(total, count, strict=True)]
    return {"cosine": rows, "batches": len(tables)}


def table_arrays(table: CrossTable) -> Arrays:
    """Returns what a store keeps of a table: upper triangles of its Gram matrices, and what its rows are."""
    upper = np.triu_indices(len(table.gram))
    return {
        "grams": np.stack([gram[upper] for gram in table.grams.values()]),
        "blocks": np.array(list(table.grams)),
        "combine": table.combine,
        "dimension": np.array(table.dimension or 0),
    }


def table_from(arrays: Arrays, steps: int, predicted: Sequence[tuple[int, ...]]) -> CrossTable:
    """Makes the table of every pair that `table_arrays` was given."""
    pairs = reachable_pairs(steps)
    size = len(pairs) + arrays["combine"].shape[1]
    grams = {}
    for block, triangle in zip(arrays["blocks"].tolist(), arrays["grams"], strict=True):
        gram = np.zeros((size, size))
        gram[np.triu_indices(size)] = triangle
        grams[block] = gram + np.triu(gram, 1).T
    dimension = int(arrays["dimension"]) or None
    return CrossTable(steps, pairs, grams, tuple(predicted), arrays["combine"], dimension)


def _accuracy(tables: list[CrossTable]) -> dict[str, Any]:
    """Returns how exact the inner products are."""
    dimension = tables[0].dimension
    if dimension is None:
        return {"inner_products": "exact"}
    return {"inner_products": "projected", "dimension": dimension, "error_95": inner_product_error(dimension)}


def _similarity_of(estimate: torch.Tensor, exact: torch.Tensor) -> Similarity:
    gram = gram_matrix(torch.stack([estimate, exact, estimate - exact]))
    return similarity_from_products(gram[0, 0], gram[1, 1], gram[0, 1], gram[2, 2])
