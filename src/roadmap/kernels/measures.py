"""What is made of the ranks of the positives (`rules.Measure`), by plain torch: what each gains, its derivatives, and
what the sum over the positives of a query is divided by.

              gain of a positive            derivative by r⁺, by r⁻            divided by
    "ap"      r⁺ / r                        r⁻ / r², -r⁺ / r²                  |P_i|
    "ndcg"    1 / log2(1 + r)               both -1 / (ln2 (1 + r) log2²)      Σ_{j ≤ |P_i|} 1 / log2(1 + j)
    "recall"  mean_K sigmoid((K - r) / T)   both -mean_K sigmoid' / T          |P_i|

with r = r⁺ + r⁻. The Triton kernels have the same in triton/measures.py.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from roadmap.kernels.rules import Measure


def norms(measure: Measure, size: Tensor, scores: Tensor) -> Tensor:
    """What the gains of each query are divided by, (M,), in the type of the (M, N) scores; `size` is |P_i| or 1."""
    if measure.kind != "ndcg":
        return size.to(scores.dtype)
    places = torch.arange(2, max(scores.shape[1], 1) + 2, device=scores.device, dtype=scores.dtype)
    return places.log2().reciprocal().cumsum(0)[size - 1]


def gains(measure: Measure, rank_pos: Tensor, rank_neg: Tensor, size: Tensor) -> Tensor:
    """What each positive adds to the sum of its query, which has `size` positives. Has derivatives of any order."""
    total = rank_pos + rank_neg
    if measure.kind == "ap":
        return rank_pos / total
    if measure.kind == "ndcg":
        return (1 + total).log2().reciprocal()
    found = torch.zeros_like(total)
    for k, temperature in zip(measure.ks, measure.temperatures, strict=True):
        found = found + _part(measure, k, size.to(total.dtype)) * torch.sigmoid((k - total) / temperature)
    return found


def slopes(measure: Measure, rank_pos: Tensor, rank_neg: Tensor, size: Tensor, share: Tensor) -> tuple[Tensor, Tensor]:
    """`share` times the derivatives of each gain by r⁺ and by r⁻."""
    total = rank_pos + rank_neg
    if measure.kind == "ap":
        return share * rank_neg / total.square(), -share * rank_pos / total.square()
    if measure.kind == "ndcg":
        slope = -share / (math.log(2) * (1 + total) * (1 + total).log2().square())
        return slope, slope
    slope = torch.zeros_like(total)
    for k, temperature in zip(measure.ks, measure.temperatures, strict=True):
        near = torch.sigmoid((k - total) / temperature)
        slope -= share * _part(measure, k, size.to(total.dtype)) * near * (1 - near) / temperature
    return slope, slope


def _part(measure: Measure, k: float, size: Tensor) -> Tensor | float:
    """The weight of one cut: over all positives, or over as many as its places can hold."""
    return (size / size.clamp(max=k) if measure.reachable else 1.0) / len(measure.ks)
