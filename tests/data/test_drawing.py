"""Splits drawn by names: what is added, renamed or removed moves nothing else."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from roadmap.data.drawing import FEWEST, drawn_classes, drawn_pictures, lot
from roadmap.data.records import Records, numbers_of

NAMES = st.lists(st.text(st.characters(codec="utf-8"), min_size=1, max_size=8), min_size=4, max_size=40, unique=True)
FRACTIONS = st.floats(0.05, 0.95)


def records_of(classes: list[str], pictures: int = 3) -> Records:
    labels, names = numbers_of([name for name in classes for _ in range(pictures)])
    paths = tuple(f"{name}/{i}.jpg" for name in classes for i in range(pictures))
    return Records("mine", "root", paths, labels, names)


def sides(records: Records) -> dict[str, str]:
    """Class name -> its split, which all of its pictures share."""
    found: dict[str, set[str]] = {name: set() for name in records.class_names}
    assert records.splits is not None
    for label, split in zip(records.labels.tolist(), records.splits.tolist(), strict=True):
        found[records.class_names[label]].add(split)
    return {name: next(iter(splits)) for name, splits in found.items() if len(splits) == 1}


def made_up(names: list[str], fraction: float, purpose: str) -> bool:
    """Whether the lots alone give too few classes on one side."""
    below = sum(lot(name, purpose) < fraction for name in names)
    return min(below, len(names) - below) < FEWEST


@given(NAMES, st.text(min_size=1, max_size=8), FRACTIONS)
def test_a_class_that_is_added_moves_no_other(names, new, fraction):
    assume(new not in names and not made_up(names, fraction, "test"))
    before = sides(records_of(names).split_by_class(fraction))
    after = sides(records_of([*names, new]).split_by_class(fraction))
    assert {name: after[name] for name in names} == before


@given(NAMES, st.data(), FRACTIONS)
def test_a_class_that_is_removed_or_renamed_moves_no_other(names, data, fraction):
    gone = data.draw(st.sampled_from(names))
    left = [name for name in names if name != gone]
    assume(not made_up(left, fraction, "test"))
    before = sides(records_of(names).split_by_class(fraction))
    after = sides(records_of(left).split_by_class(fraction))
    assert after == {name: before[name] for name in left}
    renamed = sides(records_of([*left, gone + "!!!!!!!!!"]).split_by_class(fraction))
    assert {name: renamed[name] for name in left} == after


@given(NAMES, st.text(min_size=1, max_size=8), FRACTIONS)
def test_a_training_class_that_is_added_moves_no_other_to_or_from_validation(names, new, fraction):
    assume(new not in names and not made_up(names, fraction, "val"))
    whole, grown = records_of(names), records_of([*names, new])
    before, after = (
        sides(dataclasses.replace(x, splits=np.full(len(x), "train")).hold_out_classes(fraction))
        for x in (whole, grown)
    )
    assert {name: after[name] for name in names} == before


@given(NAMES, FRACTIONS, st.integers(0, 9))
def test_the_order_of_the_names_does_not_matter(names, fraction, seed):
    drawn = dict(zip(names, drawn_classes(names, fraction, "test", seed).tolist(), strict=True))
    backwards = dict(zip(names[::-1], drawn_classes(names[::-1], fraction, "test", seed).tolist(), strict=True))
    assert drawn == backwards


@pytest.mark.parametrize("fraction", [0.1, 0.2, 0.5, 0.9])
def test_the_share_is_about_the_fraction(fraction):
    names = [f"class {i}" for i in range(5_000)]
    share = drawn_classes(names, fraction, "test").mean()
    assert abs(share - fraction) < 4 * math.sqrt(fraction * (1 - fraction) / len(names))


@given(st.integers(2, 40), FRACTIONS, st.integers(0, 50))
def test_there_are_always_enough_on_both_sides(count, fraction, seed):
    drawn = drawn_classes([str(i) for i in range(count)], fraction, "test", seed)
    assert min(drawn.sum(), (~drawn).sum()) >= min(FEWEST, count // 2)


def test_where_too_few_are_drawn_the_nearest_lots_make_up_for_it():
    names = [f"c{i}" for i in range(10)]
    ranked = sorted(names, key=lambda name: lot(name, "test"))
    assert lot(ranked[0], "test") > 0.001
    drawn = drawn_classes(names, 0.001, "test")
    assert {name for name, yes in zip(names, drawn, strict=True) if yes} == set(ranked[:2])
    drawn = drawn_classes(names, 0.999, "test")
    assert {name for name, yes in zip(names, drawn, strict=True) if not yes} == set(ranked[-2:])


def test_test_and_validation_are_different_draws():
    """Were they the same, no training class would have a lot low enough for validation."""
    records = records_of([f"class {i}" for i in range(400)]).split_by_class(0.3).hold_out_classes(0.2)
    counts = {split: len(np.unique(records.split(split).labels)) for split in records.split_names()}
    assert counts["val"] == pytest.approx(0.2 * 0.7 * 400, abs=20)
    assert counts["test"] == pytest.approx(0.3 * 400, abs=30)


def test_a_lot_is_the_same_everywhere_and_forever():
    """By hand: the first six bytes of SHA-256 of "test", the seed and the name, a line each."""
    assert lot("owl", "test") == pytest.approx(0.4642726598227007, abs=1e-12)
    assert lot("owl", "test", 1) != lot("owl", "test") != lot("owl", "val")
    assert 0 <= lot("\udcff", "test") < 1  # a file name that is not UTF-8


def test_some_pictures_of_every_class_are_tested_on():
    records = records_of([f"class {i}" for i in range(30)], 10).split_within_classes(0.2)
    for label in range(30):
        assert (records.splits[records.labels == label] == "test").sum() == 2
    assert records_of(["a", "b"], 50).split_within_classes(0.2).splits.tolist().count("test") == 20


def test_small_classes_stay_in_training_whole():
    assert set(records_of(["a", "b"], 3).split_within_classes().splits) == {"train"}
    assert records_of(["a"], 4).split_within_classes().splits.tolist().count("test") == 2
    assert set(records_of(["a"], 5).split_within_classes(0.9).splits) == {"train"}  # too few would be left


@given(NAMES, st.data(), st.integers(4, 9))
def test_pictures_of_other_classes_stay_where_they_are(names, data, pictures):
    gone = data.draw(st.sampled_from(names))
    whole = records_of(names, pictures).split_within_classes()
    left = records_of([name for name in names if name != gone], pictures).split_within_classes()
    before = dict(zip(whole.paths, whole.splits.tolist(), strict=True))
    assert dict(zip(left.paths, left.splits.tolist(), strict=True)).items() <= before.items()


@given(st.integers(4, 40), st.floats(0.05, 0.7), st.integers(0, 20))
def test_a_picture_that_is_added_moves_at_most_one_other(count, fraction, seed):
    paths = [f"a/{i}.jpg" for i in range(count)]
    before = drawn_pictures(paths, fraction, "test", seed)
    after = drawn_pictures([*paths, "a/new.jpg"], fraction, "test", seed)
    assume(before.any() and after.any())
    assert (before != after[:-1]).sum() <= 1


def test_boxes_of_one_picture_go_together():
    paths = ["a/1.jpg"] * 5 + ["a/2.jpg"] * 5 + ["a/3.jpg"] * 5
    drawn = drawn_pictures(paths, 0.3, "test")
    assert all(len(set(drawn[i : i + 5].tolist())) == 1 for i in (0, 5, 10))
    assert 0 < drawn.sum() < 15
    assert not drawn_pictures(["a/1.jpg"] * 9, 0.3, "test").any()
