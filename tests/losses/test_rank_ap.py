"""Exact AP, SmoothAP and SupAP against the loops, hand-worked cases and finite differences."""

from __future__ import annotations

import math

import pytest
import torch
from torch.autograd import gradcheck

from roadmap.losses import SmoothAP, SupAP, average_precision, saturation_point, smoothap, supap
from roadmap.losses.comparison import Comparison

from . import literal
from .cases import CASES, Case, check_agrees, check_agrees_on_scores, score_table

BOTH = pytest.mark.parametrize("include_self", [True, False], ids=["with self", "without self"])


@BOTH
@pytest.mark.parametrize("case", CASES, ids=repr)
def test_smoothap_is_its_transcription(case: Case, include_self: bool) -> None:
    check_agrees(SmoothAP(include_self=include_self), literal.smoothap, case, include_self)


@BOTH
@pytest.mark.parametrize("case", CASES, ids=repr)
def test_supap_is_its_transcription(case: Case, include_self: bool) -> None:
    check_agrees(SupAP(include_self=include_self), literal.supap, case, include_self)


@pytest.mark.parametrize("settings", [(0.1, 10.0, 0.3), (0.05, 2.0, 0.0), (0.02, 0.0, None), (1.0, 1.0, 0.01)])
@pytest.mark.parametrize("case", [CASES[1], CASES[6], CASES[8]], ids=repr)
def test_supap_with_other_settings(case: Case, settings: tuple[float, float, float | None]) -> None:
    tau, rho, delta = settings
    check_agrees(
        SupAP(tau, rho, delta), lambda s, P, N: literal.supap(s, P, N, tau, rho, delta), case, include_self=True
    )


def test_smoothap_with_another_tau() -> None:
    check_agrees(SmoothAP(tau=0.3), lambda s, P, N: literal.smoothap(s, P, N, tau=0.3), CASES[1], include_self=True)


@BOTH
@pytest.mark.parametrize("case", CASES, ids=repr)
def test_average_precision_is_its_transcription(case: Case, include_self: bool) -> None:
    gallery_labels = None if case.gallery_labels is None else torch.tensor(case.gallery_labels)
    c = Comparison.of(case.vectors, torch.tensor(case.labels), None, case.gallery, gallery_labels)
    P, N = literal.masks(case.labels, case.gallery_labels, include_self)
    queries = case.vectors.tolist()
    s = literal.cosines(queries, queries if case.gallery is None else case.gallery.tolist())
    value = average_precision(c.scores, c.positives(include_self=include_self), c.negatives)
    if any(any(row) for row in P):
        assert value.item() == pytest.approx(1 - literal.exact(s, P, N)[0], abs=1e-12)
    else:
        assert math.isnan(value.item())


@pytest.mark.parametrize("ties", [False, True], ids=["no ties", "ties"])
@pytest.mark.parametrize("seed", range(5))
def test_functions_ignore_items_in_neither_mask(seed: int, ties: bool) -> None:
    table = score_table(seed, ties=ties)
    check_agrees_on_scores(supap, literal.supap, table)
    check_agrees_on_scores(smoothap, literal.smoothap, table)
    scores, positives, negatives = table
    expected = 1 - literal.exact(scores.tolist(), positives.tolist(), negatives.tolist())[0]
    assert average_precision(*table).item() == pytest.approx(expected, abs=1e-12)


def test_average_precision_worked_by_hand() -> None:
    # order + - + - +: precisions 1, 2/3, 3/5
    scores = torch.tensor([[0.9, 0.8, 0.7, 0.6, 0.5]])
    positives = torch.tensor([[True, False, True, False, True]])
    assert average_precision(scores, positives, ~positives).item() == pytest.approx((1 + 2 / 3 + 3 / 5) / 3)


def test_average_precision_counts_ties_against_the_positive() -> None:
    scores = torch.zeros(1, 4)
    positives = torch.tensor([[True, True, False, False]])
    assert average_precision(scores, positives, ~positives).item() == pytest.approx(2 / 4)


def test_average_precision_of_each_query() -> None:
    scores = torch.tensor([[0.9, 0.1], [0.9, 0.1], [0.9, 0.1]])
    positives = torch.tensor([[True, False], [False, True], [False, False]])
    ap = average_precision(scores, positives, ~positives, reduction="none")
    assert ap[:2].tolist() == [1.0, 0.5]
    assert math.isnan(ap[2])
    assert average_precision(scores, positives, ~positives).item() == 0.75


def test_average_precision_has_no_gradient() -> None:
    scores = torch.rand(2, 3, requires_grad=True)
    positives = torch.tensor([[True, False, False]] * 2)
    assert not average_precision(scores, positives, ~positives).requires_grad


def test_negative_scores_are_scores() -> None:
    scores = torch.tensor([[0.9, 0.1, -0.2]])
    positives = torch.tensor([[True, False, True]])
    assert average_precision(scores, positives, ~positives).item() == pytest.approx((1 + 2 / 3) / 2)


def test_saturation_point() -> None:
    delta = saturation_point(0.01)
    assert delta == pytest.approx(0.0459511985)
    assert 1 / (1 + math.exp(-delta / 0.01)) == pytest.approx(0.99)
    assert saturation_point(0.02, epsilon=0.1) == pytest.approx(0.02 * math.log(9))
    assert SupAP(tau=0.02).delta == saturation_point(0.02)


@pytest.mark.parametrize("seed", range(3))
def test_gradcheck(seed: int) -> None:
    scores, positives, negatives = score_table(seed)
    leaf = scores.requires_grad_()
    assert gradcheck(lambda s: supap(s, positives, negatives, tau=0.1, rho=10.0), leaf)
    assert gradcheck(lambda s: smoothap(s, positives, negatives, tau=0.1), leaf)


def test_gradcheck_through_the_embeddings() -> None:
    case = CASES[8]
    labels, gallery_labels = torch.tensor(case.labels), torch.tensor(case.gallery_labels)
    for loss in (SupAP(tau=0.1), SmoothAP(tau=0.1)):
        assert gradcheck(
            lambda x, g, loss=loss: loss(x, labels, ref_emb=g, ref_labels=gallery_labels),
            (case.vectors.clone().requires_grad_(), case.gallery.clone().requires_grad_()),  # type: ignore[union-attr]
        )


@pytest.mark.parametrize("loss", [SupAP(), SmoothAP()], ids=["SupAP", "SmoothAP"])
def test_float32_stays_near_float64(loss: torch.nn.Module) -> None:
    x, labels = torch.randn(48, 16, dtype=torch.float64), torch.arange(48) // 4
    assert loss(x.float(), labels).item() == pytest.approx(loss(x, labels).item(), abs=2e-5)
