"""What a search found, drawn: one picture, or a page that needs nothing beside itself."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping
from html import escape
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw, ImageFont, ImageOps

from roadmap.atomic import whole_file
from roadmap.data import PictureError
from roadmap.data.pictures.images import upright
from roadmap.names import breakable
from roadmap.search.files import row_file
from roadmap.search.index import Index
from roadmap.search.results import Results

ENDINGS = (".html", ".png", ".jpg", ".jpeg", ".webp")
SIDE, MARGIN, LINE, ACROSS = 160, 8, 14, 6
GREY, DARK = "#dddddd", "#222222"


def check_ending(path: Path) -> None:
    if path.suffix.lower() not in ENDINGS:
        raise ValueError(f"{path} must end in one of {', '.join(ENDINGS)}, got {path.suffix or 'no ending'!r}")


def draw_results(path: str | Path, index: Index, query: Image.Image, results: Results, title: str = "") -> None:
    """Write the query and what was found for it, best first: .html, or .png, .jpg, .webp; whole or not at all."""
    path = Path(path)
    check_ending(path)
    found = [
        (picture_in(index, row), f"{score:.3f}", str(row["label"] or ""), name)
        for row, score, name in zip(results.metadata[0], results.scores[0], results.ids[0], strict=True)
    ]
    cells = [(query, "query", "", ""), *found]
    path.parent.mkdir(parents=True, exist_ok=True)
    with whole_file(path) as temporary:
        if path.suffix.lower() == ".html":
            Path(temporary).write_text(_page(title, cells), encoding="utf-8")
        else:
            kind = {"jpg": "jpeg"}.get(path.suffix.lower()[1:], path.suffix.lower()[1:])
            _sheet(cells).save(temporary, format=kind)


def picture_in(index: Index, row: Mapping[str, Any]) -> Image.Image | None:
    """The picture of a row, cut to its box; None where it is not in the index's folder or cannot be decoded."""
    if "root" not in index.manifest.about:
        return None
    try:
        return upright(*row_file(Path(index.manifest.about["root"]), row["id"]))
    except (FileNotFoundError, PictureError):
        return None


def _thumbnail(image: Image.Image | None) -> Image.Image:
    if image is None:
        return Image.new("RGB", (SIDE, SIDE), GREY)
    return ImageOps.contain(image.convert("RGB"), (SIDE, SIDE))


def _sheet(cells: list[tuple[Image.Image | None, str, str, str]]) -> Image.Image:
    width, height = SIDE + MARGIN, SIDE + 3 * LINE + MARGIN
    rows = -(-len(cells) // ACROSS)
    sheet = Image.new("RGB", (min(len(cells), ACROSS) * width + MARGIN, rows * height + MARGIN), "white")
    pen, font = ImageDraw.Draw(sheet), ImageFont.load_default(11)
    for i, (image, *lines) in enumerate(cells):
        x, y = MARGIN + i % ACROSS * width, MARGIN + i // ACROSS * height
        small = _thumbnail(image)
        sheet.paste(small, (x + (SIDE - small.width) // 2, y + (SIDE - small.height) // 2))
        for number, text in enumerate(lines):
            pen.text((x, y + SIDE + number * LINE), _shortened(text, font), fill=DARK, font=font)
    return sheet


def _shortened(text: str, font: Any) -> str:
    """The end of a text that is too long: of a path it says the most."""
    while text and font.getlength(text) > SIDE:
        text = "…" + text[2:]
    return text


def _page(title: str, cells: list[tuple[Image.Image | None, str, str, str]]) -> str:
    figures = "\n".join(
        f'<figure><img alt="{escape(third or first)}" src="{_data(image)}"><figcaption>'
        f"<b>{escape(first)}</b> {breakable(second)}<br><small>{breakable(third)}</small></figcaption></figure>"
        for image, first, second, third in cells
    )
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark"><title>{escape(title)}</title>
<style>body{{font:15px system-ui;margin:1rem;overflow-wrap:anywhere}}main{{display:flex;flex-wrap:wrap;gap:1rem}}
h1{{font-size:1.4rem}}figure{{margin:0;width:{SIDE}px}}
figure:first-child{{outline:3px solid #0072b2;outline-offset:3px}}
img{{display:block;width:{SIDE}px;height:{SIDE}px;object-fit:scale-down}}</style>
</head><body><h1>{breakable(title)}</h1><main>
{figures}
</main></body></html>
"""


def _data(image: Image.Image | None) -> str:
    content = io.BytesIO()
    _thumbnail(image).save(content, format="png")
    return "data:image/png;base64," + base64.b64encode(content.getvalue()).decode()
