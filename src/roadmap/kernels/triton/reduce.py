"""From what each query reports to the loss, and from the gradient at the unit vectors to that at the embeddings."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from roadmap.kernels.rules import LossRule
from roadmap.kernels.triton.launch import Arena, launch
from roadmap.kernels.triton.layout import (
    AP_FACTOR,
    AP_LOSS,
    BOUND,
    COUNTED,
    FACTORS,
    HALF_SCALE,
    NEG_COUNT,
    NEG_FACTOR,
    NEG_SUM,
    POS_COUNT,
    POS_FACTOR,
    POS_SUM,
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
def _reduce(
    Stats, QNorms, GNorms, Factors, Loss, M, N, ap_weight, calibration_weight,
    RANKS: tl.constexpr, CALIBRATE: tl.constexpr, GALLERY: tl.constexpr, BOUNDED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program: the order of the sums never changes."""
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
    loss = _poison(QNorms, M, BLOCK)
    if GALLERY:
        loss += _poison(GNorms, N, BLOCK)
    largest = 0.0
    if RANKS:
        by_ap = ap_weight / tl.maximum(tl.sum(counted, 0), 1.0)
        loss += tl.sum(ap_loss, 0) * by_ap
        largest += tl.max(bound, 0) * by_ap
        tl.store(Factors + AP_FACTOR, by_ap)
    if CALIBRATE:
        by_pos = calibration_weight / tl.maximum(tl.sum(pos_count, 0), 1.0)
        by_neg = calibration_weight / tl.maximum(tl.sum(neg_count, 0), 1.0)
        loss += tl.sum(pos_sum, 0) * by_pos + tl.sum(neg_sum, 0) * by_neg
        largest += tl.maximum(by_pos, by_neg)
        tl.store(Factors + POS_FACTOR, by_pos)
        tl.store(Factors + NEG_FACTOR, by_neg)
    tl.store(Loss, loss)
    usable = (largest > 1e-30) & (largest < 1e30)
    tl.store(
        Factors + HALF_SCALE, tl.where(usable, tl.exp2(tl.floor(14.0 - tl.log2(tl.where(usable, largest, 1.0)))), 1.0)
    )


def reduced_loss(
    arena: Arena, loss: Tensor, stats: Tensor, query_norms: Tensor, gallery_norms: Tensor | None, rule: LossRule,
    bounded: bool,
) -> Tensor:  # fmt: skip
    """Writes the loss; returns the (FACTORS,) that its backward is multiplied by."""
    M = stats.shape[1]
    factors = arena.empty(FACTORS)
    launch(_reduce, (1,),
        stats, query_norms, gallery_norms, factors, loss, M, 0 if gallery_norms is None else len(gallery_norms),
        rule.ap_weight, rule.calibration_weight,
        RANKS=rule.ranks is not None,
        CALIBRATE=rule.calibration is not None,
        GALLERY=gallery_norms is not None,
        BOUNDED=bounded,
        BLOCK=1024,
        num_warps=8,
    )  # fmt: skip
    return factors


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
