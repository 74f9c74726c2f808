"""What clipping costs a plan off policy, and what a pass per step for partly clipped samples buys.

``python -m analysis.measure.clipping --backbone digits-flux --reward ink`` trains on a rollout for two optimizer steps
(AdamW at ``--learning-rate``) and after each compares plans with the exact gradient of the clipped loss there:
``unclipped`` is the plan without a clip range, ``keep`` and ``exact`` are the two settings of ``partly_clipped``.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Iterator

import numpy as np
import torch
from scipy import stats
from torch import Tensor

from analysis.measure.rollouts import Batch, make_batch
from analysis.measure.study import Recipe
from jagg_core import ClippedSurrogate, Plan, Report, accumulate_gradients, causal_plan, exact_plan, load_backbone
from jagg_core.backbones import Backbone
from jagg_core.engine import PartlyClipped
from jagg_core.rewards import load_reward

UNCLIPPED = 1e9
"""A clip range that clips nothing."""


def gradient(
    backbone: Backbone, batch: Batch, plan: Plan, clip_range: float, rule: PartlyClipped
) -> tuple[Tensor, Report]:
    """Computes the gradient of one update from zero, flat, and the report."""
    backbone.transformer.zero_grad()
    objective = ClippedSurrogate(clip_range)
    report = accumulate_gradients(
        batch.policy, batch.trajectory, batch.advantages, plan, objective, "autograd", partly_clipped=rule
    )
    grads = [p.grad.flatten() for p in backbone.transformer.parameters() if p.grad is not None]
    return torch.cat(grads), report


def cosine(a: Tensor, b: Tensor) -> float:
    """Computes the cosine of two gradients, in fp64."""
    return float(torch.cosine_similarity(a.double(), b.double(), dim=0))


def measure(
    backbone: Backbone, batch: Batch, knots: list[int], clip_range: float, rate: float
) -> Iterator[dict[str, float]]:
    """Measures after no, one and two optimizer steps on one rollout; the weights are put back."""
    sigmas = batch.trajectory.sigmas
    exact, plan = exact_plan(sigmas), causal_plan(sigmas, knots)
    before = copy.deepcopy(backbone.transformer.state_dict())
    optimizer = torch.optim.AdamW(backbone.transformer.parameters(), lr=rate)
    for taken in range(3):
        truth, report = gradient(backbone, batch, exact, clip_range, "keep")
        free = gradient(backbone, batch, exact, UNCLIPPED, "keep")[0]
        figures = {
            "steps": taken,
            "clipped": report.clipped_share,
            "unclipped": cosine(gradient(backbone, batch, plan, UNCLIPPED, "keep")[0], free),
        }
        for rule in ("keep", "exact"):
            estimate, report = gradient(backbone, batch, plan, clip_range, rule)
            figures |= {rule: cosine(estimate, truth), f"{rule} passes": report.passes}
        yield figures
        gradient(backbone, batch, exact, clip_range, "keep")
        optimizer.step()
    backbone.transformer.load_state_dict(before)


def half_width(values: np.ndarray) -> float:
    """Computes half of the 95 % interval of a mean, by Student's t."""
    return float(stats.t.ppf(0.975, len(values) - 1) * values.std(ddof=1) / len(values) ** 0.5)


def main() -> None:
    """Prints means over batches with 95 % intervals."""
    parser = argparse.ArgumentParser(prog="python -m analysis.measure.clipping", description=__doc__)
    parser.add_argument("--backbone", default="digits-flux")
    parser.add_argument("--reward", default="ink")
    parser.add_argument("--knots", type=int, nargs="+", default=[0, 4, 8, 12, 16])
    parser.add_argument("--batches", type=int, default=8, help="at least 2")
    parser.add_argument("--clip-range", type=float, default=1e-4)
    parser.add_argument("--learning-rate", type=float, default=1e-5)
    given = parser.parse_args()
    backbone, reward = load_backbone(given.backbone), load_reward(given.reward)
    rows: list[dict[str, float]] = []
    for number in range(given.batches):
        batch = make_batch(backbone, reward, Recipe(samples=4), 0.7, "clipping", number)
        rows += measure(backbone, batch, given.knots, given.clip_range, given.learning_rate)
    print(
        f"{given.backbone}, knots {given.knots}, n = {given.batches} batches of 8 samples, seeds 0..{given.batches - 1}"
    )
    for taken in range(3):
        mine = [row for row in rows if row["steps"] == taken]
        cells = []
        for name in ("clipped", "unclipped", "keep", "keep passes", "exact", "exact passes"):
            values = np.array([row[name] for row in mine])
            cells.append(f"{name} {values.mean():.4f} +- {half_width(values):.4f}")
        print(f"after {taken} optimizer steps: " + "; ".join(cells))


if __name__ == "__main__":
    main()
