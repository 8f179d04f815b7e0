"""What every request passes before anything is done for it: host, origin, key, rate, size, time."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import logging
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Collection, MutableMapping
from typing import Any
from urllib.parse import urlsplit

import anyio
from starlette.exceptions import HTTPException

from roadmap.search.service.limits import Limits, Refusal
from roadmap.search.service.metrics import Metrics

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    b"content-security-policy": POLICY.encode(),
    b"x-content-type-options": b"nosniff",
    b"x-frame-options": b"DENY",
    b"referrer-policy": b"no-referrer",
    b"cross-origin-resource-policy": b"same-origin",
    b"cross-origin-opener-policy": b"same-origin",
    b"permissions-policy": b"geolocation=(), microphone=()",
}
UNANSWERED = 499  # what is counted for a client that left before its answer began
CLIENTS = 10_000  # addresses whose rate is remembered


class Rates:
    """A bucket of queries for each client, which fills at the rate; clients long unseen are forgotten."""

    def __init__(self, rate: float, burst: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.rate, self.burst, self._clock = rate, burst, clock
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def take(self, client: str, count: int = 1) -> None:
        if not self.rate:
            return
        now = self._clock()
        left, then = self._buckets.pop(client, (float(self.burst), now))
        left = min(float(self.burst), left + (now - then) * self.rate)
        enough = left >= count
        self._buckets[client] = (left - count if enough else left), now
        while len(self._buckets) > CLIENTS:
            self._buckets.popitem(last=False)
        if not enough:
            wait = max(1, round((count - left) / self.rate + 0.5))
            allowed = f"{self.rate:g} queries a second on average, {self.burst} at once"
            raise Refusal(429, f"too many queries: {allowed}; try again in {wait} s", retry=wait)


class Gate:
    """ASGI middleware around the whole application.

    Args:
        key: that requests to the interface must bring; None for none.
        hosts: names that the service goes by; None for any. Others are refused, so that a page of another site cannot
            reach a service on loopback under a name of its own.
        open_paths: what is answered without a key.
    """

    def __init__(
        self,
        app: App,
        limits: Limits,
        metrics: Metrics,
        rates: Rates,
        key: str | None,
        hosts: Collection[str] | None,
        open_paths: Collection[str],
    ) -> None:
        self.app, self.limits, self.metrics, self.rates = app, limits, metrics, rates
        self._key = None if key is None else _digest(key)
        self._hosts = None if hosts is None else {host.lower() for host in hosts}
        self._open = frozenset(open_paths)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self.app(scope, receive, send)
            return
        began, status = time.perf_counter(), UNANSWERED

        async def noted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                present = {name for name, _ in message["headers"]}
                added = [(name, value) for name, value in HEADERS.items() if name not in present]
                message = {**message, "headers": [*message["headers"], *added]}
            with anyio.fail_after(self.limits.seconds):  # a client that does not take its answer is let go
                await send(message)

        try:
            self._check(scope)
        except Refusal as refusal:
            await refuse(refusal, noted)
        else:
            await self._answer(scope, receive, noted, lambda: status != UNANSWERED)
        finally:
            route = getattr(scope.get("route"), "path", "none")  # never the path itself: it is a stranger's
            self.metrics.note_answer(route, status, time.perf_counter() - began)

    async def _answer(self, scope: Scope, receive: Receive, send: Send, begun: Callable[[], bool]) -> None:
        try:
            await self.app(scope, self._bounded(scope, receive), send)
        except Exception:
            if begun():  # an answer that is broken off; the server closes the connection
                raise
            logging.getLogger(__name__).exception("a fault of the service")
            await refuse(Refusal(500, "a fault of the service; its log says more"), send)

    def _check(self, scope: Scope) -> None:
        headers = {name.lower(): value.decode("latin-1") for name, value in scope["headers"]}
        host = headers.get(b"host", "")
        if self._hosts is not None and _hostname(host) not in self._hosts:
            raise Refusal(421, f"this service does not go by the name {host[:80]!r}; start it with that host allowed")
        origin = headers.get(b"origin")
        if origin is not None and _netloc(origin) != host.lower():
            raise Refusal(403, "requests from pages of other sites are not allowed")
        if self._key is not None and scope["path"] not in self._open:
            bearer = headers.get(b"authorization", "").partition(" ")
            given = bearer[2] if bearer[0].lower() == "bearer" else headers.get(b"x-api-key", "")
            if not hmac.compare_digest(_digest(given), self._key):
                raise Refusal(401, "a valid key is needed: send the header Authorization: Bearer KEY")
        if scope["method"] in ("POST", "DELETE", "PUT", "PATCH"):
            self.rates.take(client_of(scope))
        length, most = headers.get(b"content-length", "0"), self._most(scope)
        if length.isdigit() and int(length) > most:
            raise _too_large(most)

    def _most(self, scope: Scope) -> int:
        """Bytes of its body. Files come in forms; anything else is parsed as a whole, into many times its size."""
        kinds = [value for name, value in scope["headers"] if name.lower() == b"content-type"]
        form = bool(kinds) and all(kind.lower().startswith(b"multipart/form-data") for kind in kinds)
        return self.limits.upload if form else min(self.limits.text, self.limits.upload)

    def _bounded(self, scope: Scope, receive: Receive) -> Receive:
        """The body as it comes, until it is too large or too slow."""
        size, whole, most = 0, False, self._most(scope)
        loop = asyncio.get_running_loop()
        scope["deadline"] = deadline = loop.time() + self.limits.seconds

        async def bounded() -> Message:
            nonlocal size, whole
            if whole:  # what comes after the body says that the client has left; that may take as long as it takes
                return await receive()
            try:
                with anyio.fail_after(max(0.0, deadline - loop.time())):
                    message = await receive()
            except TimeoutError as error:
                # of this class, because the framework hands it on from wherever the body is read
                raise HTTPException(408, f"the request did not arrive within {self.limits.seconds:g} s") from error
            size += len(message.get("body", b""))
            if size > most:
                raise HTTPException(413, _too_large(most).reason)
            whole = not message.get("more_body", False)
            return message

        return bounded


async def refuse(refusal: Refusal, send: Send) -> None:
    """An error as every other part of the service would give it."""
    body = json.dumps({"error": refusal.reason}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    headers += [(b"connection", b"close")]  # the rest of the request is not read
    if refusal.retry is not None:
        headers.append((b"retry-after", str(refusal.retry).encode()))
    if refusal.status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    await send({"type": "http.response.start", "status": refusal.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def _too_large(most: int) -> Refusal:
    return Refusal(413, f"the request is too large: at most {most:,} bytes are allowed")


def client_of(scope: Scope) -> str:
    return str(scope["client"][0]) if scope.get("client") else "unknown"


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def _hostname(host: str) -> str:
    try:
        return (urlsplit(f"//{host}").hostname or "").lower()
    except ValueError:  # a bracket that is not closed, say
        return ""


def _netloc(origin: str) -> str | None:
    try:
        return urlsplit(origin).netloc.lower()
    except ValueError:
        return None
