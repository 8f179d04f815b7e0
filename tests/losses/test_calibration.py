"""Calibration, both averages, against the loops and by hand."""

from __future__ import annotations

import pytest
import torch
from torch.autograd import gradcheck

from roadmap.losses import Calibration, calibration

from . import literal
from .cases import CASES, Case, check_agrees, check_agrees_on_scores, score_table

AVERAGES = pytest.mark.parametrize(
    ("average", "transcription"),
    [("violating", literal.calibration_violating), ("all", literal.calibration_printed)],
)


@AVERAGES
@pytest.mark.parametrize("case", CASES, ids=repr)
def test_calibration_is_its_transcription(case: Case, average: str, transcription: object) -> None:
    # An item is never paired with itself.
    check_agrees(Calibration(average=average), transcription, case, include_self=False)  # type: ignore[arg-type]


@AVERAGES
def test_calibration_with_other_thresholds(average: str, transcription: object) -> None:
    for case in (CASES[1], CASES[8]):
        check_agrees(
            Calibration(alpha=0.4, beta=-0.3, average=average),  # type: ignore[arg-type]
            lambda s, P, N: transcription(s, P, N, 0.4, -0.3),  # type: ignore[operator]
            case,
            include_self=False,
        )


@AVERAGES
@pytest.mark.parametrize("seed", range(5))
def test_function_ignores_items_in_neither_mask(seed: int, average: str, transcription: object) -> None:
    table = score_table(seed)
    check_agrees_on_scores(lambda s, p, n: calibration(s, p, n, average=average), transcription, table)  # type: ignore[arg-type]


def test_worked_by_hand() -> None:
    scores = torch.tensor([[0.95, 0.5, 0.7, 0.1], [0.8, 0.2, 0.1, 0.1]], dtype=torch.float64)
    positives = torch.tensor([[True, True, False, False], [True, False, False, False]])
    violating = calibration(scores, positives, ~positives)
    # positives below 0.9: 0.5 and 0.8; negatives above 0.6: 0.7
    assert violating.item() == pytest.approx((0.4 + 0.1) / 2 + 0.1)
    printed = calibration(scores, positives, ~positives, average="all")
    assert printed.item() == pytest.approx(((0 + 0.4) / 2 + 0.1) / 2 + ((0.1 + 0) / 2 + 0 / 3) / 2)


@AVERAGES
def test_a_pair_that_meets_its_threshold_is_left_alone(average: str, transcription: object) -> None:
    scores = torch.tensor([[0.9, 0.6]], requires_grad=True)
    positives = torch.tensor([[True, False]])
    loss = calibration(scores, positives, ~positives, average=average)  # type: ignore[arg-type]
    loss.backward()
    assert loss.item() == 0
    assert scores.grad is not None
    assert scores.grad.tolist() == [[0, 0]]


@pytest.mark.parametrize("average", ["violating", "all"])
def test_gradcheck(average: str) -> None:
    scores, positives, negatives = score_table(1)
    leaf = scores.requires_grad_()
    assert gradcheck(lambda s: calibration(s, positives, negatives, average=average), leaf)  # type: ignore[arg-type]
