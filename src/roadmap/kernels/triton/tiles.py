"""Rank losses straight from embeddings and labels, in tiles: linear memory at any size.

Everything is held in label order, so that the positives of a query are one run of columns [start, end) and need no
mask. Here are those runs and what passes from the forward (tiles_forward.py) to the backward (tiles_backward.py). The
forward takes four steps, and none of them stores a score that is not a positive's:

    positive scores     s_ik for k ∈ P_i, from the same tile product as all others, so that equal vectors tie exactly
    rank tiles          r⁻(k) = Σ_{j ∈ N_i} H⁻(s_j - s_k) and Σ H⁻'(s_j - s_k), a split of the gallery at a time
    finished rows       r⁺, AP_i, w_k = r⁺ / (r⁺ + r⁻)² / |P_i|, and ∂AP_i/∂s_k of the positives
    reduction           the loss or its terms (reduce.py)

The backward visits the tiles once more, as blocks of ∂L/∂s that are kept only until their two products with the unit
vectors are done. Every sum has one owner and one order: the same input gives the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from roadmap.kernels.calls import LossCall
from roadmap.kernels.triton import batch_runs
from roadmap.kernels.triton.launch import Arena
from roadmap.kernels.triton.layout import FACTORS, STATISTICS, own_mode
from roadmap.kernels.triton.math import TILE
from roadmap.kernels.triton.symmetric import is_symmetric, rank_slots
from roadmap.kernels.triton.units import UnitVectors, room_for_units

POSITIVES_AT_ONCE = min(16, TILE // 4)  # ranks that one pass over the gallery counts; more positives take more passes
PAIRS_ROUNDED_TO = 4096
PROGRAMS = 528  # four for each of an H200's 132 multiprocessors: enough to even out uneven rows
NARROW_TILE = {"BN": TILE // 2, "num_warps": 8, "num_stages": 3}  # many positives: sigmoids outweigh the product
WIDE_TILE = {"BN": TILE, "num_warps": 8, "num_stages": 3}


@dataclass(frozen=True)
class PositivePairs:
    """P_i as runs of columns: positives of row i are columns start[i] ... end[i] - 1, its scores lie at offset[i].

    Row i is query `query_order[i]`, column j gallery item `gallery_order[j]`: both in the order of their labels. `own`
    says in which column the query of a row stands, -1 for nowhere; None where that follows from the call. Without the
    orders, a run is a list of its own (stored.py): it starts at 0, `own` is a place in it, and `parts` says where the
    share of each part of the gallery begins.
    `total` and `largest` are at least the number of pairs and the most positives of one query.
    """

    query_order: Tensor | None
    gallery_order: Tensor | None
    start: Tensor
    end: Tensor
    offset: Tensor
    own: Tensor | None
    total: int
    largest: int
    parts: Tensor | None = None

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        return self.query_order, self.gallery_order, self.start, self.end, self.offset, self.own, self.parts

    @property
    def are_lists(self) -> bool:
        return self.query_order is None

    def own_mode(self, call: LossCall) -> int:
        """How kernels that walk the runs learn which positive the query is."""
        return own_mode(call.gallery, self.own)

    @property
    def positives_at_once(self) -> int:
        return min(POSITIVES_AT_ONCE, max(4, self.largest))

    @property
    def tile(self) -> dict[str, int]:
        return WIDE_TILE if self.largest <= POSITIVES_AT_ONCE else NARROW_TILE


@dataclass(frozen=True)
class TileState:
    """Where the forward writes and the backward reads, in one buffer."""

    queries: UnitVectors
    gallery: UnitVectors
    positive_scores: Tensor
    turned_scores: Tensor  # those of symmetric.py, where the query is the column of a tile
    weights: Tensor
    by_pos: Tensor
    positive_slopes: Tensor
    rank_neg: Tensor
    slope_neg: Tensor
    neg_sum: Tensor
    neg_count: Tensor
    stats: Tensor
    factors: Tensor


def tile_state(arena: Arena, call: LossCall, pairs: PositivePairs) -> TileState:
    """Room for a call; the same arena gives the same places again."""
    (M, N), D = call.shape, call.queries.shape[1]
    q = room_for_units(arena, M, D, pairs.query_order)
    g = q if call.gallery is None else room_for_units(arena, N, D, pairs.gallery_order)
    splits = rank_slots(N, pairs.total) if is_symmetric(call) else rank_grid(call, pairs)[1]
    return rank_state(arena, q, g, call, pairs, splits)


def rank_state(
    arena: Arena, q: UnitVectors, g: UnitVectors, call: LossCall, pairs: PositivePairs, splits: int
) -> TileState:
    """Room for the ranks that are counted over splits of the gallery."""
    M = len(call.query_labels)
    scores, weights, by_pos, slopes = (arena.empty(pairs.total) for _ in range(4))
    rank_neg, slope_neg = (arena.empty(splits, pairs.total if call.rule.ranks else 0) for _ in range(2))
    neg_sum, neg_count = (arena.empty(splits, M if call.rule.calibration else 0) for _ in range(2))
    stats, factors = arena.empty(STATISTICS, M), arena.empty(FACTORS)
    turned = arena.empty(pairs.total if is_symmetric(call) and not pairs.are_lists else 0)
    return TileState(
        q, g, scores, turned, weights, by_pos, slopes, rank_neg, slope_neg, neg_sum, neg_count, stats, factors
    )


def rank_grid(call: LossCall, pairs: PositivePairs) -> tuple[int, int, int, int]:
    """Rows of tiles, splits of the gallery, passes over the positives; and the tiles of a split."""
    M, N = call.shape
    row_tiles, column_tiles = triton.cdiv(M, TILE), triton.cdiv(N, pairs.tile["BN"])
    passes = triton.cdiv(pairs.largest, POSITIVES_AT_ONCE) if call.rule.ranks else 1
    splits = min(column_tiles, triton.cdiv(PROGRAMS, row_tiles * passes))
    tiles = triton.cdiv(column_tiles, splits)
    return row_tiles, triton.cdiv(column_tiles, tiles), passes, tiles


def positive_pairs(call: LossCall) -> PositivePairs:
    """Queries and gallery in the order of their labels, and the runs of positives."""
    refuse_capture(call)
    if is_symmetric(call) and len(call.query_labels) <= batch_runs.LARGEST:
        runs = batch_runs.batch_runs(call.query_labels)
        counts = rounded_counts(*runs.totals.tolist())  # the only read-back
        return PositivePairs(runs.order, runs.order, runs.start, runs.end, runs.offset, None, *counts)
    q_sorted, q_order = torch.sort(call.query_labels, stable=True)
    in_batch = call.gallery is None
    g_sorted, g_order = (q_sorted, q_order) if in_batch else torch.sort(call.gallery_labels, stable=True)
    start = torch.searchsorted(g_sorted, q_sorted, out_int32=True)
    end = torch.searchsorted(g_sorted, q_sorted, right=True, out_int32=True)
    size = end - start
    ends = size.cumsum(0)
    own = None if call.own is None else _own_columns(call.own, q_order, g_order)
    counts = rounded_counts(*torch.stack([ends[-1], size.max()]).tolist())  # the only read-back
    return PositivePairs(q_order, g_order, start, end, ends - size, own, *counts)


def rounded_counts(total: int, largest: int) -> tuple[int, int]:
    """Rounded up, so that batches of uneven classes, whose counts differ a little at every step, share a record."""
    pairs = triton.cdiv(max(int(total), 1), PAIRS_ROUNDED_TO) * PAIRS_ROUNDED_TO
    return pairs, triton.next_power_of_2(max(int(largest), 1))


def _own_columns(own: Tensor, q_order: Tensor, g_order: Tensor) -> Tensor:
    """`own` in label order on both sides."""
    place = torch.empty_like(g_order)
    place[g_order] = torch.arange(len(g_order), device=own.device)
    mine = own[q_order]
    return torch.where(mine < 0, -1, place[mine.clamp(min=0)]).to(torch.int32)


def refuse_capture(call: LossCall) -> None:
    if call.queries.is_cuda and torch.cuda.is_current_stream_capturing():
        M, N = call.shape
        raise RuntimeError(
            f"a loss over {M} x {N} scores cannot be captured in a CUDA graph: it reads the number of positive pairs "
            "back from the GPU. Up to 2^21 scores (a batch of 1448) nothing is read back: capture a smaller "
            "comparison, or leave the loss out of the graph"
        )


@triton.jit
def worth_it(highest, s_k, negligible, KS: tl.constexpr):
    """Whether some sigmoid of the tile under threshold k is above nothing. With many positives, asking costs more."""
    worth = True
    if KS <= 8:
        worth = tl.max(highest - s_k, 0) > negligible
    return worth
