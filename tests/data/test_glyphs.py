"""The built-in dataset: its shape, its promises, and that it is drawn the same every time."""

from __future__ import annotations

import collections
import hashlib
import shutil
import subprocess
import sys

import numpy as np
import pytest
from PIL import Image

from roadmap.data.batches.samplers import CategoryPairs
from roadmap.data.checking import dataset_report
from roadmap.data.datasets import dataset
from roadmap.data.datasets.glyphs import FACES, FEWEST_PICTURES, RECORDS, _characters, export, glyph_records, script
from roadmap.data.pictures.packs import Pack
from roadmap.data.pictures.policy import fresh_pack
from roadmap.data.records import Records


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("glyphs")


@pytest.fixture(scope="module")
def records(folder):
    return glyph_records(folder)


def test_it_has_the_shape_of_sop(records):
    sizes = np.bincount(records.labels)
    assert len(sizes) > 2_000
    assert sizes.min() >= FEWEST_PICTURES
    assert 10 <= sizes.mean() <= len(FACES) == 12
    assert 10 <= len(records.category_names) <= 16
    train, test = records.split("train"), records.split("test")
    assert set(train.labels.tolist()).isdisjoint(test.labels.tolist())
    assert abs(len(np.unique(train.labels)) - len(np.unique(test.labels))) <= 1
    assert len(CategoryPairs(train.labels, train.categories, batches_per_pair=1)) >= 45  # 16 classes in each


def test_no_picture_has_two_labels_and_none_is_blank(records, folder):
    pack = Pack.open(folder)
    label_of = {}
    for i, label in enumerate(records.labels.tolist()):
        pixels = pack.picture(i)
        assert pixels.shape == (32, 32, 3)
        assert label_of.setdefault(pixels.tobytes(), label) == label
    white = np.full((32, 32, 3), 255, np.uint8).tobytes()
    assert white not in label_of
    assert len(label_of) == len(records)  # no picture twice in its own class either


def test_look_alikes_are_one_class(records):
    codes = {name.split("U+")[1] for name in records.class_names}
    assert "0041" in codes  # Latin A
    assert "0391" not in codes  # Greek Alpha
    assert "0410" not in codes  # Cyrillic A


def test_it_is_drawn_the_same_every_time_and_only_once(records, folder, tmp_path):
    again = glyph_records(tmp_path / "again")
    assert again.paths == records.paths
    assert again.labels.tolist() == records.labels.tolist()
    assert again.splits.tolist() == records.splits.tolist()
    digests = [hashlib.sha256(Pack.open(f).shards[0]).hexdigest() for f in (folder, tmp_path / "again")]
    assert digests[0] == digests[1]
    stamp = (folder / "pack.json").stat().st_mtime_ns
    assert dataset("glyphs", folder).as_dict() == records.as_dict()
    assert (folder / "pack.json").stat().st_mtime_ns == stamp


def test_a_split_finds_its_pictures_whatever_side_is_asked(records, folder):
    test = records.split("test")
    pack = fresh_pack(test, side=256)
    whole = Pack.open(folder)
    place = records.paths.index(test.paths[5])
    np.testing.assert_array_equal(pack.picture(5), whole.picture(place))


def test_it_passes_its_own_check(records):
    report = dataset_report(records)
    assert report.usable
    assert report.leaks == ()
    assert report.singletons == {}


def test_a_damaged_pack_is_drawn_again(records, folder, tmp_path):
    copy = shutil.copytree(folder, tmp_path / "copy")
    shard = next(copy.glob("pixels-*.u8"))
    shard.write_bytes(shard.read_bytes()[:1000])
    assert glyph_records(copy).paths == records.paths
    assert Pack.open(copy).nbytes == Pack.open(folder).nbytes


DAMAGE = {
    "no records": lambda folder: (folder / RECORDS).unlink(),
    "half of the records": lambda folder: (folder / RECORDS).write_bytes((folder / RECORDS).read_bytes()[:1000]),
    "empty records": lambda folder: (folder / RECORDS).write_bytes(b""),
    "records of something else": lambda folder: (folder / RECORDS).write_text('{"name": "other"}'),
    "records of other pictures": lambda folder: cut_records(folder),
    "no pack": lambda folder: (folder / "pack.json").unlink(),
    "half of the pack's index": lambda folder: (folder / "pack.json").write_text('{"format": "roadmap-'),
    "no pixels": lambda folder: next(folder.glob("pixels-*.u8")).unlink(),
}


def cut_records(folder):
    Records.load(folder / RECORDS).select([0, 1, 2]).save(folder / RECORDS)


@pytest.mark.parametrize("name", DAMAGE)
def test_what_is_half_there_is_drawn_again(name, tmp_path, monkeypatch):
    few = {face: frozenset(c for c in _characters(face) if c < 0x100) for face in FACES}
    monkeypatch.setattr("roadmap.data.datasets.glyphs._characters", few.get)
    first = glyph_records(tmp_path)
    size = Pack.open(tmp_path).nbytes
    DAMAGE[name](tmp_path)
    again = glyph_records(tmp_path)
    assert again.as_dict() == first.as_dict()
    assert Pack.open(tmp_path).of(again).nbytes == size
    monkeypatch.setattr("roadmap.data.datasets.glyphs._distinct", None)  # drawn once, not every time
    assert glyph_records(tmp_path).paths == first.paths


DRAW = """
import sys
from pathlib import Path
import roadmap.data.datasets.glyphs as module

module._characters = lambda face, all=module._characters: frozenset(c for c in all(face) if c < 0x180)
if sys.argv[2] == "die":  # after the pictures, in the middle of the records
    import os
    Path.write_text = lambda path, text: (path.write_bytes(text.encode()[:500]), os.kill(os.getpid(), 9))
records = module.glyph_records(Path(sys.argv[1]))
print(len(records), records.splits.tolist().count("test"))
"""


def drawing(folder, *arguments):
    command = [sys.executable, "-c", DRAW, str(folder), *(arguments or ["live"])]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_a_kill_in_the_middle_is_mended_by_the_next_call(tmp_path):
    killed = drawing(tmp_path, "die")
    killed.communicate()
    assert killed.returncode == -9
    assert not (tmp_path / RECORDS).exists()
    said, errors = drawing(tmp_path).communicate()
    assert int(said.split()[0]) > 1_000, errors
    assert Pack.open(tmp_path).keys == Records.load(tmp_path / RECORDS).paths


def test_processes_that_draw_at_once_do_not_harm_each_other(tmp_path):
    processes = [drawing(tmp_path) for _ in range(3)]
    answers = [process.communicate() for process in processes]
    assert len({said for said, _ in answers}) == 1, answers
    assert all(process.returncode == 0 for process in processes), answers
    assert Pack.open(tmp_path).keys == Records.load(tmp_path / RECORDS).paths
    assert not [path for path in tmp_path.iterdir() if "partial" in path.name]


def test_export_writes_png_files_that_read_as_a_folder(records, folder, tmp_path):
    few = records.select(np.concatenate([np.flatnonzero(records.splits == s)[:7] for s in ("train", "test")]))
    export(few, tmp_path)
    read = dataset("folder", tmp_path)
    assert collections.Counter(read.splits.tolist()) == {"train": 7, "test": 7}
    drawn = Image.open(tmp_path / "train" / few.paths[0])
    np.testing.assert_array_equal(np.asarray(drawn), Pack.open(folder).of(few).picture(0))


@pytest.mark.parametrize(
    ("character", "category"),
    [
        *(("a", "latin"), ("β", "greek"), ("Ж", "cyrillic"), ("ჟ", "georgian"), ("→", "arrow"), ("7", "number")),
        *(("!", "punctuation"), ("∑", "mathematics"), ("ʰ", "modifier"), ("€", "symbol"), ("\u0301", "mark")),
    ],
)
def test_scripts(character, category):
    assert script(character) == category


def test_pictures_too_small_to_read_are_refused():
    with pytest.raises(ValueError, match="must be at least 16"):
        glyph_records(size=8)
