"""The pictures of a run are stored with it: whatever happens to the folder, nothing is drawn again."""

from __future__ import annotations

import dataclasses
import gzip
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from roadmap.config.settings import Settings
from roadmap.data import UNLABELLED, Records
from roadmap.runs import Run, division


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run.create(Settings(out=str(tmp_path)))


def records(names: dict[str, str], splits: str = "", **more: Any) -> Records:
    """Path -> class name; splits by their first letters, such as "ttv" for train, train, val."""
    classes = sorted(set(names.values()))
    full = {"t": "train", "v": "val", "e": "test"}
    return Records(
        name="mine",
        root=Path("/pictures"),
        paths=tuple(names),
        labels=np.asarray([classes.index(name) for name in names.values()]),
        class_names=tuple(classes),
        splits=np.asarray([full[letter] for letter in splits]) if splits else None,
        **more,
    )


BEFORE = {"b/1": "b", "b/2": "b", "c/1": "c", "c/2": "c", "d/1": "d", "d/2": "d"}


def test_the_table_is_plain(run: Run) -> None:
    run.save_division(records({"a/1.png": "a", 'odd, "b"/2.png': "odd"}, "te"))
    text = (run.folder / "pictures.csv").read_text()
    assert text == 'id,class,split\na/1.png,a,train\n"odd, ""b""/2.png",odd,test\n'


def test_pictures_come_back_in_the_order_and_the_splits_of_the_run(run: Run) -> None:
    run.save_division(records(BEFORE, "ttvvee"))
    shuffled = dict(reversed(BEFORE.items()))
    found, sentences = run.division(records(shuffled))
    assert sentences == []
    assert found.paths == tuple(BEFORE)
    assert found.splits is not None
    assert found.splits.tolist() == ["train", "train", "val", "val", "test", "test"]
    assert [found.class_names[label] for label in found.labels] == list(BEFORE.values())


def test_where_nothing_was_stored_the_pictures_are_as_they_came(run: Run) -> None:
    came = records(BEFORE, "tttttt")
    assert run.division(came) == (came, [])


def test_splits_that_the_folder_now_has_do_not_count(run: Run) -> None:
    run.save_division(records(BEFORE, "ttvvee"))
    found, _ = run.division(records(BEFORE, "eettvv"))
    assert found.splits is not None
    assert found.splits.tolist() == ["train", "train", "val", "val", "test", "test"]


def test_what_is_missing_and_what_is_new_is_said(run: Run) -> None:
    run.save_division(records(BEFORE, "ttvvee"))
    now = {"a/1": "a", "a/2": "a", "a/3": "a", "a/4": "a", "b/1": "b", "c/2": "c", "d/1": "d", "d/2": "d"}
    found, sentences = run.division(records(now))
    assert found.paths == ("b/1", "c/2", "d/1", "d/2")
    assert [found.class_names[label] for label in found.labels] == ["b", "c", "d", "d"]
    assert sentences == [
        "1 of the 2 train pictures of the run is missing (b/2)",
        "1 of the 2 val pictures of the run is missing (c/1)",
        "4 pictures are new since the run began and left out (a/1, a/2, a/3, ...)",
    ]


def test_another_label_for_the_same_picture_is_said(run: Run) -> None:
    run.save_division(records(BEFORE, "ttvvee"))
    found, sentences = run.division(records(BEFORE | {"d/2": "c"}))
    assert found.class_names[found.labels[-1]] == "c"
    assert sentences == [
        "1 picture has another class than in the run; the class of now counts (d/2: 'd' then, 'c' now)"
    ]


def test_a_picture_that_is_listed_twice(run: Run) -> None:
    """Tables may do so, with a class for each."""
    names = Records("mine", Path("/p"), ("x", "x", "y"), np.asarray([0, 1, 1]), ("a", "b"))
    run.save_division(dataclasses.replace(names, splits=np.asarray(["train", "test", "test"])))
    found, sentences = run.division(names)
    assert found.splits is not None
    assert (found.splits.tolist(), sentences) == (["train", "test", "test"], [])
    assert found.labels.tolist() == [0, 1, 1]


def test_pictures_cut_to_boxes_are_named_with_them(run: Run) -> None:
    boxes = np.asarray([[0, 0, 4, 4], [4, 0, 8, 4], [0, 0, 8, 8]])
    both = Records("mine", Path("/p"), ("x", "x", "y"), np.asarray([0, 1, 1]), ("a", "b"), boxes=boxes, crop=True)
    run.save_division(dataclasses.replace(both, splits=np.asarray(["train", "test", "test"])))
    found, sentences = run.division(both.select([1, 2]))
    assert found.splits is not None
    assert found.splits.tolist() == ["test", "test"]
    assert sentences == ["1 of the 1 train pictures of the run is missing (x#0,0,4,4)"]


def test_pictures_without_a_class_or_without_names(run: Run) -> None:
    bare = Records("mine", Path("/p"), ("x", "y"), np.asarray([UNLABELLED, 7]), splits=np.asarray(["train", "test"]))
    run.save_division(bare)
    assert (run.folder / "pictures.csv").read_text() == "id,class,split\nx,,train\ny,7,test\n"
    assert run.division(bare)[1] == []


def test_names_that_are_no_text(run: Run) -> None:
    odd = os.fsdecode(b"caf\xe9/1\r\n2.png")
    run.save_division(records({odd: "a", "b": "b"}, "te"))
    assert run.division(records({odd: "a", "b": "b"}))[0].split("train").paths == (odd,)


def test_a_long_table_is_compressed(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(division, "LARGE", 6)
    run.save_division(records(BEFORE, "ttvvee"))
    assert not (run.folder / "pictures.csv").exists()
    packed = (run.folder / "pictures.csv.gz").read_bytes()
    assert gzip.decompress(packed).startswith(b"id,class,split\nb/1,b,train\n")
    run.save_division(records(BEFORE, "ttvvee"))
    assert (run.folder / "pictures.csv.gz").read_bytes() == packed
    assert run.division(records(BEFORE))[0].split("test").paths == ("d/1", "d/2")


def test_another_folder_is_refused(run: Run) -> None:
    run.save_division(records(BEFORE, "ttvvee"))
    with pytest.raises(ValueError, match=r"none of the 6 pictures of the run is below /pictures \(b/1, b/2, c/1, ...\); is it another folder"):  # fmt: skip  # noqa: E501
        run.division(records({"x": "a", "y": "b"}))


def test_pictures_without_splits_are_not_stored(run: Run) -> None:
    with pytest.raises(ValueError, match="mine has no splits to be stored"):
        run.save_division(records(BEFORE))


@pytest.mark.parametrize("damage", ["", "id,class\na,b\n", "id,class,split\na,b\n"])
def test_a_damaged_table_is_no_table(run: Run, damage: str) -> None:
    (run.folder / "pictures.csv").write_text(damage)
    with pytest.raises(ValueError, match=r"pictures.csv is damaged, the pictures of the run are not known"):
        run.division(records(BEFORE))


def test_the_table_is_whole_or_not_there(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def killed(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        run.save_division(records(BEFORE, "ttvvee"))
    assert not list(run.folder.glob("*pictures*"))
