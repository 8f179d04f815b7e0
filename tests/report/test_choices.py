"""Which queries a report shows, against sorting by hand."""

from __future__ import annotations

import numpy as np
import torch

from roadmap.evaluation import Evaluation
from roadmap.report.choices import choices, corrected, corrected_rows, hardest_rows, improved_rows, random_rows

NAN = float("nan")


def evaluation(precisions: list[float], first: list[float], labels: list[int]) -> Evaluation:
    none = torch.zeros(len(labels), 0, dtype=torch.int64)
    of = torch.tensor(labels)
    values = {"mAP@R": torch.tensor(precisions, dtype=torch.float64), "P@1": torch.tensor(first, dtype=torch.float64)}
    return Evaluation({}, values, of, torch.ones_like(of), None, (), none, none.float(), of, None, {})


LABELS = [0, 0, 1, 1, 2, 2, 3]
BEFORE = evaluation([0.1, 0.2, 0.9, 0.1, 0.5, 0.5, NAN], [0, 1, 1, 0, 0, 0, NAN], LABELS)
AFTER = evaluation([0.6, 0.3, 0.2, 0.3, 0.5, 0.4, NAN], [1, 1, 0, 1, 0, 1, NAN], LABELS)


def test_the_hardest_of_each_class_come_first() -> None:
    assert hardest_rows(AFTER, 9).tolist() == [2, 1, 5]
    assert hardest_rows(AFTER, 2).tolist() == [2, 1]


def test_only_what_grew_is_improved() -> None:
    # class 2 stood still or fell, class 3 has nothing to find
    assert improved_rows(BEFORE, AFTER, 9).tolist() == [0, 3]


def test_corrections_go_both_ways() -> None:
    assert np.flatnonzero(corrected(BEFORE, AFTER)).tolist() == [0, 3, 5]
    assert np.flatnonzero(corrected(AFTER, BEFORE)).tolist() == [2]
    assert corrected_rows(BEFORE, AFTER, 9).tolist() == [0, 3, 5]
    assert corrected_rows(AFTER, BEFORE, 9).tolist() == [2]


def test_random_ones_are_the_same_each_time_and_have_something_to_find() -> None:
    drawn = random_rows(AFTER, 99)
    assert sorted(drawn.tolist()) == [0, 1, 2, 3, 4, 5]
    assert drawn.tolist() == random_rows(AFTER, 99).tolist() != random_rows(AFTER, 99, seed=1).tolist()


def test_the_groups_of_one_run_and_of_two() -> None:
    alone = choices([("new", AFTER)], BEFORE, "old", 3)
    assert [choice.title for choice in alone] == ["Random", "Hardest", "Most improved"]
    assert alone[2].models == ("old", "new")
    two = choices([("new", AFTER), ("other", BEFORE)], None, "old", 3)
    assert [choice.title for choice in two] == ["Random", "Hardest", "new corrects other", "other corrects new"]
    assert two[2].models == ("new", "other")
    assert "For 3 of 7 queries the first answer of new is right and that of other is wrong" in two[2].about
    same = choices([("new", AFTER), ("twin", AFTER)], None, "old", 3)
    assert [choice.title for choice in same] == ["Random", "Hardest"]  # an empty group is none
