"""The shipped architecture: packing, velocities that do not depend on their company, guidance, half precision."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from pathlib import Path
from threading import Barrier

import pytest
import torch
from torch import Tensor

from jagg_core.backbones import load_backbone
from jagg_core.backbones.datasets import EMOJI, EMOJI_HELD_OUT
from jagg_core.backbones.pixel import (
    DIGITS_FLUX,
    EMOJI_FLUX,
    PHOTOS_FLUX,
    PHOTOS_QWEN,
    PixelBackbone,
    PixelPolicy,
    PixelSpec,
)
from jagg_core.policy import ClassifierFreeGuidance, VelocityPolicy
from jagg_core.rewards.classifier import CLASSIFIERS

MakeTiny = Callable[..., PixelBackbone]
each_spec = pytest.mark.parametrize(
    "spec", [DIGITS_FLUX, EMOJI_FLUX, PHOTOS_FLUX, PHOTOS_QWEN], ids=lambda spec: spec.name
)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def inputs(shape: tuple[int, ...], n: int = 4) -> tuple[Tensor, Tensor, Tensor]:
    """Latents, sigmas and rows of ``n`` samples."""
    sigma = torch.rand(n, generator=generator(1)) * 0.9 + 0.05
    return torch.randn(n, *shape, generator=generator()), sigma, torch.arange(n)


# Packing


@each_spec
def test_decode_inverts_encode(spec: PixelSpec) -> None:
    images = torch.rand(3, spec.image_channels, spec.size, spec.size, generator=generator())
    images[0, 0, 0, :2] = torch.tensor([0.0, 1.0])
    latents = spec.encode(images)
    assert latents.shape == (3, *spec.latent_shape)
    torch.testing.assert_close(spec.decode(latents), images, atol=1e-6, rtol=0)
    torch.testing.assert_close(spec.encode(spec.decode(latents)), latents, atol=1e-5, rtol=0)


@each_spec
def test_a_token_is_a_patch(spec: PixelSpec) -> None:
    images = torch.rand(2, spec.image_channels, spec.size, spec.size, generator=generator())
    latents = spec.encode(images)
    p = spec.patch
    for token in range(spec.side**2):
        y, x = token // spec.side * p, token % spec.side * p
        patch = (images[:, :, y : y + p, x : x + p] - spec.mean) / spec.std
        assert torch.equal(latents[:, token], patch.flatten(1))


@each_spec
def test_decoded_pixels_are_clamped_and_fp32(spec: PixelSpec) -> None:
    latents = torch.full((1, *spec.latent_shape), 100.0, dtype=torch.bfloat16)
    for sign, pixel in ((1, 1.0), (-1, 0.0)):
        images = spec.decode(sign * latents)
        assert images.dtype == torch.float32
        assert torch.equal(images, torch.full_like(images, pixel))


@each_spec
def test_prompts_are_what_the_classifier_knows(spec: PixelSpec) -> None:
    held_out = EMOJI_HELD_OUT if spec.dataset == "emoji" else ()
    assert spec.prompts == tuple(name for name in CLASSIFIERS[spec.dataset].classes if name not in held_out)


# Prompts of words


def test_held_out_emoji_are_made_of_known_words() -> None:
    assert set(EMOJI_HELD_OUT) < set(EMOJI)
    assert EMOJI_FLUX.prompt_ids(EMOJI_HELD_OUT).max() <= len(EMOJI_FLUX.words)


@torch.no_grad()
def test_a_prompt_is_the_bag_of_its_words() -> None:
    backbone = PixelBackbone(EMOJI_FLUX, EMOJI_FLUX.build().eval())
    latents, sigma, rows = inputs(backbone.latent_shape, 1)

    def velocity(prompt: str) -> Tensor:
        return backbone.policy([prompt]).velocity(latents, sigma, rows)

    torch.testing.assert_close(velocity("cat pouting face"), velocity("pouting cat face"), atol=1e-5, rtol=0)
    difference = velocity("purple cat") - velocity("blue cat")
    assert difference.norm() > 0.01 * velocity("blue cat").norm()


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("yellow submarine", r"prompts must be made of \['and', .*\] for emoji-flux, got \['submarine'\]"),
        (" ", "prompts must have 1 to 7 words for emoji-flux, got ' '"),
        ("red " * 8, "prompts must have 1 to 7 words for emoji-flux, got 'red red"),
    ],
)
def test_prompts_of_unknown_or_too_many_words_are_refused(prompt: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EMOJI_FLUX.prompt_ids(["cat", prompt])


def test_prompts_to_sample_from_can_be_given(tmp_path: Path) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text("3\n7\n")
    assert load_backbone("digits-flux", prompts=str(file)).prompts == ("3", "7")
    file.write_text("3\ncat\n")
    with pytest.raises(ValueError, match=r"prompts must be of \['0', .*\] for digits-flux, got \['cat'\]"):
        load_backbone("digits-flux", prompts=str(file))


# The velocity


@torch.no_grad()
def test_rows_do_not_depend_on_their_company(digits: PixelBackbone) -> None:
    policy = digits.policy(["3", "7", "3", "0"])
    latents, sigma, rows = inputs(digits.latent_shape)
    together = policy.velocity(latents, sigma, rows)
    apart = torch.cat([policy.velocity(latents[i : i + 1], sigma[i : i + 1], rows[i : i + 1]) for i in range(4)])
    torch.testing.assert_close(together, apart, atol=1e-5, rtol=0)
    order = torch.tensor([2, 0, 3, 1])
    shuffled = policy.velocity(latents[order], sigma[order], rows[order])
    torch.testing.assert_close(shuffled, together[order], atol=1e-5, rtol=0)
    # the prompt, the sigma and the latents all matter
    for other in (
        policy.velocity(latents, sigma, rows.flip(0)),
        policy.velocity(latents, sigma.flip(0), rows),
        policy.velocity(latents.flip(0), sigma, rows),
    ):
        assert ((other - together).flatten(1).norm(dim=1) > 0.01 * together.flatten(1).norm(dim=1)).all()


@torch.no_grad()
def test_knots_of_a_batch_equal_separate_calls(digits: PixelBackbone) -> None:
    policy = digits.policy(["3", "7", "3", "0"])
    first, _, rows = inputs(digits.latent_shape)
    second = first.flip(0) * 0.7
    high, low = torch.full((4,), 0.9375), torch.full((4,), 0.25)
    batched = policy.velocity(torch.cat([first, second]), torch.cat([high, low]), rows.repeat(2))
    separate = [policy.velocity(first, high, rows), policy.velocity(second, low, rows)]
    torch.testing.assert_close(batched, torch.cat(separate), atol=1e-5, rtol=0)


def test_the_graph_does_not_change_the_velocity(digits: PixelBackbone) -> None:
    policy = digits.policy(["3", "7", "3", "0"])
    arguments = inputs(digits.latent_shape)
    with_graph = policy.velocity(*arguments)
    with torch.no_grad():
        without = policy.velocity(*arguments)
    assert (with_graph.requires_grad, without.requires_grad) == (True, False)
    assert torch.equal(with_graph.detach(), without)


def test_a_copy_has_a_sigma_of_its_own(make_tiny: MakeTiny) -> None:
    """The exact sigma goes round diffusers' cast by a hook: a copied hook must not read the original's."""
    backbone = make_tiny()
    latents, sigma, ids = inputs(backbone.latent_shape, 3)
    expected = backbone.module(latents, sigma, ids)
    copied = deepcopy(backbone.module)
    backbone.module(latents, 1 - sigma, ids)
    assert torch.equal(copied(latents, sigma, ids), expected)


def test_threads_have_a_sigma_of_their_own(make_tiny: MakeTiny) -> None:
    backbone = make_tiny()
    policy = backbone.policy(["a", "b", "c"])
    latents, sigma, rows = inputs(backbone.latent_shape, 3)
    sigmas = (sigma, 1 - sigma)
    expected = [policy.velocity(latents, s, rows) for s in sigmas]
    # both have been told their sigma before either of them uses it
    meeting = Barrier(2, timeout=60)

    def meet(*_: object) -> None:
        meeting.wait()

    backbone.transformer.register_forward_pre_hook(meet)
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(lambda s: policy.velocity(latents, s, rows), sigmas))
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a, b)
    assert not torch.equal(*expected)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_other_precisions_compute_the_same_field(dtype: torch.dtype, make_tiny: MakeTiny) -> None:
    latents, sigma, rows = inputs(make_tiny().latent_shape, 3)
    prompts = ["a", "b", "c"]
    expected = make_tiny().policy(prompts).velocity(latents, sigma, rows)
    found = make_tiny(dtype).policy(prompts).velocity(latents, sigma, rows)
    assert found.dtype == dtype
    limit = {torch.float64: 1e-5, torch.float16: 5e-3, torch.bfloat16: 3e-2}[dtype]
    assert (found.float() - expected).norm() < limit * expected.norm()


# What is trained


def test_parameters_are_the_transformers(make_tiny: MakeTiny) -> None:
    backbone = make_tiny()
    policy = backbone.policy(["a"])
    shown = {id(p) for p in policy.parameters()}
    assert shown == {id(p) for p in backbone.transformer.parameters()}
    assert id(backbone.module.prompt_table.weight) not in shown
    assert all(p.requires_grad for p in policy.parameters())


def test_every_trained_parameter_gets_a_gradient(make_tiny: MakeTiny) -> None:
    backbone = make_tiny()
    latents, sigma, rows = inputs(backbone.latent_shape, 3)
    backbone.policy(["a", "b", "c"]).velocity(latents, sigma, rows).square().sum().backward()
    assert [n for n, p in backbone.transformer.named_parameters() if p.grad is None or not p.grad.any()] == []


def test_signature_names_what_a_replay_shares(make_tiny: MakeTiny) -> None:
    signature = make_tiny().policy(["a", "b"]).signature()
    assert signature["backbone"] == "tiny-flux"
    assert make_tiny().policy(["a", "b"]).signature() == signature
    for key, other in (
        ("prompts", make_tiny().policy(["b", "a"])),
        ("guidance", make_tiny().policy(["a", "b"], 2.0)),
        ("dtype", make_tiny(torch.bfloat16).policy(["a", "b"])),
    ):
        changed = {k for k, v in other.signature().items() if v != signature[k]}
        assert changed == {key}


# Activation checkpointing


def run_and_differentiate(backbone: PixelBackbone, policy: VelocityPolicy) -> tuple[Tensor, list[Tensor]]:
    latents, sigma, rows = inputs(backbone.latent_shape, 3)
    velocity = policy.velocity(latents, sigma, rows)
    backbone.transformer.zero_grad()
    velocity.backward(torch.randn(velocity.shape, generator=generator(5)))
    return velocity.detach(), [p.grad for p in backbone.transformer.parameters() if p.grad is not None]


@pytest.mark.parametrize("guidance", [1.0, 3.0])
@pytest.mark.parametrize("train", [False, True], ids=["eval", "train"])
def test_checkpointing_changes_nothing_but_memory(train: bool, guidance: float, make_tiny: MakeTiny) -> None:
    plain, checkpointed = make_tiny(), make_tiny()
    checkpointed.enable_gradient_checkpointing()
    calls = {"double": 0, "single": 0}

    def count(kind: str) -> Callable[..., None]:
        def hook(*_: object) -> None:
            calls[kind] += 1

        return hook

    for backbone in (plain, checkpointed):
        backbone.module.train(train)
    checkpointed.module.transformer.transformer_blocks[0].register_forward_pre_hook(count("double"))
    checkpointed.module.transformer.single_transformer_blocks[0].register_forward_pre_hook(count("single"))
    expected, expected_grads = run_and_differentiate(plain, plain.policy(["a", "b", "c"], guidance))
    found, grads = run_and_differentiate(checkpointed, checkpointed.policy(["a", "b", "c"], guidance))
    assert calls == {"double": 2, "single": 2}, "blocks must run once in the forward and again in the backward"
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-6)
    assert len(grads) == len(expected_grads) > 0
    for a, b in zip(grads, expected_grads, strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-6)
    with torch.no_grad():
        checkpointed.policy(["a", "b", "c"], guidance).velocity(*inputs(plain.latent_shape, 3))
    assert calls == {"double": 3, "single": 3}, "nothing is recomputed without a graph"


# Guidance


@pytest.mark.parametrize("scale", [0.0, 3.5, -1.0])
def test_guidance_is_the_formula_by_two_calls(scale: float, make_tiny: MakeTiny) -> None:
    backbone = make_tiny(torch.float64)
    latents, sigma, rows = inputs(backbone.latent_shape, 3)
    conditional = backbone.policy(["a", "b", "c"])
    empty = len(backbone.prompts)
    unconditional = PixelPolicy(backbone.module, torch.full((3,), empty), empty, 1.0, "empty")
    guided = backbone.policy(["a", "b", "c"], scale)
    with torch.no_grad():
        c = conditional.velocity(latents, sigma, rows)
        u = unconditional.velocity(latents, sigma, rows)
        torch.testing.assert_close(guided.velocity(latents, sigma, rows), u + scale * (c - u), atol=1e-12, rtol=1e-12)
    assert (c - u).norm() > 0.01 * c.norm(), "the empty prompt must differ, or guidance is not tested"
    two_calls = ClassifierFreeGuidance(conditional, unconditional, scale)
    found, grads = run_and_differentiate(backbone, guided)
    grads = [g.clone() for g in grads]
    expected, expected_grads = run_and_differentiate(backbone, two_calls)
    torch.testing.assert_close(found, expected, atol=1e-12, rtol=1e-12)
    for a, b in zip(grads, expected_grads, strict=True):
        torch.testing.assert_close(a, b, atol=1e-10, rtol=1e-10)


def test_guidance_of_one_is_a_single_call(make_tiny: MakeTiny) -> None:
    backbone = make_tiny()
    sizes: list[int] = []
    backbone.module.register_forward_pre_hook(lambda _, args: sizes.append(len(args[0])))
    arguments = inputs(backbone.latent_shape, 3)
    for guidance in (1.0, 2.0):
        backbone.policy(["a", "b", "c"], guidance).velocity(*arguments)
    assert sizes == [3, 6]


# Half precision

ROUNDED_BY_BF16 = [0.937, 0.938, 0.9375 + 2**-12, 0.9782609, 0.6818182, 0.7494, 0.3333, 1e-3]
"""bf16 moves each of these: by up to four steps of a thousand."""


@pytest.mark.parametrize("guidance", [1.0, 4.0])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_embedder_gets_the_exact_timestep(dtype: torch.dtype, guidance: float, make_tiny: MakeTiny) -> None:
    backbone = make_tiny(dtype)
    told: list[Tensor] = []
    embedder = backbone.module.transformer.time_text_embed.time_proj
    embedder.register_forward_pre_hook(lambda _, args: told.append(args[0]))
    sigma = torch.tensor(ROUNDED_BY_BF16)
    assert (sigma.bfloat16() != sigma).all()
    n = len(sigma)
    latents = torch.randn(n, *backbone.latent_shape, generator=generator())
    policy = backbone.policy(["a"] * n, guidance)
    policy.velocity(latents, sigma, torch.arange(n)).sum().backward()
    [timestep] = told
    assert timestep.dtype == torch.float32
    assert torch.equal(timestep, (sigma * 1000).repeat(1 if guidance == 1 else 2))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_qwen_image_embedder_gets_the_exact_timestep(dtype: torch.dtype) -> None:
    """It multiplies sigma by 1000 itself."""
    backbone = PixelBackbone(PHOTOS_QWEN, PHOTOS_QWEN.build().to(dtype).eval())
    told: list[Tensor] = []
    embedder = backbone.module.transformer.time_text_embed.time_proj
    embedder.register_forward_pre_hook(lambda _, args: told.append(args[0]))
    sigma = torch.tensor(ROUNDED_BY_BF16)
    latents = torch.randn(len(sigma), *backbone.latent_shape, generator=generator())
    with torch.no_grad():
        backbone.policy(["cat"] * len(sigma)).velocity(latents, sigma, torch.arange(len(sigma)))
    assert torch.equal(told[0], sigma)


@torch.no_grad()
def test_neighbouring_sigmas_differ_in_half_precision(make_tiny: MakeTiny) -> None:
    """Both are 0.9375 in bf16."""
    backbone = make_tiny(torch.bfloat16)
    latents = torch.randn(1, *backbone.latent_shape, generator=generator()).repeat(2, 1, 1)
    a, b = backbone.policy(["a", "a"]).velocity(latents, torch.tensor([0.9356, 0.9393]), torch.arange(2))
    assert torch.tensor([0.9356, 0.9393]).bfloat16().unique().numel() == 1
    assert not torch.equal(a, b)


@torch.no_grad()
def test_bf16_is_close_to_fp32(digits: PixelBackbone) -> None:
    """On the trained model, within 2 % of the norm of every sample's velocity (0.6 % was measured)."""
    half = PixelBackbone(digits.spec, deepcopy(digits.module).to(torch.bfloat16))
    prompts = list(digits.prompts) * 2
    latents, sigma, rows = inputs(digits.latent_shape, 20)
    expected = digits.policy(prompts).velocity(latents, sigma, rows).flatten(1)
    found = half.policy(prompts).velocity(latents, sigma, rows).float().flatten(1)
    assert ((found - expected).norm(dim=1) < 2e-2 * expected.norm(dim=1)).all()


# Refusals


def test_unknown_prompts_are_refused(make_tiny: MakeTiny) -> None:
    with pytest.raises(ValueError, match=r"prompts must be of \['a', 'b', 'c'\] for tiny-flux, got \['cat', 'z'\]"):
        make_tiny().policy(["a", "z", "cat", "b"])


def test_no_prompts_are_refused(make_tiny: MakeTiny) -> None:
    with pytest.raises(ValueError, match="prompts must have at least one, got none"):
        make_tiny().policy([])


@pytest.mark.parametrize("guidance", [float("nan"), float("inf")])
def test_a_guidance_that_is_not_finite_is_refused(guidance: float, make_tiny: MakeTiny) -> None:
    with pytest.raises(ValueError, match=f"guidance must be finite, got {guidance}"):
        make_tiny().policy(["a"], guidance)


def test_whole_numbers_are_the_same_guidance(make_tiny: MakeTiny) -> None:
    """A replay under guidance 3 of a rollout under 3.0 is no other."""
    backbone = make_tiny()
    assert backbone.policy(["a"], 3).signature() == backbone.policy(["a"], 3.0).signature()


@pytest.mark.parametrize(("dtype", "expected"), [(torch.float64, torch.float64), (torch.bfloat16, torch.float32)])
def test_a_lora_is_at_least_in_fp32(dtype: torch.dtype, expected: torch.dtype) -> None:
    adapted = load_backbone("digits-flux", dtype=dtype, lora_rank=2)
    assert {p.dtype for p in adapted.transformer.parameters() if p.requires_grad} == {expected}


@pytest.mark.parametrize("name", ["digits-flux", "photos-qwen"])
def test_a_lora_alone_is_trained_and_changes_nothing_at_first(name: str) -> None:
    plain, adapted = load_backbone(name), load_backbone(name, lora_rank=2)
    latents, sigma, rows = torch.randn(1, *plain.latent_shape), torch.full((1,), 0.5), torch.zeros(1, dtype=torch.long)
    with torch.no_grad():
        expected, found = (b.policy(b.prompts[:1]).velocity(latents, sigma, rows) for b in (plain, adapted))
    torch.testing.assert_close(found, expected)
    trained = [name for name, p in adapted.transformer.named_parameters() if p.requires_grad]
    assert trained
    assert all("lora_" in name for name in trained)
    with pytest.raises(ValueError, match="lora_alpha must be positive and needs a lora_rank, got 4 at rank 0"):
        load_backbone(name, lora_alpha=4)
