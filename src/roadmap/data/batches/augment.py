"""Crops, flips and normalisation, for a whole batch at once on the GPU, or by torchvision on the CPU.

What is cut is decided on the host in numpy (`Windows`), a pure function of (seed, position), the same for every
device; how it is resampled follows. Both follow torchvision: `RandomCrop` draws as `RandomResizedCrop` does,
`CentreCrop` is `Resize` then `CenterCrop`, and resampling is bilinear with antialiasing, `antialias=True`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from roadmap.data.randomness import uniforms
from roadmap.data.records import Floats, Ints
from roadmap.kernels import runs_on_triton

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
_TRIES = 10
_DRAWS = 2 * _TRIES + 3  # area and ratio of every try, then top, left and flip
_CROPS = 4  # names the stream of random numbers, apart from the samplers'
_LONG = 32  # times the area of the output: longer pictures are not resized whole
_CHUNK_BYTES = 2**29  # of source pixels resampled at once

Triple = tuple[float, float, float]


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
    """

    size: int = 224
    scale: tuple[float, float] = (0.16, 1.0)
    ratio: tuple[float, float] = (3 / 4, 4 / 3)
    flip: float = 0.5
    mean: Triple = IMAGENET_MEAN
    std: Triple = IMAGENET_STD

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
        return Windows(self._axis(top, height), self._axis(left, width), draws[:, -1] < self.flip)

    def _fallback(self, heights: Ints, widths: Ints) -> tuple[Ints, Ints]:
        """After ten tries: the largest central crop within the range of ratios."""
        shape = widths / heights
        narrow, broad = shape < self.ratio[0], shape > self.ratio[1]
        height = np.where(narrow, np.rint(widths / self.ratio[0]), heights).astype(np.int64)
        width = np.where(broad, np.rint(heights * self.ratio[1]), widths).astype(np.int64)
        return height, width

    def _axis(self, start: Ints, length: Ints) -> Ints:
        return np.stack([start, length, np.full_like(start, self.size), np.zeros_like(start)], axis=1)


@dataclass(frozen=True)
class CentreCrop:
    """Evaluation: the shorter side is resized to `resize`, the central `size` x `size` is kept."""

    size: int = 224
    resize: int = 256
    mean: Triple = IMAGENET_MEAN
    std: Triple = IMAGENET_STD

    def __post_init__(self) -> None:
        if not 1 <= self.size <= self.resize:
            raise ValueError(f"resize must be at least size, got resize {self.resize} and size {self.size}")

    def windows(self, heights: Ints, widths: Ints) -> Windows:
        """The centres of B pictures."""
        short = np.minimum(heights, widths)
        axes = []
        for length in (heights, widths):
            resized = np.where(length == short, self.resize, (self.resize * length / short).astype(np.int64))
            offset = np.rint((resized - self.size) / 2.0).astype(np.int64)
            axes.append(np.stack([np.zeros_like(length), length, resized, offset], axis=1))
        return Windows(axes[0], axes[1], np.zeros(len(heights), dtype=bool))


Crop = RandomCrop | CentreCrop


def read_ranges(axis: Ints, size: int) -> tuple[Ints, Ints]:
    """First place in the box, and count, of the pixels that the output of an axis sees."""
    _, length, resized, offset = axis.T
    scale = length / resized
    support = np.maximum(scale, 1.0)
    first = np.maximum(np.floor(scale * (offset + 0.5) - support + 0.5), 0).astype(np.int64)
    last = np.floor(scale * (offset + size - 0.5) + support + 0.5).astype(np.int64)
    return first, np.minimum(last, length) - first


def _weights(axis: Tensor, first: Tensor, size: int, reach: int, flip: Tensor | None) -> Tensor:
    """(B, size, reach): how much of each pixel read goes into each pixel of the output.

    The triangle filter, widened by the scale where that shrinks (antialiasing), cut at the edges of the box and
    normalised there, as torch's `interpolate(..., mode="bilinear", antialias=True)`.
    """
    length, resized, offset = (axis[:, i, None, None].float() for i in (1, 2, 3))
    out = torch.arange(size, device=axis.device, dtype=torch.float32)
    place = out.expand(len(axis), size)
    if flip is not None:
        place = torch.where(flip[:, None], size - 1 - place, place)
    scale = length / resized
    support = scale.clamp(min=1.0)
    centre = scale * (place[:, :, None] + offset + 0.5)
    pixel = first[:, None, None] + torch.arange(reach, device=axis.device, dtype=torch.float32)
    weight = (1 - (pixel + 0.5 - centre).abs() / support).clamp(min=0) * (pixel < length)
    return weight / weight.sum(-1, keepdim=True)


def resized_crops(pixels: Tensor, starts: Ints, widths: Ints, windows: Windows, crop: Crop) -> Tensor:
    """(B, 3, size, size) float32, cropped, resampled, flipped and normalised from one flat buffer.

    On a GPU one kernel does it all (`roadmap.kernels.triton.crops`); elsewhere `batched_crops`, which it is tested
    against.

    Args:
        pixels: flat uint8 on any device: pictures one after another, (H, W, 3) each.
        starts: (B,) byte at which each picture starts; a multiple of 3.
        widths: (B,) width of each picture, the stride of its rows in pixels.
        windows: B windows.
        crop: size, mean and std of the output.
    """
    if not runs_on_triton(pixels):
        return batched_crops(pixels, starts, widths, windows, crop)
    from roadmap.kernels.triton import crops

    heads = np.stack([starts // 3, widths, windows.flip], axis=1)
    numbers = _sent(np.concatenate([heads, windows.rows, windows.columns], axis=1), pixels.device)
    shift, scale = affine(crop.mean, crop.std)
    return crops.crops(pixels, numbers, crop.size, shift, scale)


def batched_crops(pixels: Tensor, starts: Ints, widths: Ints, windows: Windows, crop: Crop) -> Tensor:
    """As `resized_crops`, by two small matrix products per picture: rows, then columns, with weights from the boxes."""
    return network_input(_levels(pixels, starts, widths, windows, crop.size), crop)


def _levels(pixels: Tensor, starts: Ints, widths: Ints, windows: Windows, size: int) -> Tensor:
    """(B, 3, size, size) levels in 0..255, as they come of the resampling, not rounded."""
    row_first, row_count = read_ranges(windows.rows, size)
    column_first, column_count = read_ranges(windows.columns, size)
    heads = np.stack([starts // 3, widths, windows.flip, row_first, row_count, column_first, column_count], axis=1)
    numbers = _sent(np.concatenate([heads, windows.rows, windows.columns], axis=1), pixels.device)
    reach = int(row_count.max(initial=1)), int(column_count.max(initial=1))
    chunk = max(1, _CHUNK_BYTES // (12 * reach[0] * reach[1]))
    parts = [_resampled(pixels.view(-1, 3), part, size, reach) for part in torch.split(numbers, chunk)]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _sent(numbers: NDArray[np.int64], device: torch.device) -> Tensor:
    tensor = torch.from_numpy(numbers)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


def _resampled(pixels: Tensor, numbers: Tensor, size: int, reach: tuple[int, int]) -> Tensor:
    """(B, 3, size, size) levels in 0..255 for one chunk of pictures."""
    start, width, flip, row_first, row_count, column_first, column_count = numbers[:, :7].unbind(1)
    rows, columns = numbers[:, 7:11], numbers[:, 11:15]
    ahead = torch.arange(max(reach), device=pixels.device)
    # beyond its own box a picture repeats its last pixel, which has weight 0
    row = (rows[:, 0] + row_first)[:, None] + torch.minimum(ahead[: reach[0]], (row_count - 1)[:, None])
    column = (columns[:, 0] + column_first)[:, None] + torch.minimum(ahead[: reach[1]], (column_count - 1)[:, None])
    place = (start[:, None] + row * width[:, None])[:, :, None] + column[:, None, :]
    source = pixels[place].float()  # (B, rows, columns, 3)
    down = _weights(rows, row_first, size, reach[0], None)
    across = _weights(columns, column_first, size, reach[1], flip != 0)
    count = len(numbers)
    shrunk = torch.bmm(down, source.flatten(2)).view(count, size, reach[1], 3)
    flat = shrunk.permute(0, 3, 1, 2).reshape(count, 3 * size, reach[1])
    return torch.bmm(flat, across.transpose(1, 2)).view(count, 3, size, size)


def network_input(levels: Tensor, crop: Crop) -> Tensor:
    """(B, 3, H, W) float32 from levels in 0..255: (level / 255 - mean) / std."""
    shift, scale = _affine_tensors(crop.mean, crop.std, levels.device)
    return torch.addcmul(shift, levels.float(), scale)


def write_network_input(levels: NDArray[np.uint8], crop: Crop, out: NDArray[np.float32]) -> None:
    """The same into `out`, for levels (..., 3, H, W) on the host: a product and a sum, each rounded, whoever calls."""
    shift, scale = (np.asarray(v, np.float32).reshape(3, 1, 1) for v in affine(crop.mean, crop.std))
    np.multiply(levels, scale, out=out)
    out += shift


def affine(mean: Triple, std: Triple) -> tuple[Triple, Triple]:
    """(shift, scale) per channel, with which a level in 0..255 becomes level * scale + shift."""
    red, green, blue = ((-m / s, 1 / (255 * s)) for m, s in zip(mean, std, strict=True))
    return (red[0], green[0], blue[0]), (red[1], green[1], blue[1])


@lru_cache(maxsize=64)  # moving even three numbers to the GPU would wait for all that it has to do
def _affine_tensors(mean: Triple, std: Triple, device: torch.device) -> tuple[Tensor, Tensor]:
    shift, scale = (torch.tensor(values).view(3, 1, 1).to(device) for values in affine(mean, std))
    return shift, scale


def cpu_crop(image: NDArray[np.uint8], windows: Windows, place: int, size: int) -> Tensor:
    """(3, size, size) uint8 of one (H, W, 3) picture by torchvision, for window `place`.

    torchvision resizes all of the picture and then keeps the middle. Where that would be many times the output, as of
    a thin strip, only what the output sees is resampled, by `batched_crops`; that is within a level of torchvision.
    """
    from torchvision.transforms.v2 import functional as tv

    top, height, resized_height, above = windows.rows[place].tolist()
    left, width, resized_width, before = windows.columns[place].tolist()
    if resized_height * resized_width > _LONG * size * size:
        strip = torch.from_numpy(image.flatten())
        one = np.zeros(1, np.int64), np.asarray([image.shape[1]]), windows[place : place + 1]
        return _levels(strip, *one, size)[0].round().clamp(0, 255).to(torch.uint8)
    # cut first: only what is kept is resampled. The copy makes it dense, which the resampling is fast on.
    part = image[top : top + height, left : left + width].copy()
    tensor = torch.from_numpy(part).permute(2, 0, 1)
    if (height, width) != (resized_height, resized_width):
        tensor = tv.resize(tensor, [resized_height, resized_width], antialias=True)
    if (resized_height, resized_width) != (size, size):
        tensor = tensor[:, above : above + size, before : before + size]
    return tensor.flip(2) if windows.flip[place] else tensor
