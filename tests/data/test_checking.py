"""`dataset_report`: what it finds, by hand."""

from __future__ import annotations

import dataclasses
import shutil

import pytest

from roadmap.data.checking import dataset_report
from roadmap.data.datasets import SOURCES, dataset

from . import layouts


def test_counts_are_compared_with_the_published_ones(tmp_path):
    report = dataset_report(dataset("cub", layouts.cub_layout(tmp_path)), workers=0)
    assert not report.usable
    assert report.wrong_counts == (
        "train: 4 pictures, 2 classes, published 5,864 pictures, 100 classes",
        "test: 2 pictures, 1 class, published 5,924 pictures, 100 classes",
    )
    assert report.lines()[-1] == "cub is NOT USABLE (every file decoded)"


def test_the_right_counts_are_usable(tmp_path, monkeypatch):
    right = dataclasses.replace(SOURCES["cub"], published={"train": (4, 2), "test": (2, 1)})
    monkeypatch.setitem(SOURCES, "cub", right)
    report = dataset_report(dataset("cub", layouts.cub_layout(tmp_path)), workers=0)
    assert report.usable
    assert report.lines()[-1] == "cub is usable (every file decoded)"


def test_a_split_of_our_own_is_compared_by_its_sums(tmp_path):
    with pytest.warns(UserWarning, match="70/30"):
        records = dataset("inaturalist", layouts.inaturalist_layout(tmp_path, lists=False))
    report = dataset_report(records, decode=False)
    assert report.published == {"all": (461_939, 8_142)}
    assert report.counts["all"] == (20, 10)
    assert any(line.startswith("note: ") for line in report.lines())


def test_landmarks_are_counted_without_classes(tmp_path, monkeypatch):
    right = dataclasses.replace(SOURCES["roxford5k"], published={"query": (2, 0), "gallery": (3, 0)})
    monkeypatch.setitem(SOURCES, "roxford5k", right)
    report = dataset_report(dataset("roxford5k", layouts.revisited_layout(tmp_path)), workers=0)
    assert report.usable
    assert report.singletons == {}


@pytest.mark.parametrize("workers", [0, 2])
def test_missing_and_unreadable_files_are_named(workers, tmp_path):
    records = dataset("folder", layouts.folder_layout(tmp_path, classes=30, pictures=5))
    records.path(1).unlink()
    records.path(2).write_bytes(records.path(2).read_bytes()[:100])
    report = dataset_report(records, workers=workers)
    assert report.missing == (records.paths[1],)
    assert list(report.unreadable) == [records.paths[2]]
    assert not report.usable
    assert f"MISSING {records.paths[1]}" in report.lines()
    assert any(line.startswith(f"UNREADABLE {records.paths[2]}: truncated") for line in report.lines())
    quick = dataset_report(records, decode=False)
    assert quick.unreadable == {}
    assert "not decoded" in quick.lines()[-1]


def test_boxes_outside_their_picture_are_unreadable(tmp_path):
    records = dataset("folder", layouts.folder_layout(tmp_path, classes=1, pictures=2))
    boxed = dataclasses.replace(records, boxes=[[0, 0, 5, 5], [100, 100, 110, 110]], crop=True)
    assert list(dataset_report(boxed, workers=0).unreadable) == [records.paths[1]]


def test_singletons_are_told_by_split_and_do_not_make_it_unusable(tmp_path):
    root = layouts.folder_layout(tmp_path / "train", classes=2, pictures=2).parent
    layouts.write_picture(root / "train/lonely/1.png", 77)
    layouts.write_picture(root / "test/alone/1.png", 78)
    report = dataset_report(dataset("folder", root), workers=0)
    assert report.singletons == {"train": ("lonely",), "test": ("alone",)}
    assert report.usable


ONE = "TOO FEW CLASSES: 1 class has two or more pictures to train with; training compares at least two such classes"
NONE = ONE.replace("1 class", "no class")
SAME = "TOO FEW CLASSES: of one class, every answer to a search is right"


@pytest.mark.parametrize(
    ("files", "said"),
    [
        (["a/1", "a/2", "a/3"], ONE),
        (["a/1", "a/2", "b/1"], ONE),
        (["a/1", "b/1", "c/1"], NONE),
        (["a/1", "a/2", "b/1", "b/2"], None),
        (["train/a/1", "train/a/2", "test/b/1", "test/b/2"], ONE),
        (["train/a/1", "train/b/1", "test/a/2", "test/b/2"], NONE),
        (["train/a/1", "train/a/2", "train/b/1", "train/b/2", "test/c/1"], None),
        (["test/a/1", "test/a/2"], SAME),
        (["query/a/1", "gallery/a/2"], SAME),
        (["query/a/1", "gallery/a/2", "gallery/b/1"], None),
    ],
)
def test_fewer_than_two_classes_are_nothing_to_compare(files, said, tmp_path):
    for seed, name in enumerate(files):
        layouts.write_picture(tmp_path / f"{name}.png", seed)
    report = dataset_report(dataset("folder", tmp_path), workers=0)
    assert report.usable is (said is None)
    found = [line for line in report.lines() if line.startswith("TOO FEW")]
    assert len(found) == (said is not None)
    assert all(line.startswith(said) for line in found)
    assert ("NOT USABLE" in report.lines()[-1]) is (said is not None)


def test_pictures_without_a_label_are_no_class(tmp_path):
    records = dataset("folder", layouts.folder_layout(tmp_path, classes=2, pictures=2))
    assert dataset_report(records, decode=False).usable
    assert not dataset_report(dataclasses.replace(records, labels=[0, 0, -1, -1]), decode=False).usable


def test_what_is_no_file_is_unreadable_and_no_leak(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    (tmp_path / "t.csv").write_text("path,label,split\na,x,train\nb,x,test\n")
    report = dataset_report(dataset("table", tmp_path / "t.csv"), workers=0)
    assert report.unreadable == dict.fromkeys("ab", "cannot be read (Is a directory)")
    assert report.leaks == ()


def test_the_same_picture_in_train_and_test_is_found_by_content(tmp_path):
    root = layouts.folder_layout(tmp_path / "train", classes=2, pictures=2).parent
    layouts.folder_layout(tmp_path / "query", classes=1, pictures=2, size=(41, 30))
    shutil.copy(root / "train/class_0/1.png", root / "query/class_0/another_name.png")
    shutil.copy(root / "train/class_0/1.png", root / "train/class_1/twin.png")  # within train: no leak
    report = dataset_report(dataset("folder", root), workers=0)
    copy = "query/class_0/another_name.png"
    assert report.leaks == (("train/class_0/1.png", copy), ("train/class_1/twin.png", copy))
    assert report.usable


def test_a_single_copy_is_enough(tmp_path):
    layouts.write_picture(tmp_path / "train/a/1.png", 1, (30, 30))
    layouts.write_picture(tmp_path / "test/b/other.png", 2, (20, 20))
    shutil.copy(tmp_path / "train/a/1.png", tmp_path / "test/b/copy.png")
    assert dataset_report(dataset("folder", tmp_path), workers=0).leaks == (("train/a/1.png", "test/b/copy.png"),)


def test_long_lists_are_cut(tmp_path):
    records = dataset("folder", layouts.folder_layout(tmp_path, classes=5, pictures=5))
    for i in range(25):
        records.path(i).unlink()
    lines = [line for line in dataset_report(records).lines() if line.startswith("MISSING")]
    assert len(lines) == 11
    assert lines[-1] == "MISSING ... and 15 more"
