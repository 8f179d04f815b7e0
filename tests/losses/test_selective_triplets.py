"""Triplet SCT against loops over Python floats, by hand, and where its branches meet."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.autograd import gradcheck

from roadmap.losses import Memory, TripletSCT, triplet_sct

from . import literal
from .cases import CASES, Case, check_agrees, check_agrees_on_scores, drawn, score_table

OPTIONS: list[dict[str, Any]] = [
    {},
    {"ceiling": None, "copies": None},  # the equation of the paper
    {"method": "hn"},
    {"method": "shn"},
    {"method": "shn", "positive": "hard", "copies": None},
    {"positive": "hard", "lam": 0.3, "temperature": 0.05, "ceiling": 0.9},
]


def by_loops(
    s: literal.Matrix,
    P: literal.Mask,
    N: literal.Mask,
    method: str = "sct",
    lam: float = 1.0,
    temperature: float = 0.1,
    positive: str = "easy",
    ceiling: float | None = 0.8,
    copies: float | None = 0.9999,
) -> literal.ValueAndGradient:
    """One triplet per query; d softplus(x) = sigmoid(x) dx, and the linear branch has the slope lam at the negative."""
    triplets = []
    for i, row in enumerate(s):
        positives = [j for j in literal.members(P[i]) if copies is None or row[j] <= copies]
        if not positives:
            continue
        p = positives[0]
        for j in positives:
            if (row[j] > row[p]) if positive == "easy" else (row[j] < row[p]):
                p = j
        negatives = [j for j in literal.members(N[i]) if method != "shn" or row[j] <= row[p]]
        if not negatives:
            continue
        n = negatives[0]
        for j in negatives:
            if row[j] > row[n]:
                n = j
        triplets.append((i, p, n))
    total, gradient = 0.0, literal.zeros(s)
    for i, p, n in triplets:
        s_ap, s_an = s[i][p], s[i][n]
        if method == "sct" and (s_an > s_ap or (ceiling is not None and s_an > ceiling)):
            total += lam * s_an / len(triplets)
            gradient[i][n] += lam / len(triplets)
        else:
            total += math.log1p(math.exp((s_an - s_ap) / temperature)) / len(triplets)
            slope = literal.sigmoid((s_an - s_ap) / temperature) / temperature / len(triplets)
            gradient[i][n] += slope
            gradient[i][p] -= slope
    return total, gradient


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("case", CASES, ids=repr)
def test_triplet_sct_is_its_transcription(case: Case, options: dict[str, Any]) -> None:
    check_agrees(TripletSCT(**options), lambda s, P, N: by_loops(s, P, N, **options), case, include_self=False)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("ties", [False, True])
def test_the_function_is_its_transcription(options: dict[str, Any], ties: bool) -> None:
    for seed in range(4):
        table = score_table(seed, ties=ties)
        check_agrees_on_scores(
            lambda s, p, n: triplet_sct(s, p, n, **options), lambda s, P, N: by_loops(s, P, N, **options), table
        )


def one_query(s_ap: float, s_an: float, **options: Any) -> tuple[float, list[float]]:
    scores = torch.tensor([[s_ap, s_an, -0.9]], dtype=torch.float64, requires_grad=True)
    positives = torch.tensor([[True, False, False]])
    value = triplet_sct(scores, positives, ~positives, **options)
    value.backward()
    assert scores.grad is not None
    return value.item(), scores.grad[0].tolist()


def test_worked_by_hand() -> None:
    # the negative is nearer: a push and nothing else
    assert one_query(0.3, 0.5, lam=2.0) == (pytest.approx(1.0), pytest.approx([0, 2, 0]))
    # the positive is nearer: -log softmax of 0.6 and 0.5 at temperature 0.1
    value, gradient = one_query(0.6, 0.5)
    assert value == pytest.approx(math.log(1 + math.exp(-1)))
    slope = 10 / (1 + math.e)
    assert gradient == pytest.approx([-slope, slope, 0])
    # both are near: released, a push; in the paper, a triplet
    assert one_query(0.9, 0.85)[1] == [0, 1, 0]
    assert one_query(0.9, 0.85, ceiling=None)[1][0] < 0


def test_where_the_branches_meet() -> None:
    """A tie, and a score at the ceiling, are triplets as the paper writes; the released code drops such a query."""
    for s_ap, s_an in ((0.5, 0.5), (0.9, 0.8)):
        assert one_query(s_ap, s_an)[1][0] < 0
    assert one_query(0.5, 0.5)[0] == pytest.approx(math.log(2))


def test_a_hard_triplet_moves_the_query_to_its_negative_and_sct_moves_it_away() -> None:
    """What the method is for. On a circle the negative stands between query and positive: to reach the one, a triplet
    brings the query nearer to the other."""
    query, positive, negative = (torch.tensor([[math.cos(a), math.sin(a)]]) for a in (0.0, 1.2, 0.1))
    turned = {}
    for method in ("hn", "sct"):
        x = query.clone().requires_grad_()
        gallery = torch.cat([positive, negative]), torch.tensor([0, 1])
        TripletSCT(method, ceiling=None)(x, torch.tensor([0]), None, *gallery).backward()  # type: ignore[arg-type]
        assert x.grad is not None
        step = -0.01 * x.grad
        turned[method] = ((query + step) @ negative.T - query @ negative.T).item()
    assert turned["sct"] < 0 < turned["hn"]


def test_semi_hard_negatives_are_no_nearer_than_the_positive() -> None:
    scores = torch.tensor([[0.5, 0.7, 0.4, 0.5], [0.1, 0.7, 0.4, 0.5]], requires_grad=True)
    positives = torch.tensor([[True, False, False, False]] * 2)
    value = triplet_sct(scores, positives, ~positives, method="shn")
    value.backward()
    assert value.item() == pytest.approx(math.log(2))  # 0.5 against 0.5; the second query has no such negative
    assert scores.grad is not None
    assert scores.grad[0].nonzero().flatten().tolist() == [0, 3]
    assert not scores.grad[1].any()


def test_copies_of_the_query_are_no_positives() -> None:
    x = drawn(5, 3, 0)
    x[1] = 2 * x[0]
    labels = torch.tensor([0, 0, 0, 1, 1])
    value = TripletSCT(ceiling=None)(x, labels)
    s = literal.cosines(x.tolist(), x.tolist())
    P, N = literal.masks(labels.tolist(), None, include_self=False)
    P[0][1] = P[1][0] = False
    assert value.item() == pytest.approx(by_loops(s, P, N, ceiling=None, copies=None)[0], abs=1e-12)
    assert value.item() != pytest.approx(TripletSCT(ceiling=None, copies=None)(x, labels).item(), abs=1e-3)
    # only what lies above the bound is a copy
    assert one_query(0.5, 0.25, copies=0.5) == one_query(0.5, 0.25)
    assert one_query(0.5, 0.25, copies=0.49)[0] == 0


@given(st.integers(0, 2**31), st.sampled_from(["sct", "hn", "shn"]))
def test_items_may_come_in_any_order(seed: int, method: str) -> None:
    generator = torch.Generator().manual_seed(seed)
    x, labels = drawn(9, 4, seed % 1000), torch.randint(3, (9,), generator=generator)
    order = torch.randperm(9, generator=generator)
    loss = TripletSCT(method)  # type: ignore[arg-type]
    assert loss(x[order], labels[order]).item() == pytest.approx(loss(x, labels).item(), abs=1e-12)


@pytest.mark.parametrize("method", ["sct", "hn", "shn"])
def test_gradients_are_those_of_the_value(method: str) -> None:
    labels = torch.tensor([0, 0, 1, 1, 1, 2])
    assert gradcheck(lambda x: TripletSCT(method)(x, labels), drawn(6, 3, 3).requires_grad_())  # type: ignore[arg-type]


def test_a_memory_joins() -> None:
    """A query meets its batch and what came before in one ranking, and itself in none."""
    memory, plain = Memory(TripletSCT(), size=6), TripletSCT()
    labels = torch.tensor([0, 0, 1, 1, 2, 2])
    before, now = drawn(6, 3, 5), drawn(6, 3, 6)
    memory(before, labels)
    both = torch.cat([now, before]), torch.cat([labels, labels])
    expected = plain(now, labels, None, *both, own=torch.arange(6))
    assert memory.form == "joined"
    assert memory(now, labels).item() == pytest.approx(expected.item(), abs=1e-12)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"method": "hard"}, ValueError, "method must be 'sct', 'hn' or 'shn', got 'hard'"),
        ({"positive": "any"}, ValueError, "positive must be 'easy' or 'hard', got 'any'"),
        ({"lam": -1.0}, ValueError, "lam must be >= 0, got -1"),
        ({"temperature": 0.0}, ValueError, "temperature must be > 0, got 0"),
        ({"ceiling": "0.8"}, TypeError, "ceiling must be a number, got str"),
        ({"copies": -2.0}, ValueError, "copies must be > -1, got -2"),
    ],
)
def test_what_it_refuses(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        TripletSCT(**options)
    with pytest.raises(error, match=message):
        triplet_sct(torch.zeros(1, 2), torch.tensor([[True, False]]), torch.tensor([[False, True]]), **options)


def test_defaults_are_those_of_the_cited_numbers() -> None:
    loss = TripletSCT()
    assert (loss.method, loss.lam, loss.temperature, loss.positive) == ("sct", 1.0, 0.1, "easy")
    assert (loss.ceiling, loss.copies) == (0.8, 0.9999)


def test_its_words() -> None:
    said = repr(TripletSCT(ceiling=None))
    assert said == ("TripletSCT(method='sct', lam=1.0, temperature=0.1, positive='easy', ceiling=None, copies=0.9999)")
