"""The queue: every job is answered once, in its own place, whatever happens to the others."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import CancelledError

import pytest
from hypothesis import given
from hypothesis import strategies as st

from roadmap.search.service import Refusal
from roadmap.search.service.batching import Batches, Places

from ...waiting import PATIENCE


@given(jobs=st.lists(st.integers(), max_size=50), size=st.integers(1, 9))
def test_every_job_gets_its_own_answer(jobs: list[int], size: int) -> None:
    seen: list[int] = []
    batches: Batches[int, int] = Batches("test", lambda some: [2 * one for one in some], size, seen.append)
    found = [batches.submit(job) for job in jobs]
    assert [one.result(PATIENCE) for one in found] == [2 * job for job in jobs]
    batches.close()
    assert sum(seen) == len(jobs)
    assert all(1 <= one <= size for one in seen)


def test_jobs_that_gather_go_together_and_cancelled_ones_not_at_all() -> None:
    started, go = threading.Event(), threading.Event()
    seen: list[list[str]] = []

    def work(jobs: Sequence[str]) -> list[str]:
        seen.append(list(jobs))
        started.set()
        assert go.wait(PATIENCE)
        return list(jobs)

    batches: Batches[str, str] = Batches("test", work, 3)
    first = batches.submit("first")
    assert started.wait(PATIENCE)
    others = [batches.submit(name) for name in "abcde"]
    assert len(batches) == 5
    assert others[1].cancel()
    assert not first.cancel()  # it is being worked on
    go.set()
    batches.close()  # finishes what waits
    assert seen == [["first"], ["a", "c", "d"], ["e"]]
    with pytest.raises(CancelledError):
        others[1].result(1)
    with pytest.raises(Refusal, match="stopping"):
        batches.submit("late")


def test_an_error_is_told_to_its_batch_and_the_next_goes_on() -> None:
    def work(jobs: Sequence[int]) -> list[int]:
        if 0 in jobs:
            raise ZeroDivisionError
        return list(jobs)

    batches: Batches[int, int] = Batches("test", work, 1)
    found = [batches.submit(job) for job in (1, 0, 2)]
    assert (found[0].result(PATIENCE), found[2].result(PATIENCE)) == (1, 2)
    with pytest.raises(ZeroDivisionError):
        found[1].result(PATIENCE)
    batches.close()


def test_places_are_given_back() -> None:
    places = Places(3)
    with places.take(2):
        with pytest.raises(Refusal, match="2 queries are waiting, 3 may"), places.take(2):
            pass
        with places.take(1):
            assert places.taken == 3
    with pytest.raises(ZeroDivisionError), places.take(3):
        raise ZeroDivisionError
    assert places.taken == 0
