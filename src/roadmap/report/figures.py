"""Queries with their nearest as figures for a paper: PNG and PDF, for light and for dark pages.

nearest-4      a query and the 4 pictures nearest to it, as Fig. 6 of the paper
corrections    a query and 9 answers of one run above those of another, which it corrects, as Fig. 7
nearest-10     a query and the 10 pictures nearest to it, as Figs. 14 to 16

Queries are framed in purple; what was found in green where it is of the query's class, in dashed red where it is not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image, ImageOps

from roadmap.atomic import whole_file
from roadmap.data.pictures.images import Pixels
from roadmap.evaluation import Evaluation
from roadmap.names import printable
from roadmap.report.choices import corrected_rows, random_rows
from roadmap.report.material import Material, sides_of
from roadmap.report.retrievals import Side, question
from roadmap.report.retrievals_html import Question

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ENDINGS = ("png", "pdf")
SIDE = 160  # pixels of a picture, at most
ROWS = 6  # queries of a figure
TILE, GAP, STRIP = 0.62, 0.06, 0.16  # inches: a picture, what is between two, a line of words
ASIDE = 1.35 * (TILE + GAP)  # inches, that a query and its name have
LETTERS = 6  # points


@dataclass(frozen=True)
class Theme:
    """Colours of a figure."""

    paper: str
    ink: str
    query: str
    right: str
    wrong: str


THEMES = {
    "": Theme("#ffffff", "#1c2128", "#7b3fb5", "#1a7f37", "#c9252d"),
    "-dark": Theme("#0f1318", "#e8ebef", "#b78cf0", "#3fb950", "#ff6a62"),
}


def write_figures(folder: Path, runs: Sequence[Material]) -> list[Path]:
    """Writes every figure that the runs permit, each file whole or not at all; which they are.

    Of the first run `nearest-4` and `nearest-10`; for every other run `corrections-NAME`, both ways.
    """
    sides = sides_of(runs[0]) if runs[0].has_classes else None
    if sides is None:
        return []
    folder.mkdir(parents=True, exist_ok=True)
    found = []
    for name, questions, nearest in _contents(runs, sides):
        for ending, theme in THEMES.items():
            figure = retrieval_figure(questions, nearest, theme)
            for kind in ENDINGS:
                path = folder / f"{name}{ending}.{kind}"
                with whole_file(path) as temporary:  # without a date: the same runs give the same bytes
                    undated: dict[str, Any] = {"CreationDate": None} if kind == "pdf" else {"Software": None}
                    figure.savefig(temporary, dpi=200, format=kind, metadata=undated)
                found.append(path)
    return found


def _contents(runs: Sequence[Material], sides: tuple[Side, Side]) -> list[tuple[str, list[Question], int]]:
    """Name, queries, and how many answers of each."""

    def asked(models: Mapping[str, Evaluation], rows: Any, nearest: int) -> list[Question]:
        return [question(models, *sides, int(row), nearest) for row in rows]

    first = runs[0]
    alone = {first.name: first.evaluation}
    drawn = random_rows(first.evaluation, ROWS)
    found = [("nearest-4", asked(alone, drawn, 4), 4), ("nearest-10", asked(alone, drawn, 10), 10)]
    for other in runs[1:]:
        for better, worse in ((first, other), (other, first)):
            rows = corrected_rows(worse.evaluation, better.evaluation, ROWS)
            if len(rows):
                models = {run.name: run.evaluation for run in (better, worse)}
                name = f"corrections-{_plain(better.name)}-of-{_plain(worse.name)}"
                found.append((name, asked(models, rows, 9), 9))
    return found


def _plain(name: str) -> str:
    return "".join(letter if letter.isalnum() or letter in "._-=" else "_" for letter in name)


def retrieval_figure(questions: Sequence[Question], nearest: int, theme: Theme) -> Figure:
    """Queries below one another, each with the answers of every model in a line of its own.

    Up to 5 pictures wide they stand two beside one another.
    """
    from matplotlib.figure import Figure

    models = len(questions[0].answers)
    named = models > 1
    across = 2 if nearest <= 4 and len(questions) > 1 else 1
    block = nearest * (TILE + GAP) + ASIDE + (0.3 if across == 2 else 0.0)
    high = models * (TILE + GAP + STRIP) + (0.14 if named else 0.1)
    lines = -(-len(questions) // across)
    width, height = across * block + 0.15 - 0.3 * (across - 1), lines * high + 0.1
    figure = Figure((width, height), facecolor=theme.paper)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, width), ylim=(height, 0))
    axes.axis("off")
    for number, one in enumerate(questions):
        left, top = 0.12 + number % across * block, 0.1 + number // across * high
        _draw_question(axes, one, nearest, left, top, theme, named)
    return figure


def _draw_question(axes: Any, one: Question, nearest: int, left: float, top: float, theme: Theme, named: bool) -> None:
    rows = len(one.answers)
    line = TILE + GAP + (STRIP if named else 0.0)
    middle = top + ((STRIP if named else 0.0) + rows * line - GAP - TILE) / 2
    _draw_picture(axes, one.pixels, left, middle if named else top, theme.query, "-")
    axes.text(
        left,
        (middle if named else top) + TILE + 0.12,
        _fitting_text(one.class_name, ASIDE - 0.1),
        color=theme.ink,
        fontsize=LETTERS,
        va="center",
    )
    start = left + ASIDE
    for row, answers in enumerate(one.answers):
        at = top + row * line + (STRIP if named else 0.0)
        if named:
            words = f"{_short(answers.model, 40)}, AP@R {100 * answers.average_precision:.1f}"
            axes.text(start, at - 0.08, words, color=theme.ink, fontsize=LETTERS, va="center")
        for place, item in enumerate(answers.items[:nearest]):
            colour, style = (theme.right, "-") if item.right else (theme.wrong, (0, (2.2, 1.2)))
            _draw_picture(axes, item.pixels, start + place * (TILE + GAP), at, colour, style)


def _draw_picture(axes: Any, pixels: Pixels, left: float, top: float, colour: str, style: Any) -> None:
    """A picture's central square with a frame."""
    from matplotlib.patches import Rectangle

    side = min(SIDE, *pixels.shape[:2])
    square = ImageOps.fit(Image.fromarray(pixels), (side, side), Image.Resampling.LANCZOS)
    axes.imshow(np.asarray(square), extent=(left, left + TILE, top + TILE, top), interpolation="antialiased", zorder=1)
    axes.add_patch(
        Rectangle((left, top), TILE, TILE, fill=False, edgecolor=colour, linewidth=1.8, linestyle=style, zorder=2)
    )


def _fitting_text(text: str, inches: float) -> str:
    """As much of a text as is no wider than that: beyond are the answers."""
    from matplotlib.textpath import TextPath

    most = len(text)
    while most > 1 and TextPath((0, 0), _short(text, most), size=LETTERS).get_extents().width / 72 > inches:
        most -= 1
    return _short(text, most)


def _short(text: str, most: int) -> str:
    """Text as it stands; matplotlib would read formulas between dollars."""
    if len(text) > most:  # the end tells names apart that begin alike, such as those of nested folders
        kept = max(most - 1, 1)
        text = f"{text[: kept // 2]}…{text[-(kept - kept // 2) :]}"
    cut = printable(text)
    return cut.replace("$", r"\$")
