"""Exact and projected spaces against inner products of whole gradients."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from analysis.measure import spaces
from analysis.measure.cross_table import SpaceName, collect_table
from analysis.measure.similarity import similarity
from analysis.measure.spaces import ExactSpace, ProjectedSpace, Space, gram_matrix, inner_product_error
from jagg_core import ClippedSurrogate, Plan, Trajectory
from jagg_core.sharding import Piece, Sharding
from tests.analysis.test_collect import cross_gradients
from tests.jagg_core.fields import ADVANTAGES, MlpField, make_rollout, noise_like

MakePlan = Callable[[Tensor], Plan]
OBJECTIVE = ClippedSurrogate()
DIMENSION = 64
SHAPES = ((), (3,), (7, 11), (1,), (640,), (DIMENSION, 3), (129,), (0, 5), (2, 3, 5), (), (71, 23))
"""Of parameters: odd ones, empty ones, and some larger than the dimension."""
SIZE = sum(math.prod(shape) for shape in SHAPES)
ONE = ["all"] * len(SHAPES)


def layout(pieces: Sequence[Piece] | None = None) -> Sharding:
    """Of parameters of `SHAPES`; with ``pieces`` as one rank would hold them, sums staying its own."""
    sharding = Sharding([torch.empty(shape) for shape in SHAPES])
    if pieces is not None:
        sharding.pieces = list(pieces)
    return sharding


def cut(vector: Tensor) -> list[Tensor]:
    """A whole gradient as one flat tensor for each parameter."""
    return list(vector.split([math.prod(shape) for shape in SHAPES]))


def encoded(space: Space, vectors: Tensor) -> Tensor:
    """Finished rows of whole gradients ``[n, SIZE]``."""
    rows = torch.full((len(vectors), *space.row_shape), torch.nan, dtype=vectors.dtype)
    for vector, row in zip(vectors, rows, strict=True):
        space.encode(cut(vector), row)
    return space.finish(rows)


def projected(vectors: Tensor, seed: int, dimension: int = DIMENSION) -> np.ndarray:
    """Projected inner products."""
    space = ProjectedSpace(layout(), ONE, dimension, seed)
    return space.grams(encoded(space, vectors))["all"]


# Vectors


def gaussian() -> Tensor:
    """Six independent vectors."""
    return noise_like(6, SIZE)


def layerwise() -> Tensor:
    """Every parameter at a scale of its own, over two orders."""
    return torch.stack([torch.cat([part * 10 ** (n % 3 - 1) for n, part in enumerate(cut(v))]) for v in gaussian()])


def constant() -> Tensor:
    """Ones, ones of both signs in halves, and alternating: stretches that look alike."""
    halves = torch.ones(SIZE, dtype=torch.float64)
    halves[SIZE // 2 :] = -1
    alternating = torch.ones(SIZE, dtype=torch.float64)
    alternating[::2] = -1
    return torch.stack([torch.ones(SIZE, dtype=torch.float64), halves, alternating])


def outer_products() -> Tensor:
    """Rank one with rows of 16, as gradients of matrices are: the same pattern in every stretch."""
    left, right = noise_like(4, SIZE // 16 + 1, seed=1), noise_like(4, 16, seed=2)
    return (left[:, :, None] * right[:, None]).flatten(1)[:, :SIZE]


def with_cosine(cosine: float) -> Tensor:
    """Two vectors of exactly this cosine, of norms 3 and 0.2."""
    a, b = torch.linalg.qr(noise_like(SIZE, 2)).Q.T
    return torch.stack([3 * a, 0.2 * (cosine * a + math.sqrt(1 - cosine**2) * b)])


# The error of a projection

Make = Callable[[], Tensor]
each_kind = pytest.mark.parametrize("make", [gaussian, layerwise, constant, outer_products])


def cosines(make: Make) -> np.ndarray:
    unit = nn.functional.normalize(make())
    return (unit @ unit.T).numpy()


@cache
def errors(make: Make, dtype: torch.dtype = torch.float64) -> np.ndarray:
    """Errors of inner products as shares of the product of norms, ``[200 seeds, n, n]``."""
    vectors = nn.functional.normalize(make()).to(dtype)
    exact = (vectors.double() @ vectors.double().T).numpy()
    return np.stack([projected(vectors, seed) for seed in range(200)]) - exact


def standard_errors(make: Make) -> np.ndarray:
    """The same in the standard errors that the docstring claims."""
    return errors(make) / np.sqrt((1 + cosines(make) ** 2) / DIMENSION)


@cache
def planes(dimension: int = DIMENSION) -> np.ndarray:
    """Projected inner products of two orthonormal vectors, ``[500 seeds, 2, 2]``; of five such pairs in turn."""
    pairs = [torch.linalg.qr(noise_like(SIZE, 2, seed=n)).Q.T.contiguous() for n in range(5)]
    return np.stack([projected(pairs[seed % 5], seed, dimension) for seed in range(500)])


def correlated(cosine: float, dimension: int = DIMENSION) -> np.ndarray:
    """Those of two unit vectors of this cosine: rows are linear in vectors."""
    mix = np.array([[1, 0], [cosine, math.sqrt(1 - cosine**2)]])
    return mix @ planes(dimension) @ mix.T


@each_kind
def test_inner_products_keep_their_bound(make: Make) -> None:
    found = errors(make)
    entries = found[:, *np.triu_indices(found.shape[1])]
    assert entries.size >= 1000
    assert np.mean(np.abs(entries) <= inner_product_error(DIMENSION)) >= 0.95


def test_fp32_is_as_good() -> None:
    found = errors(outer_products, torch.float32)
    np.testing.assert_allclose(found, errors(outer_products), atol=1e-5)
    assert np.abs(found).max() > 0.1


@pytest.mark.parametrize("cosine", [0.0, 0.5, 0.99, 1.0])
def test_correlated_vectors_keep_the_bound_too(cosine: float) -> None:
    """At a cosine of 1 the bound is 95 % to the letter, so that a few more of 500 may miss it."""
    error = correlated(cosine)[:, 0, 1] - cosine
    assert np.mean(np.abs(error) <= inner_product_error(DIMENSION)) >= (0.93 if cosine > 0.9 else 0.95)
    assert 0.85 < error.std() * math.sqrt(DIMENSION / (1 + cosine**2)) < 1.1, "the standard error of the docstring"


def test_the_bound_is_not_far_from_the_truth() -> None:
    error = np.quantile(np.abs(correlated(0.0)[:, 0, 1]), 0.95)
    assert 1 < inner_product_error(DIMENSION) / error < 2


@each_kind
def test_inner_products_are_unbiased(make: Make) -> None:
    """Mean errors are what 200 errors leave by chance."""
    assert np.abs(standard_errors(make).mean(0)).max() < 4 / math.sqrt(200)


@each_kind
def test_vectors_of_any_structure_have_the_standard_error_that_is_claimed(make: Make) -> None:
    assert 0.8 < math.sqrt(np.mean(standard_errors(make) ** 2)) < 1.15


def test_the_table_of_signs_is_what_helps(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the same signs for all stretches, those that look alike have twice the variance."""
    monkeypatch.setattr(spaces, "SIGN_TABLE", 1)
    ones = torch.ones(1, SIZE, dtype=torch.float64) / math.sqrt(SIZE)
    found = np.array([projected(ones, seed).item() for seed in range(400)])
    assert (found - 1).std() * math.sqrt(DIMENSION / 2) > 1.25


@pytest.mark.parametrize("dimension", [32, 128])
@pytest.mark.parametrize("cosine", [0.0, 0.5, 0.9, 0.99])
def test_what_is_nearly_parallel_is_known_best(cosine: float, dimension: int) -> None:
    found = correlated(cosine, dimension)
    cosines = found[:, 0, 1] / np.sqrt(found[:, 0, 0] * found[:, 1, 1])
    error = math.sqrt(np.mean((cosines - cosine) ** 2))
    assert 0.75 < error / ((1 - cosine**2) / math.sqrt(dimension)) < 1.25


def test_parallel_vectors_stay_parallel() -> None:
    gram = projected(with_cosine(1.0), 0)
    assert gram[0, 1] ** 2 == pytest.approx(gram[0, 0] * gram[1, 1], rel=1e-12)


def test_a_gradient_of_one_stretch_is_exact() -> None:
    vectors = with_cosine(0.3)
    np.testing.assert_allclose(projected(vectors, 0, SIZE), (vectors @ vectors.T).numpy(), rtol=1e-12, atol=1e-15)
    short = projected(vectors, 0, SIZE - 1)
    assert np.abs(short - (vectors @ vectors.T).numpy()).max() > 1e-10, "one element more, and it is not"


# Rows


def parts(count: int, copies: int = 1) -> list[list[Piece]]:
    """Pieces of every parameter on each of ``count`` ranks, uneven, some empty; copies after the first do not count."""
    draw = np.random.default_rng(0)
    found: list[list[Piece]] = [[] for _ in range(count * copies)]
    for shape in SHAPES:
        ends = [0, *sorted(draw.integers(0, math.prod(shape) + 1, count - 1).tolist()), math.prod(shape)]
        for rank in range(count * copies):
            at = rank % count
            found[rank].append(Piece(ends[at], ends[at + 1] - ends[at], counted=rank < count))
    return found


def held(vector: Tensor, pieces: Sequence[Piece]) -> list[Tensor]:
    """What a rank holds of a whole gradient."""
    return [whole[p.start : p.start + p.size] for whole, p in zip(cut(vector), pieces, strict=True)]


@pytest.mark.parametrize(("count", "copies"), [(1, 1), (2, 1), (3, 1), (5, 1), (3, 2), (1, 3)])
def test_rows_do_not_depend_on_how_parameters_are_cut(count: int, copies: int) -> None:
    vector, labels = noise_like(SIZE), ["even" if n % 2 else "odd" for n in range(len(SHAPES))]
    whole = torch.empty(2, DIMENSION, dtype=torch.float64)
    ProjectedSpace(layout(), labels, DIMENSION, 5).encode(cut(vector), whole)
    ranks = parts(count, copies)
    assert count == 1 or any(piece.size == 0 < math.prod(SHAPES[n]) for own in ranks for n, piece in enumerate(own))
    total = torch.zeros_like(whole)
    for pieces in ranks:
        row = torch.full_like(whole, torch.nan)
        ProjectedSpace(layout(pieces), labels, DIMENSION, 5).encode(held(vector, pieces), row)
        total += row
    assert (total - whole).norm() < 1e-12 * whole.norm()


@pytest.mark.parametrize(("count", "copies"), [(1, 1), (3, 1), (3, 2)])
def test_exact_inner_products_of_parts_add_up(count: int, copies: int) -> None:
    vectors, labels = gaussian(), ["even" if n % 2 else "odd" for n in range(len(SHAPES))]
    total = {"even": np.zeros((6, 6)), "odd": np.zeros((6, 6))}
    for pieces in parts(count, copies):
        space = ExactSpace(layout(pieces), labels)
        assert space.row_shape == (sum(p.size for p in pieces if p.counted),)
        rows = torch.full((6, *space.row_shape), torch.nan, dtype=torch.float64)
        for vector, row in zip(vectors, rows, strict=True):
            space.encode(held(vector, pieces), row)
        for block, gram in space.grams(space.finish(rows)).items():
            total[block] += gram
    for start, block in enumerate(("odd", "even")):
        own = torch.stack([torch.cat(cut(vector)[start::2]) for vector in vectors])
        np.testing.assert_allclose(total[block], (own @ own.T).numpy(), rtol=1e-12, atol=1e-10)


def space_of(name: str, labels: Sequence[str] = ONE) -> Space:
    return ExactSpace(layout(), labels) if name == "exact" else ProjectedSpace(layout(), labels, DIMENSION, 3)


each_space = pytest.mark.parametrize("name", ["exact", "projected"])


@each_space
def test_rows_are_linear(name: str) -> None:
    a, b = noise_like(2, SIZE)
    space = space_of(name)
    row_a, row_b, mixed = encoded(space, torch.stack([a, b, 2 * a - 0.3 * b]))
    assert (mixed - (2 * row_a - 0.3 * row_b)).norm() < 1e-12 * mixed.norm()


@each_space
def test_none_is_zero(name: str) -> None:
    vector = noise_like(SIZE)
    gradients: list[Tensor | None] = list(cut(vector))
    zeros = [torch.zeros_like(g) if n in (2, 4) else g for n, g in enumerate(cut(vector))]
    gradients[2] = gradients[4] = None
    space = space_of(name)
    row = torch.full((2, *space.row_shape), torch.nan, dtype=torch.float64)
    space.encode(gradients, row[0])
    space.encode(zeros, row[1])
    assert row.isfinite().all()
    assert torch.equal(row[0], row[1])
    space.encode([None] * len(SHAPES), row[0])
    assert not row[0].any()


def test_a_projection_is_its_seed() -> None:
    vectors = noise_like(1, SIZE)
    rows = [encoded(ProjectedSpace(layout(), ONE, DIMENSION, seed), vectors) for seed in (0, 0, 1)]
    assert torch.equal(rows[0], rows[1])
    assert (rows[0] - rows[2]).norm() > 0.5 * rows[0].norm()


@pytest.mark.parametrize("dimension", [0, -1])
def test_a_dimension_below_one_is_refused(dimension: int) -> None:
    with pytest.raises(ValueError, match=f"dimension must be at least 1, got {dimension}"):
        ProjectedSpace(layout(), ONE, dimension)


# Blocks

LABELS = ["MLP", "attention", "LoRA B", "MLP", "zebra", "attention", "all", "MLP", "LoRA A", "zebra", "attention"]
ORDER = ["LoRA A", "LoRA B", "attention", "MLP", "all", "zebra"]


@each_space
def test_blocks_are_ordered_and_apart(name: str) -> None:
    vectors, space = gaussian(), space_of(name, LABELS)
    found = space.grams(encoded(space, vectors))
    assert list(found) == ORDER
    for block in ORDER:
        own = vectors.clone()
        for n, part in enumerate(zip(*map(cut, own), strict=True)):
            if LABELS[n] != block:
                for rows in part:
                    rows.zero_()
        alone = space.grams(encoded(space, own))
        np.testing.assert_allclose(alone[block], found[block], rtol=1e-12)
        assert not any(alone[other].any() for other in ORDER if other != block)


def test_exact_blocks_add_up_to_the_whole() -> None:
    vectors, space = gaussian(), space_of("exact", LABELS)
    whole = np.sum(list(space.grams(encoded(space, vectors)).values()), axis=0)
    np.testing.assert_allclose(whole, gram_matrix(vectors), rtol=1e-12, atol=1e-10)
    one = space_of("exact")
    np.testing.assert_allclose(whole, one.grams(encoded(one, vectors))["all"], rtol=1e-12, atol=1e-10)


@each_space
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_gradient_that_is_not_finite_is_refused(name: str, bad: float) -> None:
    vectors, space = gaussian(), space_of(name, LABELS)
    vectors[4, SIZE // 3] = bad
    with pytest.raises(FloatingPointError, match="gradient 4 of 6 is not finite"):
        space.grams(encoded(space, vectors))


# Tables

FIELD_BLOCKS = {"inner": "MLP", "bias": "other", "outer": "embedders"}


def labels_of(field: MlpField) -> dict[Tensor, str]:
    return {p: FIELD_BLOCKS[name] for name, p in field.named_parameters()}


def test_projected_similarities_are_close_to_exact(
    every_plan: dict[str, MakePlan], field: MlpField, trajectory: Trajectory
) -> None:
    """Within three standard errors of `ProjectedSpace`'s docstring, on 136 parameters in 64 dimensions."""
    exact = collect_table(field, trajectory, ADVANTAGES, OBJECTIVE)
    found = collect_table(field, trajectory, ADVANTAGES, OBJECTIVE, space="projected", dimension=DIMENSION)
    assert (exact.dimension, found.dimension) == (None, DIMENSION)
    differences = []
    for name, make in every_plan.items():
        plan = make(trajectory.sigmas)
        true, estimate = similarity(exact, plan), similarity(found, plan)
        assert true.cosine is not None
        assert estimate.cosine is not None
        assert abs(estimate.cosine - true.cosine) <= 3 * (1 - true.cosine**2) / math.sqrt(DIMENSION) + 1e-12, name
        assert estimate.rel_error == pytest.approx(true.rel_error, rel=3 * math.sqrt(2 / DIMENSION), abs=1e-6), name
        assert estimate.norm_ratio == pytest.approx(true.norm_ratio, rel=3 * math.sqrt(2 / DIMENSION)), name
        differences.append(abs(estimate.cosine - true.cosine))
    assert max(differences) > 1e-6, "the projection is one"


@pytest.mark.parametrize("space", ["exact", "projected"])
def test_blocks_of_a_table_add_up(space: SpaceName, field: MlpField, trajectory: Trajectory) -> None:
    settings: dict[str, Any] = {"space": space, "dimension": DIMENSION}
    table = collect_table(field, trajectory, ADVANTAGES, OBJECTIVE, blocks=labels_of(field), **settings)
    assert list(table.grams) == ["MLP", "embedders", "other"]
    np.testing.assert_allclose(sum(table.grams.values()), table.gram, rtol=1e-12)
    if space == "exact":
        whole = collect_table(field, trajectory, ADVANTAGES, OBJECTIVE, space="exact")
        np.testing.assert_allclose(table.gram, whole.gram, rtol=1e-9, atol=1e-12 * np.abs(whole.gram).max())
        assert list(whole.grams) == ["all"]


def test_parameters_without_a_label_are_a_block_too(field: MlpField) -> None:
    trajectory = make_rollout(field, steps=3)
    table = collect_table(field, trajectory, ADVANTAGES, OBJECTIVE, blocks={field.bias: "other"})
    assert list(table.grams) == ["all", "other"]


@pytest.mark.parametrize("name", FIELD_BLOCKS)
def test_blocks_are_cross_gradients_of_their_parameters_alone(name: str, field: MlpField) -> None:
    trajectory = make_rollout(field, steps=5)
    table = collect_table(field, trajectory, ADVANTAGES, OBJECTIVE, blocks=labels_of(field))
    sizes = [p.numel() for p in field.parameters()]
    at = [n for n, _ in field.named_parameters()].index(name)
    own = cross_gradients(field, trajectory).flatten(0, 1).split(sizes, dim=1)[at]
    expected = (own @ own.T).numpy()
    found = table.grams[FIELD_BLOCKS[name]]
    assert np.abs(found - expected).max() < 1e-12 * np.abs(expected).max()
    for i, j in ((0, 1), (2, 4)):
        a, b = (table.index[i, j], table.index[j, j])
        cosine = float(own[a] @ own[b] / own[a].norm() / own[b].norm())
        assert found[a, b] / math.sqrt(found[a, a] * found[b, b]) == pytest.approx(cosine, abs=1e-10)


@pytest.mark.parametrize("space", ["exact", "projected"])
def test_a_table_with_a_gradient_that_is_not_finite_is_refused(space: SpaceName, field: MlpField) -> None:
    trajectory = make_rollout(field, steps=3)
    velocity = field.velocity

    def broken(latents: Tensor, sigma: Tensor, rows: Tensor) -> Tensor:
        return velocity(latents, sigma, rows) + (field.bias * 0).abs().sqrt().sum()  # 0 times infinity behind a zero

    field.velocity = broken  # type: ignore[method-assign]
    with pytest.raises(FloatingPointError, match="gradient 0 of 9 is not finite"):
        collect_table(field, trajectory, ADVANTAGES, OBJECTIVE, space=space, dimension=DIMENSION)
