"""Terms before the scalar: a batch whose rows are shared out gives the loss and the gradient of the whole."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from roadmap.losses.comparison import Comparison
from roadmap.losses.terms import Terms

from .cases import drawn
from .test_own import LABELS, LOSSES


def shared_out(loss: nn.Module, x: Tensor, labels: Tensor, cuts: list[int]) -> Terms:
    """The terms of every part, its own rows against all items, added."""
    total = None
    for first, end in zip([0, *cuts], [*cuts, len(x)], strict=True):
        own = torch.arange(first, end)
        c = Comparison.of(x[first:end], labels[first:end], ref_emb=x, ref_labels=labels, own=own)
        terms = loss.terms(c)
        total = terms if total is None else total + terms
    assert total is not None
    return total


@pytest.mark.parametrize("cuts", [[4], [1, 6], [0, 8]], ids=str)
@pytest.mark.parametrize("name", LOSSES)
def test_rows_shared_out_give_the_loss_of_the_whole(name: str, cuts: list[int]) -> None:
    loss = LOSSES[name]
    x = drawn(9, 4, 11).requires_grad_()
    whole = loss(x, LABELS)
    (expected,) = torch.autograd.grad(whole, x)
    terms = shared_out(loss, x, LABELS, cuts)
    value = loss.value(terms)
    (gradient,) = torch.autograd.grad(value, x)
    assert value.item() == pytest.approx(whole.item(), abs=1e-12)
    torch.testing.assert_close(gradient, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", LOSSES)
def test_counts_added_over_processes_come_before_the_division(name: str) -> None:
    """What W processes do: each has sums of its own and the counts of all; their gradients add up to the whole's."""
    loss = LOSSES[name]
    x = drawn(9, 4, 12).requires_grad_()
    (expected,) = torch.autograd.grad(loss(x, LABELS), x)
    counts = shared_out(loss, x, LABELS, [3, 7]).counts
    total = torch.zeros_like(x)
    for first, end in ((0, 3), (3, 7), (7, 9)):
        own = torch.arange(first, end)
        c = Comparison.of(x[first:end], LABELS[first:end], ref_emb=x, ref_labels=LABELS, own=own)
        share = loss.value(Terms(loss.terms(c).sums, counts))
        total += torch.autograd.grad(share, x)[0]
    torch.testing.assert_close(total, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", LOSSES)
def test_sums_have_a_gradient_and_counts_have_none(name: str) -> None:
    x = drawn(9, 4, 13).requires_grad_()
    terms = LOSSES[name].terms(Comparison.of(x, LABELS))
    assert terms.sums.requires_grad
    assert not terms.counts.requires_grad
    assert terms.sums.shape == terms.counts.shape


def test_terms_say_what_they_count() -> None:
    """Two queries with a positive and one without; one pair below 0.9 and one above 0.6, each both ways."""
    x = torch.tensor([[1.0, 0.0], [0.6, 0.8], [0.0, 1.0]], dtype=torch.float64)
    labels = torch.tensor([0, 0, 1])
    terms = LOSSES["SupAP without self"].terms(Comparison.of(x, labels))
    assert terms.counts.tolist() == [2]
    terms = LOSSES["Calibration"].terms(Comparison.of(x, labels))
    assert terms.counts.tolist() == [2, 2]  # the pair (0, 1) both ways; (1, 2) above 0.6 both ways
    torch.testing.assert_close(terms.sums, torch.tensor([0.6, 0.4], dtype=torch.float64))


def test_nothing_that_counts_is_zero_with_zero_gradients() -> None:
    x = drawn(3, 4, 14).requires_grad_()
    loss = LOSSES["SupAP"]
    c = Comparison.of(x, torch.tensor([0, 1, 2]), ref_emb=drawn(2, 4, 15), ref_labels=torch.tensor([5, 6]))
    value = loss.value(loss.terms(c))
    value.backward()
    assert value.item() == 0
    assert x.grad is not None
    assert not x.grad.any()


@pytest.mark.parametrize("name", ["SupAP", "ROADMAP", "Calibration all"])
def test_mined_pairs_have_terms_too(name: str) -> None:
    loss, x = LOSSES[name], drawn(9, 4, 16)
    triplets = torch.tensor([0, 2, 4]), torch.tensor([2, 5, 1]), torch.tensor([1, 3, 0])
    c = Comparison.of(x, LABELS, triplets)
    assert loss.value(loss.terms(c)).item() == pytest.approx(loss(x, LABELS, triplets).item(), abs=1e-15)
