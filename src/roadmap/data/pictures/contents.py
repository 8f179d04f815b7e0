"""What the files of a pack say, read and checked: nothing is believed before it fits, whoever wrote it.

    pixels-00000-<hash>.u8     (H, W, 3) pictures one after another, `shard_length` to a file
    pixels-00000-<hash>.json   their heights and widths, and what could not be decoded
    index-<hash>.npy           (N, 6) int64: shard, offset in bytes, height, width, source size, source mtime in ns
    pack.json                  what the pack holds; written last, so a folder with it is complete

A compressed pack holds encoded bytes instead (`compression`), in `.jpg` files, with two more columns in its index:
length in bytes and their CRC-32, which is looked at whenever a picture is decoded.

The hash of a shard names the sources (path, box, size, mtime) and the side, so an interrupted or outdated pack keeps
every shard that is still right. pack.json and the index carry a digest of what they say. JSON, npy without pickle, and
raw bytes: nothing that is read can run code. Nothing larger than the files themselves is ever allocated.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from roadmap.data.pictures.images import MAX_PIXELS
from roadmap.data.records import Ints

FORMAT, VERSION, COMPRESSED = "roadmap-pack", 1, 2  # a program that knows of no compressed packs refuses version 2
CHANNELS = 3
SHARD_COLUMN, OFFSET, HEIGHT, WIDTH, SOURCE_SIZE, SOURCE_MTIME, LENGTH, CHECKSUM = range(8)
COLUMNS = (6, 8)  # of the index of a pack, and of a compressed one
NO_SOURCE = -2  # instead of size and time, for pictures that were drawn
DESCRIPTION = "pack.json"

_SEAL = b'{"digest": "%s", %s'
_LARGEST_DESCRIPTION = 1 << 30  # bytes; half a million pictures take 60 million
_SHARD_NAME = re.compile(r"pixels-\d{5,}-[0-9a-f]{16}\.(u8|jpg)")
_INDEX_NAME = re.compile(r"index-[0-9a-f]{16}\.npy")
# as numpy writes it, and read here, so that no other dtype or shape is ever looked into
_NPY = 10  # bytes: magic, version, and how long the rest of the header is
_NPY_HEADER = re.compile(
    rb"\x93NUMPY\x01\x00..\{'descr': '<i8', 'fortran_order': False, 'shape': \((\d{1,18}), (\d{1,18})\), \} *\n",
    re.DOTALL,
)


class PackError(ValueError):
    """A pack that cannot be used, and what to do about it."""


class PlaceError(PackError):
    """A pack that cannot be written where it is to lie: there is no room, or no permission."""


@dataclass(frozen=True, eq=False)
class Contents:
    """What a folder with a pack holds; the attributes are those of a `Pack`."""

    side: int
    root: Path
    paths: tuple[str, ...]
    keys: tuple[str, ...]
    index: Ints
    shards: tuple[NDArray[np.uint8], ...]
    failures: dict[str, str]
    quality: int | None
    again: int


def contents(folder: Path) -> Contents:
    """What is in a folder.

    Raises:
        PackError: when there is no pack, it is incomplete, damaged, of another version, or says what cannot be.
    """
    try:
        raw = _bytes(folder / DESCRIPTION)
        about = _object(raw, DESCRIPTION)
    except FileNotFoundError as error:
        raise PackError(f"no complete pack in {folder}; make one with `roadmap data pack`") from error
    except (OSError, ValueError) as error:
        raise PackError(f"{folder}/{DESCRIPTION} is damaged ({error}); run `roadmap data pack` again") from error
    if about.get("format") != FORMAT or about.get("version") not in (VERSION, COMPRESSED):
        versions = f"{VERSION} or {COMPRESSED}"
        raise PackError(f"{folder} is not a pack of version {versions}; run `roadmap data pack` again")
    try:
        if not _is_sealed(raw):
            raise ValueError(f"{DESCRIPTION} is not what was written, or was written by an earlier version")
        return _checked_contents(folder, about)
    except (OSError, ValueError, KeyError) as error:
        if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
            raise PackError(
                f"{folder} is in {len(about['shards'])} files, more than this process may have open; raise the limit "
                "with `ulimit -n`"
            ) from error
        raise PackError(f"{folder} is damaged ({_words(error)}); run `roadmap data pack` again") from error


def description_of(path: Path) -> dict[str, Any]:
    """The JSON object in a file.

    Raises:
        OSError, ValueError: it cannot be read, or is something else.
    """
    return _object(_bytes(path), path.name)


def sealed_bytes(about: dict[str, Any]) -> bytes:
    """pack.json: the digest of all that comes after it, then what the pack holds."""
    rest = json.dumps(about).encode()[1:]
    return _SEAL % (hashlib.sha256(rest).hexdigest().encode(), rest)


def _is_sealed(raw: bytes) -> bool:
    start = len(_SEAL % (b"0" * 64, b""))
    return raw == _SEAL % (hashlib.sha256(raw[start:]).hexdigest().encode(), raw[start:])


def index_name(index: Ints) -> str:
    """The file of an index, named by its content."""
    return f"index-{hashlib.sha256(index.tobytes()).hexdigest()[:16]}.npy"


def lengths_of(index: Ints) -> Ints:
    """Bytes that a pack holds of each picture."""
    compressed = index.shape[1] == COLUMNS[True]
    return index[:, LENGTH] if compressed else index[:, HEIGHT] * index[:, WIDTH] * CHANNELS


def _checked_contents(folder: Path, about: dict[str, Any]) -> Contents:
    compressed = about["version"] == COMPRESSED
    keys, paths = _texts(about, "keys"), _texts(about, "paths")
    if len(keys) != len(paths):
        raise ValueError(f"{len(keys)} keys of {len(paths)} pictures")
    failures = about["failures"]
    if not isinstance(failures, dict) or not all(isinstance(reason, str) for reason in failures.values()):
        raise ValueError("failures are not reasons by the name of a picture")
    side, root = _number(about, "side", 1, MAX_PIXELS), about["root"]
    if not isinstance(root, str):
        raise ValueError(f"the root is {root!r:.80}, not a folder")
    quality = _number(about, "quality", 1, 100) if compressed else None
    again = _number(about, "again", 0, len(keys)) if compressed else 0
    index = _index(folder, about["index"], (len(keys), COLUMNS[compressed]))
    shards = _shards(folder, about["shards"])
    _check_pictures(index, side)
    _check_places(index, [len(shard) for shard in shards])
    return Contents(side, Path(root), paths, keys, index, shards, failures, quality, again)


def _words(error: Exception) -> str:
    return f"{DESCRIPTION} says nothing of its {error}" if isinstance(error, KeyError) else str(error)


def _texts(about: dict[str, Any], name: str) -> tuple[str, ...]:
    found = about[name]
    if not isinstance(found, list) or not all(isinstance(text, str) for text in found):
        raise ValueError(f"{name} are not a list of names")
    return tuple(found)


def _number(about: dict[str, Any], name: str, low: int, high: int) -> int:
    found = about[name]
    if type(found) is not int or not low <= found <= high:
        raise ValueError(f"{name} is {found!r:.80}, not a number from {low} to {high}")
    return found


def _bytes(path: Path) -> bytes:
    with _plain_file(path) as file:
        if (size := os.fstat(file.fileno()).st_size) > _LARGEST_DESCRIPTION:
            raise ValueError(f"{path.name} has {size:,} bytes, more than any that is written")
        return file.read(size)


def _object(raw: bytes, name: str) -> dict[str, Any]:
    try:
        found = json.loads(raw)
    except RecursionError:
        raise ValueError(f"{name} is nested too deeply") from None
    if not isinstance(found, dict):
        raise ValueError(f"{name} holds no JSON object")
    return found


def _plain_file(path: Path) -> BinaryIO:
    """A file of a pack, which is a plain one and in the folder itself: no link, no pipe that is waited for."""
    flags = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    try:
        handle = os.open(path, flags)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise ValueError(f"{path.name} is a link to another file") from error
        raise
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise ValueError(f"{path.name} is not a file")
    return os.fdopen(handle, "rb")


def _index(folder: Path, name: Any, shape: tuple[int, int]) -> Ints:
    if not isinstance(name, str) or not _INDEX_NAME.fullmatch(name):
        raise ValueError(f"{name!r:.80} is no name of an index")
    with _plain_file(folder / name) as file:
        head = file.read(_NPY)
        head += file.read(int.from_bytes(head[8:], "little"))
        found = _NPY_HEADER.fullmatch(head)
        if found is None or tuple(map(int, found.groups())) != shape:
            raise ValueError(f"{name} holds no index of int64 {shape}, of {shape[0]} pictures")
        size = shape[0] * shape[1] * 8
        if (left := os.fstat(file.fileno()).st_size - len(head)) != size:
            raise ValueError(f"{name} has {left} bytes of numbers instead of {size}")
        index = np.frombuffer(file.read(size), "<i8").reshape(shape).astype(np.int64)
    if name != index_name(index):
        raise ValueError(f"{name} is not what was written")
    return index


def _shards(folder: Path, described: Any) -> tuple[NDArray[np.uint8], ...]:
    if not isinstance(described, list):
        raise ValueError("shards are not a list of files")
    names: set[str] = set()
    for item in described:
        name, size = item if isinstance(item, list) and len(item) == 2 else (item, None)
        if not isinstance(name, str) or not _SHARD_NAME.fullmatch(name) or name in names:
            raise ValueError(f"{name!r:.80} is no name of a shard, or that of two")
        if type(size) is not int:
            raise ValueError(f"{name} is said to have {size!r:.80} bytes")
        names.add(name)
    try:
        return tuple(_memory_map(folder / name, size) for name, size in described)
    except OSError as error:
        if error.errno != errno.EMFILE or not _raise_limit_of_files():
            raise
    return tuple(_memory_map(folder / name, size) for name, size in described)


def _raise_limit_of_files() -> bool:
    """To what the system allows; whether that is more than before. A memory map keeps its file open."""
    try:
        import resource
    except ImportError:  # not on this system
        return False
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == hard:
        return False
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return True


def _memory_map(path: Path, size: int) -> NDArray[np.uint8]:
    with _plain_file(path) as file:
        if (found := os.fstat(file.fileno()).st_size) != size:
            raise ValueError(f"{path.name} has {found} bytes instead of {size}")
        if size == 0:  # an empty file cannot be mapped
            return np.zeros(0, np.uint8)
        return np.memmap(file, np.uint8, "r", shape=(size,))


def _check_pictures(index: Ints, side: int) -> None:
    """No picture is larger than one that could have been packed, so that no memory is asked for what is not there."""
    height, width = index[:, HEIGHT], index[:, WIDTH]
    short, long = np.minimum(height, width), np.maximum(height, width)
    fits = (short >= 0) & (short <= side) & (long <= MAX_PIXELS) & ((short == 0) == (long == 0))
    fits &= np.where(fits, height, 0) * np.where(fits, width, 0) <= MAX_PIXELS
    if not fits.all():
        i = int(np.argmin(fits))
        raise ValueError(f"picture {i} is said to have {width[i]} x {height[i]} pixels, in a pack of side {side}")
    if index.shape[1] != COLUMNS[True]:
        return
    length, checksum = index[:, LENGTH], index[:, CHECKSUM]
    fits = ((length > 0) == (height > 0)) & (checksum >= 0) & (checksum < 1 << 32)
    if not fits[length >= 0].all():
        i = int(np.argmin(fits))
        raise ValueError(f"picture {i} of {width[i]} x {height[i]} pixels is said to be in {length[i]} bytes")


def _check_places(index: Ints, sizes: list[int]) -> None:
    """Every picture is inside its file, and begins where the one before it ends: none reaches into another."""
    ends = np.asarray([0, *sizes], dtype=np.int64)
    shard, offset, length = index[:, SHARD_COLUMN], index[:, OFFSET], lengths_of(index)
    inside = (shard >= 0) & (shard < len(sizes)) & (offset >= 0) & (length >= 0)
    known = np.where(inside, shard, -1) + 1
    inside &= (offset <= ends[known]) & (length <= ends[known] - np.where(inside, offset, 0))
    if not inside.all():
        raise ValueError(f"picture {int(np.argmin(inside))} reaches outside its file")
    begins = np.cumsum(length) - length == np.cumsum(ends)[shard] + offset
    if not begins.all():
        raise ValueError(f"picture {int(np.argmin(begins))} does not begin where the one before it ends")
    if int(length.sum()) != sum(sizes):
        raise ValueError(f"its pictures take {int(length.sum())} bytes of {sum(sizes)}")
