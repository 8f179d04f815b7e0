"""Making packs: decode once, in parallel, atomically; what an interruption or an older pack left is reused."""

from __future__ import annotations

import errno
import functools
import hashlib
import json
import os
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from PIL import Image

from roadmap.atomic import remove_leftovers, sole_writer, sync_folder, whole_file
from roadmap.data.pictures.images import Box, PictureError, Pixels, thumbnail, upright
from roadmap.data.pictures.packs import (
    CHANNELS,
    FORMAT,
    HEIGHT,
    NO_SOURCE,
    OFFSET,
    SHARD_COLUMN,
    SOURCE_SIZE,
    VERSION,
    WIDTH,
    Pack,
    PackError,
    index_name,
    pack_folder,
    picture_key,
    source_stamp,
)
from roadmap.data.pictures.processes import answers
from roadmap.data.records import Records
from roadmap.progress import bar

SHARD = 256  # pictures a file: enough work per task, few enough to redo after an interruption
_DRAWN = "pixels-drawn.u8"  # until their content has given them a name
OnError = Literal["raise", "skip"]


@dataclass(frozen=True)
class _Shard:
    """The work of one process: some pictures into one file."""

    stem: str
    first: int
    paths: tuple[str, ...]
    boxes: tuple[Box | None, ...]
    stamps: tuple[tuple[int, int], ...]


def pack(
    records: Records,
    side: int = 256,
    folder: Path | None = None,
    workers: int | None = None,
    on_error: OnError = "raise",
    progress: bool | None = None,
) -> Pack:
    """Decodes every picture to uint8 with its shorter side at most `side`, and opens the pack.

    Args:
        records: the whole dataset; its splits will find their pictures in the pack.
        side: shorter side in pixels; larger pictures are shrunk, smaller ones kept.
        folder: where; None for the place where training looks (`pack_folder`).
        workers: processes; None for one per core, 0 for none but this one.
        on_error: "raise" stops at a picture that cannot be decoded and names it; "skip" leaves it out and
            counts it in `Pack.failures`.
        progress: show a bar; None: where a person watches.
    """
    if side < 1:
        raise ValueError(f"side must be at least 1 pixel, got {side}")
    if on_error not in ("raise", "skip"):
        raise ValueError(f"on_error must be 'raise' or 'skip', got {on_error!r}")
    target = folder or pack_folder(records, side)
    target.mkdir(parents=True, exist_ok=True)
    with sole_writer(target), bar(len(records), "packing", show=progress) as shown:
        remove_leftovers(target)
        shards = list(_shards(records, side))
        write = functools.partial(write_shard, folder=str(target), side=side, on_error=on_error)
        try:
            for _, pictures in answers(write, shards, workers):
                shown.update(pictures)
            return _seal_shards(records, side, target, shards)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            raise PackError(
                f"the disk of {target} is full: free some of it, or set ROADMAP_CACHE to a folder on a larger one, "
                "and pack again; what is packed already is kept"
            ) from error


def small_picture(path: Path | str, box: Box | None, side: int) -> Image.Image:
    """A picture as packs hold it: decoded, upright, cut to its box, its shorter side at most `side`."""
    return thumbnail(upright(path, box), side)


def _shards(records: Records, side: int) -> Iterator[_Shard]:
    for number, first in enumerate(range(0, len(records), SHARD)):
        rows = range(first, min(first + SHARD, len(records)))
        paths = tuple(str(records.path(i)) for i in rows)
        boxes, stamps = tuple(records.box(i) for i in rows), tuple(source_stamp(Path(p)) for p in paths)
        described = json.dumps([VERSION, side, paths, boxes, stamps])
        name = hashlib.sha256(described.encode("utf-8", "surrogateescape")).hexdigest()[:16]
        yield _Shard(f"pixels-{number:05d}-{name}", first, paths, boxes, stamps)


def write_shard(shard: _Shard, folder: str, side: int, on_error: OnError) -> int:
    """Decodes one shard, unless it is there and whole; gives the number of its pictures."""
    pixels = Path(folder) / f"{shard.stem}.u8"
    if not _is_whole(pixels, on_error):
        about = _decode_shard(shard, pixels, side, on_error)
        _write_json(pixels.with_suffix(".json"), about)  # last: it makes the shard count
    return len(shard.paths)


def _is_whole(pixels: Path, on_error: OnError) -> bool:
    """Whether an earlier run left this shard undamaged; one that skipped pictures does not do where that is an error.

    Every byte is read. That is done where a pack is made, and costs little beside decoding; not where it is opened.
    """
    try:
        about = json.loads(pixels.with_suffix(".json").read_text())
        found = pixels.stat().st_size, _described_checksum(_checksum(pixels), about["sizes"], about["failures"])
        return found == (about["bytes"], about["crc32"]) and (on_error == "skip" or not about["failures"])
    except (OSError, ValueError, KeyError, TypeError):  # missing, or damaged in whatever way
        return False


def _checksum(path: Path) -> int:
    found = 0
    with path.open("rb") as file:
        while part := file.read(1 << 20):
            found = zlib.crc32(part, found)
    return found


def _described_checksum(pixels: int, sizes: Sequence[Sequence[int]], failures: dict[str, str]) -> int:
    """The checksum of a shard's pixels continued over what is said of them."""
    return zlib.crc32(json.dumps([sizes, failures]).encode(), pixels)


def _decode_shard(shard: _Shard, pixels: Path, side: int, on_error: OnError) -> dict[str, Any]:
    """Writes the pixels of a shard, and gives what is to be known of them."""
    sizes: list[tuple[int, int]] = []
    failures: dict[str, str] = {}  # row -> reason
    length = checksum = 0
    with whole_file(pixels) as temporary, open(temporary, "wb") as file:
        for row, (path, box) in enumerate(zip(shard.paths, shard.boxes, strict=True)):
            try:
                image = small_picture(path, box, side)
            except PictureError as error:
                if on_error == "raise":
                    raise
                failures[str(row)] = error.reason
                sizes.append((0, 0))
                continue
            raw = image.tobytes()
            length, checksum = length + file.write(raw), zlib.crc32(raw, checksum)
            sizes.append((image.height, image.width))
    described = _described_checksum(checksum, sizes, failures)
    return {"sizes": sizes, "failures": failures, "bytes": length, "crc32": described}


def _write_json(path: Path, content: dict[str, Any]) -> None:
    with whole_file(path) as temporary:
        Path(temporary).write_text(json.dumps(content))


def _seal_shards(records: Records, side: int, folder: Path, shards: Sequence[_Shard]) -> Pack:
    index = np.zeros((len(records), 6), dtype=np.int64)
    keys = [picture_key(records, i) for i in range(len(records))]
    failures: dict[str, str] = {}
    for number, shard in enumerate(shards):
        about = json.loads((folder / f"{shard.stem}.json").read_text())
        part = index[shard.first : shard.first + len(shard.paths)]
        part[:, SHARD_COLUMN] = number
        part[:, [HEIGHT, WIDTH]] = about["sizes"]
        part[:, SOURCE_SIZE:] = shard.stamps
        ends = np.cumsum(part[:, HEIGHT] * part[:, WIDTH] * CHANNELS)
        part[1:, OFFSET] = ends[:-1]
        failures |= {keys[shard.first + int(row)]: reason for row, reason in about["failures"].items()}
    return seal(folder, side, records, keys, index, [f"{shard.stem}.u8" for shard in shards], failures)


def seal(
    folder: Path,
    side: int,
    records: Records,
    keys: Sequence[str],
    index: np.ndarray[Any, np.dtype[np.int64]],
    files: Sequence[str],
    failures: dict[str, str],
) -> Pack:
    """Writes the index and pack.json, removes what no longer belongs, and opens the pack."""
    name = index_name(index)
    with whole_file(folder / name) as temporary, open(temporary, "wb") as file:
        np.save(file, index, allow_pickle=False)
    about = {
        "format": FORMAT,
        "version": VERSION,
        "name": records.name,
        "root": str(records.root.resolve()),
        "side": side,
        "index": name,
        "shards": [[file, (folder / file).stat().st_size] for file in files],
        "failures": failures,
        "paths": list(records.paths),
        "keys": list(keys),
    }
    _write_json(folder / "pack.json", about)
    kept = {name, *files, *(Path(file).with_suffix(".json").name for file in files)}
    for old in [*folder.glob("pixels-*"), *folder.glob("index-*.npy")]:
        if old.name not in kept:
            old.unlink(missing_ok=True)
    return Pack.open(folder)


def pack_of(pictures: Iterable[Pixels], records: Records, side: int, folder: Path) -> Pack:
    """A pack of pictures that have no files, such as drawn ones: one per record, in one shard."""
    folder.mkdir(parents=True, exist_ok=True)
    index = np.zeros((len(records), 6), dtype=np.int64)
    index[:, SOURCE_SIZE:] = NO_SOURCE  # so never stale
    digest, place, count = hashlib.sha256(), 0, 0
    with sole_writer(folder):
        remove_leftovers(folder)
        with whole_file(folder / _DRAWN) as temporary, open(temporary, "wb") as file:
            for count, pixels in enumerate(pictures, start=1):
                raw = pixels.tobytes()
                index[count - 1, [OFFSET, HEIGHT, WIDTH]] = place, pixels.shape[0], pixels.shape[1]
                place += file.write(raw)
                digest.update(raw)
            if count != len(records):
                raise PackError(f"{count} pictures were drawn for {len(records)} records")
        name = f"pixels-00000-{digest.hexdigest()[:16]}.u8"  # so that an older pack never has these pixels by mistake
        os.replace(folder / _DRAWN, folder / name)
        sync_folder(folder)
        return seal(folder, side, records, list(records.paths), index, [name], {})
