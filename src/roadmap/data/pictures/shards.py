"""One file of a pack and its description: written by a process that knows of nothing else, whole or not at all."""

from __future__ import annotations

import contextlib
import json
import os
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from roadmap.atomic import settle, temporary_beside
from roadmap.data.pictures.compression import compressed_picture
from roadmap.data.pictures.contents import CHANNELS, description_of
from roadmap.data.pictures.images import Box, PictureError, small_picture

OnError = Literal["raise", "skip"]


@dataclass(frozen=True)
class Shard:
    """Some pictures that go into one file.

    Attributes:
        file: its name, which says what it is made of.
        first: the number of its first picture.
        paths: of the pictures.
        boxes: they are cut to.
        stamps: size and time of the files.
        side: shorter side of the pictures.
        compressed: kept as encoded bytes, not as pixels.
    """

    file: str
    first: int
    paths: tuple[str, ...]
    boxes: tuple[Box | None, ...]
    stamps: tuple[tuple[int, int], ...]
    side: int
    compressed: bool


@dataclass(frozen=True)
class WrittenShard:
    """A shard under a temporary name, and what is to be known of it."""

    temporary: Path
    about: dict[str, Any]


def written_shard(shard: Shard, folder: str, on_error: OnError) -> WrittenShard | None:
    """Decodes one shard; None where it is there and whole.

    It does not reach the disk here: the processes that decode never wait for that, the one that asked does (`keep`).
    """
    target = Path(folder) / shard.file
    if _is_whole(target, shard, on_error):
        return None
    temporary = temporary_beside(target)
    try:
        return WrittenShard(temporary, _write_pictures(shard, temporary, on_error))
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def keep(written: WrittenShard | None, target: Path, forget: bool) -> None:
    """A shard gets its name when it is on the disk; its description comes last, and makes it count.

    The disk is waited for once: a power cut may take names and descriptions that are younger than a few seconds, and
    then costs these shards. Before the pack itself has a name, theirs are on the disk.

    With `forget` the system need not keep it in memory: a pack that is larger than memory would drive out all else,
    and the next shard takes less time in memory that was just given back than in memory never used before.
    """
    if written is None:  # it was there
        return
    settle(written.temporary, target, with_name=False)
    if forget:
        _forget(target)
    about = target.with_suffix(".json")
    temporary = temporary_beside(about)
    temporary.write_text(json.dumps(written.about))
    os.replace(temporary, about)


def _forget(path: Path) -> None:
    """Tells the system that a file is not read soon, where it can be told; it must be on the disk already."""
    with contextlib.suppress(OSError, AttributeError), open(path, "rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _is_whole(target: Path, shard: Shard, on_error: OnError) -> bool:
    """Whether an earlier run left this shard undamaged; one that skipped pictures does not do where that is an error.

    Every byte is read. That is done where a pack is made, and costs little beside decoding; not where it is opened.
    """
    try:
        about = description_of(target.with_suffix(".json"))
        sizes, failures = about["sizes"], about["failures"]
        lengths = [size[2] if shard.compressed else size[0] * size[1] * CHANNELS for size in sizes]
        if len(sizes) != len(shard.paths) or sum(lengths) != about["bytes"] or (failures and on_error == "raise"):
            return False
        found = target.stat().st_size, _described_checksum(_checksum(target), sizes, failures)
        return found == (about["bytes"], about["crc32"])
    except (OSError, ValueError, LookupError, TypeError):  # missing, or damaged in whatever way
        return False


def _checksum(path: Path) -> int:
    found = 0
    with path.open("rb") as file:
        while part := file.read(1 << 20):
            found = zlib.crc32(part, found)
    return found


def _described_checksum(content: int, sizes: Sequence[Sequence[int]], failures: dict[str, str]) -> int:
    """The checksum of a shard's bytes continued over what is said of them."""
    return zlib.crc32(json.dumps([sizes, failures]).encode(), content)


def _write_pictures(shard: Shard, temporary: Path, on_error: OnError) -> dict[str, Any]:
    """Writes the pictures of a shard, and gives what is to be known of them."""
    encoded = _compressed_bytes if shard.compressed else _decoded_bytes
    sizes: list[list[int]] = []
    failures: dict[str, str] = {}  # row -> reason
    length = checksum = 0
    with open(temporary, "xb", buffering=0) as file:
        for row, (path, box) in enumerate(zip(shard.paths, shard.boxes, strict=True)):
            try:
                raw, facts = encoded(path, box, shard.side)
            except PictureError as error:
                if on_error == "raise":
                    raise
                failures[str(row)] = error.reason
                sizes.append([0] * (5 if shard.compressed else 2))
                continue
            length, checksum = length + _write(file, raw), zlib.crc32(raw, checksum)
            sizes.append(facts)
    described = _described_checksum(checksum, sizes, failures)
    return {"sizes": sizes, "failures": failures, "bytes": length, "crc32": described}


def _write(file: Any, raw: bytes) -> int:
    """All of it: a file without a buffer may take less at a time, as where the disk becomes full."""
    left = memoryview(raw)
    while left:
        left = left[file.write(left) :]
    return len(raw)


def _decoded_bytes(path: str, box: Box | None, side: int) -> tuple[bytes, list[int]]:
    """The pixels of a picture; height and width."""
    image = small_picture(path, box, side)
    return image.tobytes(), [image.height, image.width]


def _compressed_bytes(path: str, box: Box | None, side: int) -> tuple[bytes, list[int]]:
    """The bytes of a picture; height, width, length, checksum, and 1 where it was encoded again."""
    raw, (height, width), again = compressed_picture(path, box, side)
    return raw, [height, width, len(raw), zlib.crc32(raw), int(again)]
