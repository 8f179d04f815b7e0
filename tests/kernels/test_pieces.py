"""Kernels that go through their rows, items or dimensions in pieces larger than what other tests bring: the same from
several pieces as by plain torch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from roadmap.kernels.rules import NEG_COUNT, NEG_SUM, POS_COUNT, POS_SUM
from roadmap.losses import ROADMAP

from .interpreting import DEVICE, check_under_the_interpreter, on_triton, starts_the_interpreter


def drawn(*shape: int, most: int = 9) -> Tensor:
    return torch.randint(0, most, shape, generator=torch.Generator().manual_seed(sum(shape)))


@on_triton
@pytest.mark.parametrize("rows", [4, 16, 32])
def test_triton_offsets_of_lists_go_on_from_piece_to_piece(rows: int) -> None:
    from roadmap.kernels.triton.stored import _list_offsets

    M, parts = 27, 3
    counts = drawn(M, parts).to(DEVICE, torch.int32)
    size = torch.empty(M, device=DEVICE, dtype=torch.int32)
    offset, starts, totals = (torch.empty(n, device=DEVICE, dtype=torch.int64) for n in (M, M * parts, 2))
    _list_offsets[(1,)](counts, size, offset, starts, totals, M, parts, ROWS=rows, PARTS=4)
    assert torch.equal(size, counts.sum(1, dtype=torch.int32))
    assert torch.equal(offset, size.cumsum(0) - size)
    assert torch.equal(starts, counts.flatten().cumsum(0) - counts.flatten())
    assert totals.tolist() == [int(counts.sum()), int(size.max())]


@on_triton
@pytest.mark.parametrize("block", [4, 16, 64])
def test_triton_runs_of_labels_go_on_from_piece_to_piece(block: int) -> None:
    from roadmap.kernels.triton.batch_runs import _offset_runs, _place_labels

    N = 43
    labels = (drawn(N) - 4).to(DEVICE)
    order, offset, totals = (torch.empty(n, device=DEVICE, dtype=torch.int64) for n in (N, N, 2))
    start, end = (torch.empty(N, device=DEVICE, dtype=torch.int32) for _ in range(2))
    _place_labels[(-(-N // 8),)](labels, order, start, end, N, ROWS=8, BLOCK=block)
    _offset_runs[(1,)](start, end, offset, totals, N, BLOCK=block)
    listed, expected = torch.sort(labels, stable=True)
    assert torch.equal(order, expected)
    assert torch.equal(start, torch.searchsorted(listed, listed, out_int32=True))
    assert torch.equal(end, torch.searchsorted(listed, listed, right=True, out_int32=True))
    assert torch.equal(offset, (end - start).cumsum(0) - (end - start))
    assert totals.tolist() == [int((end - start).sum()), int((end - start).max())]


@on_triton
@pytest.mark.parametrize("block", [4, 16, 64])
def test_triton_sums_over_rows_go_on_from_piece_to_piece(block: int) -> None:
    from roadmap.kernels.triton import layout
    from roadmap.kernels.triton.reduce import _reduce
    from roadmap.kernels.triton.trees import _block_factors

    M, N = 29, 31
    stats = drawn(layout.STATISTICS, M).float().to(DEVICE)
    norms, others = (1 + drawn(n).float().to(DEVICE) for n in (M, N))
    factors, out = torch.zeros(layout.FACTORS, device=DEVICE), torch.empty(6, device=DEVICE)
    how = {"RANKS": True, "CALIBRATE": True, "GALLERY": True, "BOUNDED": True, "AS_TERMS": True, "BLOCK": block}
    _reduce[(1,)](stats, norms, others, factors, out, M, N, 1.0, 1.0, **how)
    sums = stats.sum(1)
    assert out[:2].tolist() == sums[[layout.AP_LOSS.value, layout.COUNTED.value]].tolist()
    terms = {POS_SUM: layout.POS_SUM, POS_COUNT: layout.POS_COUNT, NEG_SUM: layout.NEG_SUM, NEG_COUNT: layout.NEG_COUNT}
    assert all(out[term] == sums[row.value] for term, row in terms.items())
    assert factors[layout.AP_BOUND.value] == stats[layout.BOUND.value].max()
    for bad in (norms, others):
        bad[-1] = 0.0
        _reduce[(1,)](stats, norms, others, factors, out, M, N, 1.0, 1.0, **how)
        assert out[:6:2].isnan().all()
        bad[-1] = 1.0
    stats[layout.BOUND.value, 3:23] = torch.arange(20.0) / 19
    _block_factors[(1,)](stats, factors, M, 3, 20, BLOCK=block)
    assert factors[layout.HALF_SCALE.value] == 2.0**14  # the largest, 1, is brought near the top of float16


@on_triton
def test_triton_vectors_of_more_dimensions_than_a_program_takes() -> None:
    generator, labels = torch.Generator().manual_seed(1), (torch.arange(6) // 2).to(DEVICE)
    x = torch.randn(6, 1100, generator=generator) + 0.3
    x[:, 1024:] *= 20  # what the last of them say must be heard
    found = []
    for dtype in (torch.float32, torch.float64):
        leaf = x.to(DEVICE, dtype).requires_grad_()
        value = ROADMAP(tau=0.1)(leaf, labels)
        found.append((value.detach().double(), torch.autograd.grad(value, leaf)[0].double()))
    (value, grad), (truth, expected) = found
    torch.testing.assert_close(value, truth, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(grad, expected, rtol=1e-4, atol=1e-5 * float(expected.abs().max()))


@starts_the_interpreter
def test_pieces_under_the_interpreter() -> None:
    check_under_the_interpreter(__file__, "triton")
