"""Crops from files that are decoded every time, the same to the bit as from the pack that the files would give; and
from compressed packs, whose pictures are files too.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from roadmap.data.batches.crops import Crop, Windows
from roadmap.data.batches.delivery import Delivery, Order, bytes_seen, windows_of
from roadmap.data.batches.resampling import cpu_crop, resized_crops, write_network_input
from roadmap.data.pictures.images import PictureError, Pixels, small_picture
from roadmap.data.pictures.packs import Pack
from roadmap.data.pictures.processes import keep_memory, leave_signals_to_parent
from roadmap.data.records import Floats, Records

_Item = tuple[int, Floats | None]
DEATH_IS_KNOWN = 5.0  # seconds at most; the signal ends them


class Decoded:
    """No pack, or a compressed one: worker processes decode every time, and resize files as packing would.

    Args:
        records: the pictures.
        crop: what is cut out of them.
        device: where they are delivered.
        workers: processes; 0 for none but this one.
        side: of the pack that they might have had.
        on_device: the device resamples the crops, as it does from a pack; None: where it is not the CPU.
        pack: a compressed one that the pictures are read from, instead of their files.
    """

    def __init__(
        self,
        records: Records,
        crop: Crop,
        device: torch.device,
        workers: int,
        side: int,
        on_device: bool | None = None,
        pack: Pack | None = None,
    ) -> None:
        self.pack = pack
        self.records, self.crop, self.device, self.workers, self.side = records, crop, device, workers, side
        self.on_device = device.type != "cpu" if on_device is None else on_device

    def __call__(self, orders: Iterator[Order]) -> Iterator[Delivery]:
        asked: deque[Order] = deque()

        def batches() -> Iterator[list[_Item]]:
            for order in orders:
                asked.append(order)
                draws = [None] * len(order.indices) if order.draws is None else list(order.draws)
                yield list(zip(order.indices.tolist(), draws, strict=True))

        loader = DataLoader(
            _Files(self.records, self.crop, self.side, self.on_device, self.pack),
            batch_sampler=batches(),
            num_workers=self.workers,
            collate_fn=_collation,
            pin_memory=self.device.type == "cuda",
            worker_init_fn=_begin_work,
            generator=torch.Generator(),  # else every iterator moves the random numbers that a model draws from
        )
        for parts, pixels, skipped in loader_batches(loader):
            indices = np.asarray([part.index for part in parts], dtype=np.int64)
            yield Delivery(asked.popleft(), self._images(parts, pixels), indices, skipped)

    def _images(self, parts: list[_Part], pixels: Tensor) -> Tensor:
        count, size = len(parts), self.crop.size
        if not count:
            return torch.empty(0, 3, size, size, device=self.device)
        if not self.on_device:
            images = np.empty((count, 3, size, size), dtype=np.float32)
            write_network_input(pixels.view(count, 3, size, size).numpy(), self.crop, images)
            return torch.from_numpy(images).to(self.device)
        windows = Windows(
            np.concatenate([part.windows.rows for part in parts]),
            np.concatenate([part.windows.columns for part in parts]),
            np.concatenate([part.windows.flip for part in parts]),
        )
        skip, sizes = (np.asarray(numbers, np.int64) for numbers in zip(*(part.seen for part in parts), strict=True))
        starts = np.cumsum(sizes) - sizes - skip  # where the picture would start if the rows above were there too
        widths = np.asarray([part.width for part in parts], dtype=np.int64)
        return resized_crops(pixels.to(self.device, non_blocking=True), starts, widths, windows, self.crop)


def loader_batches(loader: Iterable[Any]) -> Iterator[Any]:
    """What the loader gives, and torch's own error where a process of it dies.

    One that is killed while it hands a batch over breaks the connection first. That it is dead is known a moment later,
    by a signal whose handler raises wherever the program then is: so that is waited for here.
    """
    batches = iter(loader)
    while True:
        try:
            batch = next(batches)
        except StopIteration:
            return
        except (ConnectionError, EOFError, FileNotFoundError):  # of the socket; pictures raise PictureError
            time.sleep(DEATH_IS_KNOWN)
            raise
        yield batch


def _begin_work(worker: int) -> None:
    leave_signals_to_parent()
    keep_memory()


@dataclass(frozen=True, eq=False)
class _Part:
    """One picture of a batch, without its pixels."""

    index: int
    windows: Windows
    width: int
    seen: tuple[int, int]  # bytes above the rows that were kept, and bytes of those


class _Files(Dataset[Any]):
    def __init__(self, records: Records, crop: Crop, side: int, whole_rows: bool, pack: Pack | None) -> None:
        self.records, self.crop, self.side, self.whole_rows, self.pack = records, crop, side, whole_rows, pack

    def __getitem__(self, item: _Item) -> tuple[_Part, Tensor] | tuple[int, str]:
        """A picture's crop, or the rows of it that the crop sees; or why there is none."""
        index, draws = item
        try:
            image = self._picture(index)
        except PictureError as error:
            return index, error.reason  # whether that ends everything is decided where the batch arrives
        one = Order(0, np.asarray([index]), None if draws is None else draws[None])
        height, width = (np.asarray([length], dtype=np.int64) for length in image.shape[:2])
        windows = windows_of(one, self.crop, height, width)
        skip, size = (int(numbers[0]) for numbers in bytes_seen(windows, width, self.crop.size))
        part = _Part(index, windows, image.shape[1], (skip, size))
        if self.whole_rows:
            return part, torch.from_numpy(image.reshape(-1)[skip : skip + size].copy())
        return part, cpu_crop(image, windows, 0, self.crop.size).flatten()

    def _picture(self, index: int) -> Pixels:
        path = self.records.path(index)
        if self.pack is None:
            return np.asarray(small_picture(path, self.records.box(index), self.side))
        if not self.pack.usable(np.asarray([index])).all():
            raise PictureError(path, self.pack.reason(index))
        return self.pack.picture(index)


def _collation(items: list[tuple[_Part, Tensor] | tuple[int, str]]) -> tuple[list[_Part], Tensor, dict[int, str]]:
    """The pictures of a batch, their pixels one after another, and the reasons why others are not among them."""
    parts = [part for part, _ in items if isinstance(part, _Part)]
    pixels = [pixels for _, pixels in items if isinstance(pixels, Tensor)]
    skipped = {index: reason for index, reason in items if isinstance(index, int) and isinstance(reason, str)}
    return parts, torch.cat(pixels) if pixels else torch.empty(0, dtype=torch.uint8), skipped
