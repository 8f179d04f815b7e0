"""A state on disk: written whole, with a checksum, beside the one before; read as plain values that cannot run code."""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from roadmap.atomic import temporary_beside, whole_file
from roadmap.runs.folder import PREVIOUS

FORMAT, VERSION = "roadmap-train-state", 2
UNCHECKED = 1  # the version that had no checksum yet
log = logging.getLogger("roadmap.engine")


class DamageError(ValueError):
    """A file that is not what was written."""


def save_values(values: Mapping[str, Any], path: Path) -> None:
    """Writes tensors and plain values whole or not at all: a run killed while saving keeps the state before.

    What was at `path` stays beside it as previous.pt, for the day when `path` cannot be read.
    """
    content = {"format": FORMAT, "version": VERSION, **values}
    with whole_file(path) as temporary:
        with open(temporary, "wb") as file:  # given a name, torch would hide what the system says of a full disk
            torch.save({**content, "checksum": checksum(content)}, file)
        if path.is_file():
            _link(path, path.with_name(PREVIOUS))


def load_values(path: Path) -> dict[str, Any]:
    """What `save_values` wrote, or what it wrote the time before where the file is damaged or gone."""
    previous = path.with_name(PREVIOUS)
    if not path.is_file() and not previous.is_file():
        raise FileNotFoundError(f"there is no saved state at {path}")
    try:
        return _checked_values(path)
    except DamageError as damage:
        if not previous.is_file():
            raise ValueError(f"{damage}, and there is none before it; start a new run") from damage
        try:
            values = _checked_values(previous)
        except DamageError as worse:
            raise ValueError(f"{damage}, nor the one before it: {worse}; start a new run") from worse
        log.warning("%s; the run goes on from the state before it, that of step %s", damage, values.get("step"))
        _link(previous, path)  # else the damaged one would become the previous one
        return values


def _checked_values(path: Path) -> dict[str, Any]:
    try:
        values = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a damaged file can make the reader stumble anywhere
        raise DamageError(f"{path} could not be read as a saved state: {error}") from error
    kind, version = (values.get("format"), values.get("version")) if isinstance(values, dict) else (None, None)
    if kind != FORMAT or version not in (UNCHECKED, VERSION):
        raise DamageError(f"{path} is not a {FORMAT} of version {VERSION}")
    if version != UNCHECKED and values.pop("checksum", None) != checksum(values):
        raise DamageError(f"{path} is damaged: its content is not what was saved")
    return dict(values)


def checksum(values: Any) -> str:
    """SHA-256 of nested tensors and plain values: their kinds, shapes and bits."""
    digest = hashlib.sha256()
    _add(digest, values)
    return digest.hexdigest()


def _add(digest: Any, value: Any) -> None:
    if isinstance(value, Tensor):
        digest.update(f"tensor {value.dtype} {tuple(value.shape)}".encode())
        digest.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    elif isinstance(value, Mapping):
        digest.update(f"mapping {len(value)}".encode())
        for key, item in value.items():
            _add(digest, key)
            _add(digest, item)
    elif isinstance(value, (list, tuple)):
        digest.update(f"sequence {len(value)}".encode())
        for item in value:
            _add(digest, item)
    else:
        digest.update(f"{type(value).__name__} {value!r};".encode("utf-8", "surrogateescape"))


def _link(path: Path, other: Path) -> None:
    """Makes `other` a second name of the file at `path`, in place of what it was."""
    temporary = temporary_beside(other)
    try:
        os.link(path, temporary)
        os.replace(temporary, other)
    except OSError:  # a file system without such names: the file moves, and for a moment only `other` is there
        os.replace(path, other)
    finally:
        temporary.unlink(missing_ok=True)  # renaming to another name of the same file does nothing
