"""A loss from scores that are stored: few queries against a gallery whose vectors outweigh the scores.

The tiled path (tiles.py) computes a tile of scores anew for every 16 positives, and once more in the backward, over a
gallery that it sorts by label. Where the (M, N) scores take no more room than the vectors they come from
(`paths.keeps_scores`; a batch against a memory of 60,000), one product serves all and nothing is sorted:

    positive lists      how many positives each query has; their number is read back, as in tiles
    scores              all of them; those of the positives move into the lists, so that a row holds negatives alone
    stored ranks        r⁻(k) = Σ_{j ∈ N_i} H⁻(s_j - s_k) and Σ H⁻'(s_j - s_k), a split of the row at a time
    rows, reduction     the tiled path's

A pair then costs its sigmoid alone, and half of that sigmoid is done once per item instead of once per pair:

    sigmoid((s_j - s_k) / tau) = 1 / (1 + a_k b_j),   a_k = 2^(γ (s_k - c)), b_j = 2^(-γ (s_j - c)), γ = log2(e) / tau

with c in the middle of the scores of the row's positives. Powers are held within 2^±126; where the positives of a
query lie further apart than that allows (WIDEST · tau: 1.06 for tau = 0.01, of the 2 that scores can differ), its row
takes the sigmoid of each difference.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from roadmap.kernels.calls import LossCall
from roadmap.kernels.triton.launch import Arena, Program, launch, play_or_record, room_of
from roadmap.kernels.triton.layout import own_column, own_mode
from roadmap.kernels.triton.math import ABSENT, TILE, exp2, reciprocal, step_and_slope
from roadmap.kernels.triton.reduce import reduce_rows
from roadmap.kernels.triton.small import fill_scores
from roadmap.kernels.triton.tiles import (
    PROGRAMS,
    PositivePairs,
    TileState,
    rank_state,
    refuse_capture,
    rounded_counts,
)
from roadmap.kernels.triton.tiles_forward import finish_rows
from roadmap.kernels.triton.units import fill_units, room_for_units

# Beyond 2^-49 = e^-34 a sigmoid is negligible (`RankRule.negligible`): with powers up to 2^126 the positives may lie
# 2 · (126 - 49) powers of two apart, which is 106.7 tau.
WIDEST = tl.constexpr(106.0)
_LIMIT = tl.constexpr(126.0)
_LOG2_E = tl.constexpr(1.4426950408889634)
LABELS_AT_ONCE = 32 if TILE == 16 else 1024
BLOCK = TILE  # columns of a row that a program takes at a time
AT_ONCE = 16  # positives whose ranks are counted side by side
RANK_WARPS = 4
_counting: dict[Any, Program] = {}


@dataclass(frozen=True)
class StoredState:
    """Where the forward writes and the backward reads, in one buffer: what the tiled path has, (M, whole tiles) scores
    without those of the positives, and which gallery item each listed positive is."""

    ranks: TileState
    scores: Tensor
    columns: Tensor


def stored_state(arena: Arena, call: LossCall, lists: PositivePairs) -> StoredState:
    """Room for a call; the same arena gives the same places again."""
    (M, N), D = call.shape, call.queries.shape[1]
    q, g = room_for_units(arena, M, D), room_for_units(arena, N, D)
    ranks = rank_state(arena, q, g, call, lists, row_splits(*call.shape)[0])
    return StoredState(ranks, arena.empty(M, len(g.hi)), arena.empty(lists.total, dtype=torch.int32))


def row_splits(M: int, N: int) -> tuple[int, int]:
    """In how many parts a row of scores is counted, to fill the GPU whatever the number of rows; how long each is."""
    blocks = triton.cdiv(N, BLOCK)
    each = triton.cdiv(blocks, min(blocks, triton.cdiv(2 * PROGRAMS, M)))
    return triton.cdiv(blocks, each), each * BLOCK


@triton.jit
def _same_label(QLabels, GLabels, row, j, N):
    return (tl.load(GLabels + j, mask=j < N, other=0) == tl.load(QLabels + row)) & (j < N)


@triton.jit
def _count_positives(QLabels, GLabels, Counts, Nought, Own, N, BLOCK: tl.constexpr):
    """How many items of one part of the gallery share the label of a query."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    same = _same_label(QLabels, GLabels, row, part * BLOCK + tl.arange(0, BLOCK), N)
    tl.store(Counts + row * tl.num_programs(1) + part, tl.sum(same.to(tl.int32), 0))
    if part == 0:
        tl.store(Nought + row, 0)
        tl.store(Own + row, -1)


@triton.jit
def _list_offsets(Counts, Size, Offset, Starts, Totals, M, parts, ROWS: tl.constexpr, PARTS: tl.constexpr):
    """How long each list is and where it begins, and where each part of it does; the length of all and of the longest.
    One program, a scan."""
    total = tl.cast(0, tl.int64)
    largest = tl.cast(0, tl.int32)
    part = tl.arange(0, PARTS)
    for first in range(0, M, ROWS):
        i = (first + tl.arange(0, ROWS)).to(tl.int64)
        at = i[:, None] * parts + part[None, :]
        inside = (i < M)[:, None] & (part < parts)[None, :]
        counts = tl.load(Counts + at, mask=inside, other=0)
        size = tl.sum(counts, 1)
        begins = total + tl.cumsum(size.to(tl.int64), 0) - size
        tl.store(Size + i, size, mask=i < M)
        tl.store(Offset + i, begins, mask=i < M)
        tl.store(Starts + at, begins[:, None] + tl.cumsum(counts, 1) - counts, mask=inside)
        total += tl.sum(size.to(tl.int64), 0)
        largest = tl.maximum(largest, tl.max(size, 0))
    tl.store(Totals, total)
    tl.store(Totals + 1, largest.to(tl.int64))


@dataclass(frozen=True)
class _Counts:
    """Where the positives are counted, in one buffer: by query and part of the gallery, by query, and in all."""

    totals: Tensor
    offset: Tensor
    parts: Tensor
    counts: Tensor
    nought: Tensor
    size: Tensor
    own: Tensor


def _counts(arena: Arena, M: int, parts: int) -> _Counts:
    wide = (arena.empty(*shape, dtype=torch.int64) for shape in ((2,), (M,), (M, parts)))
    narrow = (arena.empty(*shape, dtype=torch.int32) for shape in ((M, parts), (M,), (M,), (M,)))
    return _Counts(*wide, *narrow)


def positive_lists(call: LossCall) -> PositivePairs:
    """Counts the positives of every query."""
    refuse_capture(call)
    (M, N), device, labels = call.shape, call.queries.device, (call.query_labels, call.gallery_labels)
    parts = triton.cdiv(N, LABELS_AT_ONCE)
    buffer = torch.zeros(room_of(_counts, M, parts), device=device, dtype=torch.uint8)
    play_or_record(_counting, device, labels, buffer, lambda arena: _launch_counting(_counts(arena, M, parts), *labels))
    found = _counts(Arena(device, buffer), M, parts)
    total, largest = found.totals.tolist()  # the only read-back
    rounded, longest = rounded_counts(total, largest)
    return PositivePairs(None, None, found.nought, found.size, found.offset, found.own, rounded, longest, found.parts)


def _launch_counting(to: _Counts, query_labels: Tensor, gallery_labels: Tensor) -> None:
    M, parts = to.parts.shape
    launch(_count_positives, (M, parts), query_labels, gallery_labels, to.counts, to.nought, to.own,
        len(gallery_labels), BLOCK=LABELS_AT_ONCE, num_warps=4,
    )  # fmt: skip
    wide = triton.next_power_of_2(parts)
    launch(_list_offsets, (1,), to.counts, to.size, to.offset, to.parts, to.totals, M, parts,
        ROWS=max(2, 2048 // wide), PARTS=wide, num_warps=8,
    )  # fmt: skip


@triton.jit(do_not_specialize=["width"])
def _move_positives(
    S, QLabels, GLabels, Own, Starts, OwnPlace, Offset, Size, Columns, Scores, N, width,
    OWN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Lists the positives of one part of a row and their scores, and strikes them out of it."""
    row = tl.program_id(0).to(tl.int64)
    start = tl.load(Starts + row * tl.num_programs(1) + tl.program_id(1))
    end = tl.load(Offset + row) + tl.load(Size + row)
    if tl.program_id(1) + 1 < tl.num_programs(1):
        end = tl.load(Starts + row * tl.num_programs(1) + tl.program_id(1) + 1)
    if end > start:
        j = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        same = _same_label(QLabels, GLabels, row, j, N)
        at = start + tl.cumsum(same.to(tl.int32), 0) - 1
        tl.store(Columns + at, j, mask=same)
        tl.store(Scores + at, tl.load(S + row * width + j, mask=same, other=0.0), mask=same)
        tl.debug_barrier()  # a score may have been read by another thread than the one that strikes it out
        tl.store(S + row * width + j, tl.full((BLOCK,), ABSENT, tl.float32), mask=same)
        own = own_column(Own, row, OWN)
        tl.store(OwnPlace + row + j * 0, (at - tl.load(Offset + row)).to(tl.int32), mask=same & (j == own))


@triton.jit
def middle_and_nearness(Scores, first, size, inv_tau, KS: tl.constexpr):
    """The middle of the scores of a row's positives, and whether they lie near enough for powers around it."""
    lowest = tl.full((KS,), 4.0, tl.float32)
    highest = tl.full((KS,), -4.0, tl.float32)
    for k_first in range(0, size, KS):
        k = k_first + tl.arange(0, KS)
        s = tl.load(Scores + first + k, mask=k < size, other=4.0)
        lowest = tl.minimum(lowest, s)
        highest = tl.maximum(highest, tl.where(k < size, s, -4.0))
    low, high = tl.min(lowest, 0), tl.max(highest, 0)
    return 0.5 * (low + high), (high - low) * inv_tau <= WIDEST


@triton.jit
def power(t, inv_tau):
    """e^(t / tau), held within 2^±126. What rounding the exponent takes is given back: most of the error, else."""
    gamma = inv_tau * _LOG2_E
    x = gamma * t
    rest = tl.fma(t, t * 0.0 + gamma, -x) * 0.6931471805599453
    whole = exp2(tl.minimum(tl.maximum(x, -_LIMIT), _LIMIT))
    return whole + whole * rest


@triton.jit
def step_and_slope_of_powers(s, s_k, a, b, inv_tau, rho_tau, delta, jump, top, SUPAP: tl.constexpr):
    """As `step_and_slope` of s - s_k, from a = a_k and b = b_j."""
    smooth = reciprocal(a * b + 1.0)
    slope = smooth - smooth * smooth
    value = smooth
    if SUPAP:
        beyond = s - (s_k + delta)
        far = beyond > 0
        value = tl.where(far, (rho_tau * inv_tau) * beyond + top, smooth + tl.where(s >= s_k, jump, 0.0))
        slope = tl.where(far, rho_tau, slope)
    return value, slope


@triton.jit(do_not_specialize=["pairs", "width", "per_split"])
def _stored_ranks(
    S, Size, Offset, Scores, RankNeg, SlopeNeg, NegSum, NegCount, M, N, width, pairs, per_split,
    inv_tau, rho_tau, delta, jump, top, beta,
    RANKS: tl.constexpr, SUPAP: tl.constexpr, CALIBRATE: tl.constexpr, KS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The ranks of one query's positives, KS at a time, over one split of its row; and what lies above beta."""
    row = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1).to(tl.int64)
    offset = tl.load(Offset + row)
    size = tl.load(Size + row)
    Row = S + row * width
    first = tl.program_id(1) * per_split
    until = tl.minimum(first + per_split, N)
    sums = tl.zeros((BLOCK,), tl.float32)
    counts = tl.zeros((BLOCK,), tl.float32)
    bad = tl.zeros((BLOCK,), tl.float32)
    for at in range(first, until, BLOCK):
        s = tl.load(Row + at + tl.arange(0, BLOCK), mask=at + tl.arange(0, BLOCK) < until, other=ABSENT)
        bad += s * 0.0
        if CALIBRATE:
            sums += tl.maximum(s - beta, 0.0)
            counts += (s > beta).to(tl.float32)
    poison = tl.sum(bad, 0)  # 0, or NaN if a score is: minimum and maximum would lose it
    if CALIBRATE:
        tl.store(NegSum + split * M + row, tl.sum(sums, 0) + poison)
        tl.store(NegCount + split * M + row, tl.sum(counts, 0))
    if RANKS:
        middle, near = middle_and_nearness(Scores, offset, size, inv_tau, 64)
        for k_first in range(0, size, KS):
            k = k_first + tl.arange(0, KS)
            s_k = tl.load(Scores + offset + k, mask=k < size, other=4.0)
            a = power(s_k - middle, inv_tau)
            rank = tl.zeros((KS, BLOCK), tl.float32)
            slopes = tl.zeros((KS, BLOCK), tl.float32)
            if near:
                for at in range(first, until, BLOCK):
                    s = tl.load(Row + at + tl.arange(0, BLOCK), mask=at + tl.arange(0, BLOCK) < until, other=ABSENT)
                    b = power(middle - s, inv_tau)
                    value, slope = step_and_slope_of_powers(
                        s[None, :], s_k[:, None], a[:, None], b[None, :], inv_tau, rho_tau, delta, jump, top, SUPAP
                    )
                    rank += value
                    slopes += slope
            else:
                for at in range(first, until, BLOCK):
                    s = tl.load(Row + at + tl.arange(0, BLOCK), mask=at + tl.arange(0, BLOCK) < until, other=ABSENT)
                    value, slope = step_and_slope(s[None, :] - s_k[:, None], inv_tau, rho_tau, delta, jump, top, SUPAP)
                    rank += value
                    slopes += slope
            to = split * pairs + offset + k
            tl.store(RankNeg + to, tl.sum(rank, 1) + s_k * 0.0 + poison, mask=k < size)
            tl.store(SlopeNeg + to, tl.sum(slopes, 1) * inv_tau, mask=k < size)


def forward(state: StoredState, out: Tensor, call: LossCall, lists: PositivePairs, grad: bool) -> None:
    """Writes the loss, or its terms, into `out`, and into the state what its backward needs."""
    (M, N), rule, scores, ranks = call.shape, call.rule, state.scores, state.ranks
    q, g, width = ranks.queries, ranks.gallery, state.scores.shape[1]
    fill_units(q, call.queries)
    fill_units(g, call.queries if call.gallery is None else call.gallery)
    fill_scores(scores, q, g)
    launch(_move_positives, (M, triton.cdiv(N, LABELS_AT_ONCE)),
        scores, call.query_labels, call.gallery_labels, call.own, lists.parts, lists.own, lists.offset, lists.end,
        state.columns, ranks.positive_scores, N, width,
        OWN=own_mode(call.gallery, call.own), BLOCK=LABELS_AT_ONCE, num_warps=4,
    )  # fmt: skip
    splits, per_split = row_splits(M, N)
    launch(_stored_ranks, (M, splits),
        scores, lists.end, lists.offset, ranks.positive_scores, ranks.rank_neg, ranks.slope_neg, ranks.neg_sum,
        ranks.neg_count, M, N, width, lists.total, per_split,
        *rule.rank_numbers, rule.calibration.beta if rule.calibration else 0.0,
        RANKS=rule.ranks is not None, SUPAP=rule.is_supap, CALIBRATE=rule.calibration is not None,
        KS=min(AT_ONCE, max(2, lists.largest)), BLOCK=BLOCK, num_warps=RANK_WARPS,
    )  # fmt: skip
    finish_rows(ranks, call, lists, grad)
    # Vectors without a direction: the rows found them.
    reduce_rows(out, ranks.factors, ranks.stats, q.norms, None, rule, call.as_terms, bounded=True)
