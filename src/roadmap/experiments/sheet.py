"""`Sheet`: a table of results with its remarks, for a terminal, Markdown, LaTeX, CSV and HTML."""

from __future__ import annotations

import csv
import html
import io
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from roadmap.atomic import whole_file

_LATEX = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "±": r"$\pm$", "<": "$<$"}
_LATEX |= {letter: f"\\{letter}" for letter in "&%$#_{}"} | {">": "$>$", "−": "$-$"}
ENDINGS = (".txt", ".md", ".tex", ".csv", ".html")
LONG = 32  # letters, from which a cell is broken into lines
STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 90rem; padding: 0 1rem; }
h1 { font-size: 1.5rem; line-height: 1.25; }
table { border-collapse: collapse; display: block; overflow-x: auto; font-size: 14px; }
th, td { padding: .3rem .4rem; text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
th, td { border-bottom: 1px solid #8885; }
th { white-space: normal; vertical-align: bottom; }
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
    """A title, columns, rows of as many cells, and remarks below."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    notes: tuple[str, ...] = field(default=())

    def text(self) -> str:
        """For a terminal; what is in bold has a star."""
        cells = [list(self.columns), *([f"{cell.text}{' *' * cell.bold}" for cell in row] for row in self.rows)]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in cells]
        rule = "  ".join("-" * width for width in widths)
        starred = ["* in bold elsewhere"] if any(cell.bold for row in self.rows for cell in row) else []
        return "\n".join([self.title, "", lines[0], rule, *lines[1:], *(f"  - {n}" for n in (*starred, *self.notes))])

    def markdown(self) -> str:
        """A table of GitHub's kind, without the title."""

        def cell(one: Cell) -> str:
            text = one.text.replace("|", "\\|")
            return f"**{text}**" if one.bold and text else text

        lines = [self.columns, ["---"] * len(self.columns), *([cell(one) for one in row] for row in self.rows)]
        table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
        return "\n".join([table, *(["", *(f"- {note}" for note in self.notes)] if self.notes else [])])

    def latex(self) -> str:
        """A tabular for the package booktabs."""

        def cell(one: Cell) -> str:
            return f"\\textbf{{{_latex(one.text)}}}" if one.bold else _latex(one.text)

        rows = [" & ".join(cell(one) for one in row) + r" \\" for row in self.rows]
        heading = " & ".join(map(_latex, self.columns)) + r" \\"
        body = [r"\toprule", heading, r"\midrule", *rows, r"\bottomrule"]
        below = [f"% {note}" for note in self.notes]
        begin = f"\\begin{{tabular}}{{l{'r' * (len(self.columns) - 1)}}}"
        return "\n".join([f"% {self.title}", begin, *body, r"\end{tabular}", *below])

    def csv(self) -> str:
        """Plain values; what is in bold has a star."""
        text = io.StringIO(newline="")
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(self.columns)
        writer.writerows([f"{cell.text}{'*' * cell.bold}" for cell in row] for row in self.rows)
        return text.getvalue().rstrip("\n")

    def html(self) -> str:
        """A page of its own, that works without a network."""
        tell = html.escape

        def cell(one: Cell) -> str:
            kind = " class='long'" if len(one.text) > LONG else ""
            return f"<td{kind}>{f'<b>{tell(one.text)}</b>' if one.bold else tell(one.text)}</td>"

        head = "".join(f"<th>{tell(name)}</th>" for name in self.columns)
        rows = "\n".join(f"<tr>{''.join(cell(one) for one in row)}</tr>" for row in self.rows)
        notes = "\n".join(f"<li>{tell(note)}</li>" for note in self.notes)
        return (
            f"<!doctype html>\n<html lang='en'><meta charset='utf-8'><title>{tell(self.title)}</title>"
            f"<meta name='viewport' content='width=device-width'><style>{STYLE}</style>\n<h1>{tell(self.title)}</h1>\n"
            f"<table><thead><tr>{head}</tr></thead>\n<tbody>{rows}</tbody></table>\n<ul>{notes}</ul></html>"
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
