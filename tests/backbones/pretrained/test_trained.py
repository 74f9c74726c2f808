"""The weights of a training run give the trained velocity: loaded by diffusers' own pipelines, and by our commands."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from jagg_core.__main__ import main
from jagg_core.backbones import load_backbone
from jagg_core.backbones.pretrained.wan import Experts
from jagg_core.backbones.trained import FILE, HEADER
from jagg_core.grpo import GRPOConfig, GRPOTrainer, train
from jagg_core.grpo.run import read, write
from tests.backbones.pretrained.conftest import PROMPTS, TINY
from tests.backbones.pretrained.test_truths import NAMES, Folders, load, noise
from tests.grpo.runs import changed

RANK = 2


def config_of(folders: Folders, name: str, **options: Any) -> GRPOConfig:
    """One update at a high rate, of a LoRA or of all weights."""
    prompts = folders(name).parent / "prompts.txt"
    prompts.write_text("\n".join(PROMPTS))
    given = {"path": folders(name), "prompts": prompts, **TINY[name].options, **options}
    return changed(
        model={"backbone": name, "options": tuple(f"{key}={value}" for key, value in given.items()), "ema_decay": 0.0},
        rollout={"prompts": 1, "samples": 2, "steps": 3},
        reward={"name": "redness"},
        plan={"estimator": "exact", "knots": ()},
        optimizer={"learning_rate": 0.02},
        run={"updates": 2},
    )


def velocity(backbone: Any) -> Tensor:
    """At three levels of noise, without gradient."""
    with torch.no_grad():
        sigma = torch.tensor([0.95, 0.5, 0.2])
        found: Tensor = backbone.policy(PROMPTS).velocity(noise(backbone), sigma, torch.arange(3))
        return found


def distance(one: Tensor, other: Tensor) -> float:
    """Norm of the difference, relative to the first."""
    return float((one - other).norm() / one.norm())


def in_pipeline(folders: Folders, name: str, fill: Callable[[Any], None]) -> Tensor:
    """The velocity of diffusers' pipeline of the untrained folder, once ``fill`` put weights into it."""
    backbone = load(folders, name)
    pipeline = getattr(diffusers, backbone.pipeline_class).from_pretrained(folders(name), local_files_only=True)
    fill(pipeline)
    theirs = pipeline.transformer
    if isinstance(backbone.transformer, Experts):
        theirs = Experts(theirs, pipeline.transformer_2, backbone.transformer.boundary)
    backbone._transformer = theirs.eval()
    backbone.timestep = backbone.exact_timestep()
    return velocity(backbone)


@pytest.mark.parametrize("name", NAMES)
def test_a_lora_loads_into_the_pipeline_and_into_ours(name: str, folders: Folders, tmp_path: Path) -> None:
    trainer = train(config_of(folders, name, lora_rank=RANK), tmp_path / "run")
    trained = velocity(trainer.learner.backbone)
    assert distance(trained, velocity(load(folders, name))) > 1e-3

    def fill(pipeline: Any) -> None:
        pipeline.load_lora_weights(tmp_path / "run")
        if getattr(pipeline, "transformer_2", None) is not None:
            pipeline.load_lora_weights(tmp_path / "run" / "transformer_2", load_into_transformer_2=True)

    assert distance(trained, in_pipeline(folders, name, fill)) < 1e-6
    for options in ({}, {"lora_rank": RANK}):
        ours = load(folders, name, weights=str(tmp_path / "run"), **options)
        assert distance(trained, velocity(ours)) < 1e-6
        adapters = {key for key, p in ours.transformer.named_parameters() if p.requires_grad}
        assert adapters == set(trainer.learner.names)


@pytest.mark.parametrize("name", ["flux-dev", "wan2.2-a14b", "qwen-image", "sd3.5-medium"])
def test_all_weights_load_into_the_transformer_and_into_ours(name: str, folders: Folders, tmp_path: Path) -> None:
    trainer = train(config_of(folders, name), tmp_path / "run")
    trained = velocity(trainer.learner.backbone)
    assert distance(trained, velocity(load(folders, name))) > 1e-3

    def fill(pipeline: Any) -> None:
        pipeline.transformer.load_state_dict(load_file(tmp_path / "run" / FILE))
        if getattr(pipeline, "transformer_2", None) is not None:
            pipeline.transformer_2.load_state_dict(load_file(tmp_path / "run" / "transformer_2" / FILE))

    assert distance(trained, in_pipeline(folders, name, fill)) < 1e-6
    assert distance(trained, velocity(load(folders, name, weights=str(tmp_path / "run")))) < 1e-6
    # a LoRA begins from them
    assert distance(trained, velocity(load(folders, name, weights=str(tmp_path / "run"), lora_rank=RANK))) < 1e-6


def test_all_weights_load_from_a_single_file(folders: Folders, tmp_path: Path) -> None:
    trained = velocity(train(config_of(folders, "flux-dev"), tmp_path / "run").learner.backbone)

    def fill(pipeline: Any) -> None:
        pipeline.transformer = diffusers.FluxTransformer2DModel.from_single_file(
            str(tmp_path / "run" / FILE), config=str(folders("flux-dev")), subfolder="transformer"
        )

    assert distance(trained, in_pipeline(folders, "flux-dev", fill)) < 1e-6


def test_the_header_says_rank_and_alpha_and_others_may_read_the_file(folders: Folders, tmp_path: Path) -> None:
    train(config_of(folders, "flux-dev", lora_rank=RANK, lora_alpha=6), tmp_path / "run")
    file = tmp_path / "run" / FILE
    assert file.stat().st_mode & 0o777 == 0o644
    with safe_open(file, framework="pt") as opened:
        header = json.loads(opened.metadata()[HEADER])
        names = set(opened.keys())
    assert (header["transformer.r"], header["transformer.lora_alpha"]) == (RANK, 6)
    assert all(name.startswith("transformer.") and ".default" not in name for name in names)
    plain = load(folders, "flux-dev", weights=str(file))
    assert plain.transformer.peft_config["default"].lora_alpha == 6
    for options, told in (
        ({"lora_rank": 3}, "lora_rank must be 2, as in .*, got 3"),
        ({"lora_rank": RANK}, "lora_alpha must be 6, as in .*, got 4"),
    ):
        with pytest.raises(ValueError, match=told):
            load(folders, "flux-dev", weights=str(file), **options)


def test_checkpoints_of_a_lora_resume(folders: Folders, tmp_path: Path) -> None:
    config = config_of(folders, "flux-dev", lora_rank=RANK)
    trainer = GRPOTrainer(config)
    trainer.step()
    path = write(trainer, tmp_path)
    resumed = GRPOTrainer(config)
    read(resumed, path)
    for one in (trainer, resumed):
        one.step()
    assert torch.equal(velocity(trainer.learner.backbone), velocity(resumed.learner.backbone))
    options = tuple(o for o in config.model.options if not o.startswith("prompts="))
    with pytest.raises(ValueError, match=r"^resume: prompts must be as the run was begun with, 3 with digest"):
        read(GRPOTrainer(replace(config, model=replace(config.model, options=options))), path)


def test_weights_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    for missing in ("nowhere", str(tmp_path)):
        with pytest.raises(ValueError, match="weights must be a safetensors file, or the folder of a run"):
            load_backbone("digits-flux", weights=missing)
    state = load_backbone("digits-flux").transformer.state_dict()
    cases = {
        "must hold proj_out.bias of shape .*, got none": {k: v for k, v in state.items() if k != "proj_out.bias"},
        "must hold more of shape none, got": state | {"more": torch.ones(2)},
        "must hold proj_out.bias of shape .*, got .*: another model's weights": state
        | {"proj_out.bias": torch.ones(9)},
        "must name its alpha in the header": {"transformer.x.lora_A.weight": torch.ones(2)},
    }
    for told, tensors in cases.items():
        save_file(tensors, tmp_path / FILE)
        with pytest.raises(ValueError, match=told):
            load_backbone("digits-flux", weights=str(tmp_path))
    (tmp_path / FILE).write_bytes(b"x" * 20)
    with pytest.raises(ValueError, match="cannot be read"):
        load_backbone("digits-flux", weights=str(tmp_path))


@pytest.mark.parametrize("options", [(), ("lora_rank=2",)], ids=["all", "lora"])
def test_our_commands_use_the_weights_of_a_run(options: tuple[str, ...], tmp_path: Path) -> None:
    config = changed(model={"options": options}, optimizer={"learning_rate": 0.05}, run={"updates": 1})
    train(config, tmp_path / "run")
    sheets = []
    for more in ([], ["--weights", str(tmp_path / "run")], ["--backbone-options", f"weights={tmp_path / 'run'}"]):
        out = tmp_path / f"{len(sheets)}.png"
        main(["sample", "--backbone", "digits-flux", "--count", "1", "--steps", "3", "--out", str(out), *more])
        sheets.append(out.read_bytes())
    assert sheets[0] != sheets[1] == sheets[2]
