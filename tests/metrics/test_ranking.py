"""retrieval_metrics against literal loops, other libraries, and the traps other evaluations fell into."""

from __future__ import annotations

import math
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from roadmap.metrics import retrieval_metrics

from .literal import eq1_average_precision, literal_mean, literal_pessimistic

KS = [1, 2, 3, 5, 1000]
NAMES = [*(f"R@{k}" for k in KS), "P@1", "R-precision", "mAP@R", "mAP", "AP loss"]


def on_circle(scores: list[float]) -> Tensor:
    """Plane vectors whose cosine with (1, 0) is each of the scores."""
    s = torch.tensor(scores, dtype=torch.float64)
    return torch.stack([s, (1 - s * s).sqrt()], dim=1)


def one_query(scores: list[float], relevant: list[bool], **options: object) -> dict[str, float]:
    query = torch.tensor([[1.0, 0.0]], dtype=torch.float64)
    labels = torch.tensor(relevant).long()
    return retrieval_metrics(query, torch.tensor([1]), on_circle(scores), labels, ks=KS, **options)  # type: ignore[call-overload, no-any-return]


rankings = st.lists(
    st.tuples(st.sampled_from([0.9, 0.5, 0.25, -0.25, -0.5]), st.booleans()), min_size=1, max_size=7
).filter(lambda items: any(hit for _, hit in items))


@given(rankings)
def test_pessimistic_values_are_the_worst_over_orders_and_eq_1(items: list[tuple[float, bool]]) -> None:
    scores, relevant = [s for s, _ in items], [hit for _, hit in items]
    found, truth = one_query(scores, relevant), literal_pessimistic(scores, relevant, KS)
    assert {name: found[name] for name in NAMES} == pytest.approx(truth, abs=1e-12)


@given(rankings)
def test_mean_values_are_the_expectation_over_all_orders(items: list[tuple[float, bool]]) -> None:
    scores, relevant = [s for s, _ in items], [hit for _, hit in items]
    found, truth = one_query(scores, relevant, ties="mean"), literal_mean(scores, relevant, KS)
    assert {name: found[name] for name in NAMES} == pytest.approx(truth, abs=1e-11)


@given(rankings)
def test_map_is_scikit_learns_average_precision_ties_and_negative_scores_included(
    items: list[tuple[float, bool]],
) -> None:
    from sklearn.metrics import average_precision_score

    scores, relevant = [s for s, _ in items], [hit for _, hit in items]
    assert one_query(scores, relevant)["mAP"] == pytest.approx(average_precision_score(relevant, scores), abs=1e-12)


def labelled(seed: int, items: int, classes: int, dim: int = 6) -> tuple[Tensor, Tensor]:
    """Vectors in uneven classes, some alone in theirs, with copies of whole vectors among them; labels are huge."""
    generator = torch.Generator().manual_seed(seed)
    vectors = torch.randn(items, dim, generator=generator)
    copies = torch.randint(items, (items // 3,), generator=generator)
    vectors[: len(copies)] = vectors[copies]
    labels = (torch.rand(items, generator=generator) ** 2 * classes).long()
    return vectors, labels + 2**53 * (1 + labels % 2)


def literal_metrics(vectors: Tensor, labels: Tensor, **options: str) -> dict[str, float]:
    """All queries against the others, by loops; copies of a vector share one score by construction."""
    unit = torch.nn.functional.normalize(vectors.double(), dim=1)
    first = [next(j for j in range(len(unit)) if torch.equal(vectors[j], vectors[i])) for i in range(len(unit))]
    literal = literal_mean if options.get("ties") == "mean" else literal_pessimistic
    each = []
    for i in range(len(unit)):
        others = [j for j in range(len(unit)) if j != i]
        scores = [float(unit[first[i]] @ unit[first[j]]) for j in others]
        relevant = [bool(labels[i] == labels[j]) for j in others]
        if any(relevant):
            each.append(literal(scores, relevant, KS))
    return {name: sum(values[name] for values in each) / len(each) for name in each[0]} | {
        "queries": len(unit),
        "queries_without_positives": len(unit) - len(each),
    }


@pytest.mark.parametrize("ties", ["pessimistic", "mean"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_uneven_classes_duplicates_and_singletons_equal_literal_loops(ties: str, dtype: torch.dtype) -> None:
    for seed in range(3):
        vectors, labels = labelled(seed, items=13, classes=5)
        vectors = vectors.to(dtype)
        found = retrieval_metrics(vectors, labels, ks=KS, ties=ties)  # type: ignore[call-overload]
        assert found == pytest.approx(literal_metrics(vectors, labels, ties=ties), abs=1e-9)


@pytest.mark.parametrize("ties", ["pessimistic", "mean"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("dim", [3, 17, 64])
def test_results_do_not_depend_on_the_order_of_the_input_to_the_last_bit(
    ties: str, dtype: torch.dtype, dim: int
) -> None:
    vectors, labels = labelled(seed=5, items=1700, classes=40, dim=dim)
    vectors = vectors.to(dtype)
    straight, values = retrieval_metrics(vectors, labels, ks=KS, ties=ties, per_query=True)  # type: ignore[call-overload]
    order = torch.randperm(len(vectors))
    shuffled, shuffled_values = retrieval_metrics(vectors[order], labels[order], ks=KS, ties=ties, per_query=True)  # type: ignore[call-overload]
    assert straight == shuffled
    for name in NAMES:
        assert torch.equal(values[name][order].nan_to_num(-1), shuffled_values[name].nan_to_num(-1)), name


def test_queries_against_a_gallery_equal_the_same_queries_by_themselves() -> None:
    vectors, labels = labelled(seed=1, items=60, classes=9)
    alone = retrieval_metrics(vectors, labels, ks=KS)
    apart = retrieval_metrics(vectors, labels, vectors, labels, ks=KS, query_index=torch.arange(60))
    assert alone == apart
    with_self = retrieval_metrics(vectors, labels, vectors, labels, ks=KS)
    assert with_self["queries_without_positives"] == 0  # each finds at least itself
    assert with_self["mAP"] > alone["mAP"]


def test_the_query_is_excluded_by_identity_not_by_rank() -> None:
    # a, a copy of a, and another of its class: the copy, not the query, must stay at the top
    vectors = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.6, 0.8], [0.9, 0.435889894]])
    found, values = retrieval_metrics(vectors, [0, 0, 0, 1], ks=(1,), per_query=True)
    assert values["R@1"].tolist()[:2] == [1.0, 1.0]
    # the copy of another class ties with nothing else at the top: a miss, whichever comes first in the input
    for labels in ([0, 1, 0, 1], [1, 0, 1, 0]):
        _, values = retrieval_metrics(vectors, labels, ks=(1,), per_query=True)
        assert values["R@1"].tolist()[:2] == [0.0, 0.0]
    assert found["queries"] == 4


def test_two_tied_positives_at_the_top_are_a_hit_in_every_order() -> None:
    found = one_query([0.9, 0.9, 0.5], [True, True, False])
    assert found["R@1"] == found["P@1"] == found["mAP@R"] == found["mAP"] == found["R-precision"] == 1.0


@pytest.mark.parametrize("ties", ["pessimistic", "mean"])
def test_an_excluded_item_that_ties_is_gone_too(ties: str) -> None:
    # the query, its copy in the same class, and something else: the copy is first and alone there
    vectors = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.6, 0.8]])
    _, values = retrieval_metrics(vectors, [0, 0, 1], ks=(1,), ties=ties, per_query=True)  # type: ignore[call-overload]
    for name in ("R@1", "R-precision", "mAP@R", "mAP"):
        assert values[name].tolist()[:2] == [1.0, 1.0], name


def test_a_negative_that_ties_with_the_best_positive_is_a_miss_unless_averaged() -> None:
    assert one_query([0.9, 0.9], [True, False])["R@1"] == 0.0
    averaged = one_query([0.9, 0.9], [True, False], ties="mean")
    assert averaged["R@1"] == pytest.approx(0.5)
    assert averaged["mAP"] == pytest.approx(0.75)


def test_paper_toy_example_positives_below_a_negative() -> None:
    # scores 0.50 and 0.51 relevant, 0.64 not: AP = (1/2 + 2/3) / 2
    found = one_query([0.5, 0.51, 0.64], [True, True, False])
    assert found["AP loss"] == pytest.approx(1 - (1 / 2 + 2 / 3) / 2)
    assert found["mAP@R"] == pytest.approx((1 / 2) / 2)  # the second positive is third, beyond R = 2


def test_one_hit_of_many_positives_is_divided_by_their_number() -> None:
    # one positive first, then 99 negatives, then 99 positives: AP@R counts 1 of R = 100, not 1 of 1
    scores = [1 - 0.005 * j for j in range(199)]
    relevant = [True] + [False] * 99 + [True] * 99
    assert one_query(scores, relevant)["mAP@R"] == pytest.approx(1 / 100)


def test_relevant_items_with_negative_scores_count() -> None:
    assert one_query([0.9, 0.1, -0.2], [True, False, True])["mAP"] == pytest.approx((1 + 2 / 3) / 2)


def test_labels_above_2_to_the_24_and_53_stay_distinct() -> None:
    vectors = torch.tensor([[1.0, 0.0], [0.99, 0.14], [0.0, 1.0], [0.14, 0.99]])
    for base in (2**24, 2**53, -(2**62)):
        labels = torch.tensor([base, base + 1, base + 1, base])
        assert retrieval_metrics(vectors, labels, ks=(1,))["R@1"] == 0.0
        assert retrieval_metrics(vectors, torch.tensor([base, base, base + 1, base + 1]), ks=(1,))["R@1"] == 1.0


def test_half_precision_vectors_are_ranked_in_float32() -> None:
    vectors, labels = labelled(seed=3, items=200, classes=20)
    halved = vectors.bfloat16()
    assert retrieval_metrics(halved, labels) == retrieval_metrics(halved.float(), labels)


def test_a_training_precision_setting_does_not_reach_the_ranks() -> None:
    vectors, labels = labelled(seed=4, items=300, classes=30, dim=64)
    expected = retrieval_metrics(vectors, labels)
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("medium")
        assert retrieval_metrics(vectors, labels) == expected
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision(before)


def test_ignored_items_leave_the_ranking_whatever_their_label() -> None:
    vectors, labels = labelled(seed=6, items=40, classes=6)
    gallery, gallery_labels = vectors[10:], labels[10:]
    ignore = [torch.randperm(30)[: i % 4] for i in range(10)]
    _, found = retrieval_metrics(
        vectors[:10], labels[:10], gallery, gallery_labels, ks=KS, ignore=ignore, per_query=True
    )
    for i in range(10):
        kept = torch.ones(30, dtype=torch.bool)
        kept[ignore[i]] = False
        _, alone = retrieval_metrics(
            vectors[i : i + 1], labels[i : i + 1], gallery[kept], gallery_labels[kept], ks=KS, per_query=True
        )
        for name in NAMES:
            assert found[name][i].item() == pytest.approx(alone[name].item(), nan_ok=True), (i, name)


def test_an_item_named_twice_is_excluded_once() -> None:
    vectors, labels = labelled(seed=6, items=30, classes=4)
    once = retrieval_metrics(vectors, labels, ks=KS)
    ignore = [[i, i] for i in range(30)]
    assert retrieval_metrics(vectors, labels, ks=KS, ignore=ignore) == once


def test_queries_without_positives_are_reported_and_stay_out_of_the_means() -> None:
    vectors = torch.eye(4)
    summary, values = retrieval_metrics(vectors, [0, 0, 1, 2], ks=(1,), per_query=True)
    assert (summary["queries"], summary["queries_without_positives"]) == (4, 2)
    assert values["mAP"].isnan().tolist() == [False, False, True, True]
    assert summary["mAP"] == pytest.approx(values["mAP"][:2].mean().item())
    nobody = retrieval_metrics(vectors, [0, 1, 2, 3], ks=(1,))
    assert math.isnan(nobody["mAP"])
    assert nobody["queries_without_positives"] == 4
    unknown = retrieval_metrics(vectors, [7, 7, 7, 0], vectors, [0, 1, 2, 3], ks=(1,))
    assert unknown["queries_without_positives"] == 3


def test_pytorch_metric_learning_agrees_where_it_is_right() -> None:
    calculator = pytest.importorskip("pytorch_metric_learning.utils.accuracy_calculator")
    pytest.importorskip("faiss")
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(400) % 57
    vectors = torch.randn(57, 24, generator=generator)[labels] + 1.5 * torch.randn(400, 24, generator=generator)
    vectors = torch.nn.functional.normalize(vectors)
    peer = calculator.AccuracyCalculator(
        include=("precision_at_1", "r_precision", "mean_average_precision_at_r", "mean_average_precision"), k=None
    ).get_accuracy(vectors, labels, vectors, labels, ref_includes_query=True)
    ours = retrieval_metrics(vectors, labels)
    assert ours["P@1"] == ours["R@1"] == pytest.approx(peer["precision_at_1"])
    assert ours["R-precision"] == pytest.approx(peer["r_precision"])
    assert ours["mAP@R"] == pytest.approx(peer["mean_average_precision_at_r"])
    assert ours["mAP"] == pytest.approx(peer["mean_average_precision"])


def test_many_positives_equal_eq_1() -> None:
    # two classes: each query has about 150 positives, which are placed among sorted thresholds
    vectors, labels = labelled(seed=8, items=300, classes=2, dim=3)
    _, values = retrieval_metrics(vectors.double(), labels, per_query=True)
    unit = torch.nn.functional.normalize(vectors.double())
    for i in range(0, 300, 37):
        others = [j for j in range(300) if j != i and not torch.equal(vectors[i], vectors[j])]
        if len(others) == 299:  # a query without copies: literal scores meet no tie that rounding could break
            scores = (unit[others] @ unit[i]).tolist()
            distinct = {}
            for j, score in zip(others, scores, strict=True):
                distinct[j] = next(
                    (scores[a] for a, b in enumerate(others) if torch.equal(vectors[b], vectors[j])), score
                )
            ap = eq1_average_precision([distinct[j] for j in others], [bool(labels[i] == labels[j]) for j in others])
            assert values["mAP"][i].item() == pytest.approx(ap, abs=1e-9)


def test_small_chunks_change_no_bit() -> None:
    vectors, labels = labelled(seed=9, items=500, classes=12)
    whole = retrieval_metrics(vectors, labels, ks=KS, per_query=True)
    import roadmap.metrics.ranking as ranking

    before = ranking.QUERIES_AT_ONCE
    try:
        ranking.QUERIES_AT_ONCE = 7
        parts = retrieval_metrics(vectors, labels, ks=KS, per_query=True)
    finally:
        ranking.QUERIES_AT_ONCE = before
    assert whole[0] == parts[0]
    for name in NAMES:
        assert torch.equal(whole[1][name].nan_to_num(-1), parts[1][name].nan_to_num(-1))


MEMORY_PROBE = """
import resource, torch
from roadmap.metrics import retrieval_metrics
torch.set_num_threads(1)
labels = torch.arange(4000) % 2
vectors = torch.randn(4000, 16)
retrieval_metrics(vectors[:500], labels[:500], memory=64 << 20)  # libraries load what they load
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
retrieval_metrics(vectors, labels, memory=96 << 20)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024)
"""


def test_the_memory_budget_is_kept() -> None:
    # 8 million pairs of positives: over 1 GiB if they were held at once
    grown = float(
        subprocess.run([sys.executable, "-c", MEMORY_PROBE], capture_output=True, text=True, check=True).stdout
    )
    assert grown < 96 + 8


def test_numpy_arrays_and_lists_are_taken() -> None:
    vectors, labels = labelled(seed=2, items=20, classes=4)
    assert retrieval_metrics(vectors.numpy(), labels.tolist()) == retrieval_metrics(vectors, labels)
    assert retrieval_metrics(vectors.numpy().astype(np.float64), labels.numpy())["queries"] == 20


def test_string_labels_are_the_classes_they_name() -> None:
    vectors, labels = labelled(seed=2, items=20, classes=4)
    expected = retrieval_metrics(vectors, labels)
    assert retrieval_metrics(vectors, [f"class {label}" for label in labels.tolist()]) == expected
    assert retrieval_metrics(vectors, np.array([str(label) for label in labels.tolist()], object)) == expected
    # numbered together: the gallery knows other classes than the queries
    queries, gallery = ["b", "c"], ["a", "b", "c", "d"]
    found = retrieval_metrics(torch.eye(4)[1:3], queries, torch.eye(4), np.array(gallery), ks=1)
    assert found["R@1"] == 1.0
    assert found["queries_without_positives"] == 0


def test_a_single_k_is_taken() -> None:
    vectors, labels = labelled(seed=2, items=20, classes=4)
    for single in (10, np.int64(10)):
        assert retrieval_metrics(vectors, labels, ks=single) == retrieval_metrics(vectors, labels, ks=(10,))


def test_one_float64_side_makes_all_scores_float64() -> None:
    # the two cosines differ by 2e-9: float32 cannot tell them apart, and a tie would count against the positive
    query = torch.tensor([[1.0, 0.0]])
    gallery = on_circle([0.6 + 2e-9, 0.6])
    for q, g in ((query, gallery), (query.half(), gallery), (query.double(), gallery)):
        assert retrieval_metrics(q, [1], g, [1, 0], ks=1)["R@1"] == 1.0


def test_progress_is_shown_on_request(capsys: pytest.CaptureFixture[str]) -> None:
    vectors, labels = labelled(seed=2, items=20, classes=4)
    retrieval_metrics(vectors, labels)
    assert capsys.readouterr().err == ""
    retrieval_metrics(vectors, labels, progress=True)
    assert "query" in capsys.readouterr().err


GOOD = torch.eye(3)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (((GOOD * torch.tensor([[1.0], [0], [1]])), [0, 0, 1]), ValueError, "queries row 1 is zero"),
        ((GOOD.index_fill(0, torch.tensor(2), torch.nan), [0, 0, 1]), ValueError, "queries row 2 holds NaN"),
        ((GOOD, [0, 0, 1], torch.eye(3) * float("inf"), [0, 1, 2]), ValueError, "gallery row 0 holds NaN or infinity"),
        ((GOOD.long(), [0, 0, 1]), TypeError, "queries must be floating-point"),
        ((GOOD[0], [0]), ValueError, r"queries must have shape \(N, D\)"),
        ((GOOD, [0, 1]), ValueError, r"query_labels must have shape \(3,\)"),
        ((GOOD, [0.0, 1.0, 1.0]), TypeError, "query_labels must be integers or strings, got torch.float"),
        ((GOOD, [0, "0", 1]), TypeError, "query_labels must be all integers or all strings, got int 0 among them"),
        ((GOOD, [b"a", b"a", b"b"]), TypeError, "must be all integers or all strings, got bytes b'a' among them"),
        ((GOOD, [None, "a", "a"]), TypeError, "must be all integers or all strings, got .*NoneType.* among them"),
        ((GOOD, [["a"], ["a"], ["b"]]), ValueError, r"query_labels must have shape \(3,\).*got \(3, 1\)"),
        (
            (GOOD, ["a", "a", "b"], GOOD, [0, 0, 1]),
            TypeError,
            "query_labels are strings and gallery_labels are integers, which never match; give both as one kind",
        ),
        ((GOOD, [0, 0, 1], GOOD, ["0", "0", "1"]), TypeError, "are integers and gallery_labels are strings"),
        (
            (GOOD, np.array([2**64 - 1, 5, 5], dtype=np.uint64), GOOD, [-1, 5, 5]),
            ValueError,
            r"query_labels must be below 2\^63, got 18446744073709551615; number them anew",
        ),
        ((GOOD, [0, 0, 1], GOOD), ValueError, "gallery came without gallery_labels"),
        ((GOOD, [0, 0, 1], None, [0, 1, 2]), ValueError, "gallery_labels came without gallery"),
        ((GOOD, [0, 0, 1], torch.eye(4), [0] * 4), ValueError, "queries have 3 dimensions and the gallery 4"),
        ((GOOD, [0, 0, 1], None, None, (0,)), ValueError, "ks must be whole numbers"),
        ((GOOD, [0, 0, 1], None, None, (1.5,)), ValueError, "ks must be whole numbers"),
        ((GOOD, [0, 0, 1], None, None, 0), ValueError, r"at least 1, such as 10 or \(1, 10\), got 0"),
        ((GOOD, [0, 0, 1], None, None, 2.5), ValueError, "ks must be whole numbers.*got 2.5"),
        ((GOOD, [0, 0, 1], None, None, True), ValueError, "ks must be whole numbers.*got True"),
        ((GOOD, [0, 0, 1], None, None, "10"), ValueError, "ks must be whole numbers.*got '10'"),
        ((GOOD, [0, 0, 1], None, None, None), ValueError, "ks must be whole numbers.*got None"),
    ],
)
def test_bad_vectors_and_labels_are_named(arguments: tuple[object, ...], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        retrieval_metrics(*arguments)  # type: ignore[call-overload]


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"ties": "random"}, ValueError, "ties must be one of .*pessimistic.*mean.*got 'random'"),
        ({"query_index": [0, 1, 2]}, ValueError, "query_index came without a gallery"),
        (
            {"gallery": GOOD, "gallery_labels": [0, 1, 2], "query_index": [0, 1]},
            ValueError,
            "query_index must have shape",
        ),
        ({"gallery": GOOD, "gallery_labels": [0, 1, 2], "query_index": [0, 1, 3]}, ValueError, "indices from -1 to 2"),
        ({"ignore": [[0], [1]]}, ValueError, "one list of gallery indices for each of 3 queries, got 2"),
        ({"ignore": [[0], [5], []]}, ValueError, r"ignore\[1\] must hold gallery indices from 0 to 2"),
        ({"ignore": [[0.5], [], []]}, TypeError, r"ignore\[0\] must hold integer"),
        ({"memory": 1000}, ValueError, "memory must be at least .* got 1000"),
    ],
)
def test_bad_options_are_named(options: dict[str, object], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        retrieval_metrics(GOOD, [0, 0, 1], **options)  # type: ignore[call-overload]
