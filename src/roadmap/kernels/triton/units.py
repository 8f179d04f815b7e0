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


def room_for_units(arena: Arena, M: int, D: int, order: Tensor | None = None) -> UnitVectors:
    """Room for the unit vectors of (M, D) embeddings, taken in the given order."""
    rows, padded = triton.cdiv(M, TILE) * TILE, triton.cdiv(D, DEPTH) * DEPTH
    hi = arena.empty(rows, padded, dtype=torch.float16)
    lo = arena.empty(rows, padded, dtype=torch.float16)
    return UnitVectors(hi, lo, arena.empty(M), order)


def fill_units(units: UnitVectors, x: Tensor) -> None:
    """Writes the directions and lengths of the embeddings `x` into `units`."""
    M, D = x.shape
    if x.stride(1) != 1:
        x = x.contiguous()
    rows, padded = units.hi.shape
    launch(unit_rows, (rows,),
        x, units.order, units.hi, units.lo, units.norms, M, D, x.stride(0),
        PADDED=padded, HAS_ORDER=units.order is not None, BLOCK=min(1024, triton.next_power_of_2(padded)), num_warps=4,
    )  # fmt: skip
