"""Several processes that do one piece of work: who this one is, and what it tells the others.

Alone, everything here is free and does nothing. What may take long is waited for in small naps, so that a signal is
heard meanwhile: the wait of a collective itself would keep Python from it.
"""

from __future__ import annotations

import math
import pickle
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import Store

T = TypeVar("T")
BUCKET = 64 << 20  # bytes of gradients that are sent at once
NAP, LONGEST_NAP = 0.0005, 0.02  # seconds


@dataclass(eq=False)
class Ranks:
    """One of several processes.

    Attributes:
        rank: which one, from 0; 0 is the first, the one that writes and prints.
        world: how many there are.
        local_rank: which one of those on this machine.
        local_world: how many there are on this machine.
        store: where they leave notes for each other; None alone.
        on_host: they exchange what is on a GPU through the memory of the host.
    """

    rank: int = 0
    world: int = 1
    local_rank: int = 0
    local_world: int = 1
    store: Store | None = None
    on_host: bool = False

    def __post_init__(self) -> None:
        self._turns = 0

    @property
    def first(self) -> bool:
        return self.rank == 0

    @property
    def machine(self) -> int:
        return self.rank // self.local_world

    def share(self, count: int) -> range:
        """The part of `count` things in a row that is this process's: all parts together are all, in order."""
        return range(count * self.rank // self.world, count * (self.rank + 1) // self.world)

    def from_first(self, work: Callable[[], T]) -> T:
        """What `work` gives in the first process, in all of them; only the first does it."""
        if self.world == 1:
            return work()
        size, content = torch.zeros(1, dtype=torch.int64), torch.empty(0, dtype=torch.uint8)
        value: Any = None
        if self.first:
            value = work()
            content = _bytes(value)
            size[0] = len(content)
        _finish(dist.broadcast(size, 0, async_op=True))
        if not self.first:
            content = torch.empty(int(size), dtype=torch.uint8)
        _finish(dist.broadcast(content, 0, async_op=True))
        return value if self.first else _value(content)  # type: ignore[no-any-return]

    def from_all(self, value: T) -> list[T]:
        """What every process brings, in their order."""
        if self.world == 1:
            return [value]
        content = _bytes(value)
        sizes = self._parts_of_all(torch.tensor([len(content)]))
        padded = torch.zeros(max(map(int, sizes)), dtype=torch.uint8)
        padded[: len(content)] = content
        return [_value(part[: int(size)]) for part, size in zip(self._parts_of_all(padded), sizes, strict=True)]

    def rows_of_all(self, rows: Tensor) -> Tensor:
        """The rows of every process, one after another; each may bring another number of them."""
        if self.world == 1:
            return rows
        counts = self.from_all(len(rows))
        padded = rows.new_zeros(max(counts), *rows.shape[1:], device="cpu" if self.on_host else rows.device)
        padded[: len(rows)] = rows
        parts = zip(self._parts_of_all(padded), counts, strict=True)
        return torch.cat([part[:count] for part, count in parts]).to(rows.device)

    def _parts_of_all(self, tensor: Tensor) -> list[Tensor]:
        parts = [torch.empty_like(tensor) for _ in range(self.world)]
        _finish(dist.all_gather(parts, tensor, async_op=True))
        return parts

    def largest(self, number: int) -> Callable[[], int]:
        """The largest number that any process brings; it is on its way until it is asked for."""
        if self.world == 1:
            return lambda: number
        shared = torch.tensor([number])
        work = dist.all_reduce(shared, dist.ReduceOp.MAX, async_op=True)

        def answer() -> int:
            work.wait()
            return int(shared)

        return answer

    def average_gradients(self, parameters: Iterable[Tensor]) -> None:
        """Every gradient becomes its mean over the processes: the same bits on all of them.

        Always in the same order and in the same buckets, so that a run that is resumed adds up in the same order.
        """
        if self.world == 1:
            return
        sent = []
        for bucket in _buckets([p.grad for p in parameters if p.grad is not None]):
            flat = torch.cat([gradient.reshape(-1) for gradient in bucket])
            flat = flat.cpu() if self.on_host else flat
            sent.append((bucket, flat, dist.all_reduce(flat, async_op=True)))
        for bucket, flat, work in sent:
            work.wait()
            flat /= self.world
            pieces = flat.to(bucket[0].device).split([gradient.numel() for gradient in bucket])  # type: ignore[no-untyped-call]
            torch._foreach_copy_(bucket, [p.view_as(g) for p, g in zip(pieces, bucket, strict=True)])

    @contextmanager
    def turns(self) -> Iterator[None]:
        """The first process is inside alone, then one of each other machine, then the rest.

        For what is made once and then found: a pack of pictures, weights from the network. There is no limit of time;
        if the one that is waited for ends, so does this one (`roadmap.engine.launching`).
        """
        self._turns += 1
        number = self._turns
        if self.store is not None and not self.first:
            leads = self.local_rank == 0
            wait_for(self.store, f"turn {number} {0 if leads else self.machine}")
        yield
        if self.store is not None and self.local_rank == 0:
            self.store.set(f"turn {number} {self.machine}", "done")


ALONE = Ranks()


def wait_for(store: Store, key: str, limit: float = math.inf) -> None:
    """Waits for a note, so many seconds at most."""
    began = time.monotonic()
    while not store.check([key]) and time.monotonic() - began <= limit:
        time.sleep(LONGEST_NAP)


def _finish(work: Any) -> None:
    """Waits for a collective, open to signals."""
    nap = NAP
    while not work.is_completed():
        time.sleep(nap)
        nap = min(2 * nap, LONGEST_NAP)
    work.wait()


def _bytes(value: Any) -> Tensor:
    return torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)


def _value(content: Tensor) -> Any:
    return pickle.loads(content.numpy().tobytes())


def _buckets(gradients: list[Tensor]) -> Iterator[list[Tensor]]:
    """Some at a time, of one type each."""
    for dtype in dict.fromkeys(gradient.dtype for gradient in gradients):
        bucket: list[Tensor] = []
        for gradient in (g for g in gradients if g.dtype == dtype):
            if bucket and sum(g.nbytes for g in bucket) + gradient.nbytes > BUCKET:
                yield bucket
                bucket = []
            bucket.append(gradient)
        yield bucket
