"""The backward within one batch: blocks of W = G + Gᵀ, G = ∂L/∂s, and their product with U. See symmetric.py."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from roadmap.kernels.calls import LossCall
from roadmap.kernels.triton.launch import Arena, launch
from roadmap.kernels.triton.layout import (
    AP_FACTOR,
    HALF_SCALE,
    NEG_FACTOR,
    NEG_SHARE,
    POS_FACTOR,
    POS_SHARE,
)
from roadmap.kernels.triton.math import ABSENT, DEPTH, TILE, score_tile, step_and_slope
from roadmap.kernels.triton.reduce import backward_factors, embedding_gradient
from roadmap.kernels.triton.symmetric import Block, blocks, place_of_tile, tile_in_block
from roadmap.kernels.triton.tiles import WIDE_TILE, PositivePairs, TileState
from roadmap.kernels.triton.units import UnitVectors

# Tiles on a side of a block, 64 KiB each, 33 MiB in all. On an H200 of 132 multiprocessors a block on the diagonal
# is 528 tiles, four for each; one beside it, half as high, 512; and the products with 512 dimensions are 128 programs,
# or 64 and 128 half as long.
SIDE = 32
BAND = 16
FULL = 96  # programs that are enough for a product


@triton.jit
def _push_of_ranks(
    grad, s, negatives, Scores, Weight, offset, size, inv_tau, rho_tau, delta, jump, top, negligible,
    SUPAP: tl.constexpr, AXIS: tl.constexpr,
):  # fmt: skip
    """Adds Σ_k w_k · tau H⁻'(s_j - s_k) over the positives k of each query; `negatives`: s, and -4 elsewhere."""
    highest = tl.max(negatives, AXIS)
    for k in range(tl.max(size, 0)):
        s_k = tl.load(Scores + offset + k, mask=k < size, other=4.0)
        weight = tl.load(Weight + offset + k, mask=k < size, other=0.0)
        weight = tl.where(highest - s_k > negligible, weight, 0.0)
        if tl.max(tl.abs(weight), 0) > 0:
            t = s - tl.expand_dims(s_k, AXIS)
            _value, slope = step_and_slope(t, inv_tau, rho_tau, delta, jump, top, SUPAP)
            grad += tl.expand_dims(weight, AXIS) * slope
    return grad


@triton.jit
def _store_positives(
    Scores, PosSlope, Stats, Factors, WHi, WLo, i, start, end, offset, first, N, alpha,
    RANKS: tl.constexpr, CALIBRATE: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """The entries of a tile that are positives, one of each row at a time."""
    size = end - start
    own = i - start  # which positive the query is of itself, and of the others of its class
    nearest = tl.maximum(first - tl.max(start, 0), 0)
    furthest = tl.minimum(first + BN - tl.min(start, 0), tl.max(size, 0))
    for k in range(nearest, furthest):
        j = start + k
        here = (k < size) & (j >= first) & (j < first + BN)
        grad = tl.zeros_like(start).to(tl.float32)
        if RANKS:
            slopes = tl.load(PosSlope + offset + k, mask=here, other=0.0)
            slopes += tl.load(PosSlope + offset + (k - own) * size + own, mask=here, other=0.0)
            grad -= slopes * tl.load(Factors + AP_FACTOR)
        if CALIBRATE:
            below = here & (k != own) & (tl.load(Scores + offset + k, mask=here, other=4.0) < alpha)
            share = tl.load(Stats + N * POS_SHARE + i, mask=here, other=0.0)
            share += tl.load(Stats + N * POS_SHARE + j, mask=here, other=0.0)
            grad -= tl.where(below, share * tl.load(Factors + POS_FACTOR), 0.0)
        grad = grad * tl.load(Factors + HALF_SCALE)
        hi = grad.to(tl.float16)
        at = tl.arange(0, start.shape[0]) * BN + (j - first)
        tl.store(WHi + at, hi, mask=here)
        tl.store(WLo + at, (grad - hi.to(tl.float32)).to(tl.float16), mask=here)


@triton.jit(do_not_specialize=["first_row", "first_column", "height", "width"])
def _gradient_tile_both_ways(
    Hi, Lo, Start, End, Offset, Scores, Turned, Weight, PosSlope, Stats, Factors, WHi, WLo, N,
    first_row, first_column, height, width, inv_tau, rho_tau, delta, jump, top, negligible, alpha, beta,
    RANKS: tl.constexpr, SUPAP: tl.constexpr, CALIBRATE: tl.constexpr, DIAGONAL: tl.constexpr,
    DIM: tl.constexpr, DEPTH: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """A tile of G + Gᵀ, brought into the range of float16 and split like the vectors it will multiply."""
    row, column, again = tile_in_block(tl.program_id(0), tl.program_id(1), height, DIAGONAL)
    if again:
        return
    first = (first_column + column) * BN
    i = (first_row + row) * BM + tl.arange(0, BM)
    j = first + tl.arange(0, BN)
    start = tl.load(Start + i, mask=i < N, other=0)
    end = tl.load(End + i, mask=i < N, other=0)
    offset = tl.load(Offset + i, mask=i < N, other=0).to(tl.int32)
    s = score_tile(Hi, Lo, Hi, Lo, (first_row + row) * BM, first, DIM, DEPTH, BM, BN)
    pos = (j[None, :] >= start[:, None]) & (j[None, :] < end[:, None])
    grad = tl.zeros((BM, BN), tl.float32)
    if RANKS:
        j_size = tl.load(End + j, mask=j < N, other=0) - tl.load(Start + j, mask=j < N, other=0)
        j_offset = tl.load(Offset + j, mask=j < N, other=0).to(tl.int32)
        negatives = tl.where(pos, ABSENT, s)
        grad = _push_of_ranks(
            grad, s, negatives, Scores, Weight, offset, end - start,
            inv_tau, rho_tau, delta, jump, top, negligible, SUPAP, 1,
        )  # fmt: skip
        grad = _push_of_ranks(
            grad, s, negatives, Turned, Weight, j_offset, j_size,
            inv_tau, rho_tau, delta, jump, top, negligible, SUPAP, 0,
        )  # fmt: skip
        grad = grad * (tl.load(Factors + AP_FACTOR) * inv_tau)
    if CALIBRATE:
        share = tl.load(Stats + N * NEG_SHARE + i, mask=i < N, other=0.0)
        j_share = tl.load(Stats + N * NEG_SHARE + j, mask=j < N, other=0.0)
        grad += tl.where(s > beta, (share[:, None] + j_share[None, :]) * tl.load(Factors + NEG_FACTOR), 0.0)
    grad = tl.where((i < N)[:, None] & (j < N)[None, :], grad, 0.0) * tl.load(Factors + HALF_SCALE)
    hi = grad.to(tl.float16)
    lo = (grad - hi.to(tl.float32)).to(tl.float16)
    corner = place_of_tile(row, column, height, width, DIAGONAL).to(tl.int64) * (BM * BN)
    at = tl.arange(0, BM)[:, None] * BN + tl.arange(0, BN)[None, :]
    tl.store(WHi + corner + at, hi)
    tl.store(WLo + corner + at, lo)
    if tl.max(pos.to(tl.int32)) > 0:
        tl.debug_barrier()  # other threads write to the same places now
        _store_positives(
            Scores, PosSlope, Stats, Factors, WHi + corner, WLo + corner, i, start, end, offset, first, N, alpha,
            RANKS, CALIBRATE, BN,
        )  # fmt: skip


@triton.jit
def _split_dot(WHi, WLo, UHi, ULo, w, u):
    """W U over BK items, three float16 products as in math.py."""
    w_hi = tl.load(WHi + w)
    u_hi = tl.load(UHi + u)
    part = tl.dot(w_hi, tl.load(ULo + u))
    part = tl.dot(tl.load(WLo + w), u_hi, part)
    return tl.dot(w_hi, u_hi, part)


@triton.jit(do_not_specialize=["first_row", "first_column", "height", "width", "rows_seen", "columns_seen"])
def _symmetric_product(
    WHi, WLo, UHi, ULo, Factors, Out, first_row, first_column, height, width, rows_seen, columns_seen,
    DIAGONAL: tl.constexpr, DIM: tl.constexpr, TILE: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Out += W U for BM items of a block of W: its rows first, then, beside the diagonal, its columns.

    A row of W is made of the tiles above it in its column, turned over, and the tiles from the diagonal on.
    """
    number = tl.program_id(0) // (TILE // BM)
    part_of_tile = tl.program_id(0) % (TILE // BM) * BM
    turned = number  # how many tiles are turned over
    ahead = height
    line = number
    seen = rows_seen
    out_first = first_row + number
    if not DIAGONAL:
        is_row = number < height
        line = tl.where(is_row, number, number - height)
        turned = tl.where(is_row, 0, height)
        ahead = tl.where(is_row, width, 0)
        seen = tl.where(is_row, rows_seen, columns_seen)
        out_first = tl.where(is_row, first_row, first_column) + line
    steps: tl.constexpr = TILE // BK
    rows = tl.arange(0, BM)
    inner = tl.arange(0, BK)
    d = tl.program_id(1) * BN + tl.arange(0, BN)
    u = inner[:, None] * DIM + d[None, :]
    out = tl.zeros((BM, BN), tl.float32)
    w = inner[None, :] * TILE + rows[:, None]
    for step in range(turned * steps):
        place = place_of_tile(step // steps, line, height, width, DIAGONAL).to(tl.int64)
        w_at = place * (TILE * TILE) + step % steps * (BK * TILE) + part_of_tile
        u_at = (first_row * TILE + step * BK).to(tl.int64) * DIM
        out += _split_dot(WHi + w_at, WLo + w_at, UHi + u_at, ULo + u_at, w, u)
    w = rows[:, None] * TILE + inner[None, :]
    begins = 0
    if DIAGONAL:
        begins = number
    for step in range(begins * steps, ahead * steps):
        place = place_of_tile(line, step // steps, height, width, DIAGONAL).to(tl.int64)
        w_at = place * (TILE * TILE) + part_of_tile * TILE + step % steps * BK
        u_at = (first_column * TILE + step * BK).to(tl.int64) * DIM
        out += _split_dot(WHi + w_at, WLo + w_at, UHi + u_at, ULo + u_at, w, u)
    out = out * (0.000244140625 / tl.load(Factors + HALF_SCALE))
    at = (out_first.to(tl.int64) * TILE + part_of_tile) * DIM + rows[:, None] * DIM + d[None, :]
    before = tl.load(Out + at, mask=(rows[:, None] + d[None, :] * 0 >= 0) & (seen != 0), other=0.0)
    tl.store(Out + at, before + out)


def product_tile(row_tiles: int, dims: int) -> tuple[int, int]:
    """Rows and columns that a program of the product takes: whole tiles, or parts where they would be too few."""
    widths = (TILE, TILE // 2) if dims % TILE == 0 else (TILE // 2,)
    shapes = [(TILE, width) for width in widths] + [(TILE // 2, TILE // 2)]
    return next((s for s in shapes if row_tiles * TILE // s[0] * (dims // s[1]) >= FULL), shapes[-1])


def backward(
    arena: Arena, state: TileState, call: LossCall, pairs: PositivePairs, upstream: Tensor, grad_queries: Tensor
) -> None:
    """Writes the gradient at the batch, in which the roles of query and item meet."""
    q, N = state.queries, call.shape[1]
    factors, left = backward_factors(arena, state.factors, upstream, call.as_terms)
    order = list(blocks(triton.cdiv(N, TILE), SIDE, BAND))
    entries = max(block.tiles for block in order) * TILE * TILE
    halves = arena.empty(entries, dtype=torch.float16), arena.empty(entries, dtype=torch.float16)
    grad = arena.empty(len(q.hi), q.dimensions)
    for block in order:
        _fill_block(state, call, pairs, factors, halves, block)
        _add_product(halves, q, grad, factors, block)
    embedding_gradient(grad, q.hi, q.lo, q.norms, q.order, left, grad_queries)


def _fill_block(
    state: TileState, call: LossCall, pairs: PositivePairs, factors: Tensor, halves: tuple[Tensor, Tensor], block: Block
) -> None:
    q, N, ranks, calibration = state.queries, call.shape[1], call.rule.ranks, call.rule.calibration
    launch(_gradient_tile_both_ways, block.grid,
        q.hi, q.lo, pairs.start, pairs.end, pairs.offset, state.positive_scores, state.turned_scores, state.weights,
        state.positive_slopes, state.stats, factors, *halves, N, block.row, block.column, block.height, block.width,
        *call.rule.rank_numbers,
        ranks.negligible if ranks else 0.0,
        calibration.alpha if calibration else 0.0,
        calibration.beta if calibration else 0.0,
        RANKS=ranks is not None, SUPAP=call.rule.is_supap, CALIBRATE=calibration is not None,
        DIAGONAL=block.is_diagonal, DIM=q.dimensions, DEPTH=DEPTH, BM=TILE, **WIDE_TILE,
    )  # fmt: skip


def _add_product(halves: tuple[Tensor, Tensor], units: UnitVectors, out: Tensor, factors: Tensor, block: Block) -> None:
    """out += W units, over the rows of the block and over its columns."""
    tiles = block.height if block.is_diagonal else block.height + block.width
    rows, columns = product_tile(tiles, units.dimensions)
    launch(_symmetric_product, (tiles * TILE // rows, units.dimensions // columns),
        *halves, units.hi, units.lo, factors, out, block.row, block.column, block.height, block.width,
        block.rows_seen, block.columns_seen,
        DIAGONAL=block.is_diagonal, DIM=units.dimensions, TILE=TILE, BM=rows, BN=columns, BK=DEPTH,
        num_warps=8 if rows == TILE else 4,
    )  # fmt: skip
