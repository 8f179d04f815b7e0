"""From ∂L/∂s of many scores to the gradients at the vectors, by float16 products: three where float32 has one.

`small.add_score_gradients` multiplies in float32 without tensor cores, which is right for a small batch. Here the
weights are brought into the range of float16 and split in two halves, some rows at a time, as the tiled losses do.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from roadmap.kernels.triton.launch import Arena, launch
from roadmap.kernels.triton.layout import FACTORS, HALF_SCALE
from roadmap.kernels.triton.math import TILE
from roadmap.kernels.triton.reduce import _store_factors, embedding_gradient
from roadmap.kernels.triton.tiles_backward import add_product, product_splits, zeros
from roadmap.kernels.triton.units import UnitVectors

BLOCK_SCORES = 1 << 24  # split at a time, 4 bytes each
COLUMNS = 8 * TILE


@triton.jit
def _factors_of_largest(Largest, Factors):
    """The power of two that brings the largest weight near the top of float16."""
    _store_factors(Factors, 1.0, 0.0, 0.0, tl.load(Largest))


@triton.jit(do_not_specialize=["rows", "width"])
def _split_rows(W, Factors, WHi, WLo, rows, N, width, BLOCK: tl.constexpr):
    """Rows of the weights in two halves, with zeros up to whole tiles."""
    row = tl.program_id(0).to(tl.int64)
    j = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    weight = tl.load(W + row * N + j, mask=(row < rows) & (j < N), other=0.0) * tl.load(Factors + HALF_SCALE)
    hi = weight.to(tl.float16)
    tl.store(WHi + row * width + j, hi, mask=j < width)
    tl.store(WLo + row * width + j, (weight - hi.to(tl.float32)).to(tl.float16), mask=j < width)


def add_split_gradients(
    weights: Tensor, q: UnitVectors, g: UnitVectors, grad_queries: Tensor | None, grad_gallery: Tensor | None
) -> None:
    """As `small.add_score_gradients`, for large (M, N) `weights`."""
    (M, N), arena = weights.shape, Arena(weights.device)
    width, in_batch = len(g.hi), g is q
    tiles = min(max(1, BLOCK_SCORES // width // TILE), triton.cdiv(M, TILE))
    height = tiles * TILE
    for_queries = None if grad_queries is None else zeros(arena, q)
    for_gallery = for_queries if in_batch else None if grad_gallery is None else zeros(arena, g)
    halves = arena.empty(height, width, dtype=torch.float16), arena.empty(height, width, dtype=torch.float16)
    rows = [product_splits(some, inner, q.dimensions)[0] * some for some, inner in ((height, width), (width, height))]
    partial, factors = arena.empty(max(rows), q.dimensions), arena.empty(FACTORS)
    launch(_factors_of_largest, (1,), torch.linalg.vector_norm(weights, torch.inf), factors, num_warps=1)
    for first in range(0, M, height):
        some = weights[first : first + height]
        whole = triton.cdiv(len(some), TILE) * TILE
        grid = (whole, triton.cdiv(width, COLUMNS))
        launch(_split_rows, grid, some, factors, *halves, len(some), N, width, BLOCK=COLUMNS, num_warps=4)
        if for_queries is not None:
            add_product(halves, False, whole, width, g, 0, for_queries, first, factors, partial)
        if for_gallery is not None:
            add_product(halves, True, width, whole, q, first, for_gallery, 0, factors, partial)
    for to, grad, units in ((grad_queries, for_queries, q), (grad_gallery, for_gallery, g)):
        if to is not None and grad is not None:
            embedding_gradient(grad, units.hi, units.lo, units.norms, None, None, to)
