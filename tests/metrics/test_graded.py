"""graded_metrics against literal loops over all orders of ties, scikit-learn, and the metrics of single levels."""

from __future__ import annotations

import math
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from roadmap.metrics import graded_metrics, retrieval_metrics
from roadmap.metrics.graded import GRADED

from .graded_literal import h_ap, literal_values, relevance, shared_level, weighted
from .test_ranking import on_circle

KS = [1, 2, 1000]
TIES = ["pessimistic", "mean"]
# What a gallery item may be to a query at (0, 0, 0): nothing, or sharing the first, the first two or all levels.
ITEMS = {0: (1, 1, 1), 1: (0, 2, 2), 2: (0, 0, 3), 3: (0, 0, 0)}


def one_query(scores: list[float], levels: list[int], **options: Any) -> dict[str, float]:
    query = torch.tensor([[1.0, 0.0]], dtype=torch.float64)
    paths = torch.tensor([ITEMS[level] for level in levels])
    found: dict[str, float] = graded_metrics(
        query, torch.zeros(1, 3, dtype=torch.int64), on_circle(scores), paths, KS, **options
    )
    return found


rankings = st.lists(st.tuples(st.sampled_from([0.9, 0.5, -0.25]), st.integers(0, 3)), min_size=1, max_size=6).filter(
    lambda items: any(level for _, level in items)
)


@settings(max_examples=60)
@given(rankings, st.sampled_from([0.0, 1.0, 2.5]), st.sampled_from(TIES))
def test_every_value_is_that_of_literal_loops_over_all_orders(items, alpha, ties):
    scores, levels = [s for s, _ in items], [level for _, level in items]
    truth = literal_values(scores, levels, relevance(levels, 3, alpha), 3, KS, ties)
    found = one_query(scores, levels, alpha=alpha, ties=ties)
    assert {name: found[name] for name in truth} == pytest.approx(truth, abs=1e-11)
    missing = set(found) - set(truth) - {"queries", "queries_without_positives"}
    assert all(math.isnan(found[name]) for name in missing)


@settings(max_examples=40)
@given(rankings, st.tuples(*[st.just(0.0) | st.floats(0.1, 2)] * 3).filter(any), st.sampled_from(TIES))
def test_with_weights_h_ap_is_the_weighted_mean_of_the_aps_of_the_levels(items, weights, ties):
    scores, levels = [s for s, _ in items], [level for _, level in items]
    query = torch.tensor([[1.0, 0.0]], dtype=torch.float64)
    parts = [
        (w, retrieval_metrics(query, [1], on_circle(scores), [int(level >= p) for level in levels], ties=ties)["mAP"])
        for p, w in enumerate(weights, start=1)
    ]
    there = [(w, ap) for w, ap in parts if not math.isnan(ap)]
    if not sum(w for w, _ in there):
        assert math.isnan(one_query(scores, levels, weights=weights, ties=ties)["H-AP"])
        return
    expected = sum(w * ap for w, ap in there) / sum(w for w, _ in there)
    assert one_query(scores, levels, weights=weights, ties=ties)["H-AP"] == pytest.approx(expected, abs=1e-11)
    literal = literal_values(scores, levels, weighted(levels, weights), 3, KS, ties)["H-AP"]
    assert literal == pytest.approx(expected, abs=1e-11)


@settings(max_examples=40)
@given(rankings)
def test_ndcg_with_ties_averaged_is_scikit_learns(items):
    from sklearn.metrics import ndcg_score

    scores, levels = [s for s, _ in items], [level for _, level in items]
    if len(items) > 1:  # it refuses a single document
        truth = ndcg_score([[2**level - 1 for level in levels]], [scores])
        assert one_query(scores, levels, ties="mean")["NDCG"] == pytest.approx(truth, abs=1e-12)


def tree(seed: int, items: int, dim: int = 5, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """Vectors with copies among them, and paths of three levels: uneven, with singletons and unknown levels."""
    generator = torch.Generator().manual_seed(seed)
    vectors = torch.randn(items, dim, generator=generator).to(dtype)
    vectors[: items // 3] = vectors[torch.randint(items, (items // 3,), generator=generator)]
    fine = (torch.rand(items, generator=generator) ** 2 * 9).long()
    paths = torch.stack([fine // 4, fine // 2, fine], dim=1)
    paths[fine == 3] = torch.tensor([-1, -1, 3])
    paths[fine == 5] = torch.tensor([1, -1, 5])
    paths[fine == 7, 2] = -1
    paths[-1] = -1
    return vectors, paths * 2**40 + (paths >= 0).long()


def literal_means(vectors: Tensor, paths: Tensor, ties: str) -> dict[str, float]:
    """All queries against the others; copies of a vector share one score by construction."""
    unit = torch.nn.functional.normalize(vectors.double(), dim=1)
    first = [next(j for j in range(len(unit)) if torch.equal(vectors[j], vectors[i])) for i in range(len(unit))]
    each: dict[str, list[float]] = {}
    empty = 0
    for i in range(len(unit)):
        others = [j for j in range(len(unit)) if j != i]
        scores = [float(unit[first[i]] @ unit[first[j]]) for j in others]
        levels = [shared_level(tuple(paths[i].tolist()), tuple(paths[j].tolist())) for j in others]
        if not any(levels):
            empty += 1
            continue
        for name, value in literal_values(scores, levels, relevance(levels, 3, 1.0), 3, KS, ties).items():
            # a query that does not know a level has nothing to find at it
            if not name.startswith("level") or paths[i, int(name.split()[1]) - 1] >= 0:
                each.setdefault(name, []).append(value)
    counts = {"queries": len(unit), "queries_without_positives": empty}
    return {name: math.fsum(values) / len(values) for name, values in each.items()} | counts


@pytest.mark.parametrize("ties", TIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_uneven_trees_copies_singletons_and_unknown_levels_equal_literal_loops(ties, dtype):
    vectors, paths = tree(3, 12, dtype=dtype)
    assert graded_metrics(vectors, paths, ks=KS, ties=ties) == pytest.approx(
        literal_means(vectors, paths, ties), abs=1e-9
    )


@pytest.mark.parametrize("ties", TIES)
def test_each_level_is_measured_as_its_labels_alone_are(ties):
    vectors, paths = tree(0, 90)
    found, values = graded_metrics(vectors, paths, ks=KS, ties=ties, per_query=True)
    for level in range(3):
        column = paths[:, level]
        apart = torch.where(column < 0, -2 - torch.arange(len(column)), column)
        alone, each = retrieval_metrics(vectors, apart, ks=KS, ties=ties, per_query=True)
        for name in (*(f"R@{k}" for k in KS), "mAP@R"):
            assert found[f"level {level + 1} {name}"] == pytest.approx(alone[name], abs=1e-12)
            assert torch.equal(values[f"level {level + 1} {name}"].isnan(), each[name].isnan())


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10_000), st.sampled_from(TIES), st.floats(0, 3))
def test_with_one_level_h_ap_is_map(seed, ties, alpha):
    vectors, paths = tree(seed, 20)
    labels = paths[:, -1]
    apart = torch.where(labels < 0, -2 - torch.arange(len(labels)), labels)
    found = graded_metrics(vectors, labels[:, None], ties=ties, alpha=alpha)
    plain = retrieval_metrics(vectors, apart, ties=ties)
    assert found["H-AP"] == pytest.approx(plain["mAP"], abs=1e-11, nan_ok=True)
    assert found["queries_without_positives"] == plain["queries_without_positives"]


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10_000))
def test_a_perfect_ranking_is_worth_one(seed):
    paths = tree(seed, 15)[1][:-1]
    known = (paths >= 0).all(1)
    paths = paths[known]
    # a direction for each node: who shares more is nearer
    vectors = torch.cat(
        [torch.eye(64, dtype=torch.float64)[torch.unique(c, return_inverse=True)[1]] for c in paths.T], 1
    )
    found = graded_metrics(vectors, paths, weights=(1, 2, 0.5))
    for name in GRADED:
        assert found[name] == pytest.approx(1.0, abs=1e-12, nan_ok=True), name


def test_h_ap_asks_for_the_order_of_relevance_which_crowds_may_turn_round():
    """HAPPIER's relevance is shared out over the items of a level: of many close ones each counts less than a single
    distant one, and the order by level is then not the best by H-AP, though it is by NDCG and ASI."""
    levels = [3, 3, 3, 3, 3, 1]
    by_level = one_query([0.9, 0.8, 0.7, 0.6, 0.5, 0.4], levels)
    by_relevance = one_query([0.8, 0.7, 0.6, 0.5, 0.4, 0.9], levels)
    assert [by_level["NDCG"], by_level["ASI"]] == pytest.approx([1, 1])
    assert by_level["H-AP"] < 1
    assert by_relevance["H-AP"] == pytest.approx(1)


@pytest.mark.parametrize("ties", TIES)
def test_results_do_not_depend_on_the_order_of_the_input_to_the_last_bit(ties):
    vectors, paths = tree(5, 400, dim=7, dtype=torch.float32)
    straight, values = graded_metrics(vectors, paths, ks=KS, ties=ties, per_query=True)
    order = torch.randperm(len(vectors))
    shuffled, others = graded_metrics(vectors[order], paths[order], ks=KS, ties=ties, per_query=True)
    assert straight == shuffled
    for name, value in values.items():
        assert torch.equal(value[order].nan_to_num(-1), others[name].nan_to_num(-1)), name


def test_a_gallery_with_the_queries_in_it_is_the_queries_by_themselves():
    vectors, paths = tree(1, 60)
    where = torch.randperm(60)
    gallery, inverse = vectors[where], torch.empty_like(where).scatter_(0, where, torch.arange(60))
    alone, values = graded_metrics(vectors, paths, per_query=True)
    found, others = graded_metrics(vectors, paths, gallery, paths[where], query_index=inverse, per_query=True)
    assert found == alone
    assert all(torch.equal(values[name].nan_to_num(-1), others[name].nan_to_num(-1)) for name in values)
    ignored = graded_metrics(vectors, paths, gallery, paths[where], ignore=[[int(i)] for i in inverse])
    assert ignored == alone


def test_small_chunks_change_no_bit():
    vectors, paths = tree(2, 120, dim=16, dtype=torch.float32)
    whole, values = graded_metrics(vectors, paths, ks=KS, per_query=True)
    with pytest.raises(ValueError, match=r"memory must be at least (\d+) bytes") as refused:
        graded_metrics(vectors, paths, memory=1)
    least = int(str(refused.value).split("at least ")[1].split()[0])
    small, others = graded_metrics(vectors, paths, ks=KS, memory=least, per_query=True)
    assert small == whole
    assert all(torch.equal(values[name].nan_to_num(-1), others[name].nan_to_num(-1)) for name in values)


MEMORY_PROBE = """
import resource, torch
from roadmap.metrics import graded_metrics
torch.set_num_threads(1)
fine = torch.arange(2000) % 40
paths, vectors = torch.stack([fine % 2, fine], 1), torch.randn(2000, 16)
graded_metrics(vectors[:200], paths[:200], memory=64 << 20)  # libraries load what they load
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
graded_metrics(vectors[:600], paths[:600], vectors, paths, memory=96 << 20)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024)
"""


def test_the_memory_budget_is_kept():
    # 600,000 pairs of positives: over 150 MiB if they were held at once
    grown = subprocess.run([sys.executable, "-c", MEMORY_PROBE], capture_output=True, text=True, check=True).stdout
    assert float(grown) < 96 + 8


def test_a_dead_network_is_measured_too():
    """All scores tie: the largest groups there are."""
    _, paths = tree(4, 60)
    worst, each = graded_metrics(torch.ones(60, 4), paths, per_query=True)
    mean = graded_metrics(torch.ones(60, 4), paths, ties="mean")
    assert 0 < worst["NDCG"] < mean["NDCG"] < 1
    assert 0 < worst["ASI"] < mean["ASI"] < 1
    levels = [shared_level(tuple(paths[0].tolist()), tuple(path.tolist())) for path in paths[1:]]
    truth = h_ap([0.0] * 59, relevance(levels, 3, 1.0))
    assert each["H-AP"][0].item() == pytest.approx(truth, abs=1e-12)


def test_what_is_not_known_is_shared_with_nobody():
    """Not with another item that does not know it either: at a level in the middle, or at all of them."""
    query, scores = (0, -1, 5), [0.9, 0.5, 0.25, -0.25]
    items = [(0, -1, 6), (-1, -1, -1), (0, 2, 7), (0, -1, 5)]
    levels = [shared_level(query, item) for item in items]
    assert levels == [1, 0, 1, 3]
    vector = torch.tensor([[1.0, 0.0]], dtype=torch.float64)
    found = graded_metrics(vector, torch.tensor([query]), on_circle(scores), torch.tensor(items), KS)
    truth = literal_values(scores, levels, relevance(levels, 3, 1.0), 3, KS, "pessimistic")
    assert {name: found[name] for name in GRADED} == pytest.approx({name: truth[name] for name in GRADED}, abs=1e-12)
    assert math.isnan(found["level 2 R@1"])
    nobody = torch.full((2, 3), -1)
    lost = graded_metrics(torch.eye(2, 3), nobody, torch.eye(2, 3), nobody)
    assert lost["queries_without_positives"] == 2
    assert math.isnan(lost["H-AP"])


def test_levels_have_names_and_nobody_to_find_is_nan():
    vectors, _ = tree(0, 4)
    found, values = graded_metrics(vectors, np.arange(8).reshape(4, 2), levels=("genus", "species"), per_query=True)
    names = ["genus R@1", "genus mAP@R", "species R@1", "species mAP@R", "queries", "queries_without_positives"]
    assert list(found) == [*GRADED, *names]
    assert (found["queries"], found["queries_without_positives"]) == (4, 4)
    assert all(math.isnan(found[name]) and values[name].isnan().all() for name in values)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"query_labels": torch.zeros(3, 2)}, TypeError, "query_labels must hold integers, got torch.float32"),
        ({"query_labels": [1, 2, 3]}, ValueError, r"query_labels must have shape \(3, levels\)"),
        ({"query_labels": [[0, 0], [1, 0], [1, 1]]}, ValueError, "no tree: 1 items share a node of level 2"),
        ({"query_labels": [[0, 0], [-1, 0], [1, 1]]}, ValueError, "a node must have one parent"),
        ({"query_labels": [[0, -1, 0], [1, -1, 0], [1, 1, 1]]}, ValueError, "1 items share a node of level 3"),
        ({"levels": ("a",)}, ValueError, "levels must be 2 different names"),
        ({"levels": ("a", "a")}, ValueError, "levels must be 2 different names"),
        ({"alpha": -1}, ValueError, "alpha must be >= 0"),
        ({"alpha": math.nan}, ValueError, "alpha must be >= 0"),
        ({"alpha": math.inf}, ValueError, r"not so large that \(1 / 2\)\^alpha is nothing, got inf"),
        ({"alpha": 2000}, ValueError, r"not so large that \(1 / 2\)\^alpha is nothing, got 2000"),
        (
            {"query_labels": np.array([[0, 2**64 - 1], [0, 1], [1, 2]], dtype=np.uint64)},
            ValueError,
            r"query_labels must be below 2\^63, got 18446744073709551615",
        ),
        ({"weights": (1,)}, ValueError, "weights must be 2 numbers >= 0"),
        ({"weights": (1, float("nan"))}, ValueError, "weights must be 2 numbers >= 0, finite"),
        ({"weights": (float("inf"), 1)}, ValueError, "weights must be 2 numbers >= 0, finite"),
        ({"weights": (0, 0)}, ValueError, "not all 0"),
        ({"ties": "best"}, ValueError, "ties must be one of"),
        ({"gallery": torch.ones(2, 3)}, ValueError, "gallery came without gallery_labels"),
        (
            {"gallery": torch.ones(2, 3), "gallery_labels": [[0], [1]]},
            ValueError,
            "query_labels have 2 levels and gallery_labels 1",
        ),
        ({"query_index": [0, 1, 2]}, ValueError, "query_index came without a gallery"),
    ],
)
def test_bad_arguments_are_named(change, error, message):
    arguments = {"queries": torch.ones(3, 3), "query_labels": [[0, 0], [0, 1], [1, 2]]} | change
    with pytest.raises(error, match=message):
        graded_metrics(**arguments)


@pytest.mark.parametrize("ties", TIES)
def test_any_alpha_that_is_taken_gives_a_number(ties):
    """A coarse level that counts next to nothing is still something to find."""
    found = one_query([0.9, 0.5], [0, 1], alpha=600.0, ties=ties)
    assert found["H-AP"] == pytest.approx(0.5, abs=1e-12)
