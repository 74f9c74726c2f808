"""Small convolutional classifiers of the shipped data sets, as rewards and as a judge."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from importlib.resources import files
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors import safe_open
from torch import Tensor, nn

from jagg_core.backbones.datasets import EMOJI, PHOTOS
from jagg_core.hub import fingerprint
from jagg_core.rewards.base import check_images

CHUNK = 512


@dataclass(frozen=True)
class ClassifierSpec:
    """Data and layers of a classifier.

    One 3x3 convolution per entry of ``widths``, each followed by GroupNorm and SiLU. Then the mean over positions, or
    with ``pool=False`` every position, goes into one linear layer.
    """

    dataset: str
    classes: tuple[str, ...]
    channels: int
    size: int
    widths: tuple[int, ...]
    strides: tuple[int, ...]
    pool: bool


CLASSIFIERS: dict[str, ClassifierSpec] = {
    "digits": ClassifierSpec(
        dataset="digits",
        classes=tuple("0123456789"),
        channels=1,
        size=8,
        widths=(32, 64, 64),
        strides=(1, 1, 2),
        pool=False,
    ),
    "photos": ClassifierSpec(
        dataset="photos",
        classes=tuple(photo.prompt for photo in PHOTOS),
        channels=3,
        size=32,
        widths=(32, 64, 96, 96),
        strides=(1, 2, 2, 2),
        pool=True,
    ),
    "emoji": ClassifierSpec(
        dataset="emoji",
        classes=tuple(EMOJI),
        channels=3,
        size=32,
        widths=(32, 64, 96, 128),
        strides=(1, 2, 2, 2),
        pool=True,
    ),
}
"""The classifiers that ship, by data set."""


class Classifier(nn.Module):
    """A convolutional classifier; its norms are per sample, so a batch gives what single images give."""

    def __init__(self, spec: ClassifierSpec) -> None:
        super().__init__()
        self.spec = spec
        layers: list[nn.Module] = []
        width, side = spec.channels, spec.size
        for out, stride in zip(spec.widths, spec.strides, strict=True):
            layers += [nn.Conv2d(width, out, 3, stride=stride, padding=1), nn.GroupNorm(8, out), nn.SiLU()]
            width, side = out, -(-side // stride)
        self.features = nn.Sequential(*layers)
        self.head = nn.Linear(width if spec.pool else width * side * side, len(spec.classes))

    @property
    def device(self) -> torch.device:
        """Returns the device of the weights."""
        return self.head.weight.device

    def forward(self, images: Tensor) -> Tensor:
        """Computes from images ``[N, C, size, size]`` in [0, 1] the log-probabilities ``[N, classes]``."""
        features = self.features(2 * images - 1)
        features = features.mean((2, 3)) if self.spec.pool else features.flatten(1)
        return F.log_softmax(self.head(features), dim=-1)

    def class_ids(self, prompts: Sequence[str]) -> Tensor:
        """Returns the class of each prompt, ``[N]``, on the classifier's device.

        Raises:
            ValueError: a prompt that is none of the classes.
        """
        unknown = sorted({str(p) for p in prompts} - set(self.spec.classes))
        if unknown:
            known = list(self.spec.classes)
            raise ValueError(f"prompts must be of {known} for the {self.spec.dataset} classifier, got {unknown}")
        return torch.tensor([self.spec.classes.index(p) for p in prompts], dtype=torch.long, device=self.device)

    def log_probs(self, images: Tensor) -> Tensor:
        """Computes `forward` in fp32 whatever autocast says, on the images' device (the weights follow).

        Raises:
            ValueError: images of another shape than the classifier was trained on.
        """
        check_images(images, f"the {self.spec.dataset} classifier", channels=(self.spec.channels,))
        size = self.spec.size
        if images.shape[2:] != (size, size):
            raise ValueError(
                f"images: the {self.spec.dataset} classifier takes {size}x{size} pixels, got {list(images.shape)}"
            )
        if self.device != images.device:
            self.to(images.device)
        with torch.autocast(images.device.type, enabled=False):
            return torch.cat([self(chunk) for chunk in images.float().split(CHUNK)])


class ClassifierLogProb:
    """``log p(prompt's class | image)`` under a shipped classifier: at most 0, about -0.1 for a clear image.

    Attributes:
        version: fingerprint of its weights.

    Raises:
        ValueError: a data set without a classifier.
        FileNotFoundError: its weights are missing; says how to rebuild them.
    """

    name = "classifier"

    def __init__(self, dataset: str, device: torch.device | str = "cpu") -> None:
        self.classifier = load_classifier(dataset, device)
        self.version = fingerprint([classifier_path(dataset)])

    def __call__(self, images: Tensor, prompts: Sequence[str]) -> Tensor:
        """Computes the log-probability of each prompt's class, ``[N]``.

        Raises:
            ValueError: a prompt that is no class; images of another shape; unequal numbers of images and prompts.
        """
        return self.classifier.log_probs(images).gather(1, _targets(self.classifier, images, prompts)).squeeze(1)


class Smiling:
    """Log-odds of smiling against frowning faces under the emoji classifier; ignores the prompt.

    ``log p(classes with the word smiling) - log p(classes with the word frowning)``; it means something on faces only.

    Attributes:
        version: fingerprint of the classifier's weights.

    Raises:
        FileNotFoundError: the weights are missing; says how to rebuild them.
    """

    name = "smiling"

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.classifier = load_classifier("emoji", device)
        self.version = fingerprint([classifier_path("emoji")])
        classes = [name.split() for name in self.classifier.spec.classes]
        self.sides = [[k for k, words in enumerate(classes) if word in words] for word in ("smiling", "frowning")]

    def __call__(self, images: Tensor, prompts: Sequence[str]) -> Tensor:
        """Computes the log-odds of every image, ``[N]``.

        Raises:
            ValueError: images of another shape than the emoji.
        """
        log_probs = self.classifier.log_probs(images)
        smiling, frowning = (log_probs[:, side].logsumexp(1) for side in self.sides)
        return smiling - frowning


def read_as_prompted(images: Tensor, prompts: Sequence[str], dataset: str) -> float:
    """Computes the share of images ``[N, C, H, W]`` in [0, 1] whose most probable class is their prompt.

    It asks the network that `ClassifierLogProb` rewards: after training on that reward it is no independent judge.

    Raises:
        ValueError: no images, a prompt that is no class, images of another shape, unequal numbers of both, or
            log-probabilities that are not finite (an arg-max would read NaN as a class).
    """
    if len(images) == 0:
        raise ValueError("images must have at least one, got none")
    classifier = shipped_classifier(dataset, str(images.device))
    log_probs = classifier.log_probs(images)
    undefined = ~log_probs.isfinite().all(1)
    if undefined.any():
        raise ValueError(f"images: sample {int(undefined.nonzero()[0])} has log-probabilities that are not finite")
    hits = log_probs.argmax(1, keepdim=True) == _targets(classifier, images, prompts)
    return hits.double().mean().item()


def _targets(classifier: Classifier, images: Tensor, prompts: Sequence[str]) -> Tensor:
    """Returns class ids ``[N, 1]`` on the images' device."""
    if len(images) != len(prompts):
        raise ValueError(f"prompts: one per image is needed, got {len(prompts)} for {len(images)} images")
    return classifier.class_ids(prompts).to(images.device).unsqueeze(1)


def classifier_path(dataset: str) -> Path:
    """Returns the file of the shipped weights for a data set."""
    return Path(str(files(__package__).joinpath("weights", f"{dataset}-classifier.safetensors")))


def load_classifier(dataset: str, device: torch.device | str = "cpu", *, path: Path | str | None = None) -> Classifier:
    """Loads the trained classifier of ``dataset``, one of `CLASSIFIERS`, fp32, in eval mode, without gradients.

    ``path``: another file than the shipped one.

    Raises:
        ValueError: a data set without a classifier; a file of another data set, other classes or other layers.
        FileNotFoundError: the weights are missing; says how to rebuild them.
    """
    spec = classifier_spec(dataset)
    path = classifier_path(dataset) if path is None else Path(path)
    if not path.exists():
        raise FileNotFoundError(f"{path} is missing; rebuild it with: python -m jagg_core rewards train {dataset}")
    with safe_open(path, framework="pt") as file:
        stored = (file.metadata() or {}).get("spec")
        tensors = {key: file.get_tensor(key).float() for key in file.keys()}  # noqa: SIM118 (not a dict)
    if stored != spec_json(spec):
        raise ValueError(
            f"{path} holds another classifier than {dataset} has now (its settings: {stored}); "
            f"rebuild it with: python -m jagg_core rewards train {dataset}"
        )
    classifier = Classifier(spec)
    classifier.load_state_dict(tensors)
    return classifier.to(device).eval().requires_grad_(False)


@lru_cache(maxsize=4)
def shipped_classifier(dataset: str, device: str) -> Classifier:
    """Loads a shipped classifier once per device."""
    return load_classifier(dataset, device)


def classifier_spec(dataset: str) -> ClassifierSpec:
    """Returns the specification of a data set's classifier.

    Raises:
        ValueError: there is none; names those that exist.
    """
    if dataset not in CLASSIFIERS:
        raise ValueError(f"dataset must be one of {sorted(CLASSIFIERS)}, got {dataset!r}")
    return CLASSIFIERS[dataset]


def spec_json(spec: ClassifierSpec) -> str:
    """Writes a specification as canonical JSON, as stored in the weights' metadata."""
    return json.dumps(asdict(spec), sort_keys=True)
