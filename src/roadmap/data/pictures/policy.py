"""Whether pictures are read from a pack or decoded each time: decided here, once, for training, embedding and Python.

It decides about time and disk. Pictures that are decoded each time are resized to the side of the pack they might have
had, by the function that packs them, so the pixels are the same to the bit. Those of a compressed pack may not be
(`compression`): where one is read, the sentence that is given says so.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from roadmap.data.pictures.contents import DESCRIPTION, FORMAT, PackError, PlaceError, description_of
from roadmap.data.pictures.packing import expected_bytes, pack
from roadmap.data.pictures.packs import Pack, pack_folder, source_stamp
from roadmap.data.pictures.shards import OnError
from roadmap.data.records import Records

SIDE = 256  # shorter side in pixels, unless something larger is cut out of the pictures
LARGE_PACK = 50 << 30  # bytes; "auto" makes no larger one unasked
POLICIES = ("auto", "yes", "no", "compressed")


def needed_side(side: int, *sizes: int) -> int:
    """The shorter side to keep pictures at: `side`, or the largest of the `sizes` that they will be resized to.

    A smaller one would shrink pictures only for the crop to enlarge them again.
    """
    return max((side, *sizes))


def drawn_pack(records: Records) -> Pack | None:
    """The pack that a drawn dataset is kept as, in its own folder; None where the pictures are files.

    Pictures that are files may lie beside a `pack.json` of another program, or beside their own pack.

    Raises:
        PackError: when it is ours and damaged.
    """
    try:
        about = description_of(records.root / DESCRIPTION)
    except (OSError, ValueError):
        return None
    if about.get("format") != FORMAT:
        return None
    pack = Pack.open(records.root)
    return pack.of(records) if pack.drawn else None


def fresh_pack(records: Records, side: int, folder: Path | None = None, compressed: bool = False) -> Pack | None:
    """The pack of these pictures if there is one and no source changed since; None if not.

    Drawn datasets hold their own pack, whatever its side.
    """
    if folder is None and (drawn := drawn_pack(records)) is not None:
        return drawn
    try:
        pack = Pack.open(folder or pack_folder(records, side, compressed=compressed)).of(records)
    except PackError:
        return None
    return None if pack.side != side or pack.stale() else pack


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
        policy: "yes" makes a pack of pixels where there is none; "auto" does unless it would be large, and makes a
            compressed one where it would not fit the disk; "compressed" makes a compressed one; "no" decodes the
            files, even if there is a pack. Where a pack cannot be written, "auto" decodes the files and says why.
            Drawn pictures have no files: they are always read from their pack.
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
    compressed, why = policy == "compressed", ""
    found = fresh_pack(records, side, compressed=compressed)
    if found is None and policy == "auto":
        compressed, why = chosen_kind(records, side)
        if why and not compressed:
            return None, f"{decoded}: {why}"
        found = fresh_pack(records, side, compressed=True) if compressed else None
    if found is None and not make:
        return None, decoded
    if found is None:
        try:
            found = pack(records, side, on_error=on_error, progress=progress, compressed=compressed).of(records)
        except PlaceError as error:
            if policy != "auto":
                raise
            return None, f"{decoded}: {error}"
    return found, f"pictures read from a {found.origin}{': ' if why else ''}{why}"


def chosen_kind(records: Records, side: int) -> tuple[bool, str]:
    """Of the pack that "auto" makes: whether it is compressed, and why it is not one of pixels, or none at all; an
    empty reason where nothing speaks against pixels."""
    size = expected_bytes(records, side, compressed=False)
    room = _room(pack_folder(records, side))
    if size <= min(LARGE_PACK, room // 2):
        return False, ""
    why = f"a pack would take about {size / 1e9:.0f} GB of {room / 1e9:.0f} GB free"
    if size <= room // 2:
        return False, f"{why}; pack=yes makes it, pack=compressed a smaller one"
    if expected_bytes(records, side, compressed=True) > _room(pack_folder(records, side, compressed=True)) // 2:
        return False, f"{why}, and a compressed one too much as well; pack=yes or pack=compressed tries it"
    return True, f"{why} as decoded pixels; pack=no decodes the files instead"


def _room(folder: Path) -> int:
    """Bytes of free disk, with those that a pack in this folder, or the beginning of one, takes already."""
    free = shutil.disk_usage(next(parent for parent in folder.parents if os.path.isdir(parent))).free
    # another process may be at work there, and take away what was just listed
    return free + sum(max(0, source_stamp(path)[0]) for path in folder.glob("pixels-*"))
