"""The map: who is on it, the same for the same vectors, turned without being bent."""

from __future__ import annotations

import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from roadmap.report.mapping import flat_map, sample, turned


@given(st.lists(st.integers(-1, 8), min_size=1, max_size=120), st.integers(1, 40), st.integers(1, 6))
def test_the_sample_is_bounded_and_sorted(labels: list[int], most: int, of_a_class: int) -> None:
    known = np.asarray(labels)
    places = sample(known, most, of_a_class)
    assert 1 <= len(places) <= max(most, 1)
    assert (np.diff(places) > 0).all()
    assert set(places.tolist()) <= set(range(len(labels)))
    if len(labels) <= most:
        assert len(places) == len(labels)  # all of them, where there is room
    else:
        assert max(np.unique(known[places], return_counts=True)[1]) <= of_a_class


def test_classes_come_whole_as_far_as_may_be() -> None:
    labels = np.repeat(np.arange(100), 10)
    places = sample(labels, most=50, of_a_class=10)
    classes, counts = np.unique(labels[places], return_counts=True)
    assert counts.tolist() == [10] * 5
    assert np.unique(np.diff(classes)).tolist() == [20]  # evenly spaced


def clusters() -> tuple[np.ndarray, np.ndarray]:  # type: ignore[type-arg]
    draw = np.random.default_rng(0)
    labels = np.repeat(np.arange(4), 12)
    return draw.normal(size=(4, 16))[labels] + 0.05 * draw.normal(size=(48, 16)), labels


@pytest.mark.parametrize("library", [True, False])
def test_classes_that_are_apart_are_apart_on_the_map(library: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if library:
        pytest.importorskip("sklearn")
    else:
        monkeypatch.setitem(sys.modules, "sklearn.manifold", None)  # as if it were not installed
    vectors, labels = clusters()
    flat, how = flat_map(vectors)
    assert "t-SNE" in how
    assert ("PCA" in how) is not library
    assert flat.shape == (48, 2)
    assert np.abs(flat).max() == pytest.approx(1)
    assert flat.max(0) + flat.min(0) == pytest.approx([0, 0])  # as large as may be in its box
    assert np.array_equal(flat, flat_map(vectors)[0])
    distances = np.linalg.norm(flat[:, None] - flat, axis=2) + np.eye(48) * 9
    assert np.array_equal(labels[distances.argmin(1)], labels)


@pytest.mark.parametrize("count", [1, 2, 5])
def test_few_points_are_no_trouble(count: int) -> None:
    flat, how = flat_map(np.ones((count, 3)))
    assert flat.shape == (count, 2)
    assert np.isfinite(flat).all()
    assert "PCA" in how


@given(st.integers(0, 10**6))
def test_a_turned_map_keeps_its_distances_and_finds_its_way_back(seed: int) -> None:
    draw = np.random.default_rng(seed)
    like = draw.normal(size=(20, 2))
    like -= (like.max(0) + like.min(0)) / 2
    like /= np.abs(like).max()
    angle = draw.uniform(0, 7)
    turn = np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]]) * [1, draw.choice([-1, 1])]
    found = turned(like @ turn, like)
    assert found == pytest.approx(like, abs=1e-9)
