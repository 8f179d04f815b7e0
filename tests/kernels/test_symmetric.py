"""Comparisons within one batch: half of the tiles, in several blocks of uneven sizes; the truth is float64."""

from __future__ import annotations

import pytest
import torch

from roadmap.kernels import paths
from roadmap.losses.comparison import Comparison

from .interpreting import CUDA, check_under_the_interpreter, on_triton, starts_the_interpreter, take_path
from .test_rank_kernels import LOSSES, Batch, check_as_accurate_as_plain, drawn, value_and_gradients

pytest.importorskip("triton")
from roadmap.kernels.triton import symmetric, symmetric_backward

SIZES = {"whole tiles": 64, "one item over": 65, "one item short": 79}  # tiles of 16 under the interpreter


@pytest.fixture(autouse=True)
def in_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    take_path(monkeypatch, "tiles")


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of two tiles and of three, so that a small batch has several, with a ragged last one."""
    monkeypatch.setattr(symmetric, "SLOTS", 2)
    monkeypatch.setattr(symmetric_backward, "SIDE", 3)
    monkeypatch.setattr(symmetric_backward, "BAND", 2)


def ragged(items: int, *, uneven: bool = True) -> Batch:
    return drawn(128 * items // 16 if CUDA else items, 19, items // 5, uneven=uneven)


@pytest.mark.parametrize(("side", "band"), [(1, 1), (3, 3), (3, 2), (4, 2), (32, 16)])
@pytest.mark.parametrize("tiles", [1, 2, 5, 12, 33])
def test_blocks_hold_every_tile_above_the_diagonal_once(tiles: int, side: int, band: int) -> None:
    found = []
    begun: set[int] = set()
    for block in symmetric.blocks(tiles, side, band):
        rows = range(block.row, block.row + block.height)
        columns = range(block.column, block.column + block.width)
        mine = [(i, j) for i in rows for j in columns if i <= j or not block.is_diagonal]
        assert len(mine) == block.tiles <= side * side
        found += mine
        assert all((i in begun) == block.rows_seen for i in rows)
        assert all((j in begun) == block.columns_seen for j in columns)
        begun |= {*rows, *columns}
    assert sorted(found) == [(i, j) for i in range(tiles) for j in range(i, tiles)]


@on_triton
@pytest.mark.parametrize("size", SIZES)
def test_triton_blocks_are_as_accurate_as_plain_float32(size: str, small_blocks: None) -> None:
    check_as_accurate_as_plain(LOSSES["ROADMAP"], ragged(SIZES[size]))


@on_triton
@pytest.mark.parametrize("loss", [name for name in LOSSES if name != "ROADMAP"])
def test_triton_losses_are_as_accurate_as_plain_float32(loss: str, small_blocks: None) -> None:
    check_as_accurate_as_plain(LOSSES[loss], ragged(41))


@on_triton
@pytest.mark.parametrize("full", [1, 1 << 20])
def test_triton_products_in_parts_of_tiles(full: int, small_blocks: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(symmetric_backward, "FULL", full)
    check_as_accurate_as_plain(LOSSES["ROADMAP"], ragged(49))


@on_triton
def test_triton_many_positives_take_fewer_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(symmetric, "MOST_PARTIAL_SUMS", 0)
    monkeypatch.setattr(symmetric, "FEWEST_SLOTS", 2)
    x, labels, *_ = ragged(41, uneven=False)
    check_as_accurate_as_plain(LOSSES["ROADMAP all without self"], (x, labels % 2, None, None))


@pytest.mark.gpu
def test_gpu_copies_tie_across_tiles(small_blocks: None) -> None:
    """The halves of a copy are multiplied in another order where it is the column of a tile and not its row.

    Not under the interpreter, whose products, made by BLAS, round by place.
    """
    x, labels, *_ = ragged(48, uneven=False)
    batch = (torch.cat([x, x, x]), torch.cat([labels, labels.roll(1), labels.roll(2)]), None, None)
    loss = LOSSES["SupAP without self"]
    found = value_and_gradients(lambda a, b, *_: loss(a, b), batch, torch.float32)
    truth = value_and_gradients(lambda a, b, *_: loss(a, b), batch, torch.float64)
    torch.testing.assert_close(found[0], truth[0], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(found[1], truth[1], rtol=1e-4, atol=1e-5 * float(truth[1].abs().max()))


@on_triton
def test_triton_the_same_bits_in_several_blocks(small_blocks: None) -> None:
    batch = ragged(41)
    first, again = (
        value_and_gradients(lambda a, b, *_: LOSSES["ROADMAP"](a, b), batch, torch.float32) for _ in range(2)
    )
    assert all(torch.equal(a, b) for a, b in zip(first[:2], again[:2], strict=True))


@on_triton
def test_triton_terms_within_a_batch(small_blocks: None) -> None:
    x, labels, *_ = ragged(41)
    loss = LOSSES["ROADMAP"]
    gradients = []
    for y in (x.clone().requires_grad_(), x.double().requires_grad_()):
        terms = loss.terms(Comparison.of(y, labels))  # type: ignore[operator]
        (3 * loss.value(terms)).backward()  # type: ignore[operator]
        assert y.grad is not None
        gradients.append(y.grad.double())
    torch.testing.assert_close(*gradients, rtol=1e-5, atol=1e-5 * float(gradients[1].abs().max()))


@pytest.mark.gpu
@pytest.mark.parametrize(("size", "per_class"), [(4096, 4), (5000, 4), (9000, 60)])
def test_gpu_large_batches_are_near_float64(size: int, per_class: int) -> None:
    assert not paths.is_small(size, size)
    x, labels, *_ = drawn(size, 128, size // per_class, uneven=True)
    x = torch.nn.functional.normalize(x)
    found, truth = (
        value_and_gradients(lambda a, b, *_: LOSSES["ROADMAP"](a, b), (x, labels, None, None), dtype)
        for dtype in (torch.float32, torch.float64)
    )
    torch.testing.assert_close(found[0], truth[0], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(found[1], truth[1], rtol=1e-4, atol=1e-5 * float(truth[1].abs().max()))


@starts_the_interpreter
def test_symmetric_tiles_under_the_interpreter() -> None:
    check_under_the_interpreter(__file__, "triton")
