"""The faiss engine: flat, HNSW or IVF-PQ, whichever suits the size, mapped from disk.

`build` makes an index of what is there, measures its recall against exact search, and turns it up until the recall is
what was asked for. That index is never changed afterwards: newer vectors are compared exactly beside it, removed ones
are left out by a bitmap, and the next `build` takes both in. IVF-PQ keeps 1/16 of a vector in memory (4 bits for two
dimensions) and finds candidates by it; their scores come from the index's own file of vectors.

Options: kind ("auto", "flat", "hnsw", "ivfpq"), recall (0.97, of the 10 nearest).
"""

from __future__ import annotations

import importlib
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from roadmap.atomic import whole_file
from roadmap.search.columns import Mask
from roadmap.search.engines import NOTHING, Mark, Place, Selection, merged, no_results, passing
from roadmap.search.engines.exact import Gallery, exact_among
from roadmap.search.engines.recall import Questions
from roadmap.search.files import file_digest
from roadmap.search.vectors import TILE, DamagedEngineError, Floats, Slots

faiss: Any = importlib.import_module("faiss")  # its type hints miss what its own wrapper adds
CPU = torch.device("cpu")
RECORD = "base.json"
# The kind by the number of vectors: below, compared one by one; in memory whole; compressed.
FLAT, HNSW = 20_000, 400_000
# Where a filter leaves fewer rows than this, they are compared one by one: quicker, and nothing is missed.
FEW = 20_000
# What is turned up until the recall is reached.
STEPS = {"hnsw": (32, 64, 128, 256, 512), "ivfpq": (8, 16, 32, 64, 128, 256)}
AGAIN = "`roadmap index` makes it again of the vectors, and from Python Index.exchange_engine"
CANDIDATES = 10  # IVF-PQ: so many times k are looked at again, 100 at least


class FaissEngine:
    name = "faiss"

    def __init__(self, place: Place) -> None:
        self.place = place
        self._kind = place.options.get("kind", "auto")
        self._target = float(place.options.get("recall", 0.97))
        self._kept = True
        self._take(None, np.empty(0, np.bool_), Gallery(place.vectors, CPU))

    def _take(self, base: Base | None, live: Mask, tail: Gallery) -> None:
        """What a search reads, changed in one step: another thread sees all of it or none."""
        self._now = (base, live, None if live.all() else live, tail)

    def load(self) -> Mark:
        base = Base.load(self.place)
        size = 0 if base is None else base.slot_count
        self._take(base, np.ones(size, np.bool_), Gallery(self.place.vectors, CPU, size))
        return Mark(size, 0)

    def add(self, start: int, stop: int) -> None:
        self._now[-1].grow(stop)

    def remove(self, slots: Slots) -> None:
        base, live, _, tail = self._now
        live = live.copy()
        live[slots[slots < len(live)]] = False
        tail.remove(slots)
        self._take(base, live, tail)

    def search(self, vectors: Floats, k: int, selection: Selection | None = None) -> tuple[Floats, Slots]:
        base, live, allowed, tail = self._now
        mask = None if selection is None else selection.mask
        if base is None:
            return tail.search(vectors, k, mask)
        if mask is not None:
            allowed = passing(live, mask)
        found = base.search(vectors, k, allowed)
        if not len(tail.now.live):
            return found
        return merged([found, tail.search(vectors, k, mask)], k)

    def build(self) -> dict[str, Any]:
        base, live, _, tail = self._now
        live = np.append(live, tail.now.live)
        count = int(live.sum())
        kind = self._kind
        if kind == "auto":
            kind = "flat" if count <= FLAT else "hnsw" if count <= HNSW else "ivfpq"
        if count:
            base = Base.build(kind, self.place, live, self._target)
            self._take(base, live, Gallery(self.place.vectors, CPU, len(live)))
            self._kept = False
        return self.facts()

    def save(self, mark: Mark) -> None:
        base = self._now[0]
        if not self._kept and base is not None:
            base.save()
            self._kept = True

    def facts(self) -> dict[str, Any]:
        base, _, _, tail = self._now
        return {**({"kind": "none yet"} if base is None else base.facts), "unbuilt": len(tail.now.live)}

    def close(self) -> None:
        self._take(None, np.empty(0, np.bool_), Gallery(self.place.vectors, CPU))

    def __len__(self) -> int:
        return int(self._now[1].sum()) + self._now[-1].live_count


class Base:
    """An index of faiss over the slots that were live when it was built; it does not change.

    Attributes:
        slots: the slot of each position in it.
        slot_count: slots that there were, dead ones too; later ones are not in here.
        facts: kind, recall@10 and the step that reaches it.
    """

    def __init__(self, place: Place, index: Any, slots: Slots, slot_count: int, facts: dict[str, Any]) -> None:
        self.place, self.index, self.slots, self.slot_count, self.facts = place, index, slots, slot_count, facts
        self._dense = len(slots) == slot_count  # positions are slots
        self.turn(facts.get("step"))

    @classmethod
    def build(cls, kind: str, place: Place, live: Mask, target: float) -> Base:
        slots = np.flatnonzero(live).astype(np.int64)
        began = time.perf_counter()
        index = _filled(kind, place, slots)
        facts = {"kind": kind, "built": len(slots), "seconds": round(time.perf_counter() - began, 2)}
        base = cls(place, index, slots, len(live), facts)
        base._tune(target)
        return base

    def turn(self, step: int | None) -> None:
        """Set how thoroughly it searches."""
        if step is not None:
            self.facts["step"] = step
            if self.facts["kind"] == "hnsw":
                self.index.hnsw.efSearch = step
            elif self.facts["kind"] == "ivfpq":
                self.index.nprobe = step

    def _tune(self, target: float) -> None:
        """Turn it up until the recall of the 10 nearest reaches the target, measured on vectors of its own."""
        live = np.zeros(self.slot_count, np.bool_)
        live[self.slots] = True
        questions = Questions(self.place.vectors, live)
        for step in STEPS.get(self.facts["kind"], (None,)):
            self.turn(step)
            self.facts["recall@10"] = questions.recall(lambda queries, k: self.search(queries, k, None))
            if self.facts["recall@10"] >= target:
                break

    def search(self, queries: Floats, k: int, allowed: Mask | None) -> tuple[Floats, Slots]:
        """As `Engine.search`; `allowed` is over its slots, None for all."""
        params = None
        if allowed is not None:
            here = allowed if self._dense else allowed[self.slots]
            count = int(here.sum())
            if (count <= FEW and self.facts["kind"] != "flat") or count == 0:
                return exact_among(self.place.vectors, queries, k, self.slots[here])
            selector = faiss.IDSelectorBitmap(np.packbits(here, bitorder="little"))
            params = self._params(selector, len(here) / count)
        if self.facts["kind"] == "ivfpq":
            return self._search_twice(queries, k, params)
        search = _search_alone if self.facts["kind"] == "flat" and len(queries) == 1 else _search
        scores, positions = search(self.index, queries, k, params)
        scores[positions < 0] = -np.inf
        return merged([(scores, self._slots(positions))], k)

    def _params(self, selector: Any, rarity: float) -> Any:
        if self.facts["kind"] == "flat":
            return faiss.SearchParameters(sel=selector)
        wider = int(self.facts["step"] * min(8.0, rarity))  # most of what it meets is left out
        if self.facts["kind"] == "hnsw":
            return faiss.SearchParametersHNSW(sel=selector, efSearch=wider)
        return faiss.SearchParametersIVF(sel=selector, nprobe=min(wider, self.index.nlist))

    def _slots(self, positions: Slots) -> Slots:
        return np.where(positions < 0, NOTHING, self.slots[positions])

    def _search_twice(self, queries: Floats, k: int, params: Any) -> tuple[Floats, Slots]:
        """Candidates by their codes; then the k best of them by their vectors, read from the index's file."""
        wanted = min(max(100, CANDIDATES * k), len(self.slots))
        slots = self._slots(_search(self.index, queries, wanted, params)[1])
        scores = np.full(slots.shape, -np.inf, np.float32)
        for row, query in enumerate(queries):
            near = slots[row] >= 0
            scores[row, near] = self.place.vectors.rows(slots[row, near]) @ query
        return merged([(scores, slots), no_results(len(queries), k)], k)

    def save(self) -> None:
        """Files named by their checksums, then the one that names them: at every moment a whole set is there."""
        folder = self.place.folder
        names = {"index": _written(folder, ".faiss", lambda path: faiss.write_index(self.index, path))}
        names["slots"] = _written(folder, ".npy", lambda path: np.save(path, self.slots, allow_pickle=False))
        content = {"files": names, "slot_count": self.slot_count, "facts": self.facts}
        with whole_file(folder / RECORD) as temporary:
            Path(temporary).write_text(json.dumps(content))
        for path in folder.iterdir():
            if path.name not in (RECORD, *names.values()):
                path.unlink()

    @classmethod
    def load(cls, place: Place) -> Base | None:
        record = place.folder / RECORD
        while record.is_file():
            said = record.read_text()
            try:
                return cls._named_by(said, place)
            except (DamagedEngineError, OSError, RuntimeError):  # unless another process has just made a new one
                if record.is_file() and record.read_text() == said:
                    raise
        return None

    @classmethod
    def _named_by(cls, said: str, place: Place) -> Base:
        record = place.folder / RECORD
        try:
            content = json.loads(said)
            files = {part: place.folder / name for part, name in content["files"].items()}
            count, facts = content["slot_count"], content["facts"]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise DamagedEngineError(f"{record} is damaged: {error}; {AGAIN}") from error
        for path in files.values():
            if not path.is_file() or file_digest(path) != path.stem:
                raise DamagedEngineError(f"{path} is damaged: its checksum differs; {AGAIN}")
        slots = np.load(files["slots"], allow_pickle=False)
        return cls(place, faiss.read_index(str(files["index"]), faiss.IO_FLAG_MMAP_IFC), slots, count, facts)


def _filled(kind: str, place: Place, slots: Slots) -> Any:
    """An index of one kind over some slots, filled a tile at a time."""
    dim, half = place.vectors.dim, place.vectors.dtype == np.float16
    lists = max(1, min(4096, int(2 * len(slots) ** 0.5)))
    recipe = {
        "flat": "SQfp16" if half else "Flat",
        "hnsw": "HNSW32,SQfp16" if half else "HNSW32,Flat",
        "ivfpq": f"IVF{lists},PQ{dim // 2 if dim % 2 == 0 else dim}x4fs",
    }[kind]
    index = faiss.index_factory(dim, recipe, faiss.METRIC_INNER_PRODUCT)
    if not index.is_trained:
        random = np.random.default_rng(0)
        sample = random.choice(slots, min(len(slots), 64 * max(lists, 256)), replace=False)
        index.train(place.vectors.rows(np.sort(sample)))
    if kind == "hnsw":
        index.hnsw.efConstruction = 80
    for top in range(0, len(slots), TILE):
        index.add(place.vectors.rows(slots[top : top + TILE]))
    return index


def _search(index: Any, queries: Floats, k: int, params: Any) -> Any:
    """faiss's own search. faiss.contrib.torch_utils, which pytorch-metric-learning imports, puts one without `params`
    in its place for the whole process, and keeps the first under another name."""
    return getattr(index, "search_numpy", index.search)(queries, k, params=params)


def _search_alone(index: Any, queries: Floats, k: int, params: Any) -> Any:
    """As `_search`, on one core. faiss calls all of them for one query too, though only one has work, and waits for the
    others: longer than the search takes, most of all where they are busy. The setting is the calling thread's own."""
    before = faiss.omp_get_max_threads()
    faiss.omp_set_num_threads(1)
    try:
        return _search(index, queries, k, params)
    finally:
        faiss.omp_set_num_threads(before)


def _written(folder: Path, suffix: str, write: Callable[[str], None]) -> str:
    """The name of a new file in the folder, which is the checksum of its content."""
    temporary = folder / f"new{suffix}"
    write(str(temporary))
    with open(temporary, "rb") as file:
        os.fsync(file.fileno())
    name = file_digest(temporary) + suffix
    os.replace(temporary, folder / name)
    return name
