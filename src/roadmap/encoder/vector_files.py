"""Files of what a frozen backbone made of pictures. None is believed before it is checked, and none is needed: where
one is damaged, or cannot be written, that is said and the run goes on.
"""

from __future__ import annotations

import dataclasses
import hashlib
import logging
from collections.abc import Sequence
from pathlib import Path

import torch

from roadmap.atomic import remove_leftovers, sole_writer
from roadmap.data.pictures.packs import cache_folder
from roadmap.data.pictures.shards import OnError
from roadmap.embeddings import Embeddings

log = logging.getLogger("roadmap")


def home() -> Path:
    """Where they are kept. A file is named by what it was made of: it never grows old, and may be deleted any time."""
    return cache_folder() / "vectors"


def kept_vectors(digest: str, keys: Sequence[str], width: int, on_error: OnError) -> Embeddings | None:
    """What was kept of these pictures; None where nothing was that can be used, and a word where that is odd.

    Args:
        digest: of all that decides the vectors.
        keys: of the pictures, each once.
        width: of the vectors.
        on_error: what shall be done with a picture that cannot be decoded.
    """
    path = _path(digest)
    try:
        found = Embeddings.load(path)
        _check(found, digest, keys, width)
    except FileNotFoundError:
        return None
    # whatever a reader stumbles over in a damaged file
    except (OSError, ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        log.warning("%s is not used: %s", path, error)
        return None
    # a picture that was left out then stops what must not leave any out, by its name
    return None if found.about["skipped"] and on_error == "raise" else found


def keep_vectors(found: Embeddings, digest: str) -> None:
    """For every later run. Of several processes at once, one after another writes the same."""
    from safetensors import SafetensorError

    path = _path(digest)
    about = {"skipped": found.about["skipped"], "digest": digest, "content": _content(found)}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with sole_writer(path.parent):
            remove_leftovers(path.parent)  # of those that were killed while they wrote
            dataclasses.replace(found, about=about).save(path)
    except (OSError, SafetensorError) as error:  # the latter where the disk is full
        log.warning(
            "the vectors of the frozen backbone cannot be kept in %s (%s): this run goes on with them, a later one "
            "computes them again; make room there, or set ROADMAP_CACHE to another folder",
            path.parent,
            error,
        )


def _path(digest: str) -> Path:
    return home() / f"{digest}.safetensors"


def _check(found: Embeddings, digest: str, keys: Sequence[str], width: int) -> None:
    """Raises ValueError where a file is not what was written, or was written of something else."""
    about, skipped = found.about, found.about.get("skipped")
    if about.get("digest") != digest:
        raise ValueError("it is of another model, or of other pictures, or was written by an earlier version")
    if found.vectors.dtype != torch.float32 or found.vectors.shape[1] != width:
        raise ValueError(f"its vectors are {found.vectors.dtype} of {found.vectors.shape[1]}, not float32 of {width}")
    if not isinstance(skipped, dict) or not all(isinstance(reason, str) for reason in skipped.values()):
        raise ValueError("it does not say which pictures were left out")
    ids = found.ids or ()
    if len(ids) + len(skipped) != len(keys) or {*ids, *skipped} != set(keys):
        raise ValueError(f"it holds {len(ids)} pictures and {len(skipped)} that were left out, not the {len(keys)}")
    if about.get("content") != _content(found):
        raise ValueError("its vectors are not what was written")


def _content(found: Embeddings) -> str:
    """A hash of vectors and of what they are of."""
    digest = hashlib.sha256(repr(found.ids).encode("utf-8", "surrogateescape"))
    digest.update(found.vectors.detach().cpu().contiguous().view(torch.uint8).numpy().data)
    return digest.hexdigest()
