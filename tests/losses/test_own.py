"""Where each query stands in the gallery: what a comparison makes of it, against the literal loops."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from roadmap.losses import ROADMAP, BlackBoxAP, Calibration, FastAP, SmoothAP, SoftBinAP, SupAP
from roadmap.losses.comparison import Comparison

from . import literal
from .cases import Literal, drawn

LOSSES: dict[str, nn.Module] = {
    "SupAP": SupAP(),
    "SupAP without self": SupAP(include_self=False),
    "SmoothAP": SmoothAP(),
    "SmoothAP without self": SmoothAP(tau=0.05, include_self=False),
    "Calibration": Calibration(),
    "Calibration all": Calibration(average="all"),
    "ROADMAP": ROADMAP(),
    "ROADMAP all without self": ROADMAP(lam=0.3, average="all", include_self=False),
}
LABELS = torch.tensor([0, 1, 0, 2, 1, 0, 3, 2, 0])


def transcription(name: str) -> tuple[Literal, bool]:
    """The literal loss, and whether the query is one of its positives."""
    alone = name.endswith("without self")
    if name.startswith("SupAP"):
        return literal.supap, not alone
    if name.startswith("SmoothAP"):
        return lambda s, P, N: literal.smoothap(s, P, N, 0.05 if alone else 0.01), not alone
    return (literal.calibration_printed if "all" in name else literal.calibration_violating), False


def masks(labels: list[int], items: list[int], own: list[int], include_self: bool) -> tuple[literal.Mask, literal.Mask]:
    P, N = literal.masks(labels, items, include_self=True)
    for i, place in enumerate(own):
        if place >= 0 and not include_self:
            P[i][place] = False
    return P, N


@pytest.mark.parametrize("name", [n for n in LOSSES if not n.startswith("ROADMAP")])
@pytest.mark.parametrize("seed", range(3))
def test_random_places_follow_the_literal_loop(name: str, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    items, item_labels = drawn(13, 3, seed), torch.randint(0, 4, (13,), generator=generator)
    places = torch.randint(0, 13, (7,), generator=generator)
    queries, labels = items[places], item_labels[places]
    elsewhere = torch.rand(7, generator=generator) < 0.4  # some queries are no items: other vectors, no place
    queries[elsewhere] = drawn(7, 3, seed + 50)[elsewhere]
    own = torch.where(elsewhere, -1, places)
    assert 0 < int(elsewhere.sum()) < 7

    q, g = queries.clone().requires_grad_(), items.clone().requires_grad_()
    value = LOSSES[name](q, labels, ref_emb=g, ref_labels=item_labels, own=own)
    value.backward()
    loop, include_self = transcription(name)
    P, N = masks(labels.tolist(), item_labels.tolist(), own.tolist(), include_self)
    expected, ds = loop(literal.cosines(queries.tolist(), items.tolist()), P, N)
    dq, dg = (
        torch.tensor(d, dtype=torch.float64) for d in literal.gradient_of_cosines(ds, queries.tolist(), items.tolist())
    )
    assert value.item() == pytest.approx(expected, abs=1e-11)
    torch.testing.assert_close(q.grad, dq, rtol=1e-8, atol=1e-9)
    torch.testing.assert_close(g.grad, dg, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("name", LOSSES)
def test_the_batch_is_the_gallery_in_which_every_query_stands_at_its_place(name: str, dtype: torch.dtype) -> None:
    x = drawn(9, 4, 3).to(dtype).requires_grad_()
    inside = LOSSES[name](x, LABELS)
    inside.backward()
    q, g = x.detach().clone().requires_grad_(), x.detach().clone().requires_grad_()
    outside = LOSSES[name](q, LABELS, ref_emb=g, ref_labels=LABELS, own=torch.arange(9))
    outside.backward()
    near = {"rtol": 1e-9, "atol": 1e-11} if dtype == torch.float64 else {"rtol": 1e-4, "atol": 1e-5}
    torch.testing.assert_close(outside, inside, **near)
    assert x.grad is not None
    assert q.grad is not None
    torch.testing.assert_close(q.grad + g.grad, x.grad, **near)


def test_places_decide_who_is_a_positive() -> None:
    labels, items = torch.tensor([0, 1, 0]), torch.tensor([1, 0, 0, 2])
    vectors = drawn(4, 3, 1)
    c = Comparison.of(vectors[[1, 0, 3]], labels, ref_emb=vectors, ref_labels=items, own=torch.tensor([1, 0, -1]))
    assert c.positives(include_self=True).tolist() == c.relevant.tolist()
    others = [[False, False, True, False], [False, False, False, False], [False, True, True, False]]
    assert c.positives(include_self=False).tolist() == others
    assert c.negatives.tolist() == (~c.relevant).tolist()
    assert c.own.tolist() == [1, 0, -1]
    assert Comparison.of(vectors, items).own.tolist() == [0, 1, 2, 3]
    assert Comparison.of(vectors, items, ref_emb=vectors, ref_labels=items).own.tolist() == [-1] * 4


def test_a_mined_comparison_knows_its_places_too() -> None:
    x, labels = drawn(4, 3, 2), torch.tensor([0, 0, 1, 1])
    pairs = torch.tensor([0]), torch.tensor([1]), torch.tensor([0]), torch.tensor([2])
    for loss in (SupAP(), ROADMAP()):
        inside = loss(x, labels, pairs)
        outside = loss(x, labels, pairs, ref_emb=x, ref_labels=labels, own=torch.arange(4))
        assert outside.item() == pytest.approx(inside.item(), abs=1e-12)


@pytest.mark.parametrize("make", [FastAP, SoftBinAP, BlackBoxAP])
def test_the_baselines_read_places_from_the_comparison(make: type[nn.Module]) -> None:
    """They count over `positives` and `scores`: what the comparison says of the query holds for them."""
    x, labels = drawn(6, 3, 5), torch.tensor([0, 0, 1, 1, 2, 2])
    inside = Comparison.of(x, labels)
    outside = Comparison.of(x, labels, ref_emb=x, ref_labels=labels, own=torch.arange(6))
    for include_self in (True, False):
        assert torch.equal(inside.positives(include_self=include_self), outside.positives(include_self=include_self))
        torch.testing.assert_close(inside.scores, outside.scores, rtol=0, atol=1e-15)
        expected = make(include_self=include_self)(x, labels)
        found = make(include_self=include_self)(x, labels, ref_emb=x, ref_labels=labels, own=torch.arange(6))
        assert found.item() == pytest.approx(expected.item(), abs=1e-12)


X, Y = torch.randn(3, 2), torch.tensor([0, 1, 1])
BAD: dict[str, tuple[Tensor, dict[str, Tensor], type[Exception], str]] = {
    "no gallery": (torch.arange(3), {}, ValueError, "own was given without ref_emb; without a gallery every query"),
    "floats": (torch.zeros(3), {"ref_emb": X, "ref_labels": Y}, TypeError, "own must hold integers"),
    "too few": (
        torch.arange(2),
        {"ref_emb": X, "ref_labels": Y},
        ValueError,
        "own has 2 entries but embeddings has 3 rows",
    ),
    "beyond": (
        torch.tensor([0, 3, 2]),
        {"ref_emb": X, "ref_labels": Y},
        ValueError,
        "own must hold places in the gallery, 0 to 2, or -1 for nowhere; got 0 to 3",
    ),
    "below": (torch.tensor([0, -2, 2]), {"ref_emb": X, "ref_labels": Y}, ValueError, "got -2 to 2"),
    "another item": (
        torch.tensor([0, 0, 2]),
        {"ref_emb": X, "ref_labels": Y},
        ValueError,
        r"own\[1\] is 0, but the gallery item there has label 0 and the query 1: they cannot be one item",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_places_that_cannot_be(name: str) -> None:
    own, gallery, error, message = BAD[name]
    with pytest.raises(error, match=message):
        ROADMAP()(X, Y, own=own, **gallery)
