"""Graded losses of label trees straight from embeddings: some queries at a time, ranks and derivative in one go.

Positives of all levels are listed (tree_lists.py). What is no positive is less relevant than each of them, whatever
its level, so a block of queries goes the way of stored.py, as under SupAP:

    scores              of the block with the whole gallery; those of the positives move into the lists
    stored ranks        Σ_j H⁻(s_j - s_k) and its slope over what is left of the row
    graded rows         positives among each other, by the grades of their levels: the measure, and a factor for each
    ∂L/∂s               in two halves, over the block: each positive's factor on H⁻' of the row, its own derivative
    products            of these with the unit vectors, added to the derivatives by queries and gallery

Loss and gradient are sums over queries whose terms hang on nothing but their row: nothing is computed again in the
backward, which multiplies what is kept, (M + N) D numbers, by what arrives at the sum. Scores live as long as a block.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from roadmap.kernels.rules import TERMS, LossRule
from roadmap.kernels.trees import TreeCall
from roadmap.kernels.triton.launch import Arena, Program, launch, new_buffer, program_of
from roadmap.kernels.triton.layout import AP_FACTOR, BOUND, FACTORS, STATISTICS
from roadmap.kernels.triton.math import TILE
from roadmap.kernels.triton.reduce import _store_factors, embedding_gradient, reduce_rows
from roadmap.kernels.triton.small import fill_scores
from roadmap.kernels.triton.stored import AT_ONCE, BLOCK, RANK_WARPS, _stored_ranks, row_splits
from roadmap.kernels.triton.stored_backward import BLOCK as GRADIENT_BLOCK
from roadmap.kernels.triton.stored_backward import WARPS, _negative_gradients, _positive_gradients
from roadmap.kernels.triton.tiles_backward import add_product, product_splits, zeros
from roadmap.kernels.triton.tree_lists import Relevant, move_relevant, relevant_items
from roadmap.kernels.triton.tree_rows import among_grades, graded_rows, tree_constants
from roadmap.kernels.triton.units import UnitVectors, fill_units, room_for_units

# Scores of a block of queries, which live with their gradient until the block is done: 8 bytes each. A block is one
# row of tiles at least, and grows with the vectors: each adds to the whole derivative by the gallery.
SMALLEST_BLOCK = 1 << 24
LARGEST_BLOCK = 1 << 25
MEETING = 8 if TILE == 16 else 32  # positives of a query that meet at a time
_programs: dict[Any, Program] = {}


@dataclass(frozen=True)
class _State:
    """All that the kernels write on the way, in one buffer: of the whole call, the lists, and of a block."""

    queries: UnitVectors
    gallery: UnitVectors
    stats: Tensor
    factors: Tensor
    columns: Tensor
    levels: Tensor
    positive_scores: Tensor
    grades: Tensor
    weights: Tensor
    pull_weights: Tensor
    positive_slopes: Tensor
    rank_neg: Tensor
    slope_neg: Tensor
    scores: Tensor
    block_factors: Tensor


def _state(arena: Arena, call: TreeCall, relevant: Relevant) -> _State:
    (M, N), D, total = call.shape, call.queries.shape[1], relevant.total
    q = room_for_units(arena, M, D)
    g = q if call.gallery is None else room_for_units(arena, N, D)
    height = block_height(M, N, D)
    splits = row_splits(min(height, M), N)[0]
    return _State(
        queries=q,
        gallery=g,
        stats=arena.empty(STATISTICS, M),
        factors=arena.empty(FACTORS),
        columns=arena.empty(total, dtype=torch.int32),
        levels=arena.empty(total, dtype=torch.int32),
        positive_scores=arena.empty(total),
        grades=arena.empty(total),
        weights=arena.empty(total),
        pull_weights=arena.empty(total),
        positive_slopes=arena.empty(total),
        rank_neg=arena.empty(splits, total),
        slope_neg=arena.empty(splits, total),
        scores=arena.empty(height, len(g.hi)),
        block_factors=arena.empty(FACTORS),
    )


def block_height(M: int, N: int, dims: int) -> int:
    """How many queries are taken at a time, whole tiles."""
    wanted = max(SMALLEST_BLOCK, min(LARGEST_BLOCK, (M + N) * dims // 2))
    width = triton.cdiv(N, TILE) * TILE
    tiles: int = min(max(1, wanted // width // TILE), triton.cdiv(M, TILE))
    return tiles * TILE


def terms_and_gradients(call: TreeCall, needs: tuple[bool, bool]) -> tuple[Tensor, Tensor, Tensor]:
    """The terms, (TERMS,), or the mean; the derivatives of the sum or the mean by queries and by the moving front of a
    gallery, float32, empty where they are not needed. Without one both roles meet in the queries."""
    call = _tidy(call)
    relevant = relevant_items(call)
    device, D = call.queries.device, call.queries.shape[1]
    out = torch.empty((TERMS,) if call.as_terms else (), device=device, dtype=torch.float32)
    shapes = zip(needs, (len(call.query_paths), 0 if call.gallery is None else call.moving), strict=True)
    found = [torch.empty((rows, D) if need else (0,), device=device, dtype=torch.float32) for need, rows in shapes]
    given = call.queries, call.gallery, call.query_paths, call.gallery_paths, call.own, *relevant.tensors
    tensors = (*given, out, *found)
    key = call.rule, call.as_terms, call.moving, needs, device, relevant.total, relevant.largest
    program = program_of(_programs, key, given)
    if program.tape is not None:
        buffer = new_buffer(program.tape.workspace, device)
        program.tape.play([0 if t is None else t.data_ptr() for t in (*tensors, buffer)], device.index or 0)
        return out, found[0], found[1]
    with program.run(device, tensors, None) as arena:
        _compute(arena, call, relevant, out, *(x if need else None for x, need in zip(found, needs, strict=True)))
    return out, found[0], found[1]


def _tidy(call: TreeCall) -> TreeCall:
    """Paths and places as the kernels read them."""
    paths = call.query_paths, call.gallery_paths
    whole = tuple(p.long().contiguous() for p in paths)
    own = None if call.own is None else call.own.long().contiguous()
    return replace(call, query_paths=whole[0], gallery_paths=whole[1], own=own)


def _compute(
    arena: Arena, call: TreeCall, relevant: Relevant, out: Tensor, by_queries: Tensor | None, by_gallery: Tensor | None
) -> None:
    M, in_batch = call.shape[0], call.gallery is None
    state = _state(arena, call, relevant)
    q, g = state.queries, state.gallery
    fill_units(q, call.queries)
    if call.gallery is not None:
        fill_units(g, call.gallery)
    products = None
    if by_queries is not None or by_gallery is not None:
        products = _products(arena, call, state, by_queries is not None, by_gallery is not None)
    height = len(state.scores)
    for first in range(0, M, height):
        scores = state.scores[: min(height, M - first)]
        _rank_block(call, relevant, state, scores, first, products is not None)
        if products is not None:
            _add_block(call, relevant, state, scores, first, products)
    norms = None if in_batch else g.norms
    rule = LossRule(call.rule.measure.ranks, None)
    reduce_rows(out, state.factors, state.stats, q.norms, norms, rule, call.as_terms, bounded=True)
    share = None if call.as_terms else state.factors[AP_FACTOR.value :]  # one over the number of queries
    if products is not None:
        for to, grad, units in ((by_queries, products.for_queries, q), (by_gallery, products.for_gallery, g)):
            if to is not None and grad is not None:
                embedding_gradient(grad, units.hi, units.lo, units.norms, None, share, to)


def _numbers(call: TreeCall) -> tuple[float, ...]:
    """H⁻, and H^>, as the kernels take them."""
    pull = call.rule.measure.pull
    counted = LossRule(call.rule.measure.ranks, None).rank_numbers
    return *counted, *((0.0, 0.0, 0.0) if pull is None else (pull.beta, pull.gamma, pull.leak))


def _rank_block(call: TreeCall, relevant: Relevant, state: _State, scores: Tensor, first: int, grad: bool) -> None:
    """Writes into the state what the measure is of a block of queries, and what its derivative needs."""
    (M, N), (rows, width), rule = call.shape, scores.shape, call.rule
    q, numbers, ranks = state.queries, _numbers(call), call.rule.measure.ranks
    assert ranks is not None
    whole = triton.cdiv(rows, TILE) * TILE
    fill_scores(scores, replace(q, hi=q.hi[first : first + whole], lo=q.lo[first : first + whole]), state.gallery)
    move_relevant(call, relevant, scores, first, state.columns, state.levels, state.positive_scores)
    size, offset = relevant.size[first : first + rows], relevant.offset[first : first + rows]
    splits, per_split = row_splits(min(len(state.scores), M), N)
    launch(_stored_ranks, (rows, splits),
        scores, size, offset, state.positive_scores, state.rank_neg, state.slope_neg, None, None, rows, N, width,
        relevant.total, per_split, *numbers[:5], 0.0,
        RANKS=True, SUPAP=True, CALIBRATE=False, KS=min(AT_ONCE, max(2, relevant.largest)), BLOCK=BLOCK,
        num_warps=RANK_WARPS,
    )  # fmt: skip
    shape = {"PULL": rule.measure.pull is not None, "KS": min(MEETING, max(2, relevant.largest))}
    warps = 1 if shape["KS"] <= 16 else 4
    launch(graded_rows, (rows,),
        relevant.size, relevant.offset, state.levels, state.positive_scores, state.rank_neg, state.slope_neg,
        state.grades, state.weights, state.pull_weights, state.positive_slopes, state.stats, M, first, relevant.total,
        splits, *numbers[:5], ranks.steepest, *numbers[5:], **shape, **tree_constants(rule), num_warps=warps,
    )  # fmt: skip
    if grad:
        launch(among_grades, (rows,),
            relevant.size, relevant.offset, state.positive_scores, state.grades, state.weights, state.pull_weights,
            state.positive_slopes, first, *numbers, **shape, num_warps=warps,
        )  # fmt: skip


@dataclass(frozen=True)
class _Products:
    """∂L/∂(unit vectors) of both sides, and room for a block of ∂L/∂s in halves and for split products."""

    for_queries: Tensor | None
    for_gallery: Tensor | None
    halves: tuple[Tensor, Tensor]
    partial: Tensor


def _products(arena: Arena, call: TreeCall, state: _State, of_queries: bool, of_gallery: bool) -> _Products:
    q, g, (height, width) = state.queries, state.gallery, state.scores.shape
    moving = triton.cdiv(call.moving, TILE) * TILE
    for_queries = zeros(arena, q) if of_queries else None
    for_gallery = zeros(arena, g, moving) if of_gallery else None
    halves = arena.empty(height, width, dtype=torch.float16), arena.empty(height, width, dtype=torch.float16)
    shapes = (height, width), (moving, height)
    splits = [product_splits(some, inner, q.dimensions)[0] for some, inner in shapes]
    rows = [count * some if count > 1 else 0 for count, (some, _) in zip(splits, shapes, strict=True)]
    partial = arena.empty(max(rows), q.dimensions)
    return _Products(for_queries, for_gallery, halves, partial)


@triton.jit(do_not_specialize=["row_first", "rows"])
def _block_factors(Stats, Factors, M, row_first, rows, BLOCK: tl.constexpr):
    """The factors of a block: the derivative of the sum itself, and the power of two that fits its largest entry."""
    bound = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, rows, BLOCK):
        at = start + tl.arange(0, BLOCK)
        bound = tl.maximum(bound, tl.load(Stats + M * BOUND + row_first + at, mask=at < rows, other=0.0))
    _store_factors(Factors, 1.0, 0.0, 0.0, tl.max(bound, 0))


def _add_block(
    call: TreeCall, relevant: Relevant, state: _State, scores: Tensor, first: int, products: _Products
) -> None:
    """Adds the derivative of a block's sum by the unit vectors."""
    (rows, width), (M, N), q, g = scores.shape, call.shape, state.queries, state.gallery
    whole, factors, halves = triton.cdiv(rows, TILE) * TILE, state.block_factors, products.halves
    size, offset = relevant.size[first : first + rows], relevant.offset[first : first + rows]
    launch(_block_factors, (1,), state.stats, factors, M, first, rows, BLOCK=1024, num_warps=4)
    kinds = {"RANKS": True, "CALIBRATE": False}
    launch(_negative_gradients, (whole, triton.cdiv(width, GRADIENT_BLOCK)),
        scores, size, offset, state.positive_scores, state.weights, None, factors, *halves, rows, N, width,
        *_numbers(call)[:5], 0.0, SUPAP=True, BLOCK=GRADIENT_BLOCK, num_warps=WARPS, **kinds,
    )  # fmt: skip
    launch(_positive_gradients, (rows,),
        size, offset, size, state.columns, state.positive_scores, state.positive_slopes, None, factors, *halves,
        rows, width, 0.0,  # without calibration nobody asks where the query stands
        BLOCK=min(64, max(2, relevant.largest)), num_warps=1, **kinds,
    )  # fmt: skip
    if products.for_queries is not None:
        add_product(halves, False, whole, width, g, 0, products.for_queries, first, factors, products.partial)
    other = products.for_queries if call.gallery is None else products.for_gallery
    if other is not None:
        add_product(halves, True, len(other), whole, q, first, other, 0, factors, products.partial)
