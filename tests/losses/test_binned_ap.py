"""FastAP and SoftBinAP against loops over their papers' histograms, which are written in other variables."""

from __future__ import annotations

import pytest
import torch
from torch.autograd import gradcheck

from roadmap.losses import FastAP, SoftBinAP, average_precision, fastap, softbinap

from . import literal
from .cases import CASES, Case, check_agrees, check_agrees_on_scores, score_table

BOTH = pytest.mark.parametrize("include_self", [True, False], ids=["with self", "without self"])


@BOTH
@pytest.mark.parametrize("case", CASES, ids=repr)
def test_fastap_is_its_transcription(case: Case, include_self: bool) -> None:
    # 9 bins: with 10 the tied cosines 0 would lie on a node, where the triangle has no derivative.
    check_agrees(FastAP(9, include_self), lambda s, P, N: literal.fastap(s, P, N, 9), case, include_self)


@BOTH
@pytest.mark.parametrize("case", CASES, ids=repr)
def test_softbinap_is_its_transcription(case: Case, include_self: bool) -> None:
    check_agrees(SoftBinAP(include_self=include_self), literal.softbinap, case, include_self)


@pytest.mark.parametrize("seed", range(5))
def test_functions_ignore_items_in_neither_mask(seed: int) -> None:
    check_agrees_on_scores(fastap, literal.fastap, score_table(seed))
    check_agrees_on_scores(softbinap, literal.softbinap, score_table(seed))
    check_agrees_on_scores(lambda *t: fastap(*t, bins=1), lambda s, P, N: literal.fastap(s, P, N, 1), score_table(seed))
    check_agrees_on_scores(
        lambda *t: softbinap(*t, bins=2), lambda s, P, N: literal.softbinap(s, P, N, 2), score_table(seed)
    )


def test_one_bin_by_hand() -> None:
    # Nodes +1 and -1; a score s gives (1 + s)/2 to the first. h+ = (.9, .1), h = (1.2, .8); AP = .9 * .9/1.2 + .1 * 1/2
    scores = torch.tensor([[0.8, -0.4]], dtype=torch.float64)
    positives = torch.tensor([[True, False]])
    assert fastap(scores, positives, ~positives, bins=1).item() == pytest.approx(1 - (0.9 * 0.9 / 1.2 + 0.1 / 2))
    assert softbinap(scores, positives, ~positives, bins=2).item() == pytest.approx(1 - (0.9 * 0.9 / 1.2 + 0.1 / 2))


def test_many_bins_approach_the_exact_ap() -> None:
    scores = torch.linspace(-0.9, 0.9, 10, dtype=torch.float64)[None]
    positives = torch.tensor([[False, True] * 5])
    exact = 1 - average_precision(scores, positives, ~positives).item()
    assert fastap(scores, positives, ~positives, bins=2000).item() == pytest.approx(exact, abs=1e-9)
    assert softbinap(scores, positives, ~positives, bins=2001).item() == pytest.approx(exact, abs=1e-9)


def test_scores_a_rounding_above_one_count_as_one() -> None:
    positives = torch.tensor([[True, False]])
    for loss in (fastap, softbinap):
        over = loss(torch.tensor([[1 + 1e-6, 0.3]]), positives, ~positives)
        assert over.item() == pytest.approx(loss(torch.tensor([[1.0, 0.3]]), positives, ~positives).item(), abs=1e-4)


@pytest.mark.parametrize("loss", [fastap, softbinap])
def test_gradcheck(loss: object) -> None:
    scores, positives, negatives = score_table(3)
    assert gradcheck(lambda s: loss(s, positives, negatives), scores.requires_grad_())  # type: ignore[operator]
