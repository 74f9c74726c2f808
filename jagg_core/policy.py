"""The interface between the engine and a model: a velocity."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

from torch import Tensor


@runtime_checkable
class VelocityPolicy(Protocol):
    """A velocity field with parameters.

    A policy may also offer

    - ``parameters()``: the trained parameters. With them the engine knows whether a rollout is on policy. The same
      tensors at every call: under FSDP2 keep the sharded ones, because a module shows gathered ones after a forward.
    - ``compute_dtype``: dtype of the network, where velocities and parameters do not show it.
    - ``signature() -> dict[str, str]``: settings that a replay must share with the rollout (guidance, dtype, prompts).
    """

    def velocity(self, latents: Tensor, sigma: Tensor, rows: Tensor) -> Tensor:
        """Computes the velocity (noise minus data) ``[N, ...]`` at ``latents`` [N, ...] and ``sigma`` [N] in [0, 1].

        ``rows[n]`` is the sample of the rollout to which ``latents[n]`` belongs: a call may have several steps of a
        rollout, or only some of its samples.
        """
        ...


def guided(conditional: Tensor, unconditional: Tensor, scale: float) -> Tensor:
    """Combines two velocities of equal shape by classifier-free guidance: ``u + scale (c - u)``."""
    return unconditional + scale * (conditional - unconditional)


class ClassifierFreeGuidance:
    """Two policies, with and without the prompt, as one. Two calls per velocity; gradients flow through both."""

    def __init__(self, conditional: VelocityPolicy, unconditional: VelocityPolicy, scale: float) -> None:
        self.conditional = conditional
        self.unconditional = unconditional
        self.scale = float(scale)

    def velocity(self, latents: Tensor, sigma: Tensor, rows: Tensor) -> Tensor:
        """Computes the guided velocity ``[N, ...]``."""
        conditional = self.conditional.velocity(latents, sigma, rows)
        return guided(conditional, self.unconditional.velocity(latents, sigma, rows), self.scale)

    def parameters(self) -> list[Tensor]:
        """Returns the parameters of both policies, shared ones once; none if one policy has none."""
        shown = [list(getattr(policy, "parameters", list)()) for policy in (self.conditional, self.unconditional)]
        return list({id(p): p for parameters in shown for p in parameters}.values()) if all(shown) else []

    def signature(self) -> dict[str, str]:
        """Returns the guidance scale and the signatures of both policies."""
        settings = {"guidance": repr(self.scale)}
        for name, policy in (("conditional", self.conditional), ("unconditional", self.unconditional)):
            inner: dict[str, str] = getattr(policy, "signature", dict)()
            settings.update({f"{name} {key}": value for key, value in inner.items()})
        return settings


def has_reentrant_checkpointing(velocity: Tensor) -> bool:
    """Searches the graph of ``velocity`` for reentrant activation checkpointing."""
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
