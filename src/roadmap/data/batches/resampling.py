"""How crops are resampled and normalised: a whole batch at once on the GPU, or one by one on the CPU.

Resampling is bilinear with antialiasing, torchvision's `antialias=True`.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from roadmap.data.batches.crops import Crop, Triple, Windows
from roadmap.data.records import Ints
from roadmap.kernels import runs_on_triton
from roadmap.kernels.devices import on_device_of

_LONG = 32  # times the area of the output: longer pictures are not resized whole
_RESIZES_BYTES = ("AVX2", "AVX512")  # elsewhere torch resizes bytes with larger errors than floats
_CHUNK_BYTES = 2**29  # of source pixels resampled at once


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
    numbers = on_device(np.concatenate([heads, windows.rows, windows.columns], axis=1), pixels.device)
    shift, scale = affine(crop.mean, crop.std)
    with on_device_of(pixels):
        return crops.crops(pixels, numbers, crop.size, shift, scale)


def batched_crops(pixels: Tensor, starts: Ints, widths: Ints, windows: Windows, crop: Crop) -> Tensor:
    """As `resized_crops`, by two small matrix products per picture: rows, then columns, with weights from the boxes."""
    size = crop.size
    row_first, row_count = read_ranges(windows.rows, size)
    column_first, column_count = read_ranges(windows.columns, size)
    heads = np.stack([starts // 3, widths, windows.flip, row_first, row_count, column_first, column_count], axis=1)
    numbers = on_device(np.concatenate([heads, windows.rows, windows.columns], axis=1), pixels.device)
    reach = int(row_count.max(initial=1)), int(column_count.max(initial=1))
    chunk = max(1, _CHUNK_BYTES // (12 * reach[0] * reach[1]))
    with torch.autocast(pixels.device.type, enabled=False):  # chunks of a batch are read where the model computes
        parts = [_levels(pixels.view(-1, 3), part, size, reach) for part in torch.split(numbers, chunk)]
    return network_input(parts[0] if len(parts) == 1 else torch.cat(parts), crop)


def on_device(numbers: NDArray[np.int64], device: torch.device) -> Tensor:
    """The numbers as a tensor there; nobody waits until they have arrived."""
    tensor = torch.from_numpy(np.ascontiguousarray(numbers))
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


def _levels(pixels: Tensor, numbers: Tensor, size: int, reach: tuple[int, int]) -> Tensor:
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


def resized_picture(image: Tensor, height: int, width: int) -> Tensor:
    """A (3, H, W) uint8 picture at another size, to the bit as torchvision's `resize(antialias=True)`.

    It makes the same call of torch. It is not called itself because importing it imports torch's compiler: a second,
    in every process that decodes.
    """
    # one picture whose colours lie together: without a stride of its own for the batch torch would take them apart
    whole = image.as_strided((1, *image.shape), (image.numel(), *image.stride()), image.storage_offset())
    native = torch.backends.cpu.get_cpu_capability() in _RESIZES_BYTES
    found = torch.nn.functional.interpolate(
        whole if native else whole.float(), (height, width), mode="bilinear", align_corners=False, antialias=True
    )
    return (found if native else found.round().to(torch.uint8))[0]


def cpu_crop(image: NDArray[np.uint8], windows: Windows, place: int, size: int) -> Tensor:
    """(3, size, size) uint8 of one (H, W, 3) picture as by torchvision, for window `place`.

    All of the picture is resized, and then the middle is kept. Where that would be many times the output, as of
    a thin strip, Pillow resamples what the output sees and no more; that is within a level of torchvision. (Matrix
    products would do too, but may never return in a process that was forked.)
    """
    top, height, resized_height, above = windows.rows[place].tolist()
    left, width, resized_width, before = windows.columns[place].tolist()
    # cut first: only what is kept is resampled. The copy makes it dense, which the resampling is fast on.
    part = image[top : top + height, left : left + width].copy()
    if resized_height * resized_width > _LONG * size * size:
        down, across = height / resized_height, width / resized_width
        box = (before * across, above * down, (before + size) * across, (above + size) * down)
        seen = Image.fromarray(part).resize((size, size), Image.Resampling.BILINEAR, box)
        tensor = torch.from_numpy(np.array(seen)).permute(2, 0, 1)
    else:
        tensor = torch.from_numpy(part).permute(2, 0, 1)
        if (height, width) != (resized_height, resized_width):
            tensor = resized_picture(tensor, resized_height, resized_width)
        if (resized_height, resized_width) != (size, size):
            tensor = tensor[:, above : above + size, before : before + size]
    return tensor.flip(2) if windows.flip[place] else tensor
