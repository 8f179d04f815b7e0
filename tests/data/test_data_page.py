"""docs/data.md is true: what it shows runs, and the files it names are there."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "data.md").read_text(encoding="utf-8")


def test_what_is_shown_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (code,) = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    names = {}
    exec(compile(code, "docs/data.md", "exec"), names)
    assert names["images"].shape == (128, 3, 224, 224)
    assert names["sentence"] == "pictures drawn by the program, 32 pixels, read from glyphs"


def test_the_files_it_names_are_there():
    named = set(re.findall(r"`((?:roadmap|tests|benchmarks)/[\w/]+\.py)", PAGE))
    assert len(named) >= 5
    for name in named:
        assert (ROOT / "src" / name if name.startswith("roadmap") else ROOT / name).is_file(), name
