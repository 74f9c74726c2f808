"""Training data for the shipped backbones: images carried by wheels, and emoji drawn from a Debian package's font.

Needs the ``train`` extra. Nothing is downloaded.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

PHOTO_SHORT_SIDE = 112
"""Photographs are reduced to this many pixels on their short side before they are cropped."""

EMOJI_FONT = Path("/usr/share/fonts/truetype/noto/NotoColorEmoji.ttf")
"""Font of Debian's package ``fonts-noto-color-emoji`` (SIL Open Font License 1.1)."""

EMOJI_PACKAGE = "fonts-noto-color-emoji"

EMOJI_MARGIN = 2
"""Emoji are drawn this many pixels larger than the image, and cropped at random."""

_DRAWN = (
    "😀😂😇😈😉😊😋😍😎😐😕😗😛😜😞😟😠😡😢😦😨😭😮😰😱😲😳😴😵😶😷🙁🙂🤒🤓🤔🤠🤡🤢🥳🥶🧐"
    "😸😹😺😻😽😾😿🙀🐭🐮🐯🐰🐱🐴🐵🐶🐷🐸🐺🐻🐼🐧🐨🐤🐙🐠🐞🐳🐘🐢"
    "🍅🍆🍇🍉🍊🍋🍌🍍🍎🍏🍐🍑🍒🍓🍔🍕🍟🍩🍪🍭🍺❤💔💘💙💚💛💜🖤🤍🤎🧡"
    "🔴🔵🟠🟡🟢🟣🟤🟥🟦🟧🟨🟩🟪🟫📗📘📙🔶🔷"
)

# Unicode's name of U+2764, "heavy black heart", is that of its outline: fonts draw it red
EMOJI: dict[str, str] = {"red heart" if c == "❤" else unicodedata.name(c).lower(): c for c in _DRAWN}
"""Characters by prompt: their Unicode names in small letters."""

EMOJI_HELD_OUT = ("cat face with tears of joy", "large green square", "orange book", "purple heart", "red heart")
"""Prompts whose words are all in other prompts, and whose pictures the backbone is not trained on."""


@dataclass(frozen=True)
class Photo:
    """One photograph: its prompt, file and licence."""

    prompt: str
    package: str
    file: str
    licence: str
    central: float = 1.0
    """Share of each side kept around the centre before cropping (drops black borders)."""


PHOTOS: tuple[Photo, ...] = (
    Photo("astronaut", "skimage.data", "astronaut.png", "public domain (NASA)"),
    Photo("cat", "skimage.data", "chelsea.png", "CC0 (Stefan van der Walt)"),
    Photo("coffee", "skimage.data", "coffee.png", "CC0 (Rachel Michetti)"),
    Photo("galaxies", "skimage.data", "hubble_deep_field.jpg", "public domain (NASA)"),
    Photo("tissue", "skimage.data", "ihc.png", "no known copyright restrictions (CMMI)"),
    Photo("retina", "skimage.data", "retina.jpg", "CC0 (Mikael Häggström)", central=0.6),
    Photo("rocket", "skimage.data", "rocket.jpg", "public domain (SpaceX)"),
    Photo("temple", "sklearn.datasets.images", "china.jpg", "CC BY 2.0 (danielbuechele)"),
    Photo("flower", "sklearn.datasets.images", "flower.jpg", "CC BY 2.0 (vultilion)"),
)


class Crops:
    """Random square crops of photographs, mirrored at random; an endless labelled data set.

    ``sample`` returns images ``[n, 3, size, size]`` in [0, 1] and class ids ``[n]``.
    """

    def __init__(self, images: list[Tensor], size: int) -> None:
        self.images = images
        self.size = size

    def sample(self, n: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Draws ``n`` labelled images."""
        labels = torch.randint(len(self.images), (n,), generator=generator)
        position = torch.rand(n, 2, generator=generator)
        mirrored = torch.rand(n, generator=generator) < 0.5
        crops = []
        for label, (y, x), mirror in zip(labels.tolist(), position.tolist(), mirrored.tolist(), strict=True):
            image = self.images[label]
            top = int(y * (image.shape[1] - self.size + 1))
            left = int(x * (image.shape[2] - self.size + 1))
            crop = image[:, top : top + self.size, left : left + self.size]
            crops.append(crop.flip(-1) if mirror else crop)
        return torch.stack(crops), labels


class Labelled:
    """A finite labelled set, sampled with replacement: images ``[M, C, H, W]`` in [0, 1], labels ``[M]``."""

    def __init__(self, images: Tensor, labels: Tensor) -> None:
        self.images = images
        self.labels = labels

    def sample(self, n: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Draws ``n`` labelled images."""
        index = torch.randint(len(self.images), (n,), generator=generator)
        return self.images[index], self.labels[index]


def digits(split: str = "train") -> Labelled:
    """Loads scikit-learn's handwritten digits, 8x8 grey; every fifth one is held out (``split="test"``)."""
    from sklearn.datasets import load_digits

    raw = load_digits()
    images = torch.tensor(raw.images, dtype=torch.float32).div_(16).unsqueeze(1)
    labels = torch.tensor(raw.target)
    held_out = torch.arange(len(labels)) % 5 == 0
    keep = {"train": ~held_out, "test": held_out, "all": torch.ones_like(held_out)}[split]
    return Labelled(images[keep], labels[keep])


def photos(size: int = 32) -> Crops:
    """Loads crops of the photographs in `PHOTOS`; the class is the photograph."""
    from importlib.resources import as_file, files

    from skimage.io import imread
    from skimage.transform import resize

    images = []
    for photo in PHOTOS:
        with as_file(files(photo.package).joinpath(photo.file)) as path:
            pixels = np.asarray(imread(path))[..., :3]
        height, width = pixels.shape[:2]
        dy, dx = (int(side * (1 - photo.central) / 2) for side in (height, width))
        pixels = pixels[dy : height - dy, dx : width - dx]
        scale = PHOTO_SHORT_SIDE / min(pixels.shape[:2])
        shape = (round(pixels.shape[0] * scale), round(pixels.shape[1] * scale))
        small = resize(pixels, shape, anti_aliasing=True)
        images.append(torch.tensor(small, dtype=torch.float32).permute(2, 0, 1).clamp(0, 1))
    return Crops(images, size)


def emoji(prompts: Sequence[str] = tuple(EMOJI), size: int = 32) -> Crops:
    """Draws the `EMOJI` named by ``prompts`` on white; the class is the prompt.

    Raises:
        FileNotFoundError: the font is missing; names the Debian package that has it.
    """
    from PIL import Image, ImageDraw, ImageFont

    if not EMOJI_FONT.exists():
        raise FileNotFoundError(f"{EMOJI_FONT} is missing; it is in Debian's package {EMOJI_PACKAGE}")
    font = ImageFont.truetype(str(EMOJI_FONT), 109)  # the one size of its bitmaps: 136x128
    side = size + EMOJI_MARGIN
    images = []
    for prompt in prompts:
        canvas = Image.new("RGB", (136, 136), "white")
        ImageDraw.Draw(canvas).text((0, 4), EMOJI[prompt], font=font, embedded_color=True)
        small = np.asarray(canvas.resize((side, side), Image.Resampling.LANCZOS), dtype=np.float32)
        images.append(torch.tensor(small).div_(255).permute(2, 0, 1).contiguous())
    return Crops(images, size)
