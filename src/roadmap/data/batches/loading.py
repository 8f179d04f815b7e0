"""Batches for training and evaluation, from the fastest place the pictures are in."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from roadmap.data.batches.chunks import ChunkedBatch, Chunks
from roadmap.data.batches.crops import CentreCrop, Crop, RandomCrop
from roadmap.data.batches.decoding import Decoded
from roadmap.data.batches.delivery import Delivery, Order, Resident, Rows, Source, Streamed, Threaded
from roadmap.data.batches.resampling import on_device
from roadmap.data.batches.samplers import CategoryPairs, MPerClass
from roadmap.data.pictures.images import PictureError
from roadmap.data.pictures.packs import Pack, picture_key
from roadmap.data.pictures.policy import SIDE, needed_side
from roadmap.data.pictures.shards import OnError
from roadmap.data.pictures.vectors import VectorPack
from roadmap.data.records import Records
from roadmap.ranks import ALONE, Ranks

RESIDENT_SHARE = 0.4  # of free device memory that a pack may take; the rest is for the model
Place = Literal["auto", "resident", "streamed"]


class Batch(NamedTuple):
    """Images (B, 3, S, S) float32 normalised, labels (B,) int64, indices (B,) into the Records; on the device.

    From a `VectorPack` come (B, W) vectors in the place of images.
    """

    images: Tensor
    labels: Tensor
    indices: Tensor


class Batches:
    """An iterable of `Batch`; every `iter` starts where its sampler stands. No batch is empty.

    Args:
        records: the pictures.
        source: delivers the crops of an order.
        orders: what is ordered in an `iter`.
        length: the number of orders of a whole epoch.
        skip: leave pictures out that cannot be decoded, instead of raising the first.
        sampler: follows what is handed out.
        substitutes: what else to order instead of a batch of which nothing could be decoded; without, it is left out.
        known: index -> reason, of pictures that are known not to decode before they are met.
        chunk: pictures that are delivered at a time; None for whole batches.
        device: where labels of chunked batches are wanted.

    Attributes:
        skipped: picture_key -> reason, of pictures left out because they could not be decoded, each once: those that
            were met, and with a pack all of these records.
    """

    def __init__(
        self,
        records: Records,
        source: Source,
        orders: Callable[[], Iterator[Order]],
        length: int,
        skip: bool,
        sampler: MPerClass | CategoryPairs | None = None,
        substitutes: Callable[[Order], Iterator[Order]] | None = None,
        known: dict[int, str] | None = None,
        chunk: int | None = None,
        device: torch.device | None = None,
    ) -> None:
        self.records, self.skipped = records, dict[str, str]()
        self._source, self._orders, self._length, self._skip = source, orders, length, skip
        self._sampler, self._substitutes, self._known = sampler, substitutes, known or {}
        self._chunk, self._device = chunk, device or torch.device("cpu")

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Batch]:
        if self._skip:
            self._note(self._known)
        if self._chunk is not None:
            yield from self._in_chunks(self._chunk)  # type: ignore[misc]  # they have the same attributes
            return
        empty = 0
        for delivery in self._source(self._orders()):
            self._note(delivery.skipped)
            found: Delivery | None = delivery
            if not len(delivery.indices):
                found = self._substitute(delivery.order)
            if self._sampler is not None:  # only what was handed out counts, not what is being prepared
                self._sampler.seek(delivery.order.position + 1)
            if found is None:
                empty += 1
                continue
            labels, indices = (
                on_device(values, found.images.device) for values in (self.records.labels[found.indices], found.indices)
            )
            yield Batch(found.images, labels, indices)
        if empty and empty == self._length:
            raise self._unreadable()

    def _in_chunks(self, chunk: int) -> Iterator[ChunkedBatch]:
        for order in self._orders():
            others = self._substitutes(order) if self._skip and self._substitutes is not None else iter(())
            tried = (Chunks(self._source, one, chunk, self._note) for one in chain([order], others))
            # what could be left out whole is looked into before it is handed out
            found = next((chunks for chunks in tried if not self._skip or chunks.any()), None)
            if found is None:
                raise self._unreadable()
            if self._sampler is not None:
                self._sampler.seek(order.position + 1)
            yield ChunkedBatch(found, self.records.labels, self._device)

    def _note(self, skipped: dict[int, str]) -> None:
        for index, reason in skipped.items():
            if not self._skip:
                raise PictureError(self.records.path(index), reason)
            self.skipped[picture_key(self.records, index)] = reason

    def _substitute(self, order: Order) -> Delivery | None:
        """Another delivery in place of one that is empty; None where there is nothing to put there."""
        if self._substitutes is None:
            return None
        for other in self._substitutes(order):
            for delivery in self._source(iter([other])):
                self._note(delivery.skipped)
                if len(delivery.indices):
                    return delivery
        raise self._unreadable()

    def _unreadable(self) -> ValueError:
        first = picture_key(self.records, 0)
        return ValueError(
            f"none of the {len(self.records):,} pictures of {self.records.name} could be decoded; the first is "
            f"{self.records.root / first}: {self.skipped[first]}"
        )


def training_batches(
    records: Records,
    sampler: MPerClass | CategoryPairs,
    crop: RandomCrop | None = None,
    pictures: Pack | VectorPack | None = None,
    device: str | torch.device = "cpu",
    seed: int = 0,
    workers: int | None = None,
    on_error: OnError = "raise",
    place: Place = "auto",
    side: int | None = None,
    chunk: int | None = None,
) -> Batches:
    """The batches of the sampler's epochs, randomly cropped. Crops are a pure function of (seed, position).

    Args:
        records: the training pictures, in the order the sampler knows them.
        sampler: says which pictures meet; its `position` follows the batches handed out.
        crop: None for the paper's 224-pixel crops.
        pictures: their pack, aligned (`pack_for(...)`, `pack.of(records)`); None decodes the files every time. A
            `VectorPack` delivers its vectors, uncropped, in the place of images.
        device: where batches are delivered.
        workers: threads or processes on the host; None for one per core.
        on_error: "raise" for a picture that cannot be decoded, or "skip" and count it in `Batches.skipped`. In place of
            a batch of which nothing could be decoded comes the next of the epoch that has something.
        place: where the pack is read from on a GPU: its own memory ("resident"), pinned host memory ("streamed"; a
            compressed pack is decoded on the host), or whichever fits.
        side: shorter side of the pack that these pictures have, or would have: files are resized to it first, so that
            the pixels are those of a pack. None: 256, or as large as the crop needs.
        chunk: deliver `ChunkedBatch`es, whose crops come so many at a time and are made as often as they are read, so
            that a batch is never whole in memory. The crops are those of whole batches, to the bit.
    """
    crop = crop or RandomCrop()
    plan = _Plan(sampler, crop, seed, len(records))
    source = _source(records, crop, pictures, torch.device(device), workers, on_error, place, side)
    return Batches(
        records,
        source,
        plan.orders,
        len(sampler),
        on_error == "skip",
        sampler,
        plan.substitutes,
        _known_failures(pictures),
        chunk,
        torch.device(device),
    )


@dataclass(frozen=True, eq=False)
class _Plan:
    """What training orders: the batches of a sampler, with the draws of their crops."""

    sampler: MPerClass | CategoryPairs
    crop: RandomCrop
    seed: int
    pictures: int

    def orders(self) -> Iterator[Order]:
        """From where the sampler stands to the end of its epoch."""
        first, length = self.sampler.position, self.sampler.batches
        yield from (self._order(step, step) for step in range(first, (first // length + 1) * length))

    def substitutes(self, empty: Order) -> Iterator[Order]:
        """The other batches of its epoch, the next first; then, whoever meets, every picture."""
        length = self.sampler.batches
        start = empty.position - empty.position % length
        for ahead in range(1, length):
            yield self._order(empty.position, start + (empty.position + ahead) % length)
        for first in range(0, self.pictures, len(empty.indices)):
            rest = np.arange(first, min(first + len(empty.indices), self.pictures))
            yield Order(empty.position, rest, self.crop.draws(len(rest), self.seed, empty.position))

    def _order(self, position: int, taken: int) -> Order:
        """At `position`, the batch that stands at `taken`."""
        epoch, number = divmod(taken, self.sampler.batches)
        batch = self.sampler.epoch_batches(epoch)[number]
        # drawn for the global batch, so that a crop does not depend on how many ranks share it
        draws = self.crop.draws(len(batch), self.seed, position)
        return Order(position, self.sampler.share(batch), self.sampler.share(draws))


def evaluation_batches(
    records: Records,
    crop: CentreCrop | None = None,
    batch_size: int = 256,
    pictures: Pack | VectorPack | None = None,
    device: str | torch.device = "cpu",
    workers: int | None = None,
    on_error: OnError = "raise",
    place: Place = "streamed",
    side: int | None = None,
    ranks: Ranks = ALONE,
) -> Batches:
    """Every picture once, in order, centre-cropped; arguments as for `training_batches`.

    Of several processes each gets some of the batches, which are those that a single one would get.
    """
    if batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, got {batch_size}")
    crop = crop or CentreCrop()
    length = -(-len(records) // batch_size)

    def orders() -> Iterator[Order]:
        for step in ranks.share(length):
            first = step * batch_size
            yield Order(step, np.arange(first, min(first + batch_size, len(records))), None)

    source = _source(records, crop, pictures, torch.device(device), workers, on_error, place, side)
    return Batches(records, source, orders, length, on_error == "skip", known=_known_failures(pictures))


def _known_failures(pictures: Pack | VectorPack | None) -> dict[int, str]:
    """Of a pack, index -> reason for the pictures that could not be decoded."""
    if pictures is None:
        return {}
    return {int(i): pictures.reason(int(i)) for i in np.flatnonzero(~pictures.usable())}


def _source(
    records: Records,
    crop: Crop,
    pictures: Pack | VectorPack | None,
    device: torch.device,
    workers: int | None,
    on_error: OnError,
    place: Place,
    side: int | None,
) -> Source:
    if on_error not in ("raise", "skip"):
        raise ValueError(f"on_error must be 'raise' or 'skip', got {on_error!r}")
    if place not in ("auto", "resident", "streamed"):
        raise ValueError(f"place must be 'auto', 'resident' or 'streamed', got {place!r}")
    cores = os.cpu_count() or 1
    if pictures is None:
        resized = needed_side(SIDE, crop.resize if isinstance(crop, CentreCrop) else crop.size)
        return Decoded(records, crop, device, cores if workers is None else workers, side or resized)
    if len(pictures) != len(records):
        raise ValueError(
            f"the pack holds {len(pictures)} pictures for {len(records)} records; align it with pack.of(records)"
        )
    if isinstance(pictures, VectorPack):
        return Rows(pictures, device)
    if side is not None and side != pictures.side and not pictures.drawn:
        raise ValueError(f"the pack is of side {pictures.side}, but pictures of side {side} are wanted")
    if device.type == "cpu":
        return Threaded(pictures, crop, workers)
    if place == "resident" or (place == "auto" and _fits(pictures, device)):
        return Resident(pictures, crop, device, cores)
    if pictures.quality is not None:
        return Decoded(records, crop, device, cores if workers is None else workers, pictures.side, pack=pictures)
    return Streamed(pictures, crop, device, min(workers or cores, 8))


def _fits(pictures: Pack, device: torch.device) -> bool:
    free, _ = torch.cuda.mem_get_info(device)
    return pictures.nbytes < RESIDENT_SHARE * free
