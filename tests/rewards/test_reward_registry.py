"""Rewards by name, your own, and sums written as text."""

import sys
from pathlib import Path

import pytest
import torch

from jagg_core.rewards import ClassifierLogProb, Ink, Redness, Reward, list_rewards, load_reward, score

IMAGES = torch.rand(3, 3, 32, 32, generator=torch.Generator().manual_seed(0))
PROMPTS = ["cat", "temple", "rocket"]


@pytest.fixture
def own_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "own_rewards.py").write_text(
        "class Length:\n"
        "    name = 'length'\n"
        "    def __call__(self, images, prompts):\n"
        "        return images.new_tensor([len(p) for p in prompts])\n"
        "length = Length()\n"
        "def brightness(images, prompts):\n"
        "    return images.mean((1, 2, 3))\n"
        "number = 3\n"
    )
    (tmp_path / "own_broken.py").write_text("import a_module_that_is_not_there\n")
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("own_rewards", "own_broken"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return "own_rewards"


def test_every_listed_name_loads_under_its_name() -> None:
    shipped = ("classifier", "smiling", "colourfulness", "sharpness", "redness", "ink", "random")
    assert tuple(list_rewards()) == (*shipped, "clipscore", "pickscore", "hpsv2.1")
    for name in shipped:
        reward = load_reward(name, dataset={"ink": "digits", "smiling": "emoji"}.get(name, "photos"))
        assert isinstance(reward, Reward)
        assert reward.name == name
    assert isinstance(load_reward("ink"), Ink)
    assert isinstance(load_reward("classifier", dataset="digits"), ClassifierLogProb)


@pytest.mark.parametrize(
    ("text", "weights"),
    [
        ("classifier+0.5*colourfulness", {"classifier": 1, "colourfulness": 0.5}),
        (" classifier - 1e-2 * sharpness + 2.*redness", {"classifier": 1, "sharpness": -0.01, "redness": 2}),
        ("-redness", {"redness": -1}),
        (".25*redness", {"redness": 0.25}),
        ("redness+redness", {"redness": 2}),
    ],
)
def test_a_weighted_sum_equals_the_sum(text: str, weights: dict[str, float]) -> None:
    total = load_reward(text, dataset="photos")
    by_hand = sum(w * score(load_reward(n, dataset="photos"), IMAGES, PROMPTS) for n, w in weights.items())
    torch.testing.assert_close(score(total, IMAGES, PROMPTS), by_hand)
    again = load_reward(total.name, dataset="photos")
    assert again.name == total.name
    assert torch.equal(score(again, IMAGES, PROMPTS), score(total, IMAGES, PROMPTS))


def test_your_own_function_and_object(own_module: str) -> None:
    function = load_reward(f"{own_module}:brightness")
    assert function.name == f"{own_module}:brightness"
    torch.testing.assert_close(score(function, IMAGES, PROMPTS), IMAGES.mean((1, 2, 3)))
    assert load_reward(f"{own_module}:length").name == "length"
    total = load_reward(f"redness-0.1*{own_module}:length", dataset="photos")
    by_hand = score(Redness(), IMAGES, PROMPTS) - 0.1 * torch.tensor([3.0, 6.0, 6.0])
    torch.testing.assert_close(score(total, IMAGES, PROMPTS), by_hand)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no_such_module_anywhere:f", "there is no module 'no_such_module_anywhere'"),
        ("own_rewards:missing", "own_rewards has no 'missing'"),
        ("own_rewards:number", "must be a function or an object"),
        ("own_rewards:Length", "must be a function or an object"),
    ],
)
def test_errors_about_your_own(own_module: str, name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_reward(name)


def test_an_import_error_inside_your_own_module_is_shown(own_module: str) -> None:
    with pytest.raises(ModuleNotFoundError, match="a_module_that_is_not_there"):
        load_reward("own_broken:f")


@pytest.mark.parametrize(("name", "nearest"), [("colorfulness", "colourfulness"), ("Clasifier", "classifier")])
def test_unknown_names_get_the_nearest_match_and_what_is_allowed(name: str, nearest: str) -> None:
    for text in (name, f"redness+0.1*{name}"):
        with pytest.raises(ValueError, match=f"unknown reward '{name}', nearest is '{nearest}'; allowed: .*module:"):
            load_reward(text)


def test_a_name_like_no_other_gets_what_is_allowed() -> None:
    with pytest.raises(ValueError, match="unknown reward 'qqq'; allowed: classifier, smiling"):
        load_reward("qqq")


@pytest.mark.parametrize("text", ["", " ", "redness+", "redness sharpness", "2*", "2", "redness*2", "a:b:c", "+*ink"])
def test_sums_that_cannot_be_read_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="cannot be read"):
        load_reward(text)


def test_data_sets_are_checked_before_any_image_exists() -> None:
    with pytest.raises(ValueError, match="classifier needs dataset"):
        load_reward("classifier")
    with pytest.raises(ValueError, match=r"one of \['digits', 'emoji', 'photos'\], got 'cifar'"):
        load_reward("redness", dataset="cifar")
    with pytest.raises(ValueError, match=r"colourfulness cannot score the grey images of digits; allowed: .*'ink'"):
        load_reward("classifier+colourfulness", dataset="digits")
    with pytest.raises(ValueError, match="ink cannot score the RGB images of photos"):
        load_reward("ink", dataset="photos")
    with pytest.raises(ValueError, match=r"smiling cannot score the RGB images of photos; allowed: .*'redness'"):
        load_reward("smiling", dataset="photos")
    with pytest.raises(ValueError, match=r"smiling needs dataset to be one of \['emoji'\], got None"):
        load_reward("smiling")
