"""The work behind the routes: pictures -> vectors -> answers, for many clients at once."""

from __future__ import annotations

import asyncio
import io
import json
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from PIL import Image

from roadmap.data.pictures.images import Box
from roadmap.search.index import Index
from roadmap.search.metadata import Described
from roadmap.search.results import Results
from roadmap.search.service.batching import Batches, Places
from roadmap.search.service.limits import Limits, Refusal, cores, faults_of_the_request
from roadmap.search.service.metrics import Metrics
from roadmap.search.service.pictures import query_picture, shown_picture, stamped_file
from roadmap.search.vectors import Floats

KEPT_PICTURES = 64 << 20  # bytes of shown pictures that are kept in memory
FRESH = 1.0  # seconds between looks at what other processes wrote
Value = TypeVar("Value")
Shown = tuple[bytes, tuple[int, int]]  # a JPEG, and the width and height of the original


class Embedder(Protocol):
    """What `roadmap.encoder.Encoder` is to a service: pictures -> vectors that say where they come from."""

    def embed(self, pictures: Sequence[Image.Image], /) -> Described: ...

    def description(self) -> Mapping[str, Any]: ...


@dataclass(eq=False)
class Served:
    """An index that is served.

    Attributes:
        encoder: of its model; None: it is searched by rows, vectors and metadata alone.
        root: the folder its pictures lie in; None: they are not shown.
    """

    name: str
    index: Index
    encoder: Embedder | None = None
    root: Path | None = None
    looked: float = field(default=0.0, repr=False)
    labels: tuple[Any, list[str]] = field(default=(None, []), repr=False)


@dataclass(frozen=True)
class _Question:
    served: Served
    vector: Floats
    k: int
    offset: int
    where: str  # JSON, so that equal filters are found equal


class Service:
    """Indexes and their encoders, with a queue before each kind of work. Its methods belong to one event loop."""

    def __init__(self, served: Sequence[Served], limits: Limits, metrics: Metrics) -> None:
        self.served = {one.name: one for one in served}
        self.limits, self.metrics = limits, metrics
        self.places, self.shows = Places(limits.queue), Places(limits.queue)
        self._embedding: Batches[tuple[Embedder, Image.Image], tuple[Floats, float]]
        self._searching: Batches[_Question, tuple[Results, float]]
        self._embedding = Batches("embedding", self._embed, limits.together, metrics.note_embedding)
        self._searching = Batches("searching", self._search, 4 * limits.together, metrics.note_search)
        self._decoding = ThreadPoolExecutor(cores(), "decoding")
        self._showing = ThreadPoolExecutor(cores(), "showing")
        self._shown: OrderedDict[tuple[Any, ...], Shown] = OrderedDict()
        metrics.watch(self)

    def named(self, name: str) -> Served:
        if name not in self.served:
            raise Refusal(404, f"there is no index {name[:80]!r}; there is {', '.join(self.served)}")
        return self.served[name]

    async def pictures(
        self, served: Served, contents: Sequence[tuple[bytes | Path, Box | None]], wait: Wait
    ) -> tuple[Floats, float, float]:
        """The vectors (Q, D) of pictures, and the milliseconds that decoding and embedding took."""
        encoder = served.encoder
        if encoder is None:
            raise Refusal(409, f"{served.name} is served without its model; search by id, vector or metadata")
        began = time.perf_counter()
        side: int | None = getattr(encoder, "side", None)
        decoded = [self._decoding.submit(query_picture, content, box, side, self.limits) for content, box in contents]
        images = await wait.all(decoded)
        between = time.perf_counter()
        found = await wait.all([self._embedding.submit((encoder, image)) for image in images])
        vectors = np.stack([vector for vector, _ in found])
        return vectors, 1e3 * (between - began), max(took for _, took in found)

    async def answers(
        self, served: Served, vectors: Floats, k: int, offset: int, where: Mapping[str, Any], wait: Wait
    ) -> tuple[list[tuple[list[dict[str, Any]], list[float]]], float]:
        """For each query the metadata and scores of its results, and the milliseconds that searching took."""
        with faults_of_the_request():
            served.index.selection(where)  # a wrong filter is the fault of this query alone
        text = json.dumps(where, sort_keys=True)
        jobs = [_Question(served, vector, k, offset, text) for vector in vectors]
        found = await wait.all([self._searching.submit(job) for job in jobs])
        return [(part.metadata[0], part.scores[0]) for part, _ in found], max(took for _, took in found)

    async def picture(self, served: Served, id: str, side: int, wait: Wait) -> Shown:
        """What is shown of a row, and the size of the original: from memory where it was shown lately."""
        path, box, stamp = await wait.all_of_one(self._showing.submit(stamped_file, served.index, id, served.root))
        key = (path, box, side, stamp)
        if key in self._shown:
            self._shown.move_to_end(key)
            return self._shown[key]
        with self.shows.take(1):
            found = await wait.all_of_one(self._showing.submit(shown_picture, path, box, side, self.limits))
        self._shown[key] = found
        while sum(len(content) for content, _ in self._shown.values()) > KEPT_PICTURES:
            self._shown.popitem(last=False)
        return found

    def warm(self) -> None:
        """Do everything once, so that nobody waits for what is loaded when it is first used."""
        grey, file = Image.new("RGB", (64, 64), "grey"), io.BytesIO()
        grey.save(file, "PNG")
        for one in self.served.values():
            if one.encoder is not None:
                self._embed([(one.encoder, query_picture(file.getvalue(), None, None, self.limits))])
            one.index.search(np.ones(one.index.manifest.dim, np.float32), 1)

    def waiting(self) -> int:
        return self.places.taken

    def close(self) -> None:
        """Finish what was begun, then let threads and indexes go."""
        for pool in (self._decoding, self._showing):
            pool.shutdown()
        self._embedding.close()
        self._searching.close()
        for one in self.served.values():
            one.index.close()

    def _embed(self, jobs: Sequence[tuple[Embedder, Image.Image]]) -> list[tuple[Floats, float]]:
        found: list[tuple[Floats, float]] = [(np.empty(0, np.float32), 0.0)] * len(jobs)
        for encoder in {id(encoder): encoder for encoder, _ in jobs}.values():
            places = [i for i, (one, _) in enumerate(jobs) if one is encoder]
            began = time.perf_counter()
            vectors = encoder.embed([jobs[i][1] for i in places]).vectors.detach().to("cpu", torch.float32).numpy()
            took = 1e3 * (time.perf_counter() - began)
            for i, vector in zip(places, vectors, strict=True):
                found[i] = vector, took
        return found

    def _search(self, jobs: Sequence[_Question]) -> list[tuple[Results, float]]:
        groups: dict[tuple[int, int, int, str], list[int]] = {}
        for i, job in enumerate(jobs):
            groups.setdefault((id(job.served), job.k, job.offset, job.where), []).append(i)
        found: dict[int, tuple[Results, float]] = {}
        for places in groups.values():
            first, began = jobs[places[0]], time.perf_counter()
            take_up_changes(first.served)
            vectors = np.stack([jobs[i].vector for i in places])
            every = first.served.index.search(vectors, first.k, json.loads(first.where), first.offset)
            took = 1e3 * (time.perf_counter() - began)
            for row, i in enumerate(places):
                one = Results(every.ids[row : row + 1], every.scores[row : row + 1], every.metadata[row : row + 1])
                found[i] = one, took
        return [found[i] for i in range(len(jobs))]


def take_up_changes(served: Served) -> None:
    """What other processes wrote is found a second later."""
    if time.monotonic() - served.looked > FRESH:
        served.looked = time.monotonic()
        served.index.refresh()


def labels_of(served: Served) -> list[str]:
    """The distinct labels of its rows; counted again when rows have changed."""
    rows = served.index.storage.rows
    state = rows.last_commit()
    if served.labels[0] != state:
        gone = set(rows.removed_since(0).tolist())
        every = enumerate(rows.column("label", 0, rows.slot_count()))
        served.labels = state, sorted({label for slot, label in every if label is not None and slot not in gone})
    return served.labels[1]


@dataclass
class Wait:
    """How long one client's work is waited for: until the time is over, or the client has left.

    Attributes:
        deadline: of the event loop's clock.
        receive: gives the messages of the client; after its request, the last says that it has left.
    """

    deadline: float
    receive: Callable[[], Awaitable[Mapping[str, Any]]]

    async def all(self, futures: Sequence[Future[Value]]) -> list[Value]:
        """Their results. Where they are not wanted any more, those that have not begun are taken out of the queue."""
        answer = asyncio.gather(*map(asyncio.wrap_future, futures))
        answer.add_done_callback(lambda done: done.cancelled() or done.exception())  # it may not be asked for
        left = asyncio.ensure_future(self._departure())
        rest = max(0.0, self.deadline - asyncio.get_running_loop().time())
        try:
            both: set[asyncio.Future[Any]] = {answer, left}
            await asyncio.wait(both, timeout=rest, return_when=asyncio.FIRST_COMPLETED)
            if answer.done():
                return list(answer.result())
            if left.done():
                raise Refusal(499, "the client left")
            raise Refusal(504, "no answer within the time that the service allows; try again, or with less at once")
        finally:
            left.cancel()
            for future in futures:
                future.cancel()
            if not answer.done():
                answer.cancel()

    async def _departure(self) -> None:
        while (await self.receive())["type"] != "http.disconnect":
            pass

    async def all_of_one(self, future: Future[Value]) -> Value:
        return (await self.all([future]))[0]
