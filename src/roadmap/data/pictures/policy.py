"""Whether pictures are read from a pack or decoded each time: decided here, once, for training, embedding and Python.

It decides about time and disk alone. Pictures that are decoded each time are resized to the side of the pack they
might have had, by the function that packs them, so the pixels are the same to the bit.
"""

from __future__ import annotations

import shutil

from roadmap.data.pictures.packing import OnError, pack
from roadmap.data.pictures.packs import Pack, drawn_pack, fresh_pack, pack_folder
from roadmap.data.records import Records

SIDE = 256  # shorter side in pixels, unless something larger is cut out of the pictures
LARGE_PACK = 50 << 30  # bytes; "auto" makes no larger one unasked
POLICIES = ("auto", "yes", "no")


def needed_side(side: int, *sizes: int) -> int:
    """The shorter side to keep pictures at: `side`, or the largest of the `sizes` that they will be resized to.

    A smaller one would shrink pictures only for the crop to enlarge them again.
    """
    return max((side, *sizes))


def pack_for(
    records: Records,
    side: int,
    policy: str,
    *,
    on_error: OnError = "raise",
    progress: bool | None = None,
    make: bool = True,
) -> tuple[Pack | None, str]:
    """The pack to read these pictures from, or None to decode their files, and a sentence that says which.

    Args:
        records: the whole dataset; its splits will find their pictures in the pack (`pack.of(split)`).
        side: shorter side in pixels (`needed_side`).
        policy: "yes" makes a pack where there is none; "auto" does unless it would be large; "no" decodes the files,
            even if there is a pack. Drawn pictures have no files: they are always read from their pack.
        on_error: as in `pack`.
        progress: show a bar while a pack is made; None: where a person watches.
        make: False uses what is there and makes nothing, for work that a pack would not shorten.

    Raises:
        ValueError: for another policy.
        PictureError, PackError: as in `pack`.
    """
    if policy not in POLICIES:
        raise ValueError(f"pack must be one of {', '.join(POLICIES)}, got {policy!r}")
    if (drawn := drawn_pack(records)) is not None:
        return drawn, f"pictures drawn by the program, {drawn.side} pixels, read from {drawn.folder}"
    decoded = f"pictures decoded each time, resized to {side} as a pack would hold them"
    if policy == "no":
        return None, decoded
    found = fresh_pack(records, side)
    if found is None and not make:
        return None, decoded
    if found is None and policy == "auto" and (why := _too_large(records, side)) is not None:
        return None, f"{decoded}: {why}"
    if found is None:
        found = pack(records, side, on_error=on_error, progress=progress).of(records)
    return found, f"pictures read from a pack of side {side}, {found.folder}"


def _too_large(records: Records, side: int) -> str | None:
    """Why a pack is not made unasked; None where nothing speaks against it."""
    size = 4 * len(records) * side**2  # three bytes a pixel, at a width of 4/3 of the height
    home = pack_folder(records, side)
    free = shutil.disk_usage(next(parent for parent in home.parents if parent.exists())).free
    if size <= min(LARGE_PACK, free // 2):
        return None
    return f"a pack would take about {size / 1e9:.0f} GB of {free / 1e9:.0f} GB free; pack=yes makes it"
