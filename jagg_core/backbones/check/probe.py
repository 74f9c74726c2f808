"""What the checks of a backbone share: inputs, results that several need, and how two ways are compared."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor

from jagg_core.backbones.protocol import Backbone
from jagg_core.engine import BackwardMode, UpstreamMode, accumulate_gradients
from jagg_core.objective import ClippedSurrogate, upstream_closed_form
from jagg_core.plans import Plan, exact_plan
from jagg_core.policy import VelocityPolicy
from jagg_core.reference import TOLERANCE, plain_gradient
from jagg_core.schedule import dance_schedule
from jagg_core.seeding import initial_latents
from jagg_core.trajectory import Trajectory, rollout
from jagg_core.transitions import DanceSDE

SAMPLES = 4
STEPS = 6
ADVANTAGES = (1.3, -0.7, 0.4, -1.0)

OBJECTIVE = ClippedSurrogate(clip_range=0.2)
"""Clips so late that rounding in half precision clips nothing."""

Outcome = tuple[bool, str, float | None]
"""Whether the contract holds, what was found, and the number that decided; see `jagg_core.backbones.check.Finding`."""


def parameters_of(policy: VelocityPolicy) -> list[Tensor]:
    """The policy's parameters, which the engine can do without, but a calibration cannot.

    Raises:
        ValueError: the policy shows none.
    """
    parameters = getattr(policy, "parameters", None)
    if parameters is None:
        raise ValueError("the policy has no parameters(): without them nobody can tell whether a rollout is on policy")
    return list(parameters())


class Probe:
    """Inputs and shared results. Each is made when it is first needed, so that a failure stays in its checks."""

    def __init__(self, backbone: Backbone) -> None:
        self.backbone = backbone

    @cached_property
    def prompts(self) -> list[str]:
        """The first two prompts in turn, a prompt per sample."""
        first = list(self.backbone.prompts[:2])
        if not first:
            raise ValueError("prompts: a backbone has at least one, found none")
        return [first[i % len(first)] for i in range(SAMPLES)]

    @cached_property
    def policy(self) -> VelocityPolicy:
        """For the prompts, with the usual guidance."""
        return self.backbone.policy(self.prompts)

    @cached_property
    def parameters(self) -> list[Tensor]:
        """The policy's own."""
        return parameters_of(self.policy)

    @cached_property
    def dtypes(self) -> set[torch.dtype]:
        """Floating-point dtypes of the transformer's weights."""
        return {p.dtype for p in self.backbone.transformer.parameters() if p.dtype in TOLERANCE} or {torch.float32}

    @cached_property
    def tolerance(self) -> float:
        """Of the coarsest dtype."""
        return max(TOLERANCE[dtype] for dtype in self.dtypes)

    @cached_property
    def latents(self) -> Tensor:
        """Pure noise; at least fp32, as in a rollout."""
        dtype = torch.float64 if self.dtypes == {torch.float64} else torch.float32
        return initial_latents(self.backbone.latent_shape, 0, range(SAMPLES)).to(self.backbone.device, dtype)

    @cached_property
    def rows(self) -> Tensor:
        """All samples, in order."""
        return torch.arange(SAMPLES, device=self.latents.device)

    @cached_property
    def sigmas(self) -> Tensor:
        """A sigma of its own for every sample."""
        return self.latents.new_tensor([0.9, 0.7, 0.5, 0.3])

    def velocity(
        self,
        pick: Sequence[int] = tuple(range(SAMPLES)),
        sigmas: Tensor | None = None,
        policy: VelocityPolicy | None = None,
    ) -> Tensor:
        """Velocities of the samples ``pick`` at their own sigma or at ``sigmas``, without a graph."""
        index = torch.tensor(pick, device=self.latents.device)
        with torch.no_grad():
            told = self.sigmas[index] if sigmas is None else sigmas
            return (policy or self.policy).velocity(self.latents[index], told, self.rows[index])

    def velocity_with_graph(self) -> Tensor:
        """Velocities of all samples at their own sigma."""
        with torch.enable_grad():
            return self.policy.velocity(self.latents, self.sigmas, self.rows)

    @cached_property
    def base(self) -> Tensor:
        """What most checks compare with."""
        return self.velocity()

    @cached_property
    def trajectory(self) -> Trajectory:
        """A rollout of Dance-SDE on DanceGRPO's schedule."""
        return rollout(self.policy, dance_schedule(STEPS), DanceSDE(0.7), self.latents, seed=0)

    @property
    def scale(self) -> float:
        """Factor of the loss: half precision cannot hold the gradient of a mean over many elements."""
        return self.trajectory.elements**0.5

    def plain(self, plan: Plan) -> list[Tensor | None]:
        """Computes the gradient of a plan by a plain loop; None for what is not trained."""
        steps = range(self.trajectory.steps)
        advantages = torch.tensor(ADVANTAGES, device=self.latents.device)
        upstream = [upstream_closed_form(OBJECTIVE, self.trajectory, j, advantages).gradient for j in steps]
        trained = [parameter for parameter in self.parameters if parameter.requires_grad]
        upstream = [self.scale * gradient for gradient in upstream]
        gradients = iter(plain_gradient(self.policy, trained, self.trajectory, upstream, plan))
        return [next(gradients) if parameter.requires_grad else None for parameter in self.parameters]

    def gradient(self, plan: Plan, upstream: UpstreamMode, backward: BackwardMode) -> list[Tensor | None]:
        """The gradient of a plan by parameter."""
        for parameter in self.parameters:
            parameter.grad = None
        accumulate_gradients(
            self.policy,
            self.trajectory,
            torch.tensor(ADVANTAGES),
            plan,
            OBJECTIVE,
            upstream,
            backward,
            scale=self.scale,
        )
        found = [parameter.grad for parameter in self.parameters]
        for parameter in self.parameters:
            parameter.grad = None
        if all(g is None for g in found):
            raise ValueError("no tensor of parameters() got a gradient")
        return found

    @cached_property
    def exact(self) -> list[Tensor | None]:
        """Forward, loss by autograd, and backward, one step after the other."""
        return self.gradient(exact_plan(self.trajectory.sigmas), "autograd", "sequential")

    def name_of(self, parameter: Tensor) -> str:
        """What the transformer calls a parameter."""
        names = {id(p): name for name, p in self.backbone.transformer.named_parameters()}
        return names.get(id(parameter), f"one of shape {list(parameter.shape)} outside the transformer")


def same(probe: Probe, error: float, what: str, likely: str) -> Outcome:
    """``what`` is equal within the tolerance; if not, ``likely`` says why."""
    limit = probe.tolerance
    if error <= limit:
        return True, f"{what}; relative error", error
    return False, f"not so: {what}; {likely}; relative error, above {limit:g}", error
