"""The file of a row: its id says which, and only below the folder that was indexed."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from roadmap.data.pictures.images import Box

BOXED = re.compile(r"#(-?[\d.e+]+(?:,-?[\d.e+]+){3})$")  # a row that is a part of a picture: path#left,top,right,bottom


def row_file(root: Path, id: str) -> tuple[Path, Box | None]:
    """The file, and the part of it that the row is of.

    Raises:
        FileNotFoundError: there is none below the root; a link that leads out of it is none.
    """
    boxed = BOXED.search(id)
    home = root.resolve()
    try:
        found = (home / (id[: boxed.start()] if boxed else id)).resolve(strict=True)
        left, top, right, bottom = map(float, boxed[1].split(",")) if boxed else (0.0, 0.0, 0.0, 0.0)
    except (OSError, ValueError, RuntimeError) as error:  # missing, a name no file can have, links in a ring
        raise FileNotFoundError(f"the picture of {shortened(id)!r} is not there any more") from error
    if not found.is_relative_to(home) or not found.is_file():
        raise FileNotFoundError(f"{shortened(id)!r} has no picture in the folder that was indexed")
    return found, (left, top, right, bottom) if boxed else None


def shortened(id: str) -> str:
    return id if len(id) <= 80 else id[:77] + "..."


def file_digest(path: Path) -> str:
    found = hashlib.sha256()
    with open(path, "rb") as file:
        while piece := file.read(1 << 22):
            found.update(piece)
    return found.hexdigest()
