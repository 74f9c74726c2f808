"""GRPO with any plan: roll out, score, update."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.benchmark.utils.timer import timer

from jagg_core.advantages import advantage_slopes, group_advantages, groups_without_signal
from jagg_core.backbones import schedule_of
from jagg_core.distributed import FirstError, gathered, in_step, raise_together, rank, ranks, texts_of_ranks
from jagg_core.engine import Meter, Report
from jagg_core.forward import forward_states, velocities
from jagg_core.grpo.config import GRPOConfig
from jagg_core.grpo.gradients import FORWARD, Collected, accumulate, plan_seed
from jagg_core.grpo.graphs import require_memory
from jagg_core.grpo.held_out import held_out
from jagg_core.grpo.inputs import inputs_of
from jagg_core.grpo.learner import Learner, precision
from jagg_core.grpo.metrics import Metrics, timed
from jagg_core.grpo.plans import make_plan
from jagg_core.grpo.sampling import Samples, prompts_of, random_steps, samples_of, window_of
from jagg_core.imports import import_object
from jagg_core.objective import ClippedSurrogate
from jagg_core.policy import VelocityPolicy
from jagg_core.rewards import (
    Reward,
    RewardNotFinite,
    load_reward,
    options_of,
    score_in_update,
)
from jagg_core.rollouts import rollout, sample_ode
from jagg_core.seeding import derive_seed, initial_latents
from jagg_core.strict_json import read_json
from jagg_core.trajectory import Trajectory, policy_signature
from jagg_core.transitions import TRANSITIONS


@dataclass(frozen=True)
class Recalibration:
    """New knots, and what a search says of them.

    Attributes:
        knots: as many as before.
        cosine_before: of the old knots to exact, on the rollouts of the search.
        cosine: of the new ones.
    """

    knots: tuple[int, ...]
    cosine_before: float
    cosine: float


NOT_FINITE = (RewardNotFinite, FloatingPointError)
"""Errors for which an update is skipped; any other ends the run."""


class TrainingStopped(RuntimeError):
    """Too many updates in a row had values that are not finite.

    Attributes:
        metrics: of the last of them.
    """

    def __init__(self, message: str, metrics: Metrics) -> None:
        super().__init__(message)
        self.metrics = metrics


class GRPOTrainer:
    """Trains a backbone by GRPO. `step` makes one update; nothing else changes the weights.

    All that is drawn follows from the seed and the number of the update, so a run that resumes draws what it would
    have drawn. On several ranks every one makes a trainer, after the process group.

    Raises:
        ValueError: settings that do not fit the ranks, the backbone or each other.
    """

    def __init__(self, config: GRPOConfig) -> None:
        config.check_ranks(ranks())
        self.config = config
        self.learner = Learner(config)
        backbone = self.learner.backbone
        self.sigmas = schedule_of(backbone, config.rollout.schedule, config.rollout.steps, config.rollout.shift)
        self.transition = TRANSITIONS[config.rollout.transition](config.rollout.eta)
        self.objective = ClippedSurrogate(**asdict(config.objective))
        self.update = 0
        self.meter: Meter | None = None
        if config.run.audit_every:
            given, seed = config.run, derive_seed(config.run.seed, "meter")
            self.meter = Meter(self.learner.masters.tensors, given.audit_every, seed, below=given.audit_below)
        self.plan = config.plan
        if config.plan.calibration:
            self._check_calibration()
        self.reward = self._load_reward(config.reward.name)
        self.watched = {name: self._load_reward(name) for name in config.run.eval_rewards}
        self.inputs = inputs_of(self)
        self.skipped_in_a_row = self.skipped = 0
        self._fits = False

    def _load_reward(self, name: str) -> Reward:
        backbone = self.learner.backbone
        options = options_of(name, self.config.reward.options)
        return load_reward(name, dataset=backbone.dataset, device=self.config.model.device, options=options)

    def _check_calibration(self) -> None:
        """Refuse one of another schedule, backbone or guidance before the first rollout."""
        theirs = read_json(Path(self.plan.calibration)).get("signature", {})
        for name, ours in policy_signature(self.learner.policy(self.learner.backbone.prompts[:1])).items():
            if ours != theirs.get(name, ours):
                raise ValueError(f"{name}: calibrated with {theirs[name]}, this run has {ours}")
        sigmas, steps = make_plan(self.plan, self.sigmas[:-2], 0).sigmas, self.sigmas[:-2]
        if sigmas is None or sigmas.shape != steps.shape or not torch.allclose(sigmas, steps, atol=1e-6, rtol=0):
            found = "another" if sigmas is None else f"{len(sigmas)} trained steps, {sigmas[0]:.4g} to {sigmas[-1]:.4g}"
            raise ValueError(
                f"calibration: {self.plan.calibration} is of {found}; this run has {len(steps)}, {steps[0]:.4g} to "
                f"{steps[-1]:.4g}: calibrate with the same steps, shift and schedule"
            )

    def step(self) -> Metrics:
        """Roll out, score, and step the weights.

        An update with a reward, loss or gradient that is not finite is skipped and counted; optimizer steps that it
        made before, on other samples of the rollout, stay.

        Raises:
            TrainingStopped: too many updates in a row were skipped.
            RewardFailed: the reward raised an error.
            RankFailed: on several ranks, a reward or decoder failed on one; on a single rank the decoder's error is
                raised as it is.
        """
        start = timer()
        metrics = Metrics(self.update + 1, learning_rate=self.learner.learning_rate())
        collectives, device = self.learner.collectives, self.learner.backbone.device
        with collectives.running():
            batches, broken = self._collect(metrics)
            with timed(metrics, "reward"):
                skipped = isinstance(broken, NOT_FINITE)
                raise_together(None if skipped else broken, device)
                metrics.skipped = texts_of_ranks(str(broken) if skipped else "", device)
            if not metrics.skipped:
                self._learn(batches, metrics)
        if collectives.complete:
            metrics.seconds["communication"] = collectives.seconds()
        metrics.total_s = timer() - start
        self.update += 1
        self._count(metrics)
        return metrics

    def batches(self, purpose: str) -> list[tuple[VelocityPolicy, Trajectory, Tensor]]:
        """Micro-batches of the policy as it is, with advantages, that no update sees: drawn for another purpose."""
        metrics = Metrics(self.update)
        found, broken = self._collect(metrics, purpose)
        raise_together(broken, self.learner.backbone.device)
        values = self._advantages(found, metrics)
        return [(one.policy, one.trajectory, advantages) for one, advantages in zip(found, values, strict=True)]

    def _collect(self, metrics: Metrics, purpose: str = "update") -> tuple[list[Collected], Exception | None]:
        """This rank's samples of the update, in micro-batches, with their rewards; and what broke first, if it did.

        Other ranks gather weights in every forward: so all are made, whatever breaks on this one.
        """
        given, seed = self.config.rollout, self.config.run.seed
        prompts = prompts_of(self.learner.backbone.prompts, given.prompts, seed, self.update)
        window = window_of(given, seed, self.update)
        own = derive_seed(seed, purpose, self.update)
        graph_at = self._graph_at(window) if purpose == "update" else ()
        found: list[Collected] = []
        broken = FirstError()
        for samples in samples_of(prompts, given.samples, rank(), ranks()).split(given.micro_batch):
            with broken.keep(FloatingPointError), timed(metrics, "rollout"):
                policy, trajectory, old = self._roll_out(samples, own, window, graph_at)
            if broken.error is None:
                with broken.keep(Exception), timed(metrics, "reward"):
                    images = self.learner.backbone.decode(trajectory.final)
                    rewards = score_in_update(self.reward, images, samples.prompts, self.update + 1)
                    steps = random_steps(given, seed, samples.ids)
                    found.append(Collected(samples, policy, trajectory, steps, rewards, old))
            if broken.error is not None and ranks() == 1:
                break
        return found, broken.error

    def _roll_out(
        self, samples: Samples, seed: int, window: range | None, graph_at: tuple[int, ...]
    ) -> tuple[VelocityPolicy, Trajectory, Tensor | None]:
        """Draws a micro-batch, with the policy that draws it; and its velocities where the loss asks for the old one's.

        Forward-process methods sample by the ODE and mix noise into the samples; others keep the SDE's steps.
        """
        given = self.config.rollout
        policy = self.learner.policy(samples.prompts)
        latents = self.latents(seed, samples.groups if given.same_noise else samples.ids)
        how: dict[str, Any] = {"sample_ids": samples.ids, "timestep_mode": given.timestep_mode}
        if self.plan.upstream not in FORWARD:
            with in_step(policy, latents, given.steps):
                return (
                    policy,
                    rollout(
                        policy, self.sigmas, self.transition, latents, seed, window=window, graph_at=graph_at, **how
                    ),
                    None,
                )
        states, old = self.plan.states, self.plan.upstream == "nft"
        with in_step(policy, latents, given.steps + states * old):
            final = sample_ode(policy, self.sigmas, latents, timestep_mode=given.timestep_mode)
            noised = forward_states(policy, final, states, seed, shift=given.shift, **how)
            return policy, noised, velocities(policy, noised) if old else None

    def latents(self, seed: int, ids: tuple[int, ...]) -> Tensor:
        """Draws initial noise ``[len(ids), *D]``, a stream for each id."""
        backbone = self.learner.backbone
        drawn = initial_latents(backbone.latent_shape, seed, ids)
        # all but the network runs in the dtype of the latents, at least fp32
        wanted = torch.promote_types(torch.float32, precision(self.config.model.dtype))
        return drawn.to(backbone.device, wanted)

    def _advantages(self, batches: list[Collected], metrics: Metrics) -> list[Tensor]:
        """Advantages of this rank's micro-batches, with statistics over the samples of all ranks."""
        rewards, groups = self._gathered(batches)
        every = group_advantages(rewards, groups, **vars(self.config.advantage))
        metrics.reward_mean, metrics.reward_std = float(rewards.mean()), float(rewards.std(correction=0))
        metrics.groups_without_signal = groups_without_signal(every, groups)
        return self._of_this_rank(every, batches)

    def _slopes(self, batches: list[Collected]) -> list[Tensor]:
        """Derivatives of the advantages in the samples' rewards; 0 where the loss clips the advantage."""
        rewards, groups = self._gathered(batches)
        every = group_advantages(rewards, groups, **vars(self.config.advantage))
        slopes = advantage_slopes(rewards, groups, **vars(self.config.advantage))
        kept = self.objective.clip_advantages(every) == every
        return self._of_this_rank(torch.where(kept, slopes, 0.0), batches)

    def _gathered(self, batches: list[Collected]) -> tuple[Tensor, Tensor]:
        """Rewards and prompts of all ranks' samples, each ``[B]``."""
        rewards = gathered(torch.cat([batch.rewards for batch in batches]))
        groups = torch.tensor([g for batch in batches for g in batch.samples.groups], device=rewards.device)
        return rewards, gathered(groups)

    def _of_this_rank(self, every: Tensor, batches: list[Collected]) -> list[Tensor]:
        share = len(every) // ranks()
        here = every[rank() * share : (rank() + 1) * share]
        return list(here.split([len(batch.samples) for batch in batches]))

    def _learn(self, batches: list[Collected], metrics: Metrics) -> None:
        given = self.config.optimizer
        with timed(metrics, "reward"):
            advantages = self._advantages(batches, metrics)
            if self.plan.upstream == "pathwise":
                advantages = self._slopes(batches)
        share = sum(len(batch.samples) for batch in batches) // given.steps_per_rollout
        reports = []
        for _ in range(given.epochs):
            for start in range(0, share * given.steps_per_rollout, share):
                found = self._optimizer_step(batches, advantages, range(start, start + share), metrics)
                if isinstance(found, str):
                    metrics.skipped = found
                    return
                reports += found
        metrics.log_ratio_max = max(report.log_ratio_max for report in reports)
        metrics.clipped_share = sum(report.clipped_share for report in reports) / len(reports)
        metrics.micro_batches = len(reports)
        passes = sum(report.passes for report in reports) / len(reports)
        metrics.passes = int(passes) if passes.is_integer() else passes
        metrics.forwards = sum(report.forwards for report in reports)
        metrics.audit_passes = sum(report.audit_passes for report in reports)
        if self.meter is not None:
            now = self.meter.fidelity()
            metrics.audits, metrics.audit_cosine = now.audits, now.cosine
            metrics.audit_cosine_low, metrics.audit_cosine_high = now.low, now.high

    def _optimizer_step(
        self, batches: list[Collected], advantages: list[Tensor], part: range, metrics: Metrics
    ) -> list[Report] | str:
        """One optimizer step on the samples at the places ``part``; why it was skipped, if it was."""
        reports, place, reason = [], 0, ""
        deferred, meter = self.learner.deferred, self.meter
        if deferred is not None and not (meter is not None and meter.is_due_next):  # an audit reads reduced gradients
            deferred.keep()
        for batch, values in zip(batches, advantages, strict=True):
            inside = range(max(part.start - place, 0), min(part.stop - place, len(values)))
            place += len(values)
            if not inside:
                continue
            try:
                with timed(metrics, "upstream"):  # with all that is neither forward nor backward
                    reports.append(accumulate(self, batch, values, inside, len(part), meter))
            except FloatingPointError as error:
                reason = reason or str(error)  # and on, for other ranks gather weights in every pass
            meter = None
        for report in reports:
            for stage in ("forward", "backward", "audit"):
                metrics.seconds[stage] += report.seconds.get(stage, 0.0)
                metrics.seconds["upstream"] -= report.seconds.get(stage, 0.0)
        if deferred is not None:
            with timed(metrics, "backward"):
                deferred.reduce()
        with timed(metrics, "optimizer"):
            metrics.learning_rate = self.learner.learning_rate()
            reason = texts_of_ranks(reason, self.learner.backbone.device)
            if reason:
                self.learner.masters.clear_gradients()
                return reason
            metrics.grad_norm = self.learner.step()
        metrics.loss = sum(report.loss for report in reports)
        return reports if metrics.grad_norm is not None else "the gradient is not finite"

    def _graph_at(self, window: range | None) -> tuple[int, ...]:
        """Steps whose graphs a rollout keeps, once they are known to fit."""
        given = self.config.rollout
        if not self.plan.keep_graphs:
            return ()
        sigmas = self.sigmas[:-2] if window is None else self.sigmas[list(window)]
        knots = make_plan(self.plan, sigmas, plan_seed(self)).knots
        if not self._fits:
            backbone = self.learner.backbone
            policy = self.learner.policy(backbone.prompts[:1])
            require_memory(policy, self.latents(0, (0,)), len(knots), given.batch // ranks())
            self._fits = True
        return knots

    def _count(self, metrics: Metrics) -> None:
        """Count an update that was skipped, and stop if it is one too many."""
        if not metrics.skipped:
            self.skipped_in_a_row = 0
            return
        self.skipped += 1
        self.skipped_in_a_row += 1
        if self.skipped_in_a_row >= self.config.run.max_skipped:
            raise TrainingStopped(
                f"{self.skipped_in_a_row} updates in a row were skipped (setting max_skipped), the last one, "
                f"{metrics.update}, because: {metrics.skipped}",
                metrics,
            )

    def evaluate(self) -> dict[str, float]:
        """Scores held-out samples: the mean of the trained reward and of every watched one; see `held_out`."""
        return held_out(self, draw=False).rewards

    def recalibrate(self) -> dict[str, float | str]:
        """Search the knots anew for the policy as it is, and train with them from here on. Returns what was found."""
        search: Any = import_object(self.plan.recalibrate, "recalibrate", "module:function")
        found = search(self)
        before = make_plan(self.plan, self.sigmas[:-2], 0).knots
        self._take_knots(found.knots)
        told = {name: " ".join(map(str, knots)) for name, knots in (("knots_before", before), ("knots", found.knots))}
        return told | {"cosine_before": found.cosine_before, "cosine": found.cosine}

    def _take_knots(self, knots: tuple[int, ...]) -> None:
        self.plan = replace(self.plan, knots=knots, calibration="")

    def state(self) -> dict[str, Any]:
        """What a checkpoint holds besides tensors."""
        counts = {"optimizer_steps": self.learner.steps, "skipped": self.skipped, "in_a_row": self.skipped_in_a_row}
        meter = {} if self.meter is None else {"meter": self.meter.state()}
        return counts | {"knots": list(self.plan.knots), "inputs": self.inputs} | meter

    def restore(self, update: int, state: dict[str, Any]) -> None:
        """Go on after ``update``, once the learner's tensors were read."""
        self.update = update
        self.skipped, self.skipped_in_a_row = int(state["skipped"]), int(state["in_a_row"])
        if state["knots"]:
            self._take_knots(tuple(state["knots"]))
        if self.meter is not None and "meter" in state:
            self.meter.restore(state["meter"])
        self.learner.restored(int(state["optimizer_steps"]))
