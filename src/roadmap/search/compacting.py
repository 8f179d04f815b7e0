"""A copy of an index without what was removed: slots are never used twice, so that a folder which changes grows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from roadmap.embeddings import Embeddings
from roadmap.search.index import Index

AT_ONCE = 8192


def compact(folder: str | Path, into: str | Path) -> dict[str, Any]:
    """Write what an index holds into a new folder, in the same order, and build its engine; the facts of the new one.

    Nothing is embedded again, and the old index is left as it is: put the new folder in its place when this is done.
    Meanwhile nobody else can write to it, or what they wrote would be lost with it.
    """
    with Index.open(folder, write=True) as old:
        told, rows = old.manifest, old.storage.rows
        # a name was for one collection of a server; the copy takes one of its own
        options = {name: value for name, value in told.options.items() if name != "collection"}
        columns = {name: kind for name, kind in told.columns.items() if name != "id"}
        with Index.create(
            into,
            told.about,
            told.dim,
            engine=told.engine,
            columns=columns,
            class_names=told.class_names,
            storage=told.storage,
            options=options,
        ) as new:
            names, files = old.ids(), rows.files()
            for top in range(0, len(names), AT_ONCE):
                some = names[top : top + AT_ONCE]
                slots = rows.slots_of(some)
                kept = rows.metadata(list(slots.values()))
                metadata = {column: [kept[slots[name]][column] for name in some] for column in columns}
                vectors = torch.from_numpy(old.vectors_of(some))
                labels = torch.zeros(len(some), dtype=torch.int64)
                part = Embeddings(vectors, labels, tuple(some), ("",), told.about)
                new.add(part, metadata, files={name: files[name] for name in some if name in files})
            with new.storage.rows.commit("files"):  # those that could not be read have no row
                new.storage.rows.put_files(files)
            return new.build() if len(new) else new.facts()
