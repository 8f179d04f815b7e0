"""`Sheet`: a table of results with its remarks, for a terminal, Markdown, LaTeX, CSV and HTML."""

from __future__ import annotations

import csv
import html
import io
import itertools
import re
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from roadmap.atomic import whole_file

_LATEX = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "±": r"$\pm$", "<": "$<$"}
_LATEX |= {letter: f"\\{letter}" for letter in "&%$#_{}"} | {">": "$>$", "−": "$-$"}
ENDINGS = (".txt", ".md", ".tex", ".csv", ".html")
LONG = 32  # letters, from which a cell is broken into lines
WIDTH = 80  # letters of a line of remarks
STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 90rem; padding: 0 1rem; }
h1 { font-size: 1.5rem; line-height: 1.25; }
table { border-collapse: collapse; display: block; overflow-x: auto; font-size: 14px; }
th, td { padding: .3rem .4rem; text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
th, td { border-bottom: 1px solid #8885; }
th { white-space: normal; vertical-align: bottom; }
th.over { text-align: center; }
th.over:empty { border: 0; }
th:first-child, td:first-child { text-align: left; position: sticky; left: 0; background: Canvas; }
td.long { white-space: normal; min-width: 11rem; text-align: left; }
ul { max-width: 60rem; overflow-wrap: anywhere; }
@media (max-width: 640px) { td.long:first-child { min-width: 9.5rem; overflow-wrap: anywhere; } }
@page { size: A4 landscape; margin: 1cm; }
@media print {
  body { margin: 0; padding: 0; font-size: 11px; }
  table { display: table; width: 100%; font-size: 9px; }
  th, td { padding: .15rem .2rem; white-space: normal; }
  td.long { min-width: 0; overflow-wrap: anywhere; }
  thead { display: table-header-group; }
  tr { break-inside: avoid; }
}
:root { color-scheme: light dark; }
"""


@dataclass(frozen=True)
class Cell:
    """Text that may be in bold."""

    text: str
    bold: bool = False


@dataclass(frozen=True)
class Sheet:
    """A title, columns, rows of as many cells, and remarks below.

    Attributes:
        over: headings over columns, from left to right: each and how many columns it stands over; "" for none. Columns
            below different headings may have the same name.
    """

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    notes: tuple[str, ...] = field(default=())
    over: tuple[tuple[str, int], ...] = field(default=())

    @property
    def names(self) -> tuple[str, ...]:
        """Of the columns, each with its heading, so that no two are alike."""
        headings = [heading for heading, count in self.over for _ in range(count)] or [""] * len(self.columns)
        return tuple(
            name if heading in ("", name) else f"{heading}: {name}"
            for heading, name in zip(headings, self.columns, strict=True)
        )

    def text(self) -> str:
        """For a terminal; what is in bold has a star. Each heading has a table of its own, below the one before."""
        cells = [list(self.columns), *([f"{cell.text}{' *' * cell.bold}" for cell in row] for row in self.rows)]
        starred = ["a star stands for bold"] if any(cell.bold for row in self.rows for cell in row) else []
        notes = (textwrap.wrap(note, WIDTH - 4, break_on_hyphens=False) for note in (*starred, *self.notes))
        below = [f"  - {first}" + "".join(f"\n    {line}" for line in more) for first, *more in notes]
        tables = [_text_table([[line[place] for place in places] for line in cells]) for places in self._tables()]
        return "\n".join([self.title, "", "\n\n".join(tables), *below])

    def _tables(self) -> list[list[int]]:
        """The columns of each heading, after those that stand below none."""
        if not self.over:
            return [list(range(len(self.columns)))]
        ends = list(itertools.accumulate(count for _, count in self.over))
        spans = [(name, list(range(end - count, end))) for (name, count), end in zip(self.over, ends, strict=True)]
        alone = [place for name, places in spans for place in places if not name]
        return [[*alone, *places] for name, places in spans if name]

    def markdown(self) -> str:
        """A table of GitHub's kind, without the title."""

        def cell(one: Cell) -> str:
            text = one.text.replace("|", "\\|")
            return f"**{text}**" if one.bold and text else text

        lines = [self.names, ["---"] * len(self.columns), *([cell(one) for one in row] for row in self.rows)]
        table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
        return "\n".join([table, *(["", *(f"- {note}" for note in self.notes)] if self.notes else [])])

    def latex(self) -> str:
        """A tabular for the package booktabs."""

        def cell(one: Cell) -> str:
            return f"\\textbf{{{_latex(one.text)}}}" if one.bold else _latex(one.text)

        rows = [" & ".join(cell(one) for one in row) + r" \\" for row in self.rows]
        heading = " & ".join(map(_latex, self.columns)) + r" \\"
        body = [r"\toprule", *self._latex_over(), heading, r"\midrule", *rows, r"\bottomrule"]
        below = [f"% {note}" for note in self.notes]
        begin = f"\\begin{{tabular}}{{l{'r' * (len(self.columns) - 1)}}}"
        return "\n".join([f"% {self.title}", begin, *body, r"\end{tabular}", *below])

    def _latex_over(self) -> list[str]:
        """The headings, and a rule below each."""
        if not self.over:
            return []
        ends = itertools.accumulate(count for _, count in self.over)
        rules = [
            f"\\cmidrule(lr){{{end - count + 1}-{end}}}"
            for (name, count), end in zip(self.over, ends, strict=True)
            if name
        ]
        headings = (f"\\multicolumn{{{count}}}{{c}}{{{_latex(name)}}}" for name, count in self.over)
        return [" & ".join(headings) + r" \\", " ".join(rules)]

    def csv(self) -> str:
        """Plain values; what is in bold has a star."""
        text = io.StringIO(newline="")
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(self.names)
        writer.writerows([f"{cell.text}{'*' * cell.bold}" for cell in row] for row in self.rows)
        return text.getvalue().rstrip("\n")

    def html(self) -> str:
        """A page of its own, that works without a network."""
        tell = html.escape

        def cell(one: Cell) -> str:
            kind = " class='long'" if len(one.text) > LONG else ""
            return f"<td{kind}>{f'<b>{tell(one.text)}</b>' if one.bold else tell(one.text)}</td>"

        over = "".join(f"<th class='over' colspan='{count}'>{tell(name)}</th>" for name, count in self.over)
        above = f"<tr>{over}</tr>\n" if over else ""
        head = "".join(f"<th>{tell(name)}</th>" for name in self.columns)
        rows = "\n".join(f"<tr>{''.join(cell(one) for one in row)}</tr>" for row in self.rows)
        notes = "\n".join(f"<li>{tell(note)}</li>" for note in self.notes)
        return (
            f"<!doctype html>\n<html lang='en'><meta charset='utf-8'><title>{tell(self.title)}</title>"
            f"<meta name='viewport' content='width=device-width'><style>{STYLE}</style>\n<h1>{tell(self.title)}</h1>\n"
            f"<table><thead>{above}<tr>{head}</tr></thead>\n<tbody>{rows}</tbody></table>\n<ul>{notes}</ul></html>"
        )

    def write(self, path: str | Path) -> None:
        """Into a file that ends in .txt, .md, .tex, .csv or .html; whole or not at all."""
        path = Path(path)
        kinds: dict[str, Callable[[], str]] = dict(
            zip(ENDINGS, (self.text, self.markdown, self.latex, self.csv, self.html), strict=True)
        )
        check_ending(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        with whole_file(path) as temporary:
            Path(temporary).write_text(kinds[path.suffix]() + "\n", encoding="utf-8")


def _text_table(cells: Sequence[Sequence[str]]) -> str:
    """Lines of equal columns; the first is the heading."""
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    head, *lines = ["  ".join(map(str.ljust, line, widths)).rstrip() for line in cells]
    return "\n".join([head, "  ".join("-" * width for width in widths), *lines])


def check_ending(path: Path) -> None:
    """Refuses a file of a kind that a sheet cannot be written as."""
    if path.suffix not in ENDINGS:
        raise ValueError(f"{path} must end in one of {', '.join(ENDINGS)}, got {path.suffix or 'no ending'!r}")


def _latex(text: str) -> str:
    told = re.sub(r".", lambda found: _LATEX.get(found[0], found[0]), text)
    return re.sub(r"(?<!\S)-(?=\d)", "$-$", told)  # of a number: else it would be set as a hyphen


def row(cells: Sequence[str | Cell]) -> tuple[Cell, ...]:
    """Cells, plain where they are mere text."""
    return tuple(one if isinstance(one, Cell) else Cell(one) for one in cells)
