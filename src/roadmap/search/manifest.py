"""What an index says of itself, and who may write it."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from roadmap.atomic import whole_file
from roadmap.locations import INDEX, check_index
from roadmap.search.engines import check_engine, installed
from roadmap.search.metadata import checked_columns
from roadmap.search.vectors import STORAGES, DamagedError

PARTS = ("rows.sqlite", "rows.sqlite-journal", "vectors.bin", "engine", "lock")
FORMAT = 1
# Vectors are of the same space where all of these agree.
ORIGIN = {"model": "the model", "crop": "the crop", "precision": "the precision"}


@dataclass(frozen=True)
class Manifest:
    """Everything about an index that does not change: plain JSON values.

    Attributes:
        about: `Embeddings.about`: digest of the model, crop, precision, root.
        class_names: names of the classes that the model's pictures had, where known.
        dim: dimensions of a vector.
        storage: "float32" or "float16", how vectors are kept.
        engine: the engine's name.
        options: the engine's options, such as the URI of a Milvus server. No passwords.
        columns: name -> kind of the metadata; `id` comes first, `label` second.
    """

    about: Mapping[str, Any]
    dim: int
    storage: str
    engine: str
    options: Mapping[str, Any] = field(default_factory=dict)
    columns: Mapping[str, str] = field(default_factory=dict)
    class_names: tuple[str, ...] = ()

    def save(self, folder: Path) -> None:
        # pairs, because the order of the columns matters and sorted JSON does not keep it
        plain = {**asdict(self), "columns": list(self.columns.items())}
        content = json.dumps({"format": FORMAT, **plain}, sort_keys=True)
        whole = {"checksum": _checksum(content), "index": json.loads(content)}
        with whole_file(folder / INDEX) as temporary:
            Path(temporary).write_text(json.dumps(whole, indent=1, sort_keys=True))

    @classmethod
    def load(cls, folder: Path) -> Manifest:
        check_index(folder)
        path = folder / INDEX
        try:
            whole = json.loads(path.read_text())
            content, checksum = whole["index"], whole["checksum"]
        except (ValueError, KeyError, TypeError) as error:
            raise DamagedError(f"{path} is damaged: {error}") from error
        if checksum != _checksum(json.dumps(content, sort_keys=True)):
            raise DamagedError(f"{path} is damaged: its checksum differs")
        if content.pop("format") != FORMAT:
            raise ValueError(f"{path} was written by another version of this program; index the pictures again")
        columns, class_names = dict(content.pop("columns")), tuple(content.pop("class_names"))
        return cls(**content, columns=columns, class_names=class_names)


def manifest_for(
    about: Mapping[str, Any],
    dim: int,
    engine: str,
    columns: Mapping[str, str],
    class_names: Sequence[str],
    storage: str,
    options: Mapping[str, Any],
) -> Manifest:
    """The manifest of a new index, checked; the arguments are those of `Index.create`."""
    if dim < 1 or storage not in STORAGES:
        raise ValueError(f"dim must be at least 1 and storage one of {', '.join(STORAGES)}, got {dim}, {storage!r}")
    origin = {key: value for key, value in about.items() if key != "skipped"}
    every, chosen = checked_columns(columns), engine_for(engine)
    check_engine(chosen, options)
    return Manifest(origin, dim, storage, chosen, dict(options), every, tuple(class_names))


def check_origin(mine: Mapping[str, Any], theirs: Mapping[str, Any], what: str) -> None:
    """Raises ValueError, in words, where vectors come from another model, crop or precision than the index's."""
    other = {key: name for key, name in ORIGIN.items() if mine.get(key) != theirs.get(key)}
    for key, name in other.items():
        if theirs.get(key) is None:
            raise ValueError(
                f"{what} do not say {name} they were made with, the index does ({_short(mine[key])}); "
                "embed them again with the index's own model"
            )
        if mine.get(key) is None:
            raise ValueError(f"the index does not say {name} it was made with, {what} do ({_short(theirs[key])})")
    if other:  # all of them: a model's digest differs too when only its size of pictures does
        came, here = (" and ".join(_short(about[key]) for key in other) for about in (theirs, mine))
        raise ValueError(
            f"{what} were made with another {' and '.join(other)} than the index: {came}, the index has {here}; "
            "scores between them mean nothing"
        )


class WriterLock:
    """Held by the one process that may write. The system lets it go when the process ends, however it ends."""

    def __init__(self, folder: Path) -> None:
        self._file = os.open(folder / "lock", os.O_CREAT | os.O_RDWR, 0o666)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = os.pread(self._file, 32, 0).decode("ascii", "replace").strip() or "unknown"
            os.close(self._file)
            self._file = -1
            raise BlockingIOError(
                f"{folder} is being written by another process ({holder}); wait for it to end, or open without write"
            ) from error
        os.ftruncate(self._file, 0)
        os.pwrite(self._file, f"{os.getpid()}\n".encode(), 0)

    def release(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def engine_for(name: str) -> str:
    """What "auto" means here; other names are themselves."""
    if name != "auto":
        return name
    return "faiss" if installed("faiss") and not torch.cuda.is_available() else "exact"


def check_room(folder: Path) -> set[str]:
    """There is room for a new index. What lies there: nothing, or what an interrupted `create` left."""
    if not folder.is_dir():
        raise NotADirectoryError(f"{folder} is a file; name a new folder for the index")
    found = {path.name for path in folder.iterdir()}
    if INDEX in found:
        raise FileExistsError(f"{folder} holds an index already; open it, or choose another folder")
    if strange := sorted(found - set(PARTS)):
        raise FileExistsError(f"{folder} is not empty ({strange[0]}); choose a new folder for the index")
    return found


def make_room(folder: Path) -> None:
    """Room for a new index: what an interrupted `create` left goes, anything else is refused."""
    for name in check_room(folder) - {"lock"}:
        shutil.rmtree(folder / name) if name == "engine" else (folder / name).unlink()


def _checksum(content: str) -> str:
    return hashlib.sha256(content.encode()).hexdigest()


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, sort_keys=True)
    return text if len(text) <= 60 else text[:57] + "..."
