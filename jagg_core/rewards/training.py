"""Trains the shipped classifiers from a seed, on the real images of `jagg_core.backbones.datasets`.

Noise, gain and shifts are added, so that slight imperfections of generated images do not mislead the classifier. Label
smoothing leaves the log-probability of a good image room to grow as a reward. Needs the ``train`` extra.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from jagg_core.backbones.datasets import Crops, Labelled, digits, emoji, photos
from jagg_core.backbones.training import one_cycle
from jagg_core.checks import require_at_least
from jagg_core.files import write_tensors
from jagg_core.rewards.classifier import Classifier, ClassifierSpec, classifier_spec, shipped_classifier, spec_json

HELD_OUT_SEED = 2**40
"""Seed of the crops that a classifier of photos or emoji is judged on; far from the usual small seeds."""

HELD_OUT_CROPS = 2048


@dataclass(frozen=True)
class ClassifierTraining:
    """Settings of one training run.

    Each sample is shifted by up to ``max_shift`` pixels, scaled by up to ``1 +- max_gain``, and gets noise of a
    standard deviation of up to ``max_noise``, in units of intensity.
    """

    steps: int
    batch: int = 128
    learning_rate: float = 3e-3
    weight_decay: float = 0.05
    label_smoothing: float = 0.1
    max_noise: float = 0.15
    max_gain: float = 0.1
    max_shift: int = 0
    seed: int = 0


# photos and emoji are cropped at random for every sample, which shifts them already
RECIPES: dict[str, ClassifierTraining] = {
    "digits": ClassifierTraining(steps=1500, max_shift=1),
    "photos": ClassifierTraining(steps=400, batch=64),
    "emoji": ClassifierTraining(steps=600, batch=64),
}
"""The settings that the shipped weights were trained with."""


def held_out(dataset: str, crops: int = HELD_OUT_CROPS, seed: int = HELD_OUT_SEED) -> tuple[Tensor, Tensor]:
    """Loads real images that judge a classifier: ``[M, C, H, W]`` in [0, 1] and class ids ``[M]``.

    Digits: the whole held-out fifth, never trained on. Photos and emoji: ``crops`` fresh crops; they come from
    the same pictures as the training crops, so they measure recognition of these pictures, nothing wider.
    """
    data = _pictures(classifier_spec(dataset), "test")
    if isinstance(data, Labelled):
        return data.images, data.labels
    return data.sample(crops, torch.Generator().manual_seed(seed))


def _pictures(spec: ClassifierSpec, split: str = "train") -> Crops | Labelled:
    """Loads a classifier's data; digits alone have a split."""
    if spec.dataset == "digits":
        return digits(split)
    return emoji(spec.classes, spec.size) if spec.dataset == "emoji" else photos(spec.size)


def _augment(images: Tensor, settings: ClassifierTraining, generator: torch.Generator) -> Tensor:
    """Shifts, scales and adds noise to images ``[N, C, H, W]``, each sample by a random amount; clamped to [0, 1]."""
    n, _, height, width = images.shape
    if settings.max_shift:
        pad = settings.max_shift
        padded = F.pad(images, (pad, pad, pad, pad))
        offsets = torch.randint(2 * pad + 1, (n, 2), generator=generator).tolist()
        images = torch.stack(
            [image[:, y : y + height, x : x + width] for image, (y, x) in zip(padded, offsets, strict=True)]
        )
    amount = torch.rand(n, 2, 1, 1, 1, generator=generator)
    gain = 1 + settings.max_gain * (2 * amount[:, 0] - 1)
    noise = settings.max_noise * amount[:, 1] * torch.randn(images.shape, generator=generator)
    return (images * gain + noise).clamp(0, 1)


def train_classifier(
    dataset: str,
    path: Path | str,
    steps: int | None = None,
    seed: int = 0,
    progress: Callable[[int, float], None] | None = None,
) -> float:
    """Trains the classifier of ``dataset`` from scratch and writes it to ``path`` in half precision.

    ``steps``: the recipe's number where not given. ``progress(step, loss)`` is called after every step. Returns the
    accuracy, in [0, 1], of the weights as written, on `held_out`; it is also in the file's metadata. The same seed
    gives the same file, on the same machine and number of threads. Needs the ``train`` extra.

    Raises:
        ValueError: a data set without a classifier; fewer than one step.
        FloatingPointError: the loss is not finite.
    """
    spec = classifier_spec(dataset)
    recipe = RECIPES[dataset]
    settings = replace(recipe, steps=recipe.steps if steps is None else steps, seed=seed)
    require_at_least(settings, steps=1)
    data = _pictures(spec)
    generator = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        classifier = Classifier(spec).train()
    optimizer = torch.optim.AdamW(
        classifier.parameters(), lr=settings.learning_rate, weight_decay=settings.weight_decay
    )
    schedule = one_cycle(optimizer, settings.learning_rate, settings.steps)
    for step in range(settings.steps):
        images, labels = data.sample(settings.batch, generator)
        log_probs = classifier(_augment(images, settings, generator))
        loss = F.cross_entropy(log_probs, labels, label_smoothing=settings.label_smoothing)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(classifier.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        value = loss.item()
        if not value < float("inf"):
            raise FloatingPointError(f"the loss is {value} at step {step}")
        if progress is not None:
            progress(step, value)
    tensors = {key: tensor.detach().half().contiguous() for key, tensor in classifier.state_dict().items()}
    classifier.load_state_dict({key: tensor.float() for key, tensor in tensors.items()})
    images, labels = held_out(dataset)
    accuracy = (classifier.eval().log_probs(images).argmax(1) == labels).double().mean().item()
    metadata = {
        "spec": spec_json(spec),
        "dataset": dataset,
        "classes": json.dumps(spec.classes),
        "held_out_accuracy": f"{accuracy:.4f}",
        "held_out_images": str(len(images)),
        "settings": json.dumps(asdict(settings), sort_keys=True),
    }
    write_tensors(Path(path), tensors, metadata)
    shipped_classifier.cache_clear()
    return accuracy
