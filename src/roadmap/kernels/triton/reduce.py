"""From what each query reports to the loss, and from the gradient at the unit vectors to that at the embeddings."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from roadmap.kernels.rules import LossRule
from roadmap.kernels.triton.launch import Arena, launch
from roadmap.kernels.triton.layout import (
    AP_BOUND,
    AP_COUNT,
    AP_FACTOR,
    AP_LOSS,
    AP_SUM,
    BOUND,
    COUNTED,
    FACTORS,
    HALF_SCALE,
    NEG_COUNT,
    NEG_FACTOR,
    NEG_SUM,
    NEG_TERM_COUNT,
    NEG_TERM_SUM,
    POS_COUNT,
    POS_FACTOR,
    POS_SUM,
    POS_TERM_COUNT,
    POS_TERM_SUM,
)


@triton.jit
def _poison(Norms, count, BLOCK: tl.constexpr):
    """0, or NaN if a vector had no direction."""
    bad = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, count, BLOCK):
        at = start + tl.arange(0, BLOCK)
        norm = tl.load(Norms + at, mask=at < count, other=1.0)
        bad += (norm + 1.0 / norm) * 0.0
    return tl.sum(bad, 0)


@triton.jit
def _sums_and_counts(
    Stats, M, RANKS: tl.constexpr, CALIBRATE: tl.constexpr, BOUNDED: tl.constexpr, BLOCK: tl.constexpr
):
    """The six terms, and the bound of ∂AP_i/∂s, over all rows: one program, so that the order never changes."""
    ap_loss = tl.zeros((BLOCK,), tl.float32)
    counted = tl.zeros((BLOCK,), tl.float32)
    pos_sum = tl.zeros((BLOCK,), tl.float32)
    pos_count = tl.zeros((BLOCK,), tl.float32)
    neg_sum = tl.zeros((BLOCK,), tl.float32)
    neg_count = tl.zeros((BLOCK,), tl.float32)
    bound = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, M, BLOCK):
        i = start + tl.arange(0, BLOCK)
        ok = i < M
        if RANKS:
            ap_loss += tl.load(Stats + M * AP_LOSS + i, mask=ok, other=0.0)
            counted += tl.load(Stats + M * COUNTED + i, mask=ok, other=0.0)
            if BOUNDED:
                bound = tl.maximum(bound, tl.load(Stats + M * BOUND + i, mask=ok, other=0.0))
        if CALIBRATE:
            pos_sum += tl.load(Stats + M * POS_SUM + i, mask=ok, other=0.0)
            pos_count += tl.load(Stats + M * POS_COUNT + i, mask=ok, other=0.0)
            neg_sum += tl.load(Stats + M * NEG_SUM + i, mask=ok, other=0.0)
            neg_count += tl.load(Stats + M * NEG_COUNT + i, mask=ok, other=0.0)
    return (
        tl.sum(ap_loss, 0), tl.sum(counted, 0), tl.sum(pos_sum, 0), tl.sum(pos_count, 0), tl.sum(neg_sum, 0),
        tl.sum(neg_count, 0), tl.max(bound, 0),
    )  # fmt: skip


@triton.jit
def _store_factors(Factors, by_ap, by_pos, by_neg, bound):
    """What the backward multiplies by: ∂L by each sum, and the scale that follows from them."""
    largest = bound * tl.abs(by_ap) + tl.maximum(tl.abs(by_pos), tl.abs(by_neg))
    usable = (largest > 1e-30) & (largest < 1e30)
    scale = tl.where(usable, tl.exp2(tl.floor(14.0 - tl.log2(tl.where(usable, largest, 1.0)))), 1.0)
    tl.store(Factors + AP_FACTOR, by_ap)
    tl.store(Factors + POS_FACTOR, by_pos)
    tl.store(Factors + NEG_FACTOR, by_neg)
    tl.store(Factors + HALF_SCALE, scale)


@triton.jit
def _reduce(
    Stats, QNorms, GNorms, Factors, Out, M, N, ap_weight, calibration_weight,
    RANKS: tl.constexpr, CALIBRATE: tl.constexpr, GALLERY: tl.constexpr, BOUNDED: tl.constexpr,
    AS_TERMS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Sums and counts; and from them, unless they are what was asked for, the loss and the factors of its backward."""
    ap_sum, ap_count, pos_sum, pos_count, neg_sum, neg_count, bound = _sums_and_counts(
        Stats, M, RANKS, CALIBRATE, BOUNDED, BLOCK
    )
    poison = _poison(QNorms, M, BLOCK)
    if GALLERY:
        poison += _poison(GNorms, N, BLOCK)
    if AS_TERMS:
        tl.store(Out + AP_SUM, ap_sum + poison)
        tl.store(Out + AP_COUNT, ap_count)
        tl.store(Out + POS_TERM_SUM, pos_sum + poison)
        tl.store(Out + POS_TERM_COUNT, pos_count)
        tl.store(Out + NEG_TERM_SUM, neg_sum + poison)
        tl.store(Out + NEG_TERM_COUNT, neg_count)
        tl.store(Factors + AP_BOUND, bound)
    else:
        loss = poison
        by_ap = 0.0
        by_pos = 0.0
        by_neg = 0.0
        if RANKS:
            by_ap = ap_weight / tl.maximum(ap_count, 1.0)
            loss += ap_sum * by_ap
        if CALIBRATE:
            by_pos = calibration_weight / tl.maximum(pos_count, 1.0)
            by_neg = calibration_weight / tl.maximum(neg_count, 1.0)
            loss += pos_sum * by_pos + neg_sum * by_neg
        tl.store(Out, loss)
        _store_factors(Factors, by_ap, by_pos, by_neg, bound)


@triton.jit
def _factors_of_terms(Upstream, Forward, Factors):
    """The factors, where the gradient arrives at the terms."""
    by_ap = tl.load(Upstream + AP_SUM)
    by_pos = tl.load(Upstream + POS_TERM_SUM)
    by_neg = tl.load(Upstream + NEG_TERM_SUM)
    _store_factors(Factors, by_ap, by_pos, by_neg, tl.load(Forward + AP_BOUND))


def reduce_rows(
    out: Tensor, factors: Tensor, stats: Tensor, query_norms: Tensor, gallery_norms: Tensor | None, rule: LossRule,
    as_terms: bool, bounded: bool,
) -> None:  # fmt: skip
    """Writes the terms into `out`, or the loss and the `factors` that its backward is multiplied by."""
    M = stats.shape[1]
    launch(_reduce, (1,),
        stats, query_norms, gallery_norms, factors, out, M, 0 if gallery_norms is None else len(gallery_norms),
        rule.ap_weight, rule.calibration_weight,
        RANKS=rule.ranks is not None,
        CALIBRATE=rule.calibration is not None,
        GALLERY=gallery_norms is not None,
        BOUNDED=bounded,
        AS_TERMS=as_terms,
        BLOCK=1024,
        num_warps=8,
    )  # fmt: skip


def backward_factors(arena: Arena, factors: Tensor, upstream: Tensor, as_terms: bool) -> tuple[Tensor, Tensor | None]:
    """The factors of a backward, and what multiplies its result; a gradient at the terms is in the factors already."""
    if not as_terms:
        return factors, upstream
    own = arena.empty(FACTORS)
    launch(_factors_of_terms, (1,), upstream, factors, own, num_warps=1)
    return own, None


@triton.jit
def _embedding_rows(
    Grad, Hi, Lo, Norms, Order, Upstream, Out, D,
    PADDED: tl.constexpr, HAS_ORDER: tl.constexpr, HAS_UPSTREAM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """∂L/∂x = (g - (g·u) u) / |x| for x = |x| u, times the gradient that arrives at the loss."""
    row = tl.program_id(0).to(tl.int64)
    along = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, PADDED, BLOCK):
        d = start + tl.arange(0, BLOCK)
        inside = d < PADDED
        at = row * PADDED + d
        u = tl.load(Hi + at, mask=inside, other=0.0).to(tl.float32) + tl.load(Lo + at, mask=inside, other=0.0)
        along += tl.load(Grad + at, mask=inside, other=0.0) * u * 0.000244140625
    cosine = tl.sum(along, 0)
    factor = 1.0 / tl.load(Norms + row)
    if HAS_UPSTREAM:
        factor = factor * tl.load(Upstream)
    target = row
    if HAS_ORDER:
        target = tl.load(Order + row)
    for start in range(0, PADDED, BLOCK):
        d = start + tl.arange(0, BLOCK)
        inside = d < PADDED
        at = row * PADDED + d
        u = tl.load(Hi + at, mask=inside, other=0.0).to(tl.float32) + tl.load(Lo + at, mask=inside, other=0.0)
        g = tl.load(Grad + at, mask=inside, other=0.0)
        x = (g - cosine * u * 0.000244140625) * factor
        tl.store(Out + target * D + d, x.to(Out.dtype.element_ty), mask=d < D)


def embedding_gradient(
    grad: Tensor, hi: Tensor, lo: Tensor, norms: Tensor, order: Tensor | None, upstream: Tensor | None, out: Tensor
) -> None:
    """Writes ∂L/∂embeddings into `out`, (M, D) contiguous, from `grad` = ∂L/∂(unit vectors), (rows, padded dims)."""
    M, D = out.shape
    padded = hi.shape[1]
    launch(_embedding_rows, (M,),
        grad, hi, lo, norms, order, upstream, out, D,
        PADDED=padded, HAS_ORDER=order is not None, HAS_UPSTREAM=upstream is not None,
        BLOCK=min(1024, triton.next_power_of_2(padded)), num_warps=4,
    )  # fmt: skip
