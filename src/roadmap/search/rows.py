"""Ids, metadata and the journal of an index: one SQLite file, whose transaction is what "committed" means.

SQLite, because it is in the standard library, survives being killed at any instruction, changes ids and metadata in one
step, and finds a row by its slot or id without holding a million of them in memory. Its journal is the plain one, not
a write-ahead log: between commits the index is one file that can be copied. SQLite does not notice a flipped bit inside
a value, so each row carries a checksum.
"""

from __future__ import annotations

import json
import sqlite3
import threading
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from roadmap.search.vectors import DamagedError, Slots

_SQL = {"text": "TEXT", "integer": "INTEGER", "real": "REAL", "boolean": "INTEGER"}
# Another process's commit is waited for, this many seconds.
PATIENCE = 60.0


@dataclass(frozen=True)
class FileFacts:
    """What tells whether a file has changed. `problem`: why it could not be embedded; it has no row then."""

    size: int
    mtime_ns: int
    digest: str
    problem: str | None = None


class Rows:
    """The table. A removed row stays as a mark that its slot is dead, so that slots are never used twice."""

    def __init__(self, path: Path, columns: Mapping[str, str]) -> None:
        self.path, self.columns = Path(path), dict(columns)
        self._lock = threading.RLock()  # one connection, used from any thread
        # `id` and then c0, c1, ...: names of columns are the user's, and never become SQL
        self._fields = ["id", *(f"c{i}" for i in range(len(self.columns) - 1))]
        if list(self.columns)[:1] != ["id"]:
            raise ValueError(f"the first column must be 'id', got {', '.join(self.columns)}")
        with self._named_errors():
            self._base = sqlite3.connect(
                f"{self.path.absolute().as_uri()}?mode=rw",  # never makes an empty one where there is none
                PATIENCE,
                isolation_level=None,
                check_same_thread=False,
                uri=True,
            )

    @staticmethod
    def create(path: Path, columns: Mapping[str, str]) -> None:
        """An empty table; columns are name -> kind, `id` first."""
        kinds = [_SQL[kind] for kind in list(columns.values())[1:]]
        fields = "".join(f", c{i} {kind}" for i, kind in enumerate(kinds))
        base = sqlite3.connect(path)
        base.executescript(
            "BEGIN;"
            "CREATE TABLE commits (number INTEGER PRIMARY KEY, what TEXT NOT NULL);"
            "CREATE TABLE blocks (start INTEGER PRIMARY KEY, count INTEGER NOT NULL, checksum TEXT NOT NULL);"
            "CREATE TABLE rows (slot INTEGER PRIMARY KEY, id TEXT NOT NULL, removed INTEGER,"
            f" checksum INTEGER NOT NULL{fields});"
            "CREATE UNIQUE INDEX ids ON rows (id) WHERE removed IS NULL;"
            "CREATE INDEX removals ON rows (removed) WHERE removed IS NOT NULL;"
            "CREATE TABLE files (id TEXT PRIMARY KEY, size INTEGER NOT NULL, mtime_ns INTEGER NOT NULL,"
            " digest TEXT NOT NULL, problem TEXT);"
            "COMMIT;"
        )
        base.close()

    @contextmanager
    def commit(self, what: str) -> Iterator[int]:
        """A transaction: everything inside is there afterwards, or nothing. Its number."""
        with self._lock, self._named_errors():
            self._base.execute("PRAGMA synchronous = FULL")
            self._base.execute("BEGIN IMMEDIATE")
            try:
                self._base.execute("INSERT INTO commits (what) VALUES (?)", (what,))
                yield self.last_commit()
                self._base.execute("COMMIT")
            except BaseException:
                if self._base.in_transaction:
                    self._base.execute("ROLLBACK")
                raise

    def insert(self, start: int, columns: Mapping[str, Sequence[Any]], checksum: str) -> None:
        """Rows from slot `start` on, whose vectors have this checksum; inside a commit."""
        values = zip(*(columns[name] for name in self.columns), strict=True)
        rows = [(start + i, row[0], _row_checksum(start + i, row), *row[1:]) for i, row in enumerate(values)]
        marks = ", ".join("?" * (len(self.columns) + 2))
        fields = ", ".join(["slot", "id", "checksum", *self._fields[1:]])
        self._base.executemany(f"INSERT INTO rows ({fields}) VALUES ({marks})", rows)
        self._base.execute("INSERT INTO blocks VALUES (?, ?, ?)", (start, len(rows), checksum))

    def mark_removed(self, slots: Sequence[int], commit: int) -> None:
        """Inside a commit."""
        self._base.executemany("UPDATE rows SET removed = ? WHERE slot = ?", [(commit, slot) for slot in slots])

    def put_files(self, files: Mapping[str, FileFacts]) -> None:
        """Remember files; inside a commit."""
        rows = [(name, f.size, f.mtime_ns, f.digest, f.problem) for name, f in files.items()]
        self._base.executemany("INSERT OR REPLACE INTO files VALUES (?, ?, ?, ?, ?)", rows)

    def forget_files(self, names: Sequence[str]) -> None:
        """Inside a commit."""
        self._base.executemany("DELETE FROM files WHERE id = ?", [(name,) for name in names])

    def files(self) -> dict[str, FileFacts]:
        found = self._all("SELECT id, size, mtime_ns, digest, problem FROM files")
        return {name: FileFacts(*facts) for name, *facts in found}

    def last_commit(self) -> int:
        return int(self._all("SELECT coalesce(max(number), 0) FROM commits")[0][0])

    def slot_count(self) -> int:
        """Slots that were ever given out."""
        return int(self._all("SELECT coalesce(max(slot) + 1, 0) FROM rows")[0][0])

    def live_count(self) -> int:
        removed = self._all("SELECT count(*) FROM rows WHERE removed IS NOT NULL")[0][0]
        return int(self._all("SELECT count(*) FROM rows")[0][0]) - int(removed)

    def removed_since(self, commit: int) -> Slots:
        found = self._all("SELECT slot FROM rows WHERE removed > ? ORDER BY slot", commit)
        return np.array([slot for (slot,) in found], np.int64)

    def slots_of(self, ids: Sequence[str]) -> dict[str, int]:
        """id -> slot, of those ids that are there."""
        found = self._all(
            "SELECT rows.id, slot FROM json_each(?) AS wanted JOIN rows ON rows.id = wanted.value"
            " WHERE removed IS NULL",
            json.dumps(list(ids)),
        )
        asked = set(ids)  # SQLite ends a name at a NUL, and finds another
        return {name: slot for name, slot in found if name in asked}

    def ids(self) -> list[str]:
        """All live ids in the order of their slots."""
        return [name for (name,) in self._all("SELECT id FROM rows WHERE removed IS NULL ORDER BY slot")]

    def metadata(self, slots: Sequence[int]) -> dict[int, dict[str, Any]]:
        """slot -> {column: value}, `id` among them, of the live ones among these slots."""
        found = self._all(
            f"SELECT slot, {self._listed()} FROM json_each(?) AS wanted JOIN rows ON slot = wanted.value"
            " WHERE removed IS NULL",
            json.dumps(list(slots)),
        )
        return {slot: self._row(values) for slot, *values in found}

    def column(self, name: str, start: int, stop: int) -> list[Any]:
        """The values of one column for slots start..stop, dead ones too."""
        field = self._fields[list(self.columns).index(name)]
        found = self._all(f"SELECT {field} FROM rows WHERE slot >= ? AND slot < ? ORDER BY slot", start, stop)
        values = [value for (value,) in found]
        return [None if v is None else bool(v) for v in values] if self.columns[name] == "boolean" else values

    def blocks(self) -> list[tuple[int, int, str]]:
        """(start, count, checksum) of every stretch of vectors."""
        return self._all("SELECT start, count, checksum FROM blocks ORDER BY start")

    def check(self) -> None:
        """Raises DamagedError where the file is not the table that was written."""
        with self._lock, self._named_errors():
            verdict = self._base.execute("PRAGMA quick_check(1)").fetchone()[0]
            if verdict != "ok":
                raise DamagedError(f"{self.path} is damaged: {verdict}")
            expected = 0
            for slot, checksum, *row in self._base.execute(
                f"SELECT slot, checksum, {self._listed()} FROM rows ORDER BY slot"
            ):
                if slot != expected or checksum != _row_checksum(slot, row):
                    raise DamagedError(f"{self.path} is damaged: the row of slot {expected} is not what was written")
                expected += 1
            covered = sum(count for _, count, _ in self.blocks())
            if covered != expected:
                raise DamagedError(f"{self.path} is damaged: {expected} rows, vectors for {covered}")

    def close(self) -> None:
        self._base.close()

    def _listed(self) -> str:
        return ", ".join(f"rows.{field}" for field in self._fields)

    def _row(self, values: Sequence[Any]) -> dict[str, Any]:
        kinds = self.columns.items()
        return {
            name: bool(value) if kind == "boolean" and value is not None else value
            for (name, kind), value in zip(kinds, values, strict=True)
        }

    def _all(self, query: str, *values: Any) -> list[Any]:
        with self._lock, self._named_errors():
            return self._base.execute(query, values).fetchall()

    @contextmanager
    def _named_errors(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.OperationalError as error:
            if "locked" in str(error):
                raise TimeoutError(f"{self.path} was in use by another process for {PATIENCE:.0f} s") from error
            raise DamagedError(f"{self.path} cannot be read: {error}") from error
        except sqlite3.DatabaseError as error:
            if isinstance(error, sqlite3.IntegrityError):
                raise
            raise DamagedError(f"{self.path} is damaged: {error}") from error


def _row_checksum(slot: int, row: Sequence[Any]) -> int:
    # 1 and True, 2.0 and 2 come back from SQLite as they went in, by column; booleans as integers
    plain = [int(value) if isinstance(value, bool) else value for value in row]
    return zlib.crc32(json.dumps([slot, *plain]).encode())
