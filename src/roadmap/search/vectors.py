"""The vectors of an index on disk: one file of rows that only grows, and a checksum for every stretch of it."""

from __future__ import annotations

import hashlib
import mmap
import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from roadmap.metrics.vectors import unit_vectors

Floats = NDArray[np.float32]
Slots = NDArray[np.int64]

STORAGES: dict[str, Any] = {"float32": np.dtype("<f4"), "float16": np.dtype("<f2")}
# Rows read at a time where a whole file is gone through.
TILE = 1 << 16


class DamagedError(ValueError):
    """A file of an index does not hold what was written; the message names the file."""


class DamagedEngineError(DamagedError):
    """The same of a file of its engine, which can be made again: an engine holds nothing that the index does not."""


class VectorFile:
    """Rows of unit vectors, float32 or float16; row i is slot i. Rows beyond those that are committed mean nothing.

    Nothing is buffered here: a row is read with one call to the system or through the map, so that what is resident is
    what the system keeps of the file, and can be taken back.
    """

    def __init__(self, path: Path, dim: int, storage: str) -> None:
        self.path, self.dim, self.dtype = Path(path), dim, STORAGES[storage]
        self.row_bytes = dim * self.dtype.itemsize
        try:
            self._file = os.open(self.path, os.O_RDONLY)
        except FileNotFoundError as error:
            raise DamagedError(f"{self.path} is gone; the index is damaged") from error
        self._map: NDArray[Any] = np.empty((0, dim), self.dtype)

    @staticmethod
    def create(path: Path) -> None:
        os.close(os.open(path, os.O_CREAT | os.O_TRUNC | os.O_WRONLY, 0o666))

    def append(self, start: int, rows: NDArray[Any]) -> str:
        """Write rows from slot `start` on, over whatever an interrupted write left there; their checksum.

        The rows are on the disk when this returns. They count once the caller has committed them.
        """
        content = np.ascontiguousarray(rows, self.dtype)
        with open(self.path, "r+b") as file:
            file.truncate(start * self.row_bytes)
            file.seek(start * self.row_bytes)
            file.write(content.data)
            file.flush()
            os.fsync(file.fileno())
        return hashlib.sha256(content.data).hexdigest()

    def check(self, start: int, count: int, checksum: str) -> None:
        """Raises DamagedError where `count` rows from `start` on are not those with this checksum."""
        size = os.fstat(self._file).st_size
        if size < (start + count) * self.row_bytes:
            raise DamagedError(f"{self.path} is damaged: {size} bytes, {(start + count) * self.row_bytes} expected")
        found, place, end = hashlib.sha256(), start * self.row_bytes, (start + count) * self.row_bytes
        while place < end:
            piece = os.pread(self._file, min(1 << 24, end - place), place)
            found.update(piece)
            place += len(piece)
        if found.hexdigest() != checksum:
            raise DamagedError(f"{self.path} is damaged: the checksum of rows {start} to {start + count - 1} differs")

    def tile(self, start: int, stop: int) -> NDArray[Any]:
        """Rows start..stop as they are stored, mapped, not copied."""
        if stop > len(self._map):
            whole = os.fstat(self._file).st_size // self.row_bytes
            if stop > whole:
                raise DamagedError(f"{self.path} is damaged: {whole} rows, {stop} expected")
            content = mmap.mmap(self._file, whole * self.row_bytes, access=mmap.ACCESS_COPY)
            self._map = np.frombuffer(content, self.dtype).reshape(whole, self.dim)
        return self._map[start:stop]

    def tensor(self, start: int, stop: int) -> Tensor:
        """`tile` as a tensor, mapped. It is not for writing: the pages are private, the file would not change."""
        return torch.from_numpy(self.tile(start, stop))

    def rows(self, slots: Slots) -> Floats:
        """Some rows, float32, each read by itself: what is read does not stay resident."""
        found = np.empty((len(slots), self.dim), self.dtype)
        if not len(slots):
            return found.astype(np.float32)
        into, size = memoryview(found.data).cast("B"), self.row_bytes
        for place, slot in enumerate(slots.tolist()):
            os.preadv(self._file, [into[place * size : (place + 1) * size]], slot * size)
        return found if self.dtype == np.float32 else found.astype(np.float32)

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def unit_rows(vectors: Tensor, dim: int) -> Floats:
    """Vectors (N, D) to be kept, as unit vectors, float32; errors as `unit_queries`."""
    if vectors.ndim != 2 or vectors.shape[1] != dim:
        raise ValueError(f"vectors must have shape (N, {dim}), got {tuple(vectors.shape)}")
    if len(vectors) == 0:
        return np.empty((0, dim), np.float32)
    return np.asarray(unit_vectors(vectors.cpu(), "vectors").float().numpy())


def unit_queries(vectors: Tensor | ArrayLike, dim: int) -> Floats:
    """Queries (Q, D) or (D,) as unit vectors, float32.

    Raises:
        ValueError: another shape, or a vector without a direction (zero, NaN, infinite); says which.
    """
    plain = vectors.detach().cpu().float().numpy() if isinstance(vectors, Tensor) else vectors
    with np.errstate(over="ignore"):  # beyond float32 it is infinite, which is told below
        given = np.asarray(plain, np.float32)
    if given.ndim == 1:
        given = given[None]
    if given.ndim != 2 or given.shape[1] != dim:
        raise ValueError(f"queries must have shape (Q, {dim}), got {given.shape}")
    squares = np.einsum("qd,qd->q", given, given)
    if len(given) and not (np.isfinite(squares) & (squares > 1e-30)).all():
        # slower, for very long and very short vectors, with words for those that have no direction
        return np.asarray(unit_vectors(given.astype(np.float64), "queries").float().numpy())
    return np.asarray(given / np.sqrt(squares)[:, None])


def exact_rank(vectors: VectorFile, query: Floats, slot: int, allowed: NDArray[np.bool_]) -> tuple[int, float]:
    """The rank of a slot (1: the best) among the allowed ones, and its score, in float32; ties by the lower slot."""
    scores = np.empty(len(allowed), np.float32)
    for top in range(0, len(allowed), TILE):
        stop = min(top + TILE, len(allowed))
        scores[top:stop] = vectors.tile(top, stop).astype(np.float32, copy=False) @ query
    before = scores[:slot] >= scores[slot]
    after = scores[slot + 1 :] > scores[slot]
    return 1 + int((before & allowed[:slot]).sum() + (after & allowed[slot + 1 :]).sum()), float(scores[slot])
