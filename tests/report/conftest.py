"""Two small runs, really trained, whose class names are meant to break a page."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from roadmap.engine import fit

from ..engine.worlds import tiny, write_classes

NASTY = {
    "c08": '<script>alert("1")<',
    "c09": "'\"><img src=x onerror=alert(1)>",
    "c10": "R&amp;D <b>$x_1$",
    "c11": "a]]><!--",
}


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Path]]:
    """By loss: folders of runs on the same 36 test pictures of 6 classes."""
    folder = tmp_path_factory.mktemp("report")
    write_classes(folder / "pictures" / "train", range(8), each=4)
    test = write_classes(folder / "pictures" / "test", range(8, 14), each=6, noise=160.0)
    for old, new in NASTY.items():
        (test / old).rename(test / new)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ROADMAP_CACHE", str(folder / "cache"))
        runs = {}
        for loss in ("roadmap", "smoothap"):
            settings = tiny(folder / "pictures", folder / "runs" / loss, loss={"name": loss}, epochs=2)
            runs[loss] = fit(settings, quiet=True)
        yield runs
