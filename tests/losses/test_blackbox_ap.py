"""BlackBoxAP: values and the blackbox gradient against loops."""

from __future__ import annotations

import pytest
import torch

from roadmap.losses import BlackBoxAP, average_precision, blackboxap

from . import literal
from .cases import CASES, Case, check_agrees, check_agrees_on_scores, score_table


@pytest.mark.parametrize("include_self", [True, False], ids=["with self", "without self"])
@pytest.mark.parametrize("case", CASES, ids=repr)
def test_blackboxap_is_its_transcription(case: Case, include_self: bool) -> None:
    # lam is no round number: scores moved by a rational step could tie, or not, by a rounding.
    def transcription(s: literal.Matrix, P: literal.Mask, N: literal.Mask) -> literal.ValueAndGradient:
        return literal.blackboxap(s, P, N, lam=0.7391)

    check_agrees(BlackBoxAP(lam=0.7391, include_self=include_self), transcription, case, include_self)


@pytest.mark.parametrize("lam", [0.1, 4.0, 50.0])
@pytest.mark.parametrize("seed", range(4))
def test_function_ignores_items_in_neither_mask(seed: int, lam: float) -> None:
    check_agrees_on_scores(
        lambda s, p, n: blackboxap(s, p, n, lam, margin=0.1),
        lambda s, P, N: literal.blackboxap(s, P, N, lam, margin=0.1),
        score_table(seed),
    )


def test_default_settings_are_the_transcriptions() -> None:
    check_agrees_on_scores(blackboxap, literal.blackboxap, score_table(2))


@pytest.mark.parametrize("ties", [False, True])
def test_without_margin_the_value_is_the_exact_ap(ties: bool) -> None:
    table = score_table(5, ties=ties)
    assert blackboxap(*table, margin=0).item() == pytest.approx(1 - average_precision(*table).item(), abs=1e-12)


def test_gradient_by_hand() -> None:
    # positive 0.5 behind negative 0.6: rk = (2/2, 1/2), rk+ = 1/2, L = 1/2, dL/drk = (1/2) / 1 = 1/2 on the positive.
    # lam = 1 moves it to 1.0, ahead: rk = (1/2, 2/2), so the gradient is (-1/2, +1/2).
    scores = torch.tensor([[0.5, 0.6]], requires_grad=True)
    positives = torch.tensor([[True, False]])
    loss = blackboxap(scores, positives, ~positives, lam=1.0, margin=0.0)
    loss.backward()
    assert loss.item() == 0.5
    assert scores.grad is not None
    assert scores.grad.tolist() == [[-0.5, 0.5]]


def test_margin_keeps_a_gradient_when_the_order_is_right() -> None:
    positives = torch.tensor([[True, False]])
    for margin, moves in ((0.0, False), (0.1, True)):
        scores = torch.tensor([[0.55, 0.5]], requires_grad=True)
        blackboxap(scores, positives, ~positives, lam=1.0, margin=margin).backward()
        assert scores.grad is not None
        assert bool(scores.grad.abs().sum() > 0) is moves


def test_a_scaled_loss_has_a_scaled_gradient() -> None:
    """As under GradScaler, whose factor 65536 would otherwise be taken for a larger lam."""
    scores, positives, negatives = score_table(1, queries=6, items=20)
    leaf = scores.requires_grad_()
    plain = torch.autograd.grad(blackboxap(leaf, positives, negatives), leaf)[0]
    scaled = torch.autograd.grad(blackboxap(leaf, positives, negatives) * 65536, leaf)[0]
    assert plain.abs().max() > 0
    torch.testing.assert_close(scaled / 65536, plain)


def test_random_perturbation_moves_each_score_by_its_own_half_normal() -> None:
    """What was released: s - margin |z| (y - 1/2), z ~ N(0, 1) for every score; then as without a margin."""
    scores, positives, negatives = score_table(4, queries=6, items=20)
    leaf, moved = scores.clone().requires_grad_(), scores.clone()
    torch.manual_seed(3)
    value = blackboxap(leaf, positives, negatives, lam=0.7391, margin=0.1, perturbation="random")
    value.backward()
    torch.manual_seed(3)
    sizes = torch.randn(6, 20, dtype=torch.float64).abs().tolist()
    for i in range(6):
        for j in range(20):
            y = float(positives[i, j])
            moved[i, j] -= 0.1 * sizes[i][j] * (y - 0.5)
    expected, gradient = literal.blackboxap(
        moved.tolist(), positives.tolist(), negatives.tolist(), lam=0.7391, margin=0
    )
    assert value.item() == pytest.approx(expected, abs=1e-12)
    torch.testing.assert_close(leaf.grad, torch.tensor(gradient, dtype=torch.float64), rtol=1e-9, atol=1e-10)


def test_random_perturbation_follows_the_seed_and_the_margin() -> None:
    table = score_table(4, queries=6, items=20)
    loss = BlackBoxAP(margin=0.5, perturbation="random")

    def value(seed: int, margin: float = 0.5) -> float:
        torch.manual_seed(seed)
        return blackboxap(*table, margin=margin, perturbation="random").item()

    assert value(1) == value(1)
    assert value(1) != value(2)
    assert value(1, margin=0) == blackboxap(*table, margin=0).item()
    x, y = torch.randn(8, 3), torch.arange(8) // 2
    values = {loss(x, y).item() for _ in range(5)}
    assert len(values) > 1  # another draw at every step
