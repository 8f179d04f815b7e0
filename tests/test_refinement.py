"""Refinements of vectors, each against a literal loop in float64."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from roadmap.refinement import Refinement, Whitening, augmented_gallery, expanded_queries, reranked

Rows = list[list[float]]


def unit(vectors: Tensor) -> Rows:
    return [[x / math.sqrt(math.fsum(y * y for y in row)) for x in row] for row in vectors.double().tolist()]


def dot(a: list[float], b: list[float]) -> float:
    return math.fsum(x * y for x, y in zip(a, b, strict=True))


def literal_sum(start: list[float], neighbours: list[tuple[float, list[float]]], alpha: float) -> list[float]:
    total = list(start)
    for score, vector in neighbours:
        weight = score**alpha if score > 0 else 0.0
        total = [t + weight * v for t, v in zip(total, vector, strict=True)]
    return unit(torch.tensor([total], dtype=torch.float64))[0]


def clusters(count: int, dim: int = 6, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    centres = torch.randn(5, dim, generator=generator, dtype=torch.float64)
    return centres[torch.arange(count) % 5] + 0.6 * torch.randn(count, dim, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("alpha", [0.0, 1.0, 3.0])
@pytest.mark.parametrize("k", [1, 4, 23])
def test_query_expansion(k: int, alpha: float) -> None:
    queries, gallery = clusters(7, seed=1), clusters(23)
    rows = unit(gallery)
    found = expanded_queries(3 * queries, gallery, k, alpha)
    for query, row in zip(unit(queries), found.tolist(), strict=True):
        near = sorted(((dot(query, x), x) for x in rows), key=lambda pair: -pair[0])[:k]
        assert row == pytest.approx(literal_sum(query, near, alpha), abs=1e-12)


@pytest.mark.parametrize("alpha", [0.0, 2.0])
@pytest.mark.parametrize("k", [1, 5, 22])
def test_database_augmentation(k: int, alpha: float) -> None:
    gallery = clusters(23)
    rows = unit(gallery)
    found = augmented_gallery(gallery, k, alpha)
    for i, row in enumerate(found.tolist()):
        others = [(dot(rows[i], x), x) for j, x in enumerate(rows) if j != i]
        near = sorted(others, key=lambda pair: -pair[0])[:k]
        assert row == pytest.approx(literal_sum(rows[i], near, alpha), abs=1e-12)


def test_equal_vectors_stay_as_they_are() -> None:
    gallery = torch.ones(9, 4)
    assert torch.allclose(augmented_gallery(gallery, 3), torch.full((9, 4), 0.5))


@pytest.mark.parametrize("dim", [None, 3])
def test_whitening_gives_uncorrelated_unit_variance(dim: int | None) -> None:
    vectors = clusters(400)
    whitening = Whitening.fit(vectors, dim)
    rows = torch.tensor(unit(vectors), dtype=torch.float64)
    turned = (rows - whitening.mean) @ whitening.axes
    n, kept = turned.shape
    assert kept == (dim or 6)
    for a in range(kept):
        for b in range(kept):
            covariance = math.fsum(float(turned[i, a] * turned[i, b]) for i in range(n)) / (n - 1)
            assert covariance == pytest.approx(float(a == b), abs=1e-9)
    # the axes are those of largest variance, in order
    lengths = [1 / float(column.norm()) ** 2 for column in whitening.axes.T]
    truth = np.sort(np.linalg.eigvalsh(np.cov(rows.numpy().T)))[::-1][:kept]
    assert lengths == pytest.approx(truth.tolist(), rel=1e-9)
    applied = whitening.apply(vectors[:5])
    for row, expected in zip(applied.tolist(), unit(turned[:5]), strict=True):
        assert row == pytest.approx(expected, abs=1e-12)


def test_whitening_leaves_out_axes_without_variance() -> None:
    flat = torch.cat([clusters(50), torch.zeros(50, 2, dtype=torch.float64)], dim=1)
    assert Whitening.fit(flat).axes.shape == (8, 6)
    with pytest.raises(ValueError, match="these are all equal"):
        Whitening.fit(torch.ones(5, 3))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("count", [2, 3, 100])
def test_rounding_is_no_difference_that_could_be_whitened(count: int, dtype: torch.dtype) -> None:
    """Vectors of one direction: their mean, and their lengths brought to one, differ in the last bits."""
    for seed in range(20):
        draw = torch.Generator().manual_seed(seed)
        one = torch.randn(1, 16, generator=draw, dtype=dtype)
        lengths = torch.rand(count, 1, generator=draw, dtype=dtype)
        with pytest.raises(ValueError, match="these are all equal"):
            Whitening.fit(one * (0.1 + lengths))


def test_whitening_is_kept(tmp_path: Path) -> None:
    whitening = Whitening.fit(clusters(50))
    whitening.save(tmp_path / "w.npz")
    again = Whitening.load(tmp_path / "w.npz")
    assert torch.equal(again.apply(clusters(9, seed=3)), whitening.apply(clusters(9, seed=3)))
    assert whitening.apply(clusters(9).float()).dtype == torch.float32
    np.savez(tmp_path / "evil.npz", mean=np.array([print], dtype=object), axes=np.ones(1))
    (tmp_path / "text.npz").write_text("no")
    for name in ("evil", "text"):
        with pytest.raises(ValueError, match=f"{name}.npz is no whitening that this program wrote"):
            Whitening.load(tmp_path / f"{name}.npz")


def literal_reciprocal(query: list[float], candidates: Rows, k1: int, k2: int, lam: float) -> list[float]:
    """Zhong et al. 2017, sections 3.2 to 3.5, set by set."""
    group = [query, *candidates]
    n = len(group)
    d = [[1 - dot(a, b) for b in group] for a in group]
    order = [[p, *sorted((j for j in range(n) if j != p), key=lambda j, p=p: (d[p][j], j))] for p in range(n)]

    def mutual(p: int, k: int) -> set[int]:
        return {g for g in order[p][: k + 1] if p in order[g][: k + 1]}

    weights = []
    for p in range(n):
        wide = set(mutual(p, k1))
        for q in mutual(p, k1):
            half = mutual(q, (k1 + 1) // 2)
            if len(mutual(p, k1) & half) >= 2 / 3 * len(half):
                wide |= half
        weights.append([math.exp(-d[p][g]) if g in wide else 0.0 for g in range(n)])
    means = []
    for p in range(n):
        near = order[p][:k2]
        means.append([math.fsum(weights[q][g] for q in near) / len(near) for g in range(n)])
    found = []
    for j in range(1, n):
        least = math.fsum(map(min, means[0], means[j]))
        most = math.fsum(map(max, means[0], means[j]))
        found.append(1 - (1 - lam) * (1 - least / most) - lam * d[0][j])
    return found


@pytest.mark.parametrize(
    ("count", "k1", "k2", "lam"), [(23, 5, 3, 0.3), (12, 4, 1, 0.0), (23, 40, 30, 0.7), (1, 1, 1, 0.3)]
)
def test_reciprocal_reranking(count: int, k1: int, k2: int, lam: float) -> None:
    queries, gallery = clusters(7, seed=1), clusters(23)
    rows = unit(gallery)
    scores, indices = reranked(queries, gallery, count, k1, k2, lam)
    for query, values, places in zip(unit(queries), scores.tolist(), indices.tolist(), strict=True):
        nearest = sorted(range(23), key=lambda j, query=query: -dot(query, rows[j]))[:count]
        truth = dict(zip(nearest, literal_reciprocal(query, [rows[j] for j in nearest], k1, k2, lam), strict=True))
        assert sorted(places) == sorted(nearest)
        assert values == sorted(values, reverse=True)
        assert values == pytest.approx([truth[place] for place in places], abs=1e-9)


def test_reranking_helps_where_neighbours_agree() -> None:
    """Pictures of a class on an arc: its ends are far from each other, and neighbours lead from one to the other."""
    generator = torch.Generator().manual_seed(0)
    angles = torch.cat([torch.linspace(0, 1.2, 30), torch.linspace(1.75, 2.95, 30)])
    vectors = torch.stack([angles.cos(), angles.sin(), 0.02 * torch.randn(60, generator=generator)], dim=1)
    query = torch.tensor([[math.cos(1.15), math.sin(1.15), 0.0]])
    before = (torch.nn.functional.normalize(vectors, dim=1) @ query[0]).argsort(descending=True)[:30]
    after = reranked(query, vectors, 60, k1=15, k2=6)[1][0, :30]
    assert (before < 30).float().mean() < 0.8
    assert (after < 30).float().mean() > (before < 30).float().mean()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: expanded_queries(x, x, 24), "between 1 and 23 neighbours can be taken from this gallery, got 24"),
        (lambda x: augmented_gallery(x, 23), "between 1 and 22 neighbours"),
        (lambda x: reranked(x, x, 0), "between 1 and 23 neighbours"),
        (lambda x: reranked(x, x, 5, lam=2.0), "lam in 0..1, got k1=20, k2=6, lam=2.0"),
        (lambda x: Whitening.fit(x, 7), "dim in 1..6, got 23 and dim=7"),
        (lambda x: Whitening.fit(x).apply(x[:, :5]), "for vectors of 6 dimensions, got 5"),
        (lambda x: expanded_queries(x * torch.nan, x, 2), "queries row 0 holds NaN"),
    ],
)
def test_wrong_arguments_are_refused_in_words(call: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call(clusters(23))  # type: ignore[operator]


def test_a_query_is_no_neighbour_of_its_own() -> None:
    gallery = clusters(23)
    own = torch.tensor([4, -1, 0])
    queries = gallery[[4, 9, 0]]
    found = expanded_queries(queries, gallery, 3, 3.0, own)
    for row, query, mine in zip(found.tolist(), unit(queries), own.tolist(), strict=True):
        others = [(dot(query, x), x) for j, x in enumerate(unit(gallery)) if j != mine]
        near = sorted(others, key=lambda pair: -pair[0])[:3]
        assert row == pytest.approx(literal_sum(query, near, 3.0), abs=1e-12)
    _, places = reranked(queries, gallery, 22, own=own)
    assert 4 not in places[0].tolist()
    assert 9 in places[1].tolist()
    with pytest.raises(ValueError, match="between 1 and 22 neighbours"):
        reranked(queries, gallery, 23, own=own)
    # the same as a gallery without it
    without = torch.cat([gallery[:4], gallery[5:]])
    _, rest = reranked(queries[:1], without, 22)
    assert torch.equal(rest + (rest >= 4), places[:1])


def test_a_refinement_whitens_then_augments_then_expands() -> None:
    queries, gallery = clusters(5, seed=2), clusters(30)
    whitening = Whitening.fit(gallery, 4)
    held = augmented_gallery(whitening.apply(gallery), 3, 2.0)
    asked = expanded_queries(whitening.apply(queries), held, 4, 2.0)
    for whiten in (whitening, "own:4"):
        refinement = Refinement(whiten, augment=3, expand=4, alpha=2.0)
        for found, right in zip(refinement.vectors(queries, gallery), (asked, held), strict=True):
            assert torch.allclose(found, right)
    assert not Refinement()
    assert refinement.words().startswith("vectors whitened, every vector of the gallery augmented by its 3 nearest")
    for wrong, said in (({"expand": -1}, "expand must be 0 or more"), ({"whiten": "all"}, "whiten must be a Whiten")):
        with pytest.raises(ValueError, match=said):
            Refinement(**wrong)
