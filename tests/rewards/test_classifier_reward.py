"""The shipped classifiers on held-out real images, and training new ones."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from jagg_core.backbones.datasets import EMOJI_FONT, EMOJI_PACKAGE, PHOTOS
from jagg_core.rewards import (
    ClassifierLogProb,
    Smiling,
    load_classifier,
    read_as_prompted,
    score,
    train_classifier,
    training,
)
from jagg_core.rewards import classifier as module
from jagg_core.rewards.classifier import CLASSIFIERS, classifier_path
from jagg_core.rewards.training import held_out

TARGETS = {"digits": 0.975, "photos": 0.97, "emoji": 0.97}
needs_font = pytest.mark.skipif(not EMOJI_FONT.exists(), reason=f"needs the Debian package {EMOJI_PACKAGE}")
SHIPPED = ("digits", "photos", "emoji")


@pytest.fixture(scope="module")
def real() -> dict[str, tuple[Tensor, list[str]]]:
    """Held-out images and the prompt of each: every held-out digit, 512 crops unknown to training and its judge."""
    found = {}
    for dataset, spec in CLASSIFIERS.items():
        if dataset == "emoji" and not EMOJI_FONT.exists():
            continue
        images, labels = held_out(dataset, crops=512, seed=987_654_321)
        found[dataset] = images, [spec.classes[i] for i in labels]
    return found


@pytest.fixture(params=["digits", "photos", pytest.param("emoji", marks=needs_font)])
def dataset(request: pytest.FixtureRequest) -> str:
    return request.param


def test_shipped_classifiers_reach_their_target(dataset: str, real: dict[str, tuple[Tensor, list[str]]]) -> None:
    images, prompts = real[dataset]
    assert len(images) == {"digits": 360, "photos": 512, "emoji": 512}[dataset]
    assert set(prompts) <= set(CLASSIFIERS[dataset].classes)
    assert len(set(prompts)) > 0.9 * len(CLASSIFIERS[dataset].classes)
    assert read_as_prompted(images, prompts, dataset) >= TARGETS[dataset]


def test_the_reward_is_calibrated_and_falls_with_noise(dataset: str, real: dict[str, tuple[Tensor, list[str]]]) -> None:
    images, prompts = real[dataset][0][:200], real[dataset][1][:200]
    noise = torch.randn(images.shape, generator=torch.Generator().manual_seed(0))
    reward = ClassifierLogProb(dataset)
    clean, slight, strong = (score(reward, (images + s * noise).clamp(0, 1), prompts) for s in (0, 0.1, 0.4))
    # saturated would be 0: headroom is left on images as clear as images get
    assert -0.25 < clean.mean() < -0.05
    assert clean.quantile(0.95) < -0.02
    assert clean.mean() > slight.mean() > clean.mean() - 0.15
    assert strong.mean() < slight.mean() - 0.5
    assert read_as_prompted((images + 0.1 * noise).clamp(0, 1), prompts, dataset) >= TARGETS[dataset] - 0.02


def test_another_prompt_scores_far_lower(dataset: str, real: dict[str, tuple[Tensor, list[str]]]) -> None:
    images, prompts = real[dataset][0][:200], real[dataset][1][:200]
    classes = CLASSIFIERS[dataset].classes
    shifted = [classes[(classes.index(p) + 1) % len(classes)] for p in prompts]
    reward = ClassifierLogProb(dataset)
    assert (score(reward, images, shifted) < score(reward, images, prompts) - 1).float().mean() > 0.95
    assert read_as_prompted(images, shifted, dataset) < 0.03


def test_permuting_images_and_prompts_permutes_scores(dataset: str, real: dict[str, tuple[Tensor, list[str]]]) -> None:
    images, prompts = real[dataset][0][:40], real[dataset][1][:40]
    reward = ClassifierLogProb(dataset)
    scores = score(reward, images, prompts)
    order = torch.randperm(40, generator=torch.Generator().manual_seed(5))
    both = score(reward, images[order], [prompts[i] for i in order])
    torch.testing.assert_close(both, scores[order], rtol=0, atol=1e-5)
    only_images = score(reward, images[order], prompts)
    same = torch.tensor([prompts[i] == p for i, p in zip(order.tolist(), prompts, strict=True)])
    assert (~same).sum() > 20
    assert (only_images[~same] < -1).all()
    torch.testing.assert_close(only_images[same], scores[order][same], rtol=0, atol=1e-5)


def test_a_batch_gives_what_single_images_give(dataset: str, real: dict[str, tuple[Tensor, list[str]]]) -> None:
    images, prompts = real[dataset][0][:12], real[dataset][1][:12]
    reward = ClassifierLogProb(dataset)
    together = score(reward, images, prompts)
    alone = torch.cat([score(reward, image[None], [p]) for image, p in zip(images, prompts, strict=True)])
    torch.testing.assert_close(together, alone, rtol=0, atol=1e-5)
    assert torch.equal(together, score(reward, images, prompts))


def test_chunks_do_not_change_the_scores(
    real: dict[str, tuple[Tensor, list[str]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    images, prompts = real["digits"][0][:50], real["digits"][1][:50]
    reward = ClassifierLogProb("digits")
    whole = score(reward, images, prompts)
    monkeypatch.setattr(module, "CHUNK", 8)
    torch.testing.assert_close(score(reward, images, prompts), whole, rtol=0, atol=1e-5)


def test_log_probabilities_are_normalised_and_fp32_under_autocast(real: dict[str, tuple[Tensor, list[str]]]) -> None:
    classifier = load_classifier("digits")
    images = real["digits"][0][:20]
    plain = classifier.log_probs(images)
    torch.testing.assert_close(plain.exp().sum(1), torch.ones(20))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(classifier.log_probs(images), plain)


def test_prompts_are_those_of_the_backbones() -> None:
    pixel = pytest.importorskip("jagg_core.backbones.pixel")
    assert CLASSIFIERS["digits"].classes == pixel.DIGITS_FLUX.prompts
    assert set(CLASSIFIERS["emoji"].classes) > set(pixel.EMOJI_FLUX.prompts)
    assert CLASSIFIERS["photos"].classes == pixel.PHOTOS_FLUX.prompts == tuple(p.prompt for p in PHOTOS)


@pytest.mark.parametrize("dataset", SHIPPED)
def test_shipped_files_are_small_fp16_and_say_what_they_are(dataset: str) -> None:
    path = classifier_path(dataset)
    assert path.stat().st_size < 1_000_000
    assert {tensor.dtype for tensor in load_file(path).values()} == {torch.float16}
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
    assert metadata["dataset"] == dataset
    assert tuple(json.loads(metadata["classes"])) == CLASSIFIERS[dataset].classes
    assert float(metadata["held_out_accuracy"]) >= TARGETS[dataset]
    assert json.loads(metadata["settings"])["steps"] == training.RECIPES[dataset].steps


def test_unknown_prompts_and_other_shapes_are_refused() -> None:
    reward = ClassifierLogProb("digits")
    images = torch.zeros(2, 1, 8, 8)
    with pytest.raises(ValueError, match=r"must be of \['0', .*\] for the digits classifier, got \['cat'\]"):
        score(reward, images, ["3", "cat"])
    with pytest.raises(ValueError, match=r"takes 8x8 pixels, got \[2, 1, 16, 16\]"):
        score(reward, torch.zeros(2, 1, 16, 16), ["3", "4"])
    with pytest.raises(ValueError, match="takes 1 channel"):
        score(reward, torch.zeros(2, 3, 8, 8), ["3", "4"])
    with pytest.raises(ValueError, match="got 1 for 2 images"):
        reward(images, ["3"])


def test_the_judge_refuses_what_it_cannot_read() -> None:
    with pytest.raises(ValueError, match="got none"):
        read_as_prompted(torch.zeros(0, 1, 8, 8), [], "digits")
    with pytest.raises(ValueError, match="got 3 for 2 images"):
        read_as_prompted(torch.zeros(2, 1, 8, 8), ["1", "2", "3"], "digits")
    images = torch.zeros(2, 1, 8, 8)
    images[1, 0, 3, 3] = float("nan")
    with pytest.raises(ValueError, match="sample 1"):
        read_as_prompted(images, ["1", "2"], "digits")


def test_the_judge_loads_the_weights_once(monkeypatch: pytest.MonkeyPatch) -> None:
    module.shipped_classifier.cache_clear()
    loads: list[str] = []
    original = load_classifier

    def counting(name: str, device: str = "cpu") -> module.Classifier:
        loads.append(name)
        return original(name, device)

    monkeypatch.setattr(module, "load_classifier", counting)
    for _ in range(3):
        read_as_prompted(torch.zeros(1, 1, 8, 8), ["0"], "digits")
    assert loads == ["digits"]


def test_retraining_writes_a_loadable_file_and_a_seed_repeats(tmp_path: Path) -> None:
    steps: list[int] = []
    state = torch.random.get_rng_state()
    accuracy = train_classifier(
        "digits", tmp_path / "new" / "a.safetensors", 3, 1, lambda step, loss: steps.append(step)
    )
    train_classifier("digits", tmp_path / "b.safetensors", 3, 1)
    train_classifier("digits", tmp_path / "c.safetensors", 3, 2)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert steps == [0, 1, 2]
    first, same, other = (load_file(tmp_path / p) for p in ("new/a.safetensors", "b.safetensors", "c.safetensors"))
    assert first.keys() == same.keys()
    assert all(torch.equal(first[key], same[key]) for key in first)
    assert not all(torch.equal(first[key], other[key]) for key in first)
    loaded = load_classifier("digits", path=tmp_path / "new" / "a.safetensors")
    images, labels = held_out("digits")
    assert (loaded.log_probs(images).argmax(1) == labels).double().mean().item() == accuracy
    assert not any(parameter.requires_grad for parameter in loaded.parameters())


def test_photos_can_be_retrained_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "HELD_OUT_CROPS", 32)
    monkeypatch.setattr(training.held_out, "__defaults__", (32, training.HELD_OUT_SEED))
    accuracy = train_classifier("photos", tmp_path / "p.safetensors", 1, 0)
    assert 0 <= accuracy <= 1
    assert load_classifier("photos", path=tmp_path / "p.safetensors").spec == CLASSIFIERS["photos"]
    with pytest.raises(ValueError, match="another classifier than digits"):
        load_classifier("digits", path=tmp_path / "p.safetensors")


def test_training_refuses_bad_settings_before_it_starts(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="steps must be at least 1, got 0"):
        train_classifier("digits", tmp_path / "x.safetensors", 0, 0)
    with pytest.raises(ValueError, match="got 'cifar'"):
        train_classifier("cifar", tmp_path / "x.safetensors", 1, 0)
    assert not list(tmp_path.iterdir())


@needs_font
def test_smiling_faces_score_above_frowning_ones(real: dict[str, tuple[Tensor, list[str]]]) -> None:
    images, prompts = real["emoji"]
    scores = score(Smiling(), images, ["any"] * len(images))
    smiling, frowning = (scores[[word in p.split() for p in prompts]] for word in ("smiling", "frowning"))
    assert len(frowning) >= 3
    assert smiling.min() > frowning.max() + 1


@pytest.mark.parametrize("dataset", SHIPPED)
def test_missing_weights_name_the_command_that_rebuilds_them(dataset: str, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=f"python -m jagg_core rewards train {dataset}"):
        load_classifier(dataset, path=tmp_path / "none.safetensors")


def test_loading_and_scoring_need_no_training_packages() -> None:
    code = (
        "import sys, torch\n"
        "from jagg_core.rewards import load_reward, score\n"
        "score(load_reward('classifier', dataset='digits'), torch.zeros(1, 1, 8, 8), ['0'])\n"
        "heavy = {'sklearn', 'skimage', 'transformers', 'diffusers', 'pandas', 'matplotlib'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
