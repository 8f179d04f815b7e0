"""Graded losses beyond one batch: several processes, a memory, two passes. The same values and gradients as one."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp
from torch import Tensor, nn

from roadmap.losses import HAPPIER, ROADMAP, Distributed, GradedNDCG, HierarchicalAP, Memory, SupAP, TwoPass
from roadmap.losses.comparison import Comparison
from roadmap.losses.terms import Terms

from . import graded_literal as loops
from . import literal, shared_grades
from .cases import drawn
from .graded_cases import paths, sets
from .shared_grades import CASES, MEMORIES, PATHS, SETS, STEPS, Case

NEAR = {"rtol": 1e-10, "atol": 1e-10}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """By process: what it found."""
    folder = tmp_path_factory.mktemp("processes")
    mp.spawn(shared_grades.run, args=(str(folder),), nprocs=2)
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(2)]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_two_processes_are_one(case: Case, found: list[dict[str, Any]]) -> None:
    value, *gradients = shared_grades.found_by(case, None)
    cuts = [case.sizes] if case.gallery is None else [case.sizes, case.gallery]
    for rank in range(2):
        mine, *parts = found[rank][str(case)]
        torch.testing.assert_close(mine, value, **NEAR)
        assert len(parts) == len(gradients)
        for k, (part, whole) in enumerate(zip(parts, gradients, strict=True)):
            # averaged afterwards: twice the gradient at items, that of one process at weights of the loss
            expected = whole.split(cuts[k])[rank] * 2 if k < len(cuts) else whole
            torch.testing.assert_close(part, expected, **NEAR)


@pytest.mark.parametrize(("loss", "table"), MEMORIES)
def test_a_shared_memory_holds_paths_and_sets(loss: str, table: str, found: list[dict[str, Any]]) -> None:
    steps, state = shared_grades.remembered(loss, table, None)
    for rank in range(2):
        mine, held = found[rank][f"memory, {loss}, {table}"]
        for (value, gradient), (whole, expected), sizes in zip(mine, steps, STEPS, strict=True):
            torch.testing.assert_close(value, whole, **NEAR)
            torch.testing.assert_close(gradient, expected.split(sizes)[rank] * 2, **NEAR)
        assert held["labels"].dtype == (torch.int64 if table == "paths" else torch.bool)
        for name, value in held.items():
            torch.testing.assert_close(value, state[name], rtol=0, atol=1e-14)


REFUSED = {
    "columns": "ValueError: process 0 brings labels of 3 columns .* Process 1 brings 2",
    "sets": "ValueError: process 0 brings sets of labels: 0 .* Process 1 brings 1",
    "no tree": "ValueError: labels are no tree: 0 in column 1 lies under 0 and under 1 of column 0",
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_is_refused_on_both(what: str, found: list[dict[str, Any]]) -> None:
    for rank in range(2):
        assert re.match(REFUSED[what], found[rank][what]), found[rank][what]


@pytest.mark.parametrize("labels", [PATHS, SETS], ids=["paths", "sets"])
@pytest.mark.parametrize("loss", [HierarchicalAP(), GradedNDCG(include_self=False)], ids=["h_ap", "ndcg"])
def test_rows_shared_out_give_the_loss_of_the_whole(loss: nn.Module, labels: Tensor) -> None:
    x = drawn(9, 3, 2).requires_grad_()
    whole = loss(x, labels)
    (expected,) = torch.autograd.grad(whole, x)
    total: Terms | None = None
    for first, end in ((0, 2), (2, 2), (2, 9)):
        own = torch.arange(first, end)
        c = Comparison.of(x[first:end], labels[first:end], ref_emb=x, ref_labels=labels, own=own, graded=True)
        terms = loss.terms(c)  # type: ignore[operator]
        total = terms if total is None else total + terms
    value = loss.value(total)  # type: ignore[operator]
    torch.testing.assert_close(value, whole, **NEAR)
    torch.testing.assert_close(torch.autograd.grad(value, x)[0], expected, **NEAR)


# --- a memory


def literal_step(
    x: Tensor, labels: list[list[int]], held: list[tuple[list[float], list[int]]], include_self: bool
) -> Any:
    """H-AP of a batch against itself and what is held, by loops, and its gradient at the batch."""
    gallery = [*x.tolist(), *(vector for vector, _ in held)]
    items = [*labels, *(path for _, path in held)]
    grades = loops.tree_grades(labels, items, list(range(len(x))), include_self, "shared")
    value, ds = loops.h_ap_loss(literal.cosines(x.tolist(), gallery), grades)
    dq, dg = (torch.tensor(d, dtype=torch.float64) for d in literal.gradient_of_cosines(ds, x.tolist(), gallery))
    return value, dq + dg[: len(x)]


@pytest.mark.parametrize("include_self", [True, False], ids=["with self", "without self"])
def test_a_memory_of_paths_follows_the_literal_loop(include_self: bool) -> None:
    memory, held = Memory(HierarchicalAP(include_self=include_self), 7), list[tuple[list[float], list[int]]]()
    assert memory.form == "joined"
    for step, size in enumerate((4, 3, 5, 9, 2)):
        x, labels = drawn(size, 3, step), paths(*[(3 * k + step) % 7 for k in range(size)])
        leaf = x.clone().requires_grad_()
        value = memory(leaf, labels)
        value.backward()
        expected, gradient = literal_step(x, labels.tolist(), held, include_self)
        assert value.item() == pytest.approx(expected, abs=1e-11)
        torch.testing.assert_close(leaf.grad, gradient, rtol=1e-9, atol=1e-10)
        held = [*held, *zip(x.tolist(), labels.tolist(), strict=True)][-7:]
        state = memory.state_dict()
        slots = [slot for slot in state["ring.order"].tolist() if slot >= 0]
        assert [state["ring.labels"][slot].tolist() for slot in slots] == [path for _, path in held]


@pytest.mark.parametrize("form", ["joined", "added"])
@pytest.mark.parametrize("table", [PATHS, SETS], ids=["paths", "sets"])
def test_a_state_of_paths_goes_on_to_the_bit(table: Tensor, form: Any) -> None:
    whole = Memory(GradedNDCG(), 7, form=form)
    state: dict[str, Any] = {}
    values = []
    for step in range(4):
        if step == 2:
            state = copy.deepcopy(whole.state_dict())
        values.append(whole(drawn(9, 3, step), table.roll(step, 0)).item())
    half = Memory(GradedNDCG(), 7, form=form)
    half.load_state_dict(state)
    assert [half(drawn(9, 3, step), table.roll(step, 0)).item() for step in (2, 3)] == values[2:]
    half.eval()
    assert half(drawn(9, 3, 4), table).item() == whole.eval()(drawn(9, 3, 4), table).item()


def test_a_state_of_plain_labels_still_loads() -> None:
    """As one that was saved before there were paths."""
    x, labels = drawn(6, 3, 0), torch.tensor([0, 0, 1, 1, 2, 2])
    plain = Memory(SupAP(), 8)
    plain(x, labels)
    assert plain.state_dict()["ring.labels"].shape == (8,)
    graded = Memory(HierarchicalAP(), 8)
    graded.load_state_dict(plain.state_dict())
    assert graded(x, labels).item() == plain(x, labels).item()
    with pytest.raises(ValueError, match="labels are paths of 3 levels but the memory holds plain labels; begin a new"):
        graded(x, paths(0, 0, 1, 1, 2, 2))
    assert len(graded) == 8  # what was refused is not stored


def test_a_memory_keeps_to_one_kind_of_labels() -> None:
    memory = Memory(HierarchicalAP(), 8)
    memory(drawn(3, 3, 0), paths(0, 0, 1))
    for labels, words in ((sets("0", "1", "2"), "sets of 5 labels"), (paths(0, 0, 1)[:, 1:], "paths of 2 levels")):
        with pytest.raises(ValueError, match=f"labels are {words} but the memory holds paths of 3 levels"):
            memory(drawn(3, 3, 1), labels)
    memory.eval()
    with pytest.raises(ValueError, match="but the memory holds paths of 3 levels"):
        memory(drawn(3, 3, 1), torch.arange(3))
    with pytest.raises(ValueError, match=r"labels must be 1-D.*graded relevance: HierarchicalAP"):
        Memory(ROADMAP(), 8)(drawn(3, 3, 0), paths(0, 0, 1))
    empty = Memory(HierarchicalAP(), 8, warmup=1)
    empty(drawn(3, 3, 0), paths(0, 0, 1))  # stores nothing
    empty(drawn(3, 3, 0), sets("0", "1", "2"))


def test_happier_may_have_a_memory() -> None:
    """Its clusters draw the batch alone; its ranks see the memory too."""
    torch.manual_seed(0)
    loss, labels = HAPPIER(7, 3).double(), paths(0, 0, 1, 2)
    memory = Memory(loss, 8)
    memory(drawn(4, 3, 0), labels)
    x = drawn(4, 3, 1)
    gallery, items = torch.cat([x, drawn(4, 3, 0)]), torch.cat([labels, labels])
    expected = loss(x, labels, None, gallery, items, torch.arange(4))
    assert memory(x, labels).item() == pytest.approx(expected.item(), abs=1e-12)


# --- two passes, and one process


@pytest.mark.parametrize("loss", [HierarchicalAP(), GradedNDCG()], ids=["h_ap", "ndcg"])
@pytest.mark.parametrize("labels", [PATHS, SETS], ids=["paths", "sets"])
def test_two_passes_are_one(loss: nn.Module, labels: Tensor) -> None:
    torch.manual_seed(0)
    model, pictures = nn.Linear(4, 3).double(), drawn(9, 4, 5)
    expected = loss(model(pictures), labels)
    wanted = torch.autograd.grad(expected, list(model.parameters()))
    value = TwoPass(loss, model, chunk=4)(pictures, labels)
    value.backward()
    torch.testing.assert_close(value, expected, **NEAR)
    for parameter, gradient in zip(model.parameters(), wanted, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, **NEAR)
    again = TwoPass(loss, model, chunk=4)(pictures, None, grades=torch.ones(9, 9))
    assert again.item() == pytest.approx(loss(model(pictures), None, grades=torch.ones(9, 9)).item(), abs=1e-12)


def test_without_other_processes_it_is_the_plain_loss() -> None:
    assert Distributed(HierarchicalAP())(drawn(9, 3, 0), PATHS).item() == HierarchicalAP()(drawn(9, 3, 0), PATHS).item()
