"""The backward of the tiled losses: blocks of ∂L/∂s and their products with the unit vectors. See tiles.py."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from roadmap.kernels.calls import LossCall
from roadmap.kernels.triton import symmetric_backward
from roadmap.kernels.triton.launch import Arena, launch
from roadmap.kernels.triton.layout import (
    AP_FACTOR,
    GIVEN,
    HALF_SCALE,
    LOWEST,
    NEG_FACTOR,
    NEG_SHARE,
    NOWHERE,
    POS_FACTOR,
    POS_SHARE,
    own_mode,
)
from roadmap.kernels.triton.math import ABSENT, DEPTH, TILE, score_tile, step_and_slope
from roadmap.kernels.triton.reduce import backward_factors, embedding_gradient
from roadmap.kernels.triton.symmetric import is_symmetric
from roadmap.kernels.triton.tiles import PROGRAMS, PositivePairs, TileState, worth_it
from roadmap.kernels.triton.units import UnitVectors

# A block of score gradients lives only until it is multiplied: 4 bytes an entry. Its size follows the vectors it
# serves, so that it stays a fraction of what must be held anyway, within these limits.
SMALLEST_BLOCK = 3 << 19
LARGEST_BLOCK = 1 << 25
WIDEST_BLOCK = 1 << 16


@triton.jit(do_not_specialize=["row_first", "column_first"])
def _score_gradient_tiles(
    QHi, QLo, GHi, GLo, Start, End, Offset, Own, Scores, Weight, PosSlope, Stats, Factors, WHi, WLo, M, N,
    row_first, column_first, columns, inv_tau, rho_tau, delta, jump, top, negligible, alpha, beta,
    RANKS: tl.constexpr, SUPAP: tl.constexpr, CALIBRATE: tl.constexpr, OWN: tl.constexpr, KS: tl.constexpr,
    DIM: tl.constexpr, DEPTH: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """A tile of ∂L/∂s, brought into the range of float16 and split like the vectors it will multiply."""
    i = row_first + tl.program_id(0) * BM + tl.arange(0, BM)
    j = column_first + tl.program_id(1) * BN + tl.arange(0, BN)
    ok = i < M
    start = tl.load(Start + i, mask=ok, other=0)
    end = tl.load(End + i, mask=ok, other=0)
    offset = tl.load(Offset + i, mask=ok, other=0)
    size = end - start
    first = column_first + tl.program_id(1) * BN
    s = score_tile(QHi, QLo, GHi, GLo, row_first + tl.program_id(0) * BM, first, DIM, DEPTH, BM, BN)
    pos = (j[None, :] >= start[:, None]) & (j[None, :] < end[:, None])
    grad = tl.zeros((BM, BN), tl.float32)
    if RANKS:
        lowest = tl.load(Stats + M * LOWEST + i, mask=ok, other=4.0)
        highest = tl.max(tl.where(pos, ABSENT, s), 1)
        if tl.max(highest - lowest, 0) > negligible:
            for k in range(tl.max(size, 0)):
                s_k = tl.load(Scores + offset + k, mask=k < size, other=4.0)
                if worth_it(highest, s_k, negligible, KS):
                    weight = tl.load(Weight + offset + k, mask=k < size, other=0.0)
                    _value, slope = step_and_slope(s - s_k[:, None], inv_tau, rho_tau, delta, jump, top, SUPAP)
                    grad += weight[:, None] * slope
        grad = grad * (tl.load(Factors + AP_FACTOR) * inv_tau)
    if CALIBRATE:
        by_neg = tl.load(Factors + NEG_FACTOR) * tl.load(Stats + M * NEG_SHARE + i, mask=ok, other=0.0)
        grad += tl.where(s > beta, by_neg[:, None], 0.0)
    if tl.max(((start < first + BN) & (end > first)).to(tl.int32), 0) > 0:
        own = tl.zeros((BM, BN), tl.float32)
        if RANKS:
            at = offset[:, None] + (j[None, :] - start[:, None])
            own -= tl.load(PosSlope + at, mask=pos, other=0.0) * tl.load(Factors + AP_FACTOR)
        if CALIBRATE:
            by_pos = tl.load(Factors + POS_FACTOR) * tl.load(Stats + M * POS_SHARE + i, mask=ok, other=0.0)
            below = s < alpha
            if OWN != NOWHERE:
                itself = i
                if OWN == GIVEN:
                    itself = tl.load(Own + i, mask=ok, other=-1)
                below = below & (j[None, :] != itself[:, None])
            own -= tl.where(below, by_pos[:, None], 0.0)
        grad = tl.where(pos, own, grad)
    grad = tl.where(ok[:, None] & (j < N)[None, :], grad, 0.0) * tl.load(Factors + HALF_SCALE)
    hi = grad.to(tl.float16)
    lo = (grad - hi.to(tl.float32)).to(tl.float16)
    corner = tl.program_id(0).to(tl.int64) * BM * columns + tl.program_id(1) * BN
    at = tl.arange(0, BM)[:, None] * columns + tl.arange(0, BN)[None, :]
    tl.store(WHi + corner + at, hi)
    tl.store(WLo + corner + at, lo)


@triton.jit(do_not_specialize=["inner", "inner_per_split", "stride_split", "u_first", "out_first"])
def _product(
    WHi, WLo, UHi, ULo, Factors, Out, inner, inner_per_split, stride_split, u_first, out_first, stride_row,
    stride_inner, DIM: tl.constexpr, SPLIT: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Out += W U over one split of the inner dimension; three float16 products as in math.py."""
    first_row = tl.program_id(0).to(tl.int64) * BM
    first_column = tl.program_id(1) * BN
    split = tl.program_id(2)
    first = split * inner_per_split
    w_first = first_row * stride_row
    u_corner = tl.cast(u_first, tl.int64) * DIM + first_column
    w = tl.arange(0, BM)[:, None] * stride_row + tl.arange(0, BK)[None, :] * stride_inner
    u = tl.arange(0, BK)[:, None] * DIM + tl.arange(0, BN)[None, :]
    out = tl.zeros((BM, BN), tl.float32)
    for at in range(first, tl.minimum(first + inner_per_split, inner), BK):
        w_at = w_first + tl.cast(at, tl.int64) * stride_inner
        u_at = u_corner + tl.cast(at, tl.int64) * DIM
        w_hi = tl.load(WHi + w_at + w)
        u_hi = tl.load(UHi + u_at + u)
        part = tl.dot(w_hi, tl.load(ULo + u_at + u))
        part = tl.dot(tl.load(WLo + w_at + w), u_hi, part)
        part = tl.dot(w_hi, u_hi, part)
        out += part
    out = out * (0.000244140625 / tl.load(Factors + HALF_SCALE))
    to = (out_first + first_row) * DIM + first_column
    at_out = tl.arange(0, BM)[:, None] * DIM + tl.arange(0, BN)[None, :]
    if SPLIT:
        tl.store(Out + split.to(tl.int64) * stride_split + to + at_out, out)
    else:
        tl.store(Out + to + at_out, tl.load(Out + to + at_out) + out)


@triton.jit
def _zero(Out, size, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(Out + at, tl.zeros((BLOCK,), tl.float32), mask=at < size)


@triton.jit(do_not_specialize=["splits"])
def _add_splits(Partial, Out, size, splits, out_first, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    total = tl.load(Out + out_first + at, mask=at < size, other=0.0)
    for split in range(0, splits):
        total += tl.load(Partial + tl.cast(split, tl.int64) * size + at, mask=at < size, other=0.0)
    tl.store(Out + out_first + at, total, mask=at < size)


def product_splits(rows: int, inner: int, dims: int, most: int = PROGRAMS) -> tuple[int, int]:
    """In how many parts, `most` or fewer, the inner dimension of a product is taken, to fill the GPU; how long each
    is. A smaller product may be taken in so many more parts than a larger one that they have more rows in all."""
    programs = (rows // TILE) * (dims // _columns(dims))
    splits = max(1, min(PROGRAMS // 4 // programs, inner // (8 * DEPTH), most))
    per_split = triton.cdiv(triton.cdiv(inner, splits), DEPTH) * DEPTH
    return triton.cdiv(inner, per_split), per_split


def _columns(dims: int) -> int:
    return TILE if dims % TILE == 0 else DEPTH


def add_product(
    halves: tuple[Tensor, Tensor], transposed: bool, rows: int, inner: int, units: UnitVectors, u_first: int,
    out: Tensor, out_first: int, factors: Tensor, partial: Tensor,
) -> None:  # fmt: skip
    """out[out_first:][:rows] += W units[u_first:][:inner], W the block in `halves` or its transpose.

    In no more parts than `partial` has room for, which was made for whole blocks: the last may be a smaller one.
    """
    width, dims = halves[0].shape[1], units.dimensions
    stride_row, stride_inner = (1, width) if transposed else (width, 1)
    splits, per_split = product_splits(rows, inner, dims, len(partial) // rows)
    size = rows * dims
    launch(_product, (rows // TILE, dims // _columns(dims), splits),
        halves[0], halves[1], units.hi, units.lo, factors, partial if splits > 1 else out, inner, per_split, size,
        u_first, 0 if splits > 1 else out_first, stride_row, stride_inner,
        DIM=dims, SPLIT=splits > 1, BM=TILE, BN=_columns(dims), BK=DEPTH, num_warps=8,
    )  # fmt: skip
    if splits > 1:
        grid = (triton.cdiv(size, 4096),)
        launch(_add_splits, grid, partial, out, size, splits, out_first * dims, BLOCK=4096, num_warps=8)


def block_shape(M: int, N: int, dims: int) -> tuple[int, int]:
    """Rows and columns of the blocks of ∂L/∂s, whole tiles."""
    wanted = max(SMALLEST_BLOCK, min(LARGEST_BLOCK, (M + N) * dims // 2))
    columns = min(triton.cdiv(N, TILE) * TILE, WIDEST_BLOCK)
    rows = max(1, wanted // columns // TILE) * TILE
    return min(rows, triton.cdiv(M, TILE) * TILE), columns


def backward(
    arena: Arena, state: TileState, call: LossCall, pairs: PositivePairs, upstream: Tensor,
    grad_queries: Tensor | None, grad_gallery: Tensor | None,
) -> None:  # fmt: skip
    """Writes the gradients that are asked for. In the in-batch call both roles meet in `grad_queries`."""
    if is_symmetric(call):
        assert grad_queries is not None
        symmetric_backward.backward(arena, state, call, pairs, upstream, grad_queries)
        return
    q, g = state.queries, state.gallery
    (M, N), dims = call.shape, q.dimensions
    factors, left = backward_factors(arena, state.factors, upstream, call.as_terms)
    for_queries = None if grad_queries is None else zeros(arena, q)
    for_gallery = for_queries if call.gallery is None else None if grad_gallery is None else zeros(arena, g)
    height, width = block_shape(M, N, dims)
    halves = arena.empty(height, width, dtype=torch.float16), arena.empty(height, width, dtype=torch.float16)
    by_queries, by_gallery = (
        product_splits(*shape, dims)[0] * shape[0] for shape in ((height, width), (width, height))
    )
    partial = arena.empty(
        max(by_queries if for_queries is not None else 0, by_gallery if by_gallery > width else 0), dims
    )
    for row in range(0, M, height):
        rows = triton.cdiv(min(height, M - row), TILE) * TILE
        for column in range(0, N, width):
            columns = triton.cdiv(min(width, N - column), TILE) * TILE
            _fill_block(state, call, pairs, factors, halves, (row, rows), (column, columns))
            if for_queries is not None:
                add_product(halves, False, rows, columns, g, column, for_queries, row, factors, partial)
            if for_gallery is not None:
                add_product(halves, True, columns, rows, q, row, for_gallery, column, factors, partial)
    if for_queries is not None and grad_queries is not None:
        embedding_gradient(for_queries, q.hi, q.lo, q.norms, q.order, left, grad_queries)
    if for_gallery is not None and grad_gallery is not None:
        embedding_gradient(for_gallery, g.hi, g.lo, g.norms, g.order, left, grad_gallery)


def zeros(arena: Arena, units: UnitVectors, rows: int | None = None) -> Tensor:
    out = arena.empty(len(units.hi) if rows is None else rows, units.dimensions)
    launch(_zero, (triton.cdiv(out.numel(), 4096),), out, out.numel(), BLOCK=4096, num_warps=8)
    return out


def _fill_block(
    state: TileState, call: LossCall, pairs: PositivePairs, factors: Tensor, halves: tuple[Tensor, Tensor],
    rows: tuple[int, int], columns: tuple[int, int],
) -> None:  # fmt: skip
    """Writes the block of ∂L/∂s that begins at a row and a column; `rows` and `columns`: where, and how many."""
    q, g, (M, N) = state.queries, state.gallery, call.shape
    ranks, calibration = call.rule.ranks, call.rule.calibration
    tile = pairs.tile
    launch(_score_gradient_tiles, (rows[1] // TILE, columns[1] // tile["BN"]),
        q.hi, q.lo, g.hi, g.lo, pairs.start, pairs.end, pairs.offset, pairs.own, state.positive_scores, state.weights,
        state.positive_slopes, state.stats, factors, halves[0], halves[1], M, N, rows[0], columns[0],
        halves[0].shape[1],
        *call.rule.rank_numbers,
        ranks.negligible if ranks else 0.0,
        calibration.alpha if calibration else 0.0,
        calibration.beta if calibration else 0.0,
        RANKS=ranks is not None, SUPAP=call.rule.is_supap,
        CALIBRATE=calibration is not None, OWN=own_mode(call.gallery, call.own), KS=pairs.positives_at_once,
        DIM=q.dimensions, DEPTH=DEPTH, BM=TILE, **tile,
    )  # fmt: skip
