"""Queries of many clients, worked on together: a queue with a thread of its own.

While a batch is being worked on the next one gathers, so a busy service works in large batches and an idle one answers
at once; nobody waits for a batch to fill.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Generic, TypeVar

from roadmap.search.service.limits import Refusal

Job = TypeVar("Job")
Result = TypeVar("Result")


class Batches(Generic[Job, Result]):
    """A thread that does jobs together.

    Args:
        name: of the thread.
        work: jobs -> their results, in order. What it raises is the answer to every job of that batch.
        size: most jobs at once.
        observe: told the size of every batch.
    """

    def __init__(
        self,
        name: str,
        work: Callable[[Sequence[Job]], Sequence[Result]],
        size: int,
        observe: Callable[[int], None] = lambda _: None,
    ) -> None:
        self._work, self._size, self._observe = work, size, observe
        self._waiting: deque[tuple[Job, Future[Result]]] = deque()
        self._change = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def __len__(self) -> int:
        """Jobs that wait."""
        return len(self._waiting)

    def submit(self, job: Job) -> Future[Result]:
        """Its result, later. A future that is cancelled before its turn costs nothing."""
        future: Future[Result] = Future()
        with self._change:
            if self._closed:
                raise Refusal(503, "the service is stopping", retry=5)
            self._waiting.append((job, future))
            self._change.notify()
        return future

    def close(self) -> None:
        """Finish what waits, then stop."""
        with self._change:
            self._closed = True
            self._change.notify()
        self._thread.join()

    def _next(self) -> list[tuple[Job, Future[Result]]]:
        """Up to `size` jobs that are still wanted; none when everything is done and the queue is closed."""
        with self._change:
            while True:
                while not self._waiting and not self._closed:
                    self._change.wait()
                taken: list[tuple[Job, Future[Result]]] = []
                while self._waiting and len(taken) < self._size:
                    job, future = self._waiting.popleft()
                    if future.set_running_or_notify_cancel():
                        taken.append((job, future))
                if taken or self._closed:
                    return taken

    def _run(self) -> None:
        while batch := self._next():
            self._observe(len(batch))
            try:
                results = self._work([job for job, _ in batch])
            except BaseException as error:  # whoever waits must be told, whatever it was
                for _, future in batch:
                    future.set_exception(error)
            else:
                for (_, future), result in zip(batch, results, strict=True):
                    future.set_result(result)


class Places:
    """Room for so many queries at once; whoever comes when it is full is told to come back."""

    def __init__(self, room: int) -> None:
        self.room, self.taken = room, 0

    @contextmanager
    def take(self, count: int) -> Iterator[None]:
        """From the event loop only: its functions take turns, so nothing is locked."""
        if self.taken + count > self.room:
            said = f"the service is busy: {self.taken} queries are waiting, {self.room} may; try again in a second"
            raise Refusal(503, said, retry=1)
        self.taken += count
        try:
            yield
        finally:
            self.taken -= count
