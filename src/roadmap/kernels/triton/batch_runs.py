"""Positives of a batch as runs of columns, without a sort: the place of each label in their order is counted.

For a few thousand labels two launches that compare all with all are faster than a sort and the searches after it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from roadmap.kernels.triton.launch import Arena, Program, launch, play_or_record, room_of

LARGEST = 8192  # labels; the comparisons grow with the square of their number
_placing: dict[Any, Program] = {}


@dataclass(frozen=True)
class Runs:
    """In one buffer: all pairs and the most of one row, and for each row in label order which item it is, where its
    positives begin and end, and where the list of their scores begins."""

    totals: Tensor
    order: Tensor
    offset: Tensor
    start: Tensor
    end: Tensor


def _runs(arena: Arena, N: int) -> Runs:
    wide = (arena.empty(count, dtype=torch.int64) for count in (2, N, N))
    return Runs(*wide, *(arena.empty(N, dtype=torch.int32) for _ in range(2)))


@triton.jit
def _place_labels(Labels, Order, Start, End, N, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """How many labels are smaller, how many the same, and how many of these come before."""
    i = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    label = tl.load(Labels + i, mask=i < N, other=0)[:, None]
    smaller = tl.zeros((ROWS, BLOCK), tl.int32)
    same = tl.zeros((ROWS, BLOCK), tl.int32)
    before = tl.zeros((ROWS, BLOCK), tl.int32)
    for first in range(0, N, BLOCK):
        j = first + tl.arange(0, BLOCK)
        inside = (j < N)[None, :]
        other = tl.load(Labels + j, mask=j < N, other=0)[None, :]
        equal = (other == label) & inside
        smaller += ((other < label) & inside).to(tl.int32)
        same += equal.to(tl.int32)
        before += (equal & (j[None, :] < i[:, None])).to(tl.int32)
    start = tl.sum(smaller, 1)
    place = start + tl.sum(before, 1)
    tl.store(Order + place, i.to(tl.int64), mask=i < N)
    tl.store(Start + place, start, mask=i < N)
    tl.store(End + place, start + tl.sum(same, 1), mask=i < N)


@triton.jit
def _offset_runs(Start, End, Offset, Totals, N, BLOCK: tl.constexpr):
    """Where the list of each row begins; how long all are together, and the longest. One program, a scan."""
    total = tl.cast(0, tl.int64)
    largest = tl.cast(0, tl.int32)
    for first in range(0, N, BLOCK):
        i = first + tl.arange(0, BLOCK)
        size = tl.load(End + i, mask=i < N, other=0) - tl.load(Start + i, mask=i < N, other=0)
        wide = size.to(tl.int64)
        tl.store(Offset + i, total + tl.cumsum(wide, 0) - wide, mask=i < N)
        total += tl.sum(wide, 0)
        largest = tl.maximum(largest, tl.max(size, 0))
    tl.store(Totals, total)
    tl.store(Totals + 1, largest.to(tl.int64))


def batch_runs(labels: Tensor) -> Runs:
    """The runs of a batch of at most `LARGEST` labels, (N,) int64."""
    N, device = len(labels), labels.device
    buffer = torch.zeros(room_of(_runs, N), device=device, dtype=torch.uint8)
    play_or_record(_placing, device, (labels,), buffer, lambda arena: _launch_placing(_runs(arena, N), labels))
    return _runs(Arena(device, buffer), N)


def _launch_placing(to: Runs, labels: Tensor) -> None:
    N = len(labels)
    launch(_place_labels, (triton.cdiv(N, 8),), labels, to.order, to.start, to.end, N, ROWS=8, BLOCK=256, num_warps=4)
    launch(_offset_runs, (1,), to.start, to.end, to.offset, to.totals, N, BLOCK=2048, num_warps=8)
