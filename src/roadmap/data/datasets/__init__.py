"""Every dataset, read from its original layout; no file is moved, no picture is opened.

`dataset(name, root)` reads a dataset by name. What is needed to read one is imported when it is read, so that a command
line can name them all at once.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from roadmap.config.settings import SettingError
from roadmap.data.datasets.sources import SOURCES, Publication, explanation
from roadmap.names import did_you_mean

if TYPE_CHECKING:
    from roadmap.data.records import Records


@dataclass(frozen=True)
class Reader:
    """A function of one of the modules here, imported when it is called."""

    module: str
    function: str

    def __call__(self, root: Path | None) -> Records:
        read: Callable[[Path | None], Records] = getattr(
            importlib.import_module(f"{__name__}.{self.module}"), self.function
        )
        return read(root)


READERS: dict[str, Reader] = {
    "glyphs": Reader("glyphs", "glyph_records"),
    "cub": Reader("cub", "cub_records"),
    "sop": Reader("sop", "sop_records"),
    "inaturalist": Reader("inaturalist", "inaturalist_records"),
    "inshop": Reader("inshop", "inshop_records"),
    "cars": Reader("cars", "cars_records"),
    "sfm120k": Reader("sfm", "sfm120k_records"),
    "roxford5k": Reader("revisited", "roxford5k_records"),
    "rparis6k": Reader("revisited", "rparis6k_records"),
    "folder": Reader("folders", "folder_records"),
    "table": Reader("tables", "table_records"),
}
DRAWN = "glyphs"  # needs no root


def dataset(name: str, root: str | Path | None = None) -> Records:
    """The Records of the dataset `name` below `root` (for "table", the CSV or Parquet file itself).

    Raises:
        SettingError: when the root is missing; only glyphs, which are drawn, need none.
    """
    if name not in READERS:
        raise ValueError(
            f"unknown dataset {name!r}{did_you_mean(name, READERS)} "
            f"Known: {', '.join(READERS)}; use 'folder' or 'table' for your own pictures"
        )
    if root is None and name != DRAWN:
        raise SettingError("data.root", f"data.root is missing: give data.root=FOLDER. {explanation(name)}")
    return READERS[name](None if root is None else Path(root))


__all__ = ["DRAWN", "READERS", "SOURCES", "Publication", "dataset", "explanation"]
