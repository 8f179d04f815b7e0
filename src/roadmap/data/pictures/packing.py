"""Making packs: decode once, in parallel, atomically; what an interruption or an older pack left is reused."""

from __future__ import annotations

import functools
import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from PIL import Image

from roadmap.atomic import replaced
from roadmap.data.pictures.images import Box, PictureError, Pixels, shrunk, upright
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
    pack_folder,
    picture_key,
    source_stamp,
)
from roadmap.data.pictures.processes import worked
from roadmap.data.records import Records
from roadmap.progress import bar

SHARD = 256  # pictures a file: enough work per task, few enough to redo after an interruption
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
    shards = list(_shards(records, side))
    done = [s for s in shards if _is_done(target / s.stem, on_error)]
    finished = {s.stem for s in done}
    todo = [s for s in shards if s.stem not in finished]
    count = len(records)
    with bar(count, "packing", show=progress, done=sum(len(s.paths) for s in done)) as shown:
        write = functools.partial(write_shard, folder=str(target), side=side, on_error=on_error)
        for _, pictures in worked(write, todo, workers):
            shown.update(pictures)
    return _finished(records, side, target, shards)


def small_picture(path: Path | str, box: Box | None, side: int) -> Image.Image:
    """A picture as packs hold it: decoded, upright, cut to its box, its shorter side at most `side`."""
    return shrunk(upright(path, box), side)


def _shards(records: Records, side: int) -> Iterator[_Shard]:
    for number, first in enumerate(range(0, len(records), SHARD)):
        rows = range(first, min(first + SHARD, len(records)))
        paths = tuple(str(records.path(i)) for i in rows)
        boxes, stamps = tuple(records.box(i) for i in rows), tuple(source_stamp(Path(p)) for p in paths)
        described = json.dumps([VERSION, side, paths, boxes, stamps])
        name = hashlib.sha256(described.encode("utf-8", "surrogateescape")).hexdigest()[:16]
        yield _Shard(f"pixels-{number:05d}-{name}", first, paths, boxes, stamps)


def _is_done(stem: Path, on_error: OnError) -> bool:
    """Whether an earlier run left this shard; one that skipped pictures does not do where that is an error."""
    about = stem.with_name(f"{stem.name}.json")
    if not about.is_file() or not stem.with_name(f"{stem.name}.u8").is_file():
        return False
    return on_error == "skip" or not json.loads(about.read_text())["failures"]


def write_shard(shard: _Shard, folder: str, side: int, on_error: OnError) -> int:
    """Decodes one shard to a temporary file and renames it; the .json last, which makes it count."""
    sizes: list[tuple[int, int]] = []
    failures: dict[int, str] = {}
    final = Path(folder) / f"{shard.stem}.u8"
    temporary = final.with_suffix(f".{os.getpid()}.partial")
    try:
        with temporary.open("wb") as file:
            for row, (path, box) in enumerate(zip(shard.paths, shard.boxes, strict=True)):
                try:
                    image = small_picture(path, box, side)
                except PictureError as error:
                    if on_error == "raise":
                        raise
                    failures[row] = error.reason
                    sizes.append((0, 0))
                    continue
                file.write(image.tobytes())
                sizes.append((image.height, image.width))
        temporary.replace(final)
    finally:
        temporary.unlink(missing_ok=True)
    _write_json(final.with_suffix(".json"), {"sizes": sizes, "failures": failures})
    return len(shard.paths)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    with replaced(path) as temporary:
        Path(temporary).write_text(json.dumps(content))


def _finished(records: Records, side: int, folder: Path, shards: Sequence[_Shard]) -> Pack:
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
    return sealed(folder, side, records, keys, index, [f"{shard.stem}.u8" for shard in shards], failures)


def sealed(
    folder: Path,
    side: int,
    records: Records,
    keys: Sequence[str],
    index: np.ndarray[Any, np.dtype[np.int64]],
    files: Sequence[str],
    failures: dict[str, str],
) -> Pack:
    """Writes the index and pack.json, removes what no longer belongs, and opens the pack."""
    digest = hashlib.sha256(index.tobytes()).hexdigest()[:16]
    index_name = f"index-{digest}.npy"
    temporary = folder / f"{index_name}.{os.getpid()}.partial"
    with temporary.open("wb") as file:
        np.save(file, index, allow_pickle=False)
    temporary.replace(folder / index_name)
    about = {
        "format": FORMAT,
        "version": VERSION,
        "name": records.name,
        "root": str(records.root.resolve()),
        "side": side,
        "index": index_name,
        "shards": [[name, (folder / name).stat().st_size] for name in files],
        "failures": failures,
        "paths": list(records.paths),
        "keys": list(keys),
    }
    _write_json(folder / "pack.json", about)
    kept = {index_name, *files, *(Path(name).with_suffix(".json").name for name in files)}
    for old in [*folder.glob("pixels-*"), *folder.glob("index-*.npy")]:
        if old.name not in kept and not old.name.endswith(".partial"):
            old.unlink(missing_ok=True)
    return Pack.open(folder)


def pack_of(pictures: Iterable[Pixels], records: Records, side: int, folder: Path) -> Pack:
    """A pack of pictures that have no files, such as drawn ones: one per record, in one shard."""
    folder.mkdir(parents=True, exist_ok=True)
    index = np.zeros((len(records), 6), dtype=np.int64)
    index[:, SOURCE_SIZE:] = NO_SOURCE  # so never stale
    digest, place, temporary = hashlib.sha256(), 0, folder / f"drawn.{os.getpid()}.partial"
    count = 0
    with temporary.open("wb") as file:
        for count, pixels in enumerate(pictures, start=1):
            raw = pixels.tobytes()
            index[count - 1, [OFFSET, HEIGHT, WIDTH]] = place, pixels.shape[0], pixels.shape[1]
            place += file.write(raw)
            digest.update(raw)
    if count != len(records):
        temporary.unlink()
        raise PackError(f"{count} pictures were drawn for {len(records)} records")
    name = f"pixels-00000-{digest.hexdigest()[:16]}.u8"
    temporary.replace(folder / name)
    return sealed(folder, side, records, list(records.paths), index, [name], {})
