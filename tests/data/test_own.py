"""A folder of your own, or a table."""

from __future__ import annotations

import math
import os

import pytest

from roadmap.data.datasets import dataset
from roadmap.data.pictures.packs import picture_key

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


SPLIT_FOLDERS = [
    (("train", "valid", "test"), ("train", "val", "test")),
    (("Train", "Test"), ("train", "test")),
    (("TRAINING", "Validation", "Testing"), ("train", "val", "test")),
    (("train", "dev"), ("train", "val")),
    (("Queries", "Gallery"), ("query", "gallery")),
    (("val", "valid"), ("val",)),
]


@pytest.mark.parametrize(("folders", "splits"), SPLIT_FOLDERS)
def test_splits_are_known_by_their_usual_names(folders, splits, tmp_path):
    records = dataset("folder", touched(tmp_path, *(f"{name}/owl/{name}.jpg" for name in folders)))
    assert records.split_names() == splits
    assert records.class_names == ("owl",)
    assert records.categories is None
    assert records.notes == ()


@pytest.mark.parametrize(
    ("files", "note"),
    [
        (
            ["train/a/1.jpg", "Test/a/1.jpg", "extra/a/1.jpg"],
            "Test, train are not read as splits: extra lies beside them",
        ),
        (
            ["train/1.jpg", "test/1.jpg"],
            "test, train are not read as splits: pictures lie in them without the folder of a class",
        ),
    ],
)
def test_folders_that_only_look_like_splits_are_named(files, note, tmp_path):
    records = dataset("folder", touched(tmp_path, *files))
    assert records.splits is None
    assert records.notes == (note,)


def test_one_folder_named_as_a_split_is_an_ordinary_class(tmp_path):
    assert dataset("folder", touched(tmp_path, "train/1.jpg", "bus/1.jpg")).notes == ()


def test_files_that_are_left_out_are_counted_by_their_endings(tmp_path, monkeypatch):
    monkeypatch.setattr("roadmap.data.datasets.folders.reads_heif", lambda: False)
    files = [f"a/{i}.HEIC" for i in range(7)] + ["b/1.heif", "b/notes.txt", "b/README", ".git/x.json", "b/1.jpg"]
    records = dataset("folder", touched(tmp_path, *files))
    assert records.paths == ("b/1.jpg",)
    assert records.notes == (
        "8 files ignored: .heic, .heif; pip install pillow-heif",
        "2 files ignored: .txt, without an ending",
        "1 folder holds no picture: a",
    )


def test_a_folder_of_nothing_but_heic_says_what_is_missing(tmp_path, monkeypatch):
    monkeypatch.setattr("roadmap.data.datasets.folders.reads_heif", lambda: False)
    with pytest.raises(
        FileNotFoundError, match=r"no pictures below .*; 1 file ignored: .heic; pip install pillow-heif"
    ):
        dataset("folder", touched(tmp_path, "a/1.HEIC"))


def test_heic_is_listed_where_it_can_be_read(tmp_path, monkeypatch):
    monkeypatch.setattr("roadmap.data.datasets.folders.reads_heif", lambda: True)
    records = dataset("folder", touched(tmp_path, "a/1.HEIC", "a/2.jpg"))
    assert records.paths == ("a/1.HEIC", "a/2.jpg")
    assert records.notes == ()


def test_links_that_lead_nowhere_are_named(tmp_path):
    root = touched(tmp_path, "a/1.jpg")
    (root / "a/2.jpg").symlink_to(root / "gone.jpg")
    (root / "a/loop.jpg").symlink_to(root / "a/loop.jpg")
    (root / "b").symlink_to(root / "nowhere")
    records = dataset("folder", root)
    assert records.paths == ("a/1.jpg",)
    assert records.notes == ("3 links lead nowhere: a/2.jpg, a/loop.jpg, b",)


def test_links_to_folders_and_files_are_followed(tmp_path):
    touched(tmp_path / "elsewhere", "owl/1.jpg", "owl/2.jpg", "3.jpg")
    root = touched(tmp_path / "root", "gull/1.jpg")
    (root / "owl").symlink_to(tmp_path / "elsewhere/owl")
    (root / "gull/2.jpg").symlink_to(tmp_path / "elsewhere/3.jpg")
    records = dataset("folder", root)
    assert records.class_names == ("gull", "owl")
    assert records.paths == ("gull/1.jpg", "gull/2.jpg", "owl/1.jpg", "owl/2.jpg")
    assert records.notes == ()


def test_a_folder_that_is_linked_is_read_once_under_its_own_name(tmp_path):
    root = touched(tmp_path / "root", "z/1.jpg", "z/in/1.jpg")
    touched(tmp_path / "elsewhere", "1.jpg")
    (root / "a").symlink_to(root / "z")  # would come first
    (root / "z/in/up").symlink_to(root)  # a loop
    (root / "b").symlink_to(tmp_path / "elsewhere")
    (root / "c").symlink_to(tmp_path / "elsewhere")
    records = dataset("folder", root)
    assert records.paths == ("b/1.jpg", "z/1.jpg", "z/in/1.jpg")
    assert records.notes == ("3 links to folders that are read already: a, c, z/in/up",)


def test_folders_that_may_not_be_read_are_named(tmp_path, monkeypatch):
    root, listed = touched(tmp_path, "a/1.jpg", "b/1.jpg"), os.listdir

    def guarded(path):
        if path == root / "b":
            raise PermissionError(path)
        return listed(path)

    monkeypatch.setattr(os, "listdir", guarded)
    assert dataset("folder", root).notes == ("1 folder may not be read: b",)


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


@pytest.mark.parametrize("separator", [",", ";", "\t", "|"])
def test_columns_may_be_separated_otherwise(separator, tmp_path):
    rows = [
        ["Path", '"Label"', "split"],
        ["a b,c.jpg" if separator != "," else "a b.jpg", "x y", "Train"],
        ["2.jpg", "z", "valid"],
    ]
    (tmp_path / "t.csv").write_text("\n".join(separator.join(row) for row in rows))
    records = dataset("table", tmp_path / "t.csv")
    assert records.paths == (rows[1][0], "2.jpg")
    assert records.class_names == ("x y", "z")
    assert records.splits.tolist() == ["train", "val"]


def test_a_table_as_a_spreadsheet_saves_it(tmp_path):
    """A mark at the beginning, semicolons, quotes where a cell needs them, and Windows ends of lines."""
    text = '\ufeffpath;label;box\r\n"a;1.jpg";x;"1,2,3,4"\r\n2.jpg;x;\r\n'
    (tmp_path / "t.csv").write_bytes(text.encode())
    records = dataset("table", tmp_path / "t.csv")
    assert records.paths == ("a;1.jpg", "2.jpg")
    assert records.boxes[0].tolist() == [1, 2, 3, 4]


@pytest.mark.parametrize("box", ["", "nan nan nan nan", "NaN,NaN,NaN,NaN"])
def test_a_box_that_says_nothing_keeps_the_whole_picture(box, tmp_path):
    (tmp_path / "t.csv").write_text(f'path,label,box\na.jpg,x,"{box}"\nb.jpg,x,1 2 3 4\n')
    assert dataset("table", tmp_path / "t.csv").box(0) is None


def parquet_of(tmp_path, **columns):
    arrow = pytest.importorskip("pyarrow")
    pytest.importorskip("pyarrow.parquet").write_table(arrow.table(columns), tmp_path / "t.parquet")
    return dataset("table", tmp_path / "t.parquet")


def test_what_parquet_says_of_missing_boxes_and_of_numbers(tmp_path):
    boxes = [[math.nan] * 4, None, [1.0, 2.0, 3.0, 4.0]]
    records = parquet_of(tmp_path, path=["a", "b", "c"], label=[1.0, 2.0, 2.0], box=boxes)
    assert records.class_names == ("1", "2")
    assert [records.box(i) for i in range(3)] == [None, None, (1, 2, 3, 4)]


@pytest.mark.parametrize("label", [None, math.nan])
def test_a_missing_label_of_parquet_names_its_row(label, tmp_path):
    with pytest.raises(ValueError, match=r"t.parquet: row 2 has no label"):
        parquet_of(tmp_path, path=["a", "b", "c"], label=[1.0, label, 2.0])


def test_boxes_that_differ_by_less_than_a_pixel_have_keys_of_their_own(tmp_path):
    (tmp_path / "t.csv").write_text("path,label,box\na.jpg,x,0 0 12345.46 9\na.jpg,y,0 0 12345.54 9\n")
    records = dataset("table", tmp_path / "t.csv")
    assert picture_key(records, 0) != picture_key(records, 1)


def test_the_same_picture_may_be_query_and_gallery(tmp_path):
    (tmp_path / "t.csv").write_text("path,label,split\na.jpg,x,query\na.jpg,x,gallery\n")
    assert len(dataset("table", tmp_path / "t.csv")) == 2


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
        ("path,label\n,x\n", "row 1 has no path"),
        ("path,label\na.jpg,x\nb.jpg,\n", "row 2 has no label"),
        ("path,label\na.jpg,x\nb.jpg,NaN\n", r"row 2 has no label \(NaN\)"),
        ("path,label,category\na.jpg,x,\n", "row 1 has no category"),
        ("path,label,split\na.jpg,x,train\nb.jpg,x,\n", "row 2 has no split"),
        ("path;label\na.jpg\n", "line 2: expected 2 columns, got 1"),
        ("path,label\n\n\na.jpg\n", "line 4: expected 2 columns, got 1"),
        ("path,label,box\na.jpg,x,1 2 3 nan\n", "row 1: a box is left, top, right, bottom in pixels, got '1 2 3 nan'"),
        ("path,label,box\na.jpg,x,1 2 3 inf\n", "row 1: a box is left, top, right, bottom in pixels, got '1 2 3 inf'"),
        ("path,label,left,top,right,bottom\na.jpg,x,1,2,3,\n", r"row 1: a box is .* got \('1', '2', '3', ''\)"),
        ("path,label,box\na.jpg,x,1 2 3 4\na.jpg,y,1 2 3 4\n", "rows 1 and 2 both name a.jpg#1,2,3,4; list each"),
        ('path,label,box\na.jpg,x,1 2 3 4\n"a.jpg#1,2,3,4",y,\n', "rows 1 and 2 both name a.jpg#1,2,3,4; list each"),
        ("path,label\na.jpg,x\nb.jpg,x\n./a.jpg,y\n", "rows 1 and 3 both name a.jpg; list each picture once"),
        ("path,label\na.jpg,x\ns/../a.jpg,y\n", "rows 1 and 2 both name s/../a.jpg; list each picture once"),
        ("path,label,Label \na.jpg,x,y\n", r"has two columns 'label' \(capitals do not count\); give each a name of"),
        ("path,label,box\na.jpg,x,1 2 3\n", "row 1: a box is left, top, right, bottom in pixels, got '1 2 3'"),
        ("path,label,box\na.jpg,x,5 5 2 9\n", "must have left < right"),
        ("path,label,left\na.jpg,x,5\n", "not all four"),
        (
            "path,label,split\na.jpg,x,trian\n",
            r"row 1 is of the unknown split 'trian', did you mean 'train'\? Allowed are",
        ),
        ("path,label,split\na.jpg,x,7\n", "row 1 is of the unknown split '7'. Allowed are train, val, test"),
    ],
)
def test_tables_that_are_refused(text, message, tmp_path):
    (tmp_path / "t.csv").write_text(text)
    with pytest.raises(ValueError, match=message):
        dataset("table", tmp_path / "t.csv")


def test_a_table_that_is_no_text(tmp_path):
    (tmp_path / "t.csv").write_bytes("path,label\nß.jpg,x\n".encode("latin1"))
    with pytest.raises(ValueError, match=r"t.csv is not UTF-8 text .*; save it as CSV with UTF-8"):
        dataset("table", tmp_path / "t.csv")


def test_a_whole_path_and_a_relative_one_are_one_picture(tmp_path):
    (tmp_path / "t.csv").write_text(f"path,label\na.jpg,x\n{tmp_path}/a.jpg,y\n")
    with pytest.raises(ValueError, match=rf"rows 1 and 2 both name {tmp_path}/a\.jpg; list each picture once"):
        dataset("table", tmp_path / "t.csv")


@pytest.mark.parametrize("second", ["label", "Label"])
def test_two_columns_of_one_name_in_parquet(second, tmp_path):
    arrow = pytest.importorskip("pyarrow")
    table = arrow.table([["a.jpg"], ["x"], ["y"]], ["path", "label", second])
    pytest.importorskip("pyarrow.parquet").write_table(table, tmp_path / "t.parquet")
    with pytest.raises(ValueError, match=r"t.parquet has two columns 'label'"):
        dataset("table", tmp_path / "t.parquet")


def test_bytes_of_parquet_are_text(tmp_path):
    records = parquet_of(tmp_path, path=[b"a.jpg", "ü.jpg".encode()], label=[b"x", "ß".encode()])
    assert (records.paths, records.class_names) == (("a.jpg", "ü.jpg"), ("x", "ß"))


def test_a_missing_table(tmp_path):
    with pytest.raises(FileNotFoundError, match="columns path and label"):
        dataset("table", tmp_path / "none.csv")
