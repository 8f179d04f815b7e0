"""What Prometheus reads."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    PlatformCollector,
    ProcessCollector,
    generate_latest,
)

if TYPE_CHECKING:
    from roadmap.search.service.core import Service

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
SIZES = (1, 2, 4, 8, 16, 32, 64, 128)


class Metrics:
    """Of one service; two in a process do not add up."""

    type = CONTENT_TYPE_LATEST

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        PlatformCollector(registry=self.registry)
        to = self.registry
        self._requests = Counter("roadmap_requests", "Requests by route and status.", ["route", "status"], registry=to)
        self._seconds = Histogram(
            "roadmap_request_seconds", "Time to answer, by route.", ["route"], buckets=SECONDS, registry=to
        )
        self._batches = Histogram("roadmap_batch_size", "Queries done together.", ["stage"], buckets=SIZES, registry=to)
        self._waiting = Gauge("roadmap_queries_waiting", "Queries being worked on or waiting.", registry=to)
        self._rows = Gauge("roadmap_index_rows", "Rows of an index.", ["index"], registry=to)

    def watch(self, service: Service) -> None:
        self._waiting.set_function(service.waiting)
        for name, one in service.served.items():
            self._rows.labels(name).set_function(one.index.__len__)

    def note_answer(self, route: str, status: int, seconds: float) -> None:
        self._requests.labels(route, str(status)).inc()
        self._seconds.labels(route).observe(seconds)

    def note_embedding(self, size: int) -> None:
        self._batches.labels("embed").observe(size)

    def note_search(self, size: int) -> None:
        self._batches.labels("search").observe(size)

    def text(self) -> bytes:
        return bytes(generate_latest(self.registry))
