"""One service for the tests of a file, on a real socket."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from roadmap.search import Index
from roadmap.search.service import application, running
from roadmap.search.service.core import Service

from ...waiting import PATIENCE
from .worlds import ColourEncoder, make_index, patient


@dataclass
class World:
    """`birds` may be changed, `plain` has no model; both over the same kind of pictures."""

    address: str
    client: httpx.Client
    index: Index
    encoder: ColourEncoder
    folder: Path
    pictures: Path
    service: Service

    def post(self, path: str, body: object, index: str = "birds") -> httpx.Response:
        return self.client.post(f"/api/indexes/{index}/{path}", json=body)

    def upload(self, *contents: bytes, index: str = "birds", **form: object) -> httpx.Response:
        files = [("pictures", ("picture", content)) for content in contents]
        return self.client.post(f"/api/indexes/{index}/search/pictures", files=files, data=form)  # type: ignore[arg-type]


@pytest.fixture(scope="module", autouse=True)
def _idle_connections_stay() -> Iterator[None]:
    """A client whose machine stood still would otherwise ask on a connection that is just being closed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("roadmap.search.service.server.KEEP_ALIVE", round(PATIENCE))
        yield


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("service")
    encoder = ColourEncoder()
    index = make_index(folder / "birds", folder / "pictures", encoder)
    plain = make_index(folder / "plain", folder / "pictures", encoder)
    limits = patient(rate=0, upload=200_000, text=150_000, pixels=100_000, batch=40, results=20, depth=22)
    app = application({"birds": index, "plain": plain}, {"birds": encoder}, limits)
    with running(app) as address, httpx.Client(base_url=address, timeout=PATIENCE) as client:
        yield World(address, client, index, encoder, folder, folder / "pictures", app.state.service)
