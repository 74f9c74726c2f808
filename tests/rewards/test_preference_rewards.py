"""CLIPScore, PickScore and HPSv2.1 on tiny networks: against transformers' own pipeline, and by hand."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from huggingface_hub import errors
from safetensors.torch import load_file, save_file
from torch import Tensor

from jagg_core import group_advantages
from jagg_core.backbones.pretrained.text import PromptCut
from jagg_core.rewards import PreferenceReward, Reward, check_reward, load_reward, options_of, reward_versions, score
from jagg_core.rewards.preference import CLIPSCORE, HPSV21, PICKSCORE, published
from jagg_core.rewards.preference.files import PROCESSOR_FILES
from jagg_core.rewards.preference.network import projected
from tests.rewards.tiny_clip import write_clip

PROMPTS = ["a cat", "two red rockets, at night.", "z"]
LAION = "laion/CLIP-ViT-H-14-laion2B-s32B-b79K"


def pictures(count: int = 3, height: int = 40, width: int = 52) -> Tensor:
    """Smooth random images, whole numbers over 255: ``[N, 3, H, W]``."""
    coarse = torch.rand(count, 3, 4, 4, generator=torch.Generator().manual_seed(0))
    images = torch.nn.functional.interpolate(coarse, (height, width), mode="bilinear")
    return (255 * images).round() / 255


IMAGES = pictures()


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A network's folder. Do not write into it."""
    folder = tmp_path_factory.mktemp("networks") / "tiny-clip"
    write_clip(folder)
    return folder


@pytest.fixture
def folder(shared: Path, tmp_path: Path) -> Path:
    """A folder of the test's own."""
    return Path(shutil.copytree(shared, tmp_path / "own"))


def load(name: str, folder: Path, *options: str) -> PreferenceReward:
    base = name if name == "hpsv2.1" else name.partition(".")[0]
    found = load_reward(name, options=[f"{base}.{option}" for option in (f"path={folder}", *options)])
    assert isinstance(found, PreferenceReward)
    return found


# Values


def test_cosines_are_those_of_transformers(shared: Path) -> None:
    """Its processor (PIL, whole numbers), padding with a mask, and CLIPModel's forward pass."""
    from transformers import CLIPModel, CLIPTokenizerFast
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

    model = CLIPModel.from_pretrained(shared).eval()
    pixels = CLIPImageProcessorPil.from_pretrained(shared)(list((255 * IMAGES).round().byte()), return_tensors="pt")
    tokens = CLIPTokenizerFast.from_pretrained(shared)(
        PROMPTS, padding=True, truncation=True, max_length=16, return_tensors="pt"
    )
    with torch.no_grad():
        logits = model(**pixels, **tokens).logits_per_image
    scale = model.logit_scale.exp().item()
    reward = load("clipscore", shared)
    every = score(reward, IMAGES.repeat_interleave(3, dim=0), PROMPTS * 3).reshape(3, 3)
    assert every.std() > 0.1
    torch.testing.assert_close(every, logits / scale, rtol=0, atol=1e-3)
    torch.testing.assert_close(score(reward, IMAGES, PROMPTS), every.diagonal(), rtol=0, atol=1e-6)
    pickscore = load("pickscore", shared)
    torch.testing.assert_close(score(pickscore, IMAGES, PROMPTS), scale * every.diagonal(), rtol=1e-5, atol=1e-5)


def test_published_scales() -> None:
    cosine = torch.tensor([0.22, -0.1])
    found = {name: value(cosine, 100.0).tolist() for name, value in CLIPSCORE.variants.items()}
    assert found["raw"] == pytest.approx([0.22, -0.1])
    assert found["clamped"] == pytest.approx([0.22, 0])
    assert found["x100"] == pytest.approx([22, -10])
    assert found["x2.5"] == pytest.approx([0.55, -0.25])
    assert PICKSCORE.variants["raw"](cosine, 100.0).tolist() == pytest.approx([22, -10])
    assert PICKSCORE.variants["normalised"](cosine, 100.0)[0].item() == pytest.approx(0.846154, abs=1e-6)
    assert HPSV21.variants["raw"](cosine, 100.0).tolist() == pytest.approx([0.22, -0.1])


def test_negative_cosines_are_kept_unless_clamped(shared: Path) -> None:
    raw = load("clipscore", shared)
    images, prompts = IMAGES.repeat_interleave(3, dim=0), PROMPTS * 3
    negative = score(raw, images, prompts) < -0.01
    assert negative.sum() >= 2
    images, prompts = images[negative], [p for p, is_in in zip(prompts, negative, strict=True) if is_in]
    values = score(raw, images, prompts)
    for name, factor in (("x100", 100), ("x2.5", 2.5)):
        torch.testing.assert_close(score(load(f"clipscore.{name}", shared), images, prompts), factor * values)
    clamped = score(load("clipscore.clamped", shared), images, prompts)
    assert not clamped.any()
    # a group of them teaches nothing once clamped
    group = torch.zeros(len(values), dtype=torch.long)
    assert group_advantages(values, group).abs().min() > 0
    assert not group_advantages(clamped, group).any()


def test_variants_are_in_the_name_and_read_again(shared: Path) -> None:
    for base, scales in (("clipscore", CLIPSCORE), ("pickscore", PICKSCORE)):
        for variant in scales.variants:
            by_option = load(base, shared, f"variant={variant}")
            assert by_option.name == (base if variant == "raw" else f"{base}.{variant}")
            by_name = load(by_option.name, shared)
            assert by_name.name == by_option.name
            assert torch.equal(score(by_name, IMAGES, PROMPTS), score(by_option, IMAGES, PROMPTS))


# Getters


def test_features_of_both_kinds_of_getter(shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reward = load("clipscore", shared)
    expected = score(reward, IMAGES, PROMPTS)
    model = reward.network.model
    for getter in ("get_image_features", "get_text_features"):
        original = getattr(model, getter)

        def bare(inputs: Tensor, original: Any = original) -> Tensor:
            return projected(original(inputs))

        def wrapped(inputs: Tensor, bare: Any = bare) -> object:
            return SimpleNamespace(pooler_output=bare(inputs), last_hidden_state=torch.zeros(1))

        for kind in (bare, wrapped):
            monkeypatch.setattr(model, getter, kind)
            assert torch.equal(score(reward, IMAGES, PROMPTS), expected)
        for nothing in (SimpleNamespace(text_embeds=torch.zeros(3, 12)), SimpleNamespace(pooler_output=None), (1,)):
            monkeypatch.setattr(model, getter, lambda _, nothing=nothing: nothing)
            with pytest.raises(TypeError, match="must be a tensor or have one as pooler_output, got"):
                score(reward, IMAGES, PROMPTS)
        monkeypatch.setattr(model, getter, original)


def test_features_are_projected_once(tmp_path: Path) -> None:
    """With equal widths projecting twice would pass every check of shapes."""
    model = write_clip(tmp_path, projection=16)
    reward = load("clipscore", tmp_path)
    tokens = reward.network.tokenizer(PROMPTS, padding="max_length", max_length=16, truncation=True)["input_ids"]
    with torch.no_grad():
        forward = model(input_ids=torch.tensor(tokens), pixel_values=reward.network.preprocess(IMAGES))
        twice = model.text_projection(forward.text_embeds)
    once = (forward.text_embeds * forward.image_embeds).sum(-1)
    torch.testing.assert_close(score(reward, IMAGES, PROMPTS), once, rtol=0, atol=1e-6)
    assert ((twice / twice.norm(dim=-1, keepdim=True) * forward.image_embeds).sum(-1) - once).abs().max() > 0.05


# Batches, devices, precision


def test_image_n_goes_with_prompt_n(shared: Path) -> None:
    reward = load("pickscore", shared)
    values = score(reward, IMAGES, PROMPTS)
    assert values.shape == (3,)
    order = [2, 0, 1]
    both = score(reward, IMAGES[order], [PROMPTS[i] for i in order])
    torch.testing.assert_close(both, values[order], rtol=0, atol=1e-5)
    only_images = score(reward, IMAGES[order], PROMPTS)
    assert (only_images - values[order]).abs().min() > 1e-2
    alone = torch.cat([score(reward, IMAGES[i : i + 1], [p]) for i, p in zip(order, PROMPTS, strict=True)])
    torch.testing.assert_close(only_images, alone, rtol=0, atol=1e-5)


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-6), ("bfloat16", 5e-4)])
def test_a_batch_gives_what_single_images_give(shared: Path, dtype: str, tolerance: float) -> None:
    images, prompts = pictures(7), ["b", *PROMPTS, "a cat", "z", "c"]
    reward = load("clipscore", shared, f"dtype={dtype}")
    together = score(reward, images, prompts)
    assert together.dtype == torch.float32
    assert torch.equal(together, score(reward, images, prompts))
    small = load("clipscore", shared, f"dtype={dtype}", "batch_size=2")
    torch.testing.assert_close(score(small, images, prompts), together, rtol=0, atol=tolerance)
    alone = torch.cat([score(reward, image[None], [p]) for image, p in zip(images, prompts, strict=True)])
    torch.testing.assert_close(alone, together, rtol=0, atol=tolerance)


def test_half_precision_is_of_the_network_alone(shared: Path) -> None:
    whole, half = load("pickscore", shared), load("pickscore", shared, "dtype=bfloat16")
    assert {p.dtype for p in half.network.model.parameters()} == {torch.bfloat16}
    assert half.network.logit_scale == whole.network.logit_scale
    assert half.version == whole.version
    difference = (score(half, IMAGES, PROMPTS) - score(whole, IMAGES, PROMPTS)).abs().max().item()
    assert 0 < difference < 0.03 * whole.network.logit_scale
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(score(whole, IMAGES, PROMPTS), score(load("pickscore", shared), IMAGES, PROMPTS))


def test_a_gradient_in_the_pixels_and_nothing_random(shared: Path) -> None:
    state = torch.get_rng_state()
    reward = load("clipscore", shared)
    images = IMAGES.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(reward(images, PROMPTS).sum(), images)
    assert gradient.isfinite().all()
    assert (gradient.flatten(1).norm(dim=1) > 0).all()
    assert not score(reward, images, PROMPTS).requires_grad
    assert torch.equal(torch.get_rng_state(), state)
    assert not reward.network.model.training
    assert not any(p.requires_grad for p in reward.network.model.parameters())
    assert isinstance(reward, Reward)


def test_prompts_that_are_cut_are_noted_once(shared: Path) -> None:
    reward = load("clipscore", shared)
    prompts = [PROMPTS[0], " ".join(["cat"] * 500), *PROMPTS[2:]]
    with pytest.warns(PromptCut, match=rf"1 of {len(set(prompts))} prompts .* the reward's text encoder reads"):
        score(reward, IMAGES, prompts)
    score(reward, IMAGES, prompts)  # warnings are errors here


def test_networks_are_read_once_and_prompts_encoded_once(shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[Sequence[Path]] = []
    original = published.read_tensors
    monkeypatch.setattr(published, "read_tensors", lambda files: reads.append(files) or original(files))
    reward = load("clipscore", shared)
    encoded: list[int] = []
    getter = reward.network.model.get_text_features

    def counting(ids: Tensor) -> object:
        encoded.append(len(ids))
        return getter(ids)

    monkeypatch.setattr(reward.network.model, "get_text_features", counting)
    for _ in range(3):
        score(reward, pictures(6), [PROMPTS[0], PROMPTS[1]] * 3)
    assert len(reads) == 1
    assert encoded == [2, 2, 2]


# Prompts


def test_long_prompts_are_cut_and_padding_does_not_matter(shared: Path) -> None:
    """A network takes 16 tokens: the start, 14 of the prompt, the end."""
    reward = load("clipscore", shared)
    long = "abcdefghijklmnopqrstuvwxyz"
    values = score(reward, IMAGES[:1].expand(3, -1, -1, -1), [long, long[:14] + "q" * 30, long[:13] + "q" * 30])
    assert values[0] == values[1] != values[2]
    tokenizer = reward.network.tokenizer
    expected = score(reward, IMAGES, ["", *PROMPTS[:2]])
    tokenizer.pad_token = "b"  # ids below the end token, as open_clip's 0
    assert torch.equal(score(reward, IMAGES, ["", *PROMPTS[:2]]), expected)


def test_texts_end_where_the_tokenizer_ends_them(folder: Path) -> None:
    """Old configurations hold another end token: 2."""
    expected = score(load("clipscore", folder), IMAGES, PROMPTS)
    config = json.loads((folder / "config.json").read_text())
    for wrong in (2, 0):
        config["text_config"]["eos_token_id"] = wrong
        (folder / "config.json").write_text(json.dumps(config))
        assert torch.equal(score(load("clipscore", folder), IMAGES, PROMPTS), expected)


# Files


def test_vocabularies_of_both_kinds(folder: Path) -> None:
    expected = score(load("clipscore", folder), IMAGES, PROMPTS)
    written = json.loads((folder / "tokenizer.json").read_text())
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ValueError, match=r"processor: .* has no tokenizer.json or vocab.json, .*processor=FOLDER"):
        load("clipscore", folder)
    (folder / "vocab.json").write_text(json.dumps(written["model"]["vocab"]))
    with pytest.raises(ValueError, match=r"processor: .* has no merges.txt, got \['config.json', .*put it there"):
        load("clipscore", folder)
    (folder / "merges.txt").write_text("#version: 0.2\n")
    assert torch.equal(score(load("clipscore", folder), IMAGES, PROMPTS), expected)


def test_shards_and_older_files_are_read(folder: Path) -> None:
    from transformers import CLIPModel

    expected = score(load("clipscore", folder), IMAGES, PROMPTS)
    tensors = load_file(folder / "model.safetensors")
    older = tensors | {"text_model.embeddings.position_ids": torch.arange(16)[None]}
    save_file(older, folder / "model.safetensors")
    assert torch.equal(score(load("clipscore", folder), IMAGES, PROMPTS), expected)
    CLIPModel.from_pretrained(folder).save_pretrained(folder, max_shard_size="40KB")
    (folder / "model.safetensors").unlink(missing_ok=True)
    assert len(list(folder.glob("model-*.safetensors"))) > 1
    assert torch.equal(score(load("clipscore", folder), IMAGES, PROMPTS), expected)
    min(folder.glob("model-*.safetensors")).unlink()
    with pytest.raises(ValueError, match=r"path: .* has no model-00001-of-"):
        load("clipscore", folder)


def test_what_is_wrong_with_a_folder_is_named(folder: Path) -> None:
    weights = folder / "model.safetensors"
    tensors = load_file(weights)
    save_file({name: tensor for name, tensor in tensors.items() if name != "logit_scale"}, weights)
    with pytest.raises(ValueError, match=r"model.safetensors holds another network: 1 tensors are missing, such"):
        load("clipscore", folder)
    save_file(tensors | {"visual_projection.weight": torch.zeros(13, 24)}, weights)
    with pytest.raises(ValueError, match=r"visual_projection.weight in .* of shape \[12, 24\], got \[13, 24\]"):
        load("clipscore", folder)
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(ValueError, match=r"model.safetensors is damaged"):
        load("clipscore", folder)
    weights.unlink()
    with pytest.raises(ValueError, match=r"path: .* has no model.safetensors or model.safetensors.index.json, got"):
        load("clipscore", folder)


def test_configurations_are_checked_before_weights_are_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(published, "read_tensors", lambda _: pytest.fail("weights were read before the refusal"))
    config = json.loads((folder / "config.json").read_text())
    for change, match in (
        ({"model_type": "siglip"}, "config.json must be of model_type 'clip', got 'siglip'"),
        ({"text_config": config["text_config"] | {"vocab_size": 57}}, "has 58 tokens, and the network of .* takes 57"),
    ):
        (folder / "config.json").write_text(json.dumps(config | change))
        with pytest.raises(ValueError, match=match):
            load("clipscore", folder)
    for name, match in (
        ("preprocessor_config.json", "processor: .* has no preprocessor_config.json, got"),
        ("config.json", "path: .* has no config.json, got"),
    ):
        (folder / "config.json").write_text(json.dumps(config))
        (folder / name).unlink()
        with pytest.raises(ValueError, match=match):
            load("clipscore", folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config.json cannot be read as JSON"):
        load("clipscore", folder)


def test_versions_tell_weights_apart(folder: Path) -> None:
    first = load("clipscore", folder)
    assert first.version.startswith("own ")
    assert load("clipscore", folder).version == first.version
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors | {"logit_scale": tensors["logit_scale"] + 1}, folder / "model.safetensors")
    second = load("clipscore.x100", folder)
    assert second.version != first.version
    assert reward_versions(second) == {"clipscore.x100": second.version}
    assert reward_versions(load_reward("redness")) == {}
    preprocessor = folder / "preprocessor_config.json"
    preprocessor.write_text(preprocessor.read_text().replace("0.48145466", "0.5"))
    assert load("clipscore", folder).version != second.version


# The hub


def test_what_is_asked_of_the_hub(shared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    commit = Path(shutil.copytree(shared, tmp_path / "c0ffee"))

    def download(name: str, revision: str | None, allow_patterns: list[str]) -> str:
        asked.append((name, revision, allow_patterns))
        return str(commit)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    network = ["model.safetensors", "model.safetensors.index.json", "model-*.safetensors", "config.json"]
    reward = load_reward("clipscore")
    assert isinstance(reward, PreferenceReward)
    assert reward.version.startswith("openai/clip-vit-large-patch14@c0ffee ")
    load_reward("clipscore", options=["clipscore.path=a/b", "clipscore.revision=v9", "clipscore.processor=c/d"])
    reward = load_reward("pickscore")
    assert isinstance(reward, PreferenceReward)
    assert reward.version.startswith(f"yuvalkirstain/PickScore_v1@c0ffee + {LAION}@c0ffee ")
    with pytest.raises(ValueError, match=r"path: .* has no HPS_v2.1_compressed.pt or .*connect once to fetch it"):
        load_reward("hpsv2.1")
    processor = list(PROCESSOR_FILES)
    assert asked == [
        ("openai/clip-vit-large-patch14", None, [*network, *processor]),
        ("a/b", "v9", [*network, *processor]),
        ("c/d", None, processor),
        ("yuvalkirstain/PickScore_v1", None, network),
        (LAION, None, processor),
        ("xswu/HPSv2", None, ["HPS_v2.1_compressed.pt", "HPS_v2.1_compressed.safetensors"]),
    ]


def test_a_local_folder_needs_no_hub(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def offline(name: str, **_: object) -> str:
        asked.append(name)
        raise errors.LocalEntryNotFoundError("offline")

    monkeypatch.setattr("huggingface_hub.snapshot_download", offline)
    for name in ("clipscore", "pickscore"):
        load(name, folder)
    assert asked == []
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ValueError, match=f"{LAION} is not on this machine .*give a local folder: processor=FOLDER"):
        load("pickscore", folder)
    with pytest.raises(ValueError, match=r"openai/clip-.* is not on this machine .*give a local folder: path=FOLDER"):
        load_reward("clipscore")
    with pytest.raises(ValueError, match=r"revision must be None for the local folder .*, got 'v9'"):
        load("clipscore", folder, "revision=v9")
    with pytest.raises(ValueError, match=r"path: there is no folder \./nowhere; allowed: a folder, or a hub id"):
        load_reward("clipscore", options=["clipscore.path=./nowhere"])
    for nowhere in ("~/nowhere", "~no_such_user/folder"):
        for name in ("clipscore", "hpsv2.1"):
            with pytest.raises(ValueError, match=f"path: there is no folder {nowhere}"):
                load_reward(name, options=[f"{name}.path={nowhere}"])
        with pytest.raises(ValueError, match=f"processor: there is no folder {nowhere}"):
            load("clipscore", folder, f"processor={nowhere}")


@pytest.mark.parametrize(
    ("error", "match"),
    [
        (errors.GatedRepoError, r"a/b is gated: accept its licence .*path=FOLDER"),
        (errors.RevisionNotFoundError, r"revision: a/b has no 'v9'"),
        (errors.RepositoryNotFoundError, r"path: no folder and no repository of the hub is called 'a/b'"),
        (errors.HFValidationError, r"path: no folder and no repository of the hub is called 'a/b'"),
        (ConnectionError, r"a/b is not on this machine and the hub cannot be reached \(ConnectionError\)"),
    ],
)
def test_errors_of_the_hub(monkeypatch: pytest.MonkeyPatch, error: type[Exception], match: str) -> None:
    def download(*_: object, **__: object) -> str:
        raise error.__new__(error)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    with pytest.raises(ValueError, match=match):
        load_reward("clipscore", options=["clipscore.path=a/b", "clipscore.revision=v9"])


# Options and sums


@pytest.fixture
def nothing_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "jagg_core.rewards.registry.load_preference", lambda *_: pytest.fail("loaded before the refusal")
    )


@pytest.mark.usefixtures("nothing_loads")
@pytest.mark.parametrize(
    ("name", "options", "match"),
    [
        ("clipscore", ["variant=clamped"], "written reward.option=value, got 'variant=clamped'"),
        ("clipscore", ["clipscore.variant"], "written reward.option=value, got 'clipscore.variant'"),
        ("clipscore", ["clipscore.variant=big"], r"variant of clipscore must be one of \['raw', .*, got 'big'"),
        ("pickscore.clamped", [], r"variant of pickscore must be one of \['raw', 'normalised'\], got 'clamped'"),
        ("clipscore.x100", ["clipscore.variant=raw"], "options must be different, got .*'variant=x100'"),
        (
            "clipscore",
            ["clipscore.batch_sise=3"],
            r"reward 'clipscore' must have options among \['path', .*did you mean 'batch_s",
        ),
        ("clipscore", ["clipscore.published=x"], r"reward 'clipscore' must have options among .*got 'published'"),
        ("hpsv2.1", ["hpsv2.1.batch_size=0"], "batch_size must be at least 1, got 0"),
        ("hpsv2.1", ["hpsv2.1.batch_size=many"], "batch_size must be of type int, got 'many'"),
        ("hpsv2.1", ["hpsv2.1.dtype=int8"], r"dtype must be one of \['float32', .*got 'int8'"),
        ("clipscore", ["pickscore.path=a"], r"reward options: 'pickscore' is not in the reward, .*\['clipscore'\]"),
        ("redness", ["redness.path=a"], r"reward 'redness' must have options among \[\], got 'path'"),
        ("clipscore+2*redness", ["clipscore.dtype=float32", "redness.a=b"], "'redness' must have options among"),
        ("clipscore+hpsv2", [], "unknown reward 'hpsv2', nearest is 'hpsv2.1'"),
        ("redness.clamped", [], "unknown reward 'redness.clamped', nearest is 'redness'"),
    ],
)
def test_options_are_refused_before_anything_is_loaded(name: str, options: list[str], match: str) -> None:
    for check in (check_reward, load_reward):
        with pytest.raises(ValueError, match=match):
            check(name, options=options)


@pytest.mark.usefixtures("nothing_loads")
def test_a_missing_data_set_is_refused_before_anything_is_loaded() -> None:
    check_reward("clipscore+classifier")
    with pytest.raises(ValueError, match="reward classifier needs dataset"):
        load_reward("clipscore+classifier")
    for name in ("clipscore", "pickscore", "hpsv2.1"):
        check_reward(name, dataset="photos")
        with pytest.raises(ValueError, match=f"{name} cannot score the grey images of digits"):
            check_reward(name, dataset="digits")


def test_sums_of_published_rewards(shared: Path) -> None:
    text = "2.5*clipscore.clamped-0.1*pickscore.normalised+redness"
    options = [f"clipscore.path={shared}", f"pickscore.path={shared}", "pickscore.dtype=bfloat16"]
    total = load_reward(text, options=options)
    assert total.name == text
    terms = [load("clipscore.clamped", shared), load("pickscore.normalised", shared, "dtype=bfloat16")]
    by_hand = 2.5 * score(terms[0], IMAGES, PROMPTS) - 0.1 * score(terms[1], IMAGES, PROMPTS)
    by_hand += score(load_reward("redness"), IMAGES, PROMPTS)
    torch.testing.assert_close(score(total, IMAGES, PROMPTS), by_hand)
    assert reward_versions(total) == {term.name: term.version for term in terms}


def test_options_shared_by_several_rewards() -> None:
    options = ["hpsv2.1.dtype=bfloat16", "clipscore.path=a=b", "hpsv2.1.path=c", "pickscore.path=d"]
    assert options_of("clipscore.x100-hpsv2.1", options) == [options[0], options[2], options[1]]
    assert options_of("redness", options) == []
    assert options_of("pickscore+a:b", options) == [options[3]]
    with pytest.raises(ValueError, match=r"written reward.option=value, got 'path'"):
        options_of("redness", ["path"])


# Refusals


def test_other_images_and_failing_networks_are_errors(shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reward = load("clipscore.x100", shared)
    with pytest.raises(ValueError, match=r"clipscore.x100 takes 3 channels \(RGB\), got 1-channel"):
        score(reward, IMAGES[:, :1], PROMPTS)
    with pytest.raises(ValueError, match="got 2 for 3 images"):
        reward(IMAGES, PROMPTS[:2])
    with torch.no_grad():
        reward.network.model.visual_projection.weight.zero_()
    with pytest.raises(ValueError, match=r"clipscore.x100 is nan for sample 0 .*never silently replaced"):
        score(reward, IMAGES, PROMPTS)
    monkeypatch.setattr(reward.network.model, "get_text_features", lambda _: pytest.fail("network failed"))
    with pytest.raises(pytest.fail.Exception, match="network failed"):
        score(reward, IMAGES, PROMPTS)


def test_transformers_is_asked_for_before_anything_is_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *_, **__: pytest.fail("fetched"))
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(
        ValueError, match=r"reward 'pickscore' needs transformers: pip install -U 'jagg-core\[rewards\]'"
    ):
        load_reward("pickscore")
