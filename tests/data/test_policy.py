"""Which pictures are read from a pack, which are decoded, and the sentence that says so."""

from __future__ import annotations

import numpy as np
import pytest

from roadmap.data.checking import dataset_report
from roadmap.data.datasets import dataset
from roadmap.data.pictures import policy
from roadmap.data.pictures.packing import pack, pack_of
from roadmap.data.pictures.packs import PackError, drawn_pack, fresh_pack, pack_folder
from roadmap.data.pictures.policy import needed_side, pack_for
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
    assert sentence.endswith(" GB free; pack=yes makes it")
    assert pack_for(records, 20, "yes")[0] is not None


def test_half_the_free_disk_is_the_limit(records, monkeypatch):
    free = 2 * 4 * len(records) * 20**2
    usage = type("Usage", (), {"free": free - 1})
    monkeypatch.setattr(policy.shutil, "disk_usage", lambda path: usage)
    assert pack_for(records, 20, "auto")[0] is None
    usage.free = free
    assert pack_for(records, 20, "auto")[0] is not None


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
    with pytest.raises(ValueError, match="pack must be one of auto, yes, no, got 'maybe'"):
        pack_for(records, 20, "maybe")
