"""NDCG of graded relevance against the loops, worked by hand, and its bound."""

from __future__ import annotations

import math
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.autograd import gradcheck

from roadmap.losses import GradedNDCG, gradedndcg, ndcg

from . import graded_literal as loops
from . import literal
from .cases import CASES, Case, check_agrees, drawn
from .graded_cases import SETS, TREES, GradedCase, check_graded, check_on_scores, graded_table, paths

BOTH = pytest.mark.parametrize("include_self", [True, False], ids=["with self", "without self"])


@BOTH
@pytest.mark.parametrize("case", TREES, ids=repr)
def test_graded_ndcg_is_its_transcription(case: GradedCase, include_self: bool) -> None:
    queries, items = (labels.tolist() for labels in case.both)
    grades = loops.tree_grades(queries, items, case.own, include_self, "levels")
    check_graded(GradedNDCG(include_self=include_self), loops.ndcg_loss, loops.gains(grades), case)
    check_graded(GradedNDCG("linear", include_self=include_self), loops.ndcg_loss, grades, case)


@pytest.mark.parametrize("kind", ["iou", "count"])
@pytest.mark.parametrize("case", SETS, ids=repr)
def test_sets_of_labels(case: GradedCase, kind: str) -> None:
    queries, items = ([set(row.nonzero()[:, 0].tolist()) for row in labels] for labels in case.both)
    grades = loops.set_grades(queries, items, case.own, True, kind)
    check_graded(GradedNDCG(sets=kind), loops.ndcg_loss, loops.gains(grades), case)  # type: ignore[arg-type]
    if kind == "count":  # unless told
        check_graded(GradedNDCG(), loops.ndcg_loss, loops.gains(grades), case)


@BOTH
@pytest.mark.parametrize("case", [CASES[1], CASES[6], CASES[8], CASES[11]], ids=repr)
def test_plain_labels_are_one_level(case: Case, include_self: bool) -> None:
    def transcription(s: literal.Matrix, P: literal.Mask, N: literal.Mask) -> literal.ValueAndGradient:
        grades = [
            [1.0 if p else 0.0 if n else -1.0 for p, n in zip(*row, strict=True)] for row in zip(P, N, strict=True)
        ]
        return loops.ndcg_loss(s, grades)

    check_agrees(GradedNDCG(include_self=include_self), transcription, case, include_self)


@pytest.mark.parametrize("ties", [False, True], ids=["no ties", "ties"])
@pytest.mark.parametrize("seed", range(3))
def test_functions_of_scores_and_grades(seed: int, ties: bool) -> None:
    scores, grades = graded_table(seed, ties=ties)
    check_on_scores(gradedndcg, lambda s, g: loops.ndcg_loss(s, loops.gains(g)), (scores, grades))
    soft = partial(gradedndcg, gain="linear", tau=0.1, rho=10.0, delta=0.05)
    steps = loops.Steps(0.1, 10.0, 0.05)
    check_on_scores(soft, lambda s, g: loops.ndcg_loss(s, g, steps), (scores, grades))
    exact = 1 - loops.ndcg_loss(scores.tolist(), loops.gains(grades.tolist()), loops.Steps(exact=True))[0]
    assert ndcg(scores, grades).item() == pytest.approx(exact, abs=1e-12)


def test_ndcg_worked_by_hand() -> None:
    """Grades 1, 0, 2 from the top: (1 / 1 + 3 / 2) over (3 / 1 + 1 / log2 3)."""
    scores, grades = torch.tensor([[0.9, 0.8, 0.7]]), torch.tensor([[1, 0, 2]])
    assert ndcg(scores, grades).item() == pytest.approx((1 + 3 / 2) / (3 + 1 / math.log2(3)))
    assert ndcg(scores, grades, "linear").item() == pytest.approx((1 + 2 / 2) / (2 + 1 / math.log2(3)))
    assert ndcg(scores, torch.tensor([[2, 1, 0]])).item() == 1
    assert math.isnan(ndcg(scores, torch.tensor([[0, -1, 0]])).item())


def test_ndcg_is_that_of_the_definition_by_sorting() -> None:
    scores, grades = graded_table(8, 6, 12)
    for row, row_grades in zip(scores[1:], grades[1:].clamp(min=0), strict=True):
        discounts = 1 / np.log2(np.arange(2, 14))
        found = (2 ** row_grades[row.argsort(descending=True)].numpy() - 1) @ discounts
        best = (2 ** row_grades.sort(descending=True).values.numpy() - 1) @ discounts
        assert ndcg(row[None], row_grades[None]).item() == pytest.approx(found / best, abs=1e-14)


@given(st.integers(0, 10_000))
def test_the_loss_is_an_upper_bound(seed: int) -> None:
    scores, grades = graded_table(seed, 3, 7, ties=seed % 2 == 1)
    for i in range(1, 3):
        if (grades[i] > 0).any():
            row = scores[i : i + 1], grades[i : i + 1]
            assert gradedndcg(*row).item() >= 1 - ndcg(*row).item() - 1e-12


def test_gradcheck() -> None:
    scores, grades = graded_table(1)
    assert gradcheck(lambda s: gradedndcg(s, grades, tau=0.1, rho=10.0), scores.requires_grad_())


def test_the_loss_pushes_down_what_is_less_relevant() -> None:
    """A coarse match above a fine one is pushed down, and the fine one up; two of a grade leave each other alone."""
    scores = torch.tensor([[0.7, 0.5, 0.5]], dtype=torch.float64, requires_grad=True)
    gradedndcg(scores, torch.tensor([[1.0, 2.0, 2.0]])).backward()
    assert scores.grad is not None
    down, up, same = scores.grad[0].tolist()
    assert down > 0 > up == same


def test_equal_grades_have_equal_gains_wherever_they_stand() -> None:
    """2^x of equal x may differ in its last bit, between the lanes of a vector and the rest: no order hangs on it."""
    scores = torch.rand(1, 11, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    gradedndcg(scores, torch.full((1, 11), 0.5)).backward()
    assert scores.grad is not None
    assert not scores.grad.any()


def test_grades_come_pair_by_pair() -> None:
    x, (_, grades) = drawn(4, 3, 2), graded_table(2, 4, 6)
    gallery = drawn(6, 3, 3)
    case = GradedCase("", x, paths(0, 0, 0, 0), gallery, paths(0, 0, 0, 0, 0, 0))
    check_graded(GradedNDCG(), loops.ndcg_loss, loops.gains(grades.tolist()), case, grades=grades)
