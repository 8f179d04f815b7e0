"""graded_metrics of sets of labels, and of grades pair by pair, against literal loops, other libraries, the losses."""

from __future__ import annotations

import math
import subprocess
import sys
from typing import Any, get_args

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from roadmap.losses import GradedNDCG, HierarchicalAP, h_ap, ndcg
from roadmap.losses.relevance import SetRelevance
from roadmap.metrics import graded_metrics, retrieval_metrics
from roadmap.metrics.degrees import GivenGrades, PairDegrees
from roadmap.metrics.graded import GRADED
from roadmap.metrics.grades import SetGrades
from roadmap.metrics.relevance import exclusions

from .graded_literal import values_by_degree
from .literal import literal_mean, literal_pessimistic
from .test_ranking import labelled, on_circle

KS = [1, 2, 1000]
TIES = ["pessimistic", "mean"]
SCORES = [0.9, 0.5, -0.25]
QUERY = torch.tensor([[1.0, 0.0]], dtype=torch.float64)


def literal_query(scores: list[float], close: list[float], rel: list[float], ties: str, gain: str = "exponential"):
    """Every metric of one query to whom somebody is relevant."""
    plain = literal_pessimistic if ties == "pessimistic" else literal_mean
    return values_by_degree(scores, close, rel, ties, gain) | plain(scores, [grade > 0 for grade in close], KS)


def multi_hot(sets: list[set[int]], labels: int = 6) -> Tensor:
    return torch.tensor([[label in some for label in range(labels)] for some in sets])


def grade(one: set[int], other: set[int], kind: str) -> float:
    common = len(one & other)
    return common / len(one | other) if common and kind == "iou" else float(common)


label_sets = st.sets(st.integers(0, 5))
rankings = st.lists(st.tuples(st.sampled_from(SCORES), label_sets), min_size=1, max_size=6)


@settings(max_examples=80)
@given(label_sets, rankings, st.sampled_from([None, "iou", "count"]), st.sampled_from(TIES))
def test_sets_are_measured_as_literal_loops_over_all_orders_say(query, items, kind, ties):
    scores, sets = [score for score, _ in items], [some for _, some in items]
    close, rel = ([grade(query, some, kind or unless_told) for some in sets] for unless_told in ("count", "iou"))
    found = graded_metrics(QUERY, multi_hot([query]), on_circle(scores), multi_hot(sets), KS, sets=kind, ties=ties)
    assert found.pop("queries") == 1
    assert found.pop("queries_without_positives") == (not any(close))
    if any(close):
        assert found == pytest.approx(literal_query(scores, close, rel, ties), abs=1e-11)
    else:
        assert all(math.isnan(value) for value in found.values())


@pytest.mark.parametrize("ties", TIES)
def test_what_shares_more_may_be_less_alike(ties):
    """Two of five labels against one of one: of equal scores the worst order by count is not that by iou."""
    query, sets, scores = {0, 1}, [{0, 1, 2, 3, 4}, {0}, set(), {0, 1}], [0.5, 0.5, 0.5, 0.25]
    close, rel = ([grade(query, some, kind) for some in sets] for kind in ("count", "iou"))
    assert close[0] > close[1]
    assert rel[0] < rel[1]
    found = graded_metrics(QUERY, multi_hot([query]), on_circle(scores), multi_hot(sets), KS, ties=ties)
    truth = literal_query(scores, close, rel, ties)
    assert {name: found[name] for name in truth} == pytest.approx(truth, abs=1e-12)


pair_grades = st.one_of(st.sampled_from([-1.0, -0.25, 0.0, 0.0, 1.0, 2.0]), st.floats(1e-12, 7))


@settings(max_examples=100)
@given(
    st.lists(st.tuples(st.sampled_from(SCORES), pair_grades), min_size=1, max_size=6),
    st.sampled_from(["exponential", "linear"]),
    st.sampled_from(TIES),
)
def test_grades_are_measured_as_literal_loops_say_without_those_below_zero(items, gain, ties):
    scores, grades = [score for score, _ in items], [grade for _, grade in items]
    found = graded_metrics(QUERY, gallery=on_circle(scores), grades=[grades], ks=KS, gain=gain, ties=ties)
    listed = [item for item in items if item[1] >= 0]
    assert found.pop("queries_without_positives") == (max(grades) <= 0)
    if max(grades) > 0:
        scores, grades = [score for score, _ in listed], [grade for _, grade in listed]
        truth = literal_query(scores, grades, grades, ties, gain)
        assert {name: found[name] for name in truth} == pytest.approx(truth, abs=1e-11)


@settings(max_examples=40)
@given(st.lists(st.tuples(st.sampled_from(SCORES), st.sampled_from([0.0, 0.5, 1.0, 3.25])), min_size=2, max_size=9))
def test_ndcg_of_grades_is_scikit_learns(items):
    from sklearn.metrics import ndcg_score

    scores, grades = [score for score, _ in items], [grade for _, grade in items]
    if any(grades):
        found = graded_metrics(QUERY, gallery=on_circle(scores), grades=[grades], gain="linear", ties="mean")
        assert found["NDCG"] == pytest.approx(ndcg_score([grades], [scores]), abs=1e-12)


def pictures(seed: int, items: int, labels: int = 9) -> tuple[Tensor, Tensor]:
    """Vectors with copies among them, and sets of labels that few or many have; some of none."""
    generator = torch.Generator().manual_seed(seed)
    vectors = torch.randn(items, 5, generator=generator)
    vectors[: items // 3] = vectors[torch.randint(items, (items // 3,), generator=generator)]
    sets = torch.rand(items, labels, generator=generator) < torch.linspace(0.02, 0.5, labels)
    sets[-1] = False
    return vectors, sets


@pytest.mark.parametrize("ties", TIES)
def test_one_label_each_is_what_plain_labels_and_a_tree_of_one_level_are(ties):
    vectors, labels = labelled(3, 60, 9)
    _, numbers = torch.unique(labels, return_inverse=True)
    found = graded_metrics(vectors, torch.nn.functional.one_hot(numbers).bool(), ks=KS, ties=ties)
    plain = retrieval_metrics(vectors, labels, ks=KS, ties=ties)
    assert {name: found[name] for name in plain} == plain
    tree = graded_metrics(vectors, numbers[:, None], ks=KS, ties=ties)
    assert {name: found[name] for name in GRADED} == pytest.approx({name: tree[name] for name in GRADED}, abs=1e-12)
    assert found["H-AP"] == pytest.approx(plain["mAP"], abs=1e-12)


@pytest.mark.parametrize("ties", TIES)
def test_a_tree_is_what_its_grades_are(ties):
    """The level for NDCG and ASI, HAPPIER's relevance for H-AP; and the rest is of who shares a level at all."""
    vectors, labels = labelled(4, 50, 12)
    paths = torch.stack([labels % 3, labels], dim=1)
    levels = (paths[:, None] == paths).sum(2) * (1 - torch.eye(50, dtype=torch.int64))
    tree = graded_metrics(vectors, paths, ties=ties, alpha=2.0)
    by_level = graded_metrics(vectors, grades=levels, ties=ties)
    assert [tree[name] for name in ("NDCG", "ASI")] == pytest.approx([by_level["NDCG"], by_level["ASI"]], abs=1e-12)
    sizes = torch.stack([(levels == level).sum(1) for level in range(3)], dim=1)
    rel = (levels.double() / 2) ** 2.0 / sizes.gather(1, levels)
    assert graded_metrics(vectors, grades=rel, ties=ties)["H-AP"] == pytest.approx(tree["H-AP"], abs=1e-12)
    assert by_level["mAP@R"] == pytest.approx(tree["level 1 mAP@R"], abs=1e-12)


@pytest.mark.parametrize("kind", [None, *get_args(SetGrades)])
def test_what_is_measured_is_what_the_losses_minimise(kind):
    vectors, sets = pictures(0, 40)
    vectors = torch.randn(40, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    told = {} if kind is None else {"sets": kind}
    rules = [loss(**told).relevance.sets for loss in (HierarchicalAP, GradedNDCG)]
    unit = torch.nn.functional.normalize(vectors, dim=1)
    exact = []
    for rule, measure in zip(rules, (h_ap, ndcg), strict=True):
        grades = rule.closeness(sets, sets, torch.float64).fill_diagonal_(-1)
        exact.append(float(measure(unit @ unit.T, grades)))
        given = graded_metrics(vectors, grades=grades)
        assert given["H-AP" if measure is h_ap else "NDCG"] == pytest.approx(exact[-1], abs=1e-12)
    found = graded_metrics(vectors, sets, **told)
    assert [found["H-AP"], found["NDCG"]] == pytest.approx(exact, abs=1e-12)


def check_same_values(one, other) -> None:
    assert one[0] == other[0]
    assert all(torch.equal(value.nan_to_num(-1), other[1][name].nan_to_num(-1)) for name, value in one[1].items())


@pytest.mark.parametrize("kind", get_args(SetGrades))
@pytest.mark.parametrize("ties", TIES)
def test_sets_are_the_grades_that_they_stand_for(kind, ties):
    vectors, sets = pictures(5, 70)
    grades = SetRelevance(kind).closeness(sets, sets, torch.float64)
    by_sets = graded_metrics(vectors, sets, ks=KS, sets=kind, ties=ties, per_query=True)
    check_same_values(by_sets, graded_metrics(vectors, grades=grades, ks=KS, ties=ties, per_query=True))


@pytest.mark.parametrize("ties", TIES)
@pytest.mark.parametrize("kind", [None, *get_args(SetGrades)])
def test_results_do_not_depend_on_the_order_of_the_input_to_the_last_bit(kind, ties):
    vectors, sets = pictures(6, 150)
    straight, values = graded_metrics(vectors, sets, ks=KS, sets=kind, ties=ties, per_query=True)
    order = torch.randperm(150, generator=torch.Generator().manual_seed(2))
    columns = torch.randperm(sets.shape[1])
    shuffled, others = graded_metrics(
        vectors[order], sets[order][:, columns], ks=KS, sets=kind, ties=ties, per_query=True
    )
    check_same_values((straight, {name: value[order] for name, value in values.items()}), (shuffled, others))


@pytest.mark.parametrize("ties", TIES)
def test_who_has_no_label_or_nobodys_adds_nothing(ties):
    """Behind all others, as an item; as a query it does not count."""
    vectors, sets = pictures(7, 40)
    queries, asked = vectors[:9], sets[:9]
    behind = -queries.sum(0, keepdim=True)
    found = graded_metrics(queries, asked, vectors, sets, KS, ties=ties)
    wide = torch.nn.functional.pad(sets, (0, 2))
    strange = wide.new_zeros(2, wide.shape[1])
    strange[1, -1] = True
    gallery, labels = torch.cat([vectors, vectors[:1], vectors[:1]]), torch.cat([wide, strange])
    same = graded_metrics(
        queries, wide[:9], gallery, labels, KS, ties=ties, ignore=[[40, 41]] * 9
    )  # that which is ignored is not there
    assert same == found
    more = graded_metrics(
        torch.cat([queries, behind]), torch.cat([wide[:9], strange[:1]]), vectors, wide, KS, ties=ties
    )
    assert more.pop("queries_without_positives") == found.pop("queries_without_positives") + 1
    assert (more.pop("queries"), found.pop("queries")) == (10, 9)
    assert more == found


@settings(max_examples=40)
@given(rankings, st.sampled_from(TIES))
def test_an_item_without_labels_behind_all_others_changes_nothing(items, ties):
    scores, sets = [score for score, _ in items], [some for _, some in items]
    query = multi_hot([{0, 1}])
    found, more = (
        graded_metrics(QUERY, query, on_circle(scores + [-0.75] * n), multi_hot(sets + [set()] * n), (1, 3), ties=ties)
        for n in (0, 2)
    )
    assert more == pytest.approx(found, abs=1e-12, nan_ok=True)


def test_a_gallery_with_the_queries_in_it_is_the_queries_by_themselves():
    vectors, sets = pictures(1, 60)
    where = torch.randperm(60)
    gallery, inverse = vectors[where], torch.empty_like(where).scatter_(0, where, torch.arange(60))
    alone = graded_metrics(vectors, sets, per_query=True)
    found = graded_metrics(vectors, sets, gallery, sets[where], query_index=inverse, per_query=True)
    check_same_values(found, alone)
    grades = (sets[:, None] & sets[where]).sum(2)
    by_grades = graded_metrics(vectors, None, gallery, grades=grades, query_index=inverse, per_query=True)
    check_same_values(by_grades, graded_metrics(vectors, sets, sets="count", per_query=True))
    ignored = graded_metrics(vectors, sets, gallery, sets[where], ignore=[[int(i)] for i in inverse])
    assert ignored == alone[0]
    left_out = grades.scatter(1, inverse[:, None], -1)
    assert graded_metrics(vectors, None, gallery, grades=left_out) == by_grades[0]
    both = graded_metrics(vectors, None, gallery, grades=left_out, query_index=inverse)
    assert both == by_grades[0]


@pytest.mark.parametrize("by_grades", [False, True], ids=["sets", "grades"])
def test_small_chunks_change_no_bit(by_grades):
    vectors, sets = pictures(2, 130)
    grades = (sets[:, None] & sets).sum(2) - 1
    labels: dict[str, Any] = {"grades": grades} if by_grades else {"query_labels": sets}
    whole = graded_metrics(vectors, ks=KS, per_query=True, **labels)
    with pytest.raises(ValueError, match=r"memory must be at least (\d+) bytes") as refused:
        graded_metrics(vectors, memory=1, **labels)
    least = int(str(refused.value).split("at least ")[1].split()[0])
    check_same_values(graded_metrics(vectors, ks=KS, memory=least, per_query=True, **labels), whole)


MEMORY_PROBE = """
import resource, torch
from roadmap.metrics import graded_metrics
torch.set_num_threads(1)
generator = torch.Generator().manual_seed(0)
sets, vectors = torch.rand(3000, 12, generator=generator) < 0.15, torch.randn(3000, 16, generator=generator)
graded_metrics(vectors[:200], sets[:200], memory=64 << 20)  # libraries load what they load
grades = (sets[:900].float() @ sets.float().T).to(torch.int8) - 1
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
if {by_grades}:
    graded_metrics(vectors[:900], gallery=vectors, grades=grades, memory=96 << 20)
else:
    graded_metrics(vectors[:900], sets[:900], vectors, sets, memory=96 << 20)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024)
"""


@pytest.mark.parametrize("by_grades", [False, True], ids=["sets", "grades"])
def test_the_memory_budget_is_kept(by_grades):
    # 2.7 million pairs, a quarter of them positives: their tables alone would be over 200 MiB at once
    probe = MEMORY_PROBE.replace("{by_grades}", str(by_grades))
    grown = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True).stdout
    assert float(grown) < 96 + 8


@pytest.mark.parametrize("least", [0, -1], ids=["negatives", "in no ranking"])
def test_tables_of_a_chunk_have_no_more_places_than_they_may(least):
    _, sets = pictures(3, 90)
    grades = ((sets[:, None] & sets).sum(2) + least).float()
    excluded = exclusions(90, 90, torch.arange(90), [[0, 1]] * 90, grades.device)
    degrees = PairDegrees.of(GivenGrades(grades, "linear", grades.device), 90, excluded, 500)
    found = []
    for some in degrees.chunks(500, 7):
        tables = degrees.tables(some)
        assert len(some) * (tables.columns.shape[1] + tables.excluded.shape[1]) <= 500
        assert len(some) <= 7
        found += some.tolist()
    assert sorted(found) == (degrees.positives > 0).nonzero()[:, 0].tolist()
    assert max(map(len, degrees.chunks(500, 7))) > 1


def test_arrays_and_all_kinds_of_numbers_are_grades():
    vectors, sets = pictures(8, 30)
    sets[:9, 0] = True
    grades = (sets[:, None] & sets).sum(2)
    whole = graded_metrics(vectors, grades=grades)
    for same in (grades.to(torch.uint8), grades.float().numpy(), grades.tolist(), grades.to(torch.float16)):
        assert graded_metrics(vectors, grades=same) == whole
    assert graded_metrics(vectors, grades=sets[:, :1] & sets[:, 0])["mAP"] == pytest.approx(
        retrieval_metrics(vectors, torch.where(sets[:, 0], 0, 1 + torch.arange(30)))["mAP"]
    )
    assert graded_metrics(vectors.numpy(), sets.numpy()) == graded_metrics(vectors, sets)
    assert graded_metrics(vectors, sets.tolist()) == graded_metrics(vectors, sets)


def test_tiny_and_huge_grades_are_measured():
    scores = [0.9, 0.5, 0.25]
    for factor in (1e-30, 1.0, 1e90):
        grades = [[0.0, 2.0 * factor, factor]]
        found = graded_metrics(QUERY, gallery=on_circle(scores), grades=grades, gain="linear")
        truth = literal_query(scores, [0, 2, 1], [0, 2, 1], "pessimistic", "linear")
        assert {name: found[name] for name in GRADED} == pytest.approx({n: truth[n] for n in GRADED}, abs=1e-12)
    tiny = graded_metrics(QUERY, gallery=on_circle(scores), grades=[[0.0, 2e-20, 1e-20]])
    assert tiny["NDCG"] == pytest.approx(truth["NDCG"], abs=1e-12)  # 2^g - 1 is g log 2 there


S, X = multi_hot([{0}, {0, 1}, {2}]), torch.eye(3)
BAD: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "nothing": (
        {"query_labels": None},
        ValueError,
        "query_labels are missing: give paths in a tree, sets of labels, o",
    ),
    "both": ({"grades": X}, ValueError, "grades came with labels, and each says how relevant an item is; leave one"),
    "one-dimensional": (
        {"query_labels": S[:, 0]},
        ValueError,
        r"query_labels must have shape \(3, labels\).*got \(3,\)",
    ),
    "too few": ({"query_labels": S[:2]}, ValueError, r"query_labels must have shape \(3, labels\), a set for each"),
    "no labels": ({"query_labels": S[:, :0]}, ValueError, r"must have shape \(3, labels\).*got \(3, 0\) of bool"),
    "paths in the gallery": (
        {"gallery": X, "gallery_labels": S.long()},
        TypeError,
        "query_labels are sets and gallery_labels are paths; give both as one kind",
    ),
    "other labels": (
        {"gallery": X, "gallery_labels": S[:, :3]},
        ValueError,
        "query_labels are of 6 labels and gallery_labels of 3; they must agree",
    ),
    "gallery alone": ({"gallery": X}, ValueError, "gallery came without gallery_labels; give both, or neither"),
    "sets": ({"sets": "jaccard"}, ValueError, "sets must be 'iou' or 'count', got 'jaccard'"),
    "gain": ({"gain": "exp"}, ValueError, "gain must be 'exponential' or 'linear', got 'exp'"),
    "levels": ({"levels": ("a",)}, ValueError, "levels=.* is for labels that are paths, and these are sets; leave it"),
    "weights": ({"weights": (1,)}, ValueError, "weights=.* is for labels that are paths, and these are sets; leave it"),
    "alpha": ({"alpha": 2}, ValueError, "alpha=2 is for labels that are paths, and these are sets; leave it out"),
    "sets of a tree": ({"query_labels": S.long(), "sets": "iou"}, ValueError, "sets='iou' is for labels that are sets"),
    "sets of grades": (
        {"query_labels": None, "grades": X, "sets": "iou"},
        ValueError,
        "for labels that are sets, and these are grades; leave it out",
    ),
    "shape": (
        {"query_labels": None, "grades": X[:2]},
        ValueError,
        r"grades must have shape \(queries, gallery\), here \(3, 3\), got \(2, 3\)",
    ),
    "complex": (
        {"query_labels": None, "grades": X + 0j},
        TypeError,
        "grades must be real numbers, got torch.complex64",
    ),
    "NaN": (
        {"query_labels": None, "grades": X * math.nan},
        ValueError,
        "grades must be finite and at most 900 .*got nan",
    ),
    "minus infinity": (
        {"query_labels": None, "grades": torch.where(X > 0, X, -math.inf)},
        ValueError,
        "got -inf; an item that is in no ranking has a grade below 0",
    ),
    "too large": (
        {"query_labels": None, "grades": X * 1000},
        ValueError,
        "at most 900 with gain='exponential', got 1000",
    ),
    "too large for a sum": (
        {"query_labels": None, "grades": X.double() * 1e200, "gain": "linear"},
        ValueError,
        r"at most 1e\+100 with gain='linear', got 1e\+200",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_arguments_are_named(name):
    change, error, message = BAD[name]
    with pytest.raises(error, match=message):
        graded_metrics(**({"queries": X, "query_labels": S} | change))


def test_numpy_masks_of_a_gallery_are_sets():
    vectors, sets = pictures(9, 20)
    found = graded_metrics(vectors[:5], sets[:5].numpy(), vectors, np.asarray(sets))
    assert found == graded_metrics(vectors[:5], sets[:5], vectors, sets)
