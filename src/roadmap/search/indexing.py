"""A folder of pictures into an index, and again when it has changed: only what is new or changed is embedded.

index_pictures(Encoder.open("runs/first"), "PICTURES", "pictures.index")
with Index.open("pictures.index") as index:
    encoder = encoder_of(index)
    index.search(encoder.embed(["query.jpg"]))
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from roadmap.config.settings import SettingError
from roadmap.data import PictureError, Records, picture, picture_key
from roadmap.embeddings import Embeddings
from roadmap.encoder import Encoder
from roadmap.locations import INDEX
from roadmap.progress import Bar, bar
from roadmap.search.gathering import Pictures, pictures_of
from roadmap.search.index import Index
from roadmap.search.manifest import Manifest, check_origin
from roadmap.search.syncing import Changes
from roadmap.search.vectors import DamagedEngineError

STEP = {"cpu": 512, "cuda": 8192}  # pictures after which what is done is kept
STALE = 0.05  # an engine is made anew when so large a part of the index is new or gone


@dataclass(frozen=True)
class Indexed:
    """What was done.

    Attributes:
        changes: which pictures were new, changed, deleted, the same.
        skipped: id -> why, of every picture that could not be read or decoded, now or earlier.
        described: pictures whose metadata alone had changed.
        notes: what a person should hear of the folder.
        facts: `Index.facts` afterwards.
    """

    changes: Changes
    skipped: Mapping[str, str]
    described: int
    notes: tuple[str, ...]
    facts: Mapping[str, Any]


def index_pictures(
    encoder: Encoder,
    where: str | Path | Pictures,
    folder: str | Path,
    *,
    table: str | Path | None = None,
    engine: str | None = None,
    options: Mapping[str, Any] | None = None,
    storage: str = "float32",
    at_once: int | None = None,
    progress: bool | None = None,
) -> Indexed:
    """Make the index in `folder` hold exactly the pictures below `where`. It can be interrupted and called again.

    Args:
        where: a folder of pictures, a table of them, or `pictures_of` either.
        table: columns about the pictures of a folder; see `pictures_of`.
        engine: "exact", "faiss", "milvus" or "auto"; of an index that is there, None keeps its own.
        options: the engine's; see its file.
        storage: of a new index, "float32", or "float16" for half the space.
        at_once: pictures that are embedded and kept in one step.
        progress: show a bar; None: where a person watches.

    Raises:
        ValueError: the index is of another model, crop or precision, or of another folder.
    """
    found = where if isinstance(where, Pictures) else pictures_of(where, table)
    with _opened(encoder, found, Path(folder), engine, options, storage) as index:
        places = {name: i for i, name in enumerate(found.ids)}
        changes = index.changes(found.files)
        skipped: dict[str, str] = dict(changes.skipped)
        total = len(changes.new) + len(changes.changed)
        with bar(total, "indexing", show=progress if total else False) as shown:

            def embed(names: Sequence[str]) -> tuple[Embeddings, dict[str, list[Any]]]:
                part = found.records.select([places[name] for name in names])
                vectors = _embeddings_of(encoder, part, progress)
                skipped.update(vectors.about["skipped"])
                _advance(shown, len(names), len(skipped))
                rows = [places[name] for name in vectors.ids or ()]
                return vectors, found.rows(rows, index.manifest.columns)

            step = at_once or STEP.get(encoder.device.type, STEP["cpu"])
            skipped.update(index.sync(found.files, embed, step).skipped)
        described = _describe(index, found, [*changes.same, *changes.touched])
        if _stale(index):
            index.build()
        return Indexed(changes, skipped, described, found.notes, index.facts())


def encoder_of(
    index: Index, device: str = "auto", batch: int | None = None, model: str | Path | None = None
) -> Encoder:
    """The model that made the vectors of an index, opened from where it was then, or from where it is now (`model`).

    Raises:
        ValueError: the index does not say where; or what is there now is another model.
    """
    about = index.manifest.about
    options = dict(about.get("opened", {}))
    if model is not None:
        options["what"] = model
    if "what" not in options:
        raise ValueError(f"{index.folder} does not say where its model is; name the model, or index the pictures again")
    # a file in ONNX has a precision of its own, and is told apart by it below
    precision = None if str(options["what"]).endswith(".onnx") else about.get("precision")
    try:
        found = Encoder.open(options.pop("what"), device=device, precision=precision, batch=batch, **options)
    except (OSError, SettingError) as error:
        raise FileNotFoundError(
            f"{index.folder} was made by a model that cannot be opened any more ({error}); say where it is now"
        ) from error
    check_origin(about, found.description(), "queries of this model")
    return found


def _opened(
    encoder: Encoder,
    found: Pictures,
    folder: Path,
    engine: str | None,
    options: Mapping[str, Any] | None,
    storage: str,
) -> Index:
    """The index, open for writing; a new one where there is none."""
    about = encoder.description()
    root = str(found.records.root.resolve())
    if not (folder / INDEX).is_file():
        about |= {
            "dataset": found.records.name,
            "root": root,
            "opened": encoder.opened,
        }
        return Index.create(
            folder,
            about,
            encoder.model.dim,
            engine=engine or "auto",
            columns=found.columns,
            class_names=found.records.class_names,
            storage=storage,
            options=options,
        )
    manifest = Manifest.load(folder)  # the index itself is not opened: its engine may be what is exchanged
    check_origin(manifest.about, about, "the vectors of this model")
    own = manifest.about.get("root", root)
    if own != root:
        raise ValueError(f"{folder} is an index of the pictures in {own}, not in {root}; choose another folder")
    if engine in (None, "auto", manifest.engine) and options in (None, manifest.options):
        with suppress(DamagedEngineError):  # it is made again, of the vectors
            return Index.open(folder, write=True)
        options = manifest.options
    return Index.exchange_engine(folder, manifest.engine if engine in (None, "auto") else str(engine), options)


def _embeddings_of(encoder: Encoder, part: Records, progress: bool | None) -> Embeddings:
    """The vectors of those pictures that can be decoded; `about["skipped"]` says why of the others."""
    try:
        return encoder.embed(part, on_error="skip", progress=progress)
    except ValueError:
        skipped = {}
        for i in range(len(part)):
            try:
                picture(part.path(i), part.box(i))
            except PictureError as error:
                skipped[picture_key(part, i)] = error.reason
        if len(skipped) < len(part):  # it was something else
            raise
    nothing = torch.empty(0, encoder.model.dim)
    labels = torch.empty(0, dtype=torch.int64)
    return Embeddings(nothing, labels, (), part.class_names, {**encoder.description(), "skipped": skipped})


def _advance(shown: Bar, count: int, skipped: int) -> None:
    shown.update(count)
    if skipped:
        shown.note(f"{skipped:,} cannot be decoded")


def _describe(index: Index, found: Pictures, names: Sequence[str], at_once: int = 4096) -> int:
    """Bring the metadata of pictures that need no embedding up to date; of how many it had changed."""
    places, rows, count = {name: i for i, name in enumerate(found.ids)}, index.storage.rows, 0
    for top in range(0, len(names), at_once):
        slots = rows.slots_of(names[top : top + at_once])
        kept = rows.metadata(list(slots.values()))
        wanted = found.rows([places[name] for name in slots], index.manifest.columns)
        old = {name: [kept[slot][name] for slot in slots.values()] for name in wanted if name in index.manifest.columns}
        if missing := sorted(wanted.keys() - old.keys()):
            raise ValueError(
                f"{index.folder} has no column {missing[0]!r}, only {', '.join(index.manifest.columns)}; columns are "
                "chosen when an index is made: index into a new folder"
            )
        other = [i for i in range(len(slots)) if any(old[name][i] != wanted[name][i] for name in old)]
        if not other:
            continue
        there = list(slots)
        ids = [there[i] for i in other]
        vectors = torch.from_numpy(index.vectors_of(ids))
        again = Embeddings(vectors, torch.zeros(len(ids), dtype=torch.int64), tuple(ids), ("",), index.manifest.about)
        index.add(again, {name: [values[i] for i in other] for name, values in wanted.items()}, replace=True)
        count += len(other)
    return count


def _stale(index: Index) -> bool:
    """Whether the engine is worth making anew."""
    facts, count = index.engine.facts(), len(index)
    built = facts.get("built", 0)
    if facts.get("kind") == "exact" or not count:
        return False
    return bool(abs(count - built) + facts.get("unbuilt", 0) > STALE * count)
