"""Four ways in which crops reach the model: from a pack in GPU memory, from a pack through pinned memory, from a
pack on the CPU, and from files decoded on the fly. All take requests and answer in order, with the same crops.
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
from torch.utils.data import DataLoader, Dataset

from roadmap.data.batches.augment import CentreCrop, Crop, Windows, _read_ranges, cpu_crop, normalised, resized_crops
from roadmap.data.pictures.images import PictureError, picture
from roadmap.data.pictures.packs import CHANNELS, Pack
from roadmap.data.records import Floats, Ints, Records

A = TypeVar("A")
B = TypeVar("B")


@dataclass(frozen=True, eq=False)
class Request:
    """Which pictures, and for random crops the numbers that decide them, one row per picture."""

    position: int
    indices: Ints
    draws: Floats | None


@dataclass(frozen=True, eq=False)
class Delivery:
    """A request answered: (B, 3, S, S) images of `indices`, and the reasons why others are not among them."""

    request: Request
    images: Tensor
    indices: Ints
    skipped: dict[int, str]


Source = Callable[[Iterator[Request]], Iterator[Delivery]]


def windows_of(request: Request, crop: Crop, heights: Ints, widths: Ints) -> Windows:
    """The windows of a request into pictures of the given sizes."""
    if isinstance(crop, CentreCrop):
        return crop.windows(heights, widths)
    if request.draws is None:
        raise ValueError("random crops need their draws")
    return crop.windows(heights, widths, request.draws)


def _usable(request: Request, pack: Pack) -> tuple[Request, dict[int, str]]:
    good = pack.heights[request.indices] > 0
    if good.all():
        return request, {}
    bad = {int(i): pack.failures.get(pack.keys[i], "not decoded") for i in request.indices[~good]}
    draws = None if request.draws is None else request.draws[good]
    return Request(request.position, request.indices[good], draws), bad


class Resident:
    """The whole pack in the memory of the device; a batch costs no copy but its boxes."""

    def __init__(self, pack: Pack, crop: Crop, device: torch.device) -> None:
        self.pack, self.crop, self.device = pack, crop, device
        sizes = pack.heights * pack.widths * CHANNELS
        self.starts = np.cumsum(sizes) - sizes
        self.pixels = torch.empty(int(sizes.sum()), dtype=torch.uint8, device=device)
        for i in np.flatnonzero(sizes):
            raw = torch.from_numpy(np.array(pack.bytes_of(int(i))))
            self.pixels[self.starts[i] : self.starts[i] + sizes[i]].copy_(raw)

    def __call__(self, requests: Iterator[Request]) -> Iterator[Delivery]:
        for asked in requests:
            request, skipped = _usable(asked, self.pack)
            heights, widths = self.pack.heights[request.indices], self.pack.widths[request.indices]
            windows = windows_of(request, self.crop, heights, widths)
            images = resized_crops(self.pixels, self.starts[request.indices], widths, windows, self.crop)
            yield Delivery(asked, images, request.indices, skipped)


class Streamed:
    """The pack stays on disk; threads copy the rows that the crops need to pinned memory, ahead of use.

    While the model works on one batch, the next is on its way to the device on a stream of its own.
    """

    def __init__(self, pack: Pack, crop: Crop, device: torch.device, threads: int = 4, ahead: int = 4) -> None:
        self.pack, self.crop, self.device = pack, crop, device
        self.threads, self.ahead = max(1, threads), max(1, ahead)

    def __call__(self, requests: Iterator[Request]) -> Iterator[Delivery]:
        stream = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None  # type: ignore[no-untyped-call]
        buffers: SimpleQueue[_Buffer] = SimpleQueue()
        for _ in range(self.ahead + 2):
            buffers.put(_Buffer(pinned=stream is not None))
        with ThreadPoolExecutor(self.threads) as pool:
            filled = ahead_of_use(pool, lambda r: self._filled(r, buffers.get()), requests, self.ahead)
            sent = (self._sent(item, stream) for item in filled)
            for asked, request, skipped, windows, starts, buffer, pixels, ready in one_ahead(sent):
                if ready is not None:
                    torch.cuda.current_stream(self.device).wait_event(ready)
                    pixels.record_stream(torch.cuda.current_stream(self.device))
                widths = self.pack.widths[request.indices]
                images = resized_crops(pixels, starts, widths, windows, self.crop)
                buffer.busy_until = ready
                buffers.put(buffer)
                yield Delivery(asked, images, request.indices, skipped)

    def _filled(self, asked: Request, buffer: _Buffer) -> tuple[Any, ...]:
        request, skipped = _usable(asked, self.pack)
        widths = self.pack.widths[request.indices]
        windows = windows_of(request, self.crop, self.pack.heights[request.indices], widths)
        first, count = _read_ranges(windows.rows, self.crop.size)
        skip = (windows.rows[:, 0] + first) * widths * CHANNELS
        sizes = count * widths * CHANNELS
        ends = np.cumsum(sizes)
        target = buffer.of(int(ends[-1]) if len(ends) else 0)
        for i, end, size, start in zip(request.indices, ends, sizes, skip, strict=True):
            target[end - size : end] = self.pack.bytes_of(int(i))[start : start + size]
        # where the picture would start if the rows above its crop were there too
        return asked, request, skipped, windows, ends - sizes - skip, buffer

    def _sent(self, item: tuple[Any, ...], stream: torch.cuda.Stream | None) -> tuple[Any, ...]:
        buffer: _Buffer = item[-1]
        if stream is None:
            return (*item, buffer.used().clone(), None)
        with torch.cuda.stream(stream):
            pixels = buffer.used().to(self.device, non_blocking=True)
            ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
            ready.record(stream)
        return (*item, pixels, ready)


class _Buffer:
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
    """The pack on the CPU: torchvision in threads, which share the memory map and cost no copies between processes."""

    def __init__(self, pack: Pack, crop: Crop, threads: int | None = None, ahead: int = 2) -> None:
        self.pack, self.crop, self.ahead = pack, crop, ahead
        self.threads = threads or os.cpu_count() or 1
        mean, std = np.asarray(crop.mean), np.asarray(crop.std)
        self._scale = (1 / (255 * std)).astype(np.float32).reshape(3, 1, 1)
        self._shift = (-mean / std).astype(np.float32).reshape(3, 1, 1)

    def __call__(self, requests: Iterator[Request]) -> Iterator[Delivery]:
        with ThreadPoolExecutor(self.threads) as pool:
            yield from ahead_of_use(pool, self._delivered, requests, self.ahead + self.threads)

    def _delivered(self, asked: Request) -> Delivery:
        request, skipped = _usable(asked, self.pack)
        indices = request.indices
        windows = windows_of(request, self.crop, self.pack.heights[indices], self.pack.widths[indices])
        images = np.empty((len(indices), 3, self.crop.size, self.crop.size), dtype=np.float32)
        for place, index in enumerate(indices):
            levels = cpu_crop(self.pack.picture(int(index)), windows, place, self.crop.size).numpy()
            np.multiply(levels, self._scale, out=images[place])
            images[place] += self._shift
        return Delivery(asked, torch.from_numpy(images), indices, skipped)


class Decoded:
    """No pack: worker processes decode the files every time."""

    def __init__(self, records: Records, crop: Crop, device: torch.device, workers: int) -> None:
        self.records, self.crop, self.device, self.workers = records, crop, device, workers

    def __call__(self, requests: Iterator[Request]) -> Iterator[Delivery]:
        asked: deque[Request] = deque()

        def batches() -> Iterator[list[tuple[int, Floats | None]]]:
            for request in requests:
                asked.append(request)
                draws = [None] * len(request.indices) if request.draws is None else list(request.draws)
                yield list(zip(request.indices.tolist(), draws, strict=True))

        loader = DataLoader(
            _Files(self.records, self.crop),
            batch_sampler=batches(),
            num_workers=self.workers,
            collate_fn=_collated,
            pin_memory=self.device.type == "cuda",
        )
        for levels, kept, skipped in loader:
            images = normalised(levels.to(self.device, non_blocking=True), self.crop)
            yield Delivery(asked.popleft(), images, kept.numpy(), skipped)


class _Files(Dataset[Any]):
    def __init__(self, records: Records, crop: Crop) -> None:
        self.records, self.crop = records, crop

    def __getitem__(self, item: tuple[int, Floats | None]) -> tuple[int, Tensor | str]:
        index, draws = item
        try:
            image = picture(self.records.path(index), self.records.box(index))
        except PictureError as error:
            return index, error.reason  # whether that ends everything is decided where the batch arrives
        one = Request(0, np.asarray([index]), None if draws is None else draws[None])
        windows = windows_of(one, self.crop, np.asarray([image.shape[0]]), np.asarray([image.shape[1]]))
        return index, cpu_crop(image, windows, 0, self.crop.size).contiguous()


def _collated(items: list[tuple[int, Tensor | str]]) -> tuple[Tensor, Tensor, dict[int, str]]:
    good = [(index, levels) for index, levels in items if isinstance(levels, Tensor)]
    skipped = {index: reason for index, reason in items if isinstance(reason, str)}
    levels = torch.stack([levels for _, levels in good]) if good else torch.empty(0, 3, 1, 1, dtype=torch.uint8)
    return levels, torch.tensor([index for index, _ in good], dtype=torch.int64), skipped


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
