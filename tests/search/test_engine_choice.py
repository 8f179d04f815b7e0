"""Which engine an index runs on, and what it is told: a mistake or a server that does not answer costs no index."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from roadmap.encoder import Encoder
from roadmap.search import Index, Manifest, index_pictures, installed
from roadmap.search.engines.options import OPTIONS, check_engine

from .cases import ABOUT, made, new_index, table
from .test_indexing import write_picture

WRONG = [
    ("fais", {}, "engine must be auto, exact, faiss, milvus, got 'fais', did you mean 'faiss'?"),
    ("faiss", {"kindd": "flat"}, "faiss has no option 'kindd', only kind, recall, did you mean 'kind'?"),
    ("faiss", {"kind": "hnws"}, "faiss: kind must be one of auto, flat, hnsw, ivfpq, got 'hnws'"),
    ("faiss", {"recall": "high"}, "faiss: recall must be a number above 0 and at most 1, got 'high'"),
    ("faiss", {"recall": 97}, "faiss: recall must be a number above 0 and at most 1, got 97"),
    ("exact", {"recall": 0.9}, "exact has no option 'recall', only device"),
    ("exact", {"device": "gpu"}, "exact: device must be one of auto, cpu, cuda, got 'gpu'"),
    ("milvus", {"M": 1.5}, "milvus: M must be a whole number of at least 1, got 1.5"),
    ("milvus", {"uri": 7}, "milvus: uri must be a text, got 7"),
    ("milvus", {"timeout": 0}, "milvus: timeout must be a number of seconds above 0, got 0"),
]


@pytest.mark.parametrize(("engine", "options", "said"), WRONG)
def test_a_mistake_costs_no_index(tmp_path: Path, engine: str, options: dict[str, Any], said: str) -> None:
    with new_index(tmp_path / "i", "exact") as index:
        index.add(made(9), table(9))
    before = (tmp_path / "i" / "index.json").read_bytes()
    with pytest.raises(ValueError, match=re.escape(said)):
        Index.exchange_engine(tmp_path / "i", engine, options)
    assert (tmp_path / "i" / "index.json").read_bytes() == before
    with pytest.raises(ValueError, match=re.escape(said)):
        Index.create(tmp_path / "new", ABOUT, 16, engine=engine, options=options)
    assert not (tmp_path / "new").exists()


def test_what_can_be_told_is_taken() -> None:
    check_engine("exact", {"device": "cpu"})
    for name, options in (
        ("faiss", {"kind": "ivfpq", "recall": 1}),
        ("milvus", {"uri": "http://127.0.0.1:9", "shards": 2, "ef": 64.0, "timeout": 0.5, "collection": "birds"}),
    ):
        assert options.keys() <= OPTIONS[name].keys()
        if installed(name):
            check_engine(name, options)


def test_a_server_that_does_not_answer_costs_no_index(tmp_path: Path) -> None:
    if not installed("milvus"):
        pytest.skip("the engine 'milvus' is not installed")
    nobody = {"uri": "http://127.0.0.1:9", "timeout": 1}
    with new_index(tmp_path / "i", "exact") as index:
        index.add(made(9), table(9))
    with pytest.raises(ConnectionError, match=r"no Milvus answers at http://127.0.0.1:9"):
        Index.exchange_engine(tmp_path / "i", "milvus", nobody)
    with Index.open(tmp_path / "i", write=True) as index:  # and nobody holds its lock
        assert (index.manifest.engine, len(index.search(made(1).vectors, 9).ids[0])) == ("exact", 9)
    with pytest.raises(ConnectionError):
        Index.create(tmp_path / "new", ABOUT, 16, engine="milvus", options=nobody)
    Index.create(tmp_path / "new", ABOUT, 16, engine="exact").close()  # there is room for it


def test_an_engine_that_was_built_is_kept_where_another_cannot_be_opened(tmp_path: Path) -> None:
    if not installed("faiss") or not installed("milvus"):
        pytest.skip("the engines 'faiss' and 'milvus' are not installed")
    with new_index(tmp_path / "i", "faiss") as index:
        index.add(made(9), table(9))
        index.build()
    before = {path.name: path.read_bytes() for path in (tmp_path / "i" / "engine").iterdir()}
    with pytest.raises(ConnectionError):
        Index.exchange_engine(tmp_path / "i", "milvus", {"uri": "http://127.0.0.1:9", "timeout": 1})
    assert {path.name: path.read_bytes() for path in (tmp_path / "i" / "engine").iterdir()} == before
    Index.exchange_engine(tmp_path / "i", "exact").close()
    assert sorted(path.name for path in (tmp_path / "i").iterdir()) == [
        *("engine", "index.json", "lock", "rows.sqlite", "vectors.bin")
    ]
    assert list((tmp_path / "i" / "engine").iterdir()) == []


def test_an_engine_that_is_lost_is_exchanged_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As when the server of an index is gone for good."""
    monkeypatch.chdir(tmp_path)
    for i in range(4):
        write_picture(tmp_path / "P" / "owl" / f"{i}.png", i, 40)
    encoder = Encoder.open("small_cnn", device="cpu")
    index_pictures(encoder, "P", "I", engine="exact")
    _say(tmp_path / "I" / "index.json", engine="milvus", options={"uri": "http://127.0.0.1:9", "timeout": 1})
    again = index_pictures(encoder, "P", "I", engine="exact", options={"device": "cpu"})
    assert (len(again.changes.same), again.facts["engine"]["name"]) == (4, "exact")


def _say(manifest: Path, **changed: Any) -> None:
    told = Manifest.load(manifest.parent)
    Manifest(**{**vars(told), **changed}).save(manifest.parent)
    assert json.loads(manifest.read_text())["index"]["engine"] == changed["engine"]


def test_a_folder_of_something_else_gets_no_file(tmp_path: Path) -> None:
    (tmp_path / "pictures").mkdir()
    (tmp_path / "pictures" / "owl.jpg").touch()
    with pytest.raises(FileExistsError, match="is not empty"):
        new_index(tmp_path / "pictures")
    assert [path.name for path in (tmp_path / "pictures").iterdir()] == ["owl.jpg"]
    (tmp_path / "notes.txt").touch()
    with pytest.raises(NotADirectoryError, match=r"notes.txt is a file; name a new folder for the index"):
        new_index(tmp_path / "notes.txt")
