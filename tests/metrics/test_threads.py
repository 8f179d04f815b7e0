"""Metrics of several threads at once, while training has lowered the precision of products."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest
import torch

from roadmap.metrics.ranking import positive_counts_of
from roadmap.metrics.vectors import unit_vectors

from ..waiting import PATIENCE


@pytest.fixture
def lowered_precision() -> Iterator[str]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    yield "medium"
    torch.set_float32_matmul_precision(before)


def test_a_thread_that_ends_does_not_lower_the_precision_of_another(lowered_precision: str) -> None:
    """First in, first out: the second is still counting when the first puts the precision back."""
    vectors = unit_vectors(torch.randn(20, 8), "vectors")
    columns = torch.arange(20)[:, None]
    nothing = torch.full((20, 1), -1)
    first_is_in, second_is_in, first_is_out = threading.Event(), threading.Event(), threading.Event()
    seen: list[str] = []

    def first_counts(done: int) -> None:
        first_is_in.set()
        assert second_is_in.wait(PATIENCE)

    def second_counts(done: int) -> None:
        second_is_in.set()
        assert first_is_out.wait(PATIENCE)
        seen.append(torch.get_float32_matmul_precision())

    def count(advance: Callable[[int], None]) -> None:
        positive_counts_of(vectors, vectors, columns, nothing, advance=advance)

    first = threading.Thread(target=count, args=(first_counts,))
    second = threading.Thread(target=count, args=(second_counts,))
    first.start()
    assert first_is_in.wait(PATIENCE)
    second.start()
    first.join()
    first_is_out.set()
    second.join()
    assert seen == ["highest"]
    assert torch.get_float32_matmul_precision() == lowered_precision
