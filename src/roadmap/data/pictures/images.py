"""Decoding that never surprises: any picture file becomes (H, W, 3) uint8 RGB, or an error that names it.

What is decided here, once:
- EXIF orientation is applied; boxes are in pixels of the upright picture.
- Transparent pixels show white. Of an animation, the first frame is the picture.
- 16-bit greyscale is scaled to 8 bits (v / 257), not clipped; CMYK and palettes are converted by Pillow;
  colour profiles are ignored, as every training pipeline compared with here does.
- More than MAX_PIXELS pixels are refused before anything is decoded.
- HEIC is read where pillow-heif is installed.
"""

from __future__ import annotations

import functools
import importlib
import io
import warnings
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray
from PIL import ExifTags, Image, ImageFile, UnidentifiedImageError

MAX_PIXELS = 2**27  # 134 million: larger than any camera of these datasets, 400 MB once decoded
HEIF_SUFFIXES = frozenset((".heic", ".heif", ".hif"))
HEIF_BRANDS = frozenset((b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"mif1", b"msf1"))

# How stored pixels are turned upright, by the number of the EXIF orientation.
TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
GIVEN = "the given picture"  # one that has no file

Pixels = NDArray[np.uint8]
Box = tuple[float, float, float, float]
File = Path | str | BinaryIO


class PictureError(ValueError):
    """A picture that cannot be used, and why. `path` names the file."""

    def __init__(self, path: Path | str, reason: str) -> None:
        super().__init__(f"{path}: {reason}")
        self.path, self.reason = str(path), reason

    def __reduce__(self) -> tuple[type[PictureError], tuple[str, str]]:
        return PictureError, (self.path, self.reason)  # so that it crosses from a worker process


def picture(file: File, box: Box | None = None, max_pixels: int = MAX_PIXELS) -> Pixels:
    """The picture in a file, or in an open binary one, as (H, W, 3) uint8, cut to `box` (left, top, right, bottom).

    Raises:
        PictureError: when the file is missing, empty, truncated, corrupt, too large, or not a picture.
    """
    return np.asarray(upright(file, box, max_pixels))


def upright(
    file: File,
    box: Box | None = None,
    max_pixels: int = MAX_PIXELS,
    formats: tuple[str, ...] | None = None,
    size: tuple[int, int] | None = None,
) -> Image.Image:
    """As `picture`, but a Pillow image of mode RGB.

    Args:
        file, box, max_pixels: as of `picture`.
        formats: that Pillow may take it for; None for all.
        size: width and height, in either order, that it has to have: what its header claims is not decoded otherwise.
    """
    path = _name(file)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Pillow's own size warning, and notes on odd metadata
            with _open(file, formats) as opened:
                width, height = opened.size
                if size is not None and sorted(size) != sorted(opened.size):
                    raise PictureError(path, f"{width} x {height} pixels instead of {size[0]} x {size[1]}")
                if width * height > max_pixels:
                    raise PictureError(path, f"{width} x {height} pixels, more than the {max_pixels} allowed")
                if ImageFile.LOAD_TRUNCATED_IMAGES:
                    raise PictureError(path, "PIL.ImageFile.LOAD_TRUNCATED_IMAGES is set: damage would go unseen")
                opened.load()
                image = upright_rgb(opened, path)
    except (PictureError, MemoryError):  # the machine's memory says nothing about the picture
        raise
    except Exception as error:  # Pillow's decoders raise whatever comes to them on damaged files
        raise PictureError(path, _reason(file, error)) from error
    return image if box is None else _cut(path, image, box)


def file_in_memory(path: Path | str) -> io.BytesIO:
    """A file, read whole and once, to be decoded and kept.

    Raises:
        PictureError: when it cannot be read.
    """
    try:
        found = io.BytesIO(Path(path).read_bytes())
    except (OSError, ValueError) as error:
        raise PictureError(path, _reason(path, error)) from error
    found.name = str(path)  # as of a file, for what is said of it
    return found


def picture_size(file: File) -> tuple[int, int]:
    """Width and height as stored, read from the header; nothing is decoded.

    Raises:
        PictureError: when the file is no picture.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with _open(file) as opened:
                size: tuple[int, int] = opened.size
                return size
    except MemoryError:
        raise
    except Exception as error:  # as above
        raise PictureError(_name(file), _reason(file, error)) from error


def _name(file: File) -> str:
    return str(file) if isinstance(file, (str, Path)) else str(getattr(file, "name", GIVEN))


def _open(file: File, formats: tuple[str, ...] | None = None) -> Image.Image:
    try:
        return Image.open(file, formats=formats)
    except UnidentifiedImageError:
        if formats is not None or not _holds_heif(file) or not reads_heif():
            raise
    return Image.open(file)


def _reason(file: File, error: Exception) -> str:
    """Why a picture could not be decoded, in words."""
    if isinstance(error, FileNotFoundError):
        return "the file is missing"
    if isinstance(error, UnidentifiedImageError):
        if not _first_bytes(file, 1):
            return "the file is empty"
        heif = _holds_heif(file) and not reads_heif()
        return "a HEIC picture: pip install pillow-heif" if heif else "not a picture that Pillow can read"
    if isinstance(error, Image.DecompressionBombError):
        return f"refused as a decompression bomb ({error})"
    if isinstance(error, OSError) and error.errno is not None:
        return f"cannot be read ({error.strerror})"
    return f"truncated or corrupt ({str(error) or type(error).__name__})"


def _first_bytes(file: File, count: int) -> bytes:
    if isinstance(file, (str, Path)):
        with open(file, "rb") as opened:
            return opened.read(count)
    file.seek(0)
    first = file.read(count)
    file.seek(0)
    return first


def _holds_heif(file: File) -> bool:
    first = _first_bytes(file, 12)
    return first[4:8] == b"ftyp" and first[8:] in HEIF_BRANDS


@functools.cache
def reads_heif() -> bool:
    """Whether HEIC can be decoded: Pillow needs a companion for it."""
    try:
        companion = importlib.import_module("pillow_heif")
    except ImportError:
        return False
    companion.register_heif_opener()
    return True


def upright_rgb(image: Image.Image, path: str = GIVEN) -> Image.Image:
    """An opened picture as the rest of the program sees it; `path` names it in errors."""
    # ImageOps.exif_transpose writes the metadata again, and fails where a tag that has nothing to do with it is odd
    if (turn := TURNS.get(image.getexif().get(ExifTags.Base.Orientation, 1))) is not None:
        image = image.transpose(turn)
    if image.mode == "RGB" and "transparency" not in image.info:
        return image
    if image.mode in ("I", "I;16", "I;16B", "I;16L", "I;16N"):
        return _from_16_bit(path, image)
    if image.mode == "F":
        raise PictureError(path, "floating-point pixels have no agreed range; save it with 8 or 16 bits")
    if image.mode in ("RGBA", "LA", "PA", "RGBa", "La") or "transparency" in image.info:
        # premultiplied modes convert only to their straight twins
        straight = image.convert({"RGBa": "RGBA", "La": "LA"}.get(image.mode, image.mode)).convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", image.size, "white"), straight).convert("RGB")
    return image.convert("RGB")


def _from_16_bit(path: str, image: Image.Image) -> Image.Image:
    values = np.asarray(image).astype(np.int64)
    if values.min() < 0 or values.max() > 65_535:
        raise PictureError(path, f"pixel values {values.min()}..{values.max()} do not fit 16 bits")
    levels = ((values + 128) // 257).astype(np.uint8)
    levels[values == image.info.get("transparency", -1)] = 255
    return Image.fromarray(levels).convert("RGB")


def _cut(path: str, image: Image.Image, box: Box) -> Image.Image:
    left, top, right, bottom = (round(edge) for edge in box)
    left, top, right, bottom = max(left, 0), max(top, 0), min(right, image.width), min(bottom, image.height)
    if left >= right or top >= bottom:
        raise PictureError(path, f"the box {box} lies outside the picture of {image.width} x {image.height}")
    return image.crop((left, top, right, bottom))


def small_picture(path: Path | str, box: Box | None, side: int) -> Image.Image:
    """A picture as packs hold it: decoded, upright, cut to its box, its shorter side at most `side`."""
    return thumbnail(upright(path, box), side)


def thumbnail(image: Image.Image, side: int) -> Image.Image:
    """The picture with its shorter side at most `side`, aspect kept, antialiased bilinear as torchvision's.

    A smaller picture stays as it is: enlarging it in the pack would only cost memory, crops are resized anyway.
    """
    short, long = sorted(image.size)
    if short <= side:
        return image
    other = int(side * long / short)
    size = (side, other) if image.width <= image.height else (other, side)
    return image.resize(size, Image.Resampling.BILINEAR)
