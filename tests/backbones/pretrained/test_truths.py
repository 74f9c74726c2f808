"""What holds for every published model, on a tiny folder of it: the pipeline's samples, and the contract."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch

from jagg_core import (
    ClippedSurrogate,
    DanceSDE,
    accumulate_gradients,
    dance_schedule,
    exact_plan,
    initial_latents,
    jagg_plan,
    rollout,
    sample_ode,
)
from jagg_core.backbones import load_backbone
from jagg_core.backbones.check import check_backbone
from jagg_core.backbones.pretrained import MODELS, PretrainedBackbone, load_pretrained
from jagg_core.backbones.pretrained.published import Configs
from tests.backbones.pretrained.conftest import PROMPTS, TINY

Folders = Callable[[str], Path]
NAMES = sorted(TINY)
CONTRASTING = [m.name for m in MODELS if m.guidance == "cfg" and m.name in TINY]
STEPS = 4
ADVANTAGES = torch.tensor([1.0, -0.5, 0.3])


def load(folders: Folders, name: str, dtype: torch.dtype = torch.float32, **options: Any) -> PretrainedBackbone:
    backbone = load_backbone(name, dtype=dtype, path=str(folders(name)), **(TINY[name].options | options))
    assert isinstance(backbone, PretrainedBackbone)
    return backbone


def noise(backbone: PretrainedBackbone, samples: int = len(PROMPTS)) -> torch.Tensor:
    return initial_latents(backbone.latent_shape, 0, range(samples))


def run_pipeline(backbone: PretrainedBackbone, latents: torch.Tensor, **settings: Any) -> torch.Tensor:
    """What diffusers' own pipeline makes of the same noise, prompts and steps."""
    tiny, path = TINY[backbone.name], backbone.folder.path
    pipeline = getattr(diffusers, backbone.pipeline_class).from_pretrained(path, local_files_only=True)
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler.from_config(backbone.scheduler_config())
    pipeline.register_modules(scheduler=scheduler)
    pipeline.set_progress_bar_config(disable=True)
    size = backbone.size
    if tiny.guidance_name is not None:
        settings = {tiny.guidance_name: backbone.model.scale} | settings
    if size.frames > 1:
        settings["num_frames"] = size.frames
    if "negative_prompt" in inspect.signature(pipeline.__call__).parameters and backbone.model.guidance == "cfg":
        settings["negative_prompt"] = [backbone.negative] * len(latents)
    final: torch.Tensor = pipeline(
        prompt=list(PROMPTS),
        latents=tiny.to_pipeline(backbone, latents.clone()),
        num_inference_steps=STEPS,
        height=size.height,
        width=size.width,
        return_dict=False,
        **({"output_type": "latent"} | tiny.arguments | settings),
    )[0]
    return final


@pytest.mark.parametrize("name", NAMES)
def test_sampling_equals_the_pipeline(name: str, folders: Folders) -> None:
    backbone = load(folders, name)
    latents = noise(backbone)
    ours = sample_ode(backbone.policy(PROMPTS), backbone.schedule(STEPS), latents)
    theirs = TINY[name].from_pipeline(backbone, run_pipeline(backbone, latents)).reshape(ours.shape)
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_the_schedule_is_shifted_once(name: str, folders: Folders) -> None:
    """Asked again it is the same, it ends at 0, and the scheduler's timesteps are its sigmas times 1000."""
    backbone = load(folders, name)
    sigmas = backbone.schedule(10)
    assert torch.equal(sigmas, backbone.schedule(10)) and sigmas.shape == (11,)
    assert 0.9 < sigmas[0] <= 1 and sigmas[-1] == 0 and (sigmas.diff() < 0).all()
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler.from_config(backbone.scheduler_config())
    for _ in range(2):
        scheduler.set_timesteps(**({"num_inference_steps": 10} | backbone.schedule_arguments(10)))
    assert torch.equal(scheduler.sigmas.double(), sigmas)
    torch.testing.assert_close(scheduler.timesteps, scheduler.sigmas[:-1] * 1000, atol=1e-3, rtol=0)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_contract(name: str, dtype: torch.dtype, folders: Folders) -> None:
    prompts = folders(name).parent / "prompts.txt"
    prompts.write_text("\n".join(PROMPTS))
    findings = check_backbone(load(folders, name, dtype, prompts=str(prompts)))
    assert [f"{f.name}: {f.text} {f.value}" for f in findings if not f.ok] == []


@pytest.mark.parametrize("name", NAMES)
def test_a_prompt_in_a_batch_equals_the_prompt_alone(name: str, folders: Folders) -> None:
    backbone = load(folders, name)
    latents, sigma = noise(backbone), torch.tensor([0.9, 0.5, 0.2])
    together = backbone.policy(PROMPTS).velocity(latents, sigma, torch.arange(3))
    for row, prompt in enumerate(PROMPTS):
        alone = backbone.policy([prompt]).velocity(latents[row : row + 1], sigma[row : row + 1], torch.zeros(1).long())
        torch.testing.assert_close(together[row : row + 1], alone, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", CONTRASTING)
def test_guidance_in_one_call_equals_two(name: str, folders: Folders) -> None:
    one, two = (load(folders, name, calls=calls) for calls in ("batched", "separate"))
    latents, sigma, rows = noise(one), torch.tensor([0.9, 0.5, 0.2]), torch.arange(3)
    together, apart = (backbone.policy(PROMPTS).velocity(latents, sigma, rows) for backbone in (one, two))
    torch.testing.assert_close(together, apart, atol=1e-5, rtol=1e-5)
    assert not torch.allclose(together, one.policy(PROMPTS, 1.0).velocity(latents, sigma, rows), atol=1e-4)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lora_alone_is_trained(name: str, dtype: torch.dtype, folders: Folders) -> None:
    plain, backbone = load(folders, name, dtype), load(folders, name, dtype, lora_rank=2)
    policy, latents = backbone.policy(PROMPTS), noise(backbone)
    sigma, rows = torch.tensor([0.9, 0.5, 0.2]), torch.arange(3)
    with torch.no_grad():
        torch.testing.assert_close(
            policy.velocity(latents, sigma, rows), plain.policy(PROMPTS).velocity(latents, sigma, rows)
        )
        for key, parameter in backbone.transformer.named_parameters():
            if "lora_B" in key:
                parameter.fill_(0.01)
    trajectory = rollout(policy, dance_schedule(6), DanceSDE(0.7), latents, seed=0)
    gradients = []
    for plan in (exact_plan(trajectory.sigmas), jagg_plan(trajectory.sigmas, window=2, jagg_frac=1.0)):
        accumulate_gradients(policy, trajectory, ADVANTAGES, plan, ClippedSurrogate(0.2), upstream="autograd")
        found = {key: p.grad for key, p in backbone.transformer.named_parameters() if p.grad is not None}
        backbone.transformer.zero_grad(set_to_none=True)
        gradients.append(found)
    exact, pairs = gradients
    adapters = {key for key, _ in backbone.transformer.named_parameters() if "lora_" in key}
    assert exact.keys() == pairs.keys() and len(exact) > 0 and exact.keys() <= adapters
    assert {p.dtype for key, p in backbone.transformer.named_parameters() if key in adapters} == {torch.float32}
    difference = sum((exact[key] - pairs[key]).square().sum() for key in exact)
    size = sum(exact[key].square().sum() for key in exact)
    assert size > 0 and difference / size < 1e-8


@pytest.mark.parametrize("name", NAMES)
def test_what_is_decoded_equals_the_pipeline(name: str, folders: Folders) -> None:
    backbone = load(folders, name)
    latents = noise(backbone)
    final = sample_ode(backbone.policy(PROMPTS), backbone.schedule(STEPS), latents)
    theirs = torch.as_tensor(run_pipeline(backbone, latents, output_type="pt"))
    theirs = theirs.movedim(1, 2) if theirs.ndim == 5 else theirs.unsqueeze(2)  # videos come as [N, F, C, H, W]
    torch.testing.assert_close(backbone.decode_video(final), theirs, atol=1e-4, rtol=1e-4)
    assert backbone.decode(final).shape == (3, 3, backbone.size.height, backbone.size.width)


@pytest.mark.parametrize("name", NAMES)
def test_random_weights_need_no_file(name: str, folders: Folders) -> None:
    """The same shapes as from the folder: of latents up to the VAE, of prompts but for the length of a real one."""
    loaded = load(folders, name)
    [published] = [model for model in MODELS if model.name == name]
    config = {key: value for key, value in loaded.configs.transformer.items() if not key.startswith("_")}
    model = replace(published, config=config, vae=loaded.configs.vae)
    backbone = load_pretrained(model, "cpu", torch.bfloat16, random_weights=True, **TINY[name].options)
    assert backbone.latent_shape == loaded.latent_shape
    real, stand_in = (found.text(["a"])[0] for found in (loaded, backbone))
    assert real.tokens.shape[1] == stand_in.tokens.shape[1] and len(real.tokens) <= len(stand_in.tokens)
    assert (real.pooled is None) == (stand_in.pooled is None)
    assert real.pooled is None or stand_in.pooled is None or real.pooled.shape == stand_in.pooled.shape
    again = load_pretrained(model, "cpu", torch.bfloat16, random_weights=True, **TINY[name].options)
    sigma, rows = torch.tensor([0.9, 0.5, 0.2]), torch.arange(3)
    first, second = (made.policy(PROMPTS).velocity(noise(backbone), sigma, rows) for made in (backbone, again))
    assert torch.equal(first, second) and first.isfinite().all() and first.any()
    assert backbone.dtype == torch.bfloat16 and torch.get_default_dtype() == torch.float32
    with pytest.raises(ValueError, match="random weights has no VAE: its samples cannot be decoded"):
        backbone.decode(noise(backbone))
    with pytest.raises(ValueError, match="random weights, which has no scheduler"):
        backbone.schedule(4)


def test_random_weights_are_of_no_folder() -> None:
    with pytest.raises(ValueError, match="path and revision must be None with random_weights, got None and 'main'"):
        load_backbone("flux-dev", random_weights=True, revision="main")


@pytest.mark.parametrize("model", MODELS, ids=lambda m: m.name)
def test_published_shapes(model: Any) -> None:
    """Eight pixels per latent, or 16 in Wan 2.2's 5B; packed two by two where latents are tokens."""
    configs = Configs(model.config, model.vae)
    model.family.check_size(configs, model.size)
    *_, height, width = model.family.shape_of(configs, model.size)
    pixels = {"wan2.2-5b": 16}.get(model.name, 8)
    if len(model.family.shape_of(configs, model.size)) > 2:
        assert (height, width) == (model.size.height // pixels, model.size.width // pixels)
    else:
        assert (height, width) == ((model.size.height // 16) * (model.size.width // 16), model.config["in_channels"])


@pytest.mark.parametrize("model", MODELS, ids=lambda m: m.name)
def test_parameters_of_the_published_configuration(model: Any) -> None:
    build = getattr(diffusers, model.family.transformer_class).from_config
    with torch.device("meta"):
        transformer = build(dict(model.config))
    assert sum(p.numel() for p in transformer.parameters()) * model.transformers == model.parameters
    assert len(model.config) > 5 and model.licence and model.description


@pytest.mark.parametrize("name", NAMES)
def test_blocks_are_all_but_the_ends(name: str, folders: Folders) -> None:
    backbone = load(folders, name)
    inside = {id(m) for block in backbone.blocks for m in block.modules()}
    assert len(backbone.blocks) == len({id(block) for block in backbone.blocks}) >= 1
    repeated = set(getattr(backbone.transformer, "_repeated_blocks", ()) or ())
    assert repeated <= {type(block).__name__ for block in backbone.blocks}
    layers = [m for m in backbone.transformer.modules() if isinstance(m, torch.nn.Linear)]
    assert 0.5 * len(layers) < sum(id(m) in inside for m in layers)


def test_every_kind_of_model_has_a_tiny_folder() -> None:
    kinds = {m.name: (m.family, m.guidance) for m in MODELS}
    assert {kinds[name] for name in TINY} == set(kinds.values())
