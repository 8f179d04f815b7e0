"""Distributed losses, with real processes: the value and the gradient of one process on the same global batch."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp

from roadmap.losses import ROADMAP, BlackBoxAP, Distributed, FastAP, Memory, RecallAtK, SoftBinAP, SupRank

from . import shared_out
from .shared_out import Case, Found, alone, cases, kernel_cases

EVERY = [(2, case) for case in cases(2)] + [(3, case) for case in cases(3)]
NEAR = {torch.float64: {"rtol": 1e-10, "atol": 1e-10}, torch.float32: {"rtol": 1e-6, "atol": 1e-6}}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """By process: what it found. Three are started once, for all cases; two of them are a group of their own."""
    folder = tmp_path_factory.mktemp("processes")
    mp.spawn(shared_out.run, args=(3, str(folder)), nprocs=3)
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(3)]


@pytest.mark.parametrize(("processes", "case"), EVERY, ids=lambda value: str(value))
def test_many_processes_are_one(processes: int, case: Case, found: list[dict[str, Any]]) -> None:
    """The value on each, the gradient at its items times what the average takes away, and the loss's own weights."""
    expected = alone(case)
    for rank in range(processes):
        check_part(case, rank, found[rank][f"{processes}: {case}"], expected)


def check_part(case: Case, rank: int, mine: Found, expected: Found) -> None:
    near, processes, mean = NEAR[case.dtype], len(case.sizes), case.gradients == "mean"
    torch.testing.assert_close(mine.value, expected.value, **near)
    part = expected.batch.split(case.sizes)[rank]
    torch.testing.assert_close(mine.batch, part * (processes if mean else 1), **near)
    if case.gallery:
        part = expected.gallery.split(case.gallery)[rank]
        at_gallery = torch.zeros_like(part) if mine.gallery is None else mine.gallery
        torch.testing.assert_close(at_gallery, part * (processes if mean else 1), **near)
    assert len(mine.weights) == len(expected.weights)
    for weight, whole in zip(mine.weights, expected.weights, strict=True):
        torch.testing.assert_close(weight, whole * (1 if mean else 1 / processes), **near)


def test_sums_over_queries_are_shared_out_by_rows() -> None:
    """A histogram is a query's own; the step of BlackBoxAP hangs on the size of the gradient that reaches it."""
    assert all(Distributed(loss).by_rows for loss in (ROADMAP(), FastAP(), SoftBinAP(), RecallAtK()))
    assert not any(Distributed(loss).by_rows for loss in (BlackBoxAP(), RecallAtK(mix=True), SupRank(4, 5)))


def test_cases_have_names_of_their_own() -> None:
    assert len({(processes, str(case)) for processes, case in EVERY}) == len(EVERY)


def test_the_value_is_the_same_to_the_bit_on_every_process(found: list[dict[str, Any]]) -> None:
    for case in cases(3):
        values = {found[rank][f"3: {case}"].value.item() for rank in range(3)}
        assert len(values) == 1, case


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("name", [n for n in ("roadmap", "fastap", "proxy_nca") if n in shared_out.LOSSES])
def test_a_model_under_ddp_has_the_gradient_of_one_process(
    name: str, autocast: bool, found: list[dict[str, Any]]
) -> None:
    model, loss = shared_out.model_and_loss(name)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        value = loss(model(shared_out.vectors(11, 3, torch.float32)), shared_out.LABELS)
    value.backward()
    expected = [value.detach(), *shared_out.gradients_of(model), *shared_out.gradients_of(loss)]
    near = {"rtol": 2e-2, "atol": 2e-3} if autocast else NEAR[torch.float32]
    for mine in found:
        parts = mine["ddp"][f"{name}, autocast {autocast}"]
        assert len(parts) == len(expected)
        torch.testing.assert_close(parts[0], expected[0], **NEAR[torch.float32])
        for part, whole in zip(parts, expected, strict=True):
            torch.testing.assert_close(part, whole, **near)


def test_a_compiled_function_may_call_it(found: list[dict[str, Any]]) -> None:
    expected = alone(Case("roadmap", (1, 8, 2), dtype=torch.float32))
    for rank, part in enumerate(expected.batch.split((1, 8, 2))):
        torch.testing.assert_close(found[rank]["compiled"].value, expected.value, **NEAR[torch.float32])
        torch.testing.assert_close(found[rank]["compiled"].batch, part * 3, **NEAR[torch.float32])


@pytest.mark.parametrize("name", [n for n in shared_out.MEMORIES if n in shared_out.LOSSES])
def test_a_memory_is_the_same_on_all_processes_and_that_of_one(name: str, found: list[dict[str, Any]]) -> None:
    one = shared_out.remembered(name, None)
    for rank in range(3):
        mine = found[rank][f"memory: {name}"]
        check_memory(rank, mine, one, shared_out.STEPS, torch.float64)
        for key, value in mine[1].items():
            assert torch.equal(value, found[0][f"memory: {name}"][1][key]), key  # to the bit


def check_memory(rank: int, mine: Any, one: Any, steps: tuple[tuple[int, ...], ...], dtype: torch.dtype) -> None:
    for part, whole, sizes in zip(mine[0], one[0], steps, strict=True):
        torch.testing.assert_close(part.value, whole.value, **NEAR[dtype])
        torch.testing.assert_close(part.batch, whole.batch.split(sizes)[rank] * len(sizes), **NEAR[dtype])
    # weights of a loss lie one module deeper inside Distributed
    held = {key.replace("loss.loss.", "loss."): value for key, value in mine[1].items()}
    assert list(held) == list(one[1])
    for key, value in held.items():
        torch.testing.assert_close(value, one[1][key], rtol=0, atol=1e-14 if dtype == torch.float64 else 1e-7)


REFUSED = {
    "dimensions": ["ValueError: process 0 brings embeddings of 3 dimensions; .* Process 1 brings 5"] * 3,
    "labels": [
        "RuntimeError: process 1 could not bring its part of the batch; its own message says why",
        "ValueError: labels has 3 entries but embeddings has 4 rows",
        "RuntimeError: process 1 could not bring its part",
    ],
    "zero vector": [
        "RuntimeError: process 1 could not",
        r"ValueError: embeddings\[0\] is a zero vector",
        "RuntimeError: process 1 could not",
    ],
    "ids": [
        "RuntimeError: process 1 could not",
        "ValueError: repeats=False needs the ids of the pictures",
        "RuntimeError: process 1 could not",
    ],
    "gallery": ["ValueError: process 0 brings a gallery of -1 dimensions .* Process 1 brings 5"] * 3,
    "pairs": ["ValueError: process 0 brings an indices_tuple of 3 tensors .* Process 1 brings 0"] * 3,
    "losses": ["ValueError: process 0 brings a loss that splits by rows: 0 .* Process 1 brings 1"] * 3,
    "gradients": ["ValueError: process 0 brings gradients recorded: 0 .* Process 1 brings 1"] * 3,
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_is_refused_on_every_process(what: str, found: list[dict[str, Any]]) -> None:
    for rank, message in enumerate(REFUSED[what]):
        assert re.match(message, found[rank]["refusals"][what]), found[rank]["refusals"][what]


def test_a_process_outside_the_group_is_told(found: list[dict[str, Any]]) -> None:
    assert "this process is not in the group that the loss was given" in found[2]["outside"]


def test_a_process_that_has_gone_is_an_error_for_the_others(found: list[dict[str, Any]]) -> None:
    for rank in (0, 1):
        assert found[rank]["death"].startswith(
            "RuntimeError: the processes could not exchange their parts of the batch"
        )


def test_without_other_processes_it_is_the_plain_loss() -> None:
    case = Case("roadmap", (11,))
    mine, expected = shared_out.together(case, 0, None), alone(case)
    assert mine.value.item() == expected.value.item()
    assert torch.equal(mine.batch, expected.batch)


def test_arguments_that_cannot_be() -> None:
    with pytest.raises(TypeError, match=r"loss must be an instance, got the class ROADMAP; use ROADMAP\(...\)"):
        Distributed(ROADMAP)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="gradients must be 'mean' or 'sum', got 'average'"):
        Distributed(ROADMAP(), gradients="average")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="the loss is Distributed already"):
        Distributed(Distributed(ROADMAP()))
    with pytest.raises(ValueError, match=r"a Memory must know all processes; write Memory\(Distributed\(loss\), ...\)"):
        Distributed(Memory(ROADMAP(), 8))


def check_kernels(folder: Path, device: str) -> None:
    mp.spawn(shared_out.run_kernels, args=(2, str(folder), device), nprocs=2)
    first, second = (torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(2))
    assert first[1]
    assert second[1]
    for case in kernel_cases(device):
        mine, expected = first[0][str(case)]
        check_part(case, 0, mine, expected)
        check_part(case, 1, second[0][str(case)][0], expected)
    for rank, found in enumerate((first[0], second[0])):
        check_memory(rank, found["memory"][0], first[0]["memory"][1], ((11, 0), (3, 8)), torch.float32)


def test_the_kernels_split_by_rows_too_in_the_interpreter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    check_kernels(tmp_path, "cpu")


@pytest.mark.gpu
def test_two_processes_on_one_gpu_are_one(tmp_path: Path) -> None:
    check_kernels(tmp_path, "cuda")
