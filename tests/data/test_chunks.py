"""Batches in chunks: the crops of whole batches to the bit, as often as they are read, and never whole in memory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from roadmap.data.batches.chunks import ChunkedBatch, Chunks
from roadmap.data.batches.crops import RandomCrop
from roadmap.data.batches.delivery import Delivery, Order, Resident, Streamed, Threaded
from roadmap.data.batches.loading import Batch, Batches, training_batches
from roadmap.data.batches.samplers import MPerClass
from roadmap.data.datasets import dataset
from roadmap.data.pictures.images import PictureError
from roadmap.data.pictures.packing import pack
from roadmap.data.pictures.packs import Pack
from roadmap.data.records import Records

from . import layouts

CROP = RandomCrop(24)
CPU = torch.device("cpu")


@pytest.fixture
def records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Records:
    monkeypatch.setenv("ROADMAP_CACHE", str(tmp_path / "cache"))
    root = layouts.folder_layout(tmp_path / "pictures", classes=4, pictures=3, size=(40, 30))
    return dataset("folder", root)


def packed(records: Records, wanted: bool = True) -> Pack | None:
    return pack(records, 256, workers=0, on_error="skip", progress=False) if wanted else None


def batches(records: Records, pictures: Pack | None, chunk: int | None, on_error: str = "raise") -> Batches:
    sampler = MPerClass(records.labels, 12, 3, 2)
    return training_batches(records, sampler, CROP, pictures, workers=1, on_error=on_error, chunk=chunk)  # type: ignore[arg-type]


@pytest.mark.parametrize(("from_pack", "chunk"), [(True, 1), (True, 5), (True, 12), (True, 50), (False, 5)])
def test_chunks_together_are_the_batch_each_time_they_are_read(records: Records, from_pack: bool, chunk: int) -> None:
    pictures = packed(records, from_pack)
    whole, parts = list(batches(records, pictures, None)), list(batches(records, pictures, chunk))
    assert len(whole) == len(parts) == 2
    for batch, chunked in zip(whole, parts, strict=True):
        assert isinstance(chunked, ChunkedBatch)
        first, second = list(chunked.images), list(chunked.images)
        assert [len(part) for part in first] == [len(part) for part in batch.images.split(chunk)]
        assert torch.equal(torch.cat(first), batch.images)
        assert torch.equal(torch.cat(second), batch.images)
        assert torch.equal(chunked.labels, batch.labels)
        assert torch.equal(chunked.indices, batch.indices)


@pytest.mark.parametrize("way", ["resident", "streamed", "threaded"])
def test_every_way_delivers_chunks(records: Records, way: str) -> None:
    pictures = packed(records)
    assert pictures is not None
    source = {
        "resident": lambda: Resident(pictures, CROP, CPU),
        "streamed": lambda: Streamed(pictures, CROP, CPU, threads=2, ahead=2),
        "threaded": lambda: Threaded(pictures, CROP, threads=2),
    }[way]()
    order = Order(0, np.arange(12), CROP.draws(12, 0, 0))
    (whole,) = source(iter([order]))
    chunks = Chunks(source, order, 5, lambda _: None)
    for _ in range(2):
        assert torch.equal(torch.cat(list(chunks)), whole.images)


def test_the_position_counts_batches(records: Records) -> None:
    loaded = batches(records, packed(records), 5)
    seen = [loaded._sampler.position for _ in loaded]  # type: ignore[union-attr]
    assert seen == [1, 2]


def test_no_more_than_what_is_read_is_made(records: Records) -> None:
    """The source is asked for chunks, and for the next one when the one before has been taken."""
    asked: list[int] = []

    def source(orders: Iterator[Order]) -> Iterator[Delivery]:
        for order in orders:
            asked.append(len(order.indices))
            yield Delivery(order, torch.zeros(len(order.indices), 3, 2, 2), order.indices, {})

    chunks = iter(Chunks(source, Order(0, np.arange(12), None), 5, lambda _: None))
    assert asked == []
    for number, expected in enumerate((5, 5, 2), start=1):
        assert len(next(chunks)) == expected
        assert len(asked) == number


def test_which_pictures_came_is_known_after_reading(records: Records) -> None:
    chunked = next(iter(batches(records, packed(records), 5)))
    with pytest.raises(RuntimeError, match="known after its chunks have been read"):
        _ = chunked.labels
    list(chunked.images)
    assert len(chunked.labels) == 12


@pytest.mark.parametrize("from_pack", [True, False])
def test_a_picture_that_cannot_be_decoded_is_raised_or_left_out(records: Records, from_pack: bool) -> None:
    for index in (0, 1, 2, 7):  # among them a whole chunk, if it comes so
        records.path(index).write_bytes(b"x")
    pictures = packed(records, from_pack)
    with pytest.raises(PictureError, match="not a picture"):
        list(next(iter(batches(records, pictures, 3))).images)
    loaded = batches(records, pictures, 3, on_error="skip")
    for chunked, whole in zip(loaded, batches(records, pictures, None, on_error="skip"), strict=True):
        assert isinstance(whole, Batch)
        assert torch.equal(torch.cat(list(chunked.images)), whole.images)
        assert torch.equal(chunked.labels, whole.labels)
        assert torch.equal(chunked.indices, whole.indices)
    assert set(loaded.skipped) == {records.paths[index] for index in (0, 1, 2, 7)}


@pytest.mark.parametrize("from_pack", [True, False])
def test_in_place_of_a_batch_that_cannot_be_read_comes_the_next(records: Records, from_pack: bool) -> None:
    whole = MPerClass(records.labels, 3, 3, 4).epoch_batches(0)
    for index in whole[1]:
        records.path(int(index)).write_bytes(b"x")
    pictures, found = packed(records, from_pack), []
    sampler = MPerClass(records.labels, 3, 3, 4)
    for chunked in training_batches(records, sampler, CROP, pictures, workers=0 if pictures is None else 1,
                                    on_error="skip", chunk=2):  # fmt: skip
        assert sum(len(part) for part in chunked.images) == 3
        found.append(chunked.indices.tolist())
    assert found == [whole[0].tolist(), whole[2].tolist(), whole[2].tolist(), whole[3].tolist()]


def test_where_nothing_can_be_read_it_is_said(records: Records) -> None:
    for index in range(12):
        records.path(index).write_bytes(b"x")
    with pytest.raises(ValueError, match="none of the 12 pictures of pictures could be decoded; the first is"):
        list(batches(records, packed(records), 5, on_error="skip"))
