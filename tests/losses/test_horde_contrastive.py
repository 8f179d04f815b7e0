"""The contrastive loss of HORDE against loops and by hand."""

from __future__ import annotations

import pytest
import torch

from roadmap.losses import HordeContrastive

from . import literal
from .cases import CASES, Case, check_agrees


def by_loops(s: literal.Matrix, P: literal.Mask, N: literal.Mask, margin: float = 0.5) -> literal.ValueAndGradient:
    """Half the mean of (1 - s)^2 over all positives + half the mean of s - margin over the negatives above it."""
    total, gradient = 0.0, literal.zeros(s)
    pulled = [(i, j) for i, row in enumerate(P) for j in literal.members(row)]
    pushed = [(i, j) for i, row in enumerate(N) for j in literal.members(row) if s[i][j] > margin]
    for i, j in pulled:
        total += (1 - s[i][j]) ** 2 / len(pulled) / 2
        gradient[i][j] -= (1 - s[i][j]) / len(pulled)
    for i, j in pushed:
        total += (s[i][j] - margin) / len(pushed) / 2
        gradient[i][j] += 1 / len(pushed) / 2
    return total, gradient


@pytest.mark.parametrize("margin", [0.5, 0.1])
@pytest.mark.parametrize("case", CASES, ids=repr)
def test_horde_contrastive_is_its_transcription(case: Case, margin: float) -> None:
    check_agrees(HordeContrastive(margin), lambda s, P, N: by_loops(s, P, N, margin), case, include_self=False)


def test_worked_by_hand() -> None:
    x = torch.tensor([[1.0, 0.0], [0.6, 0.8], [0.0, 1.0]], dtype=torch.float64)
    # positives 0.6, twice; negatives 0 and 0.8, twice each
    expected = 0.4**2 / 2 + 0.3 / 2
    assert HordeContrastive()(x, torch.tensor([0, 0, 1])).item() == pytest.approx(expected)


def test_it_says_its_margin_and_refuses_what_is_none() -> None:
    assert repr(HordeContrastive(0.3)) == "HordeContrastive(margin=0.3)"
    with pytest.raises(TypeError, match="margin must be a number, got str"):
        HordeContrastive("0.3")  # type: ignore[arg-type]
