"""How many gallery items score at least as high as each threshold: the count behind every ranking metric.

Plain PyTorch for the two functions below, for unit vectors q (n, D) and g (N, D):

    pair_scores(q, g, columns)         = (q @ g.T).gather(1, columns)                       (n, P)
    counts_at_least(q, g, thresholds)  = ((q @ g.T)[:, None, :] >= thresholds[:, :, None]).sum(-1)   (n, P)

without the (n, N) matrix, and with one promise that `q @ g.T` does not make: the score of two vectors depends on
their bits alone, never on where they stand. BLAS rounds the last rows and columns of a matrix differently from the
others, so that two copies of one picture get unequal scores and a ranking depends on the order of its input.
`tiled_counts` keeps the promise with products of one shape, the Triton kernel by construction.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Literal

import torch
from torch import Tensor

from roadmap.kernels import tiled_counts
from roadmap.kernels.devices import on_device_of

Implementation = Literal["triton", "tiled"]

# The Triton kernel compares with every threshold, whose cost grows with their number.
TRITON_THRESHOLDS = 1024


def implementation(vectors: Tensor, thresholds: int) -> Implementation:
    """What counts `thresholds` a query on the device and type of `vectors`; scores of one never meet the other's."""
    fused = vectors.is_cuda and vectors.dtype == torch.float32 and thresholds <= TRITON_THRESHOLDS
    return "triton" if fused and find_spec("triton") is not None else "tiled"


def pair_scores(queries: Tensor, gallery: Tensor, columns: Tensor, impl: Implementation = "tiled") -> Tensor:
    """Scores of each query with the gallery items it names.

    Args:
        queries: (n, D) unit vectors, float32 or float64.
        gallery: (N, D) unit vectors of the same type.
        columns: (n, P) int64 gallery indices; an index below zero asks for nothing and gets -inf.
        impl: who multiplies; compare scores only within one implementation.
    """
    if impl == "triton":
        from roadmap.kernels.triton.counts import pair_scores as triton_pair_scores

        with on_device_of(queries):
            return triton_pair_scores(queries, gallery, columns)
    return tiled_counts.pair_scores(queries, gallery, columns)


def counts_at_least(
    queries: Tensor,
    gallery: Tensor,
    thresholds: Tensor,
    impl: Implementation = "tiled",
    own: Tensor | None = None,
    advance: Callable[[int], object] = lambda queries_done: None,
) -> Tensor:
    """How many items of the whole gallery score >= each threshold, (n, P) int32.

    Args:
        queries: (n, D) unit vectors, float32 or float64.
        gallery: (N, D) unit vectors of the same type.
        thresholds: (n, P) scores, from `pair_scores` with the same `impl`; +inf counts nothing and pads short rows.
        impl: who multiplies and counts.
        own: (n,) distinct gallery indices of the queries, where all are gallery items: lets a score serve both ways.
        advance: told the number of queries finished since it was last told.
    """
    if thresholds.numel() == 0:
        advance(len(queries))
        return torch.zeros(thresholds.shape, dtype=torch.int32, device=queries.device)
    if impl == "triton":
        from roadmap.kernels.triton.counts import counts_at_least as triton_counts_at_least

        with on_device_of(queries):
            counts = triton_counts_at_least(queries, gallery, thresholds)
        advance(len(queries))
        return counts
    return tiled_counts.counts_at_least(queries, gallery, thresholds, own, advance)
