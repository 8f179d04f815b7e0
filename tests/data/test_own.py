"""A folder of your own, or a table."""

from __future__ import annotations

import math

import pytest

from roadmap.data.datasets import dataset

from . import layouts


def touched(root, *paths):
    for path in paths:
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).touch()
    return root


def test_a_folder_per_class(tmp_path):
    records = dataset("folder", layouts.folder_layout(tmp_path, classes=3, pictures=2))
    assert records.class_names == ("class_0", "class_1", "class_2")
    assert records.labels.tolist() == [0, 0, 1, 1, 2, 2]
    assert records.categories is None
    assert records.splits is None


def test_outer_folders_become_categories(tmp_path):
    root = touched(tmp_path, "shoes/a/1.jpg", "shoes/b/1.PNG", "hats/a/1.webp", "hats/a/readme.txt", ".git/x/1.jpg")
    records = dataset("folder", root)
    assert records.class_names == ("hats/a", "shoes/a", "shoes/b")  # the two a are not the same class
    assert records.category_names == ("hats", "shoes")
    assert records.categories.tolist() == [0, 1, 1]


def test_folders_named_like_splits_are_splits(tmp_path):
    root = touched(tmp_path, "train/a/1.jpg", "query/b/1.jpg", "gallery/b/2.jpg")
    records = dataset("folder", root)
    assert records.split_names() == ("train", "query", "gallery")
    assert records.class_names == ("a", "b")
    assert records.split("query").labels.tolist() == records.split("gallery").labels.tolist() == [1]


@pytest.mark.parametrize(
    ("files", "error", "message"),
    [
        ([], FileNotFoundError, "no pictures below"),
        (["a/1.txt"], FileNotFoundError, "no pictures below"),
        (["a/1.jpg", "loose.jpg"], ValueError, "loose.jpg lies in .* itself"),
    ],
)
def test_folders_that_are_refused(files, error, message, tmp_path):
    with pytest.raises(error, match=message):
        dataset("folder", touched(tmp_path, *files))


CSV = """path,label,category,split,box
a/1.jpg,10,x,train,0 1 2 3
a/2.jpg,9,y,test,
/abs/3.jpg,10,x,train,"4,5,6.5,7"
"""


def test_a_csv(tmp_path):
    (tmp_path / "mine.csv").write_text(CSV)
    records = dataset("table", tmp_path / "mine.csv")
    assert records.name == "mine"
    assert records.class_names == ("9", "10")
    assert records.labels.tolist() == [1, 0, 1]
    assert records.splits.tolist() == ["train", "test", "train"]
    assert records.box(0) == (0, 1, 2, 3)
    assert records.box(1) is None
    assert records.box(2) == (4, 5, 6.5, 7)
    assert records.path(0) == tmp_path / "a/1.jpg"
    assert str(records.path(2)) == "/abs/3.jpg"


def test_parquet_reads_as_csv_does(tmp_path):
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    columns = {
        "path": ["a/1.jpg", "a/2.jpg", "/abs/3.jpg"],
        "label": [10, 9, 10],
        "category": ["x", "y", "x"],
        "split": ["train", "test", "train"],
        "box": [[0.0, 1.0, 2.0, 3.0], None, [4.0, 5.0, 6.5, 7.0]],
    }
    parquet.write_table(arrow.table(columns), tmp_path / "mine.parquet")
    (tmp_path / "mine.csv").write_text(CSV)
    assert str(dataset("table", tmp_path / "mine.parquet").as_dict()) == str(
        dataset("table", tmp_path / "mine.csv").as_dict()
    )


def test_boxes_in_four_columns(tmp_path):
    (tmp_path / "t.csv").write_text("path,label,left,top,right,bottom\na.jpg,x,1,2,3,4\nb.jpg,x,,,,\n")
    records = dataset("table", tmp_path / "t.csv")
    assert records.boxes[0].tolist() == [1, 2, 3, 4]
    assert math.isnan(records.boxes[1, 0])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty; its first line must name the columns"),
        ("path,class\na,b\n", r"no column \['label'\]; it has \['class', 'path'\]"),
        ("path,label\na.jpg\n", "line 2: expected 2 columns, got 1"),
        ("path,label\n,x\n", "row 1 has no path or no label"),
        ("path,label,box\na.jpg,x,1 2 3\n", "row 1: a box is left, top, right, bottom in pixels, got '1 2 3'"),
        ("path,label,box\na.jpg,x,5 5 2 9\n", "must have left < right"),
        ("path,label,left\na.jpg,x,5\n", "not all four"),
        ("path,label,split\na.jpg,x,training\n", r"unknown splits \['training'\]"),
    ],
)
def test_tables_that_are_refused(text, message, tmp_path):
    (tmp_path / "t.csv").write_text(text)
    with pytest.raises(ValueError, match=message):
        dataset("table", tmp_path / "t.csv")


def test_a_missing_table(tmp_path):
    with pytest.raises(FileNotFoundError, match="columns path and label"):
        dataset("table", tmp_path / "none.csv")
