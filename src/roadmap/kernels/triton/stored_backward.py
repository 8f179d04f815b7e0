"""The backward of the losses from stored scores: ∂L/∂s in one block, and its products. See stored.py."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from roadmap.kernels.calls import LossCall
from roadmap.kernels.triton.launch import Arena, launch
from roadmap.kernels.triton.layout import AP_FACTOR, HALF_SCALE, NEG_FACTOR, NEG_SHARE, POS_FACTOR, POS_SHARE
from roadmap.kernels.triton.math import ABSENT, TILE, step_and_slope
from roadmap.kernels.triton.reduce import backward_factors, embedding_gradient
from roadmap.kernels.triton.stored import (
    StoredState,
    middle_and_nearness,
    power,
    step_and_slope_of_powers,
)
from roadmap.kernels.triton.tiles import PositivePairs
from roadmap.kernels.triton.tiles_backward import add_product, product_splits, zeros

BLOCK = 8 * TILE  # columns of a row that a program takes
WARPS = 2


@triton.jit
def _push_of_ranks(
    Scores, Weight, s, offset, size, inv_tau, rho_tau, delta, jump, top, SUPAP: tl.constexpr, BLOCK: tl.constexpr
):
    """Σ_k w_k · tau H⁻'(s_j - s_k) over the positives of one query, for a block of its columns."""
    push = tl.zeros((BLOCK,), tl.float32)
    middle, near = middle_and_nearness(Scores, offset, size, inv_tau, 64)
    if near:
        b = power(middle - s, inv_tau)
        for k in range(size):
            s_k = tl.load(Scores + offset + k)
            a = power(s_k - middle, inv_tau)
            _value, slope = step_and_slope_of_powers(s, s_k, a, b, inv_tau, rho_tau, delta, jump, top, SUPAP)
            push += tl.load(Weight + offset + k) * slope
    else:
        for k in range(size):
            t = s - tl.load(Scores + offset + k)
            _value, slope = step_and_slope(t, inv_tau, rho_tau, delta, jump, top, SUPAP)
            push += tl.load(Weight + offset + k) * slope
    return push


@triton.jit
def _store_halves(WHi, WLo, at, grad, mask):
    hi = grad.to(tl.float16)
    tl.store(WHi + at, hi, mask=mask)
    tl.store(WLo + at, (grad - hi.to(tl.float32)).to(tl.float16), mask=mask)


@triton.jit(do_not_specialize=["width"])
def _negative_gradients(
    S, Size, Offset, Scores, Weight, Stats, Factors, WHi, WLo, M, N, width,
    inv_tau, rho_tau, delta, jump, top, beta,
    RANKS: tl.constexpr, SUPAP: tl.constexpr, CALIBRATE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A block of one row of ∂L/∂s at the negatives, in the range of float16 and split; zeros elsewhere."""
    row = tl.program_id(0).to(tl.int64)
    j = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    grad = tl.zeros((BLOCK,), tl.float32)
    if row < M:
        s = tl.load(S + row * width + j, mask=j < N, other=ABSENT)
        if RANKS:
            offset = tl.load(Offset + row)
            size = tl.load(Size + row)
            push = _push_of_ranks(Scores, Weight, s, offset, size, inv_tau, rho_tau, delta, jump, top, SUPAP, BLOCK)
            grad += push * (tl.load(Factors + AP_FACTOR) * inv_tau)
        if CALIBRATE:
            by_neg = tl.load(Factors + NEG_FACTOR) * tl.load(Stats + M * NEG_SHARE + row)
            grad += tl.where(s > beta, by_neg, 0.0)
        grad = grad * tl.load(Factors + HALF_SCALE)
    _store_halves(WHi, WLo, row * width + j, grad, j < width)


@triton.jit(do_not_specialize=["width"])
def _positive_gradients(
    Size, Offset, Own, Columns, Scores, PosSlope, Stats, Factors, WHi, WLo, M, width, alpha,
    RANKS: tl.constexpr, CALIBRATE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One row of ∂L/∂s at its positives."""
    row = tl.program_id(0).to(tl.int64)
    offset = tl.load(Offset + row)
    size = tl.load(Size + row)
    own = tl.load(Own + row)
    for first in range(0, size, BLOCK):
        k = first + tl.arange(0, BLOCK)
        grad = tl.zeros((BLOCK,), tl.float32)
        if RANKS:
            grad -= tl.load(PosSlope + offset + k, mask=k < size, other=0.0) * tl.load(Factors + AP_FACTOR)
        if CALIBRATE:
            s_k = tl.load(Scores + offset + k, mask=k < size, other=4.0)
            by_pos = tl.load(Factors + POS_FACTOR) * tl.load(Stats + M * POS_SHARE + row)
            grad -= tl.where((s_k < alpha) & (k != own), by_pos, 0.0)
        j = tl.load(Columns + offset + k, mask=k < size, other=0)
        _store_halves(WHi, WLo, row * width + j, grad * tl.load(Factors + HALF_SCALE), k < size)


def backward(
    arena: Arena, state: StoredState, call: LossCall, lists: PositivePairs, upstream: Tensor,
    grad_queries: Tensor | None, grad_gallery: Tensor | None,
) -> None:  # fmt: skip
    """Writes the gradients that are asked for. In the in-batch call both roles meet in `grad_queries`."""
    q, g = state.ranks.queries, state.ranks.gallery
    factors, left = backward_factors(arena, state.ranks.factors, upstream, call.as_terms)
    rows, width = len(q.hi), len(g.hi)
    halves = arena.empty(rows, width, dtype=torch.float16), arena.empty(rows, width, dtype=torch.float16)
    _fill_gradient(state, call, lists, factors, halves)
    shapes = (rows, width), (width, rows)
    partial = arena.empty(max(product_splits(*shape, q.dimensions)[0] * shape[0] for shape in shapes), q.dimensions)
    in_batch = call.gallery is None
    if grad_queries is not None:
        grad = zeros(arena, q)
        add_product(halves, False, rows, width, g, 0, grad, 0, factors, partial)
        if in_batch:
            add_product(halves, True, width, rows, q, 0, grad, 0, factors, partial)
        embedding_gradient(grad, q.hi, q.lo, q.norms, None, left, grad_queries)
    if grad_gallery is not None:  # its first rows, where nobody asks for the others
        moving = triton.cdiv(len(grad_gallery), TILE) * TILE
        grad = zeros(arena, g, moving)
        add_product(halves, True, moving, rows, q, 0, grad, 0, factors, partial)
        embedding_gradient(grad, g.hi, g.lo, g.norms, None, left, grad_gallery)


def _fill_gradient(
    state: StoredState, call: LossCall, lists: PositivePairs, factors: Tensor, halves: tuple[Tensor, Tensor]
) -> None:
    """Writes all of ∂L/∂s, split in two halves, (rows in whole tiles, width)."""
    (M, N), rule, calibration = call.shape, call.rule, call.rule.calibration
    (rows, width), ranks = halves[0].shape, state.ranks
    kinds = {"RANKS": rule.ranks is not None, "CALIBRATE": calibration is not None}
    launch(_negative_gradients, (rows, triton.cdiv(width, BLOCK)),
        state.scores, lists.end, lists.offset, ranks.positive_scores, ranks.weights, ranks.stats, factors, *halves,
        M, N, width, *rule.rank_numbers, calibration.beta if calibration else 0.0,
        SUPAP=rule.is_supap, BLOCK=BLOCK, num_warps=WARPS, **kinds,
    )  # fmt: skip
    launch(_positive_gradients, (M,),
        lists.end, lists.offset, lists.own, state.columns, ranks.positive_scores, ranks.positive_slopes, ranks.stats,
        factors, *halves, M, width, calibration.alpha if calibration else 0.0,
        BLOCK=min(64, max(2, lists.largest)), num_warps=1, **kinds,
    )  # fmt: skip
