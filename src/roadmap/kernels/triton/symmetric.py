"""Comparisons within one batch: S = U Uᵀ is symmetric, and half of its tiles are enough.

A tile (I, J) above the diagonal holds the scores of the queries I with the items J, and those of the queries J with the
items I. The forward (symmetric_forward.py) counts ranks along its rows and along its columns, the backward
(symmetric_backward.py) writes W = G + Gᵀ of it, and ∂L/∂U = W U takes each tile of W once as it is and once turned
over. That is half a product forward, half again backward, and a whole one for W U: two where tiles.py takes four.

The tiles are visited in blocks, a launch each. Two programs of a launch never write to the same place, and launches
follow each other, so every sum has one order.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import triton
import triton.language as tl

from roadmap.kernels.calls import LossCall
from roadmap.kernels.triton.math import TILE

SLOTS = 32  # partial sums of a rank side by side; a block of the forward is as many tiles wide
FEWEST_SLOTS = 16
WIDE_BATCH = 256  # tiles on a side, beyond which blocks of the fewest slots fill the GPU too
MOST_PARTIAL_SUMS = 1 << 24  # of all positives together, before there are fewer of each


@dataclass(frozen=True)
class Block:
    """Tiles [row, row + height) x [column, column + width) of a symmetric matrix; on the diagonal its upper half."""

    row: int
    column: int
    height: int
    width: int

    @property
    def is_diagonal(self) -> bool:
        return self.row == self.column

    @property
    def tiles(self) -> int:
        return self.height * (self.height + 1) // 2 if self.is_diagonal else self.height * self.width

    @property
    def grid(self) -> tuple[int, int]:
        """Programs, one for a tile (`tile_in_block`)."""
        return ((self.height + 1) // 2, self.height + 1) if self.is_diagonal else (self.height, self.width)

    @property
    def rows_seen(self) -> int:
        """Whether an earlier one of `blocks` took part in the sums of its rows."""
        return int(self.column > 0)

    @property
    def columns_seen(self) -> int:
        return int(self.row > 0)


def blocks(tiles: int, side: int, band: int) -> Iterator[Block]:
    """The upper half of tiles x tiles, in blocks of `side`; beside the diagonal they are `band` high."""
    for row in range(0, tiles, side):
        height = min(side, tiles - row)
        yield Block(row, row, height, height)
        for column in range(row + side, tiles, side):
            for first in range(row, row + height, band):
                yield Block(first, column, min(band, row + height - first), min(side, tiles - column))


def is_symmetric(call: LossCall) -> bool:
    """Whether queries and gallery are one batch, each at its own place."""
    return call.gallery is None and call.own is None


def rank_slots(items: int, pairs: int) -> int:
    """How many partial sums a rank has; fewer where they would fill the memory, or where smaller blocks do as well."""
    tiles: int = triton.cdiv(items, TILE)
    many = tiles > WIDE_BATCH or pairs * SLOTS > MOST_PARTIAL_SUMS
    return min(tiles, FEWEST_SLOTS if many else SLOTS)


@triton.jit
def tile_in_block(x, y, height, DIAGONAL: tl.constexpr):
    """Row and column of a program's tile, and whether another program has the same.

    The upper half of a block on the diagonal is folded: its rows x and height - 1 - x have height + 1 tiles together.
    """
    row, column, again = x, y, False
    if DIAGONAL:
        upper = y < height - x
        row = tl.where(upper, x, height - 1 - x)
        column = tl.where(upper, x + y, y - 1)
        again = (upper == 0) & (2 * x + 1 == height)
    return row, column, again


@triton.jit
def place_of_tile(row, column, height, width, DIAGONAL: tl.constexpr):
    """Where the tile lies among those of its block, one after the other, row by row."""
    place = row * width + column
    if DIAGONAL:
        place = row * height - row * (row - 1) // 2 + column - row
    return place
