"""Each reader against a miniature of its original layout, and the real lists where they are at hand."""

from __future__ import annotations

import pickle
import shutil
import tarfile
from pathlib import Path

import numpy as np
import pytest

from roadmap.config.settings import SettingError
from roadmap.data.checking import dataset_report
from roadmap.data.datasets import READERS, SOURCES, dataset, explanation
from roadmap.data.datasets.sfm import picture_path
from roadmap.data.pictures.images import picture
from roadmap.data.pictures.packs import picture_key
from roadmap.data.records import UNLABELLED

from . import layouts

BUILDERS = {
    "cub": layouts.cub_layout,
    "sop": layouts.sop_layout,
    "inaturalist": lambda root: layouts.inaturalist_layout(root, lists=True),
    "inshop": layouts.inshop_layout,
    "cars": lambda root: layouts.cars_layout(root, devkit=False),
    "sfm120k": layouts.sfm_layout,
    "roxford5k": layouts.revisited_layout,
    "rparis6k": lambda root: layouts.revisited_layout(root, "rparis6k"),
}


def test_every_dataset_has_a_reader_a_source_and_a_miniature():
    assert set(BUILDERS) == set(SOURCES)
    assert set(READERS) == set(SOURCES) | {"glyphs", "folder", "table"}


@pytest.mark.parametrize("name", BUILDERS)
def test_every_file_is_found_and_decoded_and_nothing_is_moved(name, tmp_path):
    root = BUILDERS[name](tmp_path)
    before = sorted(tmp_path.rglob("*"))
    records = dataset(name, root)
    report = dataset_report(records, workers=0)
    assert len(records) > 0
    assert report.missing == ()
    assert report.unreadable == {}
    assert sorted(tmp_path.rglob("*")) == before
    train = set(records.labels[records.splits == "train"].tolist())
    assert train.isdisjoint(records.labels[records.splits != "train"].tolist())


@pytest.mark.parametrize("name", [name for name in BUILDERS if SOURCES[name].folders])
def test_root_may_be_the_parent_of_the_archives_own_folder(name, tmp_path):
    inner = BUILDERS[name](tmp_path / "x") if name in ("cub", "sop", "inshop", "roxford5k", "rparis6k") else None
    if inner is None:
        BUILDERS[name](tmp_path / "x" / SOURCES[name].folders[0])
        inner = tmp_path / "x" / SOURCES[name].folders[0]
    assert dataset(name, tmp_path / "x").paths == dataset(name, inner).paths


@pytest.mark.parametrize("name", BUILDERS)
def test_a_wrong_folder_is_answered_with_where_to_get_it_and_what_is_expected(name, tmp_path):
    with pytest.raises(FileNotFoundError) as caught:
        dataset(name, tmp_path)
    assert str(tmp_path) in str(caught.value)
    assert SOURCES[name].obtained in str(caught.value)
    assert SOURCES[name].layout in str(caught.value)


@pytest.mark.parametrize("name", [*BUILDERS, "folder", "table"])
def test_a_root_that_is_missing_is_asked_for_by_the_name_of_its_setting(name):
    with pytest.raises(SettingError, match=r"data.root is missing: give data.root=FOLDER. .*ROOT") as caught:
        dataset(name)
    assert caught.value.field == "data.root"
    assert str(caught.value).endswith(explanation(name))


def test_unknown_names_are_answered_with_the_nearest():
    with pytest.raises(ValueError, match=r"unknown dataset 'cubs', did you mean 'cub'\?"):
        dataset("cubs", Path())


def test_cub_by_hand(tmp_path):
    records = dataset("cub", layouts.cub_layout(tmp_path))
    assert records.paths[4] == "images/101.Wren/bird_5.jpg"
    assert records.labels.tolist() == [0, 0, 1, 1, 2, 2]
    assert records.splits.tolist() == ["train"] * 4 + ["test"] * 2
    assert records.class_names == ("001.Albatross", "002.Auk", "101.Wren")
    assert records.boxes[4].tolist() == [2, 3, 12, 8]  # x, y, width 10, height 5
    assert not records.crop
    assert records.box(4) is None  # boxes are known but the paper does not cut to them


def test_cub_without_a_class_names_the_picture(tmp_path):
    root = layouts.cub_layout(tmp_path)
    (root / "image_class_labels.txt").write_text("1 1\n2 1\n3 2\n4 2\n5 101\n")
    with pytest.raises(ValueError, match="no class for picture 6"):
        dataset("cub", root)


def test_sop_by_hand(tmp_path):
    records = dataset("sop", layouts.sop_layout(tmp_path, pictures=False))
    assert len(records) == 36
    assert records.category_names == ("bicycle", "cabinet", "chair")
    assert records.paths[3] == "bicycle_final/1112_0.JPG"
    assert (records.labels[3], records.categories[3]) == (1, 0)
    assert records.split("test").labels.min() == 6


@pytest.mark.parametrize("name", BUILDERS)
def test_every_class_has_a_name_of_its_own(name, tmp_path):
    records = dataset(name, BUILDERS[name](tmp_path))
    labels = records.labels[records.labels != UNLABELLED]
    assert len(set(records.class_names)) == len(records.class_names) == labels.max() + 1
    assert all(records.class_names)
    keys = [picture_key(records, i) for i in range(len(records))]
    assert len(set(keys)) == len(keys)


NAMES = {
    "cub": ("001.Albatross", "101.Wren"),
    "sop": ("1", "12"),
    "inaturalist": ("100", "109"),
    "inshop": ("id_00000002", "id_00000080"),
    "cars": ("Car 1", "Car 99"),
    "sfm120k": ("train/0", "val/0"),
    "roxford5k": ("all_souls", "radcliffe_camera"),
    "rparis6k": ("all_souls", "radcliffe_camera"),
}


@pytest.mark.parametrize("name", BUILDERS)
def test_classes_keep_the_names_of_their_authors(name, tmp_path):
    records = dataset(name, BUILDERS[name](tmp_path))
    assert (records.class_names[0], records.class_names[-1]) == NAMES[name]


def test_a_broken_line_of_a_list_is_named(tmp_path):
    root = layouts.sop_layout(tmp_path, pictures=False)
    (root / "Ebay_test.txt").write_text("image_id class_id super_class_id path\n1 2 3\n")
    with pytest.raises(ValueError, match=r"Ebay_test.txt, line 2: expected 4 columns, got '1 2 3'"):
        dataset("sop", root)


def test_inaturalist_by_the_published_lists(tmp_path):
    records = dataset("inaturalist", layouts.inaturalist_layout(tmp_path, lists=True))
    assert records.notes == ()
    assert (len(records.split("train")), len(records.split("test"))) == (12, 8)
    assert records.category_names == ("Aves", "Fungi")
    assert records.class_names[records.labels[0]] == "100"


def test_inaturalist_without_lists_splits_classes_70_30_and_says_so(tmp_path):
    root = layouts.inaturalist_layout(tmp_path, lists=False)
    with pytest.warns(UserWarning, match="not comparable with published"):
        records = dataset("inaturalist", root)
    assert len(records) == 20
    assert 2 <= len(np.unique(records.split("test").labels)) <= 5
    assert "70/30" in records.notes[0]
    with pytest.warns(UserWarning, match="70/30"):
        again = dataset("inaturalist", root)
    assert again.splits.tolist() == records.splits.tolist()


def test_inshop_by_hand(tmp_path):
    records = dataset("inshop", layouts.inshop_layout(tmp_path))
    assert records.splits.tolist() == ["train", "train", "query", "gallery", "gallery"]
    assert records.paths[0] == "Img/img/WOMEN/Dresses/id_00000002/02_1_front.jpg"
    assert records.category_names == ("MEN/Denim", "WOMEN/Dresses")
    assert records.boxes[0].tolist() == [2, 3, 12, 14]
    queries, gallery = records.evaluation()
    assert (len(queries), len(gallery)) == (1, 2)


def test_inshop_without_pictures_says_which_folder(tmp_path):
    root = layouts.inshop_layout(tmp_path)
    (root / "Img").rename(root / "elsewhere")
    with pytest.raises(FileNotFoundError, match="no Img/img/"):
        dataset("inshop", root)


@pytest.mark.parametrize("devkit", [False, True])
def test_cars_by_hand(devkit, tmp_path):
    records = dataset("cars", layouts.cars_layout(tmp_path, devkit))
    assert records.labels.tolist() == [0, 1, 2, 2, 0, 1]
    assert records.splits.tolist() == ["train", "train", "test", "test", "train", "train"]
    assert records.class_names == ("Car 1", "Car 2", "Car 99")
    assert records.paths[0] == ("cars_train/00001.jpg" if devkit else "car_ims/000001.jpg")
    assert records.boxes[0].tolist() == [1, 2, 11, 12]


def test_sfm_keeps_models_of_the_two_splits_apart(tmp_path):
    records = dataset("sfm120k", layouts.sfm_layout(tmp_path))
    assert picture_path("aa00112233") == "ims/33/22/11/aa00112233"
    assert records.class_names == ("train/0", "train/1", "val/0")
    assert records.labels.tolist() == [0, 0, 1, 2, 2]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([], "must hold a dict with 'train' and 'val'"),
        ({"train": 1, "val": {}}, "train must be a dict with lists 'cids' and 'cluster'"),
        ({"train": {"cids": ["aa0011"], "cluster": []}, "val": {}}, "train has 1 pictures but 0 clusters"),
        ({"train": {"cids": ["aa0011"], "cluster": [0.5]}, "val": {}}, "not whole numbers"),
        (
            {"train": {"cids": ["../../etc/x"], "cluster": [0]}, "val": {}},
            "names a picture '../../etc/x'",
        ),
    ],
)
def test_lists_of_another_shape_are_refused(content, message, tmp_path):
    (tmp_path / "retrieval-SfM-120k.pkl").write_bytes(pickle.dumps(content))
    with pytest.raises(ValueError, match=message):
        dataset("sfm120k", tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"gnd": None}, "is not the ground truth of revisited landmarks"),
        ({"gnd": [{"easy": [0]}]}, "expected a dict with qimlist, imlist, and gnd"),
        ({"qimlist": ["a_1"]}, "1 queries but ground truth for 2"),
        ({"imlist": ["a_1", "b_1"]}, "names a picture 2 of a gallery of 2"),
    ],
)
def test_ground_truth_of_another_shape_is_refused(change, message, tmp_path):
    file = layouts.revisited_layout(tmp_path) / "gnd_roxford5k.pkl"
    file.write_bytes(pickle.dumps(pickle.loads(file.read_bytes()) | change))
    with pytest.raises(ValueError, match=message):
        dataset("roxford5k", file.parent)


def test_revisited_queries_are_cut_to_their_boxes(tmp_path):
    records = dataset("roxford5k", layouts.revisited_layout(tmp_path))
    queries, gallery = records.evaluation()
    assert (len(queries), len(gallery)) == (2, 3)
    assert records.class_names == ("all_souls", "radcliffe_camera")
    assert gallery.labels.tolist() == [UNLABELLED] * 3
    assert picture(records.path(0), records.box(0)).shape == (20, 21, 3)  # 4.4..24.6 x 5..25, rounded
    assert picture(records.path(2), records.box(2)).shape == (30, 40, 3)
    assert records.ground_truth[0]["junk"].tolist() == [2]


def test_real_cub_lists(outside_data):
    records = dataset("cub", outside_data / "cub")
    assert len(records.split("train")) == 5_864
    assert len(records.split("test")) == 5_924
    assert len(records.class_names) == 200
    assert records.class_names[199] == "200.Common_Yellowthroat"


def test_real_cub_pictures(outside_data, tmp_path):
    """WebP under .jpg names, shorter side at most 256; the lists and the archive agree."""
    with tarfile.open(outside_data / "cub" / "images-0.tar") as archive:
        members = [archive.next() for _ in range(40)]
        archive.extractall(tmp_path, members, filter="data")
    for name in outside_data.joinpath("cub").glob("*.txt"):
        shutil.copy(name, tmp_path)
    records = dataset("cub", tmp_path)
    here = [i for i in range(len(records)) if records.path(i).is_file()]
    assert len(here) == sum(member.isfile() for member in members)
    assert max(min(picture(records.path(i)).shape[:2]) for i in here) == 256


def test_real_roxford5k_as_it_unpacks(outside_data, tmp_path):
    """The first pictures of the archive; all of them are decoded by `roadmap data check roxford5k`."""
    with tarfile.open(outside_data / "roxford5k" / "images-0.tar") as archive:
        members = [archive.next() for _ in range(60)]
        archive.extractall(tmp_path, members, filter="data")
    shutil.copy(outside_data / "roxford5k" / "gnd_roxford5k.pkl", tmp_path)
    records = dataset("roxford5k", tmp_path)
    report = dataset_report(records, workers=0)
    assert (len(records), report.wrong_counts, report.unreadable) == (5_063, (), {})
    here = sum(member.isfile() for member in members)
    assert len(report.missing) == 5_063 - here
    assert here >= 50
    queries = records.split("query")
    assert len(queries.class_names) == 12  # 11 landmarks, and a query that is named after the city alone
    assert np.isfinite(queries.boxes).all()


def test_real_roxford5k_names_every_picture_of_its_archive(outside_data):
    records = dataset("roxford5k", outside_data / "roxford5k")
    with tarfile.open(outside_data / "roxford5k" / "images-0.tar") as archive:
        names = {member.name.removeprefix("./") for member in archive if member.isfile()}
    assert set(records.paths) <= names


def test_real_sop_lists(outside_data):
    records = dataset("sop", outside_data / "sop")
    for split, (pictures, classes) in SOURCES["sop"].published.items():
        assert len(records.split(split)) == pictures
        assert len(np.unique(records.split(split).labels)) == classes
    assert len(records.category_names) == 12


@pytest.mark.parametrize(("name", "totals"), [("roxford5k", (3029, 2497, 1356)), ("rparis6k", (6874, 10350, 7153))])
def test_real_revisited_ground_truth(name, totals, outside_data):
    records = dataset(name, outside_data / "revisited")
    for split, (pictures, _) in SOURCES[name].published.items():
        assert len(records.split(split)) == pictures
    found = tuple(sum(len(query[kind]) for query in records.ground_truth) for kind in ("easy", "hard", "junk"))
    assert found == totals
