"""What a service allows, and what it answers where somebody asks for more."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields

from roadmap.config.settings import SettingError
from roadmap.search.vectors import DamagedError

MEBIBYTE = 1 << 20
LOOPBACK = ("127.0.0.1", "localhost", "::1")


class Refusal(Exception):  # noqa: N818 - it is an answer, not a fault
    """A request that is not done, with the HTTP status and a sentence that says why."""

    def __init__(self, status: int, reason: str, retry: int | None = None) -> None:
        super().__init__(reason)
        self.status, self.reason, self.retry = status, reason, retry


@dataclass(frozen=True)
class Limits:
    """Each is enforced before the work that it limits is done.

    Attributes:
        upload: bytes of the body of a request; more is not read.
        text: the same of one that is no form of files, such as JSON, which takes many times its size once it is parsed.
        pixels: of one picture; known from its header, before it is decoded.
        rate: queries a second of one client address, on average; 0 for no limit.
        burst: queries that a client may send at once before the rate counts.
        seconds: for a request to arrive, for its answer to be found, and for the answer to be taken.
        queue: queries that are being worked on or wait; more are told to come back.
        batch: queries in one request, and rows that are added or removed by one.
        results: most results for one query.
        depth: how far down pages of results go.
        connections: of clients, open at once.
        together: pictures that go through the model at once.
        side: longest side of a picture that is shown.
    """

    upload: int = 20 * MEBIBYTE
    text: int = 4 * MEBIBYTE
    pixels: int = 50_000_000
    rate: float = 100.0
    burst: int = 200
    seconds: float = 30.0
    queue: int = 256
    batch: int = 64
    results: int = 200
    depth: int = 10_000
    connections: int = 500
    together: int = 16
    side: int = 1024

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            least = {"rate": 0, "seconds": 0.1}.get(field.name, 1)
            if not value >= least:  # not a number is refused too
                raise SettingError(field.name, f"{field.name}={value} must be at least {least}")


@contextmanager
def faults_of_the_request() -> Iterator[None]:
    """What the index says of a query that cannot be, as an answer to whoever sent it."""
    try:
        yield
    except KeyError as error:
        raise Refusal(404, str(error.args[0]) if error.args else "not in the index") from error
    except DamagedError:
        raise
    except (ValueError, TypeError) as error:
        raise Refusal(422, str(error)) from error


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
