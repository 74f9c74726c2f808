"""Rewards by name."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from difflib import get_close_matches

import torch

from jagg_core.imports import import_object
from jagg_core.rewards.base import FunctionReward, Reward, WeightedSum
from jagg_core.rewards.classifier import ClassifierLogProb, classifier_spec
from jagg_core.rewards.pixels import Colourfulness, Ink, Redness, Sharpness


@dataclass(frozen=True)
class _Entry:
    summary: str
    channels: tuple[int, ...]
    make: Callable[[str | None, torch.device | str], Reward]


def _classifier(dataset: str | None, device: torch.device | str) -> Reward:
    if dataset is None:
        raise ValueError("reward classifier needs dataset='digits' or dataset='photos', found None")
    return ClassifierLogProb(dataset, device)


_REWARDS: dict[str, _Entry] = {
    "classifier": _Entry("log-probability of the prompt's class under a shipped classifier", (1, 3), _classifier),
    "colourfulness": _Entry("Hasler and Suesstrunk's colourfulness of RGB images", (3,), lambda *_: Colourfulness()),
    "sharpness": _Entry("mean absolute Laplacian of the luminance", (1, 3), lambda *_: Sharpness()),
    "redness": _Entry("mean of R - (G + B) / 2", (3,), lambda *_: Redness()),
    "ink": _Entry("mean intensity of grey images", (1,), lambda *_: Ink()),
}

_NAME = r"[A-Za-z_][\w.]*(?::[A-Za-z_][\w.]*)?"
_WEIGHT = r"(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?"
_TERM = re.compile(rf"\s*(?P<sign>[+-]?)\s*(?:(?P<weight>{_WEIGHT})\s*\*\s*)?(?P<name>{_NAME})\s*")


def list_rewards() -> dict[str, str]:
    """Registered names, each with one line on what it is."""
    return {name: entry.summary for name, entry in _REWARDS.items()}


def load_reward(name: str, *, dataset: str | None = None, device: torch.device | str = "cpu") -> Reward:
    """A reward, or a weighted sum of rewards, by name.

    ``name``: one of `list_rewards`; ``module:function`` for your own, either a function
    ``(images, prompts) -> Tensor[N]`` or an object that is a `Reward`; or a sum such as
    ``classifier+0.5*colourfulness`` or ``classifier-0.1*my_rewards:noisiness``.
    ``dataset``: the shipped data set that the images look like ("digits" or "photos"). The classifier needs it; with
    it, a reward that cannot score such images is refused here rather than after the first rollout.
    ``device``: where networks are loaded; they follow the images from there.

    Raises:
        ValueError: an unknown name (names the nearest match and what is allowed), a sum that cannot be read, an unknown
            data set, or one whose images the reward cannot score.
        FileNotFoundError: shipped weights are missing; says how to rebuild them.
    """
    terms = _parse(name)
    if dataset is not None:
        classifier_spec(dataset)
    # every name is checked before anything is loaded
    for _, term in terms:
        if ":" not in term:
            _check_registered(term, dataset)
    loaded = [(weight, _load_one(term, dataset, device)) for weight, term in terms]
    if len(loaded) == 1 and loaded[0][0] == 1:
        return loaded[0][1]
    return WeightedSum(loaded)


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
        if channels not in _REWARDS[name].channels:
            kind = "grey" if channels == 1 else "RGB"
            fitting = [other for other, entry in _REWARDS.items() if channels in entry.channels]
            raise ValueError(f"reward {name} cannot score the {kind} images of {dataset}; allowed: {fitting}")


def _load_one(name: str, dataset: str | None, device: torch.device | str) -> Reward:
    if ":" not in name:
        return _REWARDS[name].make(dataset, device)
    found = import_object(name, "reward", _allowed())
    if isinstance(found, type) or not callable(found):
        raise ValueError(f"reward {name!r} must be a function or an object that is a Reward, found {found!r}")
    return found if isinstance(found, Reward) else FunctionReward(found, name)
