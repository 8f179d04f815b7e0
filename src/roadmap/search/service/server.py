"""The application on a socket: opening what is served, listening, stopping without dropping anybody."""

from __future__ import annotations

import asyncio
import errno
import json
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import FastAPI

from roadmap.names import printable
from roadmap.search.index import Index
from roadmap.search.service.app import application
from roadmap.search.service.core import Embedder
from roadmap.search.service.limits import LOOPBACK, Limits

KEEP_ALIVE = 10  # seconds that an idle connection is kept for the next request


def serve(
    indexes: Sequence[str | Path],
    model: str | Path | Embedder | Sequence[str | Path | Embedder] | None = None,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    key: str | None = None,
    hosts: Sequence[str] = (),
    pictures: str | Path | None = None,
    write: bool = False,
    device: str = "auto",
    limits: Limits | None = None,
    say: Callable[[str], None] = print,
) -> None:
    """Serve indexes until Ctrl-C or SIGTERM; requests that are running then are finished.

    Args:
        indexes: folders of indexes; the page compares two of them side by side.
        model: what `Encoder.open` takes, or an object with `embed` and `description`; one for all or one for each.
            None: what the index says it was made with.
        host: address to listen on; only this machine can reach the default.
        port: 0 for any that is free.
        key: that every request must bring.
        hosts: further names that the service goes by, such as "search.example.org".
        pictures: the folder that ids are relative to, where they have moved.
        write: whether rows may be added and removed. One process at a time may.
        device: of the models.
        limits: see `Limits`.
        say: told the address and what is served.
    """
    app = opened_application(indexes, model, device, key, allowed_hosts(host, hosts), pictures, write, limits)
    with listening(host, port) as listener:
        for one in app.state.service.served.values():
            by = "pictures, rows, vectors and metadata" if one.encoder else "rows, vectors and metadata; no model"
            say(f"index      {one.name}: {len(one.index):,} rows, searched by {by}")
        say(f"page       {address_of(listener)}")
        say(f"interface  {address_of(listener)}/api/openapi.json")
        if host not in LOOPBACK and key is None:
            say("warning    anybody who reaches this address can search; --key asks for a key")
        server = _server(app, limits or Limits())
        with _stop_by_signals(server):
            say("stop       Ctrl-C")
            server.run(sockets=[listener])
        say("stopped")


@contextmanager
def running(app: FastAPI, *, host: str = "127.0.0.1", port: int = 0, limits: Limits | None = None) -> Iterator[str]:
    """An application in the background of this program: its address, until the block ends."""
    server = _server(app, limits or app.state.service.limits)
    with listening(host, port) as listener:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        try:
            while not server.started:
                if not thread.is_alive():
                    raise RuntimeError("the server could not be started; its log says why")
                time.sleep(0.005)
            yield address_of(listener)
        finally:
            server.should_exit = True
            thread.join()


def opened_application(
    folders: Sequence[str | Path],
    model: Any = None,
    device: str = "auto",
    key: str | None = None,
    hosts: Sequence[str] | None = None,
    pictures: str | Path | None = None,
    write: bool = False,
    limits: Limits | None = None,
) -> FastAPI:
    """The application of `serve`, with its indexes and models opened."""
    if not folders:
        raise ValueError("which index? Give at least one folder of an index")
    models = list(model) if isinstance(model, list | tuple) else [model] * len(folders)
    if len(models) != len(folders):
        raise ValueError(f"{len(models)} models for {len(folders)} indexes; give one for all, or one for each")
    opened: dict[str, Index] = {}
    encoders: dict[str, Embedder | None] = {}
    kept: dict[str, Embedder] = {}  # a model that serves two indexes is loaded once
    try:
        for folder, wanted in zip(folders, models, strict=True):
            name = _free_name(Path(folder), opened)
            opened[name] = index = Index.open(folder, write=write)
            encoders[name] = _encoder(index, wanted, device, kept)
        return application(opened, encoders, limits, pictures=pictures, key=key, hosts=hosts)
    except BaseException:
        for index in opened.values():
            index.close()
        raise


def allowed_hosts(host: str, more: Sequence[str] = ()) -> list[str] | None:
    """On loopback, the names of loopback: no page of another site can then reach the service under a name of its own.
    Elsewhere any name, unless some are given."""
    if host in LOOPBACK:
        return [*LOOPBACK, *more]
    return [*LOOPBACK, host, *more] if more else None


@contextmanager
def listening(host: str, port: int) -> Iterator[socket.socket]:
    """A socket that is bound, so that an address in use is told before anything is served."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except socket.gaierror as error:
        raise ValueError(f"there is no address {host}: {error.strerror}") from error
    with socket.socket(family, kind, protocol) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(address)
        except OSError as error:
            other = "--host" if error.errno == errno.EADDRNOTAVAIL else "--port"
            raise OSError(f"cannot listen on {host}:{port}: {error.strerror}; choose another {other}") from error
        yield listener


def address_of(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _encoder(index: Index, wanted: Any, device: str, kept: dict[str, Embedder]) -> Embedder | None:
    """The model of an index; None where neither the index nor the caller says which it is."""
    about = index.manifest.about
    if hasattr(wanted, "embed"):
        found: Embedder = wanted
        return found
    if wanted is None and not about.get("opened"):
        return None
    # the same model of another index, opened in the same way, is the same
    key = json.dumps([str(wanted), about.get("opened"), about.get("model"), about.get("precision")], sort_keys=True)
    if key not in kept:
        from roadmap.search.indexing import encoder_of

        kept[key] = encoder_of(index, device, model=wanted)
    return kept[key]


def _free_name(folder: Path, taken: dict[str, Index]) -> str:
    name = printable(folder.resolve().name.removesuffix(".index")) or "index"
    return name if name not in taken else next(n for i in range(2, 100) if (n := f"{name}-{i}") not in taken)


def _server(app: FastAPI, limits: Limits) -> uvicorn.Server:
    config = uvicorn.Config(
        app,
        http="h11",  # it bounds the headers of a request; the other that may be installed takes any number
        log_level="warning",
        access_log=False,
        server_header=False,
        proxy_headers=False,  # who a client is may not be claimed by the client
        timeout_keep_alive=KEEP_ALIVE,
        timeout_graceful_shutdown=round(limits.seconds + 1),
        limit_concurrency=limits.connections,
        ws="none",
    )
    server = uvicorn.Server(config)
    app.state.background.append(lambda: _hang_up_on_the_silent(server, limits.seconds))
    return server


async def _hang_up_on_the_silent(server: uvicorn.Server, seconds: float) -> None:
    """Connections that sent no whole request for so long are closed; the server itself would wait for ever."""
    silent: dict[Any, tuple[Any, float]] = {}
    while True:
        await asyncio.sleep(min(1.0, seconds / 4))
        now, there = time.monotonic(), set(server.server_state.connections)
        silent = {one: seen for one, seen in silent.items() if one in there}
        for one in there:
            cycle = getattr(one, "cycle", None)
            if cycle is not None and not cycle.response_complete:
                silent.pop(one, None)
                continue
            last, since = silent.get(one, (None, now))
            silent[one] = (cycle, since if last is cycle else now)
            if now - silent[one][1] > max(seconds, KEEP_ALIVE):
                with suppress(Exception):
                    one.transport.abort()


@contextmanager
def _stop_by_signals(server: uvicorn.Server) -> Iterator[None]:
    """A signal that comes before the server has handlers of its own stops it as soon as it has started. When it has
    stopped, it raises the signal that stopped it again; by then all is done."""

    def stop(*_: object) -> None:
        server.should_exit = True

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
