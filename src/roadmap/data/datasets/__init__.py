"""Every dataset, read from its original layout; no file is moved, no picture is opened.

`dataset(name, root)` reads a dataset by name; each reader can also be called itself.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from pathlib import Path

from roadmap.data.datasets.cars import cars
from roadmap.data.datasets.cub import cub
from roadmap.data.datasets.glyphs import glyphs
from roadmap.data.datasets.inaturalist import inaturalist
from roadmap.data.datasets.inshop import inshop
from roadmap.data.datasets.own import folder, table
from roadmap.data.datasets.revisited import roxford5k, rparis6k
from roadmap.data.datasets.sfm import sfm120k
from roadmap.data.datasets.sop import sop
from roadmap.data.datasets.sources import SOURCES, Source, explanation
from roadmap.data.records import Records

READERS: dict[str, Callable[[Path], Records]] = {
    "glyphs": glyphs,
    "cub": cub,
    "sop": sop,
    "inaturalist": inaturalist,
    "inshop": inshop,
    "cars": cars,
    "sfm120k": sfm120k,
    "roxford5k": roxford5k,
    "rparis6k": rparis6k,
    "folder": folder,
    "table": table,
}


def dataset(name: str, root: str | Path) -> Records:
    """The Records of the dataset `name` below `root` (for "table", the CSV or Parquet file itself)."""
    if name not in READERS:
        near = difflib.get_close_matches(name, READERS, 1)
        raise ValueError(
            f"unknown dataset {name!r}{f', did you mean {near[0]!r}?' if near else ''} "
            f"Known: {', '.join(READERS)}; use 'folder' or 'table' for your own pictures"
        )
    return READERS[name](Path(root))


__all__ = [
    "READERS",
    "SOURCES",
    "Source",
    "cars",
    "cub",
    "dataset",
    "explanation",
    "folder",
    "glyphs",
    "inaturalist",
    "inshop",
    "roxford5k",
    "rparis6k",
    "sfm120k",
    "sop",
    "table",
]
