"""A pack: pictures decoded once, as uint8 in memory-mapped files, found again by path. Its files: `contents`."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import mmap
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from roadmap.data.pictures.compression import decoded_picture
from roadmap.data.pictures.contents import (
    CHANNELS,
    CHECKSUM,
    HEIGHT,
    NO_SOURCE,
    SOURCE_MTIME,
    SOURCE_SIZE,
    WIDTH,
    PackError,
    contents,
    lengths_of,
)
from roadmap.data.pictures.images import PictureError, Pixels
from roadmap.data.records import Ints, Records

RANDOM_SHARE = 0.5  # of the memory that the files of a pack take, from which on its pictures do not stay in it


def cache_folder() -> Path:
    """Where packs and glyphs are kept: $ROADMAP_CACHE, else the user's cache folder."""
    if given := os.environ.get("ROADMAP_CACHE"):
        return Path(given)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "roadmap"


def pack_folder(records: Records, side: int, compressed: bool = False) -> Path:
    """Where the pack of a dataset lies: the same for all its splits, another for every root and side."""
    root = hashlib.sha256(str(records.root.resolve()).encode()).hexdigest()[:12]
    name = re.sub(r"[^\w.-]", "_", records.name)
    return cache_folder() / "packs" / f"{name}-{root}-{side}{'-compressed' if compressed else ''}"


def picture_key(records: Records, index: int) -> str:
    """What names a picture in a pack: its path, and its box where it is cut to one."""
    box = records.box(index)
    return records.paths[index] if box is None else f"{records.paths[index]}#{','.join(f'{x:.15g}' for x in box)}"


def source_stamp(path: Path) -> tuple[int, int]:
    """Size and modification time in ns; (-1, -1) for a missing file, or what can be the name of none."""
    try:
        stat = path.stat()
    except (OSError, ValueError):
        return -1, -1
    return stat.st_size, stat.st_mtime_ns


@dataclass(frozen=True, eq=False)
class Pack:
    """N pictures. `pack.picture(i)` is a view of the memory map, nothing is read before it is used.

    Attributes:
        folder: where it lies.
        side: no picture has a longer shorter side.
        root: the folder of the pictures' files.
        paths: below it.
        keys: of the pictures (`picture_key`).
        index: a row for each picture; its columns are named above.
        shards: the files, memory-mapped.
        failures: key -> reason, of pictures that could not be decoded.
        quality: of JPEG, in a compressed pack; None where pictures are decoded.
        again: how many pictures of the whole pack were encoded again, and are no longer those of their files.
    """

    folder: Path
    side: int
    root: Path
    paths: tuple[str, ...]
    keys: tuple[str, ...]
    index: Ints
    shards: tuple[NDArray[np.uint8], ...]
    failures: dict[str, str]
    quality: int | None = None
    again: int = 0

    @classmethod
    def open(cls, folder: Path) -> Pack:
        """The pack in a folder.

        Raises:
            PackError: when there is none, it is incomplete, damaged, or of another version.
        """
        found = contents(Path(folder))
        return cls(Path(folder), **{part.name: getattr(found, part.name) for part in dataclasses.fields(found)})

    def __reduce__(self) -> tuple[Any, tuple[Path, tuple[str, ...]]]:
        """For other processes: they open it themselves; not a byte of the pictures is sent."""
        return _selection, (self.folder, self.keys)

    def __len__(self) -> int:
        return len(self.keys)

    @property
    def heights(self) -> Ints:
        return self.index[:, HEIGHT]

    @property
    def widths(self) -> Ints:
        return self.index[:, WIDTH]

    @property
    def nbytes(self) -> int:
        """Bytes of the decoded pictures of this pack (of this selection of it)."""
        return int((self.heights * self.widths).sum()) * CHANNELS

    def bytes_of(self, index: int) -> Pixels:
        """The bytes of picture `index`, row after row, red, green, blue."""
        return self.picture(index).reshape(-1)

    def picture(self, index: int) -> Pixels:
        """Picture `index` as (H, W, 3) uint8, read-only; a view, unless it has to be decoded.

        Raises:
            PackError: when there is no such picture, or its compressed bytes are damaged.
        """
        _, _, height, width = self.index[index, :4].tolist()
        if height == 0:
            raise PackError(f"{self.keys[index]} could not be decoded: {self.reason(index)}")
        kept = self.kept_bytes(index)
        return kept.reshape(height, width, CHANNELS) if self.quality is None else self._decoded_picture(index, kept)

    def kept_bytes(self, index: int) -> Pixels:
        """The bytes that the pack holds of picture `index`, a view."""
        shard, offset = self.index[index, :2].tolist()
        kept: Pixels = self.shards[shard][offset : offset + int(lengths_of(self.index[index : index + 1])[0])]
        return kept

    def _decoded_picture(self, index: int, kept: Pixels) -> Pixels:
        height, width, checksum = self.index[index, [HEIGHT, WIDTH, CHECKSUM]].tolist()
        try:
            return decoded_picture(kept.tobytes(), checksum, (height, width, CHANNELS))
        except PictureError as error:
            raise PackError(
                f"{self.keys[index]} is damaged in the pack {self.folder} ({error.reason}); run `roadmap data pack "
                "--compressed` again, which makes that part of it again"
            ) from error

    def prefetch(self, index: int, first: int, count: int) -> None:
        """Tells the system that so many bytes of a picture are about to be read (of a compressed one, all that are
        kept): it asks the disk for those of a whole batch at once, where reading would wait for one after another."""
        shard, offset = self.index[index, :2].tolist()
        kept = int(lengths_of(self.index[index : index + 1])[0])
        if self.quality is not None:
            first, count = 0, kept
        if (count := min(count, kept - first)) > 0:
            start = (offset + first) // mmap.PAGESIZE * mmap.PAGESIZE
            _advise(self.shards[shard], "MADV_WILLNEED", start, offset + first + count - start)

    def expect_random_reads(self) -> None:
        """Tells the system so, where it cannot keep the files in memory: reading a picture then fetches that alone.

        Otherwise it fetches what lies around it too, up to megabytes, which is soon wanted and still there.
        """
        if exceeds_memory(sum(shard.nbytes for shard in self.shards)):
            for shard in self.shards:
                _advise(shard, "MADV_RANDOM", 0, shard.nbytes)

    @property
    def drawn(self) -> bool:
        """Whether the pictures were drawn by the program: there are no files that they come from."""
        return bool((self.index[:, SOURCE_SIZE] == NO_SOURCE).all())

    @property
    def origin(self) -> str:
        """Where the pictures are read from, in words."""
        if self.quality is None:
            return f"pack of side {self.side}, {self.folder}"
        lossy = self.lossy or "all as in their files"
        return f"compressed pack of side {self.side} ({lossy}), {self.folder}"

    @property
    def lossy(self) -> str:
        """What makes the pixels others than those of the files, in words; empty where nothing does."""
        if not self.again:
            return ""
        return f"{self.again:,} pictures encoded again as JPEG of quality {self.quality}"

    def reason(self, index: int) -> str:
        """Why picture `index` could not be decoded."""
        return self.failures.get(self.keys[index], "not decoded when it was packed")

    def usable(self, indices: Ints | slice = slice(None)) -> NDArray[np.bool_]:
        """Which pictures were decoded: of all, or of some."""
        return self.heights[indices] > 0

    def stale(self) -> tuple[str, ...]:
        """Paths whose source changed, or went, since it was packed. Pictures made without a source never are."""
        stamps = [source_stamp(self.root / path) for path in self.paths]
        packed = self.index[:, [SOURCE_SIZE, SOURCE_MTIME]]
        return tuple(
            path
            for path, stamp, then in zip(self.paths, stamps, packed.tolist(), strict=True)
            if then != [NO_SOURCE, NO_SOURCE] and list(stamp) != then
        )

    def of(self, records: Records) -> Pack:
        """The pack of `records`, a split or a selection: its pictures in their order.

        Raises:
            PackError: when pictures are not in the pack.
        """
        return self._select([picture_key(records, i) for i in range(len(records))])

    def _select(self, keys: Sequence[str]) -> Pack:
        place = {key: i for i, key in enumerate(self.keys)}
        if missing := [key for key in keys if key not in place]:
            raise PackError(
                f"{len(missing)} of {len(keys)} pictures are not in the pack {self.folder}, the first is {missing[0]}; "
                "run `roadmap data pack` again"
            )
        rows = np.asarray([place[key] for key in keys], dtype=np.int64)
        return dataclasses.replace(
            self, keys=tuple(keys), paths=tuple(self.paths[i] for i in rows), index=self.index[rows]
        )


def exceeds_memory(size: int) -> bool:
    """Whether files of so many bytes do not stay in this machine's memory."""
    return size > RANDOM_SHARE * _memory()


def _advise(shard: NDArray[np.uint8], advice: str, start: int, length: int) -> None:
    """Advice that the system may not know, or not take: then it reads as it would have."""
    mapped, number = getattr(shard, "_mmap", None), getattr(mmap, advice, None)
    if mapped is not None and number is not None:  # an empty file is not mapped
        with contextlib.suppress(OSError):
            mapped.madvise(number, start, length)


def _memory() -> float:
    """Bytes of this machine's memory; infinite where it does not say."""
    try:
        return float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    except (AttributeError, ValueError, OSError):
        return float("inf")


def _selection(folder: Path, keys: tuple[str, ...]) -> Pack:
    return Pack.open(folder)._select(keys)
