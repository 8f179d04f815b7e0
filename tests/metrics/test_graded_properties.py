"""What changes none of the metrics by a tree of labels."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from roadmap.metrics import graded_metrics

from .test_ranking import on_circle

PATHS = torch.tensor([(0, 0, 0), (0, 0, 1), (0, 1, 2), (1, 2, 3), (-1, 3, 4), (0, -1, -1), (-1, -1, -1)])
SCORES = [0.9, 0.75, 0.5, 0.5 + 2**-10, -0.25]
TIES = pytest.mark.parametrize("ties", ["pessimistic", "mean"])

items = st.lists(st.tuples(st.sampled_from(SCORES), st.integers(0, 6)), min_size=1, max_size=8)
queries = st.lists(st.integers(0, 6), min_size=1, max_size=3)


def measured(asked: list[int], found: list[tuple[float, int]], ties: str, numbers: Tensor = PATHS) -> dict[str, float]:
    """Of queries at one place, each with a path of its own, against items at given scores."""
    vectors = torch.tensor([[1.0, 0.0]], dtype=torch.float64).expand(len(asked), -1)
    scores, paths = [score for score, _ in found], numbers[[path for _, path in found]]
    result: dict[str, float] = graded_metrics(vectors, numbers[asked], on_circle(scores), paths, (1, 3), ties=ties)  # type: ignore[call-overload]
    return result


def check_same(found: dict[str, float], expected: dict[str, float]) -> None:
    left = {name: value for name, value in expected.items() if not name.startswith("queries")}
    assert {name: found[name] for name in left} == pytest.approx(left, abs=1e-12, nan_ok=True)


@TIES
@settings(max_examples=40)
@given(asked=queries, found=items)
def test_an_item_of_which_nothing_is_known_behind_all_others(ties, asked, found):
    check_same(measured(asked, [*found, (-0.75, 6), (-0.75, 6)], ties), measured(asked, found, ties))


@TIES
@settings(max_examples=40)
@given(asked=queries, found=items)
def test_a_query_of_which_nothing_is_known(ties, asked, found):
    more, plain = measured([*asked, 6, 6], found, ties), measured(asked, found, ties)
    check_same(more, plain)
    assert more["queries_without_positives"] == plain["queries_without_positives"] + 2


@TIES
@settings(max_examples=40)
@given(asked=queries, found=items, seed=st.integers(0, 2**31))
def test_numbers_of_nodes_and_order_of_items(ties, asked, found, seed):
    generator = torch.Generator().manual_seed(seed)
    names = torch.randperm(2**20, generator=generator)[:5] * 2**40
    renamed = torch.where(PATHS < 0, -(2**40), names[PATHS.clamp(min=0)])
    order = torch.randperm(len(found), generator=generator).tolist()
    check_same(measured(asked, [found[i] for i in order], ties, renamed), measured(asked, found, ties))
