"""Records: selection, splits by class, and what is refused."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from roadmap.data.records import Records, numbers_of


def records(labels, **fields) -> Records:
    labels = np.asarray(labels)
    names = tuple(f"c{i}" for i in range(int(labels.max(initial=0)) + 1))
    fields = {"class_names": names, **fields}
    return Records("toy", "somewhere", tuple(f"{i}.jpg" for i in range(len(labels))), labels, **fields)


def test_select_by_mask_and_by_position_agree():
    whole = records([0, 1, 1, 2], boxes=np.arange(16.0).reshape(4, 4), categories=[0, 1, 1, 0], splits=["train"] * 4)
    by_mask = whole.select([False, True, False, True])
    by_position = whole.select([1, 3])
    assert by_mask.as_dict() == by_position.as_dict()
    assert by_mask.paths == ("1.jpg", "3.jpg")
    assert by_mask.boxes[1].tolist() == [12, 13, 14, 15]
    assert whole.select([3, 0]).labels.tolist() == [2, 0]


@given(st.lists(st.integers(0, 30), min_size=2, max_size=80), st.floats(0.05, 0.95), st.integers(0, 5))
def test_a_class_is_never_on_both_sides(labels, test, seed):
    if len(set(labels)) < 2:
        labels = [*labels, 31]
    split = records(labels).split_by_class(test, seed)
    train, held = (set(split.labels[split.splits == side].tolist()) for side in ("train", "test"))
    assert not train & held
    assert train | held == set(labels)
    assert min(len(train), len(held)) >= min(2, len(set(labels)) // 2)
    assert split.splits.tolist() == records(labels).split_by_class(test, seed).splits.tolist()


def test_pictures_without_a_class_are_not_drawn():
    split = records([-1, 0, 1, 2, 3, -1]).split_by_class(0.9).hold_out_classes(0.5)
    assert split.splits[[0, 5]].tolist() == ["train", "train"]
    assert records([-1, 0, 0, 0, 0, 0]).split_within_classes(0.5).splits[0] == "train"


def test_seeds_draw_different_classes():
    labels = np.arange(40)
    draws = {tuple(records(labels).split_by_class(0.5, seed).splits) for seed in range(20)}
    assert len(draws) == 20


def test_validation_is_taken_from_training_classes_only():
    split = records(np.repeat(np.arange(20), 3)).split_by_class(0.5)
    held = split.hold_out_classes(0.2)
    assert held.splits[split.splits == "test"].tolist() == ["test"] * int((split.splits == "test").sum())
    assert 2 <= len(np.unique(held.split("val").labels)) <= 5
    assert set(held.split("val").labels.tolist()).isdisjoint(held.split("train").labels.tolist())


def test_singletons_by_hand():
    assert records([3, 1, 1, 0, 3, 2]).singletons().tolist() == [0, 2]


def test_json_round_trip(tmp_path):
    whole = records(
        [0, 1, -1],
        boxes=[[0, 1, 2, 3], [np.nan] * 4, [4, 5, 6, 7]],
        crop=True,
        splits=["query", "query", "gallery"],
        ground_truth=({"easy": np.asarray([0])},),
        notes=("said",),
    )
    whole.save(tmp_path / "r.json")
    back = Records.load(tmp_path / "r.json")
    assert str(back.as_dict()) == str(whole.as_dict())  # text, because NaN is not equal to itself
    assert back.box(0) == (0, 1, 2, 3)
    assert back.box(1) is None


def test_a_save_that_fails_leaves_what_was_there(tmp_path, monkeypatch):
    records([0, 1]).save(tmp_path / "r.json")
    before = (tmp_path / "r.json").read_bytes()

    def full(path, text):
        with open(path, "w") as file:
            file.write(text[: len(text) // 2])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(OSError, match="No space left"):
        records([0, 1, 2]).save(tmp_path / "r.json")
    assert (tmp_path / "r.json").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["r.json"]


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"name": 1}', "null", '"x"'])
def test_a_file_of_something_else_is_named(text, tmp_path):
    (tmp_path / "r.json").write_text(text)
    with pytest.raises(ValueError, match=r"r.json does not hold records"):
        Records.load(tmp_path / "r.json")


def test_the_fingerprint_follows_pictures_and_not_labels():
    assert records([0, 1]).fingerprint() == records([1, 0]).fingerprint()
    assert records([0, 1]).fingerprint() != records([0, 1, 1]).fingerprint()
    assert dataclasses.replace(records([0, 1]), root=Path("elsewhere")).fingerprint() != records([0, 1]).fingerprint()


def test_a_picture_without_a_label_is_no_class_of_one():
    assert records([0, 0, 1, -1]).singletons().tolist() == [1]


@pytest.mark.parametrize("crop", [False, True])
def test_the_fingerprint_follows_the_boxes_that_pictures_are_cut_to(crop):
    one, other = (records([0, 1], boxes=np.full((2, 4), edge), crop=crop).fingerprint() for edge in (1.0, 2.0))
    assert (one != other) is crop


def test_names_are_numbered_in_order_and_integers_as_numbers():
    labels, names = numbers_of(["10", "9", "b", "9", "a"])
    assert names == ("9", "10", "a", "b")
    assert labels.tolist() == [1, 0, 3, 0, 2]


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: records([0, 1], boxes=np.zeros((2, 3))), r"boxes has shape \(2, 3\) but 2 pictures need \(2, 4\)"),
        (lambda: records([0, 1], splits=["train", "tset"]), r"unknown splits \['tset'\]; allowed are train"),
        (lambda: records([0, 5], class_names=("a",)), r"labels must lie in 0..0 \(or -1\), got 0..5"),
        (lambda: records([0, 1], class_names=("a", "a")), "two labels are called 'a'; a name stands for one of them"),
        (lambda: records([0, 1]).split("test"), r"toy has no split \['test'\]; it has \[\]; make one"),
        (lambda: records([0, 0]).split_by_class(), "at least 2 classes, toy has 1"),
        (lambda: records([0, 1]).split_by_class(1.0), "fraction of classes must be strictly between 0 and 1, got 1.0"),
        (lambda: records([0, 1]).split_within_classes(0.0), "fraction of pictures must be strictly between 0 and 1"),
        (lambda: records([0, 1]).hold_out_classes(), r"make them with split_by_class\(\)"),
    ],
)
def test_what_is_refused_says_why(build, message):
    with pytest.raises(ValueError, match=message):
        build()
