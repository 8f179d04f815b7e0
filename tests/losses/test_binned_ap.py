"""FastAP and SoftBinAP against loops over their papers' histograms, which are written in other variables."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck
from torch.autograd.graph import saved_tensors_hooks

import roadmap.losses.binned_ap as binned_ap
from roadmap.losses import FastAP, SoftBinAP, average_precision, fastap, softbinap
from roadmap.losses.rank_ap import mean_ap_loss

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


def test_fastap_leaves_the_query_out_unless_told_and_softbinap_does_not() -> None:
    """As their authors, and the tables of the paper, ran them."""
    x, labels = CASES[0].vectors, torch.tensor(CASES[0].labels)
    assert FastAP()(x, labels).item() == FastAP(include_self=False)(x, labels).item()
    assert FastAP()(x, labels).item() != FastAP(include_self=True)(x, labels).item()
    assert SoftBinAP()(x, labels).item() == SoftBinAP(include_self=True)(x, labels).item()


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


Loss = Callable[..., Tensor]


@pytest.mark.parametrize("loss", [fastap, softbinap])
def test_gradcheck(loss: Loss) -> None:
    scores, positives, negatives = score_table(3)
    leaf = scores.requires_grad_()
    assert gradcheck(lambda s: loss(s, positives, negatives), leaf)
    assert gradgradcheck(lambda s: loss(s, positives, negatives), leaf)


def by_autograd(scores: Tensor, positives: Tensor, negatives: Tensor, nodes: int) -> Tensor:
    """The formula as it is written, every weight of every node kept by autograd."""
    width = 2 / (nodes - 1)
    centres = 1 - torch.arange(nodes, dtype=scores.dtype) * width
    weights = (1 - (scores[:, :, None] - centres).abs() / width).clamp(min=0)  # (M, N, nodes)
    h_pos, h_neg = (weights * positives[..., None]).sum(1), (weights * negatives[..., None]).sum(1)
    found = (h_pos + h_neg).cumsum(1)
    precision = h_pos.cumsum(1) / torch.where(found > 0, found, 1)
    return mean_ap_loss((h_pos * precision).sum(1) / positives.sum(1).clamp(min=1), positives)


@pytest.mark.parametrize("block", [1, 60, 10_000])
@pytest.mark.parametrize(("loss", "bins", "nodes"), [(fastap, 40, 41), (fastap, 1, 2), (softbinap, 40, 40)])
def test_blocks_give_what_autograd_gives(
    loss: Loss, bins: int, nodes: int, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Values, gradients and second derivatives, whatever is held at once."""
    monkeypatch.setattr(binned_ap, "CPU_BLOCK", block)
    scores, positives, negatives = score_table(7, queries=17, items=23)
    scores = scores * 2.4 - 1.4  # over most bins, not the upper ones alone
    each = []
    for value_of in (
        lambda s: loss(s, positives, negatives, bins),
        lambda s: by_autograd(s, positives, negatives, nodes),
    ):
        leaf = scores.clone().requires_grad_()
        value = value_of(leaf)
        (gradient,) = torch.autograd.grad(value, leaf, create_graph=True)
        (second,) = torch.autograd.grad((gradient * scores.cos()).sum(), leaf)
        assert gradient.abs().max() > 0
        assert second.abs().max() > 0
        each.append((value.detach(), gradient.detach(), second))
    torch.testing.assert_close(each[0], each[1], rtol=0, atol=1e-12)


@pytest.mark.parametrize("loss", [fastap, softbinap])
def test_what_is_kept_for_the_gradient_does_not_grow_with_the_bins(loss: Loss) -> None:
    """At N = 3,000 and 40 bins autograd kept 2.9 GiB; the scores and the two masks are 52 MiB."""
    scores, positives, negatives = score_table(1, queries=50, items=60)
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        loss(scores.requires_grad_(), positives, negatives, bins=100)
    score_and_masks = scores.nbytes + positives.nbytes + negatives.nbytes
    histograms = 12 * 50 * 101 * scores.element_size()  # a few (M, nodes) tables
    assert 0 < sum(kept.values()) <= score_and_masks + histograms
    assert score_and_masks + histograms < 40 * scores.nbytes  # a weight for each of the 100 bins would be over it


def test_gradients_by_torch_func() -> None:
    scores, positives, negatives = score_table(2)
    leaf = scores.clone().requires_grad_()
    (expected,) = torch.autograd.grad(fastap(leaf, positives, negatives), leaf)
    torch.testing.assert_close(torch.func.grad(lambda s: fastap(s, positives, negatives))(scores), expected)
