"""Scores of the positives, from the same tile product as all others, so that equal vectors tie exactly."""

from __future__ import annotations

import triton
import triton.language as tl

from roadmap.kernels.calls import LossCall
from roadmap.kernels.triton.launch import launch
from roadmap.kernels.triton.math import DEPTH, TILE, score_tile
from roadmap.kernels.triton.symmetric import is_symmetric
from roadmap.kernels.triton.tiles import PROGRAMS, PositivePairs, TileState

SIDE = TILE // 2  # of a tile; few tiles hold positives, and smaller ones are sooner done


@triton.jit
def _positive_scores(
    QHi, QLo, GHi, GLo, Start, End, Offset, Scores, Turned, M,
    TURN: tl.constexpr, DIM: tl.constexpr, DEPTH: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """The programs of one row of tiles share out the columns between its first positive and its last.

    `TURN`: the queries are the gallery, and their scores are wanted once more with the query as the column. The two
    may differ in the last bit, and thresholds must tie with what a tile compares them to.
    """
    i = tl.program_id(0) * BM + tl.arange(0, BM)
    start = tl.load(Start + i, mask=i < M, other=2147483647)
    end = tl.load(End + i, mask=i < M, other=0)
    offset = tl.load(Offset + i, mask=i < M, other=0)
    for tile in range(tl.min(start, 0) // BN + tl.program_id(1), tl.cdiv(tl.max(end, 0), BN), tl.num_programs(1)):
        first = tile * BN
        if tl.max(((start < first + BN) & (end > first)).to(tl.int32), 0) > 0:
            s = score_tile(QHi, QLo, GHi, GLo, tl.program_id(0) * BM, first, DIM, DEPTH, BM, BN)
            j = first + tl.arange(0, BN)
            inside = (j[None, :] >= start[:, None]) & (j[None, :] < end[:, None])
            tl.store(Scores + (offset - start)[:, None] + j[None, :], s, mask=inside)
            if TURN:
                j_start = tl.load(Start + j, mask=j < M, other=0)
                j_offset = tl.load(Offset + j, mask=j < M, other=0)
                tl.store(Turned + (j_offset - j_start)[None, :] + i[:, None], s, mask=inside)


def fill_positive_scores(state: TileState, call: LossCall, pairs: PositivePairs) -> None:
    q, g, (M, N) = state.queries, state.gallery, call.shape
    rows = triton.cdiv(M, SIDE)
    shared = min(triton.cdiv(N, SIDE), triton.cdiv(PROGRAMS, rows))
    launch(_positive_scores, (rows, shared),
        q.hi, q.lo, g.hi, g.lo, pairs.start, pairs.end, pairs.offset, state.positive_scores, state.turned_scores, M,
        TURN=is_symmetric(call), DIM=q.dimensions, DEPTH=DEPTH, BM=SIDE, BN=SIDE, num_warps=4,
    )  # fmt: skip
