"""`roadmap serve` as a process of its own: it opens, says where, and stops without dropping anybody."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
import torch
from typer.testing import CliRunner

from roadmap.cli.app import app
from roadmap.data import Records
from roadmap.encoder import Encoder
from roadmap.encoder.exporting import export
from roadmap.search import Index
from roadmap.search.service import running, serve
from roadmap.search.service.server import allowed_hosts, opened_application

from .worlds import COLOURS, drawn, encoded


@pytest.fixture(scope="module")
def birds(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An index made with a real encoder: a small network with weights drawn at random, the same in every process."""
    folder = tmp_path_factory.mktemp("serve")
    names = []
    for label, colour in COLOURS.items():
        for i in range(3):
            names.append(f"{label}{i}.png")
            drawn(colour, i).save(folder / names[-1])
    encoder = Encoder.open("small_cnn", device="cpu")
    records = Records("folder", folder, tuple(names), torch.zeros(len(names), dtype=torch.int64).numpy())
    vectors = encoder.embed(records)
    with Index.create(folder / "birds.index", vectors.about, vectors.vectors.shape[1], engine="exact") as index:
        index.add(vectors)
    return folder / "birds.index"


@contextmanager
def process(*arguments: object, wait: bool = True) -> Iterator[tuple[subprocess.Popen[str], str, list[str]]]:
    """The command, running; its address, and what it has said so far."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-m", "roadmap", "serve", *map(str, arguments)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
    ) as running:
        try:
            said: list[str] = []
            assert running.stdout is not None
            for line in running.stdout:
                said.append(line.rstrip())
                if line.startswith("stop"):
                    break
            address = next((line.split()[1] for line in said if line.startswith("page")), "")
            assert address, "\n".join(said)
            while wait:
                try:
                    httpx.get(f"{address}/ready")
                    break
                except httpx.TransportError:
                    assert running.poll() is None
            yield running, address, said
        finally:
            running.kill()


def test_it_serves_and_finishes_what_runs_when_it_is_told_to_stop(birds: Path) -> None:
    picture = encoded(drawn(COLOURS["red"], 1))
    with process(birds, "--model", "small_cnn", "--port", 0, "--device", "cpu", "--write") as (running, address, said):
        assert said[0] == "index      birds: 9 rows, searched by pictures, rows, vectors and metadata"
        found = httpx.post(f"{address}/api/indexes/birds/search/pictures", files={"pictures": picture}).json()
        assert found["answers"][0]["results"][0]["id"] == "red1.png"
        assert found["answers"][0]["results"][0]["score"] == pytest.approx(1, abs=1e-5)
        assert "<title>" in httpx.get(address).text
        # a request that is half sent when the signal comes is answered all the same
        request = httpx.Request("POST", f"{address}/api/indexes/birds/search/pictures", files={"pictures": picture})
        body, (host, port) = request.read(), address.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), 30) as connection:
            head = f"POST /api/indexes/birds/search/pictures HTTP/1.1\r\nHost: {host}:{port}\r\n"
            head += f"Content-Type: {request.headers['content-type']}\r\nContent-Length: {len(body)}\r\n\r\n"
            connection.sendall(head.encode() + body[:100])
            while "roadmap_requests" not in httpx.get(f"{address}/metrics").text:
                pass
            running.send_signal(signal.SIGTERM)
            while True:  # it listens no more
                try:
                    socket.create_connection((host, int(port)), 1).close()
                except OSError:
                    break
            connection.sendall(body[100:])
            answer = b""
            while part := connection.recv(65_536):
                answer += part
        assert answer.startswith(b"HTTP/1.1 200")
        assert b"red1.png" in answer
        assert running.wait(30) == 0
        assert running.stdout is not None
        assert running.stdout.read().splitlines() == ["stopped"]
    with Index.open(birds, write=True) as free:  # the lock is given back
        assert len(free) == 9


def test_ctrl_c_stops_it_without_a_traceback(birds: Path) -> None:
    with process(birds, "--model", "small_cnn", "--port", 0, "--device", "cpu", "--key", "k") as (running, address, _):
        assert httpx.get(f"{address}/api/indexes").status_code == 401
        running.send_signal(signal.SIGINT)
        assert running.wait(30) == 0
        assert running.stdout is not None
        assert running.stdout.read().splitlines() == ["stopped"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_it_stops_when_it_is_told_to_before_it_listens(birds: Path, number: int) -> None:
    """As soon as it says how to stop it."""
    arguments = (birds, "--model", "small_cnn", "--port", 0, "--device", "cpu")
    with process(*arguments, wait=False) as (running, _, _):
        running.send_signal(number)
        assert running.wait(30) == 0
        assert running.stdout is not None
        assert running.stdout.read().splitlines() == ["stopped"]


def test_what_cannot_be_served_is_told_in_a_line(birds: Path, tmp_path: Path) -> None:
    def said(*arguments: object) -> str:
        done = CliRunner().invoke(app, ["serve", *map(str, arguments)])
        assert done.exit_code == 1
        assert "Traceback" not in done.output
        return done.output

    assert "holds no index" in said(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        output = said(birds, "--model", "small_cnn", "--port", taken.getsockname()[1])
    assert "cannot listen on 127.0.0.1" in output
    assert "choose another --port" in output
    assert said(birds, "--model", "small_cnn", "--host", "192.0.2.7").endswith("choose another --host\n")
    assert "give one for all, or one for each" in said(birds, "--model", "a", "--model", "b")
    with Index.open(birds, write=True):
        assert "is being written by another process" in said(birds, "--write", "--model", "small_cnn")


def test_vectors_of_another_model_are_refused_at_the_start(birds: Path) -> None:
    other = Encoder.open("small_cnn", device="cpu")
    with torch.no_grad():
        next(iter(other.model.parameters())).add_(1)
    with pytest.raises(ValueError, match="another model than the index"):
        opened_application([birds], other)
    with Index.open(birds, write=True) as free:  # nothing was left open
        assert len(free) == 9


def test_one_model_serves_two_indexes_and_names_are_distinct(birds: Path) -> None:
    made = opened_application([birds, birds], "small_cnn", device="cpu").state.service
    first, second = made.served.values()
    assert list(made.served) == ["birds", "birds-2"]
    assert first.encoder is second.encoder
    made.close()


def test_an_exported_model_serves_in_its_place(birds: Path, tmp_path: Path) -> None:
    """The same index, searched by ONNX Runtime instead of torch: the same pictures, the same scores."""
    pytest.importorskip("onnxruntime")
    files = sorted(birds.parent.glob("*.png"))
    export(Encoder.open("small_cnn", device="cpu"), tmp_path / "model.onnx", files)
    app = opened_application([birds], str(tmp_path / "model.onnx"), device="cpu")
    with running(app) as address:
        for file in files[::4]:
            answer = httpx.post(f"{address}/api/indexes/birds/search/pictures", files={"pictures": file.read_bytes()})
            first = answer.json()["answers"][0]["results"][0]
            assert (first["id"], first["score"]) == (file.name, pytest.approx(1, abs=1e-4))


def test_names_that_a_service_goes_by() -> None:
    assert allowed_hosts("127.0.0.1") == ["127.0.0.1", "localhost", "::1"]
    assert allowed_hosts("0.0.0.0") is None
    assert "a.example" in (allowed_hosts("0.0.0.0", ["a.example"]) or ())
    with pytest.raises(ValueError, match="which index"):
        serve([])
