"""Embeddings as the kernels hold them: unit vectors, split in two halves, padded to whole tiles, in label order."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from roadmap.kernels.triton.launch import Arena, launch
from roadmap.kernels.triton.math import DEPTH, TILE, unit_rows


@dataclass(frozen=True)
class UnitVectors:
    """hi + lo = 4096 · x / |x|, (padded rows, padded dimensions) float16; row r is embedding order[r]."""

    hi: Tensor
    lo: Tensor
    norms: Tensor
    order: Tensor | None

    @property
    def dimensions(self) -> int:
        return self.hi.shape[1]


def unit_vectors(arena: Arena, x: Tensor, order: Tensor | None = None) -> UnitVectors:
    M, D = x.shape
    if x.stride(1) != 1:
        x = x.contiguous()
    rows, padded = triton.cdiv(M, TILE) * TILE, triton.cdiv(D, DEPTH) * DEPTH
    hi = arena.empty(rows, padded, dtype=torch.float16)
    lo = arena.empty(rows, padded, dtype=torch.float16)
    norms = arena.empty(M)
    launch(unit_rows, (rows,),
        x, order, hi, lo, norms, M, D, x.stride(0),
        PADDED=padded, HAS_ORDER=order is not None, BLOCK=min(1024, triton.next_power_of_2(padded)), num_warps=4,
    )  # fmt: skip
    return UnitVectors(hi, lo, norms, order)
