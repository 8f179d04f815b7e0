"""The cluster term straight from embeddings and proxies: some queries at a time, loss and derivative in one go.

    scores              of a block of queries with all proxies
    rows                -log softmax at the class of each query, and what the softmax is divided by
    ∂L/∂s               softmax - 1[its class], over the temperature, in two halves
    products            of these with the unit vectors, added to the derivatives by queries and proxies

As in trees.py nothing is computed again in the backward, which multiplies what is kept by what arrives at the sum.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from roadmap.kernels.rules import TERMS, LossRule, RankRule
from roadmap.kernels.triton.launch import Arena, Program, launch, new_buffer, program_of
from roadmap.kernels.triton.layout import AP_FACTOR, AP_LOSS, BOUND, COUNTED, FACTORS, HALF_SCALE, STATISTICS
from roadmap.kernels.triton.math import TILE
from roadmap.kernels.triton.reduce import embedding_gradient, reduce_rows
from roadmap.kernels.triton.small import fill_scores
from roadmap.kernels.triton.stored import power
from roadmap.kernels.triton.stored_backward import _store_halves
from roadmap.kernels.triton.tiles_backward import add_product, product_splits, zeros
from roadmap.kernels.triton.trees import _block_factors, block_height
from roadmap.kernels.triton.units import UnitVectors, fill_units, room_for_units

BLOCK = 8 * TILE  # classes at a time
_SUM = LossRule(RankRule("supap", 1.0), None)  # of which terms there are: one sum and its count
_programs: dict[Any, Program] = {}


@triton.jit
def _place_of_class(Classes, row, C):
    """The class of a query, whether it is known, and where its vector is; a place that is none is moved to the end."""
    chosen = tl.load(Classes + row)
    return chosen, chosen != -1, tl.minimum(tl.maximum(chosen, 0), C - 1)


@triton.jit(do_not_specialize=["row_first", "width"])
def _cluster_rows(
    S, Classes, Highest, Share, OwnPush, Stats, M, C, row_first, width, inv_temperature, BLOCK: tl.constexpr
):
    """The loss of one query; and of its softmax the highest score, what e^(s - that) is multiplied by, and the
    derivative by the score with its own class, from the others alone: 1 - softmax would lose a small one."""
    row = tl.program_id(0).to(tl.int64) + row_first
    Row = S + tl.program_id(0).to(tl.int64) * width
    chosen, known, place = _place_of_class(Classes, row, C)
    highest = tl.full((BLOCK,), -4.0, tl.float32)
    for first in range(0, C, BLOCK):
        j = first + tl.arange(0, BLOCK)
        highest = tl.maximum(highest, tl.load(Row + j, mask=j < C, other=-4.0))
    top = tl.max(highest, 0)
    others = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, C, BLOCK):
        j = first + tl.arange(0, BLOCK)
        e = power(tl.load(Row + j, mask=j < C, other=-4.0) - top, inv_temperature)
        others += tl.where((j < C) & (j != place), e, 0.0)
    own = tl.load(Row + place)
    other = tl.sum(others, 0)
    total = other + power(own - top, inv_temperature)
    loss = (top - own) * inv_temperature + tl.log(total)
    loss = tl.where((chosen < -1) | (chosen >= C), float("nan"), loss)
    share = tl.where(known, inv_temperature / total, 0.0)
    tl.store(Highest + row, top)
    tl.store(Share + row, share)
    tl.store(OwnPush + row, -share * other)
    tl.store(Stats + M * AP_LOSS + row, tl.where(known, loss, 0.0))
    tl.store(Stats + M * COUNTED + row, known.to(tl.float32))
    tl.store(Stats + M * BOUND + row, share * other)


@triton.jit(do_not_specialize=["row_first", "rows", "width"])
def _cluster_gradients(
    S, Classes, Highest, Share, OwnPush, Factors, WHi, WLo, C, row_first, rows, width, inv_temperature,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """A block of one row of ∂L/∂s, in the range of float16 and split. Beyond the queries it is zero; beyond the classes
    stand vectors of zeros, and no entry is larger than the others."""
    here = tl.program_id(0).to(tl.int64)
    j = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    grad = tl.zeros((BLOCK,), tl.float32)
    if here < rows:
        row = here + row_first
        _chosen, _known, place = _place_of_class(Classes, row, C)
        s = tl.load(S + here * width + j, mask=j < C, other=-4.0)
        grad = tl.load(Share + row) * power(s - tl.load(Highest + row), inv_temperature)
        grad = tl.where(j == place, tl.load(OwnPush + row), grad) * tl.load(Factors + HALF_SCALE)
    _store_halves(WHi, WLo, here * width + j, grad, j < width)


@dataclass(frozen=True)
class _State:
    """All that the kernels write on the way: of the whole call, of a block, and room for its products."""

    queries: UnitVectors
    proxies: UnitVectors
    stats: Tensor
    factors: Tensor
    highest: Tensor
    share: Tensor
    own_push: Tensor
    scores: Tensor


def _state(arena: Arena, queries: Tensor, proxies: Tensor) -> _State:
    (M, D), C = queries.shape, len(proxies)
    q, p = room_for_units(arena, M, D), room_for_units(arena, C, D)
    highest, share, own_push = (arena.empty(M) for _ in range(3))
    scores = arena.empty(block_height(M, C, D), len(p.hi))
    return _State(q, p, arena.empty(STATISTICS, M), arena.empty(FACTORS), highest, share, own_push, scores)


def terms_and_gradients(
    queries: Tensor, proxies: Tensor, classes: Tensor, temperature: float, as_terms: bool, needs: tuple[bool, bool]
) -> tuple[Tensor, Tensor, Tensor]:
    """The terms, (TERMS,), of which there is one sum, or the mean; the derivatives of that by queries and proxies,
    float32, empty where they are not needed."""
    classes, device = classes.long().contiguous(), queries.device
    out = torch.empty((TERMS,) if as_terms else (), device=device, dtype=torch.float32)
    found = [
        torch.empty(x.shape if need else (0,), device=device, dtype=torch.float32)
        for x, need in zip((queries, proxies), needs, strict=True)
    ]
    given = queries, proxies, classes
    tensors = (*given, out, *found)
    program = program_of(_programs, (temperature, as_terms, needs, device), given)
    if program.tape is not None:
        buffer = new_buffer(program.tape.workspace, device)
        program.tape.play([t.data_ptr() for t in (*tensors, buffer)], device.index or 0)
        return out, found[0], found[1]
    with program.run(device, tensors, None) as arena:
        wanted = [x if need else None for x, need in zip(found, needs, strict=True)]
        _compute(arena, given, 1 / temperature, out, wanted)
    return out, found[0], found[1]


def _compute(
    arena: Arena, given: tuple[Tensor, Tensor, Tensor], inv_temperature: float, out: Tensor, wanted: list[Tensor | None]
) -> None:
    queries, proxies, classes = given
    state = _state(arena, queries, proxies)
    q, p, (height, width), (M, C) = state.queries, state.proxies, state.scores.shape, (len(queries), len(proxies))
    fill_units(q, queries)
    fill_units(p, proxies)
    sums = [None if to is None else zeros(arena, units) for to, units in zip(wanted, (q, p), strict=True)]
    grad = any(some is not None for some in sums)
    kept = height if grad else 0
    halves = arena.empty(kept, width, dtype=torch.float16), arena.empty(kept, width, dtype=torch.float16)
    rows = [product_splits(*sides, q.dimensions)[0] * sides[0] for sides in ((height, width), (width, height))]
    partial = arena.empty(max(rows) if grad else 0, q.dimensions)
    for first in range(0, M, height):
        scores = state.scores[: min(height, M - first)]
        count, whole = len(scores), triton.cdiv(len(scores), TILE) * TILE
        fill_scores(scores, replace(q, hi=q.hi[first : first + whole], lo=q.lo[first : first + whole]), p)
        softmax = state.highest, state.share, state.own_push
        launch(_cluster_rows, (count,),
            scores, classes, *softmax, state.stats, M, C, first, width, inv_temperature, BLOCK=BLOCK, num_warps=4,
        )  # fmt: skip
        if grad:
            launch(_block_factors, (1,), state.stats, state.factors, M, first, count, BLOCK=1024, num_warps=4)
            launch(_cluster_gradients, (whole, triton.cdiv(width, BLOCK)),
                scores, classes, *softmax, state.factors, *halves, C, first, count, width, inv_temperature,
                BLOCK=BLOCK, num_warps=4,
            )  # fmt: skip
        if sums[0] is not None:
            add_product(halves, False, whole, width, p, 0, sums[0], first, state.factors, partial)
        if sums[1] is not None:
            add_product(halves, True, width, whole, q, first, sums[1], 0, state.factors, partial)
    as_terms = out.ndim > 0
    reduce_rows(out, state.factors, state.stats, q.norms, p.norms, _SUM, as_terms, bounded=False)
    share = None if as_terms else state.factors[AP_FACTOR.value :]  # one over the number of queries
    for to, some, units in zip(wanted, sums, (q, p), strict=True):
        if to is not None and some is not None:
            embedding_gradient(some, units.hi, units.lo, units.norms, None, share, to)
