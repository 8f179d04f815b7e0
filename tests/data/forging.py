"""Packs that say something else than was written, and say it well: digests and names are those of the new content."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from roadmap.data.pictures.contents import index_name, sealed_bytes


def forged(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """pack.json with a change."""
    about = json.loads((folder / "pack.json").read_text())
    change(about)
    del about["digest"]
    (folder / "pack.json").write_bytes(sealed_bytes(about))


def forged_index(folder: Path, change: Callable[[NDArray[np.int64]], Any]) -> None:
    """The index with a change, under the name of its new content: only what it says can give it away."""

    def renamed(about: dict[str, Any]) -> None:
        index = np.load(folder / about["index"])
        change(index)
        about["index"] = index_name(index)
        np.save(folder / about["index"], index)

    forged(folder, renamed)
