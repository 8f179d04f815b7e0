"""Counts of scores and precision by rank against literal loops."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from roadmap.embeddings import Embeddings
from roadmap.evaluation import evaluate
from roadmap.report import scores
from roadmap.report.measures import Sides, measures_of
from roadmap.report.scores import BINS, ScoreCounts, edges, precisions_at_ranks, score_counts, thresholds


def vectors(seed: int, count: int, classes: int, dim: int = 5) -> Embeddings:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(classes, (count,), generator=generator)
    return Embeddings(torch.randn(count, dim, generator=generator, dtype=torch.float64), labels)


def literal_counts(sides: Sides, alpha: float, beta: float) -> tuple[list[int], list[int], int, int]:
    positives, negatives, below, above = [0] * BINS, [0] * BINS, 0, 0
    for i, q in enumerate(sides.queries.tolist()):
        for j, g in enumerate(sides.gallery.tolist()):
            if j == int(sides.own[i]):
                continue
            score = math.fsum(a * b for a, b in zip(q, g, strict=True))
            place = min(max(math.floor((score + 1) * BINS / 2), 0), BINS - 1)
            if sides.classes[0][i] == sides.classes[1][j]:
                positives[place] += 1
                below += score < alpha
            else:
                negatives[place] += 1
                above += score > beta
    return positives, negatives, below, above


@given(st.integers(0, 10**6), st.integers(1, 14), st.integers(1, 4), st.booleans(), st.sampled_from([1, 3, 7, 1 << 22]))
def test_counts_are_those_of_a_loop(seed: int, count: int, classes: int, alone: bool, tile: int) -> None:
    queries = vectors(seed, count, classes)
    sides = Sides.of(queries, None if alone else vectors(seed + 1, count + 2, classes))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scores, "TILE", tile)
        found = score_counts(sides.queries, sides.gallery, sides.own, sides.classes, 0.5, 0.1)
    expected = literal_counts(sides, 0.5, 0.1)
    assert (found.positives.tolist(), found.negatives.tolist(), found.below, found.above) == expected
    pairs = count * (count - 1) if alone else count * (count + 2)
    assert int(found.positives.sum() + found.negatives.sum()) == pairs


def test_wide_galleries_are_counted_in_parts() -> None:
    """More columns than a tile is wide: no pair is lost or counted twice."""
    gallery = torch.nn.functional.normalize(torch.randn((1 << 14) + 5, 3, dtype=torch.float64), dim=1)
    labels = torch.arange(len(gallery)) % 3
    own = torch.tensor([0, (1 << 14) + 2])
    found = score_counts(gallery[own], gallery, own, (labels[own], labels))
    values = (gallery[own] @ gallery.T).numpy()
    for kind, same in (("positives", True), ("negatives", False)):
        mask = (labels[own][:, None] == labels).numpy() == same
        mask[[0, 1], own.numpy()] = False
        assert getattr(found, kind).tolist() == np.histogram(values[mask], edges())[0].tolist()


def test_edges_belong_to_the_upper_bin_and_one_to_the_last() -> None:
    unit = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0], [-1.0, 0.0]], dtype=torch.float64)
    labels = torch.tensor([0, 0, 0, 1])
    found = score_counts(unit[:1], unit, torch.tensor([0]), (labels[:1], labels), alpha=0.0, beta=-1.0)
    assert found.positives.nonzero()[0].tolist() == [BINS // 2, BINS - 1]  # 0 and 1
    assert found.negatives.nonzero()[0].tolist() == [0]  # -1
    assert (found.below, found.above) == (0, 0)  # equal is neither below nor above


def test_shares_and_the_way_through_json() -> None:
    counts = ScoreCounts(np.array([3, 1]), np.array([0, 0]), 0.9, 0.6, 3, 0)
    assert counts.shares()["below"] == 0.75
    assert math.isnan(counts.shares()["above"])  # no pair at all
    again = ScoreCounts.from_dict(counts.as_dict())
    assert again.as_dict() == counts.as_dict()


def test_thresholds_are_those_of_the_loss_where_it_has_such() -> None:
    assert thresholds({"name": "roadmap", "alpha": 0.8, "beta": 0.3}) == (0.8, 0.3, True)
    assert thresholds({"name": "smoothap"}) == (0.9, 0.6, False)
    assert thresholds({"name": "multi_similarity", "alpha": 2.0, "beta": 40.0}) == (0.9, 0.6, False)


def test_precision_by_rank_is_that_of_a_loop() -> None:
    right = torch.tensor([[1, 0, 1], [0, 0, 0], [1, 1, 1]], dtype=torch.bool)
    places = torch.tensor([[4, 2, 1], [0, 1, 3], [3, 0, -1]])
    found = precisions_at_ranks(places, right, torch.tensor([2, 0, 5]))
    assert found[0].tolist() == [
        1.0,
        (1 / 2 + 1) / 2,
        (2 / 3 + 2 / 3) / 2,
    ]  # the second has nothing to find; -1 is none
    assert found[1].tolist() == [1.0, 1.0, (2 / 3 + 1) / 2]


@given(st.integers(0, 10**6), st.booleans())
def test_precision_at_one_and_at_r_are_the_evaluations_own(seed: int, alone: bool) -> None:
    queries = vectors(seed, 7, 3)  # too few for t-SNE, which would take its time
    gallery = None if alone else vectors(seed + 1, 15, 3)
    found = measures_of(Sides.of(queries, gallery), queries.labels.numpy(), 0.9, 0.6)
    expected = evaluate(queries, gallery)
    if expected.metrics["queries"] > expected.metrics["queries_without_positives"]:
        assert found.precisions[0, 0] == pytest.approx(expected.metrics["R@1"])
        assert (found.precisions[0] <= found.precisions[1] + 1e-12).all()
        assert found.precisions.shape[1] == (6 if alone else 15)
