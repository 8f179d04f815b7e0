"""Making packs: decode once, in parallel, atomically; what an interruption or an older pack left is reused."""

from __future__ import annotations

import contextlib
import errno
import functools
import hashlib
import json
import os
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from roadmap.atomic import remove_leftovers, sole_writer, sync_folder, whole_file
from roadmap.data.pictures.compression import QUALITY, SMALLER
from roadmap.data.pictures.contents import (
    CHANNELS,
    CHECKSUM,
    COLUMNS,
    COMPRESSED,
    DESCRIPTION,
    FORMAT,
    HEIGHT,
    LENGTH,
    NO_SOURCE,
    OFFSET,
    SHARD_COLUMN,
    SOURCE_MTIME,
    SOURCE_SIZE,
    VERSION,
    WIDTH,
    PackError,
    PlaceError,
    description_of,
    index_name,
    sealed_bytes,
)
from roadmap.data.pictures.images import Pixels
from roadmap.data.pictures.packs import Pack, exceeds_memory, pack_folder, picture_key, source_stamp
from roadmap.data.pictures.processes import answers
from roadmap.data.pictures.shards import OnError, Shard, keep, written_shard
from roadmap.data.records import Records
from roadmap.progress import bar

SHARD = 64  # pictures a file at least: enough work for a task, few enough that no process is long alone with the last
FILES = 512  # at most: each stays open while the pack is in use, and many systems allow a process 1,024
_THREADS = 8  # that bring shards to the disk; one waits for it 10 to 40 ms each time
_FULL = (errno.ENOSPC, errno.EDQUOT)
_CLOSED = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST)
_DRAWN = "pixels-drawn.u8"  # until their content has given them a name


def pack(
    records: Records,
    side: int = 256,
    folder: Path | None = None,
    workers: int | None = None,
    on_error: OnError = "raise",
    progress: bool | None = None,
    compressed: bool = False,
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
        compressed: keep files and JPEGs instead of pixels (`compression`): a seventh of the disk, decoded when read,
            and lossy where pictures are shrunk or cut.
    """
    if side < 1:
        raise ValueError(f"side must be at least 1 pixel, got {side}")
    if on_error not in ("raise", "skip"):
        raise ValueError(f"on_error must be 'raise' or 'skip', got {on_error!r}")
    target = folder or pack_folder(records, side, compressed=compressed)
    with _place(target), sole_writer(target), bar(len(records), "packing", show=progress) as shown:
        remove_leftovers(target)
        try:
            shards = []
            for shard in _kept_shards(records, side, compressed, target, workers, on_error):
                shards.append(shard)
                shown.update(len(shard.paths))
            return _seal_shards(records, side, target, sorted(shards, key=lambda shard: shard.first), compressed)
        finally:
            remove_leftovers(target)  # what was decoded, but did not come to be kept


@contextlib.contextmanager
def _place(target: Path) -> Iterator[None]:
    """A folder that is made where there is none; what the system says of it, in words that say what to do."""
    try:
        target.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        if error.errno in _FULL:
            raise PlaceError(
                f"the disk of {target} is full: free some of it, or set ROADMAP_CACHE to a folder on a larger one, "
                "and pack again; what is packed already is kept"
            ) from error
        if error.errno in _CLOSED:
            raise PlaceError(
                f"no pack can be written to {target} ({error.strerror}): set ROADMAP_CACHE to a folder where you may "
                "write"
            ) from error
        raise


def _kept_shards(
    records: Records, side: int, compressed: bool, target: Path, workers: int | None, on_error: OnError
) -> Iterator[Shard]:
    """Every shard, when it is on the disk. Processes decode the next ones while threads wait for the disk."""
    write = functools.partial(written_shard, folder=str(target), on_error=on_error)
    forget = exceeds_memory(expected_bytes(records, side, compressed))
    threads = min(_THREADS, workers or 1) if workers is not None else _THREADS
    waiting: deque[tuple[Shard, Future[None]]] = deque()
    with (
        ThreadPoolExecutor(threads) as pool,
        contextlib.closing(answers(write, _shards(records, side, compressed), workers)) as done,
    ):
        for shard, written in done:
            waiting.append((shard, pool.submit(keep, written, target / shard.file, forget)))
            while len(waiting) > 2 * threads or (waiting and waiting[0][1].done()):
                yield _when_kept(*waiting.popleft())
        while waiting:
            yield _when_kept(*waiting.popleft())


def _when_kept(shard: Shard, kept: Future[None]) -> Shard:
    kept.result()
    return shard


def _shards(records: Records, side: int, compressed: bool) -> Iterator[Shard]:
    length = shard_length(len(records))
    for number, first in enumerate(range(0, len(records), length)):
        rows = range(first, min(first + length, len(records)))
        paths = tuple(str(records.path(i)) for i in rows)
        boxes, stamps = tuple(records.box(i) for i in rows), tuple(source_stamp(Path(p)) for p in paths)
        kind = [COMPRESSED, QUALITY] if compressed else [VERSION]
        described = json.dumps([*kind, side, paths, boxes, stamps])
        name = hashlib.sha256(described.encode("utf-8", "surrogateescape")).hexdigest()[:16]
        file = f"pixels-{number:05d}-{name}.{'jpg' if compressed else 'u8'}"
        yield Shard(file, first, paths, boxes, stamps, side, compressed)


def expected_bytes(records: Records, side: int, compressed: bool) -> int:
    """What a pack of these pictures takes, about: three bytes a pixel, at a width of 4/3 of the height."""
    size = 4 * len(records) * side**2
    return size // SMALLER if compressed else size


def shard_length(count: int) -> int:
    """Pictures in a file of a pack of so many. It is doubled, not fitted, so that a few more pictures change none."""
    length = SHARD
    while count > length * FILES:
        length *= 2
    return length


def _seal_shards(records: Records, side: int, folder: Path, shards: Sequence[Shard], compressed: bool) -> Pack:
    index = np.zeros((len(records), COLUMNS[compressed]), dtype=np.int64)
    keys = [picture_key(records, i) for i in range(len(records))]
    failures: dict[str, str] = {}
    again = 0
    for number, shard in enumerate(shards):
        about = description_of((folder / shard.file).with_suffix(".json"))
        part, sizes = index[shard.first : shard.first + len(shard.paths)], np.asarray(about["sizes"], dtype=np.int64)
        part[:, SHARD_COLUMN] = number
        part[:, [HEIGHT, WIDTH]] = sizes[:, :2]
        part[:, [SOURCE_SIZE, SOURCE_MTIME]] = shard.stamps
        if compressed:
            part[:, [LENGTH, CHECKSUM]] = sizes[:, 2:4]
            again += int(sizes[:, 4].sum())
        ends = np.cumsum(sizes[:, 2] if compressed else sizes.prod(1) * CHANNELS)
        part[1:, OFFSET] = ends[:-1]
        failures |= {keys[shard.first + int(row)]: reason for row, reason in about["failures"].items()}
    facts = {"quality": QUALITY, "again": again} if compressed else {}
    return seal(folder, side, records, keys, index, [shard.file for shard in shards], failures, facts)


def seal(
    folder: Path,
    side: int,
    records: Records,
    keys: Sequence[str],
    index: np.ndarray[Any, np.dtype[np.int64]],
    files: Sequence[str],
    failures: dict[str, str],
    facts: dict[str, int] | None = None,
) -> Pack:
    """Writes the index and pack.json, removes what no longer belongs, and opens the pack."""
    name = index_name(index)
    with whole_file(folder / name) as temporary, open(temporary, "wb") as file:
        np.save(file, index, allow_pickle=False)
    about = {
        "format": FORMAT,
        "version": COMPRESSED if facts else VERSION,
        "name": records.name,
        "root": str(records.root.resolve()),
        "side": side,
        "index": name,
        "shards": [[file, (folder / file).stat().st_size] for file in files],
        "failures": failures,
        "paths": list(records.paths),
        "keys": list(keys),
        **(facts or {}),
    }
    with whole_file(folder / DESCRIPTION) as temporary:
        Path(temporary).write_bytes(sealed_bytes(about))
    kept = {name, *files, *(Path(file).with_suffix(".json").name for file in files)}
    for old in [*folder.glob("pixels-*"), *folder.glob("index-*.npy")]:
        if old.name not in kept:
            old.unlink(missing_ok=True)
    return Pack.open(folder)


def pack_of(pictures: Iterable[Pixels], records: Records, side: int, folder: Path) -> Pack:
    """A pack of pictures that have no files, such as drawn ones: one per record, in one shard."""
    index = np.zeros((len(records), COLUMNS[False]), dtype=np.int64)
    index[:, SOURCE_SIZE:] = NO_SOURCE  # so never stale
    digest, place, count = hashlib.sha256(), 0, 0
    with _place(folder), sole_writer(folder):
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
