"""No path from a request touches the disk: only rows of the index have pictures, only below the folder indexed."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest
import torch

from roadmap.embeddings import Embeddings
from roadmap.search.service import application, running

from ...waiting import PATIENCE
from .worlds import COLOURS, ColourEncoder, drawn, make_index, patient

OUTSIDE = ["../secret.png", "red/../../secret.png", "link.png", "linked/secret.png", "/etc/hostname", "ring.png"]


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> object:
    """Rows whose ids lead out of the folder, as if somebody had added them or links were made later."""
    folder = tmp_path_factory.mktemp("disk")
    pictures = folder / "pictures"
    encoder = ColourEncoder()
    index = make_index(folder / "birds", pictures, encoder)
    secret = drawn(COLOURS["red"])
    secret.save(folder / "secret.png")
    (pictures / "link.png").symlink_to(folder / "secret.png")
    (pictures / "linked").symlink_to(folder)
    (pictures / "ring.png").symlink_to(pictures / "ring.png")
    (pictures / "inside.png").symlink_to(pictures / "red" / "1.png")
    (pictures / "notes.txt").write_text("not a picture")
    names = [
        *OUTSIDE,
        str(folder / "secret.png"),
        "inside.png",
        "notes.txt",
        "red",
        "gone.png",
        "\udcff.png",
        "x" * 5000,
    ]
    names = [name for name in names if name.isprintable()]
    vectors = encoder.embed([secret]).vectors.repeat(len(names), 1)
    about = dict(index.manifest.about)
    index.add(Embeddings(vectors, torch.zeros(len(names), dtype=torch.int64), tuple(names), ("",), about))
    app = application({"birds": index}, encoder, patient(rate=0))
    with running(app) as address, httpx.Client(base_url=address, timeout=PATIENCE) as made:
        yield made


def picture(client: httpx.Client, id: str) -> httpx.Response:
    return client.get("/api/indexes/birds/picture", params={"id": id})


@pytest.mark.parametrize("id", OUTSIDE)
def test_rows_that_lead_out_of_the_folder_have_no_picture(client: httpx.Client, id: str) -> None:
    said = picture(client, id)
    assert said.status_code == 404
    assert "error" in said.json()
    boxed = client.post("/api/indexes/birds/search", json={"queries": [{"id": id, "box": [0, 0, 9, 9]}]})
    assert boxed.status_code == 404


def test_links_that_stay_inside_are_followed(client: httpx.Client) -> None:
    assert picture(client, "inside.png").content == picture(client, "red/1.png").content


@pytest.mark.parametrize("id", ["notes.txt", "red", "gone.png", "x" * 5000, "pictures/red/0.png", "./red/0.png", ""])
def test_what_is_no_picture_of_a_row_is_not_shown(client: httpx.Client, id: str) -> None:
    said = picture(client, id)
    assert said.status_code == 404, said.text
    assert "not a picture" not in said.text or id == "notes.txt"


def test_rows_are_the_only_names(client: httpx.Client, tmp_path: Path) -> None:
    drawn(COLOURS["red"]).save(tmp_path / "new.png")
    for id in (str(tmp_path / "new.png"), "red/0.png/", "red//0.png", "RED/0.png", "red/0.png\0"):
        said = picture(client, id)
        assert said.status_code == 404
        assert "is not in the index" in said.json()["error"]
