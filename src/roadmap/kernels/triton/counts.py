"""The two functions of `roadmap.kernels.counts` as Triton kernels: scores live in registers, counts leave.

One program owns a block of queries and a share of the gallery. It computes a tile of scores, compares it with the
thresholds of its queries, and adds the numbers of hits to counts that no other program touches: no atomics, so the
same bits on every run. Thresholds come from `_pair_scores`, which uses the same tile product with the same blocks:
the sum over D runs in one order for every element of every tile, so copies of a vector tie exactly.
"""

from __future__ import annotations

import os

import torch
import triton
import triton.language as tl
from torch import Tensor

# (queries, items, components) of a tile; fewer than 256 items, because four counts share one int32 below.
BLOCKS = (16, 16, 16) if os.environ.get("TRITON_INTERPRET") == "1" else (128, 128, 32)
WARPS = 8
# Programs to start at least, so that few queries still fill the device: the gallery is then shared among several.
PROGRAMS = 4 * 132
# Bytes of counts, all shares together.
SHARES_BYTES = 64 << 20


@triton.jit
def _score_tile(
    query_rows, item_rows, in_rows, in_columns, D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr
):
    """Scores (BM, BN) of the vectors that begin at the given addresses, zero outside.

    Three TF32 products on the tensor cores: as near to float64 as a float32 matmul, and faster (docs/kernel-design.md).
    """
    scores = tl.zeros((BM, BN), dtype=tl.float32)
    for start in range(0, D, BK):
        d = start + tl.arange(0, BK)
        q = tl.load(query_rows[:, None] + d[None, :], mask=in_rows[:, None] & (d < D)[None, :], other=0.0)
        g = tl.load(item_rows[None, :] + d[:, None], mask=in_columns[None, :] & (d < D)[:, None], other=0.0)
        scores = tl.dot(q, g, scores, input_precision="tf32x3")
    return scores


@triton.jit
def _pair_scores(
    Queries,
    Gallery,
    Rows,
    Columns,
    Scores,
    pairs,
    D: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    """Scores[p] = Queries[Rows[p]] . Gallery[Columns[p]]: the diagonal of a tile of BM pairs.

    Only the diagonal of each tile is used, BM times too much work; pairs are so few beside M N that it does not show,
    and the scores have the bits that `_counts` compares.
    """
    p = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)
    inside = p < pairs
    rows = tl.load(Rows + p, mask=inside, other=0)
    columns = tl.load(Columns + p, mask=inside, other=0)
    tile = _score_tile(Queries + rows * D, Gallery + columns * D, inside, inside, D, BM, BN, BK)
    diagonal = tl.arange(0, BM)[:, None] == tl.arange(0, BN)[None, :]
    tl.store(Scores + p, tl.sum(tl.where(diagonal, tile, 0.0), 1), mask=inside)


@triton.jit
def _add_counts(Thresholds, Counts, tile, p, queries, rows, in_rows):
    """Add the hits of a tile for the thresholds p .. p + 3 of each row; four sums of at most 255 in one int32."""
    at = p * queries + rows
    t0 = tl.load(Thresholds + at, mask=in_rows, other=float("inf"))
    t1 = tl.load(Thresholds + at + queries, mask=in_rows, other=float("inf"))
    t2 = tl.load(Thresholds + at + 2 * queries, mask=in_rows, other=float("inf"))
    t3 = tl.load(Thresholds + at + 3 * queries, mask=in_rows, other=float("inf"))
    hits = tl.where(tile >= t0[:, None], 1, 0)
    hits += tl.where(tile >= t1[:, None], 1 << 8, 0)
    hits += tl.where(tile >= t2[:, None], 1 << 16, 0)
    hits += tl.where(tile >= t3[:, None], 1 << 24, 0)
    total = tl.sum(hits, 1)
    for i in tl.static_range(4):
        here = Counts + at + i * queries
        before = tl.load(here, mask=in_rows, other=0)
        tl.store(here, before + ((total >> (8 * i)) & 255), mask=in_rows)


@triton.jit
def _counts(
    Queries,
    Gallery,
    Thresholds,  # (limit, queries) float32, limit a multiple of 4, filled up with +inf
    Limits,  # (blocks of queries,) int32: thresholds of the longest row of the block
    Counts,  # (shares, limit, queries) int32, zeros
    queries,
    items,
    limit,
    tiles_each,
    D: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    """Counts[share, p, i] = how many items of the share score at least Thresholds[p, i] with query i."""
    block = tl.program_id(0)
    share = tl.program_id(1).to(tl.int64)
    rows = block.to(tl.int64) * BM + tl.arange(0, BM)
    in_rows = rows < queries
    query_rows = Queries + rows * D
    own = Counts + share * limit * queries
    block_limit = tl.load(Limits + block)
    # `while`, because Triton's interpreter cannot make a range from an argument under NumPy 2.4
    number = share * tiles_each
    last = tl.minimum(number + tiles_each, tl.cdiv(items, BN))
    while number < last:
        columns = number * BN + tl.arange(0, BN)
        in_columns = columns < items
        item_rows = Gallery + columns * D
        tile = _score_tile(query_rows, item_rows, in_rows, in_columns, D, BM, BN, BK)
        tile = tl.where(in_columns[None, :], tile, float("-inf"))
        p = tl.zeros((), dtype=tl.int64)
        while p < block_limit:
            _add_counts(Thresholds, own, tile, p, queries, rows, in_rows)
            p += 4
        # a count is read by threads that did not write it, one tile later
        tl.debug_barrier()
        number += 1


def pair_scores(queries: Tensor, gallery: Tensor, columns: Tensor) -> Tensor:
    """See `roadmap.kernels.counts.pair_scores`."""
    scores = torch.full(columns.shape, -torch.inf, device=queries.device, dtype=torch.float32)
    asked = columns >= 0
    rows, wanted = asked.nonzero()[:, 0], columns[asked]
    if not len(wanted):
        return scores
    found = torch.empty(len(wanted), device=queries.device, dtype=torch.float32)
    BM, BN, BK = BLOCKS
    _pair_scores[(triton.cdiv(len(wanted), BM),)](
        queries.contiguous(),
        gallery.contiguous(),
        rows,
        wanted,
        found,
        len(wanted),
        queries.shape[1],
        BM=BM,
        BN=BN,
        BK=BK,
        num_warps=WARPS,
    )
    scores[asked] = found
    return scores


def counts_at_least(queries: Tensor, gallery: Tensor, thresholds: Tensor) -> Tensor:
    """See `roadmap.kernels.counts.counts_at_least`."""
    number, limit = thresholds.shape
    BM, BN, BK = BLOCKS
    blocks, tiles = triton.cdiv(number, BM), triton.cdiv(len(gallery), BN)
    filled = thresholds.new_full((-(-limit // 4) * 4, number), torch.inf)  # query index last: neighbours load together
    filled[:limit] = thresholds.T
    shares = max(1, min(PROGRAMS // blocks, tiles, SHARES_BYTES // (4 * filled.numel())))
    # a block of queries needs no comparison after the last threshold of its longest row
    last = torch.where(thresholds < torch.inf, torch.arange(1, limit + 1, device=thresholds.device), 0).amax(1)
    last = torch.nn.functional.pad(last.to(torch.int32), (0, blocks * BM - number))
    counts = torch.zeros(shares, *filled.shape, dtype=torch.int32, device=queries.device)
    _counts[(blocks, shares)](
        queries.contiguous(),
        gallery.contiguous(),
        filled,
        last.view(blocks, BM).amax(1).contiguous(),
        counts,
        number,
        len(gallery),
        filled.shape[0],
        triton.cdiv(tiles, shares),
        queries.shape[1],
        BM=BM,
        BN=BN,
        BK=BK,
        num_warps=WARPS,
    )
    return counts.sum(0, dtype=torch.int32)[:limit].T.contiguous()
