"""Rows are added and removed through the service, all or none, where that is allowed."""

from __future__ import annotations

import json

import httpx
import pytest

from roadmap.search import Index
from roadmap.search.service import application, running

from ...waiting import PATIENCE
from .conftest import World
from .worlds import COLOURS, ColourEncoder, drawn, encoded, make_index, patient

MODEL = "c" * 64


def rows(*ids: str, **more: object) -> dict[str, object]:
    return {"ids": ids, "vectors": [[1.0] * 47 + [float(i)] for i in range(len(ids))], "model": MODEL, **more}


def add(world: World, *contents: bytes, **form: str) -> httpx.Response:
    files = [("pictures", ("picture", content)) for content in contents]
    return world.client.post("/api/indexes/birds/pictures", files=files, data=form)


def test_pictures_are_added_found_replaced_and_removed(world: World) -> None:
    yellow, pink = drawn((230, 220, 20)), drawn((240, 140, 190))
    metadata = json.dumps({"label": ["yellow", None], "year": [1999, None]})
    said = add(world, encoded(yellow), encoded(pink), ids='["y", "p"]', metadata=metadata)
    assert said.json() == {"changed": 2, "vectors": 26}
    found = world.upload(encoded(yellow), k=1).json()["answers"][0]["results"][0]
    assert (found["id"], found["metadata"]) == ("y", {"id": "y", "label": "yellow", "year": 1999})
    again = add(world, encoded(pink), ids='["y"]')
    assert (again.status_code, "are in the index already, first 'y'" in again.json()["error"]) == (422, True)
    assert add(world, encoded(pink), ids='["y"]', replace="true").json() == {"changed": 1, "vectors": 26}
    assert world.post("search", {"queries": [{"id": "p"}], "k": 2}).json()["answers"][0]["results"][1]["id"] == "y"
    removed = world.client.delete("/api/indexes/birds/rows", params={"id": ["y", "p", "y"]})
    assert removed.json() == {"changed": 2, "vectors": 24}
    assert world.post("search", {"queries": [{"id": "p"}]}).status_code == 404


def test_rows_with_vectors_all_or_none(world: World) -> None:
    assert world.post("rows", rows("a", "b", metadata={"label": ["x", "y"]})).json()["changed"] == 2
    assert world.post("rows", rows("c", "a")).status_code == 422
    assert world.post("list", {"where": {"id": "c"}}).json()["count"] == 0
    missing = world.client.delete("/api/indexes/birds/rows", params={"id": ["a", "zz"]})
    assert (missing.status_code, "first 'zz'" in missing.json()["error"]) == (404, True)
    assert world.post("list", {"where": {"id": "a"}}).json()["count"] == 1
    done = world.client.delete("/api/indexes/birds/rows", params={"id": ["a", "b", "zz"], "missing": "ignore"})
    assert done.json() == {"changed": 2, "vectors": 24}
    assert world.post("list", {"where": {"id": "a"}}).json() == {
        "index": "birds",
        "count": 0,
        "results": [],
        "more": False,
    }
    assert world.post("list", {}).json()["count"] == 24


def test_labels_are_those_of_the_rows_that_are_there(world: World) -> None:
    def labels() -> list[str]:
        return list(world.client.get("/api/indexes").json()["indexes"][0]["labels"])

    before = labels()
    world.post("rows", rows("a", metadata={"label": ["new"]}))
    assert labels() == sorted([*before, "new"])
    world.client.delete("/api/indexes/birds/rows", params={"id": "a"})
    assert labels() == before


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (rows("a", model="d" * 64), "another model than the index"),
        ({**rows("a", "b"), "ids": ["a"]}, "1 ids for 2 vectors"),
        ({**rows("a", "b"), "vectors": [[1.0], [1.0, 2.0]]}, "same number of dimensions"),
        ({**rows("a"), "vectors": [[1.0]]}, "shape (N, 48)"),
        ({**rows("a"), "vectors": [[0.0] * 48]}, "is zero"),
        (rows("a", "a"), "distinct"),
        (rows(""), "an id is empty"),
        (rows("a\0b"), "NUL"),
        (rows("a", metadata={"yaer": [1]}), "did you mean 'year'?"),
        (rows("a", metadata={"year": ["x"]}), "holds whole numbers"),
        (rows("a", metadata={"year": [1, 2]}), "must have 1 values"),
    ],
)
def test_rows_that_cannot_be(world: World, body: dict[str, object], words: str) -> None:
    said = world.post("rows", body)
    assert (said.status_code, words in said.json()["error"]) == (422, True), said.text
    assert len(world.index) == 24


@pytest.mark.parametrize("ids", ["x", "[1]", '["a", "b"]', "{}", "[" * 9999])
def test_ids_that_cannot_be(world: World, ids: str) -> None:
    said = add(world, encoded(drawn(COLOURS["red"])), ids=ids)
    assert (said.status_code, "ids must be" in said.json()["error"]) == (422, True)


def test_an_index_that_is_served_for_searching_is_not_changed(tmp_path: object) -> None:
    make_index(tmp_path / "birds", tmp_path / "pictures").close()  # type: ignore[operator]
    app = application(Index.open(tmp_path / "birds"), ColourEncoder(), patient())  # type: ignore[operator]
    with running(app) as address, httpx.Client(base_url=f"{address}/api/indexes/birds/", timeout=PATIENCE) as client:
        answers = [
            client.post("rows", json=rows("a")),
            client.delete("rows", params={"id": "red/0.png"}),
            client.post("pictures", files={"pictures": encoded(drawn((1, 2, 3)))}, data={"ids": '["a"]'}),
        ]
    for said in answers:
        assert (said.status_code, "start the service with --write" in said.json()["error"]) == (403, True)
