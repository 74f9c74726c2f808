"""Backbones by name, and weights files: there, small, and of the configuration that loads them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from jagg_core import dance_schedule
from jagg_core.backbones import (
    BackboneEntry,
    check_backbone_name,
    check_schedule,
    list_backbones,
    load_backbone,
    read_options,
    register_backbone,
    registry,
    schedule_of,
)
from jagg_core.backbones.pixel import (
    PixelBackbone,
    PixelSpec,
    base,
    build_pixel_backbone,
    save_pixel_weights,
    spec_json,
    weights_path,
)
from jagg_core.backbones.registry import TRAINED

MakeTiny = Callable[..., PixelBackbone]


@pytest.fixture
def nothing_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loading ``digits-flux`` is an error of the test: refusals come first."""

    def load(*_: object) -> PixelBackbone:
        raise AssertionError("loaded before the refusal")

    monkeypatch.setitem(registry._REGISTRY, "digits-flux", BackboneEntry("digits-flux", "", load))


def test_what_is_registered() -> None:
    names = [entry.name for entry in list_backbones()]
    assert names == sorted(names)
    assert {"digits-flux", "emoji-flux", "photos-flux", "photos-qwen"} == TRAINED.keys()
    assert TRAINED.keys() <= set(names)
    assert all(entry.description for entry in list_backbones())


@pytest.mark.parametrize(
    ("name", "hint"), [("digit-flux", "; did you mean 'digits-flux'?"), ("photo_flux", "; did you mean 'photos-flux'?")]
)
def test_an_unknown_name_gets_the_nearest(name: str, hint: str) -> None:
    for look_up in (check_backbone_name, load_backbone):
        with pytest.raises(ValueError, match=r"backbone must be one of \['digits-flux', 'emoji-flux'") as caught:
            look_up(name)
        assert str(caught.value).endswith(f"got {name!r}{hint}")


def test_a_far_name_gets_no_hint() -> None:
    with pytest.raises(ValueError, match=r"got 'xyz'$"):
        load_backbone("xyz")


@pytest.mark.usefixtures("nothing_loads")
@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.bool])
def test_integer_dtypes_are_refused(dtype: torch.dtype) -> None:
    with pytest.raises(ValueError, match=f"dtype must be floating point, got {dtype}"):
        load_backbone("digits-flux", dtype=dtype)


@pytest.mark.usefixtures("nothing_loads")
@pytest.mark.parametrize("device", ["nonsense", "cuda:x", "cuda:4096"])
def test_unusable_devices_are_refused(device: str) -> None:
    with pytest.raises(ValueError, match=f"device '{device}' cannot be used here"):
        load_backbone("digits-flux", device)


def test_a_name_is_registered_once() -> None:
    entry = BackboneEntry("digits-flux", "", lambda *_: pytest.fail("loaded"))
    with pytest.raises(ValueError, match="backbone 'digits-flux' is already registered"):
        register_backbone(entry)


# Options


def loads(device: str, dtype: torch.dtype, *, height: int = 8, path: str | None = None, rate: float = 0.5) -> None:
    raise AssertionError("loaded before the refusal")


@pytest.fixture
def optional(monkeypatch: pytest.MonkeyPatch) -> str:
    """A backbone with options."""
    monkeypatch.setitem(registry._REGISTRY, "optional", BackboneEntry("optional", "", loads))
    return "optional"


def test_options_are_read_by_their_types(optional: str) -> None:
    texts = ["height=512", "path=a/b=c", "rate=1e-3"]
    assert read_options(optional, texts) == {"height": 512, "path": "a/b=c", "rate": 0.001}
    assert read_options(optional, []) == {}
    found = read_options("flux-dev", ["height=64", "path=3", "calls=separate", "random_weights=true"])
    assert found == {"height": 64, "path": "3", "calls": "separate", "random_weights": True}
    with pytest.raises(ValueError, match="random_weights must be true or false, got 'yes'"):
        read_options("flux-dev", ["random_weights=yes"])


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("height", "backbone options must be written option=value, got 'height'"),
        ("height=big", "height must be of type int, got 'big'"),
        ("height=1.5", "height must be of type int, got '1.5'"),
        (
            "hight=8",
            r"'optional' must have options among \['height', 'path', 'rate'\], got 'hight'; did you mean 'height'\?",
        ),
        ("device=cuda", r"must have options among \['height', 'path', 'rate'\], got 'device'$"),
    ],
)
def test_options_that_cannot_be_read(optional: str, text: str, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        read_options(optional, [text])


def test_an_option_is_given_once(optional: str) -> None:
    with pytest.raises(ValueError, match=r"backbone options must be different, got \['height=8', 'height=9'\]"):
        read_options(optional, ["height=8", "height=9"])


def test_unknown_options_are_refused_before_loading(optional: str) -> None:
    with pytest.raises(ValueError, match=r"must have options among .* got 'hight'"):
        load_backbone(optional, hight=8)
    options = r"\['lora_rank', 'lora_alpha', 'prompts'\]"
    with pytest.raises(ValueError, match=rf"'digits-flux' must have options among {options}, got 'height'"):
        load_backbone("digits-flux", height=8)


def test_options_reach_the_loader(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []

    def load(device: str, dtype: torch.dtype, **options: object) -> PixelBackbone:
        asked.append((device, dtype, options))
        return registry._REGISTRY["digits-flux"].load(device, dtype)  # type: ignore[return-value]

    monkeypatch.setitem(registry._REGISTRY, "any", BackboneEntry("any", "", load))
    load_backbone("any", "cpu", torch.float32, **read_options("any", ["whatever=x"]))
    assert asked == [("cpu", torch.float32, {"whatever": "x"})]


# Schedules


def test_schedules_by_name() -> None:
    class Sampler:
        name = "sampler"

        def schedule(self, steps: int) -> torch.Tensor:
            return torch.linspace(1, 0, steps + 1).double()

    class Without:
        name = "without"

    assert torch.equal(schedule_of(Sampler(), "dance", 4, 3.0), dance_schedule(4, 3.0))  # type: ignore[arg-type]
    assert schedule_of(Sampler(), "own", 4, 3.0).tolist() == [1, 0.75, 0.5, 0.25, 0]  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"must be dance for without, which has no schedule\(steps\), got 'own'"):
        schedule_of(Without(), "own", 4, 3.0)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"schedule must be one of \['dance', 'own'\], got 'flux'"):
        check_schedule("flux", 4, 3.0)
    with pytest.raises(ValueError, match="steps must be at least 1, got 0"):
        check_schedule("own", 0, 3.0)


@pytest.mark.parametrize("name", sorted(TRAINED))
def test_parameters_are_those_of_the_weights(name: str) -> None:
    found = sum(p.numel() for p in load_backbone(name).transformer.parameters())
    assert registry._REGISTRY[name].parameters == found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_loading(dtype: torch.dtype) -> None:
    state = torch.get_rng_state()
    backbone = load_backbone("digits-flux", dtype=dtype)
    assert torch.equal(torch.get_rng_state(), state)
    assert (backbone.name, backbone.dataset, backbone.latent_shape) == ("digits-flux", "digits", (16, 4))
    assert backbone.device == torch.device("cpu")
    assert not backbone.transformer.training
    assert {p.dtype for p in backbone.transformer.parameters()} == {dtype}


# Weights files


@pytest.mark.parametrize("name", sorted(TRAINED))
def test_shipped_weights_are_there_and_small(name: str) -> None:
    assert 0 < weights_path(name).stat().st_size <= 6_000_000


def test_missing_weights_say_how_to_rebuild_them(
    tiny_spec: PixelSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(base, "weights_path", lambda name: tmp_path / f"{name}.safetensors")
    with pytest.raises(FileNotFoundError, match=r"python -m jagg_core backbones train tiny-flux$") as caught:
        build_pixel_backbone(tiny_spec, "cpu", torch.float32)
    assert str(tmp_path / "tiny-flux.safetensors") in str(caught.value)


def test_weights_come_back_as_they_were_written(
    make_tiny: MakeTiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = make_tiny()
    path = tmp_path / "deep" / "w.safetensors"
    save_pixel_weights(made.spec, made.module, path, {"note": "x"})
    assert {tensor.dtype for tensor in load_file(path).values()} == {torch.float16}
    monkeypatch.setattr(base, "weights_path", lambda _: path)
    loaded = build_pixel_backbone(made.spec, "cpu", torch.float32)
    assert not loaded.module.training
    state, expected = loaded.module.state_dict(), made.module.state_dict()
    assert state.keys() == expected.keys()
    for key, value in state.items():
        assert torch.equal(value, expected[key].half().float())


@pytest.mark.parametrize("change", [{"mean": 0.31}, {"prompts": ("a", "b", "x")}, {"heads": 1, "head_dim": 16}])
def test_weights_of_another_configuration_are_refused(
    change: dict[str, object], make_tiny: MakeTiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = make_tiny()
    path = tmp_path / "w.safetensors"
    save_pixel_weights(made.spec, made.module, path, {})
    monkeypatch.setattr(base, "weights_path", lambda _: path)
    other = replace(made.spec, **change)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="trained with another configuration than tiny-flux has now: retrain it"):
        build_pixel_backbone(other, "cpu", torch.float32)


def test_weights_that_do_not_say_what_they_are_are_refused(
    make_tiny: MakeTiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = make_tiny()
    save_file(made.module.state_dict(), tmp_path / "w.safetensors")
    monkeypatch.setattr(base, "weights_path", lambda _: tmp_path / "w.safetensors")
    with pytest.raises(ValueError, match="another configuration"):
        build_pixel_backbone(made.spec, "cpu", torch.float32)


def test_configurations_are_told_apart(tiny_spec: PixelSpec) -> None:
    assert spec_json(tiny_spec) == spec_json(replace(tiny_spec))
    assert spec_json(tiny_spec) != spec_json(replace(tiny_spec, std=0.41))
