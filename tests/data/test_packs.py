"""Packs: what goes in comes out; atomic, resumable, invalidated; nothing in them can run code or reach outside."""

from __future__ import annotations

import dataclasses
import os

import numpy as np
import pytest
from PIL import Image

from roadmap.data.datasets import dataset
from roadmap.data.pictures import images, packing
from roadmap.data.pictures.contents import PackError
from roadmap.data.pictures.images import PictureError, picture, thumbnail
from roadmap.data.pictures.packing import pack
from roadmap.data.pictures.packs import Pack, pack_folder
from roadmap.data.pictures.policy import fresh_pack

from . import layouts


@pytest.fixture
def records(tmp_path, monkeypatch):
    monkeypatch.setattr(packing, "SHARD", 5)  # several shards from few pictures
    monkeypatch.setenv("ROADMAP_CACHE", str(tmp_path / "cache"))
    root = layouts.folder_layout(tmp_path / "pictures", classes=3, pictures=4, size=(40, 30))
    layouts.write_picture(root / "class_2" / "tall.png", 7, (20, 90))
    layouts.write_picture(root / "class_2" / "tiny.png", 8, (5, 4))
    return dataset("folder", root)


def touched(path):
    """As if it had been saved again a little later."""
    stat = path.stat()
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns + 1_000_000))


def test_every_picture_is_what_decoding_and_resizing_gives(records):
    made = pack(records, side=20, workers=0, progress=False)
    assert len(made) == len(records) == 14
    for i in range(len(records)):
        expected = np.asarray(thumbnail(Image.fromarray(picture(records.path(i))), 20))
        np.testing.assert_array_equal(made.picture(i), expected)
    sizes = dict(zip(records.paths, zip(made.heights.tolist(), made.widths.tolist(), strict=True), strict=True))
    assert sizes["class_2/tall.png"] == (90, 20)
    assert sizes["class_2/tiny.png"] == (4, 5)  # not enlarged
    assert sizes["class_0/0.png"] == (20, 26)
    assert made.nbytes == sum(h * w * 3 for h, w in sizes.values())


def test_processes_give_the_same_pack_as_one(records, tmp_path):
    alone = pack(records, 20, tmp_path / "one", workers=0, progress=False)
    many = pack(records, 20, tmp_path / "many", workers=2, progress=False)
    np.testing.assert_array_equal(alone.index, many.index)
    for a, b in zip(alone.shards, many.shards, strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_split_finds_its_pictures_in_the_pack_of_the_whole(records):
    made = pack(records, 20, workers=0, progress=False)
    part = records.split_by_class(0.4).split("test")
    found = fresh_pack(part, 20)
    assert len(found) == len(part)
    for i, path in enumerate(part.paths):
        np.testing.assert_array_equal(found.picture(i), made.picture(records.paths.index(path)))
    assert fresh_pack(part, 21) is None
    assert pack_folder(records, 20) != pack_folder(records, 21)


def test_boxes_are_cut_and_told_apart(records, tmp_path):
    row = records.paths.index("class_0/0.png")
    boxes = np.full((3, 4), np.nan)
    boxes[1:] = [[0, 0, 10, 20], [5, 5, 30, 15]]
    cut = dataclasses.replace(records.select([row, row, row]), boxes=boxes, crop=True)
    made = pack(cut, 256, tmp_path / "p", workers=0, progress=False).of(cut)
    whole = picture(records.path(row))
    for i, expected in enumerate([whole, whole[0:20, 0:10], whole[5:15, 5:30]]):
        np.testing.assert_array_equal(made.picture(i), expected)
    assert fresh_pack(cut.select([2, 1]), 256, tmp_path / "p").heights.tolist() == [10, 20]


def test_a_finished_pack_is_not_made_again(records):
    made = pack(records, 20, workers=0, progress=False)
    before = {p.name: p.stat().st_mtime_ns for p in made.folder.glob("pixels-*")}
    again = pack(records, 20, workers=0, progress=False)
    assert {p.name: p.stat().st_mtime_ns for p in again.folder.glob("pixels-*")} == before


def test_an_interrupted_pack_is_no_pack_and_resumes(records, monkeypatch):
    written = []
    original = packing.written_shard

    def failing(shard, **rest):
        if len(written) == 2:
            raise KeyboardInterrupt
        written.append(shard.file)
        return original(shard, **rest)

    monkeypatch.setattr(packing, "written_shard", failing)
    with pytest.raises(KeyboardInterrupt):
        pack(records, 20, workers=0, progress=False)
    folder = pack_folder(records, 20)
    with pytest.raises(PackError, match="no complete pack"):
        Pack.open(folder)
    assert fresh_pack(records, 20) is None
    kept = {p.name: p.stat().st_mtime_ns for p in folder.glob("pixels-*")}
    assert len(kept) == 4  # two shards, each with its .json
    monkeypatch.setattr(packing, "written_shard", original)
    made = pack(records, 20, workers=0, progress=False)
    assert len(made.shards) == 3
    assert {name: (folder / name).stat().st_mtime_ns for name in kept} == kept


def test_a_crash_while_writing_leaves_no_shard(records, monkeypatch):
    original, calls = images.thumbnail, []

    def crashing(image, side):
        calls.append(1)
        if len(calls) == 3:
            raise MemoryError
        return original(image, side)

    monkeypatch.setattr(images, "thumbnail", crashing)
    with pytest.raises(MemoryError):
        pack(records, 20, workers=0, progress=False)
    assert [path.name for path in pack_folder(records, 20).iterdir()] == [".lock"]


@pytest.mark.parametrize("change", ["touched", "rewritten", "removed"])
def test_a_changed_source_makes_the_pack_stale(change, records):
    pack(records, 20, workers=0, progress=False)
    assert fresh_pack(records, 20) is not None
    victim = records.path(6)
    if change == "touched":
        touched(victim)
    elif change == "rewritten":
        layouts.write_picture(victim, 999, (44, 33))
    else:
        victim.unlink()
    assert fresh_pack(records, 20) is None
    assert Pack.open(pack_folder(records, 20)).stale() == (records.paths[6],)
    untouched = records.select([0, 1, 2])
    assert fresh_pack(untouched, 20) is not None  # splits without it are still right


def test_only_the_changed_shard_is_packed_again(records):
    first = pack(records, 20, workers=0, progress=False)
    before = {p.name for p in first.folder.glob("*.u8")}
    layouts.write_picture(records.path(6), 999, (44, 33))
    held = np.array(first.picture(6))
    second = pack(records, 20, workers=0, progress=False)
    after = {p.name for p in second.folder.glob("*.u8")}
    assert len(before & after) == 2
    assert len(after) == 3  # the outdated one is gone
    np.testing.assert_array_equal(second.picture(6), thumbnail(Image.fromarray(picture(records.path(6))), 20))
    np.testing.assert_array_equal(first.picture(6), held)  # who has the old one open keeps it
    assert fresh_pack(records, 20) is not None


def test_new_pictures_are_noticed(records):
    pack(records, 20, workers=0, progress=False)
    layouts.write_picture(records.root / "class_1" / "new.png", 55)
    grown = dataset("folder", records.root)
    with pytest.raises(PackError, match=r"1 of 15 pictures are not in the pack .*class_1/new.png"):
        Pack.open(pack_folder(records, 20)).of(grown)
    assert fresh_pack(grown, 20) is None


def test_errors_are_raised_or_counted(records):
    records.path(3).write_bytes(records.path(3).read_bytes()[:200])
    records.path(9).unlink()
    with pytest.raises(PictureError, match=records.paths[3]):
        pack(records, 20, workers=0, progress=False)
    made = pack(records, 20, workers=0, on_error="skip", progress=False)
    assert set(made.failures) == {records.paths[3], records.paths[9]}
    assert made.failures[records.paths[9]] == "the file is missing"
    assert np.flatnonzero(~made.usable()).tolist() == [3, 9]
    with pytest.raises(PackError, match="could not be decoded: truncated or corrupt"):
        made.picture(3)
    np.testing.assert_array_equal(made.picture(4), thumbnail(Image.fromarray(picture(records.path(4))), 20))
    with pytest.raises(PictureError, match=records.paths[3]):  # what was skipped does not pass for done
        pack(records, 20, workers=0, progress=False)


def test_errors_cross_from_worker_processes(records):
    records.path(3).write_bytes(b"x")
    with pytest.raises(PictureError, match=records.paths[3]):
        pack(records, 20, workers=2, progress=False)


class Runs:
    """Leaves a file behind when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


def test_nothing_in_an_index_is_run(records, tmp_path):
    made = pack(records, 20, workers=0, progress=False)
    index = next(made.folder.glob("index-*.npy"))
    np.save(index, np.asarray([Runs(tmp_path / "ran")], dtype=object), allow_pickle=True)
    with pytest.raises(PackError, match="is damaged"):
        Pack.open(made.folder)
    assert not (tmp_path / "ran").exists()


def test_json_damage(records):
    folder = pack(records, 20, workers=0, progress=False).folder
    (folder / "pack.json").write_text("{")
    with pytest.raises(PackError, match=r"pack.json is damaged .* run `roadmap data pack` again"):
        Pack.open(folder)


def test_pictures_of_a_pack_cannot_be_written(records):
    made = pack(records, 20, workers=0, progress=False)
    with pytest.raises(ValueError, match="read-only"):
        made.picture(0)[0, 0, 0] = 1


def test_arguments_that_are_refused(records):
    with pytest.raises(ValueError, match="side must be at least 1 pixel, got 0"):
        pack(records, 0)
    with pytest.raises(ValueError, match="on_error must be 'raise' or 'skip', got 'ignore'"):
        pack(records, on_error="ignore")


def test_one_process_shows_progress(records, capsys):
    pytest.importorskip("tqdm")
    pack(records, 20, workers=0, progress=True)
    assert "14/14" in capsys.readouterr().err
    pack(records, 20, workers=0)
    assert capsys.readouterr().err == ""  # nobody watches a test
