"""Running the checks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain

import torch

from jagg_core.backbones.check import gradients, members, velocities
from jagg_core.backbones.check.probe import Outcome, Probe, parameters_of
from jagg_core.backbones.protocol import Backbone

CHECKS: dict[str, Callable[[Probe], Outcome]] = {
    "shape": velocities.shape,
    "finite": velocities.finite,
    "deterministic": velocities.deterministic,
    "prompts": velocities.prompts,
    "rows": velocities.rows,
    "one by one": velocities.one_by_one,
    "batched steps": velocities.batched_steps,
    "sigma": velocities.sigma,
    "sign": velocities.sign,
    "sampling": velocities.sampling,
    "no grad": velocities.no_grad,
    "parameters": members.same_parameters,
    "signature": members.signature,
    "every parameter": gradients.every_parameter,
    "closed form": gradients.closed_form,
    "pairs": gradients.pairs,
    "joint": gradients.joint,
    "batched": gradients.batched,
    "decode": members.decode,
    "checkpointing": gradients.checkpointing,  # last: it stays on
}
"""Every check, in the order in which they run."""


@dataclass(frozen=True)
class Finding:
    """What one check found.

    Attributes:
        name: of the check.
        ok: whether the contract holds. A text that starts with "warning" is ok, and yet worth a look.
        text: what was found, in words.
        value: the measured number that decided; None without one.
    """

    name: str
    ok: bool
    text: str
    value: float | None = None


def check_backbone(backbone: Backbone, progress: Callable[[Finding], None] | None = None) -> list[Finding]:
    """Check a loaded backbone on four samples of two prompts. A check that raises is a failed finding.

    ``.grad``, the state of torch's random numbers and train or eval mode are left as they were. Gradient checkpointing
    is on afterwards, for a backbone has no way to turn it off. ``progress`` is called with each finding.
    """
    findings = []
    with _left_as_it_was(backbone):
        probe = Probe(backbone)
        for name, check in CHECKS.items():
            try:
                finding = Finding(name, *check(probe))
            except Exception as error:
                finding = Finding(name, False, f"raised {type(error).__name__}: {error}")
            findings.append(finding)
            if progress is not None:
                progress(finding)
    return findings


@contextmanager
def _left_as_it_was(backbone: Backbone) -> Iterator[None]:
    modes = [(module, module.training) for module in backbone.transformer.modules()]
    try:
        own = parameters_of(backbone.policy(backbone.prompts[:1]))
    except Exception:  # any fault of the user's policy: the checks meet it again, and say so
        own = []
    leaves = {id(p): p for p in chain(backbone.transformer.parameters(), own) if p.is_leaf}
    held = [(p, p.grad) for p in leaves.values()]
    try:
        with torch.random.fork_rng(devices=[backbone.device] if backbone.device.type == "cuda" else []):
            for parameter, _ in held:
                parameter.grad = None
            yield
    finally:
        for parameter, gradient in held:
            parameter.grad = gradient
        for module, training in modes:
            module.training = training
