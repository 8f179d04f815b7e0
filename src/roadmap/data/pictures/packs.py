"""A pack: pictures decoded once, as uint8 in memory-mapped files, found again by path.

    pixels-00000-<hash>.u8     (H, W, 3) pictures one after another, `SHARD` to a file
    pixels-00000-<hash>.json   their heights and widths, and what could not be decoded
    index-<hash>.npy           (N, 6) int64: shard, offset in bytes, height, width, source size, source mtime in ns
    pack.json                  what the pack holds; written last, so a folder with it is complete

The hash names the sources (path, box, size, mtime) and the side, so an interrupted or outdated pack keeps every
shard that is still right. JSON, npy without pickle, and raw bytes: nothing that is read can run code.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from roadmap.data.pictures.images import Pixels
from roadmap.data.records import Ints, Records

FORMAT, VERSION = "roadmap-pack", 1
CHANNELS = 3
SHARD_COLUMN, OFFSET, HEIGHT, WIDTH, SOURCE_SIZE, SOURCE_MTIME = range(6)
NO_SOURCE = -2  # instead of size and time, for pictures that were drawn


class PackError(ValueError):
    """A pack that cannot be used, and what to do about it."""


def cache_folder() -> Path:
    """Where packs and glyphs are kept: $ROADMAP_CACHE, else the user's cache folder."""
    if given := os.environ.get("ROADMAP_CACHE"):
        return Path(given)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "roadmap"


def pack_folder(records: Records, side: int, cache: Path | None = None) -> Path:
    """Where the pack of a dataset lies: the same for all its splits, another for every root and side."""
    root = hashlib.sha256(str(records.root.resolve()).encode()).hexdigest()[:12]
    name = re.sub(r"[^\w.-]", "_", records.name)
    return (cache or cache_folder() / "packs") / f"{name}-{root}-{side}"


def picture_key(records: Records, index: int) -> str:
    """What names a picture in a pack: its path, and its box where it is cut to one."""
    box = records.box(index)
    return records.paths[index] if box is None else f"{records.paths[index]}#{','.join(f'{x:.15g}' for x in box)}"


def source_stamp(path: Path) -> tuple[int, int]:
    """Size and modification time in ns; (-1, -1) for a missing file."""
    try:
        stat = path.stat()
    except OSError:
        return -1, -1
    return stat.st_size, stat.st_mtime_ns


@dataclass(frozen=True, eq=False)
class Pack:
    """N decoded pictures. `pack.picture(i)` is a view of the memory map, nothing is read before it is used."""

    folder: Path
    side: int
    root: Path
    paths: tuple[str, ...]
    keys: tuple[str, ...]
    index: Ints
    shards: tuple[NDArray[np.uint8], ...]
    failures: dict[str, str]

    @classmethod
    def open(cls, folder: Path) -> Pack:
        """The pack in a folder.

        Raises:
            PackError: when there is none, it is incomplete, damaged, or of another version.
        """
        folder = Path(folder)
        try:
            about = json.loads((folder / "pack.json").read_text())
        except FileNotFoundError as error:
            raise PackError(f"no complete pack in {folder}; make one with `roadmap data pack`") from error
        except ValueError as error:
            raise PackError(f"{folder}/pack.json is damaged ({error}); run `roadmap data pack` again") from error
        if not isinstance(about, dict) or (about.get("format"), about.get("version")) != (FORMAT, VERSION):
            raise PackError(f"{folder} is not a pack of version {VERSION}; run `roadmap data pack` again")
        try:
            return cls._in_folder(folder, about)
        except (OSError, ValueError, EOFError, KeyError, TypeError) as error:
            raise PackError(f"{folder} is damaged ({error}); run `roadmap data pack` again") from error

    @classmethod
    def _in_folder(cls, folder: Path, about: dict[str, Any]) -> Pack:
        index = np.load(folder / about["index"], allow_pickle=False)
        shards = tuple(_memory_map(folder / name, size) for name, size in about["shards"])
        keys, paths = tuple(about["keys"]), tuple(about["paths"])
        if index.shape != (len(keys), 6) or len(paths) != len(keys):
            raise ValueError(f"an index of shape {index.shape} for {len(keys)} pictures")
        _check_extents(index, shards)
        if about["index"] != index_name(index):
            raise ValueError(f"{about['index']} is not what was written")
        return cls(folder, about["side"], Path(about["root"]), paths, keys, index, shards, about["failures"])

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
        """Bytes of the pictures of this pack (of this selection of it)."""
        return int((self.heights * self.widths).sum()) * CHANNELS

    def bytes_of(self, index: int) -> Pixels:
        """The bytes of picture `index`, row after row, red, green, blue."""
        shard, offset, height, width = self.index[index, :4].tolist()
        if height == 0:
            raise PackError(f"{self.keys[index]} could not be decoded: {self.reason(index)}")
        raw: Pixels = self.shards[shard][offset : offset + height * width * CHANNELS]
        return raw

    def picture(self, index: int) -> Pixels:
        """Picture `index` as (H, W, 3) uint8, a read-only view."""
        return self.bytes_of(index).reshape(int(self.heights[index]), int(self.widths[index]), CHANNELS)

    @property
    def drawn(self) -> bool:
        """Whether the pictures were drawn by the program: there are no files that they come from."""
        return bool((self.index[:, SOURCE_SIZE] == NO_SOURCE).all())

    def reason(self, index: int) -> str:
        """Why picture `index` could not be decoded."""
        return self.failures.get(self.keys[index], "not decoded when it was packed")

    def usable(self) -> NDArray[np.bool_]:
        """(N,) which pictures were decoded."""
        return self.heights > 0

    def stale(self) -> tuple[str, ...]:
        """Paths whose source changed, or went, since it was packed. Pictures made without a source never are."""
        stamps = [source_stamp(self.root / path) for path in self.paths]
        packed = self.index[:, SOURCE_SIZE:]
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
        place = {key: i for i, key in enumerate(self.keys)}
        keys = [picture_key(records, i) for i in range(len(records))]
        if missing := [key for key in keys if key not in place]:
            raise PackError(
                f"{len(missing)} of {len(keys)} pictures are not in the pack {self.folder}, the first is {missing[0]}; "
                "run `roadmap data pack` again"
            )
        rows = np.asarray([place[key] for key in keys], dtype=np.int64)
        return dataclasses.replace(
            self, keys=tuple(keys), paths=tuple(self.paths[i] for i in rows), index=self.index[rows]
        )


def drawn_pack(records: Records) -> Pack | None:
    """The pack that a drawn dataset is kept as, in its own folder; None where the pictures are files.

    Pictures that are files may lie beside a `pack.json` of another program, or beside their own pack.

    Raises:
        PackError: when it is ours and damaged.
    """
    try:
        about = json.loads((records.root / "pack.json").read_text())
    except (OSError, ValueError):
        return None
    if not isinstance(about, dict) or about.get("format") != FORMAT:
        return None
    pack = Pack.open(records.root)
    return pack.of(records) if pack.drawn else None


def fresh_pack(records: Records, side: int, folder: Path | None = None) -> Pack | None:
    """The pack of these pictures if there is one and no source changed since; None if not.

    Drawn datasets hold their own pack, whatever its side.
    """
    if folder is None and (drawn := drawn_pack(records)) is not None:
        return drawn
    try:
        pack = Pack.open(folder or pack_folder(records, side)).of(records)
    except PackError:
        return None
    return None if pack.side != side or pack.stale() else pack


def index_name(index: Ints) -> str:
    """The file of an index, named by its content."""
    return f"index-{hashlib.sha256(index.tobytes()).hexdigest()[:16]}.npy"


def _memory_map(path: Path, size: int) -> NDArray[np.uint8]:
    if path.stat().st_size != size:
        raise ValueError(f"{path.name} has {path.stat().st_size} bytes instead of {size}")
    if size == 0:  # an empty file cannot be mapped
        return np.zeros(0, np.uint8)
    return np.memmap(path, np.uint8, "r")


def _check_extents(index: Ints, shards: tuple[NDArray[np.uint8], ...]) -> None:
    """No picture may reach outside its file, whatever the index says."""
    sizes = np.asarray([len(shard) for shard in shards] or [0], dtype=np.int64)
    shard, offset, height, width = index[:, :4].T
    inside = (shard >= 0) & (shard < len(sizes)) & (offset >= 0) & (height >= 0) & (width >= 0)
    inside &= offset + height * width * CHANNELS <= sizes[np.clip(shard, 0, len(sizes) - 1)]
    if not inside.all():
        raise ValueError(f"picture {int(np.argmin(inside))} reaches outside its file")
