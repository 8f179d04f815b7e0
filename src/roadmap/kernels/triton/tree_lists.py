"""Who is relevant to whom in a label tree: the positives of every query as lists, with the level they share.

Levels are compared label by label, so that a path may have levels that are not known, anywhere, and nothing is sorted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from roadmap.kernels import trees
from roadmap.kernels.trees import TreeCall
from roadmap.kernels.triton.launch import Arena, Program, launch, play_or_record, room_of
from roadmap.kernels.triton.layout import AT_ROW, GIVEN, NOWHERE, own_mode
from roadmap.kernels.triton.math import ABSENT, TILE
from roadmap.kernels.triton.stored import _list_offsets
from roadmap.kernels.triton.tiles import rounded_counts

UNKNOWN = tl.constexpr(trees.UNKNOWN)
PATHS_AT_ONCE = 32 if TILE == 16 else 1024
ROWS_AT_ONCE = 4 if TILE == 16 else 16
ROWS_MOVED = 4
_counting: dict[Any, Program] = {}


@dataclass(frozen=True)
class Relevant:
    """How many positives each query has and where its list begins; where the share of each part of the gallery does.

    `total` and `largest` are at least the number of pairs and the most positives of one query.
    """

    size: Tensor
    offset: Tensor
    parts: Tensor
    total: int
    largest: int

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self.size, self.offset, self.parts


@triton.jit
def _shared_level(QPaths, GPaths, i, j, M, N, LEVELS: tl.constexpr):
    """The deepest level that queries i and items j share, from 1; 0 for none. Their shapes are broadcast."""
    found = (i + j).to(tl.int32) * 0
    for level in tl.static_range(LEVELS):
        mine = tl.load(QPaths + i * LEVELS + level, mask=i < M, other=UNKNOWN)
        theirs = tl.load(GPaths + j * LEVELS + level, mask=j < N, other=UNKNOWN)
        found = tl.where((mine == theirs) & (mine != UNKNOWN), level + 1, found)
    return found


@triton.jit
def _own_columns(Own, i, M, OWN: tl.constexpr):
    """Where queries stand in the gallery; -1 for nowhere."""
    own = i * 0 - 1
    if OWN == AT_ROW:
        own = i
    if OWN == GIVEN:
        own = tl.load(Own + i, mask=i < M, other=-1)
    return own


@triton.jit
def _count_relevant(
    QPaths, GPaths, Own, Counts, M, N,
    OWN: tl.constexpr, INCLUDE_SELF: tl.constexpr, LEVELS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """How many items of one part of the gallery share a level with each of some queries."""
    i = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    j = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    relevant = _shared_level(QPaths, GPaths, i[:, None], j[None, :], M, N, LEVELS) > 0
    if OWN != NOWHERE:
        if not INCLUDE_SELF:
            relevant = relevant & (j[None, :] != _own_columns(Own, i, M, OWN)[:, None])
    parts = tl.num_programs(1)
    tl.store(Counts + i * parts + tl.program_id(1), tl.sum(relevant.to(tl.int32), 1), mask=i < M)


@triton.jit(do_not_specialize=["row_first", "rows", "width"])
def _move_relevant(
    S, QPaths, GPaths, Own, Starts, Offset, Size, Columns, Levels, Scores, M, N, row_first, rows, width,
    OWN: tl.constexpr, INCLUDE_SELF: tl.constexpr, LEVELS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Lists the positives of one part of some rows, their levels and scores; strikes them, and the query itself, out
    of the row: what is left there is less relevant than any of them. The rows share what is read of the paths."""
    here = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    ok = here < rows
    row = here + row_first
    part = tl.program_id(1)
    parts = tl.num_programs(1)
    start = tl.load(Starts + row * parts + part, mask=ok, other=0)
    if part + 1 < parts:
        end = tl.load(Starts + row * parts + part + 1, mask=ok, other=0)
    else:
        end = tl.load(Offset + row, mask=ok, other=0) + tl.load(Size + row, mask=ok, other=0)
    own = _own_columns(Own, row, M, OWN)
    first = part * BLOCK
    wanted = ok & ((end > start) | ((own >= first) & (own < first + BLOCK)))
    if tl.max(wanted.to(tl.int32), 0) > 0:
        j = first + tl.arange(0, BLOCK)
        level = _shared_level(QPaths, GPaths, row[:, None], j[None, :], M, N, LEVELS)
        itself = (j[None, :] == own[:, None]) & ok[:, None]
        relevant = (level > 0) & ok[:, None]
        if not INCLUDE_SELF:
            relevant = relevant & (itself == 0)
        at = start[:, None] + tl.cumsum(relevant.to(tl.int32), 1) - 1
        from_row = S + here[:, None] * width + j[None, :]
        tl.store(Columns + at, j[None, :] + at.to(tl.int32) * 0, mask=relevant)
        tl.store(Levels + at, level, mask=relevant)
        tl.store(Scores + at, tl.load(from_row, mask=relevant, other=0.0), mask=relevant)
        struck = (relevant | itself) & (j < N)[None, :]
        tl.debug_barrier()  # a score may have been read by another thread than the one that strikes it out
        tl.store(from_row, tl.full((ROWS, BLOCK), ABSENT, tl.float32), mask=struck)


@dataclass(frozen=True)
class _Counts:
    """Where the positives are counted, in one buffer: in all, by query, and by query and part of the gallery."""

    totals: Tensor
    offset: Tensor
    parts: Tensor
    counts: Tensor
    size: Tensor


def _room(arena: Arena, M: int, parts: int) -> _Counts:
    wide = (arena.empty(*shape, dtype=torch.int64) for shape in ((2,), (M,), (M, parts)))
    narrow = (arena.empty(*shape, dtype=torch.int32) for shape in ((M, parts), (M,)))
    return _Counts(*wide, *narrow)


def relevant_items(call: TreeCall) -> Relevant:
    """Counts the positives of every query; their number is read back."""
    _refuse_capture(call)
    (M, N), device, given = call.shape, call.queries.device, (call.query_paths, call.gallery_paths, call.own)
    parts, mode = triton.cdiv(N, PATHS_AT_ONCE), own_mode(call.gallery, call.own)
    buffer = torch.zeros(room_of(_room, M, parts), device=device, dtype=torch.uint8)
    found = _room(Arena(device, buffer), M, parts)
    play_or_record(
        _counting, device, given, buffer, lambda arena: _launch_counting(_room(arena, M, parts), call, mode),
        (mode, call.rule.include_self),
    )  # fmt: skip
    total, largest = found.totals.tolist()  # the only read-back
    return Relevant(found.size, found.offset, found.parts, *rounded_counts(total, largest))


def _launch_counting(to: _Counts, call: TreeCall, mode: int) -> None:
    (M, N), parts = call.shape, to.parts.shape[1]
    launch(_count_relevant, (triton.cdiv(M, ROWS_AT_ONCE), parts),
        call.query_paths, call.gallery_paths, call.own, to.counts, M, N,
        OWN=mode, INCLUDE_SELF=call.rule.include_self, LEVELS=call.query_paths.shape[1], ROWS=ROWS_AT_ONCE,
        BLOCK=PATHS_AT_ONCE, num_warps=8,
    )  # fmt: skip
    wide = triton.next_power_of_2(parts)
    launch(_list_offsets, (1,), to.counts, to.size, to.offset, to.parts, to.totals, M, parts,
        ROWS=max(2, 4096 // wide), PARTS=wide, num_warps=8,
    )  # fmt: skip


def _refuse_capture(call: TreeCall) -> None:
    if call.queries.is_cuda and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "a loss of graded relevance cannot be captured in a CUDA graph: it reads the number of positive pairs back "
            "from the GPU. Leave the loss out of the graph"
        )


def move_relevant(
    call: TreeCall, relevant: Relevant, scores: Tensor, row_first: int, columns: Tensor, levels: Tensor, listed: Tensor
) -> None:
    """From the `scores` of some queries, (rows, whole tiles), to the lists; see `_move_relevant`."""
    M, N = call.shape
    rows, width = scores.shape
    launch(_move_relevant, (triton.cdiv(rows, ROWS_MOVED), triton.cdiv(N, PATHS_AT_ONCE)),
        scores, call.query_paths, call.gallery_paths, call.own, relevant.parts, relevant.offset, relevant.size,
        columns, levels, listed, M, N, row_first, rows, width,
        OWN=own_mode(call.gallery, call.own), INCLUDE_SELF=call.rule.include_self,
        LEVELS=call.query_paths.shape[1], ROWS=ROWS_MOVED, BLOCK=PATHS_AT_ONCE, num_warps=8,
    )  # fmt: skip
