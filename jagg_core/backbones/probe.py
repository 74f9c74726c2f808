"""Inputs and results that the checks of a backbone share."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from itertools import chain

import torch
from torch import Tensor

from jagg_core.backbones.protocol import Backbone
from jagg_core.devices import fork_rng
from jagg_core.engine import BackwardMode, UpstreamMode, accumulate_gradients
from jagg_core.objective import ClippedSurrogate, upstream_closed_form
from jagg_core.plans import Plan, exact_plan
from jagg_core.policy import VelocityPolicy
from jagg_core.reference import TOLERANCE, plain_gradient
from jagg_core.rollouts import rollout
from jagg_core.schedule import dance_schedule
from jagg_core.seeding import initial_latents
from jagg_core.trajectory import Trajectory
from jagg_core.transitions import DanceSDE

SAMPLES = 4
STEPS = 6
ADVANTAGES = (1.3, -0.7, 0.4, -1.0)

OBJECTIVE = ClippedSurrogate(clip_range=0.2)
"""Clips so late that rounding in half precision clips no ratio."""

Outcome = tuple[bool, str, float | None]
"""Whether the contract holds, the result in words, and the number that decided, as in a `Finding`."""


def parameters_of(policy: VelocityPolicy) -> list[Tensor]:
    """Returns the policy's parameters; the engine works without them, a calibration does not.

    Raises:
        ValueError: the policy has no ``parameters()``.
    """
    parameters = getattr(policy, "parameters", None)
    if parameters is None:
        raise ValueError("the policy has no parameters(): without them it is not known whether a rollout is on policy")
    return list(parameters())


class Probe:
    """Inputs and shared results. Each is computed at its first use, so that a failure stays in its checks."""

    def __init__(self, backbone: Backbone) -> None:
        self.backbone = backbone

    @cached_property
    def prompts(self) -> list[str]:
        """Returns the first two prompts in turn, a prompt per sample."""
        first = list(self.backbone.prompts[:2])
        if not first:
            raise ValueError("prompts must have at least one, got none")
        return [first[i % len(first)] for i in range(SAMPLES)]

    @cached_property
    def policy(self) -> VelocityPolicy:
        """Makes the policy for the prompts, with the default guidance."""
        return self.backbone.policy(self.prompts)

    @cached_property
    def parameters(self) -> list[Tensor]:
        """Returns the policy's parameters."""
        return parameters_of(self.policy)

    @cached_property
    def dtypes(self) -> set[torch.dtype]:
        """Returns the floating-point dtypes of the transformer's weights."""
        return {p.dtype for p in self.backbone.transformer.parameters() if p.dtype in TOLERANCE} or {torch.float32}

    @cached_property
    def tolerance(self) -> float:
        """Returns the relative error that the coarsest dtype allows."""
        return max(TOLERANCE[dtype] for dtype in self.dtypes)

    @cached_property
    def latents(self) -> Tensor:
        """Draws pure noise [4, *D]; at least fp32, as in a rollout."""
        dtype = torch.float64 if self.dtypes == {torch.float64} else torch.float32
        return initial_latents(self.backbone.latent_shape, 0, range(SAMPLES)).to(self.backbone.device, dtype)

    @cached_property
    def rows(self) -> Tensor:
        """Returns the indices of all samples, in order."""
        return torch.arange(SAMPLES, device=self.latents.device)

    @cached_property
    def sigmas(self) -> Tensor:
        """Returns a different sigma for every sample."""
        return self.latents.new_tensor([0.9, 0.7, 0.5, 0.3])

    def velocity(
        self,
        pick: Sequence[int] = tuple(range(SAMPLES)),
        sigmas: Tensor | None = None,
        policy: VelocityPolicy | None = None,
    ) -> Tensor:
        """Computes velocities of the samples ``pick`` at `sigmas` or at the given ones, without a graph."""
        index = torch.tensor(pick, device=self.latents.device)
        with torch.no_grad():
            sigma = self.sigmas[index] if sigmas is None else sigmas
            return (policy or self.policy).velocity(self.latents[index], sigma, self.rows[index])

    def velocity_with_graph(self) -> Tensor:
        """Computes velocities of all samples at `sigmas`, with a graph."""
        with torch.enable_grad():
            return self.policy.velocity(self.latents, self.sigmas, self.rows)

    @cached_property
    def base(self) -> Tensor:
        """Computes the velocities that most checks compare with."""
        return self.velocity()

    @cached_property
    def trajectory(self) -> Trajectory:
        """Rolls out Dance-SDE on DanceGRPO's schedule."""
        return rollout(self.policy, dance_schedule(STEPS), DanceSDE(0.7), self.latents, seed=0)

    @property
    def scale(self) -> float:
        """Returns the factor of the loss: half precision cannot hold the gradient of a mean over many elements."""
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
        """Computes the gradient of a plan by the engine; None for a parameter without one."""
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
        gradients = [parameter.grad for parameter in self.parameters]
        for parameter in self.parameters:
            parameter.grad = None
        if all(g is None for g in gradients):
            raise ValueError("no tensor of parameters() got a gradient")
        return gradients

    @cached_property
    def exact(self) -> list[Tensor | None]:
        """Computes the exact gradient by autograd, one step after the other."""
        return self.gradient(exact_plan(self.trajectory.sigmas), "autograd", "sequential")

    def name_of(self, parameter: Tensor) -> str:
        """Returns the parameter's name in the transformer."""
        names = {id(p): name for name, p in self.backbone.transformer.named_parameters()}
        return names.get(id(parameter), f"one of shape {list(parameter.shape)} outside the transformer")


def same(probe: Probe, error: float, what: str, likely: str) -> Outcome:
    """Compares an error with the tolerance. ``what`` says what is equal, ``likely`` why it might not be."""
    limit = probe.tolerance
    if error <= limit:
        return True, f"{what}; relative error", error
    return False, f"not so: {what}; {likely}; relative error, above {limit:g}", error


@contextmanager
def unchanged(backbone: Backbone) -> Iterator[None]:
    """Restores ``.grad``, random numbers and train or eval mode after the body."""
    modes = [(module, module.training) for module in backbone.transformer.modules()]
    try:
        parameters = parameters_of(backbone.policy(backbone.prompts[:1]))
    except Exception:  # any fault of the user's policy: the checks meet it again and report it
        parameters = []
    leaves = {id(p): p for p in chain(backbone.transformer.parameters(), parameters) if p.is_leaf}
    held = [(p, p.grad) for p in leaves.values()]
    try:
        with fork_rng(backbone.device):
            for parameter, _ in held:
                parameter.grad = None
            yield
    finally:
        for parameter, gradient in held:
            parameter.grad = gradient
        for module, training in modes:
            module.training = training
