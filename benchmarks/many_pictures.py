"""As many pictures as a large dataset has, made of a small one by cropping: every file is another, with real content.

Each source is decoded once and cut at random several times; the cuts are brought to one shorter side and written as
JPEG. Without sources, smooth noise is drawn. All of it is done by the processes that pack (`answers`), which import
this module alone.
"""

from __future__ import annotations

import functools
import itertools
import os
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from roadmap.data.pictures.images import Box, small_picture, upright
from roadmap.data.pictures.packs import Pack
from roadmap.data.pictures.processes import answers
from roadmap.data.pictures.shards import Shard, WrittenShard, written_shard
from roadmap.data.records import Records

PER_CLASS = 8
TASK = 64  # pictures
GRAIN = 8  # levels
QUALITY = 85  # of JPEG, as of pictures from the web


@dataclass(frozen=True)
class Cuts:
    """Pictures number `first` to `last`, of one source after another."""

    folder: str
    sources: tuple[str, ...]
    first: int
    last: int
    each: int
    side: int


def made_pictures(folder: Path, count: int, sources: list[str], side: int, workers: int | None) -> Records:
    """`count` files of that shorter side below `folder`, in classes of eight; the last tenth is for tests."""
    paths = tuple(f"{i // 10_000:03d}/{i}.jpg" for i in range(count))
    for name in {path.partition("/")[0] for path in paths}:
        (folder / name).mkdir(parents=True, exist_ok=True)
    each = -(-count // len(sources)) if sources else TASK
    tasks = (
        Cuts(str(folder), tuple(sources[first // each : -(-last // each)]), first, last, each, side)
        for first in range(0, count, TASK)
        for last in [min(first + TASK, count)]
    )
    for _ in answers(write_cuts, tasks, workers):
        pass
    numbers = np.arange(count)
    splits = np.where(numbers < 9 * count // 10 // PER_CLASS * PER_CLASS, "train", "test")
    return Records("made", folder, paths, numbers // PER_CLASS, splits=splits)


def write_cuts(cuts: Cuts) -> None:
    random = np.random.default_rng(cuts.first)
    for number, pictures in itertools.groupby(range(cuts.first, cuts.last), lambda i: i // cuts.each):
        source = upright(cuts.sources[number - cuts.first // cuts.each]) if cuts.sources else noise(random)
        for i in pictures:
            share = random.uniform(0.6, 0.95, 2)
            width, height = (max(8, int(s * length)) for s, length in zip(share, source.size, strict=True))
            left, top = random.integers(source.width - width + 1), random.integers(source.height - height + 1)
            scale = cuts.side / min(width, height)
            size = (round(width * scale), round(height * scale))
            cut = source.resize(size, Image.Resampling.BILINEAR, (left, top, left + width, top + height))
            cut.save(f"{cuts.folder}/{i // 10_000:03d}/{i}.jpg", quality=QUALITY)


def noise(random: np.random.Generator) -> Image.Image:
    """Large blobs with finer ones and grain on them: about as hard to compress as a photograph."""
    levels = [random.integers(0, 256, (side, side * 4 // 3, 3), dtype=np.uint8) for side in (6, 48)]
    coarse, fine = (Image.fromarray(part).resize((455, 341), Image.Resampling.BICUBIC) for part in levels)
    grain = random.normal(0, GRAIN, (341, 455, 1))
    return Image.fromarray((np.asarray(Image.blend(coarse, fine, 0.25)) + grain).clip(0, 255).astype(np.uint8))


def decoded_and_dropped(pictures: tuple[tuple[str, Box | None], ...]) -> int:
    """What packing does to pictures of side 256, without keeping them."""
    for path, box in pictures:
        small_picture(path, box, 256)
    return len(pictures)


def parts_of_packing(asked: tuple[Shard, str]) -> dict[str, float]:
    """Seconds of a core that one file of a pack takes, in all and in parts, beside those of decoding alone.

    They take turns in one process, so that whatever else the machine does meanwhile slows all of them alike.
    """
    shard, folder = asked
    taken: dict[str, float] = {}
    written: list[WrittenShard | None] = []

    def timed(part: str, work: Callable[[], Any]) -> Any:
        began = time.thread_time()
        found = work()
        taken[part] = taken.get(part, 0.0) + time.thread_time() - began
        return found

    def decode() -> None:
        for path, box in zip(shard.paths, shard.boxes, strict=True):
            small_picture(path, box, shard.side)

    def write() -> None:
        written.append(written_shard(shard, folder, "raise"))

    def in_parts() -> None:
        with open(Path(folder) / f"parts-{os.getpid()}", "wb", buffering=0) as file:
            for path, box in zip(shard.paths, shard.boxes, strict=True):
                image = timed("part: decode", functools.partial(small_picture, path, box, shard.side))
                raw = timed("part: bytes of the pixels", image.tobytes)
                timed("part: checksum", functools.partial(zlib.crc32, raw))
                timed("part: write", functools.partial(file.write, raw))

    works = [("in turns: decode", decode), ("in turns: decode and write", write), ("in turns: in parts", in_parts)]
    first = shard.first // len(shard.paths) % len(works)  # none of them is always the one that finds a file in no cache
    for name, work in works[first:] + works[:first]:
        timed(name, work)
    del taken["in turns: in parts"]
    for one in written:  # what is removed is not on the clock
        assert one is not None
        one.temporary.unlink()
    return taken


def read_and_dropped(asked: tuple[str, int, int]) -> int:
    """Pictures number `first` to `last` of the pack in a folder, decoded where they are compressed."""
    folder, first, last = asked
    pack = _opened(folder)
    return sum(pack.picture(i).shape[0] > 0 for i in range(first, last))


@functools.lru_cache(1)
def _opened(folder: str) -> Pack:
    return Pack.open(Path(folder))


def nothing(_: int) -> None:
    """What a process is asked that shall only come up."""
