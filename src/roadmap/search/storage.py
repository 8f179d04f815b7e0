"""What an index holds, on disk: changed in steps that are there whole or not at all, whenever the process is killed.

Vectors are written and on the disk before the transaction that counts them commits. Rows of vectors that no committed
transaction counts mean nothing, and the next write goes over them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from roadmap.search.manifest import Manifest, WriterLock, check_room, make_room
from roadmap.search.rows import FileFacts, Rows
from roadmap.search.vectors import Floats, VectorFile


class Storage:
    """The folder of an index without its engine: manifest, rows, vectors, and the lock of the one writer."""

    def __init__(self, folder: Path, manifest: Manifest, writer: WriterLock | None) -> None:
        self.folder, self.manifest, self._writer = folder, manifest, writer
        self.rows = Rows(folder / "rows.sqlite", manifest.columns)
        self.vectors = VectorFile(folder / "vectors.bin", manifest.dim, manifest.storage)

    @classmethod
    def create(cls, folder: Path, manifest: Manifest) -> Storage:
        if folder.exists():
            check_room(folder)  # first: the lock is a file, which a folder of anything else should not get
        folder.mkdir(parents=True, exist_ok=True)
        writer = WriterLock(folder)
        try:
            make_room(folder)
            Rows.create(folder / "rows.sqlite", manifest.columns)
            VectorFile.create(folder / "vectors.bin")
            manifest.save(folder)  # last: a folder without it holds no index
            return cls(folder, manifest, writer)
        except BaseException:
            writer.release()
            raise

    @classmethod
    def open(cls, folder: Path, write: bool, verify: bool) -> Storage:
        manifest = Manifest.load(folder)
        writer = WriterLock(folder) if write else None
        try:
            storage = cls(folder, manifest, writer)
            if verify:
                storage.check()
            return storage
        except BaseException:
            if writer is not None:
                writer.release()
            raise

    @property
    def writable(self) -> bool:
        return self._writer is not None

    def check_writable(self) -> None:
        if self._writer is None:
            raise PermissionError(f"{self.folder} was opened for searching; open it with write=True to change it")

    def check(self) -> None:
        """Compare everything with its checksums. Raises DamagedError, which names the file."""
        self.rows.check()
        for start, count, checksum in self.rows.blocks():
            self.vectors.check(start, count, checksum)

    def add(
        self,
        columns: Mapping[str, Sequence[Any]],
        vectors: Floats,
        replace: bool,
        remove: Sequence[str],
        files: Mapping[str, FileFacts],
    ) -> None:
        """In one step: new rows, the removal of those they replace and of others, and what is known of their files."""
        present = self.rows.slots_of(columns["id"])
        if present and not replace:
            raise ValueError(
                f"{len(present)} of these ids are in the index already, first {next(iter(present))!r}; "
                "remove them first, or add with replace=True"
            )
        start = self.rows.slot_count()
        checksum = self.vectors.append(start, vectors) if len(vectors) else ""
        with self.rows.commit("add") as commit:
            self.rows.mark_removed([*present.values(), *self.rows.slots_of(remove).values()], commit)
            if len(vectors):
                self.rows.insert(start, columns, checksum)
            self.rows.put_files(files)

    def remove(self, ids: Sequence[str], missing: str) -> int:
        present = self.rows.slots_of(ids)
        unknown = [name for name in ids if name not in present]
        if unknown and missing == "raise":
            raise KeyError(f"{len(unknown)} of these ids are not in the index, first {unknown[0]!r}")
        with self.rows.commit("remove") as commit:
            self.rows.mark_removed(list(present.values()), commit)
            self.rows.forget_files(list(ids))
        return len(present)

    def close(self) -> None:
        self.rows.close()
        self.vectors.close()
        if self._writer is not None:
            self._writer.release()
