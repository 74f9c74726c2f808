"""Model folders: what is wrong with one is said before a weight is read, and a local one needs no hub."""

from __future__ import annotations

import json
import shutil
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from huggingface_hub import errors
from safetensors.torch import load_file, save_file

from jagg_core import sample_ode
from jagg_core.backbones import load_backbone
from jagg_core.backbones.pretrained import PretrainedBackbone
from jagg_core.backbones.pretrained.flux import Flux
from jagg_core.backbones.pretrained.folder import PATTERNS, ModelFolder, find_folder
from jagg_core.backbones.pretrained.prompts import read_prompts
from tests.backbones.pretrained.conftest import FLUX_OPTIONS

Folders = Callable[[str], Path]


@pytest.fixture
def folder(folders: Folders, tmp_path: Path) -> Path:
    """A tiny FLUX.1 folder of the test's own."""
    return Path(shutil.copytree(folders("flux-dev"), tmp_path / "flux"))


@pytest.fixture
def nothing_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*_: object) -> None:
        raise AssertionError("weights were read before the refusal")

    monkeypatch.setattr(PretrainedBackbone, "load_transformer", load)


def refused(match: str, path: Path | str, **options: Any) -> None:
    with pytest.raises(ValueError, match=match):
        load_backbone("flux-dev", path=str(path), **(FLUX_OPTIONS | options))


def first_weights(folder: Path) -> Path:
    return next((folder / "transformer").glob("*.safetensors"))


def test_a_folder_alone_is_enough(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loading, encoding, sampling and decoding, with the network cut."""

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a connection was opened")

    monkeypatch.delenv("HF_HUB_OFFLINE")
    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    backbone = load_backbone("flux-dev", path=str(folder), **FLUX_OPTIONS)
    assert isinstance(backbone, PretrainedBackbone)
    latents = torch.randn(1, *backbone.latent_shape, generator=torch.Generator().manual_seed(0))
    final = sample_ode(backbone.policy(["never asked before"]), backbone.schedule(2), latents)
    assert backbone.decode(final).shape == (1, 3, 16, 24)


@pytest.mark.usefixtures("nothing_loads")
def test_not_a_model_folder(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    refused("has no transformer/config.json; it must be a folder in diffusers' layout", tmp_path / "empty")
    (folder / "vae" / "config.json").write_text("{")
    refused("vae/config.json cannot be read as JSON", folder)
    (folder / "vae" / "config.json").write_text("[]")
    refused("vae/config.json must hold a JSON object, got list", folder)


@pytest.mark.usefixtures("nothing_loads")
def test_another_models_folder(folder: Path) -> None:
    config = folder / "transformer" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"_class_name": "SD3Transformer2DModel"}))
    refused("must hold a FluxTransformer2DModel, got SD3Transformer2DModel: another model's folder", folder)


@pytest.mark.usefixtures("nothing_loads")
@pytest.mark.parametrize("cut", [1, 100, -4, None])
def test_truncated_weights(folder: Path, cut: int | None) -> None:
    """Cut inside the length, inside the header, inside the last tensor, and something appended."""
    file = first_weights(folder)
    content = file.read_bytes()
    file.write_bytes(content + b"x" if cut is None else content[:cut])
    refused(r"\.safetensors is damaged: .* fetch it again", folder)


@pytest.mark.usefixtures("nothing_loads")
def test_every_part_is_looked_through(folder: Path) -> None:
    file = next((folder / "text_encoder_2").glob("*.safetensors"))
    file.write_bytes(file.read_bytes()[:-1])
    refused("text_encoder_2/model.safetensors is damaged", folder)


@pytest.mark.usefixtures("nothing_loads")
@pytest.mark.parametrize("part", ["tokenizer", "tokenizer_2", "text_encoder"])
def test_a_part_is_missing(folder: Path, part: str) -> None:
    """Some libraries would make up a tokenizer."""
    shutil.rmtree(folder / part)
    refused(f"has no {part}/, which its model_index.json names", folder)


@pytest.mark.usefixtures("nothing_loads")
@pytest.mark.parametrize("part", ["vae", "text_encoder"])
def test_a_part_without_weights(folder: Path, part: str) -> None:
    for file in (folder / part).glob("*.safetensors"):
        file.unlink()
    refused(f"{part} has no safetensors weights, got", folder)


@pytest.mark.usefixtures("nothing_loads")
def test_another_pipelines_folder(folder: Path) -> None:
    index = folder / "model_index.json"
    index.write_text(json.dumps(json.loads(index.read_text()) | {"_class_name": "FluxFillPipeline"}))
    refused("must hold a FluxPipeline, got FluxFillPipeline: another model's folder", folder)
    index.unlink()
    refused("model_index.json cannot be read as JSON", folder)


@pytest.mark.usefixtures("nothing_loads")
def test_another_variants_folder(folders: Folders) -> None:
    refused("guidance_embeds of the transformer must be True for flux-dev, got False", folders("flux-schnell"))


@pytest.mark.usefixtures("nothing_loads")
@pytest.mark.parametrize("header", [b"[]", b'{"a": {}}', b"{"])
def test_headers_that_are_none(folder: Path, header: bytes) -> None:
    first_weights(folder).write_bytes(len(header).to_bytes(8, "little") + header)
    refused("is damaged: no header, got .* bytes", folder)


@pytest.mark.parametrize("part", ["transformer", "vae"])
def test_tensors_that_are_missing(folder: Path, part: str) -> None:
    file = next((folder / part).glob("*.safetensors"))
    tensors = load_file(file)
    gone = sorted(tensors)[0]
    save_file({name: tensor for name, tensor in tensors.items() if name != gone}, file, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=f"{part} lacks 1 tensors, such as {gone}: fetch it again"):
        backbone = load_backbone("flux-dev", path=str(folder), **FLUX_OPTIONS)
        backbone.decode(torch.zeros(1, *backbone.latent_shape))


@pytest.mark.usefixtures("nothing_loads")
def test_an_index_without_shards(folder: Path) -> None:
    (folder / "transformer" / "diffusion_pytorch_model.safetensors.index.json").write_text("{}")
    refused("index.json has no weight_map", folder)


def test_a_relative_path_survives_another_directory(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder.parent)
    backbone = load_backbone("flux-dev", path=folder.name, **FLUX_OPTIONS)
    monkeypatch.chdir("/")
    backbone.policy(["asked from elsewhere"])


@pytest.mark.usefixtures("nothing_loads")
def test_a_shard_is_missing(folder: Path) -> None:
    index = folder / "transformer" / "diffusion_pytorch_model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "diffusion_pytorch_model-00001-of-00002.safetensors"}}))
    refused("diffusion_pytorch_model-00001-of-00002.safetensors is missing, which .* names", folder)


@pytest.mark.usefixtures("nothing_loads")
def test_pickled_weights_are_not_read(folder: Path) -> None:
    first_weights(folder).rename(folder / "transformer" / "diffusion_pytorch_model.bin")
    refused("has no safetensors weights, got .*diffusion_pytorch_model.bin", folder)
    assert not any(pattern.endswith((".bin", ".pt", ".ckpt", ".py")) for pattern in PATTERNS)


@pytest.mark.usefixtures("nothing_loads")
@pytest.mark.parametrize(
    ("option", "match"),
    [
        ({"height": 18}, "height must be a positive multiple of 4, got 18; nearest: 16"),
        ({"width": 0}, "width must be a positive multiple of 4, got 0; nearest: 4"),
        ({"frames": 5}, "frames must be 1 for a model of images, got 5"),
        ({"calls": "both"}, r"calls must be one of \['batched', 'separate'\], got 'both'"),
        ({"text_tokens": 0}, "text_tokens must be at least 1, got 0"),
        ({"lora_rank": -1}, "lora_rank must be at least 0, got -1"),
        ({"lora_alpha": 4}, "lora_alpha must be positive and needs a lora_rank, got 4 at rank 0"),
        ({"prompts": "/nowhere/prompts.txt"}, "prompts: /nowhere/prompts.txt cannot be read as text"),
        ({"height": "16"}, "height must be a whole number of pixels, got '16'"),
        (
            {"negative_prompt": "grey"},
            "negative_prompt must be None for flux-dev, which has no classifier-free guidance",
        ),
        ({"text_tokens": 513}, "text_tokens must be at most 512 for flux-dev, got 513"),
        ({"revision": "main"}, "revision must be None for the local folder .*, got 'main'"),
    ],
)
def test_options_out_of_range(folder: Path, option: dict[str, Any], match: str) -> None:
    refused(match, folder, **option)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("\u200b\u200d", "must hold something to read, got "),
        ("a cat\0", "must be text without control characters, got 'a cat.x00'"),
        ('{"prompt": "a cat"}', "must be the prompt alone, got JSON: {"),
        ('["a cat", "a dog"]', "must be the prompt alone, got JSON: "),
    ],
    ids=["zero width", "NUL", "object", "list"],
)
def test_a_line_that_is_no_prompt_is_named(line: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text(f"a fox\n\n{line}\n", encoding="utf-8")
    with pytest.raises(ValueError, match=f"^prompts: {file}, line 3 {message}"):
        read_prompts(str(file))


def test_prompts_of_any_script_are_read(tmp_path: Path) -> None:
    prompts = ("\U0001f469\u200d\U0001f680 a woman in space", "[a cat] on (a mat)", "\u732b", "{cat, dog}", "a\tb", "7")
    file = tmp_path / "prompts.txt"
    file.write_text("\r\n".join(prompts), encoding="utf-8", newline="")
    assert read_prompts(str(file)) == prompts


def test_an_empty_list_of_prompts(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "prompts.txt").write_text("\n \n")
    refused("prompts.txt has no prompt; write one per line", folder, prompts=str(tmp_path / "prompts.txt"))


@pytest.mark.usefixtures("nothing_loads")
def test_libraries_that_are_too_old(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Flux, "vae_class", "AutoencoderOfTomorrow")
    refused(r"'flux-dev' needs AutoencoderOfTomorrow, which the installed diffusers .* has not: pip install", folder)
    monkeypatch.setitem(sys.modules, "transformers", None)
    refused("'flux-dev' needs diffusers and transformers: pip install", folder)


def test_lora_without_peft(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    refused("a LoRA needs peft: pip install", folder, lora_rank=2)


def test_marks_and_ends_of_lines_are_no_prompts(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "prompts.txt").write_bytes("\ufeffred\r\n \r\ngreen\u2028blue\n".encode())
    backbone = load_backbone("flux-dev", path=str(folder), prompts=str(tmp_path / "prompts.txt"), **FLUX_OPTIONS)
    assert backbone.prompts == ("red", "green\u2028blue")


def test_paths_that_are_no_folder() -> None:
    for path in ("/nowhere/flux", "./flux", "~/no-such-folder", "a/b/c", "~nobody-of-this-name/flux"):
        refused("path: there is no folder .*; allowed: a folder in diffusers' layout, or a hub id", path)


def test_without_a_connection() -> None:
    with pytest.raises(ValueError, match=r"FLUX\.1-dev is not on this machine and the hub cannot be reached") as caught:
        load_backbone("flux-dev")
    assert "path=FOLDER" in str(caught.value)


def answer(status: int) -> Any:
    """A response as far as the hub's errors look at it, whichever HTTP library it comes from."""
    return SimpleNamespace(headers={}, status_code=status, request=None)


@pytest.mark.parametrize(
    ("error", "match"),
    [
        (
            lambda: errors.GatedRepoError("", response=answer(403)),
            "is gated: accept its licence at http.*hf auth login",
        ),
        (lambda: errors.RepositoryNotFoundError("", response=answer(404)), "no repository of the hub is called"),
        (lambda: errors.RevisionNotFoundError("", response=answer(404)), "revision: .* has no 'v9'"),
        (lambda: errors.HfHubHTTPError("", response=answer(500)), "the hub cannot be reached"),
        (lambda: ConnectionError("no route"), r"the hub cannot be reached \(ConnectionError\)"),
    ],
)
def test_what_the_hub_answers(error: Callable[[], Exception], match: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def download(*_: object, **__: object) -> str:
        raise error()

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    with pytest.raises(ValueError, match=match):
        find_folder("someone/something", revision="v9")


def test_what_is_asked_of_the_hub(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def download(name: str, **settings: Any) -> str:
        asked.append((name, settings))
        return str(folder)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    assert find_folder("a/b", revision="c0ffee") == ModelFolder(folder)
    assert find_folder("a/b", path="d/e") == ModelFolder(folder)
    patterns = list(PATTERNS)
    assert asked == [
        ("a/b", {"revision": "c0ffee", "allow_patterns": patterns}),
        ("d/e", {"revision": None, "allow_patterns": patterns}),
    ]
