"""The book-keeping of recorded launches: where tensors lie. That a played record computes the same is a GPU test."""

from __future__ import annotations

import torch

from roadmap.kernels.triton.launch import Arena, _tape, new_buffer, signature_of


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


def test_signatures_tell_layouts_apart() -> None:
    x = torch.zeros(4, 6)
    assert signature_of(x) == signature_of(torch.ones(4, 6))
    different = [x.T, x[:, 1:], x.double(), x[:3], x[:, :5]]
    assert len({signature_of(x), *(signature_of(d) for d in different)}) == 6
    assert signature_of(None) is None
