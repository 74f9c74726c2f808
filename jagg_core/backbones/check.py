"""The contract of a backbone, checked on a loaded one: what the engine and the calibration take for granted."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from jagg_core.backbones.protocol import Backbone
from jagg_core.engine import BackwardMode, UpstreamMode, accumulate_gradients
from jagg_core.objective import ClippedSurrogate
from jagg_core.plan import Plan, causal_plan, exact_plan, jagg_plan
from jagg_core.policy import VelocityPolicy
from jagg_core.schedule import dance_schedule
from jagg_core.seeding import initial_latents
from jagg_core.trajectory import Trajectory, rollout, sample_ode
from jagg_core.transitions import DanceSDE

TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 5e-2}
"""Largest relative error between two ways to the same velocities or gradients, by dtype of the network."""

REVERSED = -0.5
"""At sigma 1 a trained velocity holds the noise once, whatever the data; below this share the sign is reversed."""

GROWTH = 3.0
"""Norm of a finished sample over that of its noise, above which sampling is reported as suspicious."""

SAMPLES = 4
STEPS = 6
ADVANTAGES = (1.3, -0.7, 0.4, -1.0)

OBJECTIVE = ClippedSurrogate(clip_range=0.2)
"""Clips so late that rounding in half precision clips nothing."""

_PATH = re.compile(r"(?:^|[\s'\"(=:,])(?:~|\.{1,2}|[A-Za-z]:)?[/\\]")
"""The start of a path: from the root, the home, the current folder, or a drive; not a slash inside a name."""

Outcome = tuple[bool, str, float | None]


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
        probe = _Probe(backbone)
        for name, check in CHECKS.items():
            try:
                finding = Finding(name, *check(probe))
            except Exception as error:
                finding = Finding(name, False, f"raised {type(error).__name__}: {error}")
            findings.append(finding)
            if progress is not None:
                progress(finding)
    return findings


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


@contextmanager
def _left_as_it_was(backbone: Backbone) -> Iterator[None]:
    modes = [(module, module.training) for module in backbone.transformer.modules()]
    try:
        own = _parameters(backbone.policy(backbone.prompts[:1]))
    except Exception:  # any fault of the user's policy: the checks meet it again, and say so
        own = []
    leaves = {id(p): p for p in chain(backbone.transformer.parameters(), own) if p.is_leaf}
    gradients = [(p, p.grad) for p in leaves.values()]
    try:
        with torch.random.fork_rng(devices=[backbone.device] if backbone.device.type == "cuda" else []):
            for parameter, _ in gradients:
                parameter.grad = None
            yield
    finally:
        for parameter, gradient in gradients:
            parameter.grad = gradient
        for module, training in modes:
            module.training = training


def _parameters(policy: VelocityPolicy) -> list[Tensor]:
    """The policy's parameters, which the engine can do without, but a calibration cannot."""
    parameters = getattr(policy, "parameters", None)
    if parameters is None:
        raise ValueError("the policy has no parameters(): without them nobody can tell whether a rollout is on policy")
    return list(parameters())


class _Probe:
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
        return self.backbone.policy(self.prompts)

    @cached_property
    def parameters(self) -> list[Tensor]:
        return _parameters(self.policy)

    @cached_property
    def dtypes(self) -> set[torch.dtype]:
        return {p.dtype for p in self.backbone.transformer.parameters() if p.dtype in TOLERANCE} or {torch.float32}

    @cached_property
    def tolerance(self) -> float:
        return max(TOLERANCE[dtype] for dtype in self.dtypes)

    @cached_property
    def latents(self) -> Tensor:
        """Pure noise; at least fp32, as in a rollout."""
        dtype = torch.float64 if self.dtypes == {torch.float64} else torch.float32
        return initial_latents(self.backbone.latent_shape, 0, range(SAMPLES)).to(self.backbone.device, dtype)

    @cached_property
    def rows(self) -> Tensor:
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
        with torch.enable_grad():
            return self.policy.velocity(self.latents, self.sigmas, self.rows)

    @cached_property
    def base(self) -> Tensor:
        """What most checks compare with."""
        return self.velocity()

    @cached_property
    def trajectory(self) -> Trajectory:
        return rollout(self.policy, dance_schedule(STEPS), DanceSDE(0.7), self.latents, seed=0)

    def gradient(self, plan: Plan, upstream: UpstreamMode, backward: BackwardMode) -> list[Tensor | None]:
        """The gradient of a plan by parameter."""
        for parameter in self.parameters:
            parameter.grad = None
        # half precision cannot hold the gradient of a mean over many elements
        accumulate_gradients(
            self.policy,
            self.trajectory,
            torch.tensor(ADVANTAGES),
            plan,
            OBJECTIVE,
            upstream,
            backward,
            scale=self.trajectory.elements**0.5,
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
        names = {id(p): name for name, p in self.backbone.transformer.named_parameters()}
        return names.get(id(parameter), f"one of shape {list(parameter.shape)} outside the transformer")


def _relative_error(found: Sequence[Tensor | None], expected: Sequence[Tensor | None]) -> float:
    """``|found - expected| / |expected|`` over all tensors, summed in fp64; None is zero."""
    difference = size = 0.0
    for a, b in zip(found, expected, strict=True):
        if a is not None and b is not None and a.shape != b.shape:
            raise ValueError(f"shapes differ: {list(a.shape)} and {list(b.shape)}")
        if b is not None:
            size += b.detach().double().square().sum().item()
        if a is not None or b is not None:
            gap = (0 if a is None else a.detach().double()) - (0 if b is None else b.detach().double())
            difference += torch.as_tensor(gap).square().sum().item()
    return (difference / size) ** 0.5 if size > 0 else float(difference > 0)


def _same(probe: _Probe, error: float, what: str, likely: str) -> Outcome:
    """``what`` is equal within the tolerance; if not, ``likely`` says why."""
    limit = probe.tolerance
    if error <= limit:
        return True, f"{what}; relative error", error
    return False, f"not so: {what}; {likely}; relative error, above {limit:g}", error


def _shape(probe: _Probe) -> Outcome:
    expected, found = list(probe.latents.shape), list(probe.base.shape)
    if found != expected:
        return False, f"latents {expected} gave velocities {found}: their shapes must be equal", None
    return True, f"latents {expected} give velocities of the same shape", None


def _finite(probe: _Probe) -> Outcome:
    bad = int((~torch.isfinite(probe.base)).sum())
    if bad:
        return False, f"{bad} of {probe.base.numel()} elements of a velocity are NaN or infinite", float(bad)
    return True, "velocities are finite", None


def _deterministic(probe: _Probe) -> Outcome:
    first, again = probe.velocity(), probe.velocity()
    if torch.equal(first, again):
        return True, "two equal calls give equal velocities", None
    modes = [module.training for module in probe.backbone.transformer.modules()]
    text = (
        f"two equal calls differ: dropout, or another random layer; {sum(modes)} of {len(modes)} modules "
        "are in train mode (a backbone is loaded in eval mode)"
    )
    return False, text, _relative_error([again], [first])


def _prompts(probe: _Probe) -> Outcome:
    if len(set(probe.prompts)) == 1:
        return True, "warning: a single prompt, so nothing shows that velocities follow the prompts", None
    named = f"prompts {probe.prompts[0]!r} and {probe.prompts[1]!r}"
    alone = {p: probe.velocity(policy=probe.backbone.policy([p] * SAMPLES)) for p in probe.prompts[:2]}
    change = _relative_error([alone[probe.prompts[1]]], [alone[probe.prompts[0]]])
    if not change > probe.tolerance:
        return False, f"{named} give the same velocities: the prompt is not used", change
    own = torch.stack([alone[p][row] for row, p in enumerate(probe.prompts)])
    error = _relative_error([probe.base], [own])
    if not error <= probe.tolerance:
        return False, "a sample of a batch with several prompts does not follow its own prompt", error
    return True, f"{named} give different velocities", change


def _rows(probe: _Probe) -> Outcome:
    order = list(reversed(range(SAMPLES)))
    error = _relative_error([probe.velocity(order)], [probe.base[order]])
    likely = "conditioning must be picked by rows, and sigma taken row by row"
    return _same(probe, error, "a permuted batch gives permuted velocities", likely)


def _one_by_one(probe: _Probe) -> Outcome:
    alone = torch.cat([probe.velocity([row]) for row in range(SAMPLES)])
    likely = "samples must not see each other (batch statistics?), and conditioning must be picked by rows"
    return _same(probe, _relative_error([alone], [probe.base]), "a batch equals its samples one by one", likely)


def _batched_steps(probe: _Probe) -> Outcome:
    rows = list(range(SAMPLES))
    told = [torch.full_like(probe.sigmas, sigma) for sigma in (0.9, 0.6, 0.3)]
    separate = torch.cat([probe.velocity(rows, sigma) for sigma in told])
    error = _relative_error([probe.velocity(rows * len(told), torch.cat(told))], [separate])
    likely = "sigma must be taken row by row, and conditioning be picked by rows, which then repeat"
    return _same(probe, error, "several steps in one call equal separate calls", likely)


def _sigma(probe: _Probe) -> Outcome:
    rows = list(range(SAMPLES))
    high, low = (probe.velocity(rows, torch.full_like(probe.sigmas, sigma)) for sigma in (0.9, 0.3))
    change = _relative_error([low], [high])
    if change > 0:
        return True, "two sigmas give different velocities", change
    return False, "two sigmas give the same velocity: sigma is not used", change


def _sign(probe: _Probe) -> Outcome:
    rows = list(range(SAMPLES))
    velocity, noise = probe.velocity(rows, torch.ones_like(probe.sigmas)).double(), probe.latents.double()
    share = ((velocity * noise).sum() / noise.square().sum()).item()
    if share > REVERSED:
        return True, "share of noise in the velocity at sigma 1 (trained: about 1, untrained: about 0)", share
    if share <= REVERSED:
        return False, "the sign is reversed: velocity is noise minus data; share of noise in it at sigma 1", share
    raise ValueError("the velocity at sigma 1 is not finite")


def _sampling(probe: _Probe) -> Outcome:
    final = sample_ode(probe.policy, dance_schedule(STEPS), probe.latents).double()
    growth = (final.norm() / probe.latents.double().norm()).item()
    text = f"norm of samples after {STEPS} ODE steps over that of their noise"
    if growth > GROWTH:
        text = f"warning: {text}, above {GROWTH:g}: sign, scale of sigma, latents that are not normalised?"
    return True, text, growth


def _no_grad(probe: _Probe) -> Outcome:
    error = _relative_error([probe.velocity_with_graph()], [probe.base])
    return _same(probe, error, "velocities with and without a graph are equal", "a rollout runs without one")


def _same_parameters(probe: _Probe) -> Outcome:
    first = probe.parameters
    probe.velocity()
    for again in (_parameters(probe.policy), _parameters(probe.backbone.policy(probe.prompts))):
        if len(again) != len(first) or any(a is not b for a, b in zip(first, again, strict=True)):
            return False, "parameters() must give the same tensors at every call, in the same order", None
    trained = sum(p.requires_grad for p in first)
    if trained == 0:
        return False, f"none of the {len(first)} tensors of parameters() requires a gradient", 0.0
    return True, f"parameters() gives the same {len(first)} tensors every time, {trained} of them trained", None


def _signature(probe: _Probe) -> Outcome:
    signature = getattr(probe.policy, "signature", None)
    if signature is None:
        return False, "the policy has no signature(): a replay under other settings would not be noticed", None
    found = signature()
    if not isinstance(found, dict) or not found:
        return False, f"signature() must be a dict with at least one setting, found {found!r}", None
    for key, value in found.items():
        if not isinstance(key, str) or not isinstance(value, str):
            return False, f"signature() must be dict[str, str], found {key!r}: {value!r}", None
        if _PATH.search(value):
            return False, f"signature() has a path, which differs between machines: {key!r}: {value!r}", None
    again: dict[str, str] = probe.backbone.policy(probe.prompts).signature()  # type: ignore[attr-defined]
    if again != found:
        return False, f"signature() differs between two policies of the same prompts: {found} and {again}", None
    return True, f"signature() tells {', '.join(found)}", None


def _every_parameter(probe: _Probe) -> Outcome:
    pairs = [(p, g) for p, g in zip(probe.parameters, probe.exact, strict=True) if p.requires_grad]
    missing = [probe.name_of(p) for p, g in pairs if g is None]
    if missing:
        named = ", ".join(missing[:5]) + (f" and {len(missing) - 5} more" if len(missing) > 5 else "")
        text = f"{len(missing)} of {len(pairs)} trained parameters get no gradient: {named}; detached, or not used?"
        return False, text, float(len(missing))
    zero = sum(not g.any() for _, g in pairs if g is not None)
    note = f" (of {zero} of them it is zero)" if zero else ""
    return True, f"a gradient reaches all {len(pairs)} trained parameters{note}", None


def _closed_form(probe: _Probe) -> Outcome:
    found = probe.gradient(exact_plan(probe.trajectory.sigmas), "closed_form", "sequential")
    likely = "a velocity of the replay differs from the rollout's"
    what = "upstream gradients in closed form and by autograd give the same update"
    return _same(probe, _relative_error(found, probe.exact), what, likely)


def _pairs(probe: _Probe) -> Outcome:
    found = probe.gradient(jagg_plan(probe.trajectory.sigmas, window=2, jagg_frac=1.0), "autograd", "joint")
    likely = "this plan is exact by construction: the gradient does not repeat"
    return _same(probe, _relative_error(found, probe.exact), "the paper's rule at W = 2 equals exact", likely)


def _joint(probe: _Probe) -> Outcome:
    plan = jagg_plan(probe.trajectory.sigmas, window=3, jagg_frac=1.0)
    joint, one = (probe.gradient(plan, "autograd", mode) for mode in ("joint", "sequential"))
    likely = "a forward must leave nothing behind that the backward of an earlier one needs"
    return _same(probe, _relative_error(joint, one), "two graphs in one backward call equal two calls", likely)


def _batched(probe: _Probe) -> Outcome:
    sigmas = probe.trajectory.sigmas
    found = probe.gradient(causal_plan(sigmas, knots=range(len(sigmas))), "closed_form", "batched")
    likely = "several steps in one pass must not see each other"
    what = "the causal plan with all knots, in one batched pass, equals exact"
    return _same(probe, _relative_error(found, probe.exact), what, likely)


def _decode(probe: _Probe) -> Outcome:
    with torch.no_grad():
        images = probe.backbone.decode(probe.trajectory.final)
    if images.ndim != 4 or len(images) != SAMPLES:
        return False, f"images must have shape [{SAMPLES}, C, H, W], found {list(images.shape)}", None
    if not torch.isfinite(images).all():
        return False, "images have NaN or infinite pixels", None
    low, high = images.min().item(), images.max().item()
    if low < 0 or high > 1:
        return False, f"images must lie in [0, 1], found {low:g} to {high:g}", low if low < 0 else high
    return True, f"images {list(images.shape)} lie in [0, 1]", None


def _checkpointing(probe: _Probe) -> Outcome:
    before, exact = probe.velocity_with_graph().detach(), probe.exact
    probe.backbone.enable_gradient_checkpointing()
    after = _Probe(probe.backbone)
    velocity = after.velocity_with_graph()
    if has_reentrant_checkpointing(velocity):
        return False, "gradient checkpointing must be non-reentrant (use_reentrant=False): autograd.grad needs it", None
    error = max(_relative_error([velocity], [before]), _relative_error(after.exact, exact))
    what = "gradient checkpointing changes neither velocities nor gradients"
    return _same(probe, error, what, "reentrant, or the recomputed forward differs?")


CHECKS: dict[str, Callable[[_Probe], Outcome]] = {
    "shape": _shape,
    "finite": _finite,
    "deterministic": _deterministic,
    "prompts": _prompts,
    "rows": _rows,
    "one by one": _one_by_one,
    "batched steps": _batched_steps,
    "sigma": _sigma,
    "sign": _sign,
    "sampling": _sampling,
    "no grad": _no_grad,
    "parameters": _same_parameters,
    "signature": _signature,
    "every parameter": _every_parameter,
    "closed form": _closed_form,
    "pairs": _pairs,
    "joint": _joint,
    "batched": _batched,
    "decode": _decode,
    "checkpointing": _checkpointing,  # last: it stays on
}
"""Every check, in the order in which they run."""
