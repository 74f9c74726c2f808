"""The contract check: the shipped digits pass, and every check fails on a backbone that breaks what it checks."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from jagg_core.backbones import load_backbone
from jagg_core.backbones.check import CHECKS, Finding, check_backbone
from jagg_core.backbones.pixel import PixelPolicy
from jagg_core.policy import has_reentrant_checkpointing

SHAPE = (3, 2, 2)
GRADIENTS = {"every parameter", "closed form", "pairs", "joint", "batched"}
"""Checks that differentiate, besides checkpointing."""


class Net(nn.Module):
    """A tanh network of latents, sigma and a prompt's number."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        for name, shape in (("inner", (14, 16)), ("middle", (16, 16)), ("outer", (16, 12))):
            weights = torch.randn(shape, generator=generator, dtype=torch.float64) / shape[0] ** 0.5
            setattr(self, name, nn.Parameter(weights.to(dtype)))
        self.register_buffer("level", torch.zeros(4, 1, dtype=dtype))
        self.dropout = nn.Dropout(0.1)
        self.checkpointing: bool | None = None
        """Whether it is reentrant; None: no checkpointing."""

    def block(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.middle)

    def forward(self, latents: Tensor, sigma: Tensor, text: Tensor) -> Tensor:
        x = torch.cat([latents.flatten(1), sigma[:, None], text[:, None]], dim=1).to(self.inner.dtype)
        x = self.dropout(x @ self.inner)
        reentrant = self.checkpointing
        x = self.block(x) if reentrant is None else checkpoint(self.block, x, use_reentrant=reentrant)
        return (x @ self.outer).reshape(latents.shape)


class Policy:
    """Keeps the contract."""

    def __init__(self, net: Net, prompts: Sequence[str]) -> None:
        self.net = net
        self.text = torch.tensor([float(ord(p)) - 97 for p in prompts])

    def velocity(self, latents: Tensor, sigma: Tensor, rows: Tensor) -> Tensor:
        return self.net(latents, sigma, self.text[rows])

    def parameters(self) -> list[Tensor]:
        return [self.net.inner, self.net.middle, self.net.outer]

    def signature(self) -> dict[str, str]:
        return {"backbone": "mine", "prompts": repr(self.text.tolist())}


class Backbone:
    """Keeps the contract."""

    name = "mine"
    dataset = None
    prompts: tuple[str, ...] = ("a", "b")
    latent_shape = SHAPE
    device = torch.device("cpu")

    def __init__(self, policy: type[Policy] = Policy, dtype: torch.dtype = torch.float64) -> None:
        self.transformer = Net(dtype).eval()
        self.make = policy

    def policy(self, prompts: Sequence[str], guidance: float = 1.0) -> Policy:
        return self.make(self.transformer, prompts)

    def decode(self, latents: Tensor) -> Tensor:
        return latents.sigmoid()

    def enable_gradient_checkpointing(self) -> None:
        self.transformer.checkpointing = False


def failed(backbone: Backbone) -> dict[str, Finding]:
    return {finding.name: finding for finding in check_backbone(backbone) if not finding.ok}


# Backbones that break the contract, each with what it must fail and a word of the finding

Broken = Callable[[], Backbone]
BROKEN: dict[str, tuple[Broken, set[str], str, str]] = {}


def broken(check: str, word: str, *others: str) -> Callable[[type], type]:
    """Register a policy or a backbone that fails ``check``, saying ``word``, and also ``others``; nothing else."""

    def register(made: type) -> type:
        make = (lambda: Backbone(made)) if issubclass(made, Policy) else made
        BROKEN[made.__name__] = (make, {check, *others}, check, word)
        return made

    return register


@broken("shape", "must be equal", "sign", "sampling", "decode", "checkpointing", *GRADIENTS)
class Flattened(Policy):
    def velocity(self, latents: Tensor, sigma: Tensor, rows: Tensor) -> Tensor:
        return super().velocity(latents, sigma, rows).flatten(1)


@broken("finite", "NaN", *CHECKS.keys() - {"shape", "deterministic", "parameters", "signature"})
class NotFinite(Policy):
    def velocity(self, latents: Tensor, sigma: Tensor, rows: Tensor) -> Tensor:
        return super().velocity(latents, sigma, rows) / (rows != 2)[:, None, None, None]


@broken(
    *("deterministic", "1 of 2 modules are in train mode", "prompts", "rows", "one by one", "batched steps", "no grad"),
    *("closed form", "pairs", "joint", "batched", "checkpointing"),
)
class Dropping(Backbone):
    def __init__(self) -> None:
        super().__init__()
        self.transformer.dropout.train()


@broken("prompts", "the prompt is not used")
class Unconditional(Policy):
    def __init__(self, net: Net, prompts: Sequence[str]) -> None:
        super().__init__(net, ["a"] * len(prompts))

    def signature(self) -> dict[str, str]:
        return {"backbone": "mine"}


@broken("prompts", "follow its prompt")
class FirstPrompt(Policy):
    def velocity(self, latents: Tensor, sigma: Tensor, rows: Tensor) -> Tensor:
        return super().velocity(latents, sigma, torch.zeros_like(rows))


@broken("rows", "picked by rows", "one by one")
class IgnoresRows(Policy):
    def velocity(self, latents: Tensor, sigma: Tensor, rows: Tensor) -> Tensor:
        return super().velocity(latents, sigma, torch.arange(len(rows)) % len(self.text))


@broken("one by one", "must not see each other", "batched steps", "batched")
class BatchStatistics(Policy):
    def velocity(self, latents: Tensor, sigma: Tensor, rows: Tensor) -> Tensor:
        return super().velocity(latents - latents.mean() * sigma.mean(), sigma, rows)


@broken("batched steps", "row by row", "rows", "one by one", "batched")
class OneSigma(Policy):
    def velocity(self, latents: Tensor, sigma: Tensor, rows: Tensor) -> Tensor:
        return super().velocity(latents, sigma[:1].expand(len(rows)), rows)


@broken("sigma", "sigma is not used")
class IgnoresSigma(Policy):
    def velocity(self, latents: Tensor, sigma: Tensor, rows: Tensor) -> Tensor:
        return super().velocity(latents, torch.ones_like(sigma), rows)


@broken("sign", "reversed")
class DataMinusNoise(Policy):
    def velocity(self, latents: Tensor, sigma: Tensor, rows: Tensor) -> Tensor:
        return super().velocity(latents, sigma, rows) - latents


@broken("no grad", "a rollout runs without one", "closed form", "batched")
class OtherWithGraph(Policy):
    def velocity(self, latents: Tensor, sigma: Tensor, rows: Tensor) -> Tensor:
        return super().velocity(latents, sigma, rows) * (1.1 if torch.is_grad_enabled() else 1)


@broken("parameters", "the same tensors", *GRADIENTS, "checkpointing")
class Copies(Policy):
    def parameters(self) -> list[Tensor]:
        return [p.detach().clone().requires_grad_() for p in super().parameters()]


@broken("parameters", "requires a gradient", *GRADIENTS, "checkpointing")
class Frozen(Backbone):
    def __init__(self) -> None:
        super().__init__()
        self.transformer.requires_grad_(False)


@broken("every parameter", "1 of 4 trained parameters get no gradient: scale;")
class Detached(Policy):
    def __init__(self, net: Net, prompts: Sequence[str]) -> None:
        super().__init__(net, prompts)
        if not hasattr(net, "scale"):
            net.scale = nn.Parameter(torch.ones(()))

    def velocity(self, latents: Tensor, sigma: Tensor, rows: Tensor) -> Tensor:
        return super().velocity(latents, sigma, rows) * self.net.scale.detach()

    def parameters(self) -> list[Tensor]:
        return [*super().parameters(), self.net.scale]


@broken("closed form", "OffPolicyError", "pairs", "joint", "batched", "checkpointing")
class Drifts(Policy):
    """Each forward with a graph changes a weight, as spectral normalisation in train mode does."""

    def velocity(self, latents: Tensor, sigma: Tensor, rows: Tensor) -> Tensor:
        velocity = super().velocity(latents, sigma, rows)
        if torch.is_grad_enabled():
            self.net.outer.data = self.net.outer.data * 1.01
        return velocity


@broken("pairs", "does not repeat", "closed form", "joint", "batched", "checkpointing")
class Counts(Policy):
    """The backward is another one every time."""

    calls = 0

    def velocity(self, latents: Tensor, sigma: Tensor, rows: Tensor) -> Tensor:
        velocity = super().velocity(latents, sigma, rows)
        if velocity.requires_grad:
            Counts.calls += 1
            factor = 1 + 0.1 * Counts.calls
            velocity.register_hook(lambda gradient: gradient * factor)
        return velocity


@broken("joint", "modified by an inplace operation")
class LeavesSigmaBehind(Policy):
    """Sigma in a buffer of the network, which the next forward overwrites."""

    def velocity(self, latents: Tensor, sigma: Tensor, rows: Tensor) -> Tensor:
        level = self.net.level
        if len(rows) == len(level) and torch.is_grad_enabled():
            level.copy_(sigma[:, None])
        else:
            level = sigma[:, None]
        return super().velocity(latents, sigma, rows) * level[..., None, None]


@broken("batched", "must not see each other")
class MixesInTheBackward(Policy):
    """Right in the forward; the gradients of a large batch are averaged over it."""

    def velocity(self, latents: Tensor, sigma: Tensor, rows: Tensor) -> Tensor:
        velocity = super().velocity(latents, sigma, rows)
        if velocity.requires_grad and len(rows) > 4:
            velocity.register_hook(lambda gradient: gradient.mean(0, keepdim=True).expand_as(gradient))
        return velocity


@broken("signature", "no signature()")
class NoSignature(Policy):
    signature = None  # type: ignore[assignment]


@broken("signature", "at least one setting")
class EmptySignature(Policy):
    def signature(self) -> dict[str, str]:
        return {}


@broken("signature", "dict[str, str], got 'guidance': 1.0")
class NumberInSignature(Policy):
    def signature(self) -> dict[str, str]:
        return {"guidance": 1.0}  # type: ignore[dict-item]


@broken("signature", "a path")
class PathInSignature(Policy):
    def signature(self) -> dict[str, str]:
        return {"weights": "/home/someone/flux"}


@broken("signature", "two policies")
class AddressInSignature(Policy):
    def signature(self) -> dict[str, str]:
        return {"text": str(id(self))}


@broken("decode", "got -")
class DecodesOutOfRange(Backbone):
    def decode(self, latents: Tensor) -> Tensor:
        return latents


@broken("decode", "shape [4, C, H, W], got [4, 12]")
class DecodesFlat(Backbone):
    def decode(self, latents: Tensor) -> Tensor:
        return latents.sigmoid().flatten(1)


@broken("decode", "NaN")
class DecodesNaN(Backbone):
    def decode(self, latents: Tensor) -> Tensor:
        return latents / 0 * 0


@broken("decode", "raised KeyError: 'vae'")
class DecodeRaises(Backbone):
    def decode(self, latents: Tensor) -> Tensor:
        raise KeyError("vae")


@broken("checkpointing", "use_reentrant=False")
class Reentrant(Backbone):
    def enable_gradient_checkpointing(self) -> None:
        self.transformer.checkpointing = True


@broken("checkpointing", "changes neither")
class OtherNetwork(Backbone):
    def enable_gradient_checkpointing(self) -> None:
        super().enable_gradient_checkpointing()
        with torch.no_grad():
            self.transformer.middle *= 1.01


@broken("prompts", "at least one", *CHECKS.keys())
class NoPrompts(Backbone):
    prompts = ()


@pytest.mark.filterwarnings("ignore:on policy, yet:jagg_core.RatioNoise")
@pytest.mark.parametrize("name", BROKEN)
def test_what_breaks_the_contract_is_found(name: str) -> None:
    make, expected, check, word = BROKEN[name]
    found = failed(make())
    assert found.keys() == expected
    assert word in found[check].text


def test_every_check_can_fail() -> None:
    """Each check has a backbone of its own; sampling only warns."""
    assert {check for _, _, check, _ in BROKEN.values()} == CHECKS.keys() - {"sampling"}


# What keeps the contract


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_a_backbone_that_keeps_the_contract_passes(dtype: torch.dtype) -> None:
    seen: list[Finding] = []
    findings = check_backbone(Backbone(dtype=dtype), seen.append)
    assert [finding for finding in findings if not finding.ok] == []
    assert [finding.name for finding in findings] == list(CHECKS)
    assert findings == seen
    assert not any("warning" in finding.text for finding in findings)


@pytest.mark.parametrize("name", ["digits-flux", "photos-qwen"])
def test_shipped_backbones_pass(name: str) -> None:
    findings = {finding.name: finding for finding in check_backbone(load_backbone(name))}
    assert [finding for finding in findings.values() if not finding.ok or "warning" in finding.text] == []
    share = findings["sign"].value
    assert share is not None
    assert 0.8 < share < 1.5, "a trained velocity holds the noise about once"


def test_trained_weights_with_the_sign_reversed(monkeypatch: pytest.MonkeyPatch) -> None:
    right = PixelPolicy.velocity
    monkeypatch.setattr(PixelPolicy, "velocity", lambda *arguments: -right(*arguments))
    found = {finding.name: finding for finding in check_backbone(load_backbone("digits-flux"))}
    assert [name for name, finding in found.items() if not finding.ok] == ["sign"]
    assert found["sampling"].text.startswith("warning: ")


def test_a_single_prompt_is_a_warning() -> None:
    backbone = Backbone()
    backbone.prompts = ("a",)
    found = {finding.name: finding for finding in check_backbone(backbone)}
    assert all(finding.ok for finding in found.values())
    assert found["prompts"].text.startswith("warning: a single prompt")


def test_names_with_a_slash_are_no_paths() -> None:
    class Hub(Policy):
        def signature(self) -> dict[str, str]:
            return {"backbone": "black-forest-labs/FLUX.1-dev", "guidance": "3.5", "prompts": "a cat and/or a dog"}

    assert failed(Backbone(Hub)) == {}


@pytest.mark.parametrize("path", ["~/flux", "./flux", "../flux", "C:\\flux", "PosixPath('/flux')", "from /mnt/flux"])
def test_paths_are_found(path: str) -> None:
    class Local(Policy):
        def signature(self) -> dict[str, str]:
            return {"weights": path}

    assert failed(Backbone(Local)).keys() == {"signature"}


# What a check leaves behind


@pytest.mark.parametrize("policy", [Policy, NotFinite], ids=["passes", "fails"])
def test_gradients_modes_and_random_numbers_are_left_as_they_were(policy: type[Policy]) -> None:
    class ChangesMode(policy):  # type: ignore[misc, valid-type]
        def velocity(self, latents: Tensor, sigma: Tensor, rows: Tensor) -> Tensor:
            self.net.train()
            self.net.dropout.eval()
            torch.rand(1)
            return super().velocity(latents, sigma, rows)

    backbone = Backbone(ChangesMode)
    net = backbone.transformer
    net.inner.grad = torch.ones_like(net.inner)
    held, weights, state = net.inner.grad, [p.detach().clone() for p in net.parameters()], torch.get_rng_state()
    findings = check_backbone(backbone)
    assert all(finding.ok for finding in findings) == (policy is Policy)
    assert net.inner.grad is held
    assert torch.equal(held, torch.ones_like(held))
    assert net.middle.grad is None
    assert torch.equal(torch.get_rng_state(), state)
    assert [module.training for module in net.modules()] == [False, False]
    assert all(torch.equal(p, before) for p, before in zip(net.parameters(), weights, strict=True))


@pytest.mark.parametrize("reentrant", [None, False, True])
def test_reentrant_checkpointing_is_seen_in_the_graph(reentrant: bool | None) -> None:
    backbone = Backbone()
    backbone.transformer.checkpointing = reentrant
    latents, sigma, rows = torch.zeros(4, *SHAPE), torch.ones(4), torch.arange(4)
    velocity = backbone.policy(["a"] * 4).velocity(latents, sigma, rows)
    assert has_reentrant_checkpointing(velocity) is (reentrant is True)
