"""Images as CLIP takes them, against transformers' own processor, which works with PIL."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from jagg_core.rewards.preference.preprocessing import Fit, Preprocessing, read_preprocessing

MEAN, STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
STEP = 1.001 / 255 / min(STD)
"""One of 255 after the division by ``std``: PIL's weights are fixed-point, so that a value may be rounded otherwise."""

WRITTEN: dict[str, Any] = {
    "size": {"shortest_edge": 28},
    "crop_size": {"height": 28, "width": 28},
    "image_mean": list(MEAN),
    "image_std": list(STD),
    "resample": 3,
}


def bytes_of(height: int, width: int) -> Tensor:
    """Noise over a gradient, uint8 ``[2, 3, H, W]``."""
    noise = torch.randint(0, 256, (2, 3, height, width), generator=torch.Generator().manual_seed(height))
    slope = torch.linspace(0, 255, width).expand_as(noise)
    return (0.3 * noise + 0.7 * slope).round().byte()


def read(folder: Path, changes: dict[str, Any]) -> Preprocessing:
    file = folder / "preprocessor_config.json"
    file.write_text(json.dumps(WRITTEN | changes))
    return read_preprocessing(file, 28, "crop")


def preprocessing(fit: Fit) -> Preprocessing:
    """Without normalisation."""
    return Preprocessing(28, 28, (0.0,) * 3, (1.0,) * 3, fit)


@pytest.mark.parametrize(("resized", "size"), [(28, 28), (32, 27)])
@pytest.mark.parametrize("shape", [(28, 28), (64, 64), (61, 91), (97, 50), (20, 24), (8, 8), (29, 300)])
def test_crops_are_those_of_transformers(shape: tuple[int, int], resized: int, size: int) -> None:
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

    crop = {"height": size, "width": size}
    processor = CLIPImageProcessorPil(size={"shortest_edge": resized}, crop_size=crop)
    images = bytes_of(*shape)
    expected = processor(list(images), return_tensors="pt")["pixel_values"]
    found = Preprocessing(size, resized, MEAN, STD)(images / 255)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, expected, rtol=0, atol=STEP)
    assert ((found - expected).abs() > 1e-5).float().mean() < 0.01


def test_padding_keeps_the_whole_image_between_black_bars() -> None:
    wide = torch.full((1, 3, 20, 60), 0.4)
    wide[:, 0, :, 45:] = 1
    found = preprocessing("pad")(wide)
    assert found.shape == (1, 3, 28, 28)
    # 60 x 20 becomes 28 x 9: of the other 19 rows 9 are above and 10 below
    assert not found[:, :, :9].any()
    assert not found[:, :, 18:].any()
    torch.testing.assert_close(found[:, 1, 9:18], torch.full((1, 9, 28), 0.4))
    torch.testing.assert_close(found[:, 0, 9:18, -5:], torch.ones(1, 9, 5), rtol=0, atol=1e-2)
    tall = preprocessing("pad")(wide.transpose(2, 3))
    torch.testing.assert_close(tall, found.transpose(2, 3))


def test_padding_a_square_is_cropping_it_but_for_overshoots() -> None:
    mild = 0.5 + 0.2 * bytes_of(64, 64) / 255
    edge = (torch.arange(64) < 30).float().expand(1, 3, 64, 64)
    for images, over in ((mild, False), (edge, True)):
        crop, pad = (preprocessing(fit)(images) for fit in ("crop", "pad"))
        assert bool(pad.max() > 1) is over
        torch.testing.assert_close(crop, pad.clamp(0, 1), rtol=0, atol=1.01 / 255)


def test_black_bars_are_normalised_too() -> None:
    found = Preprocessing(28, 28, MEAN, STD, "pad")(torch.ones(1, 3, 14, 28))
    torch.testing.assert_close(found[0, :, 0, 0], -torch.tensor(MEAN) / torch.tensor(STD))


def test_a_batch_gives_what_single_images_give() -> None:
    images = bytes_of(61, 91) / 255
    for preprocess in (preprocessing("crop"), preprocessing("pad")):
        assert torch.equal(preprocess(images)[1:], preprocess(images[1:]))


def test_configurations_of_every_age_are_read(tmp_path: Path) -> None:
    wanted = Preprocessing(28, 28, MEAN, STD)
    assert read(tmp_path, {}) == wanted
    assert read(tmp_path, {"size": 28, "crop_size": 28}) == wanted
    assert read(tmp_path, {"size": {"shortest_edge": 32}}) == Preprocessing(28, 32, MEAN, STD)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"image_mean": None}, r"image_mean in .*preprocessor_config.json must be three numbers, got None"),
        ({"image_std": [1.0]}, r"image_std in .* must be three numbers, got \[1.0\]"),
        ({"crop_size": 32}, "crop_size in .* must be the network's 28, got 32"),
        ({"crop_size": {"height": 28, "width": 30}}, "crop_size in .* must be the network's 28, got"),
        ({"crop_size": None}, "crop_size in .* must be the network's 28, got None"),
        ({"size": {"height": 28, "width": 28}}, "size in .* must be a shortest_edge of 28 or more, got"),
        ({"size": 20}, "size in .* must be a shortest_edge of 28 or more, got 20"),
        ({"resample": 2}, "must ask for .* and resample 3, got resample 2"),
        ({"do_center_crop": False}, "must ask for .*, got do_center_crop false"),
    ],
)
def test_what_is_not_done_is_refused(tmp_path: Path, changes: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        read(tmp_path, changes)
