"""The Milvus engine: a file (milvus-lite), a server or a cluster, by one client.

The collection is a copy of the index's vectors and metadata. `save` flushes it and writes down how far it goes; what
came after is put in again when the index is opened, so that neither side can be killed at a bad moment.

Options: uri (a server's address; none: a file beside the index), collection (its name), shards (that share out
writing, on a cluster), M, efConstruction, ef, timeout (seconds that a call may take).
A server's token is never written down: it comes from the environment, MILVUS_TOKEN.
"""

from __future__ import annotations

import importlib
import json
import os
import secrets
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from roadmap.atomic import whole_file
from roadmap.search.engines import Mark, Place, Selection, no_results
from roadmap.search.engines.expressions import expression, kept_value
from roadmap.search.engines.recall import Questions
from roadmap.search.vectors import DamagedError, Floats, Slots

pymilvus: Any = importlib.import_module("pymilvus")
grpc: Any = importlib.import_module("grpc")  # pymilvus speaks through it
DataType, MilvusClient = pymilvus.DataType, pymilvus.MilvusClient

TYPES = {
    "text": DataType.VARCHAR,
    "integer": DataType.INT64,
    "real": DataType.DOUBLE,
    "boolean": DataType.BOOL,
}
EMPTY: dict[str, Any] = {"text": "", "integer": 0, "real": 0.0, "boolean": False}
AT_ONCE = 4096  # rows a call inserts; a message may hold 64 MB
MOST = 16_384  # results of one query that a server gives
FLUSH = 8192  # changes that wait to be flushed
LONG = 3600.0  # seconds for building, flushing and loading, which grow with the collection
# A server that has just started, or lost a node, refuses what goes to a node that is not back yet. That lasts seconds.
ABSENT, RETURN = "node not found", 60.0
RECORD = "milvus.json"
# A file is served within this process, by a server that takes a client which asks every 10 s whether it is still there,
# as this one does, for a nuisance: a call of 40 s is broken off, and the client repeats it. So it does not ask.
QUIET = {"grpc.keepalive_time_ms": 2**31 - 1}
_users: Counter[str] = Counter()  # engines of this process on each file, which share what has it open


class MilvusEngine:
    name = "milvus"

    def __init__(self, place: Place) -> None:
        self.place = place
        options = place.options
        self._file = "uri" not in options
        self.uri = str((place.folder / "milvus.db").absolute() if self._file else options["uri"])
        self._fields = {name: f"c{i}" for i, name in enumerate(place.columns)}
        self._depth = {"M": int(options.get("M", 16)), "efConstruction": int(options.get("efConstruction", 200))}
        self._ef, self._patience = int(options.get("ef", 128)), float(options.get("timeout", 60))
        self._record: dict[str, Any] = {}
        self._mark, self._unflushed = Mark(), 0
        self._sure = False  # whether the collection holds nothing beyond what it should
        self._client = self._connected()

    def _connected(self) -> Any:
        token, options = os.environ.get("MILVUS_TOKEN", ""), QUIET if self._file else {}
        try:
            client = MilvusClient(self.uri, token=token, timeout=self._patience, grpc_options=options)
        except pymilvus.MilvusException as error:
            if self._file:
                raise BlockingIOError(
                    f"{self.uri} could not be opened ({error.message}): a Milvus file serves one process at a time, "
                    "for searching too; close the other one, or use a server"
                ) from error
            raise ConnectionError(f"no Milvus answers at {self.uri}: {error.message}") from error
        if self._file:
            _users[self.uri] += 1
        return client

    def _call(self, name: str, *values: Any, **options: Any) -> Any:
        """A call of the client that gives up in time, and says in words who did not answer."""
        # a file is served by this process itself, and may build a whole segment within any call
        long = self._file or name in ("load_collection", "create_index", "flush")
        seconds = LONG if long else self._patience
        if self._file:
            _let_faiss_take_params()
        until = time.monotonic() + RETURN
        while True:
            try:
                return getattr(self._client, name)(*values, timeout=seconds, **options)
            except (pymilvus.MilvusException, grpc.RpcError) as error:  # the latter where no answer came in time
                said = getattr(error, "message", "") or f"no answer within {seconds:g} s"
                # an insert is not repeated: a part of it may be there
                if ABSENT not in said or name == "insert" or time.monotonic() > until:
                    raise ConnectionError(
                        f"Milvus at {self.uri} failed to {name.replace('_', ' ')}: {said}. The index itself holds all "
                        "that was committed, and puts what is missing into Milvus when it is next opened for writing"
                    ) from error
            time.sleep(0.5)

    @property
    def collection(self) -> str:
        return str(self._record["collection"])

    def load(self) -> Mark:
        path = self.place.folder / RECORD
        if not path.is_file():
            self._create()
            return Mark()
        try:
            self._record = json.loads(path.read_text())
            mark = Mark(self._record["slots"], self._record["commit"])
        except (ValueError, KeyError, TypeError) as error:
            raise DamagedError(f"{path} is damaged: {error}") from error
        if not self._call("has_collection", self.collection):
            if not self.place.writable:
                raise DamagedError(f"{self.uri} has no collection {self.collection}; open the index for writing once")
            self._create(self.collection)
            return Mark()
        self._call("load_collection", self.collection)
        return mark

    def _create(self, name: str | None = None) -> None:
        if not self.place.writable:
            raise DamagedError(f"{self.uri} holds nothing of this index yet; open the index for writing once")
        name = name or self.place.options.get("collection") or f"roadmap_{secrets.token_hex(8)}"
        self._record = {"collection": name, "slots": 0, "commit": 0}
        if self._call("has_collection", name):
            raise FileExistsError(f"{self.uri} has a collection {name} already; choose another name")
        schema = MilvusClient.create_schema(auto_id=False, enable_dynamic_field=False)
        schema.add_field("id", DataType.INT64, is_primary=True)
        schema.add_field("vector", DataType.FLOAT_VECTOR, dim=self.place.vectors.dim)
        for column, kind in self.place.columns.items():
            longest = {"max_length": 65_535} if kind == "text" else {}
            schema.add_field(self._fields[column], TYPES[kind], **longest)
            schema.add_field(f"{self._fields[column]}_known", DataType.BOOL)
        shards = {"num_shards": int(self.place.options["shards"])} if "shards" in self.place.options else {}
        self._call("create_collection", name, schema=schema, consistency_level="Strong", **shards)
        if not self._file:  # a file would build HNSW for whatever is flushed, and `build` for all of it once more
            self._build_index()
        self._call("load_collection", name)
        self._write()

    def _build_index(self) -> None:
        index = self._client.prepare_index_params()
        index.add_index("vector", index_type="HNSW", metric_type="IP", params=self._depth)
        # a file builds it before it answers; a server builds it behind our back, and is waited for
        self._call("create_index", self.collection, index, sync=not self._file)

    def add(self, start: int, stop: int) -> None:
        if not self.place.writable:
            return
        put = "insert" if self._sure else "upsert"
        self._sure = False  # until it is saved: an error may leave a part behind
        self._unflushed += stop - start
        for top in range(start, stop, AT_ONCE):
            end = min(top + AT_ONCE, stop)
            self._call(put, self.collection, self._rows(top, end))

    def _rows(self, start: int, stop: int) -> list[dict[str, Any]]:
        vectors = self.place.vectors.tile(start, stop).astype(np.float32, copy=False)
        rows: list[dict[str, Any]] = [{"id": start + i, "vector": vector} for i, vector in enumerate(vectors)]
        for column, kind in self.place.columns.items():
            field = self._fields[column]
            for row, value in zip(rows, self.place.column(column, start, stop), strict=True):
                row[field] = EMPTY[kind] if value is None else kept_value(value)
                row[f"{field}_known"] = value is not None
        return rows

    def remove(self, slots: Slots) -> None:
        if self.place.writable:
            self._unflushed += len(slots)
            for top in range(0, len(slots), AT_ONCE):
                self._call("delete", self.collection, ids=slots[top : top + AT_ONCE].tolist())

    def search(self, vectors: Floats, k: int, selection: Selection | None = None) -> tuple[Floats, Slots]:
        if k > MOST:
            raise ValueError(f"Milvus gives at most {MOST} results of a query, {k} were asked for")
        scores, slots = no_results(len(vectors), k)
        if len(vectors) == 0:
            return scores, slots
        found = self._call(
            "search",
            self.collection,
            data=list(vectors),
            limit=k,
            filter="" if selection is None else expression(selection.condition, self._fields),
            output_fields=["id"],
            search_params={"metric_type": "IP", "params": {"ef": max(self._ef, k)}},
            consistency_level="Strong",
        )
        for row, hits in enumerate(found):
            slots[row, : len(hits)] = [hit["id"] for hit in hits]
            scores[row, : len(hits)] = [hit["distance"] for hit in hits]
        return scores, slots

    def build(self) -> dict[str, Any]:
        """Flush, and wait until HNSW covers everything: what is not flushed is compared one by one, slowly."""
        self._call("flush", self.collection)
        if self._call("list_indexes", self.collection):
            self._call("release_collection", self.collection)
            self._call("drop_index", self.collection, "vector")
        self._build_index()
        self._call("load_collection", self.collection)
        live = np.ones(self._mark.slots, np.bool_)
        live[self.place.removed()] = False
        self._record["built"] = len(self)
        if live.any():
            self._record["recall@10"] = Questions(self.place.vectors, live).recall(self.search)
        self._unflushed = FLUSH  # what is built is also kept
        return self.facts()

    def save(self, mark: Mark) -> None:
        """Flushing takes seconds: rows that come a few at a time wait for others, or for `close`."""
        self._sure, self._mark = True, mark
        if self._unflushed >= FLUSH:
            self._flush()

    def _flush(self) -> None:
        self._call("flush", self.collection)
        self._record |= {"slots": self._mark.slots, "commit": self._mark.commit}
        self._write()
        self._unflushed = 0

    def _write(self) -> None:
        with whole_file(self.place.folder / RECORD) as temporary:
            Path(temporary).write_text(json.dumps(self._record))

    def facts(self) -> dict[str, Any]:
        return {"kind": "hnsw", "uri": self.uri, "collection": self.collection} | {
            name: self._record[name] for name in ("built", "recall@10") if name in self._record
        }

    def close(self) -> None:
        if self._sure and self._unflushed:
            self._flush()
        self._client.close()
        if self._file:
            _users[self.uri] -= 1
            if not _users[self.uri]:
                # the client leaves the file open until the process ends, and no other could open it
                importlib.import_module("milvus_lite.server_manager").server_manager_instance.release_server(self.uri)

    def __len__(self) -> int:
        found = self._call("query", self.collection, output_fields=["count(*)"], consistency_level="Strong")
        return int(found[0]["count(*)"])


def _let_faiss_take_params() -> None:
    """A file is searched by faiss in this process, with `params`. faiss.contrib.torch_utils, which
    pytorch-metric-learning imports, puts a search without them in its place, and keeps the first under another name."""
    if "faiss.contrib.torch_utils" not in sys.modules:
        return
    kinds: list[Any] = [kind for kind in vars(sys.modules["faiss"]).values() if isinstance(kind, type)]
    for kind in kinds:
        if "search_numpy" in vars(kind) and not hasattr(kind.search, "takes_params"):
            kind.search = _search_of_both(kind.search, kind.search_numpy)


def _search_of_both(changed: Callable[..., Any], own: Callable[..., Any]) -> Callable[..., Any]:
    def search(index: Any, *values: Any, params: Any = None, **options: Any) -> Any:
        if params is None:
            return changed(index, *values, **options)
        return own(index, *values, params=params, **options)

    search.takes_params = True  # type: ignore[attr-defined]
    return search
