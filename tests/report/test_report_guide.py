"""docs/guides/report.md is true: its commands run in their order and give what they promise."""

from __future__ import annotations

from pathlib import Path

import pytest

from roadmap.report import figures, measures
from roadmap.report.mapping import sample

from ..test_guides import GUIDES, Walk, blocks, elsewhere, shape  # noqa: F401 - a fixture

PAGE = GUIDES / "report.md"


def test_the_guide_to_reports_runs(
    elsewhere: Path,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(figures, "ROWS", 1)
    monkeypatch.setattr(figures, "ENDINGS", ("png",))
    monkeypatch.setattr(measures, "sample", lambda labels: sample(labels, 60))
    walk = Walk(elsewhere)
    walk.follow(PAGE)
    said = {shape(line).replace("kB", "MB") for line in walk.lines}
    assert shape(blocks(PAGE, "text")[0].strip()) in said
    assert (elsewhere / "report.html").read_text(encoding="utf-8").count("data:image") > 100
    drawn = {path.stem for path in (elsewhere / "figures").iterdir()}
    assert {"nearest-4", "nearest-10", "nearest-10-dark"} <= drawn
    assert any(name.startswith("corrections-roadmap-of-smoothap") for name in drawn)
    (code,) = blocks(PAGE, "python")
    exec(compile(code, "report.md", "exec"), {})
    printed = capsys.readouterr().out.splitlines()
    assert printed[0] == "[]"
    assert printed[1].startswith("roadmap: mAP@R ")
    parts = {path.name for path in (elsewhere / "runs" / "roadmap" / "report").iterdir()}
    assert parts == {"glyphs.json", "glyphs-before.npz"}
