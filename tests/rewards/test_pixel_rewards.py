"""Pixel rewards against values worked out by hand."""

import math

import pytest
import torch

from jagg_core.rewards import Colourfulness, Ink, Random, Redness, Reward, Sharpness, score


def uniform(red: float, green: float, blue: float, side: int = 6) -> torch.Tensor:
    return torch.tensor([red, green, blue], dtype=torch.float32).view(1, 3, 1, 1).expand(1, 3, side, side).clone()


def checkerboard(side: int = 6) -> torch.Tensor:
    row = torch.arange(side)
    return ((row[:, None] + row) % 2).float().view(1, 1, side, side)


def test_colourfulness_is_zero_for_grey_images() -> None:
    grey = torch.rand(4, 1, 5, 7, generator=torch.Generator().manual_seed(0)).expand(4, 3, 5, 7)
    assert torch.equal(score(Colourfulness(), grey, ["x"] * 4), torch.zeros(4))


def test_colourfulness_of_half_red_half_blue() -> None:
    image = uniform(1, 0, 0)
    image[..., 3:] = uniform(0, 0, 1)[..., 3:]
    # rg is 1 and 0: mean 1/2, variance 1/4. yb is 1/2 and -1: mean -1/4, variance 9/16
    by_hand = math.sqrt(1 / 4 + 9 / 16) + 0.3 * math.sqrt(1 / 4 + 1 / 16)
    assert score(Colourfulness(), image, ["x"]).item() == pytest.approx(by_hand, abs=1e-6)


def test_colourfulness_of_one_colour_is_its_mean_term() -> None:
    # rg = 0.6, yb = 0.1
    value = score(Colourfulness(), uniform(0.8, 0.2, 0.4), ["x"]).item()
    assert value == pytest.approx(0.3 * math.hypot(0.6, 0.1), abs=1e-6)


@pytest.mark.parametrize("side", [3, 8, 33])
def test_sharpness_of_constant_images_is_exactly_zero(side: int) -> None:
    assert score(Sharpness(), uniform(0.1, 0.7, 0.3, side), ["x"]).item() == 0
    assert score(Sharpness(), torch.full((1, 1, side, side), 0.3), ["x"]).item() == 0


def test_sharpness_of_checkerboards_and_points() -> None:
    assert score(Sharpness(), checkerboard(), ["x"]).item() == 4
    assert score(Sharpness(), checkerboard().expand(1, 3, 6, 6), ["x"]).item() == pytest.approx(4, abs=1e-5)
    point = torch.zeros(1, 1, 5, 5)
    point[..., 2, 2] = 1  # nine interior pixels: 4 at the point, 1 at each of its four neighbours
    assert score(Sharpness(), point, ["x"]).item() == pytest.approx(8 / 9, abs=1e-6)


def test_sharpness_weighs_channels_as_luminance() -> None:
    for channel, weight in enumerate((0.299, 0.587, 0.114)):
        image = torch.zeros(1, 3, 6, 6)
        image[:, channel] = checkerboard()[:, 0]
        assert score(Sharpness(), image, ["x"]).item() == pytest.approx(4 * weight, abs=1e-5)


@pytest.mark.parametrize(("colour", "expected"), [((1, 0, 0), 1), ((0, 1, 0), -0.5), ((0, 0, 1), -0.5), ((1, 1, 1), 0)])
def test_redness(colour: tuple[float, float, float], expected: float) -> None:
    assert score(Redness(), uniform(*colour), ["x"]).item() == expected


def test_ink_is_the_share_of_bright_pixels() -> None:
    image = torch.zeros(2, 1, 4, 4)
    image[1, 0, 0] = 1
    assert score(Ink(), image, ["x", "y"]).tolist() == [0, 0.25]


@pytest.mark.parametrize("reward", [Colourfulness(), Sharpness(), Redness(), Ink(), Random()], ids=lambda r: r.name)
def test_a_batch_gives_what_single_images_give(reward: Reward) -> None:
    channels = 1 if isinstance(reward, Ink) else 3
    images = torch.rand(7, channels, 16, 16, generator=torch.Generator().manual_seed(1))
    before = images.clone()
    together = score(reward, images, ["x"] * 7)
    alone = torch.cat([score(reward, image[None], ["x"]) for image in images])
    torch.testing.assert_close(together, alone, rtol=1e-6, atol=1e-7)
    assert together.unique().numel() == 7
    assert torch.equal(images, before)


@pytest.mark.parametrize(
    ("reward", "channels", "message"),
    [
        (Colourfulness(), 1, r"colourfulness takes 3 channels \(RGB\), got 1-channel \(grey\)"),
        (Redness(), 1, "redness takes 3 channels"),
        (Ink(), 3, r"ink takes 1 channel \(grey\), got 3-channel"),
        (Sharpness(), 4, "sharpness takes 1 channel .* or 3 channels"),
    ],
)
def test_wrong_channels_are_refused(reward: Reward, channels: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        score(reward, torch.zeros(1, channels, 4, 4), ["x"])


def test_random_is_uniform_and_sees_nothing() -> None:
    images = torch.rand(400, 1, 4, 4, generator=torch.Generator().manual_seed(0))
    values = score(Random(), images, ["x"] * 400)
    assert values.min() >= 0 and values.max() < 1
    assert values.mean().item() == pytest.approx(0.5, abs=4 / (12 * 400) ** 0.5)
    assert abs(torch.corrcoef(torch.stack([values, images.flatten(1).mean(1)]))[0, 1]) < 0.2


def test_sharpness_refuses_images_without_an_interior() -> None:
    with pytest.raises(ValueError, match="3 pixels or more"):
        score(Sharpness(), torch.zeros(1, 1, 2, 8), ["x"])
