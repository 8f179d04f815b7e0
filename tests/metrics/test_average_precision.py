"""Exact AP of given scores: Eq 1 by loops, ties, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import roadmap.losses
from roadmap.metrics import average_precision

from .literal import eq1_average_precision, literal_mean

Row = list[tuple[float, str]]
rows: st.SearchStrategy[Row] = st.lists(
    st.tuples(st.sampled_from([0.75, 0.5, 0.25, -0.25]), st.sampled_from(["positive", "negative", "ignored"])),
    min_size=1,
    max_size=7,
).filter(lambda row: any(kind == "positive" for _, kind in row))


def table(row: Row) -> tuple[Tensor, Tensor, Tensor]:
    scores, kinds = [s for s, _ in row], [kind for _, kind in row]
    return (
        torch.tensor([scores]),
        torch.tensor([[kind == "positive" for kind in kinds]]),
        torch.tensor([[kind == "negative" for kind in kinds]]),
    )


@given(rows)
def test_it_is_eq_1_and_the_mean_over_orders(row: Row) -> None:
    ranked = [(s, kind == "positive") for s, kind in row if kind != "ignored"]
    scores, relevant = [s for s, _ in ranked], [hit for _, hit in ranked]
    found = average_precision(*table(row))
    assert found.item() == pytest.approx(eq1_average_precision(scores, relevant), abs=1e-12)
    expected = literal_mean(scores, relevant, [1])["mAP"]
    assert average_precision(*table(row), ties="mean").item() == pytest.approx(expected, abs=1e-11)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_every_float_type_gives_float64_values(dtype: torch.dtype) -> None:
    scores = torch.tensor([[0.5, 0.75, 0.25], [0.5, 0.75, 0.25], [0.5, 0.75, 0.25]], dtype=dtype)
    positives = torch.tensor([[True, False, True], [False, False, False], [False, True, False]])
    found = average_precision(scores, positives, reduction="none")
    assert found.dtype == torch.float64
    assert found[[0, 2]].tolist() == pytest.approx([(1 / 2 + 2 / 3) / 2, 1.0])
    assert found[1].isnan()
    assert average_precision(scores, positives).item() == pytest.approx(((1 / 2 + 2 / 3) / 2 + 1) / 2)


@pytest.mark.parametrize("shape", [(0, 3), (2, 0), (0, 0), (2, 3)])
def test_no_positive_is_nan(shape: tuple[int, int]) -> None:
    nothing = torch.zeros(shape, dtype=torch.bool)
    assert average_precision(torch.rand(shape), nothing, reduction="none").isnan().tolist() == [True] * shape[0]
    assert average_precision(torch.rand(shape), nothing).isnan()


S = torch.tensor([[0.5, 0.25, 0.75]])
P = torch.tensor([[True, False, False]])
NAN, INFINITE = S.clone(), S.clone()
NAN[0, 1], INFINITE[0, 2] = torch.nan, -torch.inf


@pytest.mark.parametrize(
    ("arguments", "options", "error", "message"),
    [
        ((NAN, P), {}, ValueError, r"scores\[0, 1\] is nan; scores must be finite"),
        ((INFINITE, P), {}, ValueError, r"scores\[0, 2\] is -inf; scores must be finite"),
        ((S, P, torch.ones_like(P)), {}, ValueError, "an item is both in positives and in negatives; each may be in"),
        ((S, P), {"ties": "optimistic"}, ValueError, "ties must be one of .*pessimistic.*mean.*got 'optimistic'"),
        ((S, P), {"reduction": "sum"}, ValueError, "reduction must be 'mean' or 'none', got 'sum'"),
        ((S[0], P[0]), {}, ValueError, r"scores must have shape \(queries, gallery\), got \(3,\); use scores\[None\]"),
        ((S, P[:, :2]), {}, ValueError, r"positives has shape \(1, 2\) but scores has \(1, 3\)"),
        ((S, P.long()), {}, TypeError, "positives must be a bool mask, got torch.int64"),
        ((S, [[True, False, False]]), {}, TypeError, "positives must be a bool mask, got list"),
        ((S, P, P[:, :1]), {}, ValueError, r"negatives has shape \(1, 1\)"),
        ((S.long(), P), {}, TypeError, "scores must be floating point, got torch.int64"),
        ((S.tolist(), P), {}, TypeError, "scores must be a torch.Tensor, got list"),
    ],
)
def test_bad_input_is_refused(
    arguments: tuple[Any, ...], options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        average_precision(*arguments, **options)


def test_the_losses_offer_the_same_function() -> None:
    assert roadmap.losses.average_precision is average_precision
