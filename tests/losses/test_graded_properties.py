"""What holds of every table of grades and every tree: what does not matter, and what is worth one."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor, nn

from roadmap.kernels.graded import PullRule
from roadmap.losses import GradedNDCG, HierarchicalAP, gradedndcg, h_ap, hierarchicalap, ndcg

from .cases import drawn, gridded
from .graded_cases import SPECIES
from .test_properties import GRID

Measure = Callable[[Tensor, Tensor], Tensor]
MEASURES: dict[str, Measure] = {
    "h_ap": h_ap,
    "ndcg": ndcg,
    "ndcg, linear": partial(ndcg, gain="linear"),
    "hierarchicalap": hierarchicalap,
    "hierarchicalap, pulled": partial(hierarchicalap, pull=PullRule(25.0, 0.5, 10.0)),
    "gradedndcg": gradedndcg,
    "gradedndcg, linear": partial(gradedndcg, gain="linear"),
}
EVERY_MEASURE = pytest.mark.parametrize("name", MEASURES)
LOSSES = [HierarchicalAP(pull=True), HierarchicalAP("nested", include_self=False), GradedNDCG()]
EVERY_LOSS = pytest.mark.parametrize("loss", LOSSES, ids=repr)


@st.composite
def tables(draw: st.DrawFn) -> tuple[Tensor, Tensor]:
    """Scores with many ties, and grades of 0 to 3 or -1, for who is in no ranking; one query has a positive."""
    queries, items = draw(st.integers(1, 3)), draw(st.integers(1, 7))
    size = queries * items
    scores = draw(st.lists(st.sampled_from(GRID), min_size=size, max_size=size))
    grades = draw(st.lists(st.sampled_from([-1.0, 0.0, 0.0, 1.0, 2.0, 3.0]), min_size=size, max_size=size))
    table = torch.tensor([scores, grades], dtype=torch.float64).view(2, queries, items)
    assume(bool((table[1] > 0).any()))
    return table[0], table[1]


def moved(measure: Measure, scores: Tensor, grades: Tensor) -> tuple[Tensor, Tensor]:
    """The value, and the gradient, where there is one."""
    leaf = scores.clone().requires_grad_()
    value = measure(leaf, grades)
    gradient = torch.autograd.grad(value, leaf)[0] if value.requires_grad else torch.zeros_like(leaf)
    return value.detach(), gradient


def check_alike(found: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@EVERY_MEASURE
@given(table=tables(), seed=st.integers(0, 2**31))
def test_order_does_not_matter(name: str, table: tuple[Tensor, Tensor], seed: int) -> None:
    scores, grades = table
    generator = torch.Generator().manual_seed(seed)
    rows, columns = (torch.randperm(count, generator=generator) for count in scores.shape)
    value, gradient = moved(MEASURES[name], scores, grades)
    found = moved(MEASURES[name], scores[rows][:, columns], grades[rows][:, columns])
    check_alike(found, (value, gradient[rows][:, columns]))


@EVERY_MEASURE
@given(table=tables(), more=st.lists(st.sampled_from(GRID), min_size=1, max_size=3))
def test_who_is_in_no_ranking_changes_nothing(name: str, table: tuple[Tensor, Tensor], more: list[float]) -> None:
    scores, grades = table
    strangers = torch.tensor([more], dtype=torch.float64).expand(len(scores), -1)
    wide, wide_grades = torch.cat([scores, strangers], 1), torch.cat([grades, torch.full_like(strangers, -1)], 1)
    value, gradient = moved(MEASURES[name], wide, wide_grades)
    check_alike((value, gradient[:, : scores.shape[1]]), moved(MEASURES[name], scores, grades))
    assert not gradient[:, scores.shape[1] :].any()


@EVERY_MEASURE
@given(table=tables())
def test_what_shares_nothing_and_lies_behind_all_changes_no_exact_value(
    name: str, table: tuple[Tensor, Tensor]
) -> None:
    scores, grades = table
    wide = torch.cat([scores, torch.full_like(scores[:, :1], -90.0)], 1)  # so far that no sigmoid sees it
    found = MEASURES[name](wide, torch.cat([grades, torch.zeros_like(grades[:, :1])], 1))
    torch.testing.assert_close(found, MEASURES[name](scores, grades), rtol=1e-12, atol=1e-12)


@EVERY_MEASURE
@given(table=tables())
def test_a_query_without_a_positive_changes_nothing(name: str, table: tuple[Tensor, Tensor]) -> None:
    scores, grades = table
    value, gradient = moved(MEASURES[name], torch.cat([scores, scores]), torch.cat([grades, grades.clamp(max=0)]))
    check_alike((value, gradient[: len(scores)]), moved(MEASURES[name], scores, grades))
    assert not gradient[len(scores) :].any()


@EVERY_MEASURE
@given(table=tables(), shift=st.sampled_from([-1.0, 0.5, 2.0]))
def test_only_differences_of_scores_matter(name: str, table: tuple[Tensor, Tensor], shift: float) -> None:
    """The steps of the grid and of the shift are exact, so that ties stay ties."""
    scores, grades = table
    value, gradient = moved(MEASURES[name], scores, grades)
    check_alike(moved(MEASURES[name], scores + shift, grades), (value, gradient))
    torch.testing.assert_close(gradient.sum(1), torch.zeros(len(scores)).double(), rtol=0, atol=1e-9)


@pytest.mark.parametrize("measure", [h_ap, ndcg, partial(ndcg, gain="linear")])
@given(grades=st.lists(st.integers(-1, 4), min_size=1, max_size=9))
def test_a_ranking_by_grade_is_worth_one(measure: Measure, grades: list[int]) -> None:
    assume(max(grades) > 0)
    table = torch.tensor([sorted(grades, reverse=True)])
    scores = torch.linspace(1, -1, len(grades) + 1)[None, :-1]
    assert measure(scores, table).item() == pytest.approx(1, abs=1e-14)


@st.composite
def trees(draw: st.DrawFn) -> tuple[Tensor, Tensor]:
    """A batch with paths, some of them not known to the end; with ties or without."""
    species, seed = draw(st.lists(st.integers(0, 6), min_size=2, max_size=9)), draw(st.integers(0, 2**31))
    labels = torch.tensor([SPECIES[i] for i in species])
    for row, level in draw(st.lists(st.tuples(st.integers(0, len(species) - 1), st.integers(0, 2)), max_size=3)):
        labels[row, level] = -1
    return gridded(len(species), seed) if draw(st.booleans()) else drawn(len(species), 4, seed), labels


@EVERY_LOSS
@given(batch=trees(), seed=st.integers(0, 2**31))
def test_order_of_a_batch_does_not_matter(loss: nn.Module, batch: tuple[Tensor, Tensor], seed: int) -> None:
    x, labels = batch
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
    assert loss(x[order], labels[order]).item() == pytest.approx(loss(x, labels).item(), abs=1e-10)


@EVERY_LOSS
@given(batch=trees(), names=st.lists(st.integers(0, 2**63 - 1), min_size=7, max_size=7, unique=True))
def test_numbers_of_nodes_do_not_matter(loss: nn.Module, batch: tuple[Tensor, Tensor], names: list[int]) -> None:
    x, labels = batch
    renamed = torch.where(labels < 0, -1, torch.tensor(names)[labels.clamp(min=0)])
    assert loss(x, renamed).item() == loss(x, labels).item()


@EVERY_LOSS
@given(batch=trees())
def test_queries_of_which_nothing_is_known_change_nothing(loss: nn.Module, batch: tuple[Tensor, Tensor]) -> None:
    x, labels = batch
    gallery = {"ref_emb": x, "ref_labels": labels}
    more, nowhere = torch.cat([x, x]), torch.cat([labels, torch.full_like(labels, -1)])
    assert loss(more, nowhere, **gallery).item() == pytest.approx(loss(x, labels, **gallery).item(), abs=1e-12)
