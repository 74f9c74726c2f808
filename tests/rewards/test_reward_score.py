"""`score` checks both sides of a reward and hides nothing; sums are sums."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from jagg_core.rewards import (
    Colourfulness,
    FunctionReward,
    Redness,
    Reward,
    WeightedSum,
    differentiable,
    load_reward,
    score,
)

IMAGES = torch.rand(3, 3, 8, 8, generator=torch.Generator().manual_seed(0))
PROMPTS = ["a", "b", "c"]


def returning(values: object) -> FunctionReward:
    return FunctionReward(lambda images, prompts: values, "fixed")  # type: ignore[arg-type, return-value]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_an_undefined_reward_is_an_error_naming_the_sample(bad: float) -> None:
    with pytest.raises(ValueError, match=r"fixed is -?(nan|inf) for sample 1 \(prompt 'b'.*never silently replaced"):
        score(returning(torch.tensor([0.0, bad, 1.0])), IMAGES, PROMPTS)


def test_a_failing_reward_is_an_error_and_never_a_zero() -> None:
    def broken(images: Tensor, prompts: Sequence[str]) -> Tensor:
        raise RuntimeError("checkpoint gone")

    with pytest.raises(RuntimeError, match="checkpoint gone"):
        score(FunctionReward(broken, "broken"), IMAGES, PROMPTS)


def test_an_undefined_term_is_an_error_even_at_weight_zero() -> None:
    total = WeightedSum([(1.0, Redness()), (0.0, returning(torch.tensor([0.0, 0.0, float("nan")])))])
    with pytest.raises(ValueError, match="fixed is nan for sample 2"):
        score(total, IMAGES, PROMPTS)


@pytest.mark.parametrize("shape", [(), (1,), (2,), (3, 1), (1, 3)])
def test_a_result_of_another_shape_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"fixed must return shape \[3\], got"):
        score(returning(torch.zeros(shape)), IMAGES, PROMPTS)


@pytest.mark.parametrize(
    "values",
    [
        [0, 0.5, 1],
        (0.0, 0.5, 1.0),
        np.array([0, 0.5, 1]),
        np.array([0, 0.5, 1], np.float16),
        list(torch.tensor([0, 0.5, 1])),
    ],
    ids=["list", "tuple", "array", "half", "list of tensors"],
)
def test_a_list_or_array_of_numbers_is_taken(values: Any) -> None:
    found = score(returning(values), IMAGES, PROMPTS)
    assert found.dtype == torch.float32 and found.tolist() == [0, 0.5, 1]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (None, "got NoneType"),
        (0.5, "got float"),
        ({"a": 1.0}, "got dict"),
        ([None, 0.0, 0.0], "got a list of object"),
        (["0.5", "1", "2"], "got a list of <U3"),
        ([[0.0], [0.0, 1.0], []], "got a list that is no array"),
        (iter([0.0, 0.0, 0.0]), "got list_iterator"),
    ],
)
def test_a_result_that_is_no_numbers_is_refused(values: Any, message: str) -> None:
    wanted = r"fixed must return a tensor of shape \[3\], or a list or array of 3 numbers, "
    with pytest.raises(TypeError, match=wanted + message):
        score(returning(values), IMAGES, PROMPTS)


@pytest.mark.parametrize("values", [[0.0, 1.0], np.zeros((3, 1)), []])
def test_a_list_or_array_of_another_shape_is_refused(values: Any) -> None:
    with pytest.raises(ValueError, match=r"fixed must return shape \[3\], got"):
        score(returning(values), IMAGES, PROMPTS)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int64, torch.bool])
def test_results_become_fp32(dtype: torch.dtype) -> None:
    values = score(returning(torch.tensor([0, 1, 1]).to(dtype)), IMAGES, PROMPTS)
    assert values.dtype == torch.float32
    assert values.tolist() == [0, 1, 1]


def test_a_result_beyond_fp32_is_refused() -> None:
    with pytest.raises(ValueError, match="sample 0"):
        score(returning(torch.full((3,), 1e300, dtype=torch.float64)), IMAGES, PROMPTS)


def test_rewards_get_fp32_images_and_leave_no_graph() -> None:
    seen: list[torch.dtype] = []

    def mean(images: Tensor, prompts: Sequence[str]) -> Tensor:
        seen.append(images.dtype)
        return images.mean((1, 2, 3))

    images = IMAGES.bfloat16().requires_grad_()
    assert not score(FunctionReward(mean, "mean"), images, PROMPTS).requires_grad
    assert seen == [torch.float32]


@pytest.mark.parametrize("prompts", [["a", "b"], ["a"] * 4, []])
def test_unequal_numbers_are_refused(prompts: list[str]) -> None:
    with pytest.raises(ValueError, match=f"got {len(prompts)} for 3 images"):
        score(Redness(), IMAGES, prompts)


def test_one_string_is_not_a_list_of_prompts() -> None:
    with pytest.raises(TypeError, match="single string 'cat'"):
        score(Redness(), IMAGES, "cat")


def test_images_in_another_range_are_refused() -> None:
    images = IMAGES.clone()
    images[2] = 2 * images[2] - 1
    with pytest.raises(ValueError, match=r"must be in \[0, 1\].*sample 2"):
        score(Redness(), images, PROMPTS)
    images[1, 0, 0, 0] = float("nan")
    with pytest.raises(ValueError, match="sample 1"):
        score(Redness(), images, PROMPTS)
    with pytest.raises(TypeError, match="uint8"):
        score(Redness(), (255 * IMAGES).byte(), PROMPTS)


@pytest.mark.parametrize("shape", [(0, 3, 8, 8), (3, 8, 8)])
def test_images_of_another_shape_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"\[N, C, H, W\]"):
        score(Redness(), torch.zeros(shape), ["a"] * shape[0])


def test_a_weighted_sum_is_the_sum() -> None:
    total = WeightedSum([(2.0, Redness()), (-0.5, Colourfulness())])
    by_hand = 2 * score(Redness(), IMAGES, PROMPTS) - 0.5 * score(Colourfulness(), IMAGES, PROMPTS)
    torch.testing.assert_close(score(total, IMAGES, PROMPTS), by_hand)
    assert total.name == "2*redness-0.5*colourfulness"
    assert isinstance(total, Reward)


def test_sums_without_terms_or_with_undefined_weights_are_refused() -> None:
    with pytest.raises(ValueError, match="at least one"):
        WeightedSum([])
    with pytest.raises(ValueError, match="weight of redness must be finite, got nan"):
        WeightedSum([(float("nan"), Redness())])


# With a graph, for pathwise gradients


@pytest.mark.parametrize(
    ("name", "dataset", "shape"),
    [
        ("classifier+10*ink", "digits", (3, 1, 8, 8)),
        ("classifier+10*redness-0.5*sharpness+colourfulness", "photos", (3, 3, 32, 32)),
    ],
)
def test_the_gradient_is_that_of_finite_differences(name: str, dataset: str, shape: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(0)
    latents = torch.rand(shape, generator=generator) * 0.8 + 0.1
    prompts = ["3", "7", "0"] if dataset == "digits" else ["cat", "coffee", "cat"]
    value = differentiable(load_reward(name, dataset=dataset), lambda z: z, prompts)
    state = latents.clone().requires_grad_(True)
    rewards = value(state)
    assert torch.equal(rewards.detach(), score(load_reward(name, dataset=dataset), latents, prompts))
    (gradient,) = torch.autograd.grad(rewards.sum(), state)
    direction = torch.randn(shape, generator=generator)
    size = 1e-3
    ahead, behind = (value((latents + s * size * direction).requires_grad_(True)) for s in (1, -1))
    found = (ahead - behind).detach() / (2 * size)
    torch.testing.assert_close((gradient * direction).flatten(1).sum(1), found, rtol=2e-2, atol=2e-2)


def test_what_has_no_gradient_says_which_part() -> None:
    images = torch.rand(2, 1, 8, 8)
    prompts = ["3", "7"]
    ink = load_reward("ink", dataset="digits")
    with pytest.raises(ValueError, match="decode: images have no gradient"):
        differentiable(ink, lambda z: z.detach(), prompts)(images.requires_grad_(True))
    counting = FunctionReward(lambda images, _: (images > 0.5).flatten(1).sum(1).float(), "counting")
    with pytest.raises(ValueError, match="reward counting has no gradient"):
        differentiable(counting, lambda z: z, prompts)(images)
