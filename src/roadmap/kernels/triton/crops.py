"""Crops of a whole batch in one launch: cut, resampled, flipped and normalised from one flat buffer of pictures.

A program owns a run of output pixels of one picture. Each pixel sums the few source pixels under its triangle filter,
with weights computed on the way: no index tensors, no intermediate pictures. float32 throughout.
"""

from __future__ import annotations

import os

import torch
import triton
import triton.language as tl
from torch import Tensor

# Output pixels of a program; the interpreter is quicker with fewer, larger programs.
PIXELS = 4096 if os.environ.get("TRITON_INTERPRET") == "1" else 512
WARPS = 4
Triple = tuple[float, float, float]
NUMBERS = 11  # of a picture, in the order that `_crops` unpacks


@triton.jit
def _taps(place, start, length, resized, offset):
    """Where the filter of an output place begins in the box, its centre and reach; pixels under it at most."""
    scale = length.to(tl.float32) / resized.to(tl.float32)
    support = tl.maximum(scale, 1.0)
    centre = scale * (place.to(tl.float32) + offset.to(tl.float32) + 0.5)
    first = tl.maximum(tl.floor(centre - support + 0.5), 0.0)
    return first, centre, support


@triton.jit
def _crops(
    Pixels, Numbers, Out, red_shift, green_shift, blue_shift, red_scale, green_scale, blue_scale,
    SIZE: tl.constexpr, PIXELS: tl.constexpr, NUMBERS: tl.constexpr,
):  # fmt: skip
    """Out[b, c, y, x] of picture b."""
    b = tl.program_id(0).to(tl.int64)
    flat = tl.program_id(1) * PIXELS + tl.arange(0, PIXELS)
    inside = flat < SIZE * SIZE
    y, x = flat // SIZE, flat % SIZE
    numbers = Numbers + b * NUMBERS
    picture, width, flip = tl.load(numbers), tl.load(numbers + 1), tl.load(numbers + 2)
    top, height, resized_height, above = (
        tl.load(numbers + 3), tl.load(numbers + 4), tl.load(numbers + 5), tl.load(numbers + 6)
    )  # fmt: skip
    left, breadth, resized_breadth, before = (
        tl.load(numbers + 7), tl.load(numbers + 8), tl.load(numbers + 9), tl.load(numbers + 10)
    )  # fmt: skip
    x_seen = tl.where(flip != 0, SIZE - 1 - x, x)
    row, row_centre, row_support = _taps(y, top, height, resized_height, above)
    column, column_centre, column_support = _taps(x_seen, left, breadth, resized_breadth, before)
    red = tl.zeros((PIXELS,), tl.float32)
    green = tl.zeros((PIXELS,), tl.float32)
    blue = tl.zeros((PIXELS,), tl.float32)
    total = tl.zeros((PIXELS,), tl.float32)
    # an open interval of length 2 support holds at most that many pixel centres, and one more for the rounding
    rows = tl.ceil(2.0 * row_support).to(tl.int32) + 1
    columns = tl.ceil(2.0 * column_support).to(tl.int32) + 1
    for i in range(0, rows):
        at_row = row + i
        down = tl.maximum(1.0 - tl.abs(at_row + 0.5 - row_centre) / row_support, 0.0)
        down = tl.where(at_row < height.to(tl.float32), down, 0.0)
        line = picture + (top + at_row.to(tl.int64)) * width + left
        for j in range(0, columns):
            at_column = column + j
            weight = tl.maximum(1.0 - tl.abs(at_column + 0.5 - column_centre) / column_support, 0.0)
            weight = tl.where(at_column < breadth.to(tl.float32), weight, 0.0) * down
            used = inside & (weight > 0.0)
            source = Pixels + 3 * (line + at_column.to(tl.int64))
            red += weight * tl.load(source, mask=used, other=0).to(tl.float32)
            green += weight * tl.load(source + 1, mask=used, other=0).to(tl.float32)
            blue += weight * tl.load(source + 2, mask=used, other=0).to(tl.float32)
            total += weight
    out = Out + b * 3 * SIZE * SIZE + flat
    tl.store(out, (red / total) * red_scale + red_shift, mask=inside)
    tl.store(out + SIZE * SIZE, (green / total) * green_scale + green_shift, mask=inside)
    tl.store(out + 2 * SIZE * SIZE, (blue / total) * blue_scale + blue_shift, mask=inside)


def crops(pixels: Tensor, numbers: Tensor, size: int, shift: Triple, scale: Triple) -> Tensor:
    """(B, 3, size, size) float32: level * scale + shift of every channel.

    Args:
        pixels: flat uint8: pictures one after another, (H, W, 3) each.
        numbers: (B, 11) int64 on the same device: first pixel of the picture, its width, whether it is flipped, then
            for rows and for columns the start and length of the box, the length it is resized to, and the offset of
            the output in that.
        size: of the output.
        shift: added, per channel.
        scale: multiplied with levels in 0..255, per channel.
    """
    out = torch.empty(len(numbers), 3, size, size, device=pixels.device, dtype=torch.float32)
    if len(numbers):
        grid = (len(numbers), triton.cdiv(size * size, PIXELS))
        _crops[grid](pixels, numbers, out, *shift, *scale, SIZE=size, PIXELS=PIXELS, NUMBERS=NUMBERS, num_warps=WARPS)
    return out
