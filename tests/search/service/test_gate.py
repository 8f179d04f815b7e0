"""What every request passes first: host, origin, key, rate, size; and slow and lost clients, on real sockets."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from roadmap.config.settings import SettingError
from roadmap.search.service import Limits, Refusal, application, running
from roadmap.search.service.gate import Rates

from ...waiting import PATIENCE, wait_until
from .conftest import World
from .worlds import ColourEncoder, connected, conversation, encoded, halves, make_index, patient, rest_of

SEARCH = "/api/indexes/birds/search"


@contextmanager
def service(folder: Path, limits: Limits, **more: Any) -> Iterator[tuple[str, httpx.Client, ColourEncoder]]:
    encoder = ColourEncoder()
    app = application({"birds": make_index(folder / "birds", folder / "pictures", encoder)}, encoder, limits, **more)
    with running(app) as address, httpx.Client(base_url=address, timeout=PATIENCE) as client:
        yield address, client, encoder


def test_without_the_key_nothing_but_the_page_and_its_health(tmp_path: Path) -> None:
    with service(tmp_path, patient(), key="geheim") as (_, client, _):
        for path in ("/", "/page.js", "/page.css", "/health", "/ready"):
            assert client.get(path).status_code == 200
        for path in ("/api/indexes", "/api/openapi.json", "/metrics", "/api/indexes/birds/picture?id=red/0.png"):
            for headers in (
                {},
                {"authorization": "Bearer wrong"},
                {"authorization": "geheim"},
                {"x-api-key": "geheimx"},
            ):
                refused = client.get(path, headers=headers)
                assert refused.status_code == 401
                assert refused.headers["www-authenticate"] == "Bearer"
            assert client.get(path, headers={"authorization": "Bearer geheim"}).status_code == 200
            assert client.get(path, headers={"x-api-key": "geheim"}).status_code == 200


def test_pages_of_other_sites_are_kept_out(tmp_path: Path) -> None:
    with service(tmp_path, patient(), hosts=["127.0.0.1", "search.example.org"]) as (address, client, _):
        body = {"queries": [{"id": "red/0.png"}]}
        assert client.post(SEARCH, json=body, headers={"origin": address}).status_code == 200
        refused = client.post(SEARCH, json=body, headers={"origin": "http://evil.example"})
        assert (refused.status_code, "other sites" in refused.json()["error"]) == (403, True)
        for origin in ("null", "http://[evil", ""):
            said = client.post(SEARCH, json=body, headers={"origin": origin})
            assert (said.status_code, "other sites" in said.json()["error"]) == (403, True)
        assert client.get("/health", headers={"host": "evil.example"}).status_code == 421
        assert client.get("/health", headers={"host": "search.example.org:8000"}).status_code == 200
        preflight = client.options(SEARCH, headers={"origin": address, "access-control-request-method": "POST"})
        assert not [name for name in preflight.headers if name.startswith("access-control")]


def test_rates_are_per_client_and_batches_count_whole(tmp_path: Path) -> None:
    with service(tmp_path, patient(rate=0.001, burst=4)) as (_, client, _):
        body = {"queries": [{"id": "red/0.png"}] * 3}
        assert client.post(SEARCH, json=body).status_code == 200
        refused = client.post(SEARCH, json=body)
        assert refused.status_code == 429
        assert "4 at once" in refused.json()["error"]
        assert int(refused.headers["retry-after"]) >= 1
        disguised = client.post(SEARCH, json=body, headers={"x-forwarded-for": "10.0.0.9"})
        assert disguised.status_code == 429
        assert client.get("/api/indexes").status_code == 200  # looking costs nothing


@given(
    rate=st.floats(0.1, 50),
    burst=st.integers(1, 20),
    steps=st.lists(st.tuples(st.floats(0, 3), st.integers(1, 5)), max_size=40),
)
def test_no_client_gets_more_than_its_rate(rate: float, burst: int, steps: list[tuple[float, int]]) -> None:
    now, taken = 0.0, 0
    waits: list[int] = []
    rates = Rates(rate, burst, lambda: now)
    for wait, count in steps:
        now += wait
        before = taken
        try:
            rates.take("a", count)
            taken += count
        except Refusal as refusal:
            waits.append(refusal.retry or 0)
        assert taken <= burst + rate * now + 1e-6
        assert taken in (before, before + count)
    assert all(wait >= 1 for wait in waits)
    rates.take("b", burst)  # another client is not held up


def test_of_very_many_clients_those_are_forgotten_that_were_seen_long_ago(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("roadmap.search.service.gate.CLIENTS", 2)
    rates = Rates(0.1, 1, lambda: 0.0)
    for client in ("a", "b", "c"):
        rates.take(client)
    for client in ("b", "c"):
        with pytest.raises(Refusal, match="too many queries"):
            rates.take(client)
    rates.take("a")


@pytest.mark.parametrize("field", ["upload", "text", "pixels", "queue", "seconds", "burst", "rate"])
def test_limits_that_cannot_be(field: str) -> None:
    with pytest.raises(SettingError, match=f"{field}=-1 must be at least"):
        Limits(**{field: -1})
    with pytest.raises(SettingError, match="must be at least"):
        Limits(**{field: float("nan")})


def test_too_large_is_refused_before_it_is_sent(world: World) -> None:
    head = "POST /api/indexes/birds/search/pictures HTTP/1.1\r\nHost: x\r\nContent-Length: 999999999\r\n"
    head += "Content-Type: multipart/form-data; boundary=x\r\n\r\n"
    said = conversation(world.address, head.encode())
    assert said.startswith(b"HTTP/1.1 413")
    assert b"at most 200,000 bytes are allowed" in said


def test_too_large_in_pieces_is_not_read_to_its_end(world: World) -> None:
    """No length is given; the service stops when the limit is passed, long before the end."""
    head = "POST /api/indexes/birds/search HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
    with connected(world.address) as connection:
        connection.sendall(head.encode())
        piece = b"10000\r\n" + b" " * 65_536 + b"\r\n"
        sent = 0
        try:
            while sent < 1000:
                connection.sendall(piece)
                sent += 1
        except OSError:
            pass
        assert sent < 1000
    assert world.client.get("/health").status_code == 200


HALF = f"POST {SEARCH} HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{{".encode()


def test_slow_clients_hold_nobody_up(tmp_path: Path) -> None:
    """Some open a connection and say nothing, some stop in the middle; others are answered in the meantime."""
    with service(tmp_path, patient(connections=100)) as (address, client, _), ExitStack() as slow:
        for said in 10 * [b"", b"GET /health HTT", HALF, HALF]:
            slow.enter_context(closing(connected(address))).sendall(said)
        for _ in range(10):
            assert client.post(SEARCH, json={"queries": [{"id": "red/0.png"}]}).status_code == 200


def test_slow_clients_are_let_go(tmp_path: Path) -> None:
    with service(tmp_path, Limits(seconds=0.3)) as (address, _, _), ExitStack() as slow:
        halfway = [slow.enter_context(closing(connected(address))) for _ in range(20)]
        for one in halfway:
            one.sendall(HALF)
        for one in halfway:
            said = rest_of(one)
            assert said.startswith(b"HTTP/1.1 408")
            assert b"did not arrive within 0.3 s" in said


def test_the_silent_are_hung_up_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a whole request, and after one."""
    with (
        service(tmp_path, Limits(seconds=0.2)) as (address, _, _),
        connected(address) as new,
        connected(address) as old,
    ):
        new.sendall(b"GET /health HTT")
        old.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\nGET /hea")
        assert old.recv(65_536).startswith(b"HTTP/1.1 200")
        monkeypatch.setattr("roadmap.search.service.server.KEEP_ALIVE", 0.2)
        assert rest_of(new) == b""
        assert b"HTTP" not in rest_of(old)  # the rest of the first answer, at most


def test_a_full_queue_says_so_and_lost_clients_leave_it(tmp_path: Path) -> None:
    entered, release = threading.Event(), threading.Event()
    with service(tmp_path, patient(queue=3, together=1)) as (address, client, encoder):
        plain, seen = encoder.embed, []

        def slow(pictures: Any) -> Any:
            entered.set()
            assert release.wait(PATIENCE)
            seen.append(len(pictures))
            return plain(pictures)

        encoder.embed = slow  # type: ignore[method-assign]
        lost = []
        for _ in range(3):
            request = httpx.Request("POST", f"{address}{SEARCH}/pictures", files={"pictures": encoded(halves())})
            head = f"POST {SEARCH}/pictures HTTP/1.1\r\nHost: x\r\n"
            head += "".join(f"{name}: {request.headers[name]}\r\n" for name in ("content-type", "content-length"))
            lost.append(connected(address))
            lost[-1].sendall(head.encode() + b"\r\n" + request.read())
        assert entered.wait(PATIENCE)
        wait_until(lambda: "roadmap_queries_waiting 3.0" in client.get("/metrics").text)
        refused = client.post(f"{SEARCH}/pictures", files={"pictures": encoded(halves())})
        assert refused.status_code == 503
        assert "3 queries are waiting, 3 may" in refused.json()["error"]
        assert refused.headers["retry-after"] == "1"
        assert client.get("/ready").status_code == 503
        assert client.get("/health").status_code == 200
        for one in lost:
            one.close()
        # they have left, though the model still holds the first
        wait_until(lambda: "roadmap_queries_waiting 0.0" in client.get("/metrics").text)
        release.set()
        assert client.post(f"{SEARCH}/pictures", files={"pictures": encoded(halves())}).status_code == 200
    assert sum(seen) == 2  # nobody embeds for those who left the queue


def test_an_answer_that_takes_too_long_is_not_waited_for(tmp_path: Path) -> None:
    for seconds in (0.4, 4.0, 40.0):
        release = threading.Event()
        with service(tmp_path / str(seconds), Limits(seconds=seconds)) as (_, client, encoder):
            plain, waits = encoder.embed, release.wait
            encoder.embed = lambda some: (waits(PATIENCE), plain(some))[1]  # type: ignore[method-assign] # noqa: B023
            said = client.post(f"{SEARCH}/pictures", files={"pictures": encoded(halves())})
            release.set()
        if said.status_code != 408:  # the picture itself arrived in time, which a busy machine needs more of
            break
    assert (said.status_code, "no answer within the time" in said.json()["error"]) == (504, True)
