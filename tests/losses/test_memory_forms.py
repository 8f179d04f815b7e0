"""The memory of pair losses, and pytorch-metric-learning's own as an oracle from outside."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from roadmap.losses import ROADMAP, Calibration, Memory, SupAP

from .test_memory import Listed, batches, stored

pml = pytest.importorskip("roadmap.losses.pml")
library = pytest.importorskip("pytorch_metric_learning.losses")
WITHOUT = ("cross_entropy", "normalised_softmax", "proxy_gml", "proxy_nca", "proxy_nca_pp")
WITH_A_GALLERY = [name for name in pml.RECIPES if name not in WITHOUT]


@pytest.mark.parametrize("weight", [1.0, 0.3])
@pytest.mark.parametrize("name", WITH_A_GALLERY)
def test_a_pair_loss_adds_the_loss_against_the_memory(name: str, weight: float) -> None:
    loss: nn.Module = pml.RECIPES[name]()
    # the entropy of the batch is in the loss of the batch, and counts once
    against = pml.contrastive_xbm() if name == "contrastive_irt" else loss
    memory, listed = Memory(loss, 7, weight=weight, repeats=False), Listed(7, repeats=False)
    assert memory.form == "added"
    for x, labels, ids in batches([6, 6, 6, 6], 4, pictures=14):
        leaf, plain = (x.clone().requires_grad_() for _ in range(2))
        torch.manual_seed(3)  # for the miners that draw
        value = memory(leaf, labels, ids=ids)
        value.backward()
        torch.manual_seed(3)
        expected = loss(plain, labels)
        if items := listed.without(ids.tolist()):
            gallery = torch.stack([vector for vector, _, _ in items])
            found = torch.tensor([y for _, y, _ in items])
            expected = expected + weight * against(plain, labels, None, gallery, found)
        expected.backward()
        assert value.item() == pytest.approx(expected.item(), abs=1e-12)
        torch.testing.assert_close(leaf.grad, plain.grad, rtol=1e-10, atol=1e-11)
        listed.store(x, labels.tolist(), ids.tolist())


def test_a_margin_of_irt_holds_against_the_memory_too() -> None:
    loss, alone = pml.contrastive_irt(neg_margin=0.2, entropy_weight=0.3), pml.contrastive_xbm(neg_margin=0.2)
    memory = Memory(loss, 9)
    (x, labels, _), (y, others, _) = batches([5, 5])
    memory(x, labels)
    expected = loss(y, others) + alone(y, others, ref_emb=x, ref_labels=labels)
    assert memory(y, others).item() == pytest.approx(expected.item(), abs=1e-12)


def test_the_contrastive_loss_of_the_xbm_paper_counts_every_pair_once() -> None:
    """Sums over pairs do not mind where an item lies: batch and memory in one list give the same."""
    loss = pml.contrastive_xbm()
    memory, listed = Memory(loss, 50), Listed(50)
    for x, labels, ids in batches([5, 5, 5], 8):
        value = memory(x, labels, ids=ids)
        vectors, items = [*(x / x.norm(dim=1, keepdim=True))], [*labels.tolist()]
        vectors, items = vectors + [v / v.norm() for v, _, _ in listed.items], items + [y for _, y, _ in listed.items]
        total = 0.0
        for i in range(5):
            for j in range(len(vectors)):
                s = float(vectors[i] @ vectors[j])
                if i != j:
                    total += 1 - s if items[i] == items[j] else max(0.0, s - 0.5)
        assert value.item() == pytest.approx(total / 5, abs=1e-10)
        listed.store(x, labels.tolist(), ids.tolist())


def test_a_rank_loss_may_be_added_too() -> None:
    loss = ROADMAP()
    memory = Memory(loss, 9, form="added", weight=0.5)
    (x, labels, _), (y, others, _) = batches([5, 5])
    memory(x, labels)
    expected = loss(y, others) + 0.5 * loss(y, others, ref_emb=x, ref_labels=labels)
    assert memory(y, others).item() == pytest.approx(expected.item(), abs=1e-12)


@pytest.mark.parametrize("loss", [SupAP(include_self=False), Calibration()], ids=lambda loss: type(loss).__name__)
def test_the_value_is_that_of_the_library_until_its_ring_is_full(loss: nn.Module) -> None:
    """Its memory holds the batch too, without a gradient, and leaves out the pair of a query with itself."""
    theirs = library.CrossBatchMemory(pml.PMLLoss(loss), embedding_size=3, memory_size=16)
    mine = Memory(loss, 16)
    for x, labels, _ in batches([4, 4, 4, 4], 6):
        expected = theirs(x, labels).item()
        assert mine(x, labels).item() == pytest.approx(expected, abs=1e-6)  # it keeps float32
    assert len(stored(mine)) == 16


def test_a_loss_with_class_weights_has_nothing_to_remember() -> None:
    with pytest.raises(ValueError, match="compares embeddings with its own class weights and not with other pictures"):
        Memory(pml.proxy_nca(3, 3), 8)
