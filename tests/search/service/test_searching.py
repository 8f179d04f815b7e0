"""Answers of the service are those of the index, asked in every way."""

from __future__ import annotations

import dataclasses
import io
import json
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from PIL import Image

from roadmap.search import Index
from roadmap.search.service import application, running

from ...waiting import PATIENCE, wait_until
from .conftest import World
from .worlds import COLOURS, EACH, ColourEncoder, drawn, encoded, halves, make_index, patient


def ids(answer: dict[str, Any]) -> list[str]:
    return [found["id"] for found in answer["results"]]


def test_an_uploaded_picture_finds_what_the_index_finds(world: World) -> None:
    image = drawn(COLOURS["green"], 77)
    said = world.upload(encoded(image), k=12).json()
    wanted = world.index.search(world.encoder.embed([image]), 12)
    (answer,) = said["answers"]
    assert ids(answer) == wanted.ids[0]
    assert [found["score"] for found in answer["results"]] == pytest.approx(wanted.scores[0], abs=1e-6)
    assert [found["metadata"] for found in answer["results"]] == wanted.metadata[0]
    assert {name.split("/")[0] for name in ids(answer)[:EACH]} == {"green"}
    assert said["index"] == "birds"
    assert answer["more"] is True
    assert answer["expected"] is None
    assert said["took"]["total"] >= said["took"]["embed"] > 0


def test_a_box_is_in_pixels_of_the_upright_picture(world: World) -> None:
    red = world.upload(encoded(halves()), k=1, boxes="[[40, 0, 40, 40]]").json()
    blue = world.upload(encoded(halves()), k=1, boxes="[[0, 0, 40, 40]]").json()
    assert ids(red["answers"][0])[0].startswith("red/")
    assert ids(blue["answers"][0])[0].startswith("blue/")
    # turned by its metadata: stored with blue below, shown with blue on the left
    turned, exif = halves().transpose(Image.Transpose.ROTATE_90), Image.Exif()
    exif[0x0112] = 6
    file = io.BytesIO()
    turned.save(file, "JPEG", exif=exif, quality=95)
    both = world.upload(file.getvalue(), file.getvalue(), k=1, boxes="[[45, 0, 35, 40], [0, 0, 35, 40]]").json()
    assert [ids(answer)[0].split("/")[0] for answer in both["answers"]] == ["red", "blue"]


def test_batches_keep_their_order_and_boxes(world: World) -> None:
    contents = [encoded(drawn(colour, 5)) for colour in COLOURS.values()] + [encoded(halves())]
    said = world.upload(*contents, k=1, boxes="[null, null, null, [40, 0, 40, 40]]").json()
    assert [ids(answer)[0].split("/")[0] for answer in said["answers"]] == [*COLOURS, "red"]


def test_by_id_vector_and_part_of_a_picture(world: World) -> None:
    vector = world.index.vectors_of(["blue/3.png"])[0]
    queries = [{"id": "blue/3.png"}, {"vector": (5 * vector).tolist()}, {"id": "blue/3.png", "box": [0, 0, 48, 40]}]
    said = world.post("search", {"queries": queries, "k": 5}).json()
    by_id, by_vector, by_part = (ids(answer) for answer in said["answers"])
    assert by_id == by_vector == by_part == world.index.search(vector, 5).ids[0]
    assert by_id[0] == "blue/3.png"
    assert said["answers"][0]["results"][0]["score"] == pytest.approx(1, abs=1e-5)


def test_the_part_of_a_row_that_is_itself_a_part(world: World, tmp_path: Any) -> None:
    halves().save(world.pictures / "halves.png")
    name, left = "halves.png#40,0,80,40", "halves.png#0,0,40,40"
    vector = world.encoder.embed([halves().crop((40, 0, 80, 40))]).vectors
    model = world.index.manifest.about["model"]
    body = {"ids": [name], "vectors": vector.tolist(), "model": model, "metadata": {"label": ["part"]}}
    assert world.post("rows", body).json() == {"changed": 1, "vectors": 3 * EACH + 1}
    try:
        shown = world.client.get("/api/indexes/birds/picture", params={"id": name})
        assert shown.headers["x-original-size"] == "40x40"
        red, _, blue = np.asarray(Image.open(io.BytesIO(shown.content))).mean((0, 1))
        assert red > 200
        assert blue < 80
        # the whole of the part, though the box goes further: blue is left out
        found = world.post("search", {"queries": [{"id": name, "box": [0, 0, 40, 40]}], "k": 2}).json()
        assert ids(found["answers"][0])[0] == name
        # and red, where it goes on to the right
        assert world.post("rows", {**body, "ids": [left], "vectors": (-vector).tolist()}).status_code == 200
        found = world.post("search", {"queries": [{"id": left, "box": [0, 0, 900, 40]}], "k": 1}).json()
        assert ids(found["answers"][0])[0].startswith("blue/")
        assert found["answers"][0]["results"][0]["score"] > 0.9
        other = world.client.get("/api/indexes/birds/picture", params={"id": left})
        assert np.asarray(Image.open(io.BytesIO(other.content))).mean((0, 1))[2] > 200  # each part is shown as itself
    finally:
        gone = world.client.delete("/api/indexes/birds/rows", params={"id": [name, left], "missing": "ignore"})
        assert gone.json()["changed"] == 2


def test_a_picture_is_shown_as_it_is_now_and_few_are_kept(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def colour(name: str) -> list[int]:
        shown = world.client.get("/api/indexes/birds/picture", params={"id": name})
        return [round(level / 50) for level in np.asarray(Image.open(io.BytesIO(shown.content))).mean((0, 1))]

    path = world.pictures / "green" / "7.png"
    before, content = colour("green/7.png"), path.read_bytes()
    drawn(COLOURS["blue"]).save(path)
    try:
        assert colour("green/7.png") == colour("blue/0.png") != before
        assert len(world.service._shown) >= 2
        monkeypatch.setattr("roadmap.search.service.core.KEPT_PICTURES", 1500)
        colour("red/0.png")
        assert sum(len(kept) for kept, _ in world.service._shown.values()) <= 1500
    finally:
        path.write_bytes(content)


def test_filters_and_pages_are_those_of_the_index(world: World) -> None:
    where = {"year": {">=": 2003}, "label": {"in": ["red", "blue"]}}
    whole = world.index.search(world.index.vectors_of(["red/1.png"]), 10, where).ids[0]
    assert len(whole) == 10
    pages = []
    for offset in range(0, 12, 4):
        said = world.post("search", {"queries": [{"id": "red/1.png"}], "k": 4, "offset": offset, "where": where}).json()
        pages += ids(said["answers"][0])
        assert said["answers"][0]["more"] is (offset < 8)
    assert pages == whole
    last = world.post("search", {"queries": [{"id": "red/1.png"}], "k": 5, "offset": 5, "where": where}).json()
    assert (ids(last["answers"][0]), last["answers"][0]["more"]) == (whole[5:], False)
    uploaded = world.upload(encoded(drawn(COLOURS["red"])), k=4, where=json.dumps(where)).json()
    assert all(found["metadata"]["year"] >= 2003 for found in uploaded["answers"][0]["results"])


def test_rows_are_listed_by_their_metadata(world: World) -> None:
    said = world.post("list", {"where": {"label": "green", "year": {"<": 2003}}, "k": 2}).json()
    assert [found["id"] for found in said["results"]] == ["green/0.png", "green/1.png"]
    assert (said["count"], said["more"], said["results"][0]["score"]) == (3, True, None)
    said = world.post("list", {"where": {"label": "green", "year": {"<": 2003}}, "k": 2, "offset": 2}).json()
    assert [found["id"] for found in said["results"]] == ["green/2.png"]
    assert said["more"] is False


def test_why_says_rank_score_and_filter(world: World) -> None:
    image = drawn(COLOURS["red"], 3)
    every = world.index.search(world.encoder.embed([image]), 24)
    rank = every.ids[0].index("green/2.png")
    said = world.upload(encoded(image), k=1, expect="green/2.png").json()["answers"][0]["expected"]
    assert said["rank"] == rank + 1
    assert said["score"] == pytest.approx(every.scores[0][rank], abs=1e-6)
    assert (said["among"], said["passes"]) == (24, True)
    filtered = {"queries": [{"id": "red/0.png"}], "where": {"label": "red"}, "expect": "green/2.png"}
    said = world.post("search", filtered).json()["answers"][0]["expected"]
    assert (said["rank"], said["among"], said["passes"]) == (9, 8, False)
    said = world.upload(encoded(image), k=1, expect="nobody").json()["answers"][0]
    assert said["expected"] == {"id": "nobody", "rank": None, "score": None, "among": 24, "passes": False}
    assert len(said["results"]) == 1
    body = '{"queries": [{"id": "red/0.png"}], "expect": "\\ud800"}'
    said = world.client.post("/api/indexes/birds/search", content=body, headers={"content-type": "application/json"})
    assert said.json()["answers"][0]["expected"]["id"] == "\\ud800"  # what is no text is written out


def test_what_is_served_is_told(world: World) -> None:
    said = world.client.get("/api/indexes").json()
    assert [one["name"] for one in said["indexes"]] == ["birds", "plain"]
    birds, plain = said["indexes"]
    assert (birds["pictures"], plain["pictures"], birds["writable"]) == (True, False, True)
    assert birds["labels"] == sorted(COLOURS)
    assert birds["columns"] == {"id": "text", "label": "text", "year": "integer"}


def test_queries_that_are_searched_together_keep_their_own_filter_and_page(world: World) -> None:
    """The searching of one query is held up; others, each asking something else, gather behind it."""
    entered, release = threading.Event(), threading.Event()
    plain, sizes = world.index.search, []

    def slow(vectors: Any, *more: Any) -> Any:
        if not entered.is_set():
            entered.set()
            assert release.wait(PATIENCE)
        sizes.append(len(vectors))
        return plain(vectors, *more)

    asked = [(name, k, offset) for name in COLOURS for k, offset in ((2, 0), (2, 0), (3, 1))]
    world.index.search = slow  # type: ignore[method-assign]
    try:
        with ThreadPoolExecutor(10) as pool:
            first = pool.submit(world.post, "search", {"queries": [{"id": "red/0.png"}]})
            assert entered.wait(PATIENCE)
            others = [
                pool.submit(
                    world.post,
                    "search",
                    {"queries": [{"id": "red/0.png"}], "k": k, "offset": offset, "where": {"label": name}},
                )
                for name, k, offset in asked
            ]
            wait_until(lambda: len(world.service._searching) == len(asked))
            release.set()
            found = [ids(other.result().json()["answers"][0]) for other in others]
            assert first.result().status_code == 200
    finally:
        world.index.search = plain  # type: ignore[method-assign]
    query = world.index.vectors_of(["red/0.png"])
    assert found == [plain(query, k, {"label": name}, offset).ids[0] for name, k, offset in asked]
    assert sorted(sizes) == [1, 1, 1, 1, 2, 2, 2]  # those that ask the same went together


def test_without_a_model_rows_are_searched_and_pictures_refused(world: World) -> None:
    assert world.post("search", {"queries": [{"id": "red/0.png"}]}, index="plain").status_code == 200
    refused = world.upload(encoded(halves()), index="plain")
    assert refused.status_code == 409
    assert "without its model" in refused.json()["error"]


def test_concurrent_queries_are_embedded_together_and_answered_each(world: World) -> None:
    """The model is held up by one query; what gathers behind it goes through at once."""
    entered, release = threading.Event(), threading.Event()
    plain = world.encoder.embed

    def slow(pictures: Any) -> Any:
        if not entered.is_set():
            entered.set()
            assert release.wait(PATIENCE)
        return plain(pictures)

    world.encoder.embed, world.encoder.batches = slow, []  # type: ignore[method-assign]
    try:
        with ThreadPoolExecutor(14) as pool:
            names = list(COLOURS) * 4
            first = pool.submit(world.upload, encoded(halves()))
            assert entered.wait(PATIENCE)
            others = [pool.submit(world.upload, encoded(drawn(COLOURS[name], i)), k=1) for i, name in enumerate(names)]
            wait_until(lambda: "roadmap_queries_waiting 13.0" in world.client.get("/metrics").text)
            release.set()
            found = [ids(other.result().json()["answers"][0])[0].split("/")[0] for other in others]
            assert first.result().status_code == 200
    finally:
        world.encoder.embed = plain  # type: ignore[method-assign]
    assert found == names
    assert sum(world.encoder.batches) == 13
    assert max(world.encoder.batches) > 1


def test_what_another_process_adds_and_removes_is_taken_up(tmp_path: Path) -> None:
    encoder = ColourEncoder()
    writer = make_index(tmp_path / "birds", tmp_path / "pictures", encoder)
    app = application(Index.open(tmp_path / "birds"), encoder, patient())
    image = drawn((200, 200, 10), 1)
    with running(app) as address, httpx.Client(base_url=f"{address}/api/indexes/birds/", timeout=PATIENCE) as client:
        served = app.state.service.named("birds")
        vectors = encoder.embed([image])
        writer.add(dataclasses.replace(vectors, ids=("new.png",), class_names=("",)))
        writer.remove(["red/0.png"])
        served.looked = 0.0  # as a second later
        files = {"pictures": encoded(image)}
        assert ids(client.post("search/pictures", files=files).json()["answers"][0])[0] == "new.png"
        assert client.post("search", json={"queries": [{"id": "red/0.png"}]}).status_code == 404
        assert client.post("list", json={"where": {"id": "new.png"}}).json()["count"] == 1
    writer.close()
