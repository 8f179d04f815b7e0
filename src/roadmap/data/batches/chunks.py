"""A batch that is never whole in memory: its crops come in chunks, and are made again each time they are read."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import Tensor

from roadmap.data.batches.delivery import Order, Source
from roadmap.data.batches.resampling import on_device
from roadmap.data.records import Ints


class Chunks:
    """The crops of an order, some at a time, as often as they are asked for, and the same each time: which pictures and
    which windows is settled by the order, so nothing but numbers is kept between two readings.

    Args:
        source: delivers the crops of an order.
        order: the whole batch.
        chunk: pictures at a time, at most. Those that cannot be decoded leave their chunk smaller.
        note: told of pictures that are left out.
    """

    def __init__(self, source: Source, order: Order, chunk: int, note: Callable[[dict[int, str]], None]) -> None:
        self._source, self._order, self._chunk, self._note = source, order, chunk, note
        self._indices: Ints | None = None

    def __iter__(self) -> Iterator[Tensor]:
        seen = [np.zeros(0, dtype=np.int64)]
        for delivery in self._source(self._orders()):
            self._note(delivery.skipped)
            if len(delivery.indices):
                seen.append(delivery.indices)
                yield delivery.images
        self._indices = np.concatenate(seen)

    @property
    def indices(self) -> Ints:
        """Of the pictures that came, in the order in which they came. Known when they have been read once."""
        if self._indices is None:
            raise RuntimeError("which pictures of a batch can be decoded is known after its chunks have been read")
        return self._indices

    def any(self) -> bool:
        """Whether there is a picture at all. Reads until there is one."""
        return next(iter(self), None) is not None

    def _orders(self) -> Iterator[Order]:
        order = self._order
        for first in range(0, len(order.indices), self._chunk):
            rows = slice(first, first + self._chunk)
            yield Order(order.position, order.indices[rows], None if order.draws is None else order.draws[rows])


class ChunkedBatch:
    """As a `Batch`, but that `images` gives chunks; `labels` and `indices` are there once it has been read.

    Args:
        images: (C, 3, S, S) at a time.
        labels: of all pictures there are.
        device: where labels and indices are wanted.
    """

    def __init__(self, images: Chunks, labels: Ints, device: torch.device) -> None:
        self.images, self._labels, self._device = images, labels, device

    @property
    def labels(self) -> Tensor:
        return on_device(self._labels[self.images.indices], self._device)

    @property
    def indices(self) -> Tensor:
        return on_device(self.images.indices, self._device)
