"""Pictures that come in, and pictures that are shown: decoded within limits, found only through the index."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path

from PIL import Image

from roadmap.data.pictures.images import Box, PictureError, reads_heif, thumbnail, upright
from roadmap.search.files import row_file, shortened
from roadmap.search.index import Index
from roadmap.search.service.limits import Limits, Refusal

# What strangers may send. Pillow reads more, by way of other programs too; those are not for strangers.
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "MPO", "AVIF", "HEIF")
GIVEN = "the picture"


def edges(box: Sequence[float] | None) -> Box | None:
    """x, y, width, height as left, top, right, bottom."""
    if box is None:
        return None
    x, y, width, height = box
    if not (width >= 1 and height >= 1):
        raise Refusal(422, f"a box is x, y, width, height in pixels, at least 1 x 1; got {width:g} x {height:g}")
    return x, y, x + width, y + height


def query_picture(content: bytes | Path, box: Box | None, side: int | None, limits: Limits) -> Image.Image:
    """A picture to search by: upright, cut to its box, and shrunk as the encoder would; the same pixels reach it."""
    name = GIVEN if isinstance(content, bytes) else content.name
    if isinstance(content, bytes) and not content:
        raise Refusal(422, f"{name} is empty: no byte was sent")
    try:
        formats = _checked_formats(content, limits.pixels, name)
        file = io.BytesIO(content) if isinstance(content, bytes) else content
        image = upright(file, box, limits.pixels, formats)
    except PictureError as error:
        raise Refusal(422, f"{name} cannot be searched by: {error.reason}") from error
    return image if side is None else thumbnail(image, side)


def _checked_formats(content: bytes | Path, pixels: int, name: str) -> tuple[str, ...]:
    """The formats that are read; before anything is decoded, it is one of them and has not too many pixels."""
    reads_heif()  # makes it known to Pillow, where it is installed
    Image.init()
    allowed = tuple(one for one in FORMATS if one in Image.OPEN)
    try:
        with Image.open(io.BytesIO(content) if isinstance(content, bytes) else content, formats=allowed) as opened:
            width, height = opened.size
    except Image.DecompressionBombError as error:
        raise Refusal(413, f"{name} has too many pixels: {error}") from error
    except Exception as error:  # Pillow's readers raise whatever comes to them on damaged files
        raise Refusal(415, f"{name} is not a picture in one of the formats {', '.join(allowed)}") from error
    if width * height > pixels:
        raise Refusal(413, f"{name} has {width} x {height} pixels; at most {pixels:,} are allowed")
    return allowed


def picture_file(index: Index, id: str, root: Path | None) -> tuple[Path, Box | None]:
    """The file of a row of the index, and the part of it that the row is of.

    Only rows of the index have one, only below the folder that was indexed; a link that leads out of it is refused.
    """
    if id not in index.storage.rows.slots_of([id]):
        raise Refusal(404, f"{shortened(id)!r} is not in the index")
    if root is None:
        raise Refusal(404, "the index does not say where its pictures lie; start the service with their folder")
    try:
        return row_file(root, id)
    except FileNotFoundError as error:
        raise Refusal(404, str(error)) from error


def stamped_file(index: Index, id: str, root: Path | None) -> tuple[Path, Box | None, tuple[int, int]]:
    """`picture_file`, and what changes with its content."""
    path, box = picture_file(index, id, root)
    try:
        status = path.stat()
    except OSError as error:
        raise Refusal(404, f"the picture of {shortened(id)!r} is not there any more") from error
    return path, box, (status.st_mtime_ns, status.st_size)


def shown_picture(path: Path, box: Box | None, side: int, limits: Limits) -> tuple[bytes, tuple[int, int]]:
    """A picture for the page, its longest side at most `side`: a JPEG without the metadata of the original; and the
    width and height of the original."""
    try:
        image = upright(path, box, limits.pixels, _checked_formats(path, limits.pixels, "the file"))
    except (PictureError, Refusal) as error:
        raise Refusal(404, f"the picture cannot be shown: {getattr(error, 'reason', error)}") from error
    size = image.size
    image.thumbnail((side, side), Image.Resampling.BILINEAR, reducing_gap=2.0)
    written = io.BytesIO()
    Image.frombytes("RGB", image.size, image.tobytes()).save(written, "JPEG", quality=85)
    return written.getvalue(), size


def box_within(outer: Box | None, inner: Box | None) -> Box | None:
    """A box on a row that is itself a part of a picture, in pixels of the whole picture; cut to that part."""
    if outer is None or inner is None:
        return outer or inner
    left, top = outer[0], outer[1]
    return left + inner[0], top + inner[1], min(outer[2], left + inner[2]), min(outer[3], top + inner[3])
