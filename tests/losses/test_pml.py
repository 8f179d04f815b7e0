"""pytorch-metric-learning behind our call: the recipes against their papers' equations in loops, and the wrapper."""

from __future__ import annotations

import importlib
import math
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("pytorch_metric_learning", reason="the extra `pml` is not installed")
from pytorch_metric_learning import losses, miners, reducers

from roadmap.losses import pml
from roadmap.losses.pml import RECIPES, MetricLearning

from . import literal
from .cases import differences, drawn
from .test_baseline_parts import koleo_by_loops

LABELS = [0, 0, 1, 1, 1, 2]  # the last one has no positive
GALLERY_LABELS = [1, 0, 2, 0, 3]
PROXIES = {"proxy_gml", "proxy_nca", "proxy_nca_pp", "normalised_softmax", "cross_entropy"}


def recipe(name: str) -> MetricLearning:
    torch.manual_seed(0)
    return RECIPES[name](num_classes=4, embedding_size=3) if name in PROXIES else RECIPES[name]()


def situation(with_gallery: bool) -> tuple[Tensor, dict[str, Tensor], literal.Matrix, literal.Mask, literal.Mask]:
    """Embeddings, the gallery arguments, and cosines and masks by loops."""
    x, g = drawn(6, 3, 1), drawn(5, 3, 2)
    arguments = {"ref_emb": g, "ref_labels": torch.tensor(GALLERY_LABELS)} if with_gallery else {}
    s = literal.cosines(x.tolist(), (g if with_gallery else x).tolist())
    P, N = literal.masks(LABELS, GALLERY_LABELS if with_gallery else None, include_self=False)
    return x, arguments, s, P, N


def euclidean(s: float) -> float:
    return math.sqrt(max(0.0, 2 - 2 * s))


def contrastive(s: literal.Matrix, P: literal.Mask, N: literal.Mask) -> float:
    """1/M sum_i (sum_pos (1 - s) + sum_neg [s - 0.5]+), Eq. 3 of XBM."""
    pulls = sum(1 - s[i][j] for i, row in enumerate(P) for j in literal.members(row))
    pushes = sum(max(0.0, s[i][j] - 0.5) for i, row in enumerate(N) for j in literal.members(row))
    return (pulls + pushes) / len(s)


def semihard(s: literal.Matrix, P: literal.Mask, N: literal.Mask) -> float:
    """Mean of [d_ap^2 - d_an^2 + 0.2]+ over the triplets with d_ap^2 < d_an^2 <= d_ap^2 + 0.2."""
    triplets = []
    for i in range(len(s)):
        for p in literal.members(P[i]):
            for n in literal.members(N[i]):
                gap = euclidean(s[i][n]) ** 2 - euclidean(s[i][p]) ** 2
                if 0 < gap <= 0.2:
                    triplets.append(0.2 - gap)
    assert triplets
    return sum(triplets) / len(triplets)


def lifted(s: literal.Matrix, P: literal.Mask, N: literal.Mask) -> float:
    """Mean over all queries of [log sum_pos e^d + log sum_neg e^(1-d)]+; 0 where a sum is empty."""
    total = 0.0
    for i in range(len(s)):
        positives, negatives = literal.members(P[i]), literal.members(N[i])
        if positives and negatives:
            pull = math.log(sum(math.exp(euclidean(s[i][j])) for j in positives))
            push = math.log(sum(math.exp(1 - euclidean(s[i][j])) for j in negatives))
            total += max(0.0, pull + push)
    return total / len(s)


def multi_similarity(s: literal.Matrix, P: literal.Mask, N: literal.Mask) -> float:
    """Eqs. 5-6 (mining with 0.1) and Eq. 8 of Wang et al. 2019, with 2, 40 (released; 50 printed) and 0.5."""
    total = 0.0
    for i in range(len(s)):
        positives, negatives = literal.members(P[i]), literal.members(N[i])
        if positives and negatives:
            hard_n = [j for j in negatives if s[i][j] + 0.1 > min(s[i][k] for k in positives)]
            hard_p = [k for k in positives if s[i][k] - 0.1 < max(s[i][j] for j in negatives)]
            total += math.log(1 + sum(math.exp(-2 * (s[i][k] - 0.5)) for k in hard_p)) / 2
            total += math.log(1 + sum(math.exp(40 * (s[i][j] - 0.5)) for j in hard_n)) / 40
    return total / len(s)


def check_gradient(found: Tensor | None, call: Callable[[literal.Matrix], float], at: Tensor) -> None:
    """A gradient beside the differences of the loops."""
    assert found is not None
    expected = torch.tensor(differences(call, at.tolist()), dtype=torch.float64)
    assert expected.abs().max() > 1e-3
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("with_gallery", [False, True], ids=["batch", "gallery"])
@pytest.mark.parametrize(
    ("name", "transcription"),
    [
        ("contrastive_xbm", contrastive),
        ("triplet_semihard", semihard),
        ("lifted_structure", lifted),
        ("multi_similarity", multi_similarity),
    ],
)
def test_pair_recipes_are_their_equations(
    name: str, transcription: Callable[[literal.Matrix, literal.Mask, literal.Mask], float], with_gallery: bool
) -> None:
    x, gallery, s, P, N = situation(with_gallery)
    leaves = [some.requires_grad_() for some in (x, gallery.get("ref_emb", x))]
    value = recipe(name)(x, torch.tensor(LABELS), **gallery)
    value.backward()
    assert value.item() == pytest.approx(transcription(s, P, N), abs=1e-9)
    queries, items = (leaf.tolist() for leaf in leaves)

    def of_queries(rows: literal.Matrix) -> float:
        return transcription(literal.cosines(rows, items if with_gallery else rows), P, N)

    check_gradient(x.grad, of_queries, x)
    if with_gallery:
        check_gradient(leaves[1].grad, lambda rows: transcription(literal.cosines(queries, rows), P, N), leaves[1])


@pytest.mark.parametrize("with_gallery", [False, True], ids=["batch", "gallery"])
def test_irt_adds_the_entropy_of_the_batch(with_gallery: bool) -> None:
    x, gallery, _, P, N = situation(with_gallery)
    value = recipe("contrastive_irt")(x.requires_grad_(), torch.tensor(LABELS), **gallery)
    value.backward()

    def expected(rows: literal.Matrix) -> float:
        s = literal.cosines(rows, gallery["ref_emb"].tolist() if with_gallery else rows)
        return contrastive(s, P, N) + 0.7 * koleo_by_loops(rows)

    assert value.item() == pytest.approx(expected(x.tolist()), abs=1e-9)
    check_gradient(x.grad, expected, x)


def softmax_of(logits: Callable[[float], float], smoothing: float = 0.0) -> Callable[[literal.Matrix], float]:
    """-1/M sum_i log of the share of the label in e^logit of the scores with four classes; smoothed, a part of the
    label's weight is shared by all classes."""

    def value(s: literal.Matrix) -> float:
        total = 0.0
        for row, label in zip(s, LABELS, strict=True):
            exponentials = [math.exp(logits(cosine)) for cosine in row]
            for c, exponential in enumerate(exponentials):
                weight = smoothing / len(row) + (1 - smoothing if c == label else 0)
                total -= weight * math.log(exponential / sum(exponentials))
        return total / len(s)

    return value


def check_classes(
    name: str, weights: str, by_scores: Callable[[literal.Matrix], float], score: Callable[..., literal.Matrix]
) -> None:
    """Value, and gradients at the embeddings and at the class vectors, which are a row for each class."""
    x, loss = drawn(6, 3, 1).requires_grad_(), recipe(name).double()
    leaf = getattr(loss.loss, weights)
    with torch.no_grad():
        leaf.add_(0.3 * drawn(*leaf.shape, 7))
    value = loss(x, torch.tensor(LABELS))
    value.backward()
    lying = leaf.shape[0] != 4
    rows = (leaf.T if lying else leaf).tolist()
    assert value.item() == pytest.approx(by_scores(score(x.tolist(), rows)), abs=1e-9)
    check_gradient(x.grad, lambda some: by_scores(score(some, rows)), x)
    found = leaf.grad.T if lying else leaf.grad
    check_gradient(found, lambda some: by_scores(score(x.tolist(), some)), leaf.T if lying else leaf)


@pytest.mark.parametrize(("name", "scale"), [("proxy_nca", 1), ("proxy_nca_pp", 9)])
def test_proxy_nca_recipes_are_their_equation(name: str, scale: float) -> None:
    check_classes(name, "proxies", softmax_of(lambda s: -scale * (2 - 2 * s)), literal.cosines)


def test_normalised_softmax_is_its_equation() -> None:
    check_classes("normalised_softmax", "W", softmax_of(lambda s: s / 0.05), literal.cosines)


def test_cross_entropy_is_its_equation() -> None:
    def products(rows: literal.Matrix, weights: literal.Matrix) -> literal.Matrix:
        return [[sum(a * b for a, b in zip(x, w, strict=True)) for w in weights] for x in rows]

    check_classes("cross_entropy", "weight", softmax_of(lambda s: s, 0.1), products)
    loss = recipe("cross_entropy").double()
    loss(drawn(6, 3, 1), torch.tensor(LABELS)).backward()
    # weights of zero: every class has a quarter, and the label (smoothed) 0.925 instead
    expected = [1 / 4 - (0.1 / 4 + 0.9 * LABELS.count(c) / 6) for c in range(4)]
    assert loss.loss.bias.grad.tolist() == pytest.approx(expected, abs=1e-12)


def test_class_weights_start_at_the_released_lengths() -> None:
    """Rates are for a length: a vector turns by the step over it. The library starts all at N(0, 1)."""
    torch.manual_seed(0)
    assert pml.proxy_nca_pp(50, 64).loss.proxies.std().item() == pytest.approx(1 / 8, rel=0.05)
    weights = pml.normalised_softmax(50, 64).loss.W
    assert 0.99 / 8 < weights.abs().max().item() <= 1 / 8  # uniform within 1 / sqrt(64)
    assert torch.linalg.vector_norm(weights, dim=0).mean().item() == pytest.approx(3**-0.5, rel=0.05)


def test_only_the_classifier_sees_lengths() -> None:
    """Normalised embeddings are another loss for it, and the same for all the others."""
    x = drawn(6, 3, 1)
    unit = torch.nn.functional.normalize(x, dim=1)
    for name in RECIPES:
        loss = recipe(name)
        if name == "cross_entropy":  # its weights start at zero
            torch.nn.init.normal_(loss.loss.weight)
        values = []
        for vectors in (x, unit):
            torch.manual_seed(1)  # for the miners that draw
            values.append(loss(vectors, torch.tensor(LABELS)).item())
        assert loss.uses_lengths is (name == "cross_entropy")
        assert (values[0] == pytest.approx(values[1], abs=1e-6)) is not loss.uses_lengths


def test_distance_weighted_recipes_have_their_papers_settings() -> None:
    for name in ("triplet_distance_weighted", "margin_distance_weighted"):
        loss = recipe(name)
        assert (loss.miner.cutoff, loss.miner.nonzero_loss_cutoff, loss.loss.margin) == (0.5, 1.4, 0.2)  # type: ignore[union-attr]
    shared, per_class = pml.margin_distance_weighted(), pml.margin_distance_weighted(num_classes=3)
    assert [p.tolist() for p in shared.parameters()] == [pytest.approx([1.2])]
    assert [p.tolist() for p in per_class.parameters()] == [pytest.approx([1.2] * 3)]


def test_margin_loss_is_its_equation() -> None:
    """Wu et al. 2017: [0.2 + d_ap - beta]+ + [0.2 - d_an + beta]+ over the non-zero terms; triplets given."""
    x, _, _, _, _ = situation(False)
    loss = MetricLearning(pml.margin_distance_weighted().loss).double()
    triplets = torch.tensor([0, 2]), torch.tensor([1, 3]), torch.tensor([4, 0])

    def expected(rows: literal.Matrix, beta: float = 1.2) -> float:
        s, terms = literal.cosines(rows, rows), []
        for a, p, n in zip(*(index.tolist() for index in triplets), strict=True):
            terms += [max(0.0, 0.2 + euclidean(s[a][p]) - beta), max(0.0, 0.2 - euclidean(s[a][n]) + beta)]
        return sum(terms) / sum(t > 0 for t in terms)

    value = loss(x.requires_grad_(), torch.tensor(LABELS), triplets)
    value.backward()
    assert value.item() == pytest.approx(expected(x.tolist()), abs=1e-6)
    check_gradient(x.grad, expected, x)
    slope = (expected(x.tolist(), 1.2 + 1e-6) - expected(x.tolist(), 1.2 - 1e-6)) / 2e-6
    assert loss.loss.beta.grad.item() == pytest.approx(slope, abs=1e-6)


def test_the_miner_is_called_with_the_gallery() -> None:
    seen: list[tuple[Any, ...]] = []

    def miner(
        embeddings: Tensor, labels: Tensor, ref_emb: Tensor | None = None, ref_labels: Tensor | None = None
    ) -> Any:
        seen.append((embeddings.shape, None if ref_emb is None else ref_emb.shape))
        return tuple(torch.tensor([0]) for _ in range(3))

    x, gallery, _, _, _ = situation(True)
    loss = MetricLearning(losses.TripletMarginLoss(), miner)
    loss(x, torch.tensor(LABELS), **gallery)
    loss(x, torch.tensor(LABELS))
    assert seen == [((6, 3), (5, 3)), ((6, 3), None)]


def test_a_gallery_equal_to_the_batch_is_a_gallery() -> None:
    """The library takes ref_emb that is the batch itself for the in-batch call; a copy of it must not differ."""
    x, labels = drawn(6, 3, 1), torch.tensor(LABELS)
    loss = MetricLearning(losses.MultiSimilarityLoss())
    same = loss(x, labels, ref_emb=x, ref_labels=labels)
    copied = loss(x, labels, ref_emb=x.clone(), ref_labels=labels.clone())
    assert same.item() == copied.item()
    assert same.item() != loss(x, labels).item()  # here each item is one of its own positives


@pytest.mark.parametrize("name", sorted(PROXIES))
def test_class_weights_take_no_gallery(name: str) -> None:
    x, gallery, _, _, _ = situation(True)
    with pytest.raises(ValueError, match="takes no gallery; leave out ref_emb and ref_labels"):
        recipe(name)(x, torch.tensor(LABELS), **gallery)


@pytest.mark.parametrize("name", sorted(PROXIES))
@pytest.mark.parametrize("label", [-1, 4, 2**40])
def test_class_weights_refuse_unknown_labels(name: str, label: int) -> None:
    labels = torch.tensor([0, 1, 2, 3, label, 0])
    with pytest.raises(
        ValueError, match=rf"labels must lie in \[0, 4\).*got {label}; number the training classes from 0"
    ):
        recipe(name)(drawn(6, 3, 1), labels)


@pytest.mark.parametrize("name", sorted(PROXIES))
def test_class_weights_refuse_other_dimensions(name: str) -> None:
    with pytest.raises(ValueError, match="embeddings have 5 dimensions but the loss was made with embedding_size=3"):
        recipe(name)(drawn(6, 5, 1), torch.tensor(LABELS))
    for wrong in ({"num_classes": 0, "embedding_size": 3}, {"num_classes": 3, "embedding_size": 0}):
        with pytest.raises(ValueError, match="must be >= 1, got 0"):
            RECIPES[name](**wrong)


def test_unknown_labels_where_nobody_can_look_make_nan() -> None:
    loss = torch.compile(recipe("normalised_softmax"), backend="eager")
    assert loss(drawn(6, 3, 1), torch.tensor(LABELS)).isfinite()
    assert loss(drawn(6, 3, 1), torch.tensor([0, 1, 2, 3, 4, 0])).isnan()


@pytest.mark.parametrize("name", ["margin_distance_weighted", *sorted(PROXIES)])
def test_parameters_have_gradients_even_when_nothing_counts(name: str) -> None:
    loss = recipe(name)
    x = drawn(0, 3, 1).requires_grad_() if name in PROXIES else drawn(3, 3, 1).requires_grad_()
    value = loss(x, torch.arange(len(x)))
    value.backward()
    assert value.item() == 0
    assert list(loss.parameters())
    for leaf in (x, *loss.parameters()):
        assert leaf.grad is not None
        assert bool((leaf.grad == 0).all())


def test_unusual_results_are_refused_and_single_ones_made_scalar() -> None:
    x, labels = drawn(6, 3, 1), torch.tensor(LABELS)
    with pytest.raises(TypeError, match="TripletMarginLoss must return one number, got dict; give it another reducer"):
        MetricLearning(losses.TripletMarginLoss(reducer=reducers.DoNothingReducer()))(x, labels)
    assert MetricLearning(losses.MarginLoss(learn_beta=True, nu=0.1))(x, labels).shape == ()


BAD: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "a class": (
        lambda: MetricLearning(losses.TripletMarginLoss),
        TypeError,
        r"got the class TripletMarginLoss; use Trip",
    ),  # type: ignore[arg-type]
    "a miner class": (
        lambda: MetricLearning(losses.TripletMarginLoss(), miners.MultiSimilarityMiner),
        TypeError,
        "miner must be an instance",
    ),
    "a string": (lambda: MetricLearning("triplet"), TypeError, "loss must be an nn.Module, got str"),  # type: ignore[arg-type]
    "a miner string": (lambda: MetricLearning(losses.NCALoss(), "hard"), TypeError, "miner must be callable"),  # type: ignore[arg-type]
    "margin": (lambda: pml.triplet_semihard(margin=0), ValueError, "margin must be > 0"),
    "entropy": (lambda: pml.contrastive_irt(entropy_weight=-1), ValueError, "entropy_weight must be >= 0"),
    "temperature": (lambda: pml.normalised_softmax(2, 2, temperature=0), ValueError, "temperature must be > 0"),
    "smoothing": (lambda: pml.cross_entropy(2, 2, label_smoothing=2), ValueError, "label_smoothing must be <= 1"),
    "classes": (lambda: pml.proxy_nca(2.0, 2), TypeError, "num_classes must be an int"),  # type: ignore[arg-type]
    "two miners": (
        lambda: recipe("multi_similarity")(drawn(2, 3, 0), torch.tensor([0, 0]), (torch.tensor([0]),) * 4),
        ValueError,
        "indices_tuple was given, but this loss has a miner of its own",
    ),
    "mined cross-entropy": (
        lambda: recipe("cross_entropy")(drawn(2, 3, 0), torch.tensor([0, 0]), (torch.tensor([0]),) * 4),
        ValueError,
        "cross-entropy takes every item of the batch",
    ),
    "column of labels": (
        lambda: recipe("contrastive_xbm")(drawn(2, 3, 0), torch.tensor([[0], [0]])),
        ValueError,
        "labels must be 1-D",
    ),
    "zero vector": (
        lambda: recipe("multi_similarity")(torch.zeros(2, 3), torch.tensor([0, 0])),
        ValueError,
        r"embeddings\[0\] is a zero vector",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input(name: str) -> None:
    made, error, message = BAD[name]
    with pytest.raises(error, match=message):
        made()


def test_the_cure_is_named_when_the_library_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pytorch_metric_learning", None)
    monkeypatch.delitem(sys.modules, "roadmap.losses.pml")
    with pytest.raises(ImportError, match=r"pip install roadmap-retrieval\[pml\]"):
        importlib.import_module("roadmap.losses.pml")
