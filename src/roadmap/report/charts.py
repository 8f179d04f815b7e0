"""Charts as SVG in the colours of the page they stand on: light, dark and on paper. Numbers to words, no script."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

import numpy as np

from roadmap.data.records import Floats

WIDTH, HEIGHT = 440, 250
LEFT, RIGHT, TOP, BOTTOM = 52, 12, 12, 38  # margins around what is drawn
COLOURS = 8  # of lines; then they repeat


@dataclass(frozen=True, eq=False)
class Line:
    """A line of a chart: its name, points, and how it is drawn: the number of its colour, dashed or not."""

    name: str
    xs: Sequence[float]
    ys: Sequence[float]
    colour: int = 0
    dashed: bool = False


@dataclass(frozen=True)
class Frame:
    """What the axes reach over, and where a value lies on the drawing."""

    low_x: float
    high_x: float
    low_y: float
    high_y: float

    def x(self, value: float) -> float:
        return LEFT + (value - self.low_x) / (self.high_x - self.low_x) * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        return HEIGHT - BOTTOM - (value - self.low_y) / (self.high_y - self.low_y) * (HEIGHT - TOP - BOTTOM)


def ticks(low: float, high: float, about: int = 5, whole: bool = False) -> list[float]:
    """Round numbers from `low` to `high`, some `about` of them; only whole ones, where there is nothing between."""
    step = max((high - low) / about, 1.0 if whole else 0.0)
    size = 10.0 ** math.floor(math.log10(step))
    steps = [size * factor for factor in (1, 2, 2.5, 5, 10) if not whole or (size * factor).is_integer()]
    step = next(one for one in steps if one >= step * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [round(number * step, 10) for number in range(first, math.floor(high / step + 1e-9) + 1)]


def line_chart(lines: Sequence[Line], x_label: str, y_label: str, *, floor: float | None = None) -> str:
    """Lines over one another, with a legend. Points that are not finite are left out.

    Args:
        lines: with at least one point among them.
        x_label, y_label: of the axes.
        floor: where the y axis begins; None: a little below the lowest point.
    """
    points = [(x, y) for line in lines for x, y in zip(line.xs, line.ys, strict=True) if math.isfinite(y)]
    xs, ys = [x for x, _ in points], [y for _, y in points]
    frame = _frame(min(xs), max(xs), min(ys) if floor is None else floor, max(ys), floor is None)
    drawn = "\n".join(_line(frame, line) for line in lines)
    said = f"{y_label} by {x_label}: {', '.join(line.name for line in lines)}"
    counted = all(float(x).is_integer() for x in xs)  # epochs, steps, ranks
    return legend(lines) + _svg(said, _axes(frame, x_label, y_label, counted) + drawn)


def _frame(low_x: float, high_x: float, low_y: float, high_y: float, below: bool) -> Frame:
    room = (high_y - low_y) * 0.06 or max(abs(high_y), 1.0) * 0.06
    return Frame(low_x, high_x if high_x > low_x else low_x + 1, low_y - room * below, high_y + room)


def _line(frame: Frame, line: Line) -> str:
    points = [(x, y) for x, y in zip(line.xs, line.ys, strict=True) if math.isfinite(y)]
    path = " ".join(f"{frame.x(x):.1f},{frame.y(y):.1f}" for x, y in points)
    style = f"line s{line.colour % COLOURS}{' dashed' if line.dashed else ''}"
    dots = ""
    if len(points) <= 30:
        dots = "".join(
            f'<circle class="s{line.colour % COLOURS}" cx="{frame.x(x):.1f}" cy="{frame.y(y):.1f}" r="2.4">'
            f"<title>{escape(line.name)}: {_number(x)}, {y:.4g}</title></circle>"
            for x, y in points
        )
    return f'<polyline class="{style}" points="{path}"><title>{escape(line.name)}</title></polyline>{dots}'


def legend(lines: Sequence[Line]) -> str:
    """The names of lines beside how they are drawn."""
    items = "".join(
        f'<span><svg class="mark" viewBox="0 0 24 8" aria-hidden="true"><path class="line s{line.colour % COLOURS}'
        f'{" dashed" if line.dashed else ""}" d="M1 4H23"/></svg>{escape(line.name)}</span>'
        for line in lines
    )
    return f'<p class="legend">{items}</p>\n'


def score_chart(
    edges: Floats, positives: Floats, negatives: Floats, alpha: float, beta: float, span: tuple[float, float], said: str
) -> str:
    """Shares of positive and of negative pairs in each bin, and where alpha and beta lie.

    Args:
        edges: (B + 1,) of the bins.
        positives, negatives: (B,) shares.
        span: what of the scores is shown.
        said: what it shows, for who cannot see it.
    """
    highest = max(float(positives.max()), float(negatives.max()), 1e-9)
    frame = Frame(span[0], span[1], 0.0, 100 * highest * 1.12)
    areas = "".join(
        _area(frame, edges, 100 * values, kind) for kind, values in (("negative", negatives), ("positive", positives))
    )
    marks = "".join(
        f'<path class="threshold" d="M{frame.x(at):.1f} {TOP + 11}V{HEIGHT - BOTTOM}"/>'
        f'<text class="{kind}" x="{frame.x(at):.1f}" y="{TOP + 7}" text-anchor="middle">{letter} {at:g}</text>'
        for letter, at, kind in (("β", beta, "negative"), ("α", alpha, "positive"))
        if span[0] <= at <= span[1]
    )
    return _svg(
        said, _axes(frame, f"cosine, in bins of {edges[1] - edges[0]:.2g}", "% of the pairs of a kind") + areas + marks
    )


def _area(frame: Frame, edges: Floats, values: Floats, kind: str) -> str:
    shown = np.flatnonzero((edges[1:] > frame.low_x + 1e-9) & (edges[:-1] < frame.high_x - 1e-9))
    ground = frame.y(0)
    steps = "".join(
        f"V{frame.y(values[b]):.1f}H{frame.x(min(float(edges[b + 1]), frame.high_x)):.1f}" for b in shown.tolist()
    )
    return f'<path class="area {kind}" d="M{frame.x(frame.low_x):.1f} {ground:.1f}{steps}V{ground:.1f}Z"/>'


def _axes(frame: Frame, x_label: str, y_label: str, counted: bool = False) -> str:
    bottom, middle = HEIGHT - BOTTOM, (TOP + HEIGHT - BOTTOM) / 2
    parts = [f'<path class="axis" d="M{LEFT} {TOP}V{bottom}H{WIDTH - RIGHT}"/>']
    for value in ticks(frame.low_y, frame.high_y):
        y = frame.y(value)
        parts.append(f'<path class="rule" d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{_number(value)}</text>')
    for value in ticks(frame.low_x, frame.high_x, whole=counted):
        parts.append(f'<text x="{frame.x(value):.1f}" y="{bottom + 16}" text-anchor="middle">{_number(value)}</text>')
    across = (LEFT + WIDTH - RIGHT) / 2
    parts.append(f'<text class="name" x="{across:.0f}" y="{HEIGHT - 5}" text-anchor="middle">{escape(x_label)}</text>')
    turn = f"rotate(-90 11 {middle:.0f})"
    name = escape(y_label)
    parts.append(f'<text class="name" x="11" y="{middle:.0f}" text-anchor="middle" transform="{turn}">{name}</text>')
    return "\n".join(parts) + "\n"


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:g}".replace("-", "−")


def _svg(said: str, inside: str) -> str:
    return (
        f'<svg class="chart" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(said)}">\n{inside}</svg>\n'
    )
