"""What the system is told before pictures are read: the right bytes, from whole pages, nothing where it cannot hear."""

from __future__ import annotations

import errno
import mmap
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from roadmap.data.batches.crops import CentreCrop, RandomCrop
from roadmap.data.batches.delivery import Order, Streamed, Threaded
from roadmap.data.batches.resampling import read_ranges
from roadmap.data.pictures import packs
from roadmap.data.pictures.packing import expected_bytes, pack
from roadmap.data.pictures.packs import Pack
from roadmap.data.records import Records

CPU = torch.device("cpu")
COUNT = 30
SOURCES = {"threaded": lambda *given: Threaded(*given, 1), "streamed": lambda *given: Streamed(*given, CPU, 1)}


class Recorder:
    """In the place of a memory map."""

    def __init__(self, shard: int, size: int, told: list[tuple[int, int, int, int]]) -> None:
        self.shard, self.size, self.told = shard, size, told

    def madvise(self, advice: int, start: int, length: int) -> None:
        assert start % mmap.PAGESIZE == 0
        assert 0 <= start < start + length <= self.size
        self.told.append((self.shard, advice, start, length))


@pytest.fixture(params=["decoded", "compressed"])
def made(request, tmp_path, monkeypatch) -> Pack:
    """Two files of many pages; pictures begin and end anywhere in a page."""
    monkeypatch.setattr("roadmap.data.pictures.packing.SHARD", 16)
    random = np.random.default_rng(0)
    names = tuple(f"{i}.jpg" for i in range(COUNT))
    for name in names:
        noise = Image.fromarray(random.integers(0, 256, (20, 30, 3), dtype=np.uint8))
        noise.resize(tuple(random.integers(90, 200, 2).tolist())).save(tmp_path / name)
    records = Records("many", tmp_path, names, np.arange(COUNT) // 4)
    return pack(records, 80, tmp_path / "pack", workers=0, progress=False, compressed=request.param == "compressed")


def listen(pack: Pack) -> list[tuple[int, int, int, int]]:
    told: list[tuple[int, int, int, int]] = []
    for number, shard in enumerate(pack.shards):
        shard._mmap = Recorder(number, shard.size, told)
    return told


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("crop", [CentreCrop(20, 24), CentreCrop(64, 80), RandomCrop(32)], ids=str)
def test_the_bytes_of_the_rows_that_crops_see_are_asked_for(source, crop, made):
    """Literally: picture by picture, from the page that its first row begins in to the end of its last."""
    told = listen(made)
    indices = np.random.default_rng(1).permutation(COUNT)
    draws = crop.draws(COUNT, 3, 0) if isinstance(crop, RandomCrop) else None
    (found,) = SOURCES[source](made, crop)(iter([Order(0, indices, draws)]))
    assert len(found.images) == COUNT
    expected = []
    for place, i in enumerate(indices.tolist()):
        shard, offset, height, width = made.index[i, :4].tolist()
        sizes = np.asarray([height]), np.asarray([width])
        windows = crop.windows(*sizes, *(() if draws is None else (draws[place : place + 1],)))
        first, count = (int(numbers[0]) for numbers in read_ranges(windows.rows, crop.size))
        row = int(windows.rows[0, 0]) + first
        begin, end = offset + row * width * 3, offset + (row + count) * width * 3
        assert offset <= begin < end <= offset + height * width * 3
        if made.quality is not None:
            begin, end = offset, offset + int(made.index[i, 6])
        page = begin - begin % mmap.PAGESIZE
        expected.append((shard, mmap.MADV_WILLNEED, page, end - page))
    assert told == expected
    assert {shard for shard, *_ in told} == {0, 1}


def test_nothing_is_asked_for_outside_a_picture(made):
    told = listen(made)
    kept = len(made.kept_bytes(15))  # the last of its file
    made.prefetch(15, 0, 10**9)
    assert told[0][2] + told[0][3] == made.shards[0].size
    if made.quality is None:
        made.prefetch(15, kept, 1)
        made.prefetch(15, 5, 0)
    assert len(told) == 1


@pytest.mark.parametrize("error", [errno.ENOSYS, errno.EINVAL, errno.ENOMEM, errno.EBADF])
@pytest.mark.parametrize("source", SOURCES)
def test_advice_that_is_not_taken_changes_nothing(source, error, made, monkeypatch):
    order = Order(0, np.arange(COUNT), None)
    (expected,) = SOURCES[source](made, CentreCrop(20, 24))(iter([order]))

    def refused(*arguments):
        raise OSError(error, "not taken")

    listen(made)
    monkeypatch.setattr(Recorder, "madvise", refused)
    monkeypatch.setattr(packs, "_memory", lambda: 1.0)
    (found,) = SOURCES[source](made, CentreCrop(20, 24))(iter([order]))
    assert torch.equal(found.images, expected.images)


def test_a_system_that_knows_no_advice(made, monkeypatch):
    told = listen(made)
    for name in ("MADV_WILLNEED", "MADV_RANDOM"):
        monkeypatch.delattr(mmap, name)
    monkeypatch.setattr(packs, "_memory", lambda: 1.0)
    (found,) = Threaded(made, CentreCrop(20, 24), 1)(iter([Order(0, np.arange(COUNT), None)]))
    assert len(found.images) == COUNT
    assert told == []


@pytest.mark.parametrize("source", SOURCES)
def test_neighbours_are_not_read_where_memory_cannot_keep_them(source, made, monkeypatch):
    told = listen(made)
    size = sum(shard.nbytes for shard in made.shards)
    monkeypatch.setattr(packs, "_memory", lambda: 2.0 * size)
    SOURCES[source](made, CentreCrop(20, 24))
    assert told == []
    monkeypatch.setattr(packs, "_memory", lambda: 2.0 * size - 1)
    SOURCES[source](made, CentreCrop(20, 24))
    assert told == [(i, mmap.MADV_RANDOM, 0, shard.nbytes) for i, shard in enumerate(made.shards)]


@pytest.mark.parametrize("compressed", [False, True])
def test_files_that_memory_cannot_keep_are_given_up_once_they_are_on_the_disk(compressed, made, tmp_path, monkeypatch):
    told, tell, synced, sync = [], os.posix_fadvise, [], os.fsync

    def advised(handle, *advice):
        told.append((os.fstat(handle).st_ino, *advice))
        assert os.fstat(handle).st_ino in synced
        tell(handle, *advice)

    def fsync(handle):
        synced.append(os.fstat(handle).st_ino)
        sync(handle)

    monkeypatch.setattr(os, "posix_fadvise", advised)
    monkeypatch.setattr(os, "fsync", fsync)
    records = Records("many", tmp_path, made.paths, np.arange(COUNT) // 4)
    size = expected_bytes(records, 80, compressed)
    monkeypatch.setattr(packs, "_memory", lambda: 2.0 * size)
    pack(records, 80, tmp_path / "kept", workers=0, progress=False, compressed=compressed)
    assert told == []
    monkeypatch.setattr(packs, "_memory", lambda: 2.0 * size - 1)
    found = pack(records, 80, tmp_path / "given up", workers=0, progress=False, compressed=compressed)
    inodes = {path.stat().st_ino for suffix in ("u8", "jpg") for path in found.folder.glob(f"*.{suffix}")}
    assert len(inodes) == 2
    assert sorted(told) == sorted((inode, 0, 0, os.POSIX_FADV_DONTNEED) for inode in inodes)


def test_a_pack_is_made_where_the_system_cannot_be_told(made, tmp_path, monkeypatch):
    monkeypatch.setattr(packs, "_memory", lambda: 1.0)
    records = Records("many", tmp_path, made.paths, np.arange(COUNT) // 4)

    def refused(*arguments):
        raise OSError(errno.EINVAL, "not taken")

    monkeypatch.setattr(os, "posix_fadvise", refused)
    pack(records, 80, tmp_path / "refused", workers=0, progress=False)
    monkeypatch.delattr(os, "posix_fadvise")
    found = pack(records, 80, tmp_path / "unknown", workers=0, progress=False)
    assert np.array_equal(found.picture(3), pack(records, 80, tmp_path / "refused", workers=0).picture(3))


def test_how_much_memory_there_is(monkeypatch):
    stated = next(line for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith("MemTotal"))
    assert packs._memory() == pytest.approx(int(stated.split()[1]) * 1024, rel=0.05)
    monkeypatch.delattr(packs.os, "sysconf")
    assert packs._memory() == float("inf")
