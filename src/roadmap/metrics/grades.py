"""What makes one item more relevant than another: the levels of a tree, labels in common, and grades made of them.

Metrics and losses mean the same by these; each has its own way to the pairs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, get_args

import torch
from torch import Tensor

UNKNOWN = -1  # in a path: this level is not known, and matches nothing
TreeGrades = Literal["shared", "levels", "nested"]
SetGrades = Literal["iou", "count"]
Gain = Literal["exponential", "linear"]


def check_set_grades(sets: str) -> None:
    if sets not in get_args(SetGrades):
        raise ValueError(f"sets must be 'iou' or 'count', got {sets!r}")


def check_gain(gain: str) -> None:
    if gain not in get_args(Gain):
        raise ValueError(f"gain must be 'exponential' or 'linear', got {gain!r}")


def finest_shared_level(queries: Tensor, items: Tensor) -> Tensor:
    """How many levels paths (..., L) share, int16: those down to the deepest that is equal and known; 0 for none."""
    found = torch.zeros_like(queries[..., 0] == items[..., 0], dtype=torch.int16)
    for level in range(queries.shape[-1]):
        mine, others = queries[..., level], items[..., level]
        found = found.masked_fill((mine == others) & (mine != UNKNOWN), level + 1)
    return found


def tree_grades(levels: Tensor, kind: TreeGrades, weights: Sequence[float], dtype: torch.dtype) -> Tensor:
    """(M, P) from the finest levels that queries share with items, 0 where that is 0.

    With Ω^l the items of a query that share exactly l levels with it, Ω^{>=l} those that share l or more:

        "levels"   w_l
        "shared"   w_l / |Ω^l|: the items of a level share its weight
        "nested"   Σ_{p <= l} w_p / |Ω^{>=p}|: with it H-AP is the mean of the APs of the levels, weighted by w
    """
    found = torch.zeros(levels.shape, dtype=dtype, device=levels.device)
    for level, weight in enumerate(weights, 1):
        here = levels >= level if kind == "nested" else levels == level
        size = 1 if kind == "levels" else here.sum(1, keepdim=True).clamp(min=1).to(dtype)
        found = found + here * (weight / size)
    return found


def common_labels(queries: Tensor, items: Tensor) -> Tensor:
    """How many labels the sets (M, C) and (N, C) have in common, (M, N): float32 counts to 2^24 without an error, with
    TF32 too, but not under autocast."""
    with torch.autocast(queries.device.type, enabled=False):
        return queries.float() @ items.float().T


def set_grades(common: Tensor, queries: Tensor, items: Tensor, kind: SetGrades) -> Tensor:
    """Of labels in common, in the type of `common`: their number, or that over how many the two have together.

    Args:
        queries, items: how many labels each has; these fit `common`.
    """
    return common if kind == "count" else common / (queries + items - common).clamp(min=1)


def gains(grades: Tensor, gain: Gain) -> Tensor:
    """Of NDCG: the grade, or 2^grade - 1."""
    # exp2 of equal numbers may differ in its last bit, between the lanes of a vector and the rest of a row
    return grades if gain == "linear" else torch.expm1(grades * math.log(2))
