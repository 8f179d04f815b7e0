"""Packs survive kill -9, full disks, damaged files and two writers at once; what was right is never made again."""

from __future__ import annotations

import errno
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import roadmap.atomic
from roadmap.data.datasets import dataset
from roadmap.data.pictures import packing
from roadmap.data.pictures.contents import PackError
from roadmap.data.pictures.packing import pack, pack_of
from roadmap.data.pictures.packs import Pack, pack_folder
from roadmap.data.pictures.policy import fresh_pack, pack_for
from roadmap.data.records import Records

from . import layouts

SOURCE = Path(__file__).parents[2] / "src"
SIDE = 20


@pytest.fixture
def records(tmp_path, monkeypatch):
    monkeypatch.setattr(packing, "SHARD", 5)
    monkeypatch.setenv("ROADMAP_CACHE", str(tmp_path / "cache"))
    return dataset("folder", layouts.folder_layout(tmp_path / "pictures", classes=3, pictures=4, size=(40, 30)))


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != ".lock"}


def flip_a_bit(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 4
    path.write_bytes(raw)


DAMAGES = {
    "cut short": lambda path: os.truncate(path, path.stat().st_size - 7),
    "longer": lambda path: path.write_bytes(path.read_bytes() + b"more"),
    "a flipped bit": flip_a_bit,
    "empty": lambda path: path.write_bytes(b""),
    "gone": lambda path: path.unlink(),
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("ending", ["u8", "json"])
def test_a_damaged_shard_is_made_again_and_no_other(ending, damage, records):
    made = pack(records, SIDE, workers=0)
    before = content(made.folder)
    first, second, third = sorted(made.folder.glob(f"pixels-*.{ending}"))
    stamps = {path.name: path.stat().st_mtime_ns for path in made.folder.glob("pixels-*.u8")}
    DAMAGES[damage](second)
    again = pack(records, SIDE, workers=0)
    assert content(again.folder) == before
    renewed = {path.name for path in made.folder.glob("pixels-*.u8") if path.stat().st_mtime_ns != stamps[path.name]}
    assert renewed == {second.with_suffix(".u8").name}
    assert first.is_file()
    assert third.is_file()


@pytest.mark.parametrize("damage", ["cut short", "gone", "empty"])
def test_a_run_repairs_what_it_finds_damaged(damage, records):
    """Damage blocked every later run: the pack was neither usable nor made again."""
    made, _ = pack_for(records, SIDE, "auto")
    before = content(made.folder)
    DAMAGES[damage](sorted(made.folder.glob("*.u8"))[1])
    with pytest.raises(PackError, match=r"is damaged .* run `roadmap data pack` again"):
        Pack.open(made.folder)
    assert pack_for(records, SIDE, "auto", make=False)[0] is None
    assert pack_for(records, SIDE, "auto")[0] is not None
    assert content(made.folder) == before


@pytest.mark.parametrize("name", ["index-*.npy", "pack.json"])
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_index_is_seen_and_made_again(damage, name, records):
    made = pack(records, SIDE, workers=0)
    before = content(made.folder)
    (path,) = made.folder.glob(name)
    DAMAGES[damage](path)
    if (name, damage) not in {("index-*.npy", "longer"), ("pack.json", "a flipped bit")}:  # may still say the same
        assert fresh_pack(records, SIDE) is None
    pack(records, SIDE, workers=0)
    assert content(made.folder) == before


def test_the_content_is_on_the_disk_before_its_name_and_pixels_before_what_describes_them(records, monkeypatch):
    """So that a power cut leaves no index of pixels that are not there."""
    done = []
    fsync, replace = os.fsync, os.replace

    def noted_fsync(handle):
        path = Path(os.readlink(f"/proc/self/fd/{handle}"))
        done.append(("synced", "folder" if path.is_dir() else path.suffix))
        fsync(handle)

    def noted_replace(source, target):
        done.append(("named", re.sub(r"-.*(?=\.)", "", Path(target).name)))
        replace(source, target)

    monkeypatch.setattr(roadmap.atomic.os, "fsync", noted_fsync)
    monkeypatch.setattr(roadmap.atomic.os, "replace", noted_replace)
    pack(records, SIDE, workers=0)
    folder = ("synced", "folder")
    shard = [("synced", ".u8"), ("named", "pixels.u8"), ("named", "pixels.json")]  # the folder with the index
    index = [("synced", ".npy"), ("named", "index.npy"), folder, ("synced", ".json"), ("named", "pack.json"), folder]
    assert done == 3 * shard + index


PROGRAM = """
import os, sys
from pathlib import Path
left = int(sys.argv[1])
def deadly(original):
    def counted(*arguments, **more):
        global left
        left -= 1
        if left == 0:
            os.kill(os.getpid(), 9)
        return original(*arguments, **more)
    return counted
os.fsync, os.replace = deadly(os.fsync), deadly(os.replace)
from roadmap.data import dataset
from roadmap.data.pictures import packing
packing.SHARD = 5
print("ready", flush=True)
records, folder, compressed = dataset("folder", sys.argv[2]), Path(sys.argv[3]), sys.argv[5] == "True"
packing.pack(records, 20, folder, workers=int(sys.argv[4]), compressed=compressed)
"""


def packing_process(
    kill_at: int, records: Records, folder: Path, workers: int = 0, compressed: bool = False
) -> subprocess.Popen[str]:
    told = [str(kill_at), str(records.root), str(folder), str(workers), str(compressed)]
    command = [sys.executable, "-c", PROGRAM, *told]
    environment = {**os.environ, "PYTHONPATH": str(SOURCE)}
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)


@pytest.mark.parametrize("compressed", [False, True])
def test_a_pack_that_was_killed_at_any_point_is_continued(compressed, records, tmp_path):
    """Three calls a shard and six at the end: before its sync, its name, after; at every kind of file."""
    expected = content(pack(records, SIDE, tmp_path / "whole", workers=0, compressed=compressed).folder)
    for kill_at in (1, 2, 3, 5, 8, 10, 11, 13, 14):
        folder = tmp_path / f"killed {kill_at}"
        with packing_process(kill_at, records, folder, compressed=compressed) as process:
            process.communicate()
        assert process.returncode == -signal.SIGKILL
        assert fresh_pack(records, SIDE, folder) is None
        pack(records, SIDE, folder, workers=0, compressed=compressed)
        assert content(folder) == expected  # and no leftovers


@pytest.mark.parametrize("compressed", [False, True])
def test_packs_that_are_killed_at_any_time_again_and_again(compressed, records, tmp_path):
    folder, clock = tmp_path / "killed", random.Random(0)
    for _ in range(3):
        with packing_process(0, records, folder, 2, compressed) as process:
            assert process.stdout.readline() == "ready\n"
            time.sleep(clock.uniform(0, 0.5))
            process.kill()
    pack(records, SIDE, folder, workers=0, compressed=compressed)
    expected = pack(records, SIDE, tmp_path / "whole", workers=0, compressed=compressed)
    found = Pack.open(folder)
    np.testing.assert_array_equal(found.index, expected.index)
    for ours, theirs in zip(found.shards, expected.shards, strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_leftovers_of_killed_writers_are_removed(records):
    made = pack(records, SIDE, workers=0)
    before = content(made.folder)
    (made.folder / ".pixels-00001-abc.0123456789ab.partial.u8").write_bytes(b"half")
    (made.folder / "pixels-00001-0123456789abcdef.u8").write_bytes(b"of other sources")
    (made.folder / "pixels-00001-abc.4711.partial").write_bytes(b"of an older version")
    pack(records, SIDE, workers=0)
    assert content(made.folder) == before


def test_two_writers_at_once_make_one_pack(records, tmp_path):
    folder = tmp_path / "shared"
    processes = [packing_process(0, records, folder) for _ in range(2)]
    for process in processes:
        process.communicate()
        assert process.returncode == 0
    assert content(folder) == content(pack(records, SIDE, tmp_path / "whole", workers=0).folder)


@pytest.fixture
def small_disk(tmp_path):
    """A disk of 1 MB of its own."""
    disk = tmp_path / "disk"
    disk.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(disk)]
    try:
        allowed = subprocess.run(command, capture_output=True, check=False).returncode == 0
    except OSError:
        allowed = False
    if not allowed:
        pytest.skip("only root may mount a small disk")
    yield disk
    subprocess.run(["umount", "-l", str(disk)], check=True)


@pytest.mark.parametrize("compressed", [False, True])
@pytest.mark.parametrize("workers", [0, 2])
def test_a_full_disk_is_said_and_what_is_packed_is_kept(workers, compressed, records, small_disk, tmp_path):
    size = (250, 220) if compressed else (200, 180)
    root = layouts.folder_layout(tmp_path / "large", classes=3, pictures=4, size=size)
    large = dataset("folder", root)  # 12 of more than 100 kB, in three shards
    with pytest.raises(PackError, match="the disk of .* is full: free some of it, or set ROADMAP_CACHE to .* is kept"):
        pack(large, 256, small_disk, workers=workers, compressed=compressed)
    kept = content(small_disk)
    assert not [name for name in kept if ".partial" in name]
    subprocess.run(["mount", "-o", "remount,size=8m", str(small_disk)], check=True)
    made = pack(large, 256, small_disk, workers=workers, compressed=compressed)
    assert made.usable().all()
    assert {name: raw for name, raw in content(small_disk).items() if name in kept} == kept


def test_a_disk_that_turns_out_full_when_it_is_synced(records, monkeypatch):
    """Some systems take what they have no room for, and say so later."""
    fsync, calls = os.fsync, []

    def failing(handle):
        calls.append(handle)
        if len(calls) == 2:  # one for a shard
            raise OSError(errno.ENOSPC, "No space left on device")
        fsync(handle)

    monkeypatch.setattr(roadmap.atomic.os, "fsync", failing)
    folder = pack_folder(records, SIDE)
    with pytest.raises(PackError, match="is full"):
        pack(records, SIDE, workers=0)
    kept = content(folder)
    assert len([name for name in kept if name.startswith("pixels-00000-")]) == 2
    assert not [name for name in kept if name.startswith("pixels-00001-")]
    assert not [name for name in kept if ".partial" in name]
    assert pack(records, SIDE, workers=0).usable().all()
    assert kept.items() <= content(folder).items()


def test_other_errors_of_the_disk_stay_what_they_are(records, monkeypatch):
    def failing(*arguments, **more):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(packing, "written_shard", failing)
    with pytest.raises(OSError, match="Input/output error"):
        pack(records, SIDE, workers=0)


def test_drawing_that_was_interrupted_starts_again(tmp_path):
    few = Records("drawn", tmp_path / "drawn", ("a.png", "b.png"), np.asarray([0, 1]))
    pictures = [np.full((8, 8, 3), level, np.uint8) for level in (3, 5)]

    def interrupted():
        yield pictures[0]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pack_of(interrupted(), few, 8, few.root)
    assert content(few.root) == {}
    (few.root / "pixels-drawn.u8").write_bytes(b"of one that was killed before it had a name")
    with pytest.raises(PackError, match="1 pictures were drawn for 2 records"):
        pack_of(iter(pictures[:1]), few, 8, few.root)
    made = pack_of(iter(pictures), few, 8, few.root)
    assert [int(made.picture(i)[0, 0, 0]) for i in range(2)] == [3, 5]
    assert len(content(few.root)) == 3


def test_the_place_of_the_lock_is_no_picture(records):
    pack(records, SIDE, workers=0)
    assert (pack_folder(records, SIDE) / ".lock").read_bytes() == b""
