"""Figures for a paper: the frames say what the evaluations say, in two themes and two formats."""

from __future__ import annotations

import dataclasses
import io
from collections import Counter
from pathlib import Path

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_hex
from matplotlib.patches import Rectangle
from PIL import Image

from roadmap.report import figures, report
from roadmap.report.choices import corrected_rows, random_rows
from roadmap.report.completing import complete
from roadmap.report.figures import ROWS, THEMES, _fitting_text, retrieval_figure, write_figures
from roadmap.report.material import materials, sides_of
from roadmap.report.retrievals import question


def test_every_figure_is_there_twice_in_two_formats(
    trained: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(figures, "ROWS", 1)
    found = report(list(trained.values()), tmp_path / "page.html", figures=tmp_path / "figures", queries=1)
    names = ["nearest-4", "nearest-10"]
    for one, other in (found, found[::-1]):
        if len(corrected_rows(other.evaluation, one.evaluation, 1)):
            names.append(f"corrections-{one.name}-of-{other.name}")
    expected = {f"{name}{theme}.{kind}" for name in names for theme in ("", "-dark") for kind in ("png", "pdf")}
    assert {path.name for path in (tmp_path / "figures").iterdir()} == expected
    assert len(names) > 2
    for path in (tmp_path / "figures").iterdir():
        if path.suffix == ".png":
            with Image.open(path) as image:
                assert image.convert("RGB").getpixel((2, 2)) == ((15, 19, 24) if "dark" in path.name else (255,) * 3)
                assert image.width > 500
        else:
            assert path.read_bytes().startswith(b"%PDF-")
    again = write_figures(tmp_path / "again", found[:1])
    assert len(again) == 8
    assert all(path.read_bytes() == (tmp_path / "figures" / path.name).read_bytes() for path in again)  # no date


@pytest.mark.parametrize("nearest", [4, 9, 10])
def test_frames_are_of_the_right_colours(trained: dict[str, Path], nearest: int) -> None:
    runs = materials(list(trained.values()))
    complete(runs[0], embed=False)
    sides = sides_of(runs[0])
    assert sides is not None
    rows = random_rows(runs[0].evaluation, ROWS)
    models = {run.name: run.evaluation for run in runs[: 2 if nearest == 9 else 1]}
    questions = [question(models, *sides, int(row), nearest) for row in rows]
    theme = THEMES[""]
    (axes,) = retrieval_figure(questions, nearest, theme).axes
    frames = [patch for patch in axes.patches if isinstance(patch, Rectangle)]
    expected: Counter[str] = Counter({theme.query: len(rows)})
    for evaluation in models.values():
        for row in rows:
            found = evaluation.gallery_labels[evaluation.neighbours[row, :nearest]] == evaluation.labels[row]
            expected[theme.right] += int(found.sum())
            expected[theme.wrong] += int((~found).sum())
    assert Counter(to_hex(frame.get_edgecolor()) for frame in frames) == expected
    dashed = [frame for frame in frames if frame.get_linestyle() not in ("-", "solid")]  # not told by colour alone
    assert Counter(to_hex(frame.get_edgecolor()) for frame in dashed) == {theme.wrong: expected[theme.wrong]}
    assert expected[theme.wrong] > 3
    width, height = axes.get_xlim()[1], axes.get_ylim()[0]
    assert all(0 <= f.get_x() <= width - 0.6 and 0 <= f.get_y() <= height - 0.6 for f in frames)  # nothing is cut off
    boxes = [(round(f.get_x(), 3), round(f.get_y(), 3)) for f in frames]
    assert len(set(boxes)) == len(boxes)


def test_a_long_class_name_ends_before_the_answers(trained: dict[str, Path]) -> None:
    runs = materials(list(trained.values()))
    complete(runs[0], embed=False)
    sides = sides_of(runs[0])
    assert sides is not None
    one = question({run.name: run.evaluation for run in runs[:2]}, *sides, 0, 9)
    long = dataclasses.replace(one, class_name="114.Black_throated_Sparrow")
    figure = retrieval_figure([long], 9, THEMES[""])
    (axes,) = figure.axes
    answers = min(patch.get_x() for patch in axes.patches if to_hex(patch.get_edgecolor()) != THEMES[""].query)
    (name,) = [text for text in axes.texts if text.get_text().startswith("114.")]
    box = name.get_window_extent(FigureCanvasAgg(figure).get_renderer())
    assert axes.transData.inverted().transform(box)[1][0] < answers
    assert len(name.get_text()) > 10


def test_names_that_begin_alike_are_told_apart_where_they_are_cut() -> None:
    one, other = (_fitting_text(f"mathematics/arrows/U+220{end}", 0.6) for end in "34")
    assert "…" in one
    assert one != other


@pytest.mark.parametrize("name", ["cr\udce8me", r"US$ 5 and $\foo$"])
def test_a_class_of_any_name_is_drawn(trained: dict[str, Path], name: str) -> None:
    run = materials([trained["smoothap"]])[0]
    complete(run, embed=False)
    sides = sides_of(run)
    assert sides is not None
    one = dataclasses.replace(question({run.name: run.evaluation}, *sides, 0, 4), class_name=name)
    retrieval_figure([one], 4, THEMES[""]).savefig(io.BytesIO())
