"""Pictures as the bytes of a file, for packs that would be too large decoded.

A file that holds no more than the pack would is kept as it is, and decodes to the same pixels. A larger one is
shrunk as for any pack and encoded as JPEG again: that is lossy, so its pixels are no longer those of the file.
"""

from __future__ import annotations

import io
import zlib
from pathlib import Path

import numpy as np
from PIL import Image

from roadmap.data.pictures.images import (
    GIVEN,
    Box,
    PictureError,
    Pixels,
    file_in_memory,
    thumbnail,
    upright,
)

QUALITY = 95  # of JPEG, with colour in full resolution: hardly to be seen, at a seventh of the decoded bytes
SMALLER = 7  # times, about, than decoded
_KEPT = ("JPEG", "PNG", "WEBP")  # formats that every Pillow reads
_LONGEST = 65_500  # pixels of a side that JPEG can hold, as it is written here; longer ones, of thin strips, become PNG
_LEAST = 2  # a file is kept where it is so many times smaller than its pixels


def compressed_picture(path: Path | str, box: Box | None, side: int) -> tuple[bytes, tuple[int, int], bool]:
    """The bytes of a picture as a compressed pack holds it, (height, width), and whether that lost anything.

    Raises:
        PictureError: as `upright`.
    """
    file = file_in_memory(path)  # read once: what is kept is what was decoded
    whole = upright(file, box)
    small = thumbnail(whole, side)
    if box is None and small is whole:
        raw = file.getvalue()
        if len(raw) * _LEAST <= whole.width * whole.height * 3 and _format(raw) in _KEPT:
            return raw, (small.height, small.width), False
    found = io.BytesIO()
    lossy = max(small.size) <= _LONGEST
    small.save(found, "JPEG" if lossy else "PNG", quality=QUALITY, subsampling="4:4:4")
    return found.getvalue(), (small.height, small.width), lossy


def decoded_picture(raw: bytes, checksum: int, shape: tuple[int, int, int]) -> Pixels:
    """The picture in bytes that were kept, (H, W, 3) uint8.

    Raises:
        PictureError: when they are not what was kept.
    """
    if zlib.crc32(raw) != checksum:  # damage may leave something that can be decoded
        raise PictureError(GIVEN, "its bytes are not what was written")
    # the size first: bytes that claim another are not decoded, and no memory is asked for what they claim
    found = np.asarray(upright(io.BytesIO(raw), formats=_KEPT, size=(shape[1], shape[0])))
    if found.shape != shape:
        raise PictureError(GIVEN, f"{found.shape[1]} x {found.shape[0]} pixels instead of {shape[1]} x {shape[0]}")
    return found


def _format(raw: bytes) -> str | None:
    with Image.open(io.BytesIO(raw)) as opened:
        found: str | None = opened.format
        return found
