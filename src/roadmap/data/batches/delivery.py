"""Three ways in which crops reach the model from a pack: out of GPU memory, through pinned memory, and on the CPU.
A fourth, from files, is in `decoding`. All take orders and deliver them one after another, with the same crops.
What a frozen backbone made of pictures needs no crops: `Rows`.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from roadmap.data.batches.crops import CentreCrop, Crop, Windows
from roadmap.data.batches.resampling import cpu_crop, read_ranges, resized_crops, write_network_input
from roadmap.data.pictures.contents import CHANNELS
from roadmap.data.pictures.packs import Pack
from roadmap.data.pictures.vectors import VectorPack
from roadmap.data.records import Floats, Ints

A = TypeVar("A")
B = TypeVar("B")


@dataclass(frozen=True, eq=False)
class Order:
    """Which pictures, and for random crops the numbers that decide them, one row per picture."""

    position: int
    indices: Ints
    draws: Floats | None


@dataclass(frozen=True, eq=False)
class Delivery:
    """What comes of an order: (B, 3, S, S) images of `indices`, and the reasons why others are not among them."""

    order: Order
    images: Tensor
    indices: Ints
    skipped: dict[int, str]


Source = Callable[[Iterator[Order]], Iterator[Delivery]]


def windows_of(order: Order, crop: Crop, heights: Ints, widths: Ints) -> Windows:
    """The windows of an order into pictures of the given sizes."""
    if isinstance(crop, CentreCrop):
        return crop.windows(heights, widths)
    if order.draws is None:
        raise ValueError("random crops need their draws")
    return crop.windows(heights, widths, order.draws)


def readable_part(order: Order, pack: Pack | VectorPack) -> tuple[Order, dict[int, str]]:
    """The order without pictures that could not be decoded, and why not."""
    good = pack.usable(order.indices)
    if good.all():
        return order, {}
    bad = {int(i): pack.reason(int(i)) for i in order.indices[~good]}
    draws = None if order.draws is None else order.draws[good]
    return Order(order.position, order.indices[good], draws), bad


def bytes_seen(windows: Windows, widths: Ints, size: int) -> tuple[Ints, Ints]:
    """(B,) bytes of each picture above the rows that its crop sees, and bytes of those rows."""
    first, count = read_ranges(windows.rows, size)
    return (windows.rows[:, 0] + first) * widths * CHANNELS, count * widths * CHANNELS


def prefetch_rows(pack: Pack, indices: Ints, skip: Ints, sizes: Ints) -> None:
    """The disk is asked for all that crops need (`bytes_seen`), before the first of them is read."""
    for i, start, size in zip(indices.tolist(), skip.tolist(), sizes.tolist(), strict=True):
        pack.prefetch(i, start, size)


class Resident:
    """The whole pack in the memory of the device, decoded; a batch costs no copy but its boxes."""

    def __init__(self, pack: Pack, crop: Crop, device: torch.device, threads: int = 4) -> None:
        self.pack, self.crop, self.device = pack, crop, device
        sizes = pack.heights * pack.widths * CHANNELS
        self.starts = np.cumsum(sizes) - sizes
        self.pixels = torch.empty(int(sizes.sum()), dtype=torch.uint8, device=device)
        present = np.flatnonzero(sizes).tolist()
        with ThreadPoolExecutor(max(1, threads)) as pool:  # they wait for the disk, or decode
            read = ahead_of_use(pool, lambda i: np.array(pack.bytes_of(i)), iter(present), 4 * threads)
            for i, raw in zip(present, read, strict=True):
                self.pixels[self.starts[i] : self.starts[i] + sizes[i]].copy_(torch.from_numpy(raw))

    def __call__(self, orders: Iterator[Order]) -> Iterator[Delivery]:
        for asked in orders:
            order, skipped = readable_part(asked, self.pack)
            heights, widths = self.pack.heights[order.indices], self.pack.widths[order.indices]
            windows = windows_of(order, self.crop, heights, widths)
            images = resized_crops(self.pixels, self.starts[order.indices], widths, windows, self.crop)
            yield Delivery(asked, images, order.indices, skipped)


class Streamed:
    """The pack stays on disk; threads copy the rows that the crops need to pinned memory, ahead of use.

    While the model works on one batch, the next is on its way to the device on a stream of its own.
    """

    def __init__(self, pack: Pack, crop: Crop, device: torch.device, threads: int = 4, ahead: int = 4) -> None:
        self.pack, self.crop, self.device = pack, crop, device
        self.threads, self.ahead = max(1, threads), max(1, ahead)
        pack.expect_random_reads()

    def __call__(self, orders: Iterator[Order]) -> Iterator[Delivery]:
        stream = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None  # type: ignore[no-untyped-call]
        buffers: SimpleQueue[Buffer] = SimpleQueue()
        for _ in range(self.ahead + 2):
            buffers.put(Buffer(pinned=stream is not None))
        with ThreadPoolExecutor(self.threads) as pool:
            filled = ahead_of_use(pool, lambda r: self.fill(r, buffers.get()), orders, self.ahead)
            sent = (self._send(item, stream) for item in filled)
            for asked, order, skipped, windows, starts, buffer, pixels, ready in one_ahead(sent):
                if ready is not None:
                    torch.cuda.current_stream(self.device).wait_event(ready)
                    pixels.record_stream(torch.cuda.current_stream(self.device))
                widths = self.pack.widths[order.indices]
                images = resized_crops(pixels, starts, widths, windows, self.crop)
                buffer.busy_until = ready
                buffers.put(buffer)
                yield Delivery(asked, images, order.indices, skipped)

    def fill(self, asked: Order, buffer: Buffer) -> tuple[Any, ...]:
        """The rows that the crops of an order need, in the buffer, and what says where they are."""
        order, skipped = readable_part(asked, self.pack)
        widths = self.pack.widths[order.indices]
        windows = windows_of(order, self.crop, self.pack.heights[order.indices], widths)
        skip, sizes = bytes_seen(windows, widths, self.crop.size)
        ends = np.cumsum(sizes)
        target = buffer.of(int(ends[-1]) if len(ends) else 0)
        prefetch_rows(self.pack, order.indices, skip, sizes)
        for i, end, size, start in zip(order.indices, ends, sizes, skip, strict=True):
            target[end - size : end] = self.pack.bytes_of(int(i))[start : start + size]
        # where the picture would start if the rows above its crop were there too
        return asked, order, skipped, windows, ends - sizes - skip, buffer

    def _send(self, item: tuple[Any, ...], stream: torch.cuda.Stream | None) -> tuple[Any, ...]:
        buffer: Buffer = item[-1]
        if stream is None:
            return (*item, buffer.used().clone(), None)
        with torch.cuda.stream(stream):
            pixels = buffer.used().to(self.device, non_blocking=True)
            ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
            ready.record(stream)
        return (*item, pixels, ready)


class Buffer:
    """Host memory that is used again and again, once the device has taken what it held."""

    def __init__(self, pinned: bool) -> None:
        self.pinned, self.length = pinned, 0
        self.memory = torch.empty(0, dtype=torch.uint8)
        self.busy_until: torch.cuda.Event | None = None

    def of(self, length: int) -> NDArray[np.uint8]:
        if self.busy_until is not None:
            self.busy_until.synchronize()
        if length > len(self.memory):
            self.memory = torch.empty(length + length // 4, dtype=torch.uint8, pin_memory=self.pinned)
        self.length = length
        return self.memory.numpy()[:length]

    def used(self) -> Tensor:
        return self.memory[: self.length]


class Threaded:
    """The pack on the CPU: crops in threads, which share the memory map and cost no copies between processes."""

    def __init__(self, pack: Pack, crop: Crop, threads: int | None = None) -> None:
        self.pack, self.crop = pack, crop
        self.threads = threads or os.cpu_count() or 1
        pack.expect_random_reads()

    def __call__(self, orders: Iterator[Order]) -> Iterator[Delivery]:
        with ThreadPoolExecutor(self.threads) as pool:
            yield from ahead_of_use(pool, self._delivery, orders, self.threads + 2)

    def _delivery(self, asked: Order) -> Delivery:
        order, skipped = readable_part(asked, self.pack)
        indices = order.indices
        widths = self.pack.widths[indices]
        windows = windows_of(order, self.crop, self.pack.heights[indices], widths)
        prefetch_rows(self.pack, indices, *bytes_seen(windows, widths, self.crop.size))
        images = np.empty((len(indices), 3, self.crop.size, self.crop.size), dtype=np.float32)
        for place, index in enumerate(indices):
            levels = cpu_crop(self.pack.picture(int(index)), windows, place, self.crop.size)
            write_network_input(levels.numpy(), self.crop, images[place])
        return Delivery(asked, torch.from_numpy(images), indices, skipped)


class Rows:
    """What was kept of pictures instead of their pixels: (B, W) in the place of images."""

    def __init__(self, pack: VectorPack, device: torch.device) -> None:
        self.pack, self.device = pack, device

    def __call__(self, orders: Iterator[Order]) -> Iterator[Delivery]:
        for asked in orders:
            order, skipped = readable_part(asked, self.pack)
            rows = torch.from_numpy(self.pack.vectors[self.pack.rows[order.indices]])
            yield Delivery(asked, rows.to(self.device), order.indices, skipped)


def ahead_of_use(pool: ThreadPoolExecutor, work: Callable[[A], B], items: Iterator[A], ahead: int) -> Iterator[B]:
    """The work on every item, in order, with up to `ahead` items in progress or waiting."""
    waiting: deque[Future[B]] = deque()
    try:
        for item in items:
            waiting.append(pool.submit(work, item))
            if len(waiting) > ahead:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        for future in waiting:
            future.cancel()


def one_ahead(items: Iterator[A]) -> Iterator[A]:
    """The same items, each computed while the one before it is in use."""
    held: deque[A] = deque()
    for item in items:
        held.append(item)
        if len(held) == 2:
            yield held.popleft()
    yield from held
