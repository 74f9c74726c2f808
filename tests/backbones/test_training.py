"""Training of a backbone from a seed, in a few steps of four samples."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from jagg_core.backbones import datasets, training
from jagg_core.backbones.datasets import Crops
from jagg_core.backbones.pixel import (
    EMOJI_FLUX,
    FluxSpec,
    PixelFlux,
    PixelSpec,
    WordFluxSpec,
    base,
    build_pixel_backbone,
)
from jagg_core.backbones.registry import TRAINED
from jagg_core.backbones.training import RECIPES, FlowTraining, train_pixel_backbone

SETTINGS = FlowTraining(steps=3, batch=4)


@pytest.fixture
def spec(tiny_spec: PixelSpec) -> PixelSpec:
    return replace(tiny_spec, prompts=tuple("0123456789"))


def built_by(spec: PixelSpec, make: Callable[[PixelSpec], Any]) -> PixelSpec:
    """``spec`` with a module of the test's own."""

    class Own(FluxSpec):
        def build(self) -> Any:
            return make(self)

    return Own(**{field.name: getattr(spec, field.name) for field in fields(spec)})


def test_every_shipped_backbone_has_a_recipe() -> None:
    assert RECIPES.keys() == TRAINED.keys()


def test_a_few_steps_write_a_loadable_file(spec: PixelSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, float]] = []
    path = tmp_path / "w.safetensors"
    loss = train_pixel_backbone(spec, SETTINGS, path, progress=lambda *found: seen.append(found))
    assert [step for step, _ in seen] == [0, 1, 2]
    assert loss == seen[-1][1] > 0
    monkeypatch.setattr(base, "weights_path", lambda _: path)
    backbone = build_pixel_backbone(spec, "cpu", torch.float32)
    velocity = backbone.policy(["3"]).velocity(torch.zeros(1, 4, 16), torch.tensor([0.5]), torch.zeros(1).long())
    assert velocity.isfinite().all()


def test_words_are_trained_and_dropped_together(
    tiny_spec: PixelSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {field.name: getattr(tiny_spec, field.name) for field in fields(tiny_spec)}
    spec = WordFluxSpec(**{**settings, "prompts": ("red heart", "blue book"), "text_tokens": 3})
    monkeypatch.setattr(training, "training_data", lambda _: Crops([torch.rand(1, 9, 9), torch.rand(1, 9, 9)], 8))
    seen: list[list[int]] = []
    build = WordFluxSpec.build

    def watched(spec: WordFluxSpec) -> Any:
        module = build(spec)
        module.prompt_table.register_forward_pre_hook(lambda _, args: seen.extend(args[0].tolist()))
        return module

    monkeypatch.setattr(WordFluxSpec, "build", watched)
    train_pixel_backbone(spec, replace(SETTINGS, batch=16, prompt_dropout=0.5), tmp_path / "w")
    assert spec.words == ("blue", "book", "heart", "red")
    assert {tuple(row) for row in seen} == {(3, 2, 4), (0, 1, 4), (4, 4, 4)}


def test_a_missing_font_names_its_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets, "EMOJI_FONT", tmp_path / "none.ttf")
    with pytest.raises(FileNotFoundError, match=r"none.ttf is missing; .* package fonts-noto-color-emoji"):
        train_pixel_backbone(EMOJI_FLUX, SETTINGS, tmp_path / "w")


@pytest.mark.skipif(not datasets.EMOJI_FONT.exists(), reason=f"needs the Debian package {datasets.EMOJI_PACKAGE}")
def test_emoji_are_drawn_in_their_colours() -> None:
    images, labels = datasets.emoji(("large red square", "large blue circle")).sample(
        16, torch.Generator().manual_seed(0)
    )
    assert images.shape == (16, 3, 32, 32)
    for colour, image in zip(labels.tolist(), images, strict=True):
        centre = image[:, 14:18, 14:18].mean((1, 2))
        assert centre.argmax() == (0, 2)[colour]


def test_a_seed_is_the_weights(spec: PixelSpec, tmp_path: Path) -> None:
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        train_pixel_backbone(spec, replace(SETTINGS, seed=seed), tmp_path / name)
    a, b, c = (load_file(tmp_path / name) for name in "abc")
    assert a.keys() == b.keys() == c.keys()
    assert all(torch.equal(a[key].view(torch.int16), b[key].view(torch.int16)) for key in a)
    assert any(not torch.equal(a[key], c[key]) for key in a)


def test_global_random_states_are_left_alone(spec: PixelSpec, tmp_path: Path) -> None:
    states = (torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist())  # type: ignore[index]
    train_pixel_backbone(spec, SETTINGS, tmp_path / "w")
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    assert np.random.get_state()[1].tolist() == states[2]  # type: ignore[index]


def test_the_weights_do_not_depend_on_what_was_drawn_before(spec: PixelSpec, tmp_path: Path) -> None:
    train_pixel_backbone(spec, SETTINGS, tmp_path / "a")
    torch.rand(7)
    train_pixel_backbone(spec, SETTINGS, tmp_path / "b")
    a, b = load_file(tmp_path / "a"), load_file(tmp_path / "b")
    assert all(torch.equal(a[key].view(torch.int16), b[key].view(torch.int16)) for key in a)


@pytest.mark.parametrize("steps", range(1, 13))
def test_any_number_of_steps(steps: int, spec: PixelSpec, tmp_path: Path) -> None:
    """One-cycle schedules divide by zero where the warm-up ends on the first step."""

    class Line(nn.Module):
        def __init__(self, _: PixelSpec) -> None:
            super().__init__()
            self.slope = nn.Parameter(torch.zeros(()))

        def forward(self, latents: torch.Tensor, sigma: torch.Tensor, class_ids: torch.Tensor) -> torch.Tensor:
            return latents * self.slope

    losses: list[float] = []
    settings = FlowTraining(steps=steps, batch=2)
    train_pixel_backbone(built_by(spec, Line), settings, tmp_path / "w", progress=lambda _, loss: losses.append(loss))
    assert len(losses) == steps
    assert load_file(tmp_path / "w")["slope"].isfinite()


def test_training_learns(spec: PixelSpec, tmp_path: Path) -> None:
    losses: list[float] = []
    settings = FlowTraining(steps=60, batch=16, learning_rate=1e-2)
    final = train_pixel_backbone(spec, settings, tmp_path / "w", progress=lambda _, loss: losses.append(loss))
    assert final == pytest.approx(sum(losses[-3:]) / 3)
    assert sum(losses[-10:]) < 0.8 * sum(losses[:10])


@pytest.mark.parametrize("change", [{"steps": 0}, {"steps": -1}, {"batch": 0}])
def test_settings_out_of_range_are_refused(change: dict[str, int], spec: PixelSpec, tmp_path: Path) -> None:
    [(name, value)] = change.items()
    never = built_by(spec, lambda _: pytest.fail("built"))
    with pytest.raises(ValueError, match=f"{name} must be at least 1, got {value}"):
        train_pixel_backbone(never, replace(SETTINGS, **change), tmp_path / "w")
    assert list(tmp_path.iterdir()) == []


def test_a_loss_that_is_not_finite_stops_and_writes_nothing(spec: PixelSpec, tmp_path: Path) -> None:
    def broken(spec: PixelSpec) -> PixelFlux:
        module = PixelFlux(spec)
        with torch.no_grad():
            module.transformer.proj_out.bias.fill_(float("nan"))
        return module

    with pytest.raises(FloatingPointError, match="the loss is nan at step 0"):
        train_pixel_backbone(built_by(spec, broken), SETTINGS, tmp_path / "w")
    assert list(tmp_path.iterdir()) == []
