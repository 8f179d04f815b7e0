"""The revisited Oxford/Paris protocol against hand-worked cases and a literal walk down each ranking."""

from __future__ import annotations

import math
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from roadmap.metrics.revisited import (
    GroundTruth,
    load_ground_truth,
    precision_among,
    revisited_metrics,
    revisited_metrics_of_vectors,
    trapezoidal_average_precision,
)


def walked(ranking: list[int], positives: set[int], junk: set[int]) -> dict[str, float] | None:
    """One query, image by image: the curve's points are collected and its trapezia added."""
    if not positives:
        return None
    seen, found, area = 0, 0, 0.0
    recall, precision = 0.0, 1.0
    relevant: list[bool] = []
    for image in ranking:
        if image in junk:
            continue
        if seen:
            precision = found / seen
        seen += 1
        relevant.append(image in positives)
        if image in positives:
            found += 1
            area += (found / len(positives) - recall) * (precision + found / seen) / 2
            recall = found / len(positives)
    last = max(place for place, hit in enumerate(relevant, 1) if hit)
    among = {f"mP@{k}": sum(relevant[: min(k, last)]) / min(k, last) for k in (1, 5, 10)}
    return {"trapezoidal mAP": area} | among


def walked_settings(rankings: np.ndarray, truth: GroundTruth) -> dict[str, dict[str, float]]:
    settings = {}
    for name, positive in (("easy", ["easy"]), ("medium", ["easy", "hard"]), ("hard", ["hard"])):
        values = []
        for i, ranking in enumerate(rankings.tolist()):
            labels = {kind: set(getattr(truth, kind)[i].tolist()) for kind in ("easy", "hard", "junk")}
            kept = set().union(*(labels[kind] for kind in positive))
            values.append(walked(ranking, kept, set().union(*labels.values()) - kept))
        counted = [value for value in values if value is not None]
        settings[name] = {
            metric: sum(value[metric] for value in counted) / len(counted) if counted else math.nan
            for metric in ("trapezoidal mAP", "mP@1", "mP@5", "mP@10")
        } | {"queries": len(values), "queries_without_positives": len(values) - len(counted)}
    return settings


def truth_of(*queries: tuple[list[int], list[int], list[int]]) -> GroundTruth:
    return GroundTruth(*(tuple(np.array(q[part], np.int64) for q in queries) for part in range(3)))


@pytest.mark.parametrize(
    ("ranks", "ap"),
    [
        ([0], 1.0),
        ([0, 1, 2], 1.0),
        ([1], (0 + 1 / 2) / 2),  # before it 0/1, after it 1/2
        ([0, 2], ((1 + 1) / 2 + (1 / 2 + 2 / 3) / 2) / 2),
        ([3], (0 + 1 / 4) / 2),
    ],
)
def test_trapezoidal_ap_by_hand(ranks: list[int], ap: float) -> None:
    assert trapezoidal_average_precision(ranks) == pytest.approx(ap)


def test_precision_is_taken_up_to_the_last_positive_when_it_comes_before_k() -> None:
    assert precision_among([0, 1], 10) == 1.0  # 2 of 2, not 2 of 10
    assert precision_among([0, 3], 10) == 2 / 4
    assert precision_among([0, 3], 1) == 1.0
    assert precision_among([4, 30], 5) == 1 / 5


def test_settings_by_hand() -> None:
    # ranking: junk, hard, negative, easy; easy: the hard and the junk leave, so [negative, easy]
    truth = truth_of(([3], [1], [0]))
    found = revisited_metrics(np.array([[0, 1, 2, 3]]), truth)
    assert found["easy"]["trapezoidal mAP"] == pytest.approx((0 + 1 / 2) / 2)
    assert found["hard"]["trapezoidal mAP"] == 1.0
    assert found["medium"]["trapezoidal mAP"] == pytest.approx(((1 + 1) / 2 + (1 / 2 + 2 / 3) / 2) / 2)
    assert (found["easy"]["mP@1"], found["easy"]["mP@5"]) == (0.0, 1 / 2)
    assert (found["medium"]["mP@1"], found["medium"]["mP@10"]) == (1.0, 2 / 3)


def test_a_query_without_easy_images_stays_out_of_easy_alone() -> None:
    truth = truth_of(([], [1], [0]), ([2], [], [0]))
    found = revisited_metrics(np.array([[0, 1, 2], [1, 2, 0]]), truth)
    assert [found[name]["queries_without_positives"] for name in ("easy", "medium", "hard")] == [1, 0, 1]
    nobody = revisited_metrics(np.array([[0, 1, 2]]), truth_of(([], [1], [])))
    assert math.isnan(nobody["easy"]["mP@1"])


@given(st.integers(0, 2**32 - 1))
def test_random_rankings_equal_the_literal_walk(seed: int) -> None:
    rng = np.random.default_rng(seed)
    images, queries = int(rng.integers(4, 25)), 3
    kinds = rng.integers(0, 5, (queries, images))  # 0 easy, 1 hard, 2 junk, else negative
    truth = GroundTruth(*(tuple(np.flatnonzero(row == kind) for row in kinds) for kind in range(3)))
    rankings = np.stack([rng.permutation(images) for _ in range(queries)])
    found, literal = revisited_metrics(rankings, truth), walked_settings(rankings, truth)
    for setting in literal:
        assert found[setting] == pytest.approx(literal[setting], nan_ok=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_vectors_give_the_numbers_of_their_ranking(dtype: torch.dtype) -> None:
    rng = np.random.default_rng(3)
    database = torch.from_numpy(rng.standard_normal((60, 8))).to(dtype)
    queries = torch.from_numpy(rng.standard_normal((5, 8))).to(dtype)
    kinds = rng.integers(0, 8, (5, 60))
    truth = GroundTruth(*(tuple(np.flatnonzero(row == kind) for row in kinds) for kind in range(3)))
    unit = torch.nn.functional.normalize(database, dim=1)
    rankings = (torch.nn.functional.normalize(queries, dim=1) @ unit.T).argsort(dim=1, descending=True)
    found, expected = revisited_metrics_of_vectors(queries, database, truth), revisited_metrics(rankings, truth)
    for setting in expected:
        assert found[setting] == pytest.approx(expected[setting])


@pytest.mark.parametrize("queries", [torch.float16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("database", [torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_mixed_float_types_are_ranked_in_the_wider_one(queries: torch.dtype, database: torch.dtype) -> None:
    rng = np.random.default_rng(4)
    d = torch.from_numpy(rng.standard_normal((40, 8))).to(database)
    q = torch.from_numpy(rng.standard_normal((3, 8))).to(queries)
    kinds = rng.integers(0, 6, (3, 40))
    truth = GroundTruth(*(tuple(np.flatnonzero(row == kind) for row in kinds) for kind in range(3)))
    found = revisited_metrics_of_vectors(q, d, truth)
    assert found == revisited_metrics_of_vectors(q.double(), d.double(), truth)


def test_a_float64_database_is_not_rounded_to_the_queries() -> None:
    # cosines 0.6 and 0.6 + 2e-9: equal in float32, where the tie would put the negative first
    s = torch.tensor([0.6 + 2e-9, 0.6], dtype=torch.float64)
    database = torch.stack([s, (1 - s * s).sqrt()], dim=1)
    found = revisited_metrics_of_vectors(torch.tensor([[1.0, 0.0]]), database, truth_of(([0], [], [])))
    assert found["easy"]["mP@1"] == 1.0


def test_vectors_that_do_not_fit_are_refused() -> None:
    truth = truth_of(([0], [], []))
    with pytest.raises(ValueError, match="queries have 3 dimensions and the database 2; they must agree"):
        revisited_metrics_of_vectors(torch.ones(1, 3), torch.eye(2), truth)
    with pytest.raises(ValueError, match="queries are on cpu and the database on meta; move them to one device"):
        revisited_metrics_of_vectors(torch.ones(1, 2), torch.eye(2, device="meta"), truth)


def test_a_tied_negative_comes_before_the_positive_wherever_it_stands() -> None:
    database = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]])
    for positive in (0, 1):
        found = revisited_metrics_of_vectors(torch.tensor([[1.0, 0.1]]), database, truth_of(([positive], [], [])))
        assert found["easy"]["mP@1"] == 0.0


@pytest.mark.parametrize(("name", "images", "totals"), [
    ("roxford5k", 4993, (3029, 2497, 1356)),
    ("rparis6k", 6322, (6874, 10350, 7153)),
])  # fmt: skip
def test_published_ground_truth(outside_data: Path, name: str, images: int, totals: tuple[int, int, int]) -> None:
    truth = load_ground_truth(outside_data / "revisited" / f"gnd_{name}.pkl")
    assert (len(truth.images), len(truth.queries), len(truth.easy)) == (images, 70, 70)
    assert tuple(sum(map(len, lists)) for lists in (truth.easy, truth.hard, truth.junk)) == totals
    rng = np.random.default_rng(0)
    noise = rng.random((70, images))
    for i in range(70):  # positives tend to the top, so that no metric is trivial
        noise[i, truth.easy[i]] *= 0.02
        noise[i, truth.hard[i]] *= 0.1
    rankings = noise.argsort(axis=1)
    found, literal = revisited_metrics(rankings, truth), walked_settings(rankings, truth)
    for setting in literal:
        assert found[setting] == pytest.approx(literal[setting])
    perfect = np.array([_perfect(truth, i, images) for i in range(70)])
    for values in revisited_metrics(perfect, truth).values():
        assert values["trapezoidal mAP"] == values["mP@10"] == 1.0


def _perfect(truth: GroundTruth, query: int, images: int) -> list[int]:
    first = [*truth.easy[query], *truth.hard[query]]
    return [*first, *sorted(set(range(images)) - set(first))]


class _Malicious:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        import os

        return os.system, ("touch malicious_pickle_ran",)


def test_a_pickle_that_would_run_code_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "gnd.pkl"
    path.write_bytes(pickle.dumps({"gnd": [_Malicious()]}))
    with pytest.raises(
        ValueError, match=r"gnd.pkl is not a plain pickle: refused: the pickle asks for (posix|nt).system"
    ):
        load_ground_truth(path)
    assert not (tmp_path / "malicious_pickle_ran").exists()


@pytest.mark.parametrize("protocol", [2, 4])
def test_lists_and_arrays_are_read(tmp_path: Path, protocol: int) -> None:
    path = tmp_path / "gnd.pkl"
    gnd = [{"easy": np.array([2, 3]), "hard": [1], "junk": np.array([], np.int64), "bbx": [0.5, 1.0]}]
    path.write_bytes(pickle.dumps({"gnd": gnd, "imlist": list("abcd"), "qimlist": ["q"]}, protocol=protocol))
    truth = load_ground_truth(path)
    assert (truth.easy[0].tolist(), truth.hard[0].tolist(), truth.junk[0].tolist()) == ([2, 3], [1], [])
    assert truth.images == ("a", "b", "c", "d")


def test_errors_name_what_came(tmp_path: Path) -> None:
    truth = truth_of(([2], [1], [0]))
    with pytest.raises(ValueError, match="ranking 0 must name each of 3 database images once"):
        revisited_metrics(np.array([[0, 1, 1]]), truth)
    with pytest.raises(ValueError, match=r"rankings must have shape \(1, N\)"):
        revisited_metrics(np.array([[0, 1, 2], [0, 1, 2]]), truth)
    with pytest.raises(ValueError, match="ground truth is for at least 3 database images, got 2"):
        revisited_metrics(np.array([[0, 1]]), truth)
    with pytest.raises(ValueError, match="query 0 names a database image twice"):
        truth_of(([2], [2], []))
    with pytest.raises(ValueError, match="query 0 names the database image -1; they are counted from 0"):
        truth_of(([2, -1], [1], []))
    with pytest.raises(ValueError, match="one list per query"):
        GroundTruth((np.array([1]),), (), ())
    (tmp_path / "list.pkl").write_bytes(pickle.dumps([1]))
    with pytest.raises(ValueError, match="holds no ground truth"):
        load_ground_truth(tmp_path / "list.pkl")
    (tmp_path / "short.pkl").write_bytes(pickle.dumps({"gnd": [{"easy": []}]}))
    with pytest.raises(ValueError, match="query 0 has no hard, junk list"):
        load_ground_truth(tmp_path / "short.pkl")
    (tmp_path / "cut.pkl").write_bytes(b"\x80\x04")
    with pytest.raises(ValueError, match="cut.pkl is not a plain pickle"):
        load_ground_truth(tmp_path / "cut.pkl")
    with pytest.raises(ValueError, match="queries must be 1, as many as the ground truth has, got 2"):
        revisited_metrics_of_vectors(torch.eye(3)[:2], torch.eye(3), truth)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"gnd": 1}, "'gnd', 'imlist' and 'qimlist' must be lists"),
        ({"gnd": [], "imlist": 3}, "'gnd', 'imlist' and 'qimlist' must be lists"),
        ({"gnd": [1]}, "query 0 has no easy, hard, junk list"),
        ({"gnd": [{"easy": [{}], "hard": [], "junk": []}]}, "easy, hard and junk are lists of numbers"),
        ({"gnd": [{"easy": "x", "hard": [], "junk": []}]}, "easy, hard and junk are lists of numbers"),
    ],
)
def test_files_of_another_shape_are_refused_in_words(content, message, tmp_path):
    (tmp_path / "a.pkl").write_bytes(pickle.dumps(content))
    with pytest.raises(ValueError, match=rf"a.pkl.*{message}"):
        load_ground_truth(tmp_path / "a.pkl")
