"""Time of a training step by estimator: rollout, decoding and reward, the update of each arm, and the optimizer."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.utils.benchmark.utils.timer import timer

from bench.arms import Arm, arms_of
from bench.compiling import compile_seconds
from bench.group import ArmRun, Group, group_of, load, prompts_of
from bench.noise import note_noise
from bench.settings import UpdateBench
from bench.speed_ups import PARTS
from bench.timing import clear, gradient, time_in_rounds, verify_arms
from jagg_core import DanceSDE, Plan, exact_plan
from jagg_core.backbones import Backbone, read_options, schedule_of
from jagg_core.environment import command_line, environment
from jagg_core.plans import groups_of, routed_groups
from jagg_core.records import Cell, Record, recorded
from jagg_core.rewards import Reward, load_reward, score
from jagg_core.rollouts import rollout

REWARDS = {"digits": "ink", "photos": "redness", "emoji": "redness"}
"""Reward by the data set that the samples look like, where none is asked for. Without a data set: decoding alone."""


def run_of_update(arm: Arm, group: Group, settings: UpdateBench) -> ArmRun:
    """Prepares an arm on all trained steps: one call of the engine, or several where the backward is joint.

    Raises:
        ValueError: see `bench.arms.Arm.plan` and `Plan.from_calibration`.
    """
    trajectory = group.trajectory
    if arm.calibrated or arm.passes is not None:
        plan = Plan.from_calibration(settings.calibration, arm.passes or 0, predict=True, trajectory=trajectory)
    else:
        plan = arm.plan(trajectory.sigmas, settings.window, settings.jagg_frac, settings.seed)
    calls = [(range(trajectory.steps), plan)]
    if arm.backward == "joint":
        calls = grouped_calls(arm, trajectory.sigmas, settings.window, settings.jagg_frac)
    return ArmRun(arm, group, plan, tuple((trajectory.select(steps), part) for steps, part in calls))


def grouped_calls(arm: Arm, sigmas: Tensor, window: int, jagg_frac: float) -> list[tuple[range, Plan]]:
    """Splits an update as the paper does: one call per approximated group, then one for all other steps, exact.

    ``sigmas`` [T]. Returns steps and plan of every call.
    """
    groups = groups_of(len(sigmas), window)
    count = routed_groups(len(groups), jagg_frac)
    calls = [(steps, arm.plan(sigmas[steps.start : steps.stop], window)) for steps in groups[:count]]
    rest = range(count * window, len(sigmas))
    return [*calls, (rest, exact_plan(sigmas[rest.start :]))] if len(rest) else calls


def run_update_bench(settings: UpdateBench, progress: Callable[[str], None] | None = None) -> Record:
    """Verifies every arm's gradient against a plain loop over its plan, then times arms and other parts, interleaved.

    An arm or part that fails is recorded as failed and left out of the rounds. ``compile_s``: see `verify_arms`.
    """
    where = environment()
    backbone = load(settings)
    reward = _reward(settings, backbone)
    group = group_of(settings, backbone)
    policy, trajectory, parameters = group.policy, group.trajectory, group.parameters
    sigmas = schedule_of(backbone, settings.schedule, settings.steps, settings.shift)
    arms = {arm.name: run_of_update(arm, group, settings) for arm in arms_of("update", settings.passes)}
    runs: dict[str, Callable[[], object]] = dict(arms)

    def execute(name: str) -> dict[str, float]:
        clear(parameters)
        if name == "optimizer":
            optimizer.prepare()
        start = timer()
        runs[name]()
        return {"total_s": timer() - start}

    cells = verify_arms(arms, execute, settings, progress)
    optimizer = Optimizer(parameters, gradient(parameters))
    runs["rollout"] = lambda: rollout(policy, sigmas, DanceSDE(settings.eta), trajectory.latents[0], settings.seed)
    runs["reward"] = lambda: _judge(backbone, reward, trajectory.final)
    runs["optimizer"] = optimizer.step
    about = {"reward": {"reward": reward.name if reward is not None else None}}
    for name in PARTS:
        if name == "reward" and read_options(settings.backbone, settings.backbone_options).get("random_weights"):
            cells.append(Cell(name, "skipped", "a model with random weights has no decoder"))
            continue
        with recorded(cells, name, **about.get(name, {})) as cell:
            before = compile_seconds()
            execute(name)
            cell.values = {"compile_s": compile_seconds() - before}
    time_in_rounds(cells, execute, settings.rounds, settings.seed, progress)
    clear(parameters)
    record = Record(
        kind="update-speed",
        command=command_line(),
        backbone=settings.backbone,
        settings=dict(vars(settings)),
        seeds={"rollout": [settings.seed]},
        schedule=trajectory.sigmas.tolist(),
        environment=where,
        cells=cells,
    )
    note_noise(record)
    return record


def _reward(settings: UpdateBench, backbone: Backbone) -> Reward | None:
    name = settings.reward or REWARDS.get(backbone.dataset or "")
    return load_reward(name, dataset=backbone.dataset, device=settings.device) if name else None


def _judge(backbone: Backbone, reward: Reward | None, latents: Tensor) -> None:
    """Decodes, and scores if there is a reward."""
    images = backbone.decode(latents)
    if reward is not None:
        score(reward, images, prompts_of(backbone, len(latents)))


class Optimizer:
    """The optimizer's part of a training step, on copies: the parameters that are timed stay the rollout's.

    AdamW at 1e-5 with weight decay 1e-4, gradient norm clipped to 1.
    """

    def __init__(self, parameters: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
        self.gradients = gradients
        self.copies = [p.detach().clone().requires_grad_() for p in parameters]
        self.adamw = torch.optim.AdamW(self.copies, lr=1e-5, weight_decay=1e-4)

    def prepare(self) -> None:
        """Sets gradients as an update leaves them."""
        for copy, given in zip(self.copies, self.gradients, strict=True):
            copy.grad = given.clone()

    def step(self) -> None:
        """Clips the norm, makes a step, and clears the gradients."""
        torch.nn.utils.clip_grad_norm_(self.copies, 1.0)
        self.adamw.step()
        self.adamw.zero_grad()
