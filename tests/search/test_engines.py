"""One contract for every engine, against literal loops. Engines that are not installed are skipped."""

from __future__ import annotations

import importlib
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings

from roadmap.search import Index, installed

from .cases import Vectors, filters, literal_search, made, new_index, rows_of, table

# name: engine, options, storage, and whether it finds everything at this size
SETUPS: dict[str, tuple[str, dict[str, Any], str, bool]] = {
    "exact": ("exact", {"device": "cpu"}, "float32", True),
    "exact half": ("exact", {"device": "cpu"}, "float16", True),
    "faiss flat": ("faiss", {"kind": "flat"}, "float32", True),
    "faiss flat half": ("faiss", {"kind": "flat"}, "float16", True),
    "faiss hnsw": ("faiss", {"kind": "hnsw"}, "float32", False),
    "faiss hnsw half": ("faiss", {"kind": "hnsw"}, "float16", False),
    "faiss ivfpq": ("faiss", {"kind": "ivfpq"}, "float32", False),
    "milvus file": ("milvus", {}, "float32", False),
}
COUNT = 600
Filled = tuple[str, Index, Vectors, dict[str, Any]]


@pytest.fixture(params=SETUPS, scope="module")
def setup(request: pytest.FixtureRequest) -> str:
    engine = SETUPS[request.param][0]
    if not installed(engine):
        pytest.skip(f"the engine {engine!r} is not installed")
    if engine == "milvus":
        pytest.importorskip("milvus_lite", reason="milvus-lite, Milvus in a file, is not installed")
    return str(request.param)


def opened(setup: str, folder: Path, dim: int = 16) -> Index:
    engine, options, storage, _ = SETUPS[setup]
    return new_index(folder, engine, dim, options=options, storage=storage)


@pytest.fixture(scope="module")
def filled(setup: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Filled]:
    """An index with a part that is built, a part that came later, and rows that are gone."""
    vectors, rows = made(COUNT), table(COUNT)
    with opened(setup, tmp_path_factory.mktemp("index") / "i") as index:
        for start, stop in ((0, 200), (200, 450), (450, COUNT)):
            index.add(rows_of(vectors, range(start, stop)), {name: values[start:stop] for name, values in rows.items()})
            if start == 200:
                index.remove([f"p{i}.jpg" for i in range(0, 40, 4)])
                index.build()
        index.remove([f"p{i}.jpg" for i in range(2, COUNT, 40)])
        kept = [i for i in range(COUNT) if not (i < 40 and i % 4 == 0) and i % 40 != 2]
        live = Vectors(
            vectors.vectors[kept], vectors.labels[kept], tuple(vectors.ids[i] for i in kept), vectors.class_names
        )
        yield setup, index, live, {name: [values[i] for i in kept] for name, values in rows.items()}


def check_against_the_loop(
    setup: str, found: list[str], scores: list[float], right: list[tuple[str, float]], k: int
) -> None:
    truth = dict(right)
    coarse = 2e-3 if "half" in setup else 2e-6
    assert len(found) == len(set(found)) == min(k, len(right))
    assert scores == sorted(scores, reverse=True)
    for name, score in zip(found, scores, strict=True):
        assert score == pytest.approx(truth[name], abs=coarse)
    if SETUPS[setup][3]:  # the very best, but for ties within rounding
        assert all(truth[name] >= right[min(k, len(right)) - 1][1] - coarse for name in found)


def test_finds_the_nearest(filled: Filled) -> None:
    setup, index, live, rows = filled
    queries = torch.randn(20, 16)
    results = index.search(queries, 10)
    recall = 0
    for query, found, scores in zip(queries, results.ids, results.scores, strict=True):
        right = literal_search(live, rows, query)
        check_against_the_loop(setup, found, scores, right, 10)
        recall += len({name for name, _ in right[:10]} & set(found))
    assert recall >= 0.95 * 200


@settings(max_examples=40)
@given(filters)
def test_a_filter_means_the_same_in_every_engine(filled: Filled, where: dict[str, Any]) -> None:
    setup, index, live, rows = filled
    query = live.vectors[5]
    right = literal_search(live, rows, query, where)
    results = index.search(query, COUNT, where)
    assert sorted(results.ids[0]) == sorted(name for name, _ in right)
    check_against_the_loop(setup, results.ids[0], results.scores[0], right, COUNT)
    best = index.search(query, 5, where)
    check_against_the_loop(setup, best.ids[0], best.scores[0], right, 5)


def test_metadata_comes_back(filled: Filled) -> None:
    _, index, live, rows = filled
    place = 17
    hit = index.search(live.vectors[place], 1).metadata[0][0]
    expected = {name: values[place] for name, values in rows.items()}
    assert hit == {"id": live.ids[place], "label": live.class_names[int(live.labels[place])], **expected}
    assert all(type(hit[name]) is type(value) for name, value in expected.items())


def test_pages_follow_each_other(filled: Filled) -> None:
    _, index, live, _ = filled
    whole = index.search(live.vectors[:2], 30)
    pages = [index.search(live.vectors[:2], 10, offset=offset) for offset in (0, 10, 20)]
    for query in range(2):
        assert len(whole.ids[query]) == 30
        assert {name for page in pages for name in page.ids[query]} == set(whole.ids[query])
    assert index.search(live.vectors[0], 10, offset=5000).ids == [[]]


@pytest.mark.parametrize("where", [None, {"label": {"in": ["owl", "tit"]}}])
@pytest.mark.parametrize("setup", [name for name, setup in SETUPS.items() if setup[3]], scope="module")
def test_copies_of_a_picture_come_once_each_on_the_pages(
    setup: str, tmp_path: Path, where: dict[str, Any] | None
) -> None:
    """In the order they came: 300 of 400 vectors are equal, and the pages end among them."""
    if not installed(SETUPS[setup][0]):
        pytest.skip(f"the engine {SETUPS[setup][0]!r} is not installed")
    rows = made(400)
    rows.vectors[50:350] = rows.vectors[50]
    query = rows.vectors[50] + 0.1 * torch.randn(16)
    with opened(setup, tmp_path / "i") as index:
        index.add(rows)
        index.build()
        whole = [int(name[1:-4]) for name in index.search(query, 400, where).ids[0]]
        shown = [index.search(query, 24, where, offset).ids[0] for offset in range(0, 408, 24)]
    assert [int(name[1:-4]) for page in shown for name in page] == whole
    allowed = [i for i in range(400) if where is None or i % 3 < 2]
    assert sorted(whole) == allowed
    assert [i for i in whole if 50 <= i < 350] == [i for i in allowed if 50 <= i < 350]


def test_the_engine_counts_what_can_be_found(filled: Filled) -> None:
    _, index, live, _ = filled
    assert len(index.engine) == len(index) == len(live.ids or ())


def test_it_is_the_same_after_closing(setup: str, tmp_path: Path) -> None:
    vectors = made(300)
    with opened(setup, tmp_path / "i") as index:
        index.add(vectors, table(300))
        index.build()
        index.remove(["p3.jpg"])
        index.add(made(2, seed=9, first=1000))
        before = index.search(vectors.vectors[:5], 300)
        assert index.facts()["engine"].get("recall@10", 0) >= 0.95
    with Index.open(tmp_path / "i") as again:
        after = again.search(vectors.vectors[:5], 300)
        assert [set(ids) for ids in after.ids] == [set(ids) for ids in before.ids]
        assert np.allclose(after.scores, before.scores, atol=1e-6)
        assert len(after.ids[0]) == 300 if setup in ("exact", "faiss flat") else len(after.ids[0]) >= 280


def test_replaced_vectors_are_found_at_their_new_place(setup: str, tmp_path: Path) -> None:
    with opened(setup, tmp_path / "i") as index:
        index.add(made(50))
        index.build()
        index.add(made(50, seed=1), replace=True)
        assert len(index) == 50
        assert index.search(made(50, seed=1).vectors[7], 1).ids == [["p7.jpg"]]
        assert index.search(made(50).vectors[7], 1).scores[0][0] < 0.99


def test_an_empty_index_finds_nothing(setup: str, tmp_path: Path) -> None:
    with opened(setup, tmp_path / "i") as index:
        assert index.search(torch.ones(2, 16), 3).ids == [[], []]
        index.build()
        index.add(made(2))
        index.remove(["p0.jpg", "p1.jpg"])
        assert index.search(torch.ones(1, 16), 3).ids == [[]]
        assert index.search(torch.ones(1, 16), 3, {"label": "owl"}).ids == [[]]


def test_one_query_takes_one_thread_and_changes_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    faiss = pytest.importorskip("faiss")
    engine = importlib.import_module("roadmap.search.engines.faiss")
    before, own, seen = faiss.omp_get_max_threads(), engine._search, []
    with opened("faiss flat", tmp_path / "i") as index, ThreadPoolExecutor(1) as pool:
        index.add(made(30))
        index.build()
        elsewhere = pool.submit(faiss.omp_get_max_threads).result()

        def search(*values: Any) -> Any:
            seen.append((faiss.omp_get_max_threads(), pool.submit(faiss.omp_get_max_threads).result()))
            return own(*values)

        monkeypatch.setattr(engine, "_search", search)
        try:
            faiss.omp_set_num_threads(2)
            for count in (1, 2):
                index.search(made(count).vectors, 3)
            assert seen == [(1, elsewhere), (2, elsewhere)]
            assert faiss.omp_get_max_threads() == 2
        finally:
            faiss.omp_set_num_threads(before)


def test_a_long_call_to_a_milvus_file_is_not_broken_off(tmp_path: Path) -> None:
    """The file's server hangs up on a client that asks every 10 s whether it is still there: see `QUIET`."""
    pytest.importorskip("milvus_lite", reason="milvus-lite, Milvus in a file, is not installed")
    with opened("milvus file", tmp_path / "i") as index:
        connection = index.engine._client._get_connection()  # type: ignore[attr-defined]
        assert connection._grpc_options["grpc.keepalive_time_ms"] > 1e9


def test_faiss_is_found_again_where_another_library_changed_it() -> None:
    """faiss.contrib.torch_utils takes `params` from every index of the process; pytorch-metric-learning imports it."""
    code = """
import faiss.contrib.torch_utils
import pytest, sys
chosen = ["-k", "finds_the_nearest and (faiss or milvus)", "tests/search/test_engines.py"]
sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", *chosen]))
"""
    pytest.importorskip("faiss")
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
