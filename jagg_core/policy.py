"""What the engine needs of a model: a velocity. Everything else about a backbone stays behind this line."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

from torch import Tensor


@runtime_checkable
class VelocityPolicy(Protocol):
    """A velocity field with parameters.

    A policy may also offer

    - ``parameters()``: the trained parameters. With them the engine can tell whether a rollout is on policy. The same
      tensors at every call: under FSDP2 keep the sharded ones, for a module shows gathered ones after a forward.
    - ``compute_dtype``: of the network, where neither its velocities nor its parameters show it.
    - ``signature() -> dict[str, str]``: settings that a replay must share with the rollout (guidance, dtype, prompts).
    """

    def velocity(self, latents: Tensor, sigma: Tensor, rows: Tensor) -> Tensor:
        """Velocity (noise minus data) ``[N, ...]`` at ``latents`` [N, ...] and ``sigma`` [N] in [0, 1].

        ``rows[n]`` says which sample of the rollout ``latents[n]`` belongs to, so that conditioning follows when
        several steps of a rollout are batched in one call, or only some of its samples are.
        """
        ...


def guided(conditional: Tensor, unconditional: Tensor, scale: float) -> Tensor:
    """Classifier-free guidance of two velocities of equal shape: ``u + scale (c - u)``."""
    return unconditional + scale * (conditional - unconditional)


class ClassifierFreeGuidance:
    """Two policies, with and without the prompt, as one. Two calls per velocity; gradients flow through both."""

    def __init__(self, conditional: VelocityPolicy, unconditional: VelocityPolicy, scale: float) -> None:
        self.conditional = conditional
        self.unconditional = unconditional
        self.scale = float(scale)

    def velocity(self, latents: Tensor, sigma: Tensor, rows: Tensor) -> Tensor:
        """See `VelocityPolicy`."""
        conditional = self.conditional.velocity(latents, sigma, rows)
        return guided(conditional, self.unconditional.velocity(latents, sigma, rows), self.scale)

    def parameters(self) -> list[Tensor]:
        """Parameters of both policies, shared ones once; none if one of the two shows none."""
        shown = [list(getattr(policy, "parameters", list)()) for policy in (self.conditional, self.unconditional)]
        return list({id(p): p for parameters in shown for p in parameters}.values()) if all(shown) else []

    def signature(self) -> dict[str, str]:
        """The guidance scale, and what the two policies say of themselves."""
        settings = {"guidance": repr(self.scale)}
        for name, policy in (("conditional", self.conditional), ("unconditional", self.unconditional)):
            inner: dict[str, str] = getattr(policy, "signature", dict)()
            settings.update({f"{name} {key}": value for key, value in inner.items()})
        return settings


def has_reentrant_checkpointing(velocity: Tensor) -> bool:
    """Whether reentrant activation checkpointing is in the graph of ``velocity``."""
    seen: set[Any] = set()
    queue: list[Any] = [velocity.grad_fn]
    while queue:
        node = queue.pop()
        if node is None or node in seen:
            continue
        if node.name() == "CheckpointFunctionBackward":
            return True
        seen.add(node)
        queue += [following for following, _ in node.next_functions]
    return False
