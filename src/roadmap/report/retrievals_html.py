"""How the page of retrievals looks: plain HTML and CSS, pictures within, no script, light or dark as the reader's."""

from __future__ import annotations

import base64
import io
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

from PIL import Image, ImageOps

from roadmap.data.pictures.images import Pixels
from roadmap.names import breakable

THUMBNAIL = 128  # side of the embedded pictures; about twice what is shown, for dense screens
TINY = 64  # pictures up to this side are kept to the pixel
TABLE = re.compile(r"R@\d+|mAP@R|mAP")  # the metrics of the table; the others say nearly the same


@dataclass(frozen=True, eq=False)
class Answer:
    """One retrieved picture: its pixels (H, W, 3), class, file and score, and whether it is of the query's class."""

    pixels: Pixels
    class_name: str
    file: str
    score: float
    right: bool


@dataclass(frozen=True)
class Answers:
    """What one model retrieves for a query, nearest first, and the AP@R of its whole ranking."""

    model: str
    average_precision: float
    items: Sequence[Answer]


@dataclass(frozen=True, eq=False)
class Question:
    """A query, how many pictures of its class there are to find (R), and the answers of every model."""

    pixels: Pixels
    class_name: str
    file: str
    relevant: int
    answers: Sequence[Answers]


def document(
    title: str,
    about: str,
    metrics: Mapping[str, Mapping[str, float]],
    groups: Sequence[tuple[str, Sequence[Question]]],
) -> str:
    """The whole page.

    Args:
        title: heading, and name of the window.
        about: how the queries were chosen, a plain sentence or two.
        metrics: model -> name -> value in [0, 1].
        groups: heading -> questions.
    """
    sections = "\n".join(_section(name, questions) for name, questions in groups)
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{escape(title)}</title>
<style>{STYLE}</style>
</head>
<body>
<header>
<h1>{escape(title)}</h1>
<p>{escape(about)}</p>
{_table(metrics)}
{LEGEND}
</header>
<main>
{sections}
</main>
</body>
</html>
"""


def data_uri(pixels: Pixels) -> str:
    """A picture as text: tiny ones as PNG, to the pixel; others cut to their central square, as JPEG."""
    image = Image.fromarray(pixels)
    buffer = io.BytesIO()
    if max(image.size) <= TINY:
        image.save(buffer, "PNG", optimize=True)
        kind = "png"
    else:
        side = min(THUMBNAIL, *image.size)
        ImageOps.fit(image, (side, side), Image.Resampling.LANCZOS).save(buffer, "JPEG", quality=82, optimize=True)
        kind = "jpeg"
    return f"data:image/{kind};base64,{base64.b64encode(buffer.getvalue()).decode('ascii')}"


def file_name(path: str) -> str:
    """The last part of a path; the whole is shown where the mouse rests."""
    return path.rsplit("/", 1)[-1] or path


def _table(metrics: Mapping[str, Mapping[str, float]]) -> str:
    """Models below one another, the best value of each column in bold; values in percent."""
    rows = list(metrics.items())
    names = [name for name in (rows[0][1] if rows else {}) if TABLE.fullmatch(name) and all(name in m for _, m in rows)]
    if not names:
        return ""
    best = {name: max(f"{100 * values[name]:05.1f}" for _, values in rows) for name in names}
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in names)
    lines = []
    for model, values in rows:
        cells = ""
        for name in names:
            text = f"{100 * values[name]:05.1f}"
            tag = "b" if text == best[name] and len(rows) > 1 else "span"
            cells += f"<td><{tag}>{100 * values[name]:.1f}</{tag}></td>"
        lines.append(f'<tr><th scope="row">{escape(model)}</th>{cells}</tr>')
    body = "\n".join(lines)
    head = f'<thead><tr><th scope="col">%</th>{head}</tr></thead>'
    return f'<div class="wide"><table>\n{head}\n<tbody>\n{body}\n</tbody>\n</table></div>'


def _section(name: str, questions: Sequence[Question]) -> str:
    articles = "\n".join(map(article, questions))
    return f"<section>\n<h2>{escape(name)}</h2>\n{articles}\n</section>"


def article(question: Question) -> str:
    """A query beside what every model retrieves for it."""
    answers = "\n".join(_answers(given, question.relevant) for given in question.answers)
    label = f"query of class {question.class_name}, {question.file}"
    return f"""<article>
<figure class="query" title="{escape(label)}">
<img src="{data_uri(question.pixels)}" alt="{escape(label)}">
<figcaption><b>{breakable(question.class_name)}</b><br><span class="file">{breakable(file_name(question.file))}</span>
<br>{question.relevant} to find</figcaption>
</figure>
<div class="answers">
{answers}
</div>
</article>"""


def _answers(given: Answers, relevant: int) -> str:
    found = sum(item.right for item in given.items[:relevant])
    possible = min(relevant, len(given.items))
    items = "\n".join(_item(place, item, place > relevant) for place, item in enumerate(given.items, start=1))
    return f"""<h3>{escape(given.model)} <span>AP@R {100 * given.average_precision:.1f} · \
{found} of the first {possible} right</span></h3>
<ol style="--count:{max(len(given.items), 1)}">
{items}
</ol>"""


def _item(place: int, item: Answer, beyond: bool) -> str:
    kind, sign, said = ("right", "✓", "same class") if item.right else ("wrong", "✗", "another class")
    label = f"{place}: {said}, {item.class_name}, score {item.score:.4f}, {item.file}"
    return (
        f'<li class="{kind}{" beyond" if beyond else ""}" title="{escape(label)}">'
        f'<img src="{data_uri(item.pixels)}" alt="{escape(label)}"><i aria-hidden="true">{sign}</i>'
        f'<small aria-hidden="true">{item.score:.2f}<br>{breakable(item.class_name)}<br>'
        f'<span class="file">{breakable(file_name(item.file))}</span></small></li>'
    )


LEGEND = """<p class="legend">
<span><span class="key right"><i>✓</i></span> of the query's class</span>
<span><span class="key wrong"><i>✗</i></span> of another class</span>
<span><span class="key beyond"></span> faded: beyond the R places that AP@R looks at, R being the number to find</span>
<span>below each picture: its cosine with the query, its class, its file</span>
</p>"""

STYLE = """
:root{--paper:#fff;--panel:#f6f7f9;--ink:#1c2128;--faint:#626b76;--line:#dde1e6;--right:#1a7f37;--wrong:#c9252d}
@media (prefers-color-scheme:dark){:root{--paper:#0f1318;--panel:#181d24;--ink:#e8ebef;--faint:#97a1ad;--line:#2c343e;
--right:#3fb950;--wrong:#ff6a62}}
*{box-sizing:border-box}
body{margin:0 auto;max-width:1180px;padding:24px 20px 64px;background:var(--paper);color:var(--ink);
font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"DejaVu Sans",sans-serif}
h1{font-size:26px;line-height:1.25;margin:0 0 6px}
h2{font-size:19px;margin:40px 0 12px}
h3{font-size:13px;margin:0 0 -7px}
h3 span{font-weight:400;color:var(--faint);margin-left:6px}
header p{margin:0 0 16px;color:var(--faint);max-width:76ch}
div.wide{overflow-x:auto}
table{border-collapse:collapse;margin:0 0 16px;font-variant-numeric:tabular-nums}
th,td{padding:4px 16px 4px 0;text-align:right;border-bottom:1px solid var(--line)}
th:first-child{text-align:left}
thead th{font-weight:600;color:var(--faint)}
.legend{display:flex;flex-wrap:wrap;gap:6px 22px;font-size:13px;max-width:none}
.legend>span{display:inline-flex;align-items:center;gap:7px}
.key{position:relative;width:26px;height:26px;border:3px solid var(--frame,var(--faint));border-radius:4px;flex:none}
.key i{top:-7px;right:-8px}
.key.beyond{opacity:.4}
article{display:grid;grid-template-columns:112px 1fr;gap:20px;padding:16px;margin:0 0 14px;background:var(--panel);
border:1px solid var(--line);border-radius:10px}
figure{margin:0;font-size:13px;line-height:1.35;overflow-wrap:anywhere}
figcaption{margin-top:6px;color:var(--faint)}
figcaption b{color:var(--ink)}
img{display:block;width:100%;aspect-ratio:1;object-fit:cover;border-radius:4px;background:#fff padding-box}
.answers{display:grid;gap:12px;min-width:0;align-content:start}
ol{list-style:none;margin:0;padding:0;display:grid;grid-template-columns:repeat(var(--count),minmax(0,96px));gap:8px}
li{position:relative;min-width:0}
.right{--frame:var(--right)}
.wrong{--frame:var(--wrong)}
li img{border:3px solid var(--frame)}
li.wrong img,.key.wrong{border-style:dashed}
li.beyond img,li.beyond i{opacity:.4}
i{position:absolute;top:-4px;right:-4px;width:17px;height:17px;border-radius:50%;background:var(--frame);
color:var(--paper);font:700 11px/17px system-ui,"DejaVu Sans",sans-serif;text-align:center}
small{display:block;margin-top:2px;font-size:11px;line-height:1.3;color:var(--ink);text-align:center;
overflow-wrap:anywhere}
.file{color:var(--faint);font-size:10px;overflow-wrap:anywhere}
@media (max-width:820px){ol{grid-template-columns:repeat(auto-fill,minmax(64px,1fr))}}
@media (max-width:640px){body{padding:16px 12px 48px}article{grid-template-columns:1fr;padding:12px;gap:12px}
.query{display:grid;grid-template-columns:88px 1fr;gap:12px;align-items:center}
ol{grid-template-columns:repeat(5,minmax(0,1fr));gap:6px}
th,td{padding-right:10px}}
@media print{body{max-width:none}article{break-inside:avoid}}
"""
