"""docs/architecture.md: what it names exists, and its walks stay short."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

PAGE = (Path(__file__).parents[1] / "docs" / "architecture.md").read_text(encoding="utf-8")
LONGEST = {"The path of a picture": 13, "The path of an evaluation": 28, "The path of a loss call": 7}


def found(name: str) -> object:
    """What a dotted name stands for: a module, or something in one."""
    parts = name.split(".")
    for cut in range(len(parts), 0, -1):
        try:
            thing: object = importlib.import_module(".".join(parts[:cut]))
        except ModuleNotFoundError as missing:
            if missing.name is None or not name.startswith(missing.name):
                raise
            continue
        for part in parts[cut:]:
            thing = getattr(thing, part)
        return thing
    raise LookupError(name)


@pytest.mark.parametrize("name", sorted(set(re.findall(r"`(roadmap\.[\w.]+)`", PAGE))))
def test_what_the_page_names_exists(name: str) -> None:
    assert found(name) is not None


@pytest.mark.parametrize("title", LONGEST)
def test_walks_stay_short(title: str) -> None:
    section = PAGE.partition(f"## {title}\n")[2].partition("\n## ")[0]
    steps = re.findall(r"^\d+\. ", section, re.MULTILINE)
    assert 4 <= len(steps) <= LONGEST[title]


def test_paths_of_the_table_exist() -> None:
    source = Path(__file__).parents[1] / "src" / "roadmap"
    paths = re.findall(r"`((?:losses|data|evaluation|engine|config|cli|experiments)/[\w./]+)`", PAGE)
    files = [path for path in paths if "NAME" not in path]
    assert len(files) >= 6
    assert [path for path in files if not (source / path).exists()] == []
