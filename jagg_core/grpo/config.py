"""The configuration of a training run: one tree of settings, from YAML and flags alike, stored with the run."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from jagg_core.grpo.settings import (
    AdvantageSettings,
    ModelSettings,
    ObjectiveSettings,
    OptimizerSettings,
    ParallelSettings,
    PlanSettings,
    RewardSettings,
    RolloutSettings,
    RunSettings,
)
from jagg_core.strict_json import RecordError, read_json


@dataclass(frozen=True)
class GRPOConfig:
    """A training run.

    Attributes:
        model: what is trained.
        rollout: how samples are drawn.
        reward: what is rewarded.
        advantage: how rewards become advantages.
        plan: which estimator of the update gradient.
        objective: the loss.
        optimizer: AdamW, and how often it steps.
        run: length, seed, checkpoints and logs.
        parallel: how weights lie over ranks.

    Raises:
        ValueError: settings that do not fit each other; raised before anything is loaded.
    """

    model: ModelSettings = field(default_factory=ModelSettings)
    rollout: RolloutSettings = field(default_factory=RolloutSettings)
    reward: RewardSettings = field(default_factory=RewardSettings)
    advantage: AdvantageSettings = field(default_factory=AdvantageSettings)
    plan: PlanSettings = field(default_factory=PlanSettings)
    objective: ObjectiveSettings = field(default_factory=ObjectiveSettings)
    optimizer: OptimizerSettings = field(default_factory=OptimizerSettings)
    run: RunSettings = field(default_factory=RunSettings)
    parallel: ParallelSettings = field(default_factory=ParallelSettings)

    def __post_init__(self) -> None:
        from jagg_core.plans import find_estimator, groups_of

        self._check_rewards()
        steps, plan = self.rollout.trained_steps, self.plan
        kind = find_estimator(plan.estimator).kind
        if kind == "groups":
            groups_of(steps, plan.window)
        if kind == "random" and plan.passes > steps:
            raise ValueError(f"passes must be at most the {steps} trained steps, got {plan.passes}")
        if plan.knots and max(plan.knots) >= steps:
            raise ValueError(f"knots must be below the {steps} trained steps, got {list(plan.knots)}")
        if plan.calibration:
            self._check_calibration()
        if plan.keep_graphs:
            self._check_graphs()
        if plan.upstream == "pathwise":
            self._check_pathwise()
        if plan.upstream in ("awm", "nft"):
            self._check_forward()
        if self.run.audit_every:
            self._check_audit()
        if plan.recalibrate_every and self.rollout.trained != "all":
            raise ValueError(f"recalibrate_every needs trained 'all', got {self.rollout.trained!r}")
        prompt_statistics = "prompt" in (self.advantage.centre, self.advantage.scale)
        if prompt_statistics and self.rollout.samples == 1:
            raise ValueError(
                "samples must be at least 2: with one sample of a prompt its statistics give no signal; "
                "or take advantages over the batch"
            )

    @property
    def trained_steps(self) -> int:
        """States of each sample that are trained: steps of its rollout, or noise levels of a forward process."""
        return self.plan.states if self.plan.upstream in ("awm", "nft") else self.rollout.trained_steps

    @property
    def rollout_evaluations(self) -> int:
        """Network evaluations of a sample's rollout; DiffusionNFT's old velocities are taken there."""
        return self.rollout.steps + (self.plan.states if self.plan.upstream == "nft" else 0)

    def _check_rewards(self) -> None:
        from jagg_core.rewards import check_reward, options_of

        left = set(self.reward.options)
        for name in (self.reward.name, *self.run.eval_rewards):
            options = options_of(name, self.reward.options)
            check_reward(name, options=options)
            left -= set(options)
        if left:
            raise ValueError(f"reward options: {sorted(left)} are for none of the rewards")

    def _check_calibration(self) -> None:
        """Refuse one of another kernel; the trainer, which knows the backbone's schedule, checks that."""
        from jagg_core.grpo.plans import jagg_frac_of
        from jagg_core.plans import find_estimator
        from jagg_core.transitions import TRANSITIONS

        given = self.rollout
        if given.trained != "all":
            raise ValueError(
                f"a calibration is of whole rollouts: trained must be 'all' with it, got {given.trained!r}"
            )
        if find_estimator(self.plan.estimator).kind == "groups":
            jagg_frac_of(self.plan)
        made_with = read_json(Path(self.plan.calibration))
        transition = repr(TRANSITIONS[given.transition](given.eta))
        for name, ours in (("transition", transition), ("timestep_mode", given.timestep_mode)):
            if not isinstance(made_with, dict) or name not in made_with:
                raise RecordError(f"calibration: {self.plan.calibration} has no {name}")
            if made_with[name] != ours:
                raise ValueError(
                    f"{name}: calibrated with {made_with[name]}, this run has {ours}: calibrate with the same "
                    f"(python -m analysis calibrate --help), or set rollout.{name} and rollout.eta"
                )

    def _check_pathwise(self) -> None:
        """Refuse what the reward's gradient along the rollout does not cover."""
        given = self.optimizer
        for name, value, wanted in (
            ("epochs", given.epochs, 1),
            ("steps_per_rollout", given.steps_per_rollout, 1),
            ("kl_beta", self.objective.kl_beta, 0),
        ):
            if value != wanted:
                raise ValueError(
                    f"upstream pathwise is for one optimizer step on policy: {name} must be {wanted}, got {value}"
                )
        if self.advantage.scale == "prompt" and self.rollout.samples < 3:
            raise ValueError(
                f"upstream pathwise needs samples of at least 3 where advantages are divided by the std of a prompt, "
                f"got {self.rollout.samples}"
            )

    def _check_forward(self) -> None:
        """Refuses what has no meaning at re-noised samples."""
        upstream, given = self.plan.upstream, self.optimizer
        wanted: list[tuple[str, object, object]] = [
            ("trained", self.rollout.trained, "all"),
            ("kl_beta", self.objective.kl_beta, 0),
        ]
        if upstream == "awm":  # its loss knows no old policy
            wanted += [("epochs", given.epochs, 1), ("steps_per_rollout", given.steps_per_rollout, 1)]
        for name, value, allowed in wanted:
            if value != allowed:
                raise ValueError(f"upstream {upstream}: {name} must be {allowed}, got {value}")

    def _check_audit(self) -> None:
        """Refuse plans and upstream gradients whose residuals may not be orthogonal."""
        import torch

        from jagg_core.engine.meter import require_auditable
        from jagg_core.grpo.plans import make_plan

        if self.plan.upstream in ("pathwise", "awm", "nft"):
            raise ValueError(f"audit_every is for the policy gradient: upstream must not be {self.plan.upstream}")
        steps = self.rollout.trained_steps
        require_auditable(make_plan(self.plan, torch.linspace(1, 1 / steps, steps, dtype=torch.float64), 0))

    def _check_graphs(self) -> None:
        given = self.optimizer
        for name, value, wanted in (
            ("predict", self.plan.predict, False),
            ("epochs", given.epochs, 1),
            ("steps_per_rollout", given.steps_per_rollout, 1),
            ("trained", self.rollout.trained == "random", False),
        ):
            if value != wanted:
                raise ValueError(
                    "keep_graphs is for one optimizer step on policy, at states of the rollout that all samples share: "
                    f"{name} must be {'all or window' if name == 'trained' else wanted}, "
                    f"got {self.rollout.trained if name == 'trained' else value}"
                )

    def check_ranks(self, ranks: int) -> None:
        """Check that samples and shards divide evenly.

        Raises:
            ValueError: they do not.
        """
        samples, parts = self.rollout.batch, ranks * self.optimizer.steps_per_rollout
        if samples % parts:
            raise ValueError(
                f"prompts * samples must be a multiple of ranks * steps_per_rollout = {parts}, got {samples}"
            )
        held_out = self.run.eval_prompts * self.run.eval_samples
        if (self.run.eval_every or self.run.samples_every) and held_out % ranks:
            raise ValueError(f"eval_prompts * eval_samples must be a multiple of the {ranks} ranks, got {held_out}")
        if self.plan.keep_graphs and ranks > 1:
            raise ValueError(f"keep_graphs is for one rank, whose weights stay as they are, got {ranks}")
        if self.parallel.shards and ranks % self.parallel.shards:
            raise ValueError(f"shards must divide the {ranks} ranks, got {self.parallel.shards}")
