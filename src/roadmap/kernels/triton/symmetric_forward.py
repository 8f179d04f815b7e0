"""Ranks within one batch, from half of the tiles of scores. See symmetric.py."""

from __future__ import annotations

import triton
import triton.language as tl

from roadmap.kernels.calls import LossCall
from roadmap.kernels.triton.launch import launch
from roadmap.kernels.triton.math import ABSENT, DEPTH, TILE, score_tile, step_and_slope
from roadmap.kernels.triton.symmetric import blocks, tile_in_block
from roadmap.kernels.triton.tiles import WIDE_TILE, PositivePairs, TileState


@triton.jit
def _add(To, at, value, mask, seen):
    """Adds to what earlier launches left there, if any did."""
    before = tl.load(To + at, mask=mask & (seen != 0), other=0.0)
    tl.store(To + at, before + value, mask=mask)


@triton.jit
def _add_ranks(
    s, Scores, RankNeg, SlopeNeg, offset, size, seen, inv_tau, rho_tau, delta, jump, top, negligible,
    SUPAP: tl.constexpr, AXIS: tl.constexpr,
):  # fmt: skip
    """What a tile adds to the ranks of its queries, which stand along the other axis than `AXIS`."""
    highest = tl.max(s, AXIS)
    for k in range(tl.max(size, 0)):
        listed = k < size
        s_k = tl.load(Scores + offset + k, mask=listed, other=4.0)
        if tl.max(highest - s_k, 0) > negligible:
            t = s - tl.expand_dims(s_k, AXIS)
            value, slope = step_and_slope(t, inv_tau, rho_tau, delta, jump, top, SUPAP)
            _add(RankNeg, offset + k, tl.sum(value, AXIS), listed, seen)
            _add(SlopeNeg, offset + k, tl.sum(slope, AXIS) * inv_tau, listed, seen)
        else:  # every sigmoid has vanished
            if seen == 0:
                tl.store(RankNeg + offset + k, s_k * 0.0, mask=listed)
                tl.store(SlopeNeg + offset + k, s_k * 0.0, mask=listed)


@triton.jit
def _add_excess(s, NegSum, NegCount, at, mask, seen, beta, AXIS: tl.constexpr):
    """What a tile adds to Σ [s_j - beta]₊ of its queries."""
    _add(NegSum, at, tl.sum(tl.maximum(s - beta, 0.0), AXIS), mask, seen)
    _add(NegCount, at, tl.sum((s > beta).to(tl.float32), AXIS), mask, seen)


@triton.jit(do_not_specialize=["pairs", "first_row", "first_column", "height", "rows_seen", "columns_seen"])
def _rank_tile_both_ways(
    Hi, Lo, Start, End, Offset, Scores, Turned, RankNeg, SlopeNeg, NegSum, NegCount, N, pairs,
    first_row, first_column, height, rows_seen, columns_seen,
    inv_tau, rho_tau, delta, jump, top, negligible, beta,
    RANKS: tl.constexpr, SUPAP: tl.constexpr, CALIBRATE: tl.constexpr, DIAGONAL: tl.constexpr,
    DIM: tl.constexpr, DEPTH: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """A tile of scores, counted for the queries of its rows and for those of its columns."""
    row, column, again = tile_in_block(tl.program_id(0), tl.program_id(1), height, DIAGONAL)
    if again:
        return
    i = (first_row + row) * BM + tl.arange(0, BM)
    j = (first_column + column) * BN + tl.arange(0, BN)
    start = tl.load(Start + i, mask=i < N, other=0)
    end = tl.load(End + i, mask=i < N, other=0)
    s = score_tile(Hi, Lo, Hi, Lo, (first_row + row) * BM, (first_column + column) * BN, DIM, DEPTH, BM, BN)
    neg = ((j[None, :] < start[:, None]) | (j[None, :] >= end[:, None])) & (i < N)[:, None] & (j < N)[None, :]
    s = tl.where(neg, s, ABSENT)  # what is no negative lies below all thresholds and adds nothing
    if CALIBRATE:
        at = column.to(tl.int64) * N + i
        _add_excess(s, NegSum, NegCount, at, i < N, rows_seen, beta, 1)
    if RANKS:
        offset = tl.load(Offset + i, mask=i < N, other=0).to(tl.int32)
        to = column.to(tl.int64) * pairs
        _add_ranks(
            s, Scores, RankNeg + to, SlopeNeg + to, offset, end - start, rows_seen,
            inv_tau, rho_tau, delta, jump, top, negligible, SUPAP, 1,
        )  # fmt: skip
    if first_row + row != first_column + column:
        if CALIBRATE:
            at = row.to(tl.int64) * N + j
            _add_excess(s, NegSum, NegCount, at, j < N, columns_seen, beta, 0)
        if RANKS:
            size = tl.load(End + j, mask=j < N, other=0) - tl.load(Start + j, mask=j < N, other=0)
            offset = tl.load(Offset + j, mask=j < N, other=0).to(tl.int32)
            to = row.to(tl.int64) * pairs
            _add_ranks(
                s, Turned, RankNeg + to, SlopeNeg + to, offset, size, columns_seen,
                inv_tau, rho_tau, delta, jump, top, negligible, SUPAP, 0,
            )  # fmt: skip


def count_ranks(state: TileState, call: LossCall, pairs: PositivePairs) -> None:
    """r⁻ and Σ H⁻' of every positive, and what lies above beta, in as many partial sums as a block is wide."""
    q, N = state.queries, call.shape[1]
    ranks, calibration = call.rule.ranks, call.rule.calibration
    side = len(state.rank_neg)
    for block in blocks(triton.cdiv(N, TILE), side, side):
        launch(_rank_tile_both_ways, block.grid,
            q.hi, q.lo, pairs.start, pairs.end, pairs.offset, state.positive_scores, state.turned_scores,
            state.rank_neg, state.slope_neg, state.neg_sum, state.neg_count, N, pairs.total,
            block.row, block.column, block.height, block.rows_seen, block.columns_seen,
            *call.rule.rank_numbers,
            ranks.negligible if ranks else 0.0,
            calibration.beta if calibration else 0.0,
            RANKS=ranks is not None, SUPAP=call.rule.is_supap, CALIBRATE=calibration is not None,
            DIAGONAL=block.is_diagonal, DIM=q.dimensions, DEPTH=DEPTH, BM=TILE, **WIDE_TILE,
        )  # fmt: skip
