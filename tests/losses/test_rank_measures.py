"""SupNDCG, RecallAtK and SupRank against the loops, finite differences, by hand; bounds as properties."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.autograd import gradcheck

from roadmap.losses import (
    ROADMAP,
    ClusteredLoss,
    RecallAtK,
    SupAP,
    SupNDCG,
    SupRank,
    ndcg,
    recall_at_k,
    saturation_point,
    supndcg,
    suprank,
)
from roadmap.losses.comparison import Comparison
from roadmap.losses.named import named_loss
from roadmap.losses.rank_ap import heaviside, plain_average_precision
from roadmap.losses.rank_recall import recall_measure

from . import literal, rank_literal
from .cases import CASES, Case, Literal, check_agrees, check_agrees_on_scores, drawn, score_table
from .test_own import LABELS, masks
from .test_properties import tables

BOTH = pytest.mark.parametrize("include_self", [True, False], ids=["with self", "without self"])
RELEASED = {"tau_k": (1.0, 2.0, 4.0, 8.0, 16.0), "share": "reachable"}


def released_recall(s: literal.Matrix, P: literal.Mask, N: literal.Mask) -> literal.ValueAndGradient:
    return rank_literal.recall_at_k(s, P, N, temperatures=RELEASED["tau_k"], reachable=True)  # type: ignore[arg-type]


MODULES: dict[str, tuple[Any, Literal]] = {
    "SupNDCG": (SupNDCG, rank_literal.supndcg),
    "RecallAtK": (RecallAtK, rank_literal.recall_at_k),
    "RecallAtK as released": (lambda **self: RecallAtK(**RELEASED, **self), released_recall),
}


def graded(positives: Tensor, negatives: Tensor) -> Tensor:
    """1 for positives, 0 for negatives, -1 for what is in no ranking."""
    return torch.where(positives, 1.0, torch.where(negatives, 0.0, -1.0))


@BOTH
@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize("case", CASES, ids=repr)
def test_measures_are_their_transcriptions(case: Case, name: str, include_self: bool) -> None:
    make, transcription = MODULES[name]
    check_agrees(make(include_self=include_self), transcription, case, include_self)


@pytest.mark.parametrize("ties", [False, True], ids=["no ties", "ties"])
@pytest.mark.parametrize("seed", range(3))
def test_functions_ignore_items_in_neither_mask(seed: int, ties: bool) -> None:
    table = score_table(seed, ties=ties)
    check_agrees_on_scores(supndcg, rank_literal.supndcg, table)
    check_agrees_on_scores(recall_at_k, rank_literal.recall_at_k, table)
    scores, positives, negatives = table
    expected = rank_literal.exact_ndcg(scores.tolist(), positives.tolist(), negatives.tolist())
    assert ndcg(scores, graded(positives, negatives)).item() == pytest.approx(expected, abs=1e-12)
    each = ndcg(scores, graded(positives, negatives), reduction="none")
    assert torch.equal(each.isnan(), ~positives.any(1))
    assert each.nanmean().item() == pytest.approx(expected, abs=1e-12)


def test_other_settings() -> None:
    case = CASES[1]
    sup = SupNDCG(0.1, 10.0, 0.3)
    check_agrees(sup, lambda s, P, N: rank_literal.supndcg(s, P, N, 0.1, 10.0, 0.3), case, include_self=True)
    recall = RecallAtK((3, 5), tau=0.2, tau_k=(0.5, 0.25))
    check_agrees(recall, lambda s, P, N: rank_literal.recall_at_k(s, P, N, (3, 5), 0.2, (0.5, 0.25)), case, False)


def test_defaults_are_the_papers() -> None:
    loss = RecallAtK()
    assert loss.measure == recall_measure((1, 2, 4, 8, 16), 1.0, "positives")
    assert (loss.tau, loss.include_self, loss.mix) == (0.01, False, False)
    assert repr(loss).startswith("RecallAtK(ks=[1, 2, 4, 8, 16], tau_k=[1.0, 1.0, 1.0, 1.0, 1.0], share='positives'")
    assert (SupRank(2, 3).lam, SupRank(2, 3).clusters.temperature, SupRank(2, 3).rule.ranks) == (
        0.1,
        0.05,
        SupAP().rule.ranks,
    )


def test_worked_by_hand() -> None:
    # order + - +: ranks 1 and 3
    scores = torch.tensor([[0.9, 0.5, 0.1]], dtype=torch.float64)
    positives = torch.tensor([[True, False, True]])
    expected = (1 + 1 / 2) / (1 + 1 / math.log2(3))
    assert ndcg(scores, graded(positives, ~positives)).item() == pytest.approx(expected, abs=1e-12)
    h = 100 * (0.4 - saturation_point(0.01)) + 0.99 + 0.5  # the negative 0.4 above the second positive
    bound = (1 + 1 / math.log2(1 + 2 + h)) / (1 + 1 / math.log2(3))
    assert supndcg(scores, positives, ~positives).item() == pytest.approx(1 - bound, abs=1e-12)
    smooth = recall_at_k(scores, positives, ~positives, ks=(1, 2))
    recalls = [literal.sigmoid(k - rank) for k in (1, 2) for rank in (1, 3)]
    assert smooth.item() == pytest.approx(1 - sum(recalls) / 4, abs=1e-12)
    sharp = recall_at_k(scores, positives, ~positives, ks=(1, 2, 3), tau_k=1e-3)
    assert sharp.item() == pytest.approx(1 - (1 / 4 + 1 / 2 + 3 / 4) / 3, abs=1e-12)  # sigmoid(0) = 1/2 at rank = k


def test_the_query_in_its_own_ranking_is_the_released_codes() -> None:
    """There the query, no positive itself, stands before its positives: as a negative of its own."""
    scores, positives = torch.tensor([[1.0, 0.8, 0.2]]).double(), torch.tensor([[False, True, False]])
    inside, outside = torch.tensor([[True, False, True]]), torch.tensor([[False, False, True]])
    for negatives, rank in ((inside, 2), (outside, 1)):
        value = recall_at_k(scores, positives, negatives, ks=(1,)).item()
        assert value == pytest.approx(1 - literal.sigmoid(1 - rank), abs=1e-6)


@pytest.mark.parametrize("seed", range(2))
def test_gradcheck(seed: int) -> None:
    scores, positives, negatives = score_table(seed)
    leaf = scores.requires_grad_()
    assert gradcheck(lambda s: supndcg(s, positives, negatives, tau=0.1, rho=10.0), leaf)
    assert gradcheck(lambda s: recall_at_k(s, positives, negatives, tau=0.1), leaf)
    assert gradcheck(lambda s: recall_at_k(s, positives, negatives, (1, 3), 0.1, (0.7, 2.0), "reachable"), leaf)
    proxy = torch.randn(4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).requires_grad_()
    classes = torch.tensor([0, 2, 1, 2])
    for measure in ("ap", "ndcg", "recall"):
        assert gradcheck(
            lambda s, p, measure=measure: suprank(
                s, positives, negatives, p, classes, 0.3, 0.5, measure, tau=0.1, rho=10.0
            ),
            (leaf, proxy),
        )


@settings(max_examples=150)
@given(tables(), st.sampled_from([0.001, 0.01, 0.1]), st.sampled_from([0.0, 1.0, 100.0]), st.sampled_from([None, 0.1]))
def test_supndcg_is_an_upper_bound(
    table: tuple[Tensor, Tensor, Tensor], tau: float, rho: float, delta: float | None
) -> None:
    scores, positives, negatives = table
    assume(bool(positives.any()))
    for s, slack in ((scores, 1e-12), (scores.float(), 1e-6)):
        assert supndcg(s, positives, negatives, tau, rho, delta).item() >= (
            1 - ndcg(s, graded(positives, negatives)).item() - slack
        )


@settings(max_examples=100)
@given(tables())
def test_supndcg_pushes_no_positive_down_and_no_negative_up(table: tuple[Tensor, Tensor, Tensor]) -> None:
    scores, positives, negatives = table
    s = scores.requires_grad_()
    (gradient,) = torch.autograd.grad(supndcg(s, positives, negatives), s)
    assert bool((gradient[positives] <= 0).all())
    assert bool((gradient[negatives] >= 0).all())
    assert bool((gradient[~positives & ~negatives] == 0).all())


def test_recall_is_no_upper_bound() -> None:
    """A positive at rank 2 has none of R@1, and sigmoid(-1) of the smooth one."""
    scores, positives = torch.tensor([[0.1, 0.9]]), torch.tensor([[True, False]])
    assert recall_at_k(scores, positives, ~positives, ks=(1,)).item() == pytest.approx(
        1 - literal.sigmoid(-1), abs=1e-6
    )


def test_other_measures_have_second_derivatives_by_the_plain_function() -> None:
    scores, positives, negatives = score_table(1)
    step = lambda t: torch.sigmoid(t / 0.1)  # noqa: E731
    measure = recall_measure((1, 2), 1.0, "reachable")
    value = plain_average_precision(scores.requires_grad_(), positives, negatives, step, step, measure)
    counted = positives.any(1)
    expected = recall_at_k(scores, positives, negatives, (1, 2), 0.1, share="reachable")
    assert 1 - (value[counted]).mean().item() == pytest.approx(expected.item(), abs=1e-12)
    (first,) = torch.autograd.grad(value.sum(), scores, create_graph=True)
    assert torch.autograd.grad(first.square().sum(), scores)[0].isfinite().all()
    assert heaviside(torch.zeros(1)).item() == 1


# --- SupRank


def rank_transcription(measure: str) -> Literal:
    return {"ap": literal.supap, "ndcg": rank_literal.supndcg, "recall": rank_literal.suprecall}[measure]


@pytest.mark.parametrize("measure", ["ap", "ndcg", "recall"])
@pytest.mark.parametrize("gallery", [False, True], ids=["batch", "gallery"])
def test_suprank_is_its_transcription(measure: Any, gallery: bool) -> None:
    torch.manual_seed(0)
    loss = SupRank(4, 3, lam=0.3, measure=measure, include_self=False).double()
    x, labels = drawn(9, 3, 1).requires_grad_(), LABELS
    items, item_labels = (drawn(7, 3, 2).requires_grad_(), [0, 5, 1, 1, 0, 2, 9]) if gallery else (x, LABELS.tolist())
    others = {"ref_emb": items, "ref_labels": torch.tensor(item_labels)} if gallery else {}
    value = loss(x, labels, **others)
    value.backward()
    P, N = literal.masks(labels.tolist(), item_labels if gallery else None, include_self=False)
    queries, rows, proxies = x.tolist(), items.tolist(), loss.clusters.proxies.tolist()
    ranking, ds = rank_transcription(measure)(literal.cosines(queries, rows), P, N)
    clusters, dp = rank_literal.proxies(literal.cosines(queries, proxies), labels.tolist())
    (dq, dg), (dx, dw) = (
        [torch.tensor(d, dtype=torch.float64) for d in literal.gradient_of_cosines(*parts)]
        for parts in ((ds, queries, rows), (dp, queries, proxies))
    )
    assert value.item() == pytest.approx(0.7 * ranking + 0.3 * clusters, abs=1e-11)
    at_x = 0.7 * (dq if gallery else dq + dg) + 0.3 * dx
    torch.testing.assert_close(x.grad, at_x, rtol=1e-8, atol=1e-9)
    torch.testing.assert_close(loss.clusters.proxies.grad, 0.3 * dw, rtol=1e-8, atol=1e-9)
    if gallery:
        torch.testing.assert_close(items.grad, 0.7 * dg, rtol=1e-8, atol=1e-9)


def test_the_module_is_the_function() -> None:
    loss = SupRank(4, 3, lam=0.4, temperature=0.2, measure="recall", ks=(1, 3), tau_k=0.5, share="positives").double()
    x = drawn(9, 3, 5)
    c = Comparison.of(x, LABELS)
    proxy = torch.nn.functional.normalize(x) @ torch.nn.functional.normalize(loss.clusters.proxies).T
    expected = suprank(
        c.scores, c.positives(include_self=True), c.negatives, proxy, LABELS, 0.4, 0.2, "recall", ks=(1, 3), tau_k=0.5,
        share="positives",
    )  # fmt: skip
    assert loss(x, LABELS).item() == pytest.approx(expected.item(), abs=1e-12)
    assert "measure='recall'" in repr(loss)
    assert "ks=[1, 3], tau_k=[0.5, 0.5], share='positives'" in repr(loss)
    assert "ks" not in repr(SupRank(4, 3, measure="ndcg"))


def test_ends_of_lam_are_the_two_terms() -> None:
    x = drawn(9, 3, 6)
    assert SupRank(4, 3, lam=0)(x, LABELS).item() == pytest.approx(SupAP()(x, LABELS).item(), abs=1e-12)
    assert SupRank(4, 3, lam=0, measure="ndcg")(x, LABELS).item() == pytest.approx(SupNDCG()(x, LABELS).item())
    loss = SupRank(4, 3, lam=1).double()
    expected = rank_literal.proxies(literal.cosines(x.tolist(), loss.clusters.proxies.tolist()), LABELS.tolist())[0]
    assert loss(x, LABELS).item() == pytest.approx(expected, abs=1e-11)


@pytest.mark.parametrize("make", [SupRank, lambda *shape: ClusteredLoss(SupAP(), *shape)], ids=["suprank", "around"])
def test_proxies_start_as_released(make: Any) -> None:
    """Uniform within 1 / sqrt(D), so that they are about 0.58 long: rates are for that length."""
    torch.manual_seed(0)
    proxies = make(50, 64).clusters.proxies
    assert 0.99 / 8 < proxies.abs().max().item() <= 1 / 8
    assert torch.linalg.vector_norm(proxies, dim=1).mean().item() == pytest.approx(3**-0.5, rel=0.05)


def test_no_query_without_a_class_counts_twice() -> None:
    """Every query counts in the proxy term, also one without a positive; in the term of the ranks it does not."""
    loss = SupRank(4, 3)
    terms = loss.terms(Comparison.of(drawn(9, 3, 2), LABELS, ref_emb=drawn(2, 3, 3), ref_labels=torch.tensor([0, 7])))
    assert terms.counts.tolist() == [4, 9]


# --- ClusteredLoss


def test_a_clustered_loss_is_both_its_parts() -> None:
    """ROADMAP by its loops, and the proxies by theirs; a clustered SupAP is SupRank."""
    torch.manual_seed(0)
    loss = ClusteredLoss(ROADMAP(include_self=False), 4, 3, lam=0.3).double()
    x = drawn(9, 3, 1).requires_grad_()
    value = loss(x, LABELS)
    value.backward()
    assert x.grad is not None
    queries, proxies = x.tolist(), loss.clusters.proxies.tolist()
    y = x.detach().clone().requires_grad_()
    ranking = ROADMAP(include_self=False)(y, LABELS)
    ranking.backward()
    clusters, dp = rank_literal.proxies(literal.cosines(queries, proxies), LABELS.tolist())
    dx, dw = (torch.tensor(d, dtype=torch.float64) for d in literal.gradient_of_cosines(dp, queries, proxies))
    assert value.item() == pytest.approx(0.7 * ranking.item() + 0.3 * clusters, abs=1e-11)
    torch.testing.assert_close(x.grad, 0.7 * y.grad + 0.3 * dx, rtol=1e-8, atol=1e-9)
    torch.testing.assert_close(loss.clusters.proxies.grad, 0.3 * dw, rtol=1e-8, atol=1e-9)
    torch.testing.assert_close(loss.value(loss.terms(Comparison.of(x, LABELS))), value)
    suprank_, same = SupRank(4, 3, lam=0.3), ClusteredLoss(SupAP(), 4, 3, lam=0.3)
    same.clusters.load_state_dict(suprank_.clusters.state_dict())
    torch.testing.assert_close(same(drawn(9, 3, 1).float(), LABELS), suprank_(drawn(9, 3, 1).float(), LABELS))


def test_what_cannot_be_clustered_is_refused() -> None:
    with pytest.raises(ValueError, match="with terms and a value, such as ROADMAP.., got Identity"):
        ClusteredLoss(nn.Identity(), 4, 3)
    with pytest.raises(ValueError, match="lam must be <= 1"):
        ClusteredLoss(ROADMAP(), 4, 3, lam=2)
    with pytest.raises(ValueError, match="of=sec wraps a loss itself; name the loss that it wraps"):
        named_loss("clustered", num_classes=2, embedding_size=3, of="sec")


# --- SiMix


@BOTH
@pytest.mark.parametrize("gallery", [False, True, "own"], ids=["batch", "gallery", "some stand in it"])
def test_mixtures_are_their_transcription(gallery: bool | str, include_self: bool) -> None:
    x, labels = drawn(7, 3, 3), torch.tensor([0, 1, 0, 2, 1, 0, 3])
    items, item_labels, own, others = x, labels, torch.arange(7), {}
    if gallery:
        items, item_labels = torch.cat([x[[4, 0, 2]], drawn(4, 3, 4)]), torch.tensor([1, 0, 0, 2, 0, 1, 1])
        own = torch.tensor([1, -1, 2, -1, 0, -1, -1]) if gallery == "own" else torch.full((7,), -1)
        others = {"ref_emb": items, "ref_labels": item_labels} | ({"own": own} if gallery == "own" else {})
    torch.manual_seed(11)
    parts = torch.rand(4).double().tolist()  # 0 three times: three pairs; 1 twice: one
    s, P, N, places = rank_literal.mixed_scores(
        x.tolist(), items.tolist(), labels.tolist(), item_labels.tolist(), own.tolist(), parts
    )
    assert len(s) == 11
    assert len(s[0]) == {False: 11, True: 7, "own": 8}[gallery]
    assert places[7:] == {False: [7, 8, 9, 10], True: [-1] * 4, "own": [7, -1, -1, -1]}[gallery]
    for row, place in zip(P, places, strict=True):
        if include_self and place >= 0:
            row[place] = True
    expected, _ = rank_literal.recall_at_k(s, P, N)
    torch.manual_seed(11)
    loss = RecallAtK(mix=True, include_self=include_self)
    assert loss(x, labels, **others).item() == pytest.approx(expected, abs=1e-11)


def test_gradients_of_mixtures() -> None:
    labels = torch.tensor([0, 1, 0, 1, 1])
    loss = RecallAtK((1, 2), tau=0.3, mix=True)

    def value(x: Tensor) -> Tensor:
        torch.manual_seed(2)
        found: Tensor = loss(x, labels)
        return found

    assert gradcheck(value, drawn(5, 3, 1).requires_grad_())


def test_mixtures_in_both_precisions_are_alike_and_new_ones_differ() -> None:
    loss, x = RecallAtK(mix=True), drawn(9, 3, 2)
    values = []
    for dtype in (torch.float64, torch.float32):
        torch.manual_seed(3)
        values.append(loss(x.to(dtype), LABELS).item())
    assert values[1] == pytest.approx(values[0], abs=1e-4)
    assert loss(x, LABELS).item() != loss(x, LABELS).item()


def test_without_pairs_nothing_is_mixed() -> None:
    x, labels, items = drawn(3, 3, 2), torch.tensor([0, 1, 2]), drawn(4, 3, 3)
    others = {"ref_emb": items, "ref_labels": torch.tensor([0, 1, 2, 0])}
    assert RecallAtK(mix=True)(x, labels, **others).item() == pytest.approx(
        RecallAtK()(x, labels, **others).item(), abs=1e-12
    )


# --- what is refused


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: RecallAtK(ks=()), r"ks must list at least one number of places, such as \(1, 2, 4\), got \(\)"),
        (lambda: RecallAtK(ks=3), "ks must list at least one"),
        (lambda: RecallAtK(ks=(0,)), "every k of ks must be >= 1, got 0"),
        (lambda: RecallAtK(tau_k=(1.0, 2.0)), "tau_k must be one number, or one for each of the 5 ks, got 2"),
        (lambda: RecallAtK(tau_k=0.0), "tau_k must be > 0, got 0"),
        (lambda: RecallAtK(share="all"), "share must be 'positives' or 'reachable', got 'all'"),
        (lambda: RecallAtK(tau=-1.0), "tau must be > 0"),
        (lambda: SupNDCG(rho=-1.0), "rho must be >= 0"),
        (lambda: SupRank(2, 3, lam=1.5), r"lam must be <= 1: the loss is \(1 - lam\) rank loss \+ lam pr"),
        (lambda: SupRank(2, 3, measure="map"), "measure must be 'ap', 'ndcg' or 'recall', got 'map'"),
        (lambda: SupRank(0, 3), "num_classes must be >= 1"),
        (lambda: SupRank(2, 3, temperature=0.0), "temperature must be > 0"),
        (lambda: SupRank(2, 3)(torch.randn(2, 3), torch.tensor([0, 2])), r"labels must lie in \[0, 2\), .*got 2;"),
        (lambda: SupRank(2, 3)(torch.randn(2, 4), torch.tensor([0, 1])), "4 dimensions but the loss was made with"),
        (lambda: SupRank(2, 3)(torch.randn(2, 3), torch.tensor([0, -1])), r"labels must lie in \[0, 2\), .*got -1;"),
        (
            lambda: ClusteredLoss(ROADMAP(), 2, 3)(torch.randn(2, 3), torch.tensor([-1, 1])),
            r"labels must lie in \[0, 2\), .*got -1;",
        ),
        (
            lambda: suprank(*score_table(0), torch.zeros(4, 2), torch.zeros(3, dtype=torch.int64)),
            "classes has 3 entries but scores has 4 rows",
        ),
        (
            lambda: suprank(*score_table(0), torch.zeros(3, 2), torch.zeros(4)),
            r"proxy_scores must have shape \(4, classes\), a row for each query, got \(3, 2\)",
        ),
        (
            lambda: RecallAtK(mix=True)(torch.randn(2, 3), torch.tensor([0, 0]), (torch.tensor([0]),) * 3),
            "mix pairs all pictures of a class by itself; leave out indices_tuple",
        ),
    ],
)  # fmt: skip
def test_refusals(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize("label", [-1, 2])
def test_a_class_without_a_proxy_makes_a_compiled_loss_nan(label: int) -> None:
    loss = torch.compile(SupRank(2, 3), backend="eager")
    assert loss(torch.randn(3, 3), torch.tensor([0, label, 0])).isnan()


def test_wrong_types_are_refused() -> None:
    for make, message in (
        (lambda: RecallAtK(mix=1), "mix must be True or False"),  # type: ignore[arg-type]
        (lambda: RecallAtK(ks=(1.5,)), "every k of ks must be an int"),  # type: ignore[arg-type]
        (lambda: SupRank(2, 3, include_self=0), "include_self must be True or False"),  # type: ignore[arg-type]
        (lambda: suprank(*score_table(0), torch.zeros(4, 2), torch.zeros(4)), "classes must hold integers"),
    ):
        with pytest.raises(TypeError, match=message):
            make()


@pytest.mark.parametrize("loss", [SupNDCG(include_self=False), RecallAtK(), RecallAtK(mix=True)], ids=repr)
def test_silence_without_positives(loss: nn.Module) -> None:
    nobody = torch.zeros(0, dtype=torch.int64)
    for labels, others in (
        (torch.arange(5), {}),
        (nobody, {}),
        (torch.zeros(5, dtype=torch.int64), {"ref_emb": torch.zeros(0, 3), "ref_labels": nobody}),
        (torch.zeros(5, dtype=torch.int64), {"ref_emb": drawn(2, 3, 1), "ref_labels": torch.tensor([1, 2])}),
    ):
        x = drawn(5, 3, 0)[: len(labels)].requires_grad_()
        value = loss(x, labels, **others)
        value.backward()
        assert value.item() == 0
        assert x.grad is not None
        assert not x.grad.any()


@pytest.mark.parametrize("name", ["SupNDCG", "RecallAtK"])
def test_places_follow_the_literal_loop(name: str) -> None:
    items, item_labels = drawn(11, 3, 5), torch.tensor([0, 1, 2, 0, 1, 2, 0, 0, 1, 2, 3])
    own = torch.tensor([3, -1, 5, 10])
    queries, labels = items[[3, 1, 5, 10]], torch.tensor([0, 1, 2, 3])
    make, transcription = MODULES[name]
    value = make(include_self=False)(queries, labels, ref_emb=items, ref_labels=item_labels, own=own)
    P, N = masks(labels.tolist(), item_labels.tolist(), own.tolist(), include_self=False)
    expected, _ = transcription(literal.cosines(queries.tolist(), items.tolist()), P, N)
    assert value.item() == pytest.approx(expected, abs=1e-11)
