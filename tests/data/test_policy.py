"""Which pictures are read from a pack, which are decoded, and the sentence that says so."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from roadmap.data.checking import dataset_report
from roadmap.data.datasets import dataset
from roadmap.data.pictures import packing, policy
from roadmap.data.pictures.compression import QUALITY, SMALLER
from roadmap.data.pictures.contents import PackError
from roadmap.data.pictures.packing import pack, pack_of
from roadmap.data.pictures.packs import pack_folder
from roadmap.data.pictures.policy import drawn_pack, fresh_pack, needed_side, pack_for
from roadmap.data.records import Records

from . import layouts


@pytest.fixture
def records(tmp_path, monkeypatch):
    monkeypatch.setenv("ROADMAP_CACHE", str(tmp_path / "cache"))
    return dataset("folder", layouts.folder_layout(tmp_path / "pictures", classes=3, pictures=2, size=(40, 30)))


@pytest.mark.parametrize("asked", ["auto", "yes"])
def test_a_pack_is_made_once_and_used_again(asked, records):
    made, sentence = pack_for(records, 20, asked, progress=False)
    assert made.folder == pack_folder(records, 20)
    assert sentence == f"pictures read from a pack of side 20, {made.folder}"
    stamp = (made.folder / "pack.json").stat().st_mtime_ns
    again, same = pack_for(records.select([4, 1]), 20, asked, make=False)
    assert (again.folder / "pack.json").stat().st_mtime_ns == stamp
    assert same == sentence
    assert again.keys == (records.paths[4], records.paths[1])


DECODED = "pictures decoded each time, resized to 20 as a pack would hold them"


def test_files_are_decoded_where_no_pack_is_wanted_even_if_one_is_there(records):
    """A run depends on its settings and pictures, not on what lies in the cache."""
    assert pack_for(records, 20, "no") == (None, DECODED)
    assert not pack_folder(records, 20).exists()
    pack(records, 20, workers=0)
    assert pack_for(records, 20, "no") == (None, DECODED)


@pytest.mark.parametrize("asked", ["auto", "yes"])
def test_nothing_is_made_for_a_single_pass(asked, records):
    assert pack_for(records, 20, asked, make=False) == (None, DECODED)
    assert not pack_folder(records, 20).exists()


def test_a_large_pack_is_made_only_on_demand(records, monkeypatch):
    monkeypatch.setattr(policy, "LARGE_PACK", 1000)
    made, sentence = pack_for(records, 20, "auto")
    assert made is None
    assert sentence.startswith(f"{DECODED}: a pack would take about 0 GB of ")
    assert sentence.endswith(" GB free; pack=yes makes it, pack=compressed a smaller one")
    assert pack_for(records, 20, "yes")[0] is not None


def test_half_the_free_disk_is_the_limit(records, monkeypatch):
    size = 4 * len(records) * 20**2
    usage = type("Usage", (), {"free": 2 * (size // SMALLER) - 1})
    monkeypatch.setattr(policy.shutil, "disk_usage", lambda path: usage)
    made, sentence = pack_for(records, 20, "auto")
    assert made is None
    assert sentence.endswith("and a compressed one too much as well; pack=yes or pack=compressed tries it")
    usage.free = 2 * size - 1
    made, sentence = pack_for(records, 20, "auto")
    assert made.quality == QUALITY
    assert made.folder == pack_folder(records, 20, compressed=True)
    assert sentence.startswith("pictures read from a compressed pack of side 20 (6 pictures encoded again as JPEG of ")
    assert sentence.endswith(" GB free as decoded pixels; pack=no decodes the files instead")
    assert pack_for(records, 20, "auto", make=False)[0].quality == QUALITY  # whoever comes later reads the same
    usage.free = 2 * size
    assert pack_for(records, 20, "auto")[0].quality is None


def test_what_is_there_of_a_pack_already_counts_as_free(records, monkeypatch):
    """A pack that was interrupted on a disk that it just fits is continued, not left for one of another kind."""
    there = sum(path.stat().st_size for path in pack(records, 20, workers=0).folder.glob("pixels-*"))
    (pack_folder(records, 20) / "pack.json").unlink()
    usage = type("Usage", (), {"free": 2 * 4 * len(records) * 20**2 - there})
    monkeypatch.setattr(policy.shutil, "disk_usage", lambda path: usage)
    assert pack_for(records, 20, "auto")[0].quality is None
    usage.free -= 1
    (pack_folder(records, 20) / "pack.json").unlink()
    assert pack_for(records, 20, "auto")[0].quality == QUALITY


def test_a_compressed_pack_is_read_where_it_is_asked_for_alone(records):
    made, sentence = pack_for(records, 20, "compressed")
    assert sentence == f"pictures read from a {made.origin}"
    assert pack_for(records, 20, "compressed", make=False)[0].folder == made.folder
    assert pack_for(records, 20, "auto", make=False) == (None, DECODED)
    assert pack_for(records, 20, "auto")[0].quality is None
    assert pack_for(records, 20, "compressed")[0].quality == QUALITY


@pytest.mark.parametrize("asked", ["auto", "yes", "no"])
def test_drawn_pictures_have_no_files_and_always_a_pack(asked, tmp_path):
    few = Records("drawn", tmp_path / "drawn", ("a.png", "b.png"), np.asarray([0, 1]))
    pack_of(iter([np.zeros((8, 8, 3), np.uint8)] * 2), few, 8, few.root)
    found, sentence = pack_for(few.select([1]), 256, asked)
    assert (found.folder, len(found)) == (few.root, 1)
    assert sentence == f"pictures drawn by the program, 8 pixels, read from {few.root}"
    with pytest.raises(PackError, match=r"1 of 1 pictures are not in the pack"):
        pack_for(Records("drawn", few.root, ("c.png",), np.asarray([0])), 256, asked)


@pytest.mark.parametrize("content", ['{"name": "web", "format": "npm"}', "[1]", "no json", "{"])
def test_a_pack_json_of_another_program_changes_nothing(content, records):
    (records.root / "pack.json").write_text(content)
    assert drawn_pack(records) is None
    made, _ = pack_for(records, 20, "yes", progress=False)
    assert made.folder == pack_folder(records, 20)
    assert fresh_pack(records, 20) is not None
    assert dataset_report(records, workers=0).usable


def test_a_pack_beside_the_pictures_does_not_stand_for_their_files(records):
    pack(records, 20, records.root, workers=0)
    assert drawn_pack(records) is None
    assert pack_for(records, 20, "no") == (None, DECODED)


def test_the_side_is_as_large_as_what_is_cut():
    assert needed_side(256, 224, 256) == 256
    assert needed_side(256, 448, 512) == 512
    assert needed_side(256) == 256


def test_an_unknown_policy_is_refused(records):
    with pytest.raises(ValueError, match="pack must be one of auto, yes, no, compressed, got 'maybe'"):
        pack_for(records, 20, "maybe")


def below_a_file(cache, patch):
    cache.write_text("not a folder")
    return "Not a directory"


def not_allowed(cache, patch):
    mkdir = Path.mkdir

    def refusing(self, *arguments, **more):
        if cache in self.parents:
            raise PermissionError(13, "Permission denied", str(self))
        mkdir(self, *arguments, **more)

    patch.setattr(Path, "mkdir", refusing)
    return "Permission denied"


def not_to_be_written(cache, patch):
    def refusing(*arguments):
        raise OSError(30, "Read-only file system")

    patch.setattr(packing, "keep", refusing)
    return "Read-only file system"


@pytest.mark.parametrize("trouble", [below_a_file, not_allowed, not_to_be_written])
def test_auto_decodes_the_files_where_no_pack_can_be_written(trouble, records, tmp_path, monkeypatch):
    cache = tmp_path / "closed"
    monkeypatch.setenv("ROADMAP_CACHE", str(cache))
    why = trouble(cache, monkeypatch)
    said = f"no pack can be written to {pack_folder(records, 20)} ({why}): set ROADMAP_CACHE to a folder where you may"
    found, sentence = pack_for(records, 20, "auto")
    assert found is None
    assert sentence.startswith(f"{DECODED}: {said}")
    for asked in ("yes", "compressed"):
        with pytest.raises(PackError, match=re.escape(f"({why}): set ROADMAP_CACHE to a folder where you may write")):
            pack_for(records, 20, asked)
    few = Records("drawn", cache / "drawn", ("a.png",), np.asarray([0]))
    if trouble is not not_to_be_written:
        with pytest.raises(PackError, match=re.escape(f"({why})")):
            pack_of(iter([np.zeros((8, 8, 3), np.uint8)]), few, 8, few.root)


def test_auto_decodes_the_files_where_the_disk_becomes_full(records, monkeypatch):
    def full(*arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(packing, "keep", full)
    found, sentence = pack_for(records, 20, "auto")
    assert found is None
    assert sentence.startswith(f"{DECODED}: the disk of {pack_folder(records, 20)} is full: free some of it")
    with pytest.raises(PackError, match="is full: free some of it"):
        pack_for(records, 20, "yes")


def test_room_is_counted_while_another_process_is_at_work(records, monkeypatch):
    made = pack(records, 20, workers=0)
    gone = made.folder / "pixels-99999-gone.u8"
    kept = list(made.folder.glob("pixels-*"))
    monkeypatch.setattr(Path, "glob", lambda self, pattern: iter([*kept, gone]))
    monkeypatch.setattr(policy.shutil, "disk_usage", lambda path: type("Usage", (), {"free": 100}))
    assert policy._room(made.folder) == 100 + sum(path.stat().st_size for path in kept)
