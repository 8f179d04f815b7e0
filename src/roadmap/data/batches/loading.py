"""Batches for training and evaluation, from the fastest place the pictures are in."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from roadmap.data.batches.crops import CentreCrop, Crop, RandomCrop
from roadmap.data.batches.decoding import Decoded
from roadmap.data.batches.delivery import Order, Resident, Source, Streamed, Threaded
from roadmap.data.batches.samplers import CategoryPairs, MPerClass
from roadmap.data.pictures.images import PictureError
from roadmap.data.pictures.packing import OnError
from roadmap.data.pictures.packs import Pack
from roadmap.data.pictures.policy import SIDE, needed_side
from roadmap.data.records import Records

RESIDENT_SHARE = 0.4  # of free device memory that a pack may take; the rest is for the model
Place = Literal["auto", "resident", "streamed"]


class Batch(NamedTuple):
    """Images (B, 3, S, S) float32 normalised, labels (B,) int64, indices (B,) into the Records; on the device."""

    images: Tensor
    labels: Tensor
    indices: Tensor


class Batches:
    """An iterable of `Batch`; every `iter` starts where its sampler stands.

    Attributes:
        skipped: path -> reason, of pictures left out because they could not be decoded.
    """

    def __init__(
        self,
        records: Records,
        source: Source,
        orders: Callable[[], Iterator[Order]],
        length: int,
        skip: bool,
        sampler: MPerClass | CategoryPairs | None = None,
    ) -> None:
        self.records, self.skipped = records, dict[str, str]()
        self._source, self._orders, self._length, self._skip = source, orders, length, skip
        self._sampler = sampler

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Batch]:
        for delivery in self._source(self._orders()):
            for index, reason in delivery.skipped.items():
                if not self._skip:
                    raise PictureError(self.records.path(index), reason)
                self.skipped[self.records.paths[index]] = reason
            if self._sampler is not None:  # only what was handed out counts, not what is being prepared
                self._sampler.position = delivery.order.position + 1
            device = delivery.images.device
            labels, indices = (
                _moved(values, device) for values in (self.records.labels[delivery.indices], delivery.indices)
            )
            yield Batch(delivery.images, labels, indices)


def _moved(values: np.ndarray[tuple[int], np.dtype[np.int64]], device: torch.device) -> Tensor:
    tensor = torch.from_numpy(np.ascontiguousarray(values))
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


def training_batches(
    records: Records,
    sampler: MPerClass | CategoryPairs,
    crop: RandomCrop | None = None,
    pictures: Pack | None = None,
    device: str | torch.device = "cpu",
    seed: int = 0,
    workers: int | None = None,
    on_error: OnError = "raise",
    place: Place = "auto",
    side: int | None = None,
) -> Batches:
    """The batches of the sampler's epochs, randomly cropped. Crops are a pure function of (seed, position).

    Args:
        records: the training pictures, in the order the sampler knows them.
        sampler: says which pictures meet; its `position` follows the batches handed out.
        crop: None for the paper's 224-pixel crops.
        pictures: their pack, aligned (`pack_for(...)`, `pack.of(records)`); None decodes the files every time.
        device: where batches are delivered.
        workers: threads or processes on the host; None for one per core.
        on_error: "raise" for a picture that cannot be decoded, or "skip" and count it in `Batches.skipped`.
        place: where the pack is read from on a GPU: its own memory ("resident"), pinned host memory ("streamed"),
            or whichever fits.
        side: shorter side of the pack that these pictures have, or would have: files are resized to it first, so that
            the pixels are those of a pack. None: 256, or as large as the crop needs.
    """
    crop = crop or RandomCrop()

    def orders() -> Iterator[Order]:
        epoch, first = divmod(sampler.position, sampler.batches)
        for step, batch in enumerate(sampler.epoch_batches(epoch)[first:], start=sampler.position):
            # drawn for the global batch, so that a crop does not depend on how many ranks share it
            yield Order(step, sampler.share(batch), sampler.share(crop.draws(len(batch), seed, step)))

    source = _source(records, crop, pictures, torch.device(device), workers, on_error, place, side)
    return Batches(records, source, orders, len(sampler), on_error == "skip", sampler)


def evaluation_batches(
    records: Records,
    crop: CentreCrop | None = None,
    batch_size: int = 256,
    pictures: Pack | None = None,
    device: str | torch.device = "cpu",
    workers: int | None = None,
    on_error: OnError = "raise",
    place: Place = "streamed",
    side: int | None = None,
) -> Batches:
    """Every picture once, in order, centre-cropped; arguments as for `training_batches`."""
    if batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, got {batch_size}")
    crop = crop or CentreCrop()

    def orders() -> Iterator[Order]:
        for step, first in enumerate(range(0, len(records), batch_size)):
            yield Order(step, np.arange(first, min(first + batch_size, len(records))), None)

    source = _source(records, crop, pictures, torch.device(device), workers, on_error, place, side)
    return Batches(records, source, orders, -(-len(records) // batch_size), on_error == "skip")


def _source(
    records: Records,
    crop: Crop,
    pictures: Pack | None,
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
    if side is not None and side != pictures.side and not pictures.drawn:
        raise ValueError(f"the pack is of side {pictures.side}, but pictures of side {side} are wanted")
    if device.type == "cpu":
        return Threaded(pictures, crop, workers)
    if place == "resident" or (place == "auto" and _fits(pictures, device)):
        return Resident(pictures, crop, device)
    return Streamed(pictures, crop, device, min(workers or cores, 8))


def _fits(pictures: Pack, device: torch.device) -> bool:
    free, _ = torch.cuda.mem_get_info(device)
    return pictures.nbytes < RESIDENT_SHARE * free
