"""The index: what it refuses, what it remembers, and who may write it."""

from __future__ import annotations

import importlib
import json
import re
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from roadmap.search import DamagedError, FileFacts, Index, compact, installed

from .cases import ABOUT, literal_search, made, new_index, rows_of, table


@pytest.fixture
def index(tmp_path: Path) -> Any:
    with new_index(tmp_path / "i") as made_index:
        made_index.add(made(100), table(100))
        yield made_index


@pytest.mark.parametrize(
    ("about", "message"),
    [
        (
            {**ABOUT, "model": "b" * 64},
            f"these vectors were made with another model than the index: {'b' * 57}..., the index has {'a' * 57}...",
        ),
        (
            {**ABOUT, "crop": {"size": 256}},
            'another crop than the index: {"size": 256}, the index has {"size": 224}; scores between them mean nothing',
        ),
        ({**ABOUT, "precision": "bf16"}, "another precision than the index: bf16, the index has 32"),
        ({}, "these vectors do not say the model they were made with, the index does"),
    ],
)
def test_vectors_of_another_model_are_refused(index: Index, about: dict[str, Any], message: str) -> None:
    strange = replace(made(3, first=500), about=about)
    with pytest.raises(ValueError, match=re.escape(message)):
        index.add(strange)
    with pytest.raises(ValueError, match=re.escape(message.replace("these vectors", "these queries"))):
        index.search(strange)
    assert len(index) == 100
    assert index.search(made(3)).ids[0][0] == "p0.jpg"


BAD_ADDS: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"ids": None}, {}, "an index needs an id for each vector"),
    ({"ids": ("x", "x", "y")}, {}, "ids must be distinct: 3 vectors, 2 distinct ids"),
    ({"ids": ("x", "", "y")}, {}, "an id is empty"),
    ({"vectors": torch.ones(3, 8)}, {}, r"vectors must have shape \(N, 16\), got \(3, 8\)"),
    ({"vectors": torch.zeros(3, 16)}, {}, "vectors row 0 is zero"),
    ({"vectors": torch.full((3, 16), torch.nan)}, {}, "vectors row 0 holds NaN or infinity"),
    ({}, {"yaer": [1, 2, 3]}, "the index has no column 'yaer', only .* did you mean 'year'?"),
    ({}, {"year": [1, 2]}, "column 'year' must have 3 values, one for each vector, got 2"),
    ({}, {"year": [1, 2, "x"]}, "column 'year' holds whole numbers, got 'x'"),
    ({}, {"id": ["a", "b", "c"]}, "ids come from the embeddings"),
]


@pytest.mark.parametrize(("change", "metadata", "message"), BAD_ADDS)
def test_what_cannot_be_added_is_refused_and_leaves_nothing(
    index: Index, change: dict[str, Any], metadata: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        index.add(replace(made(3, first=500), **change), metadata)
    assert len(index) == 100
    index.add(made(3, first=500))  # and it goes on
    assert len(index) == 103


def test_an_id_that_is_there_is_refused(index: Index) -> None:
    with pytest.raises(ValueError, match=r"2 of these ids are in the index already, first 'p98.jpg'.*replace=True"):
        index.add(made(4, first=98))


def test_removing_what_is_not_there(index: Index) -> None:
    with pytest.raises(KeyError, match="1 of these ids are not in the index, first 'nobody'"):
        index.remove(["p1.jpg", "nobody"])
    assert len(index) == 100
    assert index.remove(["p1.jpg", "nobody"], missing="ignore") == 1
    assert index.remove(["p2.jpg\0more"], missing="ignore") == 0  # and not p2.jpg, where SQLite ends the name
    assert len(index) == 99
    with pytest.raises(TypeError, match="ids must be a list of ids, got the text 'p2.jpg'"):
        index.remove("p2.jpg")


@pytest.mark.parametrize(
    ("query", "message"),
    [
        (np.ones((1, 8)), r"queries must have shape \(Q, 16\), got \(1, 8\)"),
        (np.zeros((1, 16)), "queries row 0 is zero"),
        (np.full((2, 16), np.nan), "queries row 0 holds NaN or infinity"),
        ([np.inf] * 16, "queries row 0 holds NaN or infinity"),
        (np.ones((1, 1, 16)), "queries must have shape"),
    ],
)
def test_queries_without_a_direction_are_refused(index: Index, query: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        index.search(query)


def test_very_long_and_very_short_queries_have_a_direction(index: Index) -> None:
    query = made(1).vectors.double().numpy()
    for scale in (1e30, 1e-30):
        assert index.search(query * scale, 1).scores[0][0] == pytest.approx(1.0, abs=1e-6)


@pytest.mark.parametrize(("k", "offset"), [(0, 0), (-1, 0), (1, -1)])
def test_k_and_offset_are_checked(index: Index, k: int, offset: int) -> None:
    with pytest.raises(ValueError, match="k must be at least 1 and offset at least 0"):
        index.search(torch.ones(16), k, offset=offset)


@pytest.mark.parametrize("where", [None, {"label": "owl"}, {"year": {">": 2000}}])
def test_rank_of_an_expected_picture(index: Index, where: dict[str, Any] | None) -> None:
    vectors, rows = made(100), table(100)
    query = torch.randn(16)
    gone = [f"p{i}.jpg" for i in range(0, 100, 7)]
    index.remove(gone)
    kept = [i for i in range(100) if f"p{i}.jpg" not in gone]
    right = literal_search(rows_of(vectors, kept), {c: [v[i] for i in kept] for c, v in rows.items()}, query, where)
    for name, score in right[:3] + right[-1:]:
        found = index.rank_of(query, name, where)
        assert found.rank == 1 + [n for n, _ in right].index(name)
        assert found.score == pytest.approx(score, abs=1e-6)
        assert (found.among, found.passes) == (len(right), True)
    if where:
        outside = next(name for name in index.ids() if name not in dict(right))
        found = index.rank_of(query, outside, where)
        better = [score for _, score in right if score > found.score]
        assert (found.rank, found.passes) == (1 + len(better), False)
    with pytest.raises(KeyError, match="'p0.jpg' is not in the index"):
        index.rank_of(query, "p0.jpg")


def test_equal_scores_rank_by_who_came_first(tmp_path: Path) -> None:
    twins = replace(made(5), vectors=torch.ones(5, 16))
    with new_index(tmp_path / "i") as index:
        index.add(twins)
        assert [index.rank_of(torch.ones(16), f"p{i}.jpg").rank for i in range(5)] == [1, 2, 3, 4, 5]
        assert index.search(torch.ones(16), 5).ids == [[f"p{i}.jpg" for i in range(5)]]


def test_what_an_index_says_of_itself(tmp_path: Path) -> None:
    with new_index(tmp_path / "i", class_names=("owl", "tit", "jay")) as index:
        index.add(made(10))
        index.remove(["p1.jpg"])
    with Index.open(tmp_path / "i") as index:
        facts = index.facts()
        assert (facts["vectors"], facts["removed"], facts["dim"], facts["classes"]) == (9, 1, 16, 3)
        assert facts["about"] == ABOUT
        assert facts["engine"]["name"] == "exact"
        assert list(facts["columns"]) == ["id", "label", "kind of bird", "year", "size", "seen"]
        assert json.loads(json.dumps(facts)) == facts
        assert index.manifest.class_names == ("owl", "tit", "jay")
        assert np.allclose(np.linalg.norm(index.vectors_of(["p2.jpg", "p3.jpg"]), axis=1), 1)
        with pytest.raises(KeyError, match="'p1.jpg' is not in the index"):
            index.vectors_of(["p1.jpg"])


def test_labels_without_names_are_numbers_as_text(tmp_path: Path) -> None:
    with new_index(tmp_path / "i") as index:
        index.add(replace(made(3), class_names=()))
        index.add(replace(made(1, first=7), labels=torch.tensor([-1])))
        labels = {hit["id"]: hit["label"] for hit in index.search(torch.ones(16), 9).metadata[0]}
        assert labels == {"p0.jpg": "0", "p1.jpg": "1", "p2.jpg": "2", "p7.jpg": None}


def test_only_one_process_writes(tmp_path: Path) -> None:
    with new_index(tmp_path / "i") as index:
        index.add(made(5))
        code = f"from roadmap.search import Index; Index.open({str(tmp_path / 'i')!r}, write=True)"
        other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
        assert other.returncode
        assert "is being written by another process" in other.stderr
        with pytest.raises(BlockingIOError, match=r"is being written by another process \(\d+\); wait for it to end"):
            Index.open(tmp_path / "i", write=True)
        with Index.open(tmp_path / "i") as reader:
            assert len(reader.search(torch.ones(16), 9).ids[0]) == 5
            with pytest.raises(PermissionError, match="was opened for searching; open it with write=True"):
                reader.add(made(1, first=70))
            index.add(made(1, first=70))
            index.remove(["p0.jpg"])
            reader.refresh()
            assert sorted(reader.search(torch.ones(16), 9).ids[0]) == [f"p{i}.jpg" for i in (1, 2, 3, 4, 70)]
    with Index.open(tmp_path / "i", write=True) as index:
        assert len(index) == 5


def test_create_takes_an_empty_folder_only(tmp_path: Path) -> None:
    new_index(tmp_path / "i").close()
    with pytest.raises(FileExistsError, match="holds an index already"):
        new_index(tmp_path / "i")
    (tmp_path / "j").mkdir()
    (tmp_path / "j" / "holiday.jpg").touch()
    with pytest.raises(FileExistsError, match=r"is not empty \(holiday.jpg\); choose a new folder"):
        new_index(tmp_path / "j")
    (tmp_path / "i" / "index.json").unlink()  # as if it had been interrupted
    new_index(tmp_path / "i").close()
    with pytest.raises(FileNotFoundError, match="holds no index; make one: roadmap index MODEL PICTURES -o"):
        Index.open(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"columns": {"and": "text"}}, "a column cannot be called 'and'"),
        ({"columns": {"year": "number"}}, "kind must be one of text, integer, real, boolean, got 'number'"),
        ({"columns": {"id": "integer"}}, "column 'id' is always there and holds text, not integer"),
        ({"engine": "fais"}, "engine must be auto, exact, faiss, milvus, got 'fais', did you mean 'faiss'?"),
        ({"storage": "int8"}, "storage one of float32, float16"),
        ({"dim": 0}, "dim must be at least 1"),
    ],
)
def test_create_refuses_in_words(tmp_path: Path, wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Index.create(tmp_path / "i", ABOUT, **{"dim": 16, **wrong})
    assert not (tmp_path / "i").exists()


def test_engines_can_be_exchanged(tmp_path: Path) -> None:
    if not installed("faiss"):
        pytest.skip("the engine 'faiss' is not installed")
    with new_index(tmp_path / "i") as index:
        index.add(made(80), table(80))
        index.remove(["p5.jpg"])
        before = index.search(made(3).vectors, 79, {"label": {"!=": "tit"}})
    with Index.exchange_engine(tmp_path / "i", "faiss", {"kind": "hnsw"}) as index:
        assert index.build()["engine"]["kind"] == "hnsw"
    with Index.open(tmp_path / "i") as index:
        after = index.search(made(3).vectors, 79, {"label": {"!=": "tit"}})
        assert after.ids == before.ids
        assert index.manifest.engine == "faiss"


@pytest.mark.parametrize(
    "where",
    [{"year": {"!=": 2020}}, {"kind of bird": {"!=": "owl"}}, {"year": {"!=": 2020}, "kind of bird": {"!=": "owl"}}],
)
def test_searching_while_another_thread_writes(tmp_path: Path, where: dict[str, Any]) -> None:
    with new_index(tmp_path / "i") as index:
        index.add(made(50), table(50))
        stop, wrong = threading.Event(), []

        def search() -> None:
            while not stop.is_set():
                try:
                    found = index.search(made(2).vectors, 7, where)
                    assert all(5 <= len(ids) <= 7 for ids in found.ids)
                except BaseException as error:
                    wrong.append(error)
                    return

        threads = [threading.Thread(target=search) for _ in range(3)]
        for thread in threads:
            thread.start()
        for round_ in range(25):
            names = [f"bird {round_} {i}" for i in range(20)]  # texts that were not there before
            index.add(made(20, seed=round_, first=100 + 20 * round_), {**table(20), "kind of bird": names})
            index.remove([f"p{100 + 20 * round_ + i}.jpg" for i in range(0, 20, 3)])
        stop.set()
        for thread in threads:
            thread.join()
        assert wrong == []


def damage(path: Path, where: float) -> None:
    content = bytearray(path.read_bytes())
    content[int(where * (len(content) - 1))] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("name", "act", "message"),
    [
        ("index.json", lambda path: damage(path, 0.5), "index.json is damaged"),
        ("index.json", lambda path: path.write_text("{}"), "index.json is damaged"),
        (
            "vectors.bin",
            lambda path: damage(path, 0.7),
            "vectors.bin is damaged: the checksum of rows 30 to 59",
        ),
        ("vectors.bin", lambda path: path.write_bytes(path.read_bytes()[:-4]), "vectors.bin is damaged: 3836 bytes"),
        ("rows.sqlite", lambda path: path.write_bytes(b"x" * 4096), "rows.sqlite is damaged: file is not a database"),
        (
            "rows.sqlite",
            lambda path: path.write_bytes(path.read_bytes().replace(b"p44.jpg", b"p44.jpe")),
            "rows.sqlite is damaged",
        ),
        ("vectors.bin", lambda path: path.unlink(), "vectors.bin is gone; the index is damaged"),
        ("rows.sqlite", lambda path: path.unlink(), "rows.sqlite cannot be read: unable to open"),
    ],
)
def test_a_damaged_index_is_refused_by_name(tmp_path: Path, name: str, act: Any, message: str) -> None:
    with new_index(tmp_path / "i") as index:
        index.add(made(30))
        index.add(made(30, first=30))
    act(tmp_path / "i" / name)
    for write in (True, False):  # the lock is let go after the refusal
        with pytest.raises(DamagedError, match=message):
            Index.open(tmp_path / "i", write=write)


@pytest.mark.parametrize("suffix", [".faiss", ".npy", ".json"])
def test_a_damaged_engine_is_refused_by_name_and_made_again(tmp_path: Path, suffix: str) -> None:
    if not installed("faiss"):
        pytest.skip("the engine 'faiss' is not installed")
    with new_index(tmp_path / "i", "faiss") as index:
        index.add(made(30))
        index.build()
    (path,) = (tmp_path / "i" / "engine").glob(f"*{suffix}")
    damage(path, 0.0)
    with pytest.raises(DamagedError, match=f"{path.name} is damaged.*exchange_engine"):
        Index.open(tmp_path / "i")
    with Index.exchange_engine(tmp_path / "i", "faiss") as index:
        index.build()
    with Index.open(tmp_path / "i") as index:
        assert index.search(made(30).vectors[3], 1).ids == [["p3.jpg"]]


@pytest.mark.parametrize("moment", ["file_digest", "read_index"])
def test_an_engine_that_is_made_anew_while_it_is_opened_is_not_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    if not installed("faiss"):
        pytest.skip("the engine 'faiss' is not installed")
    engine = importlib.import_module("roadmap.search.engines.faiss")
    home = engine if moment == "file_digest" else engine.faiss
    plain = getattr(home, moment)
    with new_index(tmp_path / "i", "faiss") as writer:
        writer.add(made(30))
        writer.build()

        def late(*values: Any) -> Any:
            monkeypatch.setattr(home, moment, plain)
            writer.add(made(5, first=100))
            writer.build()  # the files that the reader is about to read are gone
            return plain(*values)

        monkeypatch.setattr(home, moment, late)
        with Index.open(tmp_path / "i") as reader:
            assert getattr(home, moment) is plain
            assert reader.search(made(30).vectors[3], 1).ids == [["p3.jpg"]]
            assert reader.facts()["engine"]["built"] == 35


def test_nothing_that_is_loaded_is_a_pickle(tmp_path: Path) -> None:
    if not installed("faiss"):
        pytest.skip("the engine 'faiss' is not installed")
    import hashlib

    with new_index(tmp_path / "i", "faiss") as index:
        index.add(made(30))
        index.build()
    folder = tmp_path / "i" / "engine"
    (slots,) = folder.glob("*.npy")
    slots.unlink()
    np.save(folder / "evil.npy", np.array([print], dtype=object), allow_pickle=True)
    name = hashlib.sha256((folder / "evil.npy").read_bytes()).hexdigest() + ".npy"
    (folder / "evil.npy").rename(folder / name)
    record = json.loads((folder / "base.json").read_text())
    record["files"]["slots"] = name
    (folder / "base.json").write_text(json.dumps(record))
    with pytest.raises(ValueError, match="allow_pickle=False"):
        Index.open(tmp_path / "i")


@pytest.mark.parametrize("storage", ["float32", "float16"])
def test_a_compact_copy_holds_the_same_and_no_more(tmp_path: Path, storage: str) -> None:
    rows = table(30)
    with new_index(tmp_path / "i", storage=storage) as index:
        index.add(made(30), rows, files={"p4.jpg": FileFacts(1, 2, "x"), "gone.jpg": FileFacts(3, 4, "y", "damaged")})
        index.remove([f"p{i}.jpg" for i in range(0, 30, 3)])
        index.add(made(5, seed=7), replace=True)
        held, files = index.search(made(30).vectors[4], 40), index.storage.rows.files()
    with (
        Index.open(tmp_path / "i", write=True),
        pytest.raises(BlockingIOError, match="is being written by another process"),
    ):
        compact(tmp_path / "i", tmp_path / "c")  # what is written meanwhile would be lost
    facts = compact(tmp_path / "i", tmp_path / "c")
    assert (facts["vectors"], facts["removed"]) == (22, 0)
    with Index.open(tmp_path / "c", write=True) as copy:
        found = copy.search(made(30).vectors[4], 40)
        assert (found.ids, found.metadata) == (held.ids, held.metadata)
        assert np.allclose(found.scores, held.scores, atol=1e-3 if storage == "float16" else 1e-6)
        assert copy.storage.rows.files() == files
        copy.add(made(5, seed=8, first=100))
    with pytest.raises(FileExistsError, match="holds an index already"):
        compact(tmp_path / "i", tmp_path / "c")
