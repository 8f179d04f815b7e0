"""Whatever cannot be gets a 4xx that says why, and the service goes on."""

from __future__ import annotations

import io
import json
import struct
import zlib
from typing import Any

import pytest
from PIL import Image

from .conftest import World
from .worlds import COLOURS, drawn, encoded, halves

POST = "/api/indexes/birds/search"


def bomb() -> bytes:
    """A PNG of a few hundred bytes that says it is 30,000 x 30,000."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", 30_000, 30_000, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", zlib.compress(b"\0" * 4096)) + chunk(b"IEND", b"")


def float_tiff() -> bytes:
    return encoded(Image.new("F", (8, 8), 0.5), "TIFF")


PICTURES: dict[str, tuple[bytes, int, str]] = {
    "empty": (b"", 422, "is empty"),
    "text": (b"no picture at all", 415, "not a picture in one of the formats JPEG, PNG"),
    "bomb": (bomb(), 413, "pixels"),
    "many pixels": (encoded(Image.new("L", (400, 300))), 413, "400 x 300 pixels; at most 100,000 are allowed"),
    "truncated": (encoded(drawn(COLOURS["red"], size=(200, 200)), "JPEG")[:4000], 422, "truncated or corrupt"),
    "truncated png": (encoded(drawn(COLOURS["red"]))[:900], 422, "truncated or corrupt"),
    "no known range": (float_tiff(), 422, "floating-point pixels"),
    "postscript": (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\nshowpage\n", 415, "not a picture"),
    "svg": (b'<svg xmlns="http://www.w3.org/2000/svg"/>', 415, "not a picture"),
    "zip": (b"PK\x03\x04" + b"\0" * 60, 415, "not a picture"),
}


@pytest.mark.parametrize("name", PICTURES)
def test_pictures_that_cannot_be_used(world: World, name: str) -> None:
    content, status, words = PICTURES[name]
    said = world.upload(content)
    assert (said.status_code, words in said.json()["error"]) == (status, True), said.text
    assert str(world.folder) not in said.text


def test_one_bad_picture_of_a_batch_is_told_and_the_service_goes_on(world: World) -> None:
    assert world.upload(encoded(halves()), b"x").status_code == 415
    assert world.upload(encoded(halves())).status_code == 200
    assert "roadmap_queries_waiting 0.0" in world.client.get("/metrics").text


FORMS: dict[str, tuple[dict[str, Any], int, str]] = {
    "boxes no json": ({"boxes": "["}, 422, "boxes must be JSON"),
    "boxes too few": ({"boxes": "[]"}, 422, "one [x, y, width, height] or null for each of 1"),
    "box of three": ({"boxes": "[[1, 2, 3]]"}, 422, "a box is [x, y, width, height]"),
    "box not a number": ({"boxes": "[[1, 2, NaN, 3]]"}, 422, "NaN is no number of JSON"),
    "box beyond all numbers": ({"boxes": f"[[1, 2, {10**400}, 3]]"}, 422, "a box is [x, y, width, height]"),
    "box infinite": ({"boxes": "[[1, 2, 1e999, 3]]"}, 422, "a box is [x, y, width, height]"),
    "box empty": ({"boxes": "[[1, 2, 0, 3]]"}, 422, "at least 1 x 1; got 0 x 3"),
    "box outside": ({"boxes": "[[500, 500, 9, 9]]"}, 422, "lies outside the picture of 80 x 40"),
    "where no object": ({"where": "[1]"}, 422, "where must be a JSON object"),
    "where column": ({"where": '{"lable": 1}'}, 422, "did you mean 'label'?"),
    "where kind": ({"where": '{"year": "x"}'}, 422, "holds whole numbers"),
    "where deep": ({"where": '{"not":' * 5000 + "{}" + "}" * 5000}, 422, ""),
    "k none": ({"k": 0}, 422, "k: Input should be greater than or equal to 1"),
    "k many": ({"k": 21}, 422, "at most 20 results"),
    "too deep": ({"k": 10, "offset": 13}, 422, "pages go down to 22"),
}


@pytest.mark.parametrize("name", FORMS)
def test_forms_that_cannot_be(world: World, name: str) -> None:
    form, status, words = FORMS[name]
    said = world.upload(encoded(halves()), **form)
    assert (said.status_code, words in said.json()["error"]) == (status, True), said.text


BODIES: dict[str, tuple[str, int, str]] = {
    "no json": ("{", 422, "JSON decode error"),
    "nothing": ("", 422, "Field required"),
    "a list": ("[]", 422, "the body of the request must be a JSON object"),
    "no object": ('{"queries": [3]}', 422, "queries.0 must be a JSON object"),
    "nested": ("[" * 100_000, 400, "cannot be read"),
    "huge number": ('{"queries": [{"id": "x"}], "k": ' + "9" * 5000 + "}", 400, "cannot be read"),
    "no query": ('{"queries": []}', 422, "at least 1 item"),
    "empty query": ('{"queries": [{}]}', 422, "give an id, an id and a box, or a vector"),
    "id and vector": ('{"queries": [{"id": "red/0.png", "vector": [1]}]}', 422, "queries[0]: give an id"),
    "misspelt": ('{"queries": [{"id": "red/0.png"}], "kk": 3}', 422, "kk: Extra inputs are not permitted"),
    "NaN": ('{"queries": [{"vector": [NaN]}]}', 422, "queries.0.vector.0: Input should be a finite number"),
    "infinite": ('{"queries": [{"vector": [1e999]}]}', 422, "finite"),
    "zero": (json.dumps({"queries": [{"vector": [0] * 48}]}), 422, "is zero"),
    "dimensions": ('{"queries": [{"vector": [1, 2]}]}', 422, "shape (Q, 48)"),
    "another model": (
        json.dumps({"queries": [{"vector": [1] * 48}], "model": "d" * 64}),
        422,
        "another model than the index",
    ),
    "unknown": ('{"queries": [{"id": "../../etc/passwd"}]}', 404, "is not in the index"),
    "surrogate": ('{"queries": [{"id": "\\ud800"}]}', 404, "is not in the index"),
    "NUL": ('{"queries": [{"id": "a\\u0000b"}]}', 404, "is not in the index"),
    "many": (json.dumps({"queries": [{"id": "red/0.png"}] * 41}), 413, "41 queries in one request; at most 40"),
    "box on a row that is not there": ('{"queries": [{"id": "x", "box": [0, 0, 5, 5]}]}', 404, "not in the index"),
}


@pytest.mark.parametrize("name", BODIES)
def test_bodies_that_cannot_be(world: World, name: str) -> None:
    body, status, words = BODIES[name]
    said = world.client.post(POST, content=body, headers={"content-type": "application/json"})
    assert (said.status_code, words in said.json()["error"]) == (status, True), said.text


@pytest.mark.parametrize("header", [{"content-type": "application/json"}, {}, {"content-type": "text/plain"}])
def test_what_is_parsed_as_a_whole_may_be_less_than_files(world: World, header: dict[str, str]) -> None:
    body = b'{"queries": [{"vector": [' + b"0," * 80_000 + b"1]}]}"  # 160 kB: as files it would be taken
    assert len(body) > 150_000
    for content in (body, iter([body[:100_000], body[100_000:]])):  # with its length in the header, and without
        said = world.client.post(POST, content=content, headers=header)
        assert (said.status_code, said.json()["error"]) == (
            413,
            "the request is too large: at most 150,000 bytes are allowed",
        )
    assert world.upload(b"x" * 160_000).status_code == 415  # it was read: it is no picture


def test_a_vector_longer_than_any_models_is_refused_before_all_of_it_is_checked(world: World) -> None:
    body = '{"queries": [{"vector": [' + "0," * 70_000 + "1]}]}"
    said = world.client.post(POST, content=body, headers={"content-type": "application/json"})
    assert (said.status_code, "at most 65536 items" in said.json()["error"]) == (422, True), said.text


def test_numbers_beyond_float32_are_told_without_a_warning(world: World, recwarn: pytest.WarningsRecorder) -> None:
    said = world.post("search", {"queries": [{"vector": [1e308] * 48}]})
    assert (said.status_code, "holds NaN or infinity" in said.json()["error"]) == (422, True)
    assert [str(warning.message) for warning in recwarn if "overflow" in str(warning.message)] == []


def test_the_usual_slips_with_curl_are_told_in_words(world: World) -> None:
    said = world.client.post(POST, content='{"queries": []}', headers={"content-type": "text/plain"})
    words = "the body of the request must be a JSON object, with the header content-type: application/json"
    assert (said.status_code, said.json()["error"]) == (422, words)
    said = world.client.post(f"{POST}/pictures", data={"pictures": "query.jpg"})  # without its @
    words = "pictures.0 must be a file, not text; with curl -F NAME=@FILE"
    assert (said.status_code, said.json()["error"]) == (422, words)


def test_paths_methods_and_types_that_are_not_there(world: World) -> None:
    said = {"error": "there is nothing at this path; /api/openapi.json has all that can be asked"}
    assert world.client.get("/nothing").json() == said
    assert world.client.get("/api/indexes/nobody/picture?id=1").json()["error"].startswith("there is no index 'nobody'")
    said = world.client.get(POST)
    assert said.status_code == 405
    assert said.json() == {"error": "this path is not asked in this way, but with POST"}
    assert (
        world.client.post(f"{POST}/pictures", content=b"x", headers={"content-type": "text/plain"}).status_code == 422
    )
    broken = world.client.post(f"{POST}/pictures", content=b"x", headers={"content-type": "multipart/form-data"})
    assert broken.status_code == 400
    assert world.client.get("/page/../app.py").status_code == 404
    assert world.client.get("/%2e%2e/app.py").status_code == 404


def test_a_fault_of_ours_says_nothing_of_the_inside(world: World) -> None:
    plain = world.encoder.embed
    world.encoder.embed = lambda _: 1 / 0  # type: ignore[method-assign,assignment,return-value]
    try:
        said = world.upload(encoded(halves()))
    finally:
        world.encoder.embed = plain  # type: ignore[method-assign]
    assert (said.status_code, said.json()) == (500, {"error": "a fault of the service; its log says more"})
    assert world.upload(encoded(halves())).status_code == 200


def test_every_answer_carries_the_headers_that_protect_a_browser(world: World) -> None:
    for answer in (world.client.get("/"), world.client.get("/nothing"), world.client.get("/api/indexes")):
        assert "default-src 'none'" in answer.headers["content-security-policy"]
        assert "unsafe" not in answer.headers["content-security-policy"]
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["x-frame-options"] == "DENY"
        assert "access-control-allow-origin" not in answer.headers
        assert "server" not in answer.headers


def test_shown_pictures_bring_nothing_of_the_original_but_its_pixels(world: World) -> None:
    exif = Image.Exif()
    exif[0x010E] = "secret place"
    file = io.BytesIO()
    drawn(COLOURS["red"]).save(file, "JPEG", exif=exif, comment="secret name")
    (world.pictures / "red" / "0.png").write_bytes(file.getvalue())  # whatever its name says
    shown = world.client.get("/api/indexes/birds/picture", params={"id": "red/0.png", "side": 16})
    assert b"secret" not in shown.content
    assert max(Image.open(io.BytesIO(shown.content)).size) == 16
