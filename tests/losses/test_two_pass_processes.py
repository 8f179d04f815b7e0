"""Two passes in each of two processes, with `Distributed` and `Memory` inside: one process in one pass."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.multiprocessing as mp

from . import shared_passes
from .shared_passes import CASES, STEPS, trained


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("processes")
    mp.spawn(shared_passes.run, args=(str(folder),), nprocs=2)
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(2)]


@pytest.mark.parametrize("name", list(CASES))
def test_two_processes_in_two_passes_are_one_in_one(name: str, found: list[dict[str, Any]]) -> None:
    expected = trained(CASES[name], None)
    for rank in range(2):
        mine = found[rank][name]
        for part in ("values", "weights"):
            for ours, theirs in zip(mine[part], expected[part], strict=True):
                torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-10)
        assert mine["exchanged"] == STEPS  # one bucket of gradients, once a step, whatever the number of chunks


def test_running_statistics_count_each_chunk_once(found: list[dict[str, Any]]) -> None:
    assert [part["statistics"] for part in found] == [4, 4]


def test_options_that_do_not_go_with_it_are_refused(found: list[dict[str, Any]]) -> None:
    for part in found:
        first, second = part["refusals"]
        assert "find_unused_parameters=True does not go with two passes; leave it out" in first
        assert "static_graph=True does not go with two passes" in second
