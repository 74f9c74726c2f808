"""Rewards by name."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import partial
from typing import Any

import torch

from jagg_core.imports import import_object, source_fingerprint
from jagg_core.options import read_values
from jagg_core.rewards.base import FunctionReward, Reward, WeightedSum
from jagg_core.rewards.classifier import CLASSIFIERS, ClassifierLogProb, Smiling, classifier_spec
from jagg_core.rewards.pixels import Colourfulness, Ink, Random, Redness, Sharpness
from jagg_core.rewards.preference import CLIPSCORE, HPSV21, PICKSCORE, PreferenceSettings, Published, load_preference


def _no_options() -> None:
    """Takes the options of a reward without options."""


@dataclass(frozen=True)
class _Entry:
    """A registered reward.

    Attributes:
        summary: one line.
        channels: numbers of channels that it can score.
        make: loads the reward from the data set, the device and the result of ``settings``.
        settings: takes the options, and refuses bad ones before anything is loaded.
        datasets: data sets that it is made for, and loading needs one of them; none: any images.
    """

    summary: str
    channels: tuple[int, ...]
    make: Callable[[str | None, torch.device | str, Any], Reward]
    settings: Callable[..., object] = _no_options
    datasets: tuple[str, ...] = ()


def _published(summary: str, published: Published) -> _Entry:
    return _Entry(
        summary,
        (3,),
        lambda _, device, settings: load_preference(settings, device),
        settings=partial(PreferenceSettings, published),
    )


_REWARDS: dict[str, _Entry] = {
    "classifier": _Entry(
        "log-probability of the prompt's class under a shipped classifier",
        (1, 3),
        lambda dataset, device, _: ClassifierLogProb(str(dataset), device),
        datasets=tuple(CLASSIFIERS),
    ),
    "smiling": _Entry(
        "log-odds of smiling against frowning faces under the emoji classifier",
        (3,),
        lambda _, device, __: Smiling(device),
        datasets=("emoji",),
    ),
    "colourfulness": _Entry("Hasler and Suesstrunk's colourfulness of RGB images", (3,), lambda *_: Colourfulness()),
    "sharpness": _Entry("mean absolute Laplacian of the luminance", (1, 3), lambda *_: Sharpness()),
    "redness": _Entry("mean of R - (G + B) / 2", (3,), lambda *_: Redness()),
    "ink": _Entry("mean intensity of grey images", (1,), lambda *_: Ink()),
    "random": _Entry("uniform number from a digest of the pixels: a control", (1, 3), lambda *_: Random()),
    "clipscore": _published("cosine of image and prompt under CLIP ViT-L/14, or another CLIP", CLIPSCORE),
    "pickscore": _published("PickScore, on its published scale of about 22", PICKSCORE),
    "hpsv2.1": _published("Human Preference Score v2.1, a cosine", HPSV21),
}

_NAME = r"[A-Za-z_][\w.]*(?::[A-Za-z_][\w.]*)?"
_WEIGHT = r"(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?"
_TERM = re.compile(rf"\s*(?P<sign>[+-]?)\s*(?:(?P<weight>{_WEIGHT})\s*\*\s*)?(?P<name>{_NAME})\s*")


def list_rewards() -> dict[str, str]:
    """Lists the registered names, each with a summary."""
    return {name: entry.summary for name, entry in _REWARDS.items()}


def load_reward(
    name: str, *, dataset: str | None = None, device: torch.device | str = "cpu", options: Sequence[str] = ()
) -> Reward:
    """Loads a reward, or a weighted sum of rewards, by name.

    ``name``: one of `list_rewards`; ``module:function`` for yours, either a function
    ``(images, prompts) -> Tensor[N]`` or an object that is a `Reward`; or a sum such as
    ``classifier+0.5*colourfulness`` or ``classifier-0.1*my_rewards:noisiness``. A published reward's variant may follow
    its name: ``clipscore.clamped``.
    ``dataset``: the shipped data set that the images look like, such as "photos". The classifier needs it; with
    it, a reward that cannot score such images is refused here rather than after the first rollout.
    ``device``: where networks are loaded; they follow the images from there.
    ``options``: `jagg_core.rewards.preference.PreferenceSettings` of published rewards, written
    ``reward.option=value``, such as ``pickscore.path=FOLDER``.

    Raises:
        ValueError: an unknown name (names the nearest match and what is allowed), a sum or an option that cannot be
            read, an unknown data set, or one whose images the reward cannot score, all before anything is loaded; a
            published reward's file that is missing, damaged or another network's.
        FileNotFoundError: shipped weights are missing; says how to rebuild them.
    """
    terms = _checked(name, dataset, options)
    if dataset is None:
        for _, term, _ in terms:
            if term in _REWARDS and _REWARDS[term].datasets:
                raise ValueError(f"reward {term} needs dataset to be one of {list(_REWARDS[term].datasets)}, got None")
    loaded = [(weight, _load_one(term, dataset, device, settings)) for weight, term, settings in terms]
    if len(loaded) == 1 and loaded[0][0] == 1:
        return loaded[0][1]
    return WeightedSum(loaded)


def check_reward(name: str, *, dataset: str | None = None, options: Sequence[str] = ()) -> None:
    """Checks what `load_reward` can check without loading anything; ``dataset=None``: not known yet.

    Raises:
        ValueError: as `load_reward` before anything is loaded.
    """
    _checked(name, dataset, options)


def reward_fingerprints(name: str, reward: Reward) -> dict[str, str]:
    """Computes digests of the source files of each term, with its version if any.

    ``name`` is the one by which `load_reward` loaded ``reward``. Modules that the reward's module imports are not read.
    """
    terms = [term for _, term in reward.terms] if isinstance(reward, WeightedSum) else [reward]
    digests = {}
    for (_, text), term in zip(_parse(name), terms, strict=True):
        modules = [type(term).__module__, *([text.partition(":")[0]] if ":" in text else [])]
        if isinstance(term, FunctionReward):
            modules.append(getattr(term.function, "__module__", None) or type(term.function).__module__)
        version = f", version {term.version}" if hasattr(term, "version") else ""
        digests[text] = f"source {source_fingerprint(*modules)}{version}"
    return digests


def options_of(name: str, options: Sequence[str]) -> list[str]:
    """Selects from ``options`` those for the terms of the reward ``name``, where several rewards share one list.

    Raises:
        ValueError: a sum or an option that cannot be read.
    """
    names = {_split_variant(term)[0] for _, term in _parse(name)}
    return [
        f"{reward}.{text}" for reward, texts in _split_options(options).items() if reward in names for text in texts
    ]


def _checked(text: str, dataset: str | None, options: Sequence[str]) -> list[tuple[float, str, object]]:
    """Reads weight, name and settings of each term."""
    terms = [(weight, *_split_variant(term)) for weight, term in _parse(text)]
    if dataset is not None:
        classifier_spec(dataset)
    for _, name, _ in terms:
        if ":" not in name:
            _check_registered(name, dataset)
    given = _split_options(options)
    names = [name for _, name, _ in terms]
    for reward in given:
        if reward not in names:
            raise ValueError(f"reward options: {reward!r} is not in the reward, which is made of {names}")
    checked: list[tuple[float, str, object]] = []
    for weight, name, variant in terms:
        texts = [*given.get(name, []), *([] if variant is None else [f"variant={variant}"])]
        take = _REWARDS[name].settings if name in _REWARDS else _no_options
        checked.append((weight, name, take(**read_values("reward", name, take, texts))))
    return checked


def _split_variant(term: str) -> tuple[str, str | None]:
    """Splits ``clipscore.clamped`` into the reward and its variant."""
    for name, entry in _REWARDS.items():
        if entry.settings is not _no_options and term.startswith(f"{name}."):
            return name, term.removeprefix(f"{name}.")
    return term, None


def _split_options(options: Sequence[str]) -> dict[str, list[str]]:
    """Sorts ``reward.option=value`` as ``option=value`` by reward."""
    given: dict[str, list[str]] = {}
    for text in options:
        key, equals, value = text.partition("=")
        reward, _, option = key.rpartition(".")
        if not (reward and option and equals):
            raise ValueError(f"reward options must be written reward.option=value, got {text!r}")
        given.setdefault(reward, []).append(f"{option}={value}")
    return given


def _parse(text: str) -> list[tuple[float, str]]:
    terms: list[tuple[float, str]] = []
    position = 0
    while position < len(text) or not terms:
        match = _TERM.match(text, position)
        if match is None or (terms and not match["sign"]):
            raise ValueError(
                f"reward {text!r} cannot be read from {text[position:]!r} on: expected a sum such as "
                f"'classifier+0.5*colourfulness' of {_allowed()}"
            )
        weight = float(match["weight"] or 1)
        terms.append((-weight if match["sign"] == "-" else weight, match["name"]))
        position = match.end()
    return terms


def _allowed() -> str:
    return f"{', '.join(_REWARDS)} or module:function"


def _check_registered(name: str, dataset: str | None) -> None:
    if name not in _REWARDS:
        near = get_close_matches(name.lower(), _REWARDS, n=1, cutoff=0.5)
        hint = f", nearest is {near[0]!r}" if near else ""
        raise ValueError(f"unknown reward {name!r}{hint}; allowed: {_allowed()}")
    if dataset is not None:
        channels = classifier_spec(dataset).channels
        fitting = [
            other
            for other, entry in _REWARDS.items()
            if channels in entry.channels and (not entry.datasets or dataset in entry.datasets)
        ]
        if name not in fitting:
            kind = "grey" if channels == 1 else "RGB"
            raise ValueError(f"reward {name} cannot score the {kind} images of {dataset}; allowed: {fitting}")


def _load_one(name: str, dataset: str | None, device: torch.device | str, settings: object) -> Reward:
    if ":" not in name:
        return _REWARDS[name].make(dataset, device, settings)
    reward = import_object(name, "reward", _allowed())
    if isinstance(reward, type) or not callable(reward):
        raise ValueError(f"reward {name!r} must be a function or an object that is a Reward, got {reward!r}")
    return reward if isinstance(reward, Reward) else FunctionReward(reward, name)
