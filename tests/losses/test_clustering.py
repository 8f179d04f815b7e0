"""Clusters within classes: standardisation and k-means beside literal loops."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from roadmap.losses.clustering import _distances, _spread_rows, class_standardised, group_means, kmeans


def rows(count: int, dim: int = 3, seed: int = 0) -> torch.Tensor:
    return torch.randn(count, dim, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def literal_standardised(x: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """z_i = (x_i - mean of its class) / deviation of its class, picture by picture; 0 where nothing varies."""
    found = np.zeros_like(x)
    for i in range(len(x)):
        same = [j for j in range(len(x)) if labels[j] == labels[i]]
        for d in range(x.shape[1]):
            mean = sum(x[j, d] for j in same) / len(same)
            deviation = (sum((x[j, d] - mean) ** 2 for j in same) / len(same)) ** 0.5
            found[i, d] = 0.0 if deviation < 1e-12 else (x[i, d] - mean) / deviation
    return found


def literal_kmeans(x: np.ndarray, start: list[int], iterations: int) -> list[int]:
    """Lloyd's algorithm from the rows `start`; for data in which no cluster becomes empty."""

    def nearest(centres: list[np.ndarray]) -> list[int]:
        return [int(np.argmin([((row - centre) ** 2).sum() for centre in centres])) for row in x]

    found = nearest([x[row] for row in start])
    for _ in range(iterations):
        members = [[x[i] for i in range(len(x)) if found[i] == k] for k in range(len(start))]
        assert all(members)
        found = nearest([np.mean(some, axis=0) for some in members])
    return found


@pytest.mark.parametrize("labels", [[0, 0, 0, 1, 1, 1, 1], [7, -2, 7, 7, -2, 3, 7], [5] * 7, list(range(7))])
def test_standardisation_is_the_literal_one(labels: list[int]) -> None:
    """Uneven classes, names that are no numbers of places, one class, classes of one picture."""
    x = rows(7)
    x[:, 2] = 4.25  # a dimension that does not vary
    found = class_standardised(x, torch.tensor(labels))
    np.testing.assert_allclose(found.numpy(), literal_standardised(x.numpy(), np.asarray(labels)), atol=1e-12)


def test_every_class_has_mean_zero_and_deviation_one() -> None:
    x, labels = 100 + 7 * rows(60, 5).float(), torch.arange(60) % 4
    found = class_standardised(x, labels)
    for label in range(4):
        torch.testing.assert_close(found[labels == label].mean(0), torch.zeros(5), atol=1e-4, rtol=0)
        torch.testing.assert_close(found[labels == label].std(0, correction=0), torch.ones(5), atol=1e-4, rtol=0)


def test_what_a_class_explains_is_gone() -> None:
    """The same pictures in every class, each class moved and stretched in its own way, become equal."""
    shared, labels = rows(6).repeat(3, 1), torch.arange(3).repeat_interleave(6)
    moved = shared * torch.tensor([1.0, 5.0, 0.1])[labels][:, None] + torch.tensor([0.0, -3.0, 9.0])[labels][:, None]
    found = class_standardised(moved, labels).view(3, 6, 3)
    torch.testing.assert_close(found[1], found[0])
    torch.testing.assert_close(found[2], found[0])


def test_means_of_groups() -> None:
    x, group = rows(9), torch.tensor([2, 0, 2, 2, 0, 4, 4, 2, 0])
    found = group_means(x, group, 5)
    for k in range(5):
        wanted = x[group == k].mean(0) if (group == k).any() else torch.zeros(3, dtype=torch.float64)
        torch.testing.assert_close(found[k], wanted)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("iterations", [1, 3, 20])
def test_kmeans_is_lloyds(seed: int, iterations: int) -> None:
    x = rows(30, 2, seed)
    start = _spread_rows(x, 4, torch.Generator().manual_seed(seed))
    found = kmeans(x, 4, torch.Generator().manual_seed(seed), iterations)
    assert found.tolist() == literal_kmeans(x.numpy(), start, iterations)


def test_the_start_is_drawn_by_squared_distance() -> None:
    """After the first row each next one has probability d^2 / sum d^2: a literal walk along the sums."""
    x, count = rows(12, 2, 5), 5
    draws = torch.rand(count, generator=torch.Generator().manual_seed(3), dtype=torch.float64).tolist()
    found = [int(draws[0] * 12)]
    for draw in draws[1:]:
        squares = [min(float(((row - x[k]) ** 2).sum()) for k in found) for row in x]
        left = draw * sum(squares)
        for place, square in enumerate(squares):  # noqa: B007
            left -= square
            if left < 0:
                break
        found.append(place)
    assert _spread_rows(x, count, torch.Generator().manual_seed(3)) == found


def test_clusters_that_are_there_are_found() -> None:
    centres = torch.tensor([[0.0, 0.0], [9.0, 0.0], [0.0, 9.0]])
    truth = torch.arange(60) % 3
    found = kmeans(centres[truth] + 0.3 * rows(60, 2).float(), 3, torch.Generator().manual_seed(0))
    assert len({(int(a), int(b)) for a, b in zip(truth, found, strict=True)}) == 3


def test_the_generator_decides_and_the_global_one_does_not() -> None:
    x = rows(40, 3).float()
    first = kmeans(x, 6, torch.Generator().manual_seed(1))
    torch.manual_seed(99)
    before = torch.get_rng_state()
    assert torch.equal(kmeans(x, 6, torch.Generator().manual_seed(1)), first)
    assert torch.equal(torch.get_rng_state(), before)
    others = [kmeans(x, 6, torch.Generator().manual_seed(seed)) for seed in range(2, 6)]
    assert any(not torch.equal(other, first) for other in others)


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 12), st.data())
def test_every_cluster_has_a_picture(count: int, data: st.DataObject) -> None:
    """Also among rows that are all the same, as many clusters as rows, and clusters that run empty."""
    values = data.draw(st.lists(st.integers(0, 3), min_size=count, max_size=count))
    clusters = data.draw(st.integers(1, count))
    x = torch.tensor(values, dtype=torch.float32)[:, None]
    found = kmeans(x, clusters, torch.Generator().manual_seed(data.draw(st.integers(0, 5))))
    assert found.shape == (count,)
    assert 0 <= int(found.min()) <= int(found.max()) < clusters
    if clusters <= len(set(values)):
        assert len(set(found.tolist())) == clusters


def test_what_is_refused() -> None:
    draw = torch.Generator()
    with pytest.raises(ValueError, match="3 pictures cannot be put into 4 clusters; ask for fewer"):
        kmeans(rows(3), 4, draw)
    with pytest.raises(ValueError, match="clusters must be >= 1, got 0"):
        kmeans(rows(3), 0, draw)
    with pytest.raises(ValueError, match="labels has 2 entries but x has 3 rows"):
        class_standardised(rows(3), torch.tensor([0, 1]))


def test_a_cluster_that_loses_its_pictures_starts_again() -> None:
    """In this draw Lloyd's algorithm alone would be left with four clusters of five. The fifth has no centre, not even
    the origin, around which the rows lie here; it goes on from the row that is furthest from its own."""
    x = torch.randint(0, 30, (12, 2), generator=torch.Generator().manual_seed(346)).double() - 15
    start = _spread_rows(x, 5, torch.Generator().manual_seed(346))
    with pytest.raises(AssertionError):
        literal_kmeans(x.numpy(), start, 20)
    nearest = [min(range(5), key=lambda k: float((row - x[start[k]]).square().sum())) for row in x]
    restarts = 0
    for _ in range(20):
        centres = {k: x[[i for i in range(12) if nearest[i] == k]].mean(0) for k in set(nearest)}
        distances = [{k: float((row - c).square().sum()) for k, c in centres.items()} for row in x]
        found = [min(sorted(some), key=some.__getitem__) for some in distances]
        furthest = sorted(range(12), key=lambda i: -min(distances[i].values()))
        lost = sorted(set(range(5)) - set(centres))
        for k, row_number in zip(lost, furthest, strict=False):
            found[row_number] = k
        restarts += len(lost)
        nearest = found
    assert restarts > 0
    assert set(nearest) == set(range(5))
    assert kmeans(x, 5, torch.Generator().manual_seed(346)).tolist() == nearest


def test_no_row_is_drawn_twice_where_rounding_parts_it_from_itself() -> None:
    x = 1e3 + rows(8, 200).float()
    assert _distances(x, x).diagonal().max() > 0
    for seed in range(20):
        assert sorted(_spread_rows(x, 8, torch.Generator().manual_seed(seed))) == list(range(8))
