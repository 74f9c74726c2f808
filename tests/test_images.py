"""Contact sheets: where each pixel goes, and PNG files that hold exactly that."""

from __future__ import annotations

import io

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from jagg_core.images import image_grid, png_bytes


def images(n: int, channels: int = 3, height: int = 2, width: int = 3) -> Tensor:
    return torch.rand(n, channels, height, width, generator=torch.Generator().manual_seed(0)) * 0.9


@pytest.mark.parametrize(("n", "columns", "rows"), [(5, 3, 2), (6, 3, 2), (1, 1, 1), (2, 4, 1), (3, 1, 3)])
@pytest.mark.parametrize(("scale", "gap"), [(3, 1), (1, 0), (2, 4)])
def test_geometry(n: int, columns: int, rows: int, scale: int, gap: int) -> None:
    pictures = images(n)
    height, width = 2 * scale + gap, 3 * scale + gap
    expected = torch.ones(3, rows * height + gap, columns * width + gap)
    for i in range(n):
        for y in range(2 * scale):
            for x in range(3 * scale):
                spot = (slice(None), (i // columns) * height + gap + y, (i % columns) * width + gap + x)
                expected[spot] = pictures[i, :, y // scale, x // scale]
    assert torch.equal(image_grid(pictures, columns, scale, gap), expected)


@pytest.mark.parametrize(("height", "width", "scale"), [(24, 24, 4), (32, 16, 3), (96, 1, 1), (60, 40, 1), (8, 200, 1)])
def test_small_images_are_enlarged(height: int, width: int, scale: int) -> None:
    pictures = images(2, height=height, width=width)
    assert torch.equal(image_grid(pictures, 2), image_grid(pictures, 2, scale))


def test_grey_becomes_rgb() -> None:
    grey = images(2, channels=1)
    assert torch.equal(image_grid(grey, 2), image_grid(grey.repeat(1, 3, 1, 1), 2))


def test_samples_of_a_model_are_taken_as_they_are() -> None:
    pictures = images(2).to(torch.bfloat16).requires_grad_()
    found = image_grid(pictures, 2)
    assert (found.dtype, found.requires_grad) == (torch.float32, False)
    assert torch.equal(found, image_grid(pictures.detach().float(), 2))


@pytest.mark.parametrize("shape", [(0, 3, 2, 2), (1, 2, 2, 2), (1, 4, 2, 2), (3, 2, 2), (2, 2)])
def test_what_is_no_image_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=rf"images must have shape .*, got \[{', '.join(map(str, shape))}\]"):
        image_grid(torch.zeros(shape), 1)


@pytest.mark.parametrize(("columns", "scale"), [(0, 3), (-1, 3), (2, 0)])
def test_sizes_out_of_range_are_refused(columns: int, scale: int) -> None:
    with pytest.raises(ValueError, match=f"columns and scale must be at least 1, got {columns} and {scale}"):
        image_grid(images(1), columns, scale)


def test_a_png_holds_the_same_pixels() -> None:
    levels = torch.arange(256).reshape(16, 16)
    picture = torch.stack([levels, levels.T, 255 - levels])
    with Image.open(io.BytesIO(png_bytes(picture / 255))) as read:
        assert (read.format, read.mode, read.size) == ("PNG", "RGB", (16, 16))
        assert np.array_equal(np.asarray(read), picture.permute(1, 2, 0).numpy())


def test_a_png_rounds_and_clamps() -> None:
    picture = torch.tensor([-1.0, 0.0, 0.499 / 255, 0.501 / 255, 1.0, 2.0]).expand(3, 1, -1)
    with Image.open(io.BytesIO(png_bytes(picture))) as read:
        assert np.asarray(read)[0, :, 0].tolist() == [0, 0, 0, 1, 255, 255]


def test_the_same_picture_is_the_same_file() -> None:
    picture = image_grid(images(4), 2)
    assert png_bytes(picture) == png_bytes(picture.clone())
