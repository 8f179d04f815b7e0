"""`roadmap serve` as a process of its own: it opens, says where, and stops without dropping anybody."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
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

from ...waiting import PATIENCE, wait_until
from .worlds import COLOURS, connected, drawn, encoded, patient, rest_of


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


SEARCH = "/api/indexes/birds/search/pictures"


def address_of(client: httpx.Client) -> str:
    return str(client.base_url).rstrip("/")


def refuses(address: str) -> bool:
    try:
        connected(address).close()
    except ConnectionError:
        return True
    return False


@contextmanager
def process(*arguments: object, wait: bool = True) -> Iterator[tuple[subprocess.Popen[str], httpx.Client, list[str]]]:
    """The command, running; a client of it, and what it has said so far."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-m", "roadmap", "serve", *map(str, arguments), "--seconds", str(PATIENCE)]
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
            with httpx.Client(base_url=address, timeout=PATIENCE) as client:
                while wait:
                    try:
                        client.get("/ready")
                        break
                    except httpx.TransportError:
                        assert running.poll() is None
                        time.sleep(0.01)
                yield running, client, said
        finally:
            running.kill()


def test_it_serves_and_finishes_what_runs_when_it_is_told_to_stop(birds: Path) -> None:
    picture = encoded(drawn(COLOURS["red"], 1))
    with process(birds, "--model", "small_cnn", "--port", 0, "--device", "cpu", "--write") as (running, client, said):
        assert said[0] == "index      birds: 9 rows, searched by pictures, rows, vectors and metadata"
        found = client.post(SEARCH, files={"pictures": picture}).json()
        assert found["answers"][0]["results"][0]["id"] == "red1.png"
        assert found["answers"][0]["results"][0]["score"] == pytest.approx(1, abs=1e-5)
        assert "<title>" in client.get("/").text
        # a request that is half sent when the signal comes is answered all the same
        request = client.build_request("POST", SEARCH, files={"pictures": picture})
        body = request.read()
        with connected(address_of(client)) as connection:
            names = ("host", "content-type", "content-length")
            head = "".join(f"{name}: {request.headers[name]}\r\n" for name in names)
            connection.sendall(f"POST {SEARCH} HTTP/1.1\r\n{head}\r\n".encode() + body[:100])
            wait_until(lambda: "roadmap_requests" in client.get("/metrics").text)
            running.send_signal(signal.SIGTERM)
            wait_until(lambda: refuses(address_of(client)))  # it listens no more
            connection.sendall(body[100:])
            answer = rest_of(connection)
        assert answer.startswith(b"HTTP/1.1 200")
        assert b"red1.png" in answer
        assert running.wait(PATIENCE) == 0
        assert running.stdout is not None
        assert running.stdout.read().splitlines() == ["stopped"]
    with Index.open(birds, write=True) as free:  # the lock is given back
        assert len(free) == 9


def test_ctrl_c_stops_it_without_a_traceback(birds: Path) -> None:
    with process(birds, "--model", "small_cnn", "--port", 0, "--device", "cpu", "--key", "k") as (running, client, _):
        assert client.get("/api/indexes").status_code == 401
        running.send_signal(signal.SIGINT)
        assert running.wait(PATIENCE) == 0
        assert running.stdout is not None
        assert running.stdout.read().splitlines() == ["stopped"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_it_stops_when_it_is_told_to_before_it_listens(birds: Path, number: int) -> None:
    """As soon as it says how to stop it."""
    arguments = (birds, "--model", "small_cnn", "--port", 0, "--device", "cpu")
    with process(*arguments, wait=False) as (running, _, _):
        running.send_signal(number)
        assert running.wait(PATIENCE) == 0
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
    for key in ("", "schlüssel", " key"):
        assert "the key must be of letters, digits and signs of ASCII" in said(
            birds, "--model", "small_cnn", "--key", key
        )
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


def test_an_index_under_a_name_that_is_not_utf_8_is_told_of(birds: Path, tmp_path: Path) -> None:
    folder = tmp_path / os.fsdecode(b"caf\xe9.index")
    try:
        shutil.copytree(birds, folder)
    except OSError:
        pytest.skip("this disk knows no such names")
    made = opened_application([folder], "small_cnn", device="cpu")
    with running(made) as address, httpx.Client(base_url=address, timeout=PATIENCE) as client:
        assert client.get("/api/indexes").json()["indexes"][0]["name"] == r"caf\udce9"


def test_an_exported_model_serves_in_its_place(birds: Path, tmp_path: Path) -> None:
    """The same index, searched by ONNX Runtime instead of torch: the same pictures, the same scores."""
    pytest.importorskip("onnxruntime")
    files = sorted(birds.parent.glob("*.png"))
    export(Encoder.open("small_cnn", device="cpu"), tmp_path / "model.onnx", files)
    app = opened_application([birds], str(tmp_path / "model.onnx"), device="cpu", limits=patient())
    with running(app) as address, httpx.Client(base_url=address, timeout=PATIENCE) as client:
        for file in files[::4]:
            answer = client.post(SEARCH, files={"pictures": file.read_bytes()})
            first = answer.json()["answers"][0]["results"][0]
            assert (first["id"], first["score"]) == (file.name, pytest.approx(1, abs=1e-4))


def test_names_that_a_service_goes_by() -> None:
    assert allowed_hosts("127.0.0.1") == ["127.0.0.1", "localhost", "::1"]
    assert allowed_hosts("0.0.0.0") is None
    assert "a.example" in (allowed_hosts("0.0.0.0", ["a.example"]) or ())
    with pytest.raises(ValueError, match="which index"):
        serve([])
