"""What is cut out of pictures, decided on the host in numpy: a pure function of (seed, position), on any device.

Both follow torchvision: `RandomCrop` draws as `RandomResizedCrop` does, `CentreCrop` is `Resize` then `CenterCrop`.
How it is resampled is in `resampling`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from roadmap.colours import IMAGENET_MEAN, IMAGENET_STD
from roadmap.data.randomness import uniforms
from roadmap.data.records import Floats, Ints

_TRIES = 10
_DRAWS = 2 * _TRIES + 3  # area and ratio of every try, then top, left and flip
_CROPS = 4  # names the stream of random numbers, apart from the samplers'
_GRID = 2**14  # pixels of the square that a squeezed picture is drawn on; finer than any picture's own

Triple = tuple[float, float, float]
Span = tuple[Ints, Ints]  # start and length


@dataclass(frozen=True, eq=False)
class Windows:
    """What is cut out of each of B pictures, and the grid it is resampled to.

    Per axis (B, 4) int64: `start` and `length` of the box in the picture, the length it is `resized` to, and the
    `offset` of the output in that. A random crop is resized to the output itself (offset 0); a centre crop resizes
    the whole picture and keeps the middle. Only the part that the output sees is ever read.
    """

    rows: Ints
    columns: Ints
    flip: NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.flip)

    def __getitem__(self, chosen: slice | NDArray[np.bool_]) -> Windows:
        return Windows(self.rows[chosen], self.columns[chosen], self.flip[chosen])


@dataclass(frozen=True)
class RandomCrop:
    """Training: RandomResizedCrop and a flip, with the paper's parameters.

    Attributes:
        size: side of the output.
        scale: range of the crop's share of the picture's area; 0.16 is a side of 40 % (supplementary, Sec. B).
        ratio: range of width / height, drawn evenly in its logarithm.
        flip: probability of a horizontal flip.
        mean: subtracted, in units of [0, 1].
        std: divided by.
        squeeze: draw as if the picture were a square, as the released code does for SOP, which squeezes pictures to
            256 x 256 (288 x 288) first: a crop then has the picture's aspect. It is resampled once, not twice.
    """

    size: int = 224
    scale: tuple[float, float] = (0.16, 1.0)
    ratio: tuple[float, float] = (3 / 4, 4 / 3)
    flip: float = 0.5
    mean: Triple = IMAGENET_MEAN
    std: Triple = IMAGENET_STD
    squeeze: bool = False

    def __post_init__(self) -> None:
        if not 0 < self.scale[0] <= self.scale[1] <= 1:
            raise ValueError(f"scale must satisfy 0 < low <= high <= 1, got {self.scale}")
        if not 0 < self.ratio[0] <= self.ratio[1]:
            raise ValueError(f"ratio must satisfy 0 < low <= high, got {self.ratio}")
        if self.size < 1 or not 0 <= self.flip <= 1:
            raise ValueError(f"size must be >= 1 and flip in [0, 1], got {self.size} and {self.flip}")

    def draws(self, count: int, seed: int, position: int) -> Floats:
        """(count, 23) uniform numbers: all the randomness of the global batch at `position`."""
        return uniforms(count * _DRAWS, seed, _CROPS, position).reshape(count, _DRAWS)

    def windows(self, heights: Ints, widths: Ints, draws: Floats) -> Windows:
        """The crops of B pictures from B rows of `draws`, as torchvision's RandomResizedCrop would draw them."""
        if not self.squeeze:
            rows, columns = self._boxes(heights, widths, draws)
        else:
            square = np.full_like(heights, _GRID)
            rows, columns = self._boxes(square, square, draws)
            rows, columns = _in_pixels(rows, heights), _in_pixels(columns, widths)
        return Windows(self._axis(*rows), self._axis(*columns), draws[:, -1] < self.flip)

    def _boxes(self, heights: Ints, widths: Ints, draws: Floats) -> tuple[Span, Span]:
        """(top, height) and (left, width): the first of ten tries that fits, else the fallback."""
        tries = draws[:, : 2 * _TRIES].reshape(-1, _TRIES, 2)
        area = (heights * widths)[:, None] * (self.scale[0] + tries[:, :, 0] * (self.scale[1] - self.scale[0]))
        low, high = math.log(self.ratio[0]), math.log(self.ratio[1])
        aspect = np.exp(low + tries[:, :, 1] * (high - low))
        wide = np.rint(np.sqrt(area * aspect)).astype(np.int64)
        tall = np.rint(np.sqrt(area / aspect)).astype(np.int64)
        fits = (wide > 0) & (wide <= widths[:, None]) & (tall > 0) & (tall <= heights[:, None])
        first = np.argmax(fits, axis=1)[:, None]
        width, height = np.take_along_axis(wide, first, 1)[:, 0], np.take_along_axis(tall, first, 1)[:, 0]
        top = np.floor(draws[:, -3] * (heights - height + 1)).astype(np.int64)
        left = np.floor(draws[:, -2] * (widths - width + 1)).astype(np.int64)
        found = fits.any(axis=1)
        whole_height, whole_width = self._fallback(heights, widths)
        height, width = np.where(found, height, whole_height), np.where(found, width, whole_width)
        top = np.where(found, top, (heights - whole_height) // 2)
        left = np.where(found, left, (widths - whole_width) // 2)
        return (top, height), (left, width)

    def _fallback(self, heights: Ints, widths: Ints) -> tuple[Ints, Ints]:
        """After ten tries: the largest central crop within the range of ratios; of a strip, a pixel at least."""
        shape = widths / heights
        narrow, broad = shape < self.ratio[0], shape > self.ratio[1]
        height = np.where(narrow, np.rint(widths / self.ratio[0]), heights).astype(np.int64)
        width = np.where(broad, np.rint(heights * self.ratio[1]), widths).astype(np.int64)
        return np.maximum(height, 1), np.maximum(width, 1)

    def _axis(self, start: Ints, length: Ints) -> Ints:
        return np.stack([start, length, np.full_like(start, self.size), np.zeros_like(start)], axis=1)


def _in_pixels(span: Span, lengths: Ints) -> Span:
    """Start and length on the grid, in whole pixels of axes of these lengths."""
    start, length = span
    first = np.minimum(np.rint(start * lengths / _GRID).astype(np.int64), lengths - 1)
    last = np.rint((start + length) * lengths / _GRID).astype(np.int64)
    return first, np.maximum(last - first, 1)


@dataclass(frozen=True)
class CentreCrop:
    """Evaluation: the shorter side is resized to `resize`, the central `size` x `size` is kept.

    With `squeeze`, the whole picture is resized to `resize` x `resize` whatever its aspect, as the released code does
    for SOP.
    """

    size: int = 224
    resize: int = 256
    mean: Triple = IMAGENET_MEAN
    std: Triple = IMAGENET_STD
    squeeze: bool = False

    def __post_init__(self) -> None:
        if not 1 <= self.size <= self.resize:
            raise ValueError(f"resize must be at least size, got resize {self.resize} and size {self.size}")

    def windows(self, heights: Ints, widths: Ints) -> Windows:
        """The centres of B pictures."""
        axes = []
        for length in (heights, widths):
            short = length if self.squeeze else np.minimum(heights, widths)
            resized = np.where(length == short, self.resize, (self.resize * length / short).astype(np.int64))
            offset = np.rint((resized - self.size) / 2.0).astype(np.int64)
            axes.append(np.stack([np.zeros_like(length), length, resized, offset], axis=1))
        return Windows(axes[0], axes[1], np.zeros(len(heights), dtype=bool))


Crop = RandomCrop | CentreCrop
