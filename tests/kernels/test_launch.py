"""The book-keeping of recorded launches: where tensors lie. That a played record computes the same: test_records.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from .conftest import _forget_records

pytest.importorskip("triton")
from roadmap.kernels.triton import launch
from roadmap.kernels.triton.launch import Arena, _tape, new_buffer, shared_memory, signature_of


def test_an_arena_measures_first_and_then_hands_out_one_buffer() -> None:
    shapes = [((3, 5), torch.float32), ((7,), torch.float16), ((0, 4), torch.float32), ((2, 2), torch.int64)]
    measuring = Arena(torch.device("cpu"))
    for shape, dtype in shapes:
        assert measuring.empty(*shape, dtype=dtype).shape == shape
    arena = Arena(torch.device("cpu"), new_buffer(measuring.used, torch.device("cpu")))
    tensors = [arena.empty(*shape, dtype=dtype) for shape, dtype in shapes]
    assert arena.buffer is not None
    assert arena.used == measuring.used == arena.buffer.nbytes
    for number, tensor in enumerate(tensors):
        tensor.fill_(number)
    for number, (tensor, (shape, dtype)) in enumerate(zip(tensors, shapes, strict=True)):
        assert tensor.shape == shape
        assert tensor.dtype == dtype
        assert (tensor == number).all()  # nobody wrote over it


def test_a_record_names_tensors_by_place_and_keeps_constants() -> None:
    given, workspace = torch.zeros(4), torch.zeros(64, dtype=torch.uint8)
    inside = workspace[32:48].view(torch.float32)
    record = [("kernel", (1, 1, 1), (given, inside, 7, 0.5, None, torch.empty(0)))]
    tape = _tape(record, [given, None, workspace], 64)
    assert tape is not None
    assert tape.steps == [("kernel", (1, 1, 1), [(0, 0), (2, 32), (-1, 7), (-1, 0.5), (-1, None), (0, 0)])]


def test_a_tensor_from_elsewhere_is_not_recorded() -> None:
    assert _tape([("kernel", (1, 1, 1), (torch.zeros(3),))], [torch.zeros(4)], 0) is None


def test_a_record_takes_nothing_for_a_part_of_a_vector_that_is_repeated() -> None:
    """It has the memory of one, and what lies behind is elsewhere at the next call."""
    whole = torch.zeros(64)
    repeated, workspace = whole[:8].expand(4, 8), whole[16:].view(torch.uint8)
    tape = _tape([("kernel", (1, 1, 1), (repeated, whole[20:24]))], [repeated, workspace], workspace.nbytes)
    assert tape is not None
    assert tape.steps == [("kernel", (1, 1, 1), [(0, 0), (1, 16)])]
    assert shared_memory([repeated, whole[16:]]) == ()
    columns = torch.zeros(4, 16)[:, :8]
    assert shared_memory([columns, columns[3:]]) == ((1, 0, 192),)  # with gaps, to the last of it


def test_signatures_tell_layouts_apart() -> None:
    x = torch.zeros(4, 6)
    assert signature_of([x]) == signature_of([torch.ones(4, 6)])
    different = [x.T, x[:, 1:], x.double(), x[:3], x[:, :5]]
    assert len({signature_of([x]), *(signature_of([d]) for d in different)}) == 6
    assert signature_of([None, x]) != signature_of([x, None])


def test_signatures_tell_calls_apart_in_which_other_tensors_are_one() -> None:
    """What a record of (x, x) names is x, wherever the second was meant."""
    x, y, z = torch.zeros(4, 6), torch.zeros(4, 6), torch.zeros(4, 6)
    calls = [(x, y, z), (x, x, y), (x, y, x), (x, y, y), (x, x, x), (x, None, y), (x, None, x)]
    assert len({signature_of(call) for call in calls}) == len(calls)
    assert signature_of((x, x, y)) == signature_of((y, y, z))
    assert signature_of((x, y, z)) == signature_of((z, x, y))


def test_signatures_tell_apart_where_a_tensor_lies_in_another() -> None:
    """A batch at the front of its gallery, further on, and beside it."""
    gallery, elsewhere = torch.zeros(9, 8), torch.zeros(4, 8)
    calls = [(some, gallery) for some in (gallery[:4], gallery[2:6], gallery[5:], elsewhere)]
    assert len({signature_of(call) for call in calls}) == len(calls)
    assert [shared_memory(call) for call in calls] == [((1, 0, 0),), ((0, 1, 64),), ((0, 1, 160),), ()]
    assert shared_memory([gallery[:0], gallery, None, gallery[3:3]]) == ()  # nothing lies where nothing is
    assert shared_memory([gallery[6:], gallery[:2], gallery, gallery[1:3]]) != ()


def test_signatures_do_not_say_which_tensor_lies_lower_in_memory() -> None:
    """A batch against itself brings two tensors, each twice, which are anywhere at the next call."""
    whole = torch.zeros(12, 8)
    low, high = whole[:4], whole[8:]
    assert signature_of((low, low, high, high)) == signature_of((high, high, low, low))
    assert signature_of((low, high, low, high)) == signature_of((high, low, high, low))
    assert signature_of((low, low, high, high)) != signature_of((low, high, high, low))


def test_what_an_arena_gives_begins_at_multiples_that_a_record_takes_for_granted() -> None:
    arena = Arena(torch.device("cpu"), new_buffer(4096, torch.device("cpu")))
    assert arena.buffer is not None
    for dtype in (torch.float16, torch.uint8, torch.int64):
        assert (arena.empty(3, dtype=dtype).data_ptr() - arena.buffer.data_ptr()) % 16 == 0


def test_the_records_used_last_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "MOST_PROGRAMS", 2)
    programs: dict[Any, Any] = {}
    first = launch.program_of(programs, ("a",), ())
    launch.program_of(programs, ("b",), ())
    assert launch.program_of(programs, ("a",), ()) is first
    launch.program_of(programs, ("c",), ())
    assert [key[0] for key in programs] == ["a", "c"]


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_records_are_played_for_calls_like_theirs_alone(
    order: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Labels of a batch are those of its gallery too; another call of the same shapes brings two kinds of labels."""
    monkeypatch.setattr(launch, "_DIRECT", True)
    played: list[list[int]] = []
    monkeypatch.setattr(
        launch.Tape, "play", lambda tape, addresses, device: played.append(addresses_of(tape, addresses))
    )
    mine, theirs = torch.zeros(5, dtype=torch.int64), torch.ones(5, dtype=torch.int64)
    calls = [((mine, mine), [mine.data_ptr(), mine.data_ptr()]), ((mine, theirs), [mine.data_ptr(), theirs.data_ptr()])]
    programs: dict[Any, launch.Program] = {}
    buffer = launch.new_buffer(64, torch.device("cpu"))
    for which in (*order, *order):
        given, expected = calls[which]

        def launch_all(arena: launch.Arena, given: tuple[torch.Tensor, ...] = given) -> None:
            launch._local.record.append(("kernel", (1, 1, 1), given))

        played.clear()
        launch.play_or_record(programs, torch.device("cpu"), given, buffer, launch_all)
        assert played in ([], [expected])
    assert played == [expected]  # the second time from the record


def test_a_test_finds_no_records_of_another() -> None:
    """They were made with other sizes of blocks, perhaps, and are not asked for them."""
    from roadmap.kernels.triton import fused, stored, tree_lists, trees

    for records in (fused._programs, trees._programs, stored._counting, tree_lists._counting):
        assert not records
        records["left behind"] = launch.Program()  # type: ignore[assignment]
    _forget_records()
    assert not any((fused._programs, trees._programs, stored._counting, tree_lists._counting))


def addresses_of(tape: launch.Tape, addresses: list[int]) -> list[int]:
    """What the first kernel of a record is given."""
    return [addresses[which] + value for which, value in tape.steps[0][2]]
