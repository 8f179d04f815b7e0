"""What holds for every input: bounds, directions of gradients, invariances, silence when nothing counts."""

from __future__ import annotations

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from roadmap.losses import (
    ROADMAP,
    BlackBoxAP,
    Calibration,
    FastAP,
    GradedNDCG,
    HierarchicalAP,
    HordeContrastive,
    RecallAtK,
    SmoothAP,
    SoftBinAP,
    SupAP,
    SupNDCG,
    TripletSCT,
    average_precision,
    smoothap,
    supap,
)

from .cases import drawn, gridded

LOSSES: list[nn.Module] = [
    ROADMAP(),
    ROADMAP(average="all", include_self=False),
    SupAP(),
    SupAP(include_self=False),
    SmoothAP(),
    Calibration(),
    Calibration(average="all"),
    FastAP(9),
    SoftBinAP(),
    BlackBoxAP(lam=0.7391),
    SupNDCG(),
    RecallAtK(),
    TripletSCT(),
    HordeContrastive(),
    HierarchicalAP(),
    GradedNDCG(),
]
EVERY_LOSS = pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: " ".join(repr(loss).split()))
seeds = st.integers(0, 2**31)

# A coarse grid makes ties common; its steps fall on both sides of delta = 0.046.
GRID = (-1.0, -0.5, 0.0, 0.25, 0.5, 0.5 + 2**-10, 0.5 + 2**-6, 0.5625, 0.75, 1.0)


@st.composite
def tables(draw: st.DrawFn) -> tuple[Tensor, Tensor, Tensor]:
    """Scores and masks; an item is a positive, a negative or ignored."""
    queries, items = draw(st.integers(1, 3)), draw(st.integers(1, 8))
    size = queries * items
    scores = draw(st.lists(st.sampled_from(GRID), min_size=size, max_size=size))
    kinds = draw(st.lists(st.sampled_from("++--."), min_size=size, max_size=size))
    kind = torch.tensor([ord(k) for k in kinds]).view(queries, items)
    table = torch.tensor(scores, dtype=torch.float64).view(queries, items)
    return table, kind == ord("+"), kind == ord("-")


@settings(max_examples=300)
@given(
    tables(), st.sampled_from([0.001, 0.01, 0.1]), st.sampled_from([0.0, 1.0, 100.0]), st.sampled_from([None, 0, 0.1])
)
def test_supap_is_an_upper_bound(
    table: tuple[Tensor, Tensor, Tensor], tau: float, rho: float, delta: float | None
) -> None:
    scores, positives, negatives = table
    assume(bool(positives.any()))
    for s, slack in ((scores, 1e-12), (scores.float(), 1e-6)):
        exact = 1 - average_precision(s, positives, negatives).item()
        assert supap(s, positives, negatives, tau, rho, delta).item() >= exact - slack


def test_the_bound_holds_at_a_tie() -> None:
    """One positive, one negative, equal scores: 1 - AP = 1/2, and H-(0) = 1/2 would give 1/3."""
    scores, positives = torch.full((1, 2), 0.3), torch.tensor([[True, False]])
    assert supap(scores, positives, ~positives).item() == pytest.approx(0.5)


@settings(max_examples=300)
@given(tables())
def test_supap_pushes_no_positive_down_and_no_negative_up(table: tuple[Tensor, Tensor, Tensor]) -> None:
    scores, positives, negatives = table
    for s in (scores.requires_grad_(), scores.detach().float().requires_grad_()):
        gradient = torch.autograd.grad(supap(s, positives, negatives), s)[0]
        assert bool((gradient[positives] <= 0).all())
        assert bool((gradient[negatives] >= 0).all())
        assert bool((gradient[~positives & ~negatives] == 0).all())


@settings(max_examples=300)
@given(tables())
def test_supap_has_a_gradient_while_a_negative_outranks_a_positive(table: tuple[Tensor, Tensor, Tensor]) -> None:
    scores, positives, negatives = table
    s = scores.float().requires_grad_()
    gradient = torch.autograd.grad(supap(s, positives, negatives), s)[0]
    for i, k in positives.nonzero().tolist():
        for j in negatives[i].nonzero().flatten().tolist():
            if scores[i, j] > scores[i, k]:
                assert gradient[i, k] < 0
                assert gradient[i, j] > 0


def test_smoothap_has_the_faults_supap_repairs() -> None:
    """Supplementary A.1: positives 0.50 and 0.51 behind a negative 0.64."""
    scores = torch.tensor([[0.50, 0.51, 0.64]], dtype=torch.float64, requires_grad=True)
    positives = torch.tensor([[True, True, False]])
    exact = 1 - average_precision(scores, positives, ~positives).item()
    assert exact == pytest.approx(5 / 12)

    smooth = smoothap(scores, positives, ~positives)
    low, high, negative = torch.autograd.grad(smooth, scores)[0][0].tolist()
    assert smooth.item() == pytest.approx(0.403445899598831)
    assert smooth.item() < exact  # no upper bound
    assert high == pytest.approx(0.59152453790662)  # > 0: the better positive is pushed down
    assert low == pytest.approx(-0.591562044306379)
    assert negative == pytest.approx(3.75063997595438e-05, rel=1e-6)  # the negative in front is hardly pushed at all

    sup = supap(scores, positives, ~positives, delta=0.05)
    low, high, negative = torch.autograd.grad(sup, scores)[0][0].tolist()
    assert sup.item() > exact
    assert low < 0
    assert high < 0
    assert negative > 1


def called(loss: nn.Module, x: Tensor, labels: Tensor, gallery: Tensor | None, gallery_labels: Tensor | None) -> float:
    value: float = loss(x, labels, ref_emb=gallery, ref_labels=gallery_labels).item()
    return value


@st.composite
def batches(draw: st.DrawFn) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None, int]:
    """Queries with labels, with or without a gallery, with many ties or with none; and a seed for what follows."""
    seed, items, vectors = draw(seeds), draw(st.integers(1, 9)), draw(st.sampled_from(["drawn", "tied"]))
    labels = torch.tensor(draw(st.lists(st.integers(0, 3), min_size=items, max_size=items)))
    gallery = gallery_labels = None
    if draw(st.booleans()):
        size = draw(st.integers(1, 9))
        gallery_labels = torch.tensor(draw(st.lists(st.integers(0, 3), min_size=size, max_size=size)))
        gallery = gridded(size, seed + 1) if vectors == "tied" else drawn(size, 4, seed + 1)
    return gridded(items, seed) if vectors == "tied" else drawn(items, 4, seed), labels, gallery, gallery_labels, seed


@EVERY_LOSS
@given(batch=batches())
def test_order_does_not_matter(
    loss: nn.Module, batch: tuple[Tensor, Tensor, Tensor | None, Tensor | None, int]
) -> None:
    x, labels, gallery, gallery_labels, seed = batch
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(x), generator=generator)
    shuffled, shuffled_labels = gallery, gallery_labels
    if gallery is not None and gallery_labels is not None:
        other = torch.randperm(len(gallery), generator=generator)
        shuffled, shuffled_labels = gallery[other], gallery_labels[other]
    before = called(loss, x, labels, gallery, gallery_labels)
    assert called(loss, x[order], labels[order], shuffled, shuffled_labels) == pytest.approx(before, abs=1e-10)


@EVERY_LOSS
@given(batch=batches(), names=st.lists(st.integers(-(2**63), 2**63 - 1), min_size=4, max_size=4, unique=True))
def test_names_of_labels_do_not_matter(
    loss: nn.Module, batch: tuple[Tensor, Tensor, Tensor | None, Tensor | None, int], names: list[int]
) -> None:
    x, labels, gallery, gallery_labels, _ = batch
    renamed = torch.tensor(names)
    before = called(loss, x, labels, gallery, gallery_labels)
    after = called(loss, x, renamed[labels], gallery, None if gallery_labels is None else renamed[gallery_labels])
    assert after == before


@EVERY_LOSS
@given(batch=batches())
def test_lengths_of_embeddings_do_not_matter(
    loss: nn.Module, batch: tuple[Tensor, Tensor, Tensor | None, Tensor | None, int]
) -> None:
    x, labels, gallery, gallery_labels, seed = batch
    generator = torch.Generator().manual_seed(seed)
    # Powers of two are exact, so that ties stay ties.
    scale = 2.0 ** torch.randint(-40, 40, (len(x), 1), generator=generator).double()
    scaled = None if gallery is None else gallery * 2.0**-7
    before = called(loss, x, labels, gallery, gallery_labels)
    assert called(loss, x * scale, labels, scaled, gallery_labels) == pytest.approx(before, abs=1e-12)


@EVERY_LOSS
@given(seed=seeds, factor=st.floats(1e-6, 1e6))
def test_any_scale_does_not_matter_without_ties(loss: nn.Module, seed: int, factor: float) -> None:
    x, labels = drawn(8, 4, seed), torch.tensor([0, 1, 0, 1, 2, 2, 2, 0])
    assert loss(x * factor, labels).item() == pytest.approx(loss(x, labels).item(), abs=1e-9)


def test_the_gradient_of_a_longer_embedding_is_shorter() -> None:
    x, labels = drawn(8, 4, 0), torch.tensor([0, 1, 0, 1, 2, 2, 2, 0])
    once, thrice = x.clone().requires_grad_(), (3 * x).requires_grad_()
    ROADMAP()(once, labels).backward()
    ROADMAP()(thrice, labels).backward()
    assert once.grad is not None
    assert thrice.grad is not None
    torch.testing.assert_close(once.grad, 3 * thrice.grad)
    radial = (once.grad * x).sum(1)
    torch.testing.assert_close(radial, torch.zeros_like(radial), rtol=0, atol=1e-12)


AP_LOSSES = [
    SupAP(include_self=False),
    SmoothAP(include_self=False),
    FastAP(include_self=False),
    SoftBinAP(include_self=False),
    BlackBoxAP(include_self=False),
    SupNDCG(include_self=False),
    RecallAtK(share="reachable"),
]


def check_silent(loss: nn.Module, x: Tensor, labels: Tensor, **gallery: Tensor) -> None:
    """The loss is 0 and its gradients are zeros: neither NaN nor None."""
    x = x.requires_grad_()
    value = loss(x, labels, **gallery)
    value.backward()
    assert value.item() == 0
    for leaf in (x, gallery.get("ref_emb")):
        if leaf is not None:
            assert leaf.grad is not None
            assert bool((leaf.grad == 0).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("loss", AP_LOSSES, ids=repr)
def test_silence_without_positives(loss: nn.Module, dtype: torch.dtype) -> None:
    check_silent(loss, drawn(5, 3, 0).to(dtype), torch.arange(5))
    check_silent(loss, drawn(1, 3, 0).to(dtype), torch.zeros(1, dtype=torch.int64))
    gallery = drawn(4, 3, 1).to(dtype).requires_grad_()
    check_silent(loss, drawn(5, 3, 0).to(dtype), torch.arange(5), ref_emb=gallery, ref_labels=torch.arange(10, 14))


@EVERY_LOSS
def test_silence_of_an_empty_batch_and_of_an_empty_gallery(loss: nn.Module) -> None:
    check_silent(loss, torch.zeros(0, 3), torch.zeros(0, dtype=torch.int64))
    nothing = torch.zeros(0, 3, requires_grad=True)
    check_silent(
        loss, drawn(2, 3, 0), torch.tensor([0, 0]), ref_emb=nothing, ref_labels=torch.zeros(0, dtype=torch.int64)
    )


@pytest.mark.parametrize("average", ["violating", "all"])
def test_silence_of_a_calibrated_batch(average: str) -> None:
    x = torch.eye(3).repeat_interleave(2, dim=0)  # positives at 1 > 0.9, negatives at 0 < 0.6
    check_silent(Calibration(average=average), x, torch.tensor([0, 0, 1, 1, 2, 2]))  # type: ignore[arg-type]
    check_silent(ROADMAP(lam=1, average=average), x.detach(), torch.tensor([0, 0, 1, 1, 2, 2]))  # type: ignore[arg-type]


def test_queries_without_positives_do_not_count_in_the_mean() -> None:
    x, labels = drawn(6, 3, 3), torch.tensor([0, 0, 0, 1, 1, 7])
    for loss in AP_LOSSES:
        gallery = {"ref_emb": x, "ref_labels": labels}
        counted = loss(x[:5], labels[:5], **gallery)
        extra = loss(torch.cat([x[:5], drawn(4, 3, 9)]), torch.cat([labels[:5], torch.arange(90, 94)]), **gallery)
        assert extra.item() == pytest.approx(counted.item(), abs=1e-12)
