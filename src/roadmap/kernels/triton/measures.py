"""What is made of the ranks of the positives, in the kernels that have counted them: as kernels/measures.py."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from roadmap.kernels import rules
from roadmap.kernels.triton.math import sigmoid

AP = tl.constexpr(0)
NDCG = tl.constexpr(1)
RECALL = tl.constexpr(2)
_KINDS = {"ap": AP.value, "ndcg": NDCG.value, "recall": RECALL.value}


def measure_constants(rule: rules.LossRule) -> dict[str, Any]:
    """The measure of a rule as the constants that a kernel is compiled with; cuts are pairs (K, 1 / temperature)."""
    measure = rules.AP if rule.ranks is None else rule.ranks.measure_or_ap
    cuts = tuple((float(k), 1 / t) for k, t in zip(measure.ks, measure.temperatures, strict=True))
    return {"MEASURE": _KINDS[measure.kind], "CUTS": cuts or None, "REACHABLE": measure.reachable}


@triton.jit
def norm_of(size, MEASURE: tl.constexpr, BLOCK: tl.constexpr):
    """What the gains of a query with so many positives are divided by."""
    norm = tl.maximum(size, 1).to(tl.float32)
    if MEASURE == NDCG:
        ideal = tl.zeros((BLOCK,), tl.float32)
        for first in range(0, size, BLOCK):
            j = first + tl.arange(0, BLOCK)
            ideal += tl.where(j < size, 1.0 / tl.log2(2.0 + j.to(tl.float32)), 0.0)
        norm = tl.where(size > 0, tl.sum(ideal, 0), 1.0)
    return norm


@triton.jit
def gain_and_slopes(
    rank_pos, rank_neg, size, factor, MEASURE: tl.constexpr, CUTS: tl.constexpr, REACHABLE: tl.constexpr
):
    """What a positive adds to the sum of its query, and `factor` times its derivative by r⁺ and minus that by r⁻."""
    total = rank_pos + rank_neg
    if MEASURE == AP:
        gain = rank_pos / total
        by_pos = factor * rank_neg / (total * total)
        weight = factor * rank_pos / (total * total)
    elif MEASURE == NDCG:
        log = tl.log2(1.0 + total)
        gain = 1.0 / log
        weight = factor / (0.6931471805599453 * (1.0 + total) * log * log)
        by_pos = -weight
    else:
        gain = total * 0.0
        fall = total * 0.0
        for n in tl.static_range(len(CUTS)):
            part = 1.0 / len(CUTS)
            if REACHABLE:
                part = part * size / tl.minimum(size.to(tl.float32), CUTS[n][0])
            near = sigmoid(CUTS[n][0] - total, CUTS[n][1])
            gain += part * near
            fall += part * CUTS[n][1] * (near - near * near)
        weight = factor * fall
        by_pos = -weight
    return gain, by_pos, weight
