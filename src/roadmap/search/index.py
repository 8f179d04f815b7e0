"""An index: a folder of vectors, ids and metadata that can be searched, changed, and killed at any moment.

    index = Index.create("birds.index", embeddings.about, dim=384, columns={"place": "text", "year": "integer"})
    index.add(embeddings, {"place": [...], "year": [...]})
    index.build()
    Index.open("birds.index").search(query_vectors, k=10, where={"label": "owl", "year": {">=": 2020}})

The folder holds `index.json` (what it is), `rows.sqlite` (ids, metadata, journal), `vectors.bin`, `engine/` (what the
engine keeps, which can be made again) and `lock`. Vectors are on the disk before the transaction that counts them
commits, so at every moment the folder holds exactly what was committed.
"""

from __future__ import annotations

import shutil
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike
from torch import Tensor

from roadmap.locations import INDEX
from roadmap.search.columns import Column
from roadmap.search.engines import Engine, Mark, Place, Selection, check_engine, engine_named
from roadmap.search.filters import filter_from
from roadmap.search.manifest import check_origin, engine_for, manifest_for
from roadmap.search.metadata import Described, checked_metadata
from roadmap.search.results import Rank, Results
from roadmap.search.rows import FileFacts
from roadmap.search.storage import Storage
from roadmap.search.syncing import Changes, Embed, changes_of, sync_files
from roadmap.search.vectors import Floats, exact_rank, unit_queries, unit_rows

Queries = Described | Tensor | ArrayLike


class Index:
    """Open or make one with `Index.open` and `Index.create`; use it in a `with`, or `close` it.

    Searching is safe from several threads, also while one of them adds or removes.
    """

    def __init__(self, storage: Storage) -> None:
        self.storage, self.manifest, self.folder = storage, storage.manifest, storage.folder
        self._lock = threading.RLock()
        self._columns: dict[str, Column] = {}
        self._opened: Engine | None = None
        try:
            self._opened = self.engine = engine_named(self.manifest.engine, self._place())
            self._mark = self.engine.load()
            self.refresh()
        except BaseException:
            self.close()
            raise

    @classmethod
    def create(
        cls,
        folder: str | Path,
        about: Mapping[str, Any],
        dim: int,
        *,
        engine: str = "auto",
        columns: Mapping[str, str] | None = None,
        class_names: Sequence[str] = (),
        storage: str = "float32",
        options: Mapping[str, Any] | None = None,
    ) -> Index:
        """An empty index in a folder that does not exist yet or is empty, open for writing.

        Args:
            about: of the embeddings that will come, `Embeddings.about`: vectors of another model are refused.
            dim: their dimensions.
            engine: "exact", "faiss", "milvus", or "auto": exact on a GPU, else faiss where it is installed.
            columns: name -> "text", "integer", "real" or "boolean", beside `id` and `label` that are always there.
            class_names: what the labels are called.
            storage: "float32", or "float16" for half the space.
            options: of the engine; see its file.
        """
        manifest = manifest_for(about, dim, engine, columns or {}, class_names, storage, options or {})
        made = Storage.create(Path(folder), manifest)
        try:
            return cls(made)
        except BaseException:  # a server that does not answer, say: an empty index that cannot be opened is none
            (made.folder / INDEX).unlink(missing_ok=True)
            raise

    @classmethod
    def open(cls, folder: str | Path, *, write: bool = False, verify: bool = True) -> Index:
        """The index in a folder, as it was last committed.

        Args:
            write: to add and remove; one process at a time may.
            verify: compare all checksums, about a second for a million rows and another for each GB of vectors.

        Raises:
            FileNotFoundError: no index there.
            DamagedError: a file is not what was written; the message names it.
            BlockingIOError: another process is writing.
        """
        return cls(Storage.open(Path(folder), write, verify))

    @classmethod
    def exchange_engine(cls, folder: str | Path, engine: str, options: Mapping[str, Any] | None = None) -> Index:
        """Open an index for writing with another engine, or with its own made anew; `build` it next.

        Nothing is embedded again: an engine holds nothing that the index does not. The index keeps its engine until the
        other one has been opened.
        """
        chosen, told = engine_for(engine), dict(options or {})
        check_engine(chosen, told)
        storage = Storage.open(Path(folder), write=True, verify=True)
        own, aside = storage.folder / "engine", storage.folder / "engine.old"
        shutil.rmtree(aside, ignore_errors=True)
        if own.exists():
            own.rename(aside)
        storage.manifest = replace(storage.manifest, engine=chosen, options=told)
        exchanged: Index | None = None
        try:
            exchanged = cls(storage)
            storage.manifest.save(storage.folder)
        except BaseException:
            (exchanged or storage).close()
            shutil.rmtree(own, ignore_errors=True)
            if aside.exists():
                aside.rename(own)
            raise
        shutil.rmtree(aside, ignore_errors=True)
        return exchanged

    def add(
        self,
        embeddings: Described,
        metadata: Mapping[str, Sequence[Any]] | None = None,
        *,
        replace: bool = False,
        remove: Sequence[str] = (),
        files: Mapping[str, FileFacts] | None = None,
    ) -> int:
        """Add vectors with their ids, labels and metadata (column -> one value each, None where missing): all or none.

        Args:
            replace: ids that are there already get the new vector and metadata; else they are refused.
            remove: ids to remove in the same step, where they are there.
            files: what to remember of the files they come from, for `changes`; in the same step.

        Returns:
            How many vectors the index holds now.
        """
        self.storage.check_writable()
        check_origin(self.manifest.about, embeddings.about, "these vectors")
        columns = checked_metadata(embeddings, metadata or {}, self.manifest.columns)
        rows = unit_rows(embeddings.vectors, self.manifest.dim)
        with self._lock:
            self.storage.add(columns, rows, replace, remove, files or {})
            self.refresh()
        return len(self)

    def remove(self, ids: Sequence[str], *, missing: str = "raise") -> int:
        """Remove rows by their ids: all or none. How many there were.

        Args:
            missing: "raise", or "ignore" ids that are not there.
        """
        self.storage.check_writable()
        if isinstance(ids, str):
            raise TypeError(f"ids must be a list of ids, got the text {ids!r}")
        with self._lock:
            count = self.storage.remove(ids, missing)
            self.refresh()
        return count

    def search(self, vectors: Queries, k: int = 10, where: Mapping[str, Any] | None = None, offset: int = 0) -> Results:
        """The k nearest of each query by cosine, highest score first, after `offset` that are left out.

        Args:
            vectors: (Q, D) or (D,), or Embeddings, which are refused where they come from another model.
            where: a filter; see `roadmap.search.filters`.
        """
        if k < 1 or offset < 0:
            raise ValueError(f"k must be at least 1 and offset at least 0, got k={k}, offset={offset}")
        queries = self._queries(vectors)
        reach = min(k + offset, max(1, self._mark.slots))
        scores, slots = self.engine.search(queries, reach, self.selection(where))
        return Results.of(scores[:, offset:], slots[:, offset:], self.storage.rows)

    def rank_of(self, vector: Queries, id: str, where: Mapping[str, Any] | None = None) -> Rank:
        """Where an expected picture stands: its exact rank (1 is first) and score, and whether the filter lets it pass.

        Every vector is compared in float32, whatever the engine; equal scores count by who came first.
        """
        self.refresh()
        slot = self.storage.rows.slots_of([id]).get(id)
        if slot is None or slot >= self._mark.slots:
            raise KeyError(f"{id!r} is not in the index")
        query = self._queries(vector)
        if len(query) != 1:
            raise ValueError(f"one vector is needed, got {len(query)}")
        selection, removed = self.selection(where), self.storage.rows.removed_since(0)
        allowed = np.ones(self._mark.slots, np.bool_) if selection is None else selection.mask.copy()
        allowed[removed[removed < len(allowed)]] = False
        rank, score = exact_rank(self.storage.vectors, query[0], slot, allowed)
        return Rank(rank, score, int(allowed.sum()), bool(allowed[slot]))

    def build(self) -> dict[str, Any]:
        """Make searching fast for what is there now, keep that, and say how good it is: `facts()`."""
        self.storage.check_writable()
        with self._lock:
            self.engine.build()
            self.engine.save(self._mark)
        return self.facts()

    def refresh(self) -> None:
        """Take up what was committed since, here or by another process; the engine is brought to that state."""
        with self._lock:
            commit, stop = self.storage.rows.last_commit(), self.storage.rows.slot_count()
            if Mark(stop, commit) == self._mark:
                return
            if stop > self._mark.slots:
                self.engine.add(self._mark.slots, stop)
            self.engine.remove(self.storage.rows.removed_since(self._mark.commit))
            for name, column in self._columns.items():
                column.extend(self.storage.rows.column(name, len(column), stop))
            self._mark = Mark(stop, commit)
            if self.storage.writable:
                self.engine.save(self._mark)

    def changes(self, files: Mapping[str, Path]) -> Changes:
        """Which of these files (id -> path) are new or changed since they were indexed, and which are gone."""
        return changes_of(self.storage.rows.files(), files)

    def sync(self, files: Mapping[str, Path], embed: Embed, at_once: int = 1024) -> Changes:
        """Make the index hold exactly these files: embed the new and changed, remove the gone. What was done.

        Files are taken `at_once` at a time, each time in one step: after an interruption the next call goes on from
        there. Files that `embed` leaves out, because they cannot be read, are remembered with the reason in its
        `about["skipped"]`, and not tried again until they change.

        Args:
            files: id -> path of every picture that the index should hold.
            embed: ids -> their Embeddings, with metadata or None.
        """
        self.storage.check_writable()
        return sync_files(self, files, embed, at_once)

    def facts(self) -> dict[str, Any]:
        """What the index is, in plain values: for people, and for a service to show."""
        slots = self._mark.slots
        return {
            "vectors": len(self),
            "removed": slots - len(self),
            "dim": self.manifest.dim,
            "storage": self.manifest.storage,
            "bytes": sum(f.stat().st_size for f in self.folder.rglob("*") if f.is_file()),
            "engine": {"name": self.manifest.engine, **self.engine.facts()},
            "columns": dict(self.manifest.columns),
            "classes": len(self.manifest.class_names),
            "about": dict(self.manifest.about),
        }

    def ids(self) -> list[str]:
        """All ids, in the order they came."""
        return self.storage.rows.ids()

    def vectors_of(self, ids: Sequence[str]) -> Floats:
        """The stored unit vectors of some ids: to search by a picture that is in the index."""
        slots = self.storage.rows.slots_of(ids)
        missing = [name for name in ids if name not in slots]
        if missing:
            raise KeyError(f"{missing[0]!r} is not in the index")
        return self.storage.vectors.rows(np.array([slots[name] for name in ids], np.int64))

    def __len__(self) -> int:
        return self.storage.rows.live_count()

    def close(self) -> None:
        try:
            if self._opened is not None:
                self._opened.close()
        finally:
            self.storage.close()

    def __enter__(self) -> Index:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def _place(self) -> Place:
        folder, rows, vectors = self.folder / "engine", self.storage.rows, self.storage.vectors
        columns, options, writable = self.manifest.columns, self.manifest.options, self.storage.writable
        if writable:
            folder.mkdir(exist_ok=True)
        return Place(folder, vectors, columns, rows.column, lambda: rows.removed_since(0), options, writable)

    def _queries(self, vectors: Queries) -> Floats:
        if hasattr(vectors, "about") and hasattr(vectors, "vectors"):
            check_origin(self.manifest.about, vectors.about, "these queries")
            return unit_queries(vectors.vectors, self.manifest.dim)
        return unit_queries(vectors, self.manifest.dim)

    def selection(self, where: Mapping[str, Any] | None) -> Selection | None:
        if not where:
            return None
        return Selection(filter_from(where, self.manifest.columns), self._column, self._mark.slots)

    def _column(self, name: str) -> Column:
        with self._lock:
            if name not in self._columns:
                values = self.storage.rows.column(name, 0, self._mark.slots)
                self._columns[name] = Column(self.manifest.columns[name], values)
            return self._columns[name]
