"""The backward of the tiled losses: blocks of ∂L/∂s and their products with the unit vectors."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from roadmap.kernels.triton_launch import launch
from roadmap.kernels.triton_math import DEPTH, TILE
from roadmap.kernels.triton_reduce import embedding_gradient
from roadmap.kernels.triton_tiles import PROGRAMS, TileState, score_gradient_tiles
from roadmap.kernels.triton_units import UnitVectors

# A block of score gradients lives only until it is multiplied: 4 bytes an entry. Its size follows the vectors it
# serves, so that it stays a fraction of what must be held anyway, within these limits.
SMALLEST_BLOCK = 1 << 21
LARGEST_BLOCK = 1 << 25
WIDEST_BLOCK = 1 << 16


@triton.jit
def _product(
    WHi, WLo, UHi, ULo, Factors, Out, inner, inner_per_split, stride_split, u_first, out_first, stride_row,
    stride_inner, DIM: tl.constexpr, SPLIT: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Out += W U over one split of the inner dimension; three float16 products as in triton_math."""
    i = tl.program_id(0) * BM + tl.arange(0, BM)
    d = tl.program_id(1) * BN + tl.arange(0, BN)
    split = tl.program_id(2)
    first = split * inner_per_split
    j = tl.arange(0, BK)
    w = i.to(tl.int64)[:, None] * stride_row + j.to(tl.int64)[None, :] * stride_inner
    u = (u_first + j).to(tl.int64)[:, None] * DIM + d[None, :]
    out = tl.zeros((BM, BN), tl.float32)
    for at in range(first, tl.minimum(first + inner_per_split, inner), BK):
        w_hi = tl.load(WHi + w + tl.cast(at, tl.int64) * stride_inner)
        u_hi = tl.load(UHi + u + tl.cast(at, tl.int64) * DIM)
        part = tl.dot(w_hi, tl.load(ULo + u + tl.cast(at, tl.int64) * DIM))
        part = tl.dot(tl.load(WLo + w + tl.cast(at, tl.int64) * stride_inner), u_hi, part)
        part = tl.dot(w_hi, u_hi, part)
        out += part
    out = out * (0.000244140625 / tl.load(Factors + 4))
    to = (out_first + i).to(tl.int64)[:, None] * DIM + d[None, :]
    if SPLIT:
        tl.store(Out + split.to(tl.int64) * stride_split + to, out)
    else:
        tl.store(Out + to, tl.load(Out + to) + out)


@triton.jit
def _add_splits(Partial, Out, size, splits, out_first, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    total = tl.load(Out + out_first + at, mask=at < size, other=0.0)
    for split in range(0, splits):
        total += tl.load(Partial + tl.cast(split, tl.int64) * size + at, mask=at < size, other=0.0)
    tl.store(Out + out_first + at, total, mask=at < size)


def _add_product(
    halves: Tensor, transposed: bool, rows: int, inner: int, units: UnitVectors, u_first: int, out: Tensor,
    out_first: int, factors: Tensor,
) -> None:  # fmt: skip
    """out[out_first:][:rows] += W units[u_first:][:inner], W the block in `halves` or its transpose."""
    width = halves.shape[2]
    dims = units.dimensions
    stride_row, stride_inner = (1, width) if transposed else (width, 1)
    column = 128 if dims % 128 == 0 else DEPTH
    programs = (rows // TILE) * (dims // column)
    splits = max(1, min(PROGRAMS // 2 // programs, inner // (8 * DEPTH)))
    per_split = triton.cdiv(triton.cdiv(inner, splits), DEPTH) * DEPTH
    splits = triton.cdiv(inner, per_split)
    size = rows * dims
    target = torch.empty(splits, rows, dims, device=out.device, dtype=torch.float32) if splits > 1 else out
    launch(_product, (rows // TILE, dims // column, splits),
        halves[0], halves[1], units.hi, units.lo, factors, target, inner, per_split, size, u_first,
        0 if splits > 1 else out_first, stride_row, stride_inner,
        DIM=dims, SPLIT=splits > 1, BM=TILE, BN=column, BK=DEPTH, num_warps=8, num_stages=3,
    )  # fmt: skip
    if splits > 1:
        launch(
            _add_splits,
            (triton.cdiv(size, 4096),),
            target,
            out,
            size,
            splits,
            out_first * dims,
            BLOCK=4096,
            num_warps=8,
        )


def block_shape(M: int, N: int, dims: int) -> tuple[int, int]:
    """Rows and columns of the blocks of ∂L/∂s, whole tiles."""
    wanted = max(SMALLEST_BLOCK, min(LARGEST_BLOCK, (M + N) * dims // 2))
    columns = min(triton.cdiv(N, TILE) * TILE, WIDEST_BLOCK)
    rows = max(1, wanted // columns // TILE) * TILE
    return min(rows, triton.cdiv(M, TILE) * TILE), columns


def backward(
    state: TileState, upstream: Tensor, queries: Tensor | None, gallery: Tensor | None
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients at `queries` and at `gallery`; None in, None out. In the in-batch call both roles meet in `queries`."""
    q, g, pairs = state.queries, state.gallery, state.pairs
    M, N, dims = len(pairs.start), len(g.norms), q.dimensions
    device = state.factors.device
    for_queries = torch.zeros(q.hi.shape, device=device) if queries is not None else None
    for_gallery = torch.zeros(g.hi.shape, device=device) if gallery is not None else None
    if state.in_batch:
        for_gallery = for_queries
    height, width = block_shape(M, N, dims)
    halves = torch.empty(2, height, width, device=device, dtype=torch.float16)
    for row in range(0, M, height):
        rows = triton.cdiv(min(height, M - row), TILE) * TILE
        for column in range(0, N, width):
            columns = triton.cdiv(min(width, N - column), TILE) * TILE
            _fill_block(state, halves, row, rows, column, columns, M, N)
            if for_queries is not None:
                _add_product(halves, False, rows, columns, g, column, for_queries, row, state.factors)
            if for_gallery is not None:
                _add_product(halves, True, columns, rows, q, row, for_gallery, column, state.factors)
    del halves
    grad_queries = grad_gallery = None
    if queries is not None and for_queries is not None:
        grad_queries = embedding_gradient(for_queries, q.hi, q.lo, q.norms, q.order, upstream, queries)
    if gallery is not None and for_gallery is not None:
        grad_gallery = embedding_gradient(for_gallery, g.hi, g.lo, g.norms, g.order, upstream, gallery)
    return grad_queries, grad_gallery


def _fill_block(
    state: TileState, halves: Tensor, row: int, rows: int, column: int, columns: int, M: int, N: int
) -> None:
    q, g, pairs, rule = state.queries, state.gallery, state.pairs, state.rule
    ranks, calibration = rule.ranks, rule.calibration
    launch(score_gradient_tiles, (rows // TILE, columns // TILE),
        q.hi, q.lo, g.hi, g.lo, pairs.start, pairs.end, pairs.offset, state.positive_scores, state.weights,
        state.positive_slopes, state.stats, state.factors, halves[0], halves[1], M, N, row, column, halves.shape[2],
        1 / ranks.tau if ranks else 0.0,
        ranks.rho if ranks else 0.0,
        ranks.delta if ranks else 0.0,
        ranks.top if ranks else 0.0,
        calibration.alpha if calibration else 0.0,
        calibration.beta if calibration else 0.0,
        RANKS=ranks is not None, SUPAP=ranks is not None and ranks.kind == "supap",
        CALIBRATE=calibration is not None, IN_BATCH=state.in_batch,
        DIM=q.dimensions, DEPTH=DEPTH, BM=TILE, BN=TILE, num_warps=8, num_stages=3,
    )  # fmt: skip
