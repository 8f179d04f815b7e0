"""The same pictures and crops whichever way they are delivered; exact resume; skipped pictures are counted."""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import signal
import threading

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from roadmap.data.batches.crops import CentreCrop, RandomCrop
from roadmap.data.batches.decoding import loader_batches
from roadmap.data.batches.delivery import Order, Resident, Streamed, Threaded
from roadmap.data.batches.loading import evaluation_batches, training_batches
from roadmap.data.batches.resampling import cpu_crop
from roadmap.data.batches.samplers import MPerClass
from roadmap.data.datasets import dataset
from roadmap.data.pictures.images import PictureError, picture
from roadmap.data.pictures.packing import pack

from . import layouts

CROP = RandomCrop(24)
CPU = torch.device("cpu")


@pytest.fixture
def records(tmp_path, monkeypatch):
    monkeypatch.setenv("ROADMAP_CACHE", str(tmp_path / "cache"))
    root = layouts.folder_layout(tmp_path / "pictures", classes=4, pictures=3, size=(40, 30))
    layouts.write_picture(root / "class_2" / "tall.png", 7, (20, 70))
    return dataset("folder", root)


@pytest.fixture
def pictures(records):
    return pack(records, 256, workers=0, progress=False)


def orders(records, count=3):
    sampler = MPerClass(records.labels, 6, 3, count)
    return [Order(k, batch, CROP.draws(6, 0, k)) for k, batch in enumerate(sampler.epoch_batches(0))]


@pytest.mark.parametrize("way", ["resident", "streamed", "threaded"])
def test_every_way_delivers_the_same_crops(way, records, pictures):
    source = {
        "resident": lambda: Resident(pictures, CROP, CPU),
        "streamed": lambda: Streamed(pictures, CROP, CPU, threads=2, ahead=2),
        "threaded": lambda: Threaded(pictures, CROP, threads=2),
    }[way]()
    asked = orders(records)
    delivered = list(source(iter(asked)))
    assert [d.order.position for d in delivered] == [0, 1, 2]
    for order, delivery in zip(asked, delivered, strict=True):
        assert delivery.indices.tolist() == order.indices.tolist()
        heights, widths = pictures.heights[order.indices], pictures.widths[order.indices]
        windows = CROP.windows(heights, widths, order.draws)
        for place, index in enumerate(order.indices):
            levels = cpu_crop(picture(records.path(int(index))), windows, place, 24).float()
            mean, std = (torch.tensor(values).view(3, 1, 1) for values in (CROP.mean, CROP.std))
            expected = (levels / 255 - mean) / std
            assert (delivery.images[place] - expected).abs().max() < 1.1 / 255 / 0.22  # a level


@pytest.mark.gpu
@pytest.mark.parametrize("place", ["resident", "streamed"])
def test_the_gpu_delivers_what_the_cpu_does(place, records, pictures):
    batches = {}
    for device in ("cpu", "cuda"):
        sampler = MPerClass(records.labels, 6, 3, 12)
        loaded = training_batches(records, sampler, CROP, pictures, device, place=place)
        batches[device] = [tuple(part.cpu() for part in batch) for batch in loaded]
    for ours, theirs in zip(batches["cpu"], batches["cuda"], strict=True):
        assert (ours[0] - theirs[0]).abs().max() < 1.3 / 255 / 0.22
        assert torch.equal(ours[1], theirs[1])
        assert torch.equal(ours[2], theirs[2])


@pytest.mark.parametrize("workers", [0, 2])
def test_files_and_pack_deliver_the_same_batches(workers, records, pictures):
    loaded = []
    for source in (None, pictures):
        sampler = MPerClass(records.labels, 6, 3, 3)
        loaded.append(list(training_batches(records, sampler, CROP, source, workers=workers)))
    for from_files, from_pack in zip(*loaded, strict=True):
        torch.testing.assert_close(from_files.images, from_pack.images, atol=1e-5, rtol=0)
        assert torch.equal(from_files.labels, from_pack.labels)
        assert from_files.labels.tolist() == records.labels[from_files.indices.numpy()].tolist()
        assert from_files.images.shape == (6, 3, 24, 24)


def test_resuming_gives_the_batches_that_were_to_come(records, pictures):
    def batches(position):
        sampler = MPerClass(records.labels, 6, 3, 4)
        sampler.seek(position)
        loaded = training_batches(records, sampler, CROP, pictures, seed=5)
        return sampler, [batch for _ in range(2) for batch in loaded]

    _, whole = batches(0)
    sampler, rest = batches(3)
    assert sampler.position == 8
    assert len(rest) == 1 + 4
    for ours, theirs in zip(rest, whole[3:], strict=True):
        assert torch.equal(ours.images, theirs.images)
        assert torch.equal(ours.indices, theirs.indices)


def test_the_position_counts_what_was_handed_out_and_not_what_is_prepared(records, pictures):
    sampler = MPerClass(records.labels, 6, 3, 10)
    loaded = iter(training_batches(records, sampler, CROP, pictures))
    for expected in (1, 2, 3):
        next(loaded)
        assert sampler.position == expected
    loaded.close()


def test_ranks_together_see_the_global_batch_with_the_same_crops(records, pictures):
    def images(world_size, rank):
        sampler = MPerClass(records.labels, 6, 3, 2, world_size=world_size, rank=rank)
        return [batch.images for batch in training_batches(records, sampler, CROP, pictures)]

    alone = images(1, 0)
    shared = [torch.cat(parts) for parts in zip(images(2, 0), images(2, 1), strict=True)]
    assert all(torch.equal(a, b) for a, b in zip(alone, shared, strict=True))


def test_seeds_give_other_crops_of_the_same_pictures(records, pictures):
    def first(seed):
        return next(iter(training_batches(records, MPerClass(records.labels, 6, 3), CROP, pictures, seed=seed)))

    a, b = first(0), first(1)
    assert torch.equal(a.indices, b.indices)
    assert not torch.equal(a.images, b.images)


@pytest.mark.parametrize("packed", [True, False])
def test_evaluation_sees_every_picture_once_in_order(packed, records, pictures):
    batches = evaluation_batches(records, CentreCrop(16, 20), 5, pictures if packed else None, workers=0 or None)
    seen = list(batches)
    assert len(batches) == len(seen) == 3
    assert torch.cat([b.indices for b in seen]).tolist() == list(range(13))
    assert torch.cat([b.labels for b in seen]).tolist() == records.labels.tolist()
    assert seen[-1].images.shape == (3, 3, 16, 16)


@pytest.mark.parametrize("packed", [True, False])
def test_a_picture_that_cannot_be_decoded_is_raised_or_skipped_and_counted(packed, records):
    records.path(4).write_bytes(b"not a picture")
    pictures = pack(records, 256, workers=0, on_error="skip", progress=False) if packed else None
    with pytest.raises(PictureError, match=records.paths[4]):
        list(evaluation_batches(records, CentreCrop(16, 20), 5, pictures, workers=1 if packed else 0))
    batches = evaluation_batches(records, CentreCrop(16, 20), 5, pictures, workers=1 if packed else 0, on_error="skip")
    seen = torch.cat([batch.indices for batch in batches]).tolist()
    assert seen == [i for i in range(13) if i != 4]
    assert batches.skipped == {records.paths[4]: "not a picture that Pillow can read"}


def pictures_of(records, packed):
    return pack(records, 256, workers=0, on_error="skip", progress=False) if packed else None


@pytest.mark.parametrize("packed", [True, False])
def test_evaluation_goes_on_after_a_batch_that_cannot_be_read(packed, records):
    for i in range(5, 10):
        records.path(i).write_bytes(b"x")
    batches = evaluation_batches(records, CentreCrop(16, 20), 5, pictures_of(records, packed), on_error="skip")
    assert [batch.indices.tolist() for batch in batches] == [[0, 1, 2, 3, 4], [10, 11, 12]]
    assert set(batches.skipped) == set(records.paths[5:10])


@pytest.mark.parametrize("packed", [True, False])
def test_training_takes_the_next_batch_in_place_of_one_that_cannot_be_read(packed, records):
    """The steps of an epoch keep their number, and so does every rank: none waits for one that has nothing."""
    whole = MPerClass(records.labels, 3, 3, 4).epoch_batches(0)
    for i in whole[1]:
        records.path(int(i)).write_bytes(b"x")
    sampler = MPerClass(records.labels, 3, 3, 4)
    batches = training_batches(records, sampler, CROP, pictures_of(records, packed), workers=1, on_error="skip")
    found, images = [], []
    for number, batch in enumerate(batches, start=1):
        found.append(batch.indices.tolist())
        images.append(batch.images)
        assert sampler.position == number
        assert batch.labels.tolist() == records.labels[batch.indices.numpy()].tolist()
        assert len(batch.images) == 3
    assert found == [whole[0].tolist(), whole[2].tolist(), whole[2].tolist(), whole[3].tolist()]
    assert not torch.equal(images[1], images[2])  # the same pictures, cropped for another step
    assert set(batches.skipped) == {records.paths[i] for i in whole[1]}


@pytest.mark.parametrize("packed", [True, False])
def test_training_finds_the_only_picture_that_can_be_read(packed, records):
    sampler = MPerClass(records.labels, 3, 3, 1)
    unseen = next(i for i in range(13) if i not in sampler.epoch_batches(0))
    for i in range(13):
        if i != unseen:
            records.path(i).write_bytes(b"x")
    batches = training_batches(records, sampler, CROP, pictures_of(records, packed), workers=0, on_error="skip")
    (batch,) = batches
    assert batch.indices.tolist() == [unseen]


@pytest.mark.parametrize("packed", [True, False])
def test_where_nothing_can_be_read_it_is_said(packed, records):
    for i in range(13):
        records.path(i).write_bytes(b"x")
    pictures = pictures_of(records, packed)
    words = rf"none of the 13 pictures of pictures could be decoded; the first is .*{records.paths[0]}: not a picture"
    with pytest.raises(ValueError, match=words):
        list(evaluation_batches(records, CentreCrop(16, 20), 4, pictures, workers=0, on_error="skip"))
    with pytest.raises(ValueError, match=words):
        list(training_batches(records, MPerClass(records.labels, 6, 3), CROP, pictures, workers=0, on_error="skip"))


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("packed", [True, False])
def test_every_picture_that_cannot_be_read_is_counted_once(packed, workers, records, tmp_path):
    """Two boxes of one file are two pictures; a picture that is met often is one."""
    boxes = np.full((13, 4), np.nan)
    boxes[[2, 3]] = [[0, 0, 9, 9], [5, 5, 20, 20]]
    paths = (*records.paths[:3], records.paths[2], *records.paths[4:])
    cut = dataclasses.replace(records, paths=paths, boxes=boxes, crop=True)
    for i in (2, 7):
        cut.path(i).write_bytes(b"x")
    pictures = pack(cut, 256, tmp_path / "p", 0, "skip", False) if packed else None
    batches = training_batches(cut, MPerClass(cut.labels, 6, 3), CROP, pictures, workers=workers, on_error="skip")
    for _ in range(4):
        assert all(len(batch.images) for batch in batches)
    testing = evaluation_batches(cut, CentreCrop(16, 20), 5, pictures, workers=workers, on_error="skip")
    list(testing)
    file = records.paths[2]
    assert set(batches.skipped) == set(testing.skipped) == {f"{file}#0,0,9,9", f"{file}#5,5,20,20", records.paths[7]}


def test_a_pack_knows_what_was_skipped_before_it_is_met(records):
    records.path(12).write_bytes(b"x")
    sampler = MPerClass(records.labels, 3, 3, 1)
    assert 12 not in sampler.epoch_batches(0)
    pictures = pictures_of(records, True)
    batches = training_batches(records, sampler, CROP, pictures, on_error="skip")
    list(batches)
    assert batches.skipped == {records.paths[12]: "not a picture that Pillow can read"}
    list(training_batches(records, sampler, CROP, pictures))  # and raises nothing for what nobody asked for


def test_what_is_refused_says_why(records, pictures):
    sampler = MPerClass(records.labels, 6, 3)
    with pytest.raises(ValueError, match=r"holds 13 pictures for 4 records; align it"):
        training_batches(records.select([0, 1, 2, 3]), sampler, CROP, pictures)
    with pytest.raises(ValueError, match="on_error must be 'raise' or 'skip', got 'ignore'"):
        training_batches(records, sampler, CROP, pictures, on_error="ignore")
    with pytest.raises(ValueError, match="place must be 'auto', 'resident' or 'streamed', got 'moon'"):
        training_batches(records, sampler, CROP, pictures, place="moon")
    with pytest.raises(ValueError, match="batch_size must be at least 1, got 0"):
        evaluation_batches(records, batch_size=0)
    with pytest.raises(ValueError, match="random crops need their draws"):
        next(Threaded(pictures, CROP)(iter([Order(0, np.asarray([0]), None)])))


def test_a_reader_that_dies_while_it_hands_over_is_told_by_name():
    """The connection breaks before the system says who died: the error is the one that says it."""
    loader = DataLoader(list(range(1000)), num_workers=1, generator=torch.Generator())

    class Breaking:
        def __iter__(self):
            yield next(alive)
            death = threading.Timer(0.3, os.kill, (multiprocessing.active_children()[0].pid, signal.SIGKILL))
            death.start()
            raise ConnectionResetError(104, "Connection reset by peer")

    alive = iter(loader)
    with pytest.raises(RuntimeError, match=r"DataLoader worker \(pid \d+\) is killed by signal"):
        list(loader_batches(Breaking()))


def test_a_broken_connection_without_a_death_stays_what_it_is(monkeypatch):
    monkeypatch.setattr("roadmap.data.batches.decoding.DEATH_IS_KNOWN", 0.01)

    class Broken:
        def __iter__(self):
            yield 1
            raise EOFError("nothing came")

    with pytest.raises(EOFError, match="nothing came"):
        list(loader_batches(Broken()))
