"""The Milvus engine against a real server, which is killed and started again in between."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings

from roadmap.search import Index, installed

from ..waiting import PATIENCE
from .cases import Vectors, filters, literal_search, made, new_index, rows_of, table

pytestmark = pytest.mark.slow
COUNT = 60
# A server takes its ports seconds after it has looked for free ones: those of another process's server are others, and
# none is of those that the system gives to anybody.
PORTS = 10_000 + os.getpid() % 200 * 100
WEB = 9091  # which the package tries first for health and metrics, apart from all others
ETCD = """
listen-client-urls: {clients}
advertise-client-urls: {clients}
listen-peer-urls: {peers}
initial-advertise-peer-urls: {peers}
initial-cluster: default={peers}
"""


class Server:
    """A Milvus server of its own, from the package `milvus`, with its data in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.port: int | None = None
        self.start()

    def start(self) -> None:
        from milvus import MilvusServer, MilvusServerConfig

        class Config(MilvusServerConfig):  # type: ignore[misc]
            def resolve_port(self, port_start: int) -> tuple[int, socket.socket]:
                found: tuple[int, socket.socket] = super().resolve_port(PORTS + (50 if port_start == WEB else 0))
                return found

            def write_config(self) -> None:
                """And that of the etcd within, which would take one port for its peers wherever it runs."""
                super().write_config()
                milvus, etcd = (Path(self.base_data_dir, "configs", f"{name}.yaml") for name in ("milvus", "etcd"))
                clients, peers = (f"http://localhost:{port}" for port in (self.get("etcd_port"), PORTS + 99))
                etcd.write_text(ETCD.format(clients=clients, peers=peers))
                milvus.write_text(milvus.read_text().replace("\netcd:\n", f"\netcd:\n  config:\n    path: {etcd}\n"))

            def try_bind_port(self, port: int) -> socket.socket | None:
                """As it is there, but a port that a killed process leaves can be taken again at once."""
                tried = socket.socket()
                tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                try:
                    tried.bind(("127.0.0.1", port))
                    tried.listen()
                except OSError:
                    tried.close()
                    return None
                return tried

        ports = {} if self.port is None else {"proxy_port": self.port}
        self.server = MilvusServer(Config(data_dir=str(self.folder), **ports))
        self.server.start()
        self.port = self.server.listen_port

    def kill(self) -> None:
        self.server.server_proc.kill()
        self.server.server_proc.wait()
        self.server.server_proc = None

    @property
    def uri(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def options(self) -> dict[str, Any]:
        return {"uri": self.uri, "timeout": PATIENCE}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    if not installed("milvus"):
        pytest.skip("the engine 'milvus' is not installed")
    pytest.importorskip("milvus", reason="the package milvus, which carries a server, is not installed")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("roadmap.search.engines.milvus.RETURN", PATIENCE)
        running = Server(tmp_path_factory.mktemp("milvus"))
        yield running
        running.server.stop()


Filled = tuple[Path, Vectors, dict[str, Any]]


@pytest.fixture(scope="module")
def filled(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Filled:
    """An index on the server, closed; with the rows it holds."""
    folder = tmp_path_factory.mktemp("index") / "i"
    vectors, rows = made(COUNT), table(COUNT)
    with new_index(folder, "milvus", options={**server.options, "shards": 2}) as index:
        index.add(vectors, rows)
        index.remove(["p3.jpg", "p4.jpg"])
        assert index.build()["engine"]["recall@10"] >= 0.95
        assert len(index.engine) == len(index) == COUNT - 2
    kept = [i for i in range(COUNT) if i not in (3, 4)]
    return folder, rows_of(vectors, kept), {name: [values[i] for i in kept] for name, values in rows.items()}


@pytest.fixture(scope="module")
def reader(filled: Filled) -> Iterator[Index]:
    with Index.open(filled[0]) as index:
        yield index


@settings(max_examples=40)
@given(filters)
def test_a_filter_means_the_same_on_a_server(filled: Filled, reader: Index, where: dict[str, Any]) -> None:
    _, live, rows = filled
    right = literal_search(live, rows, live.vectors[5], where)
    found = reader.search(live.vectors[5], COUNT, where)
    assert sorted(found.ids[0]) == sorted(name for name, _ in right)
    assert found.scores[0] == pytest.approx([score for _, score in right], abs=2e-6)


def test_a_server_that_does_not_answer_in_time(server: Server, tmp_path: Path) -> None:
    with new_index(tmp_path / "i", "milvus", options=server.options) as index:
        index.add(made(30))
        assert index.engine._patience == PATIENCE  # type: ignore[attr-defined]
        index.engine._patience = 3.0  # type: ignore[attr-defined]
        server.server.server_proc.send_signal(signal.SIGSTOP)
        try:
            with pytest.raises(ConnectionError, match=rf"Milvus at {server.uri} failed to query: .* 3 s"):
                len(index.engine)
        finally:
            server.server.server_proc.send_signal(signal.SIGCONT)


def test_a_server_that_is_killed_and_started_again_has_everything(server: Server, tmp_path: Path) -> None:
    with new_index(tmp_path / "i", "milvus", options=server.options) as index:
        index.add(made(30))
        index.build()
        index.add(made(20, seed=1, first=30))  # not flushed
        index.remove(["p1.jpg", "p31.jpg"])
        server.kill()
        with pytest.raises(ConnectionError, match=rf"Milvus at {server.uri} failed to search: .*"):
            index.search(torch.ones(16), 3)
        # the index takes it, the engine does not; a killed writer would leave the same
        with pytest.raises(ConnectionError, match="The index itself holds all that was committed"):
            index.add(made(5, seed=2, first=50))
        index.engine.close = lambda: None  # type: ignore[method-assign]
    server.start()
    with Index.open(tmp_path / "i", write=True) as index:
        assert len(index) == len(index.engine) == 53
        for vectors in (made(30), made(20, seed=1, first=30), made(5, seed=2, first=50)):
            found = index.search(vectors.vectors, 1)
            names = [name for name in vectors.ids or () if name not in ("p1.jpg", "p31.jpg")]
            assert [ids[0] for ids, s in zip(found.ids, found.scores, strict=True) if s[0] > 0.9999] == names
        index.remove(["p50.jpg"])
    with Index.open(tmp_path / "i") as index:
        assert index.search(made(5, seed=2).vectors[0], 1).scores[0][0] < 0.99


def test_a_server_that_is_not_there(tmp_path: Path) -> None:
    if not installed("milvus"):
        pytest.skip("the engine 'milvus' is not installed")
    with pytest.raises(ConnectionError, match=r"no Milvus answers at http://127.0.0.1:9"):
        new_index(tmp_path / "i", "milvus", options={"uri": "http://127.0.0.1:9", "timeout": 1})
    assert "MILVUS_TOKEN" not in os.environ
