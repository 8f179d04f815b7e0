"""`report`: runs as one page that needs nothing beside itself, for a screen of any size and for paper."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping, Sequence
from html import escape
from importlib import resources
from pathlib import Path

from roadmap.atomic import whole_file
from roadmap.evaluation import Evaluation
from roadmap.hardware import device_of
from roadmap.names import printable
from roadmap.report import sections, sections_about
from roadmap.report.choices import Choice, choices
from roadmap.report.completing import complete
from roadmap.report.map_html import map_data, map_section
from roadmap.report.material import Material, materials, sides_of
from roadmap.report.retrievals import Side, question
from roadmap.report.retrievals_html import LEGEND, STYLE, article

NEAREST = 10
QUERIES = 8  # in each group
MOST_PICTURES = 2400  # beside the queries, over all groups: keeps the page below some 15 MB


def report(
    runs: Sequence[str | Path],
    path: str | Path,
    *,
    figures: str | Path | None = None,
    test: str | None = None,
    title: str | None = None,
    queries: int = QUERIES,
    embed: bool = True,
    device: str = "auto",
    progress: bool | None = None,
) -> list[Material]:
    """Writes the page, whole or not at all.

    Pictures are embedded once, for the scores and the map; what comes of it is kept in each run's folder (`report/`).

    Args:
        runs: folders of runs that were tested on the same pictures; the first is compared with each other one.
        path: the .html file.
        figures: a folder for figures as PNG and PDF; None for none.
        test: the test set; None for the first that the first run has.
        title: of the page; None for the names of the runs.
        queries: in each group of queries.
        embed: False shows what is known without embedding, and says what is missing.
        device: that pictures are embedded on; "auto": that of the run.
        progress: show bars; None: where a person watches and it takes long.

    Returns:
        What the page was made of; `missing` says what could not be shown, and why.
    """
    if queries < 1:
        raise ValueError(f"queries must be at least 1, got {queries}")
    device_of(device)  # one that is not there is an error, and no reason to leave the pictures out
    found = materials(runs, test)
    for number, run in enumerate(found):
        complete(run, embed, device, progress, found[:number])
    heading = title or f"{' and '.join(run.name for run in found)} on {found[0].test}"
    text = document(heading, found, queries)
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    with whole_file(Path(path)) as temporary:
        Path(temporary).write_text(printable(text), encoding="utf-8")
    if figures is not None:
        from roadmap.report.figures import write_figures

        if not write_figures(Path(figures), found):
            found[0].missing.append("figures: they are of pictures, which cannot be shown")
    return found


def document(title: str, runs: Sequence[Material], queries: int = QUERIES) -> str:
    """The whole page as text."""
    first = runs[0]
    parts: list[tuple[str, str, str]] = [("results", "Results", sections_about.results(runs))]
    parts.append(("curves", "Curves", sections.curves(runs)))
    sides = sides_of(first) if first.has_classes else None
    if first.has_classes:
        parts.append(("scores", "Scores of pairs", sections.scores(runs)))
        parts.append(("ranks", "Precision by rank", sections.ranks(runs)))
        parts.append(("classes", "Classes, from worst to best", sections.classes(runs)))
    if sides is not None:
        parts.append(("queries", "Queries and their nearest", _queries(runs, sides, queries)))
        data = map_data(runs, sides[0])
        if data is not None:
            searched = "test pictures" if sides[0] is sides[1] else "queries"
            parts.append(("map", "Map of the test set", map_section(data, len(first.evaluation.labels), searched)))
    parts += [
        ("settings", "Settings", sections_about.settings(runs)),
        ("pictures", "Pictures", sections_about.pictures(runs)),
        ("code", "Code", sections_about.code(runs)),
        ("hardware", "Hardware", sections_about.hardware(runs)),
    ]
    return _framed(title, _about(runs), sections_about.notes(runs), parts)


def _queries(runs: Sequence[Material], sides: tuple[Side, Side], count: int) -> str:
    """Groups of queries, each with the answers of the models that it is about."""
    before = runs[0].before
    name = "before training" if len(runs) == 1 else f"{runs[0].name} before training"
    models: Mapping[str, Evaluation] = {run.name: run.evaluation for run in runs}
    if before is not None:
        models = {name: before, **models}
    groups = choices([(run.name, run.evaluation) for run in runs], before, name, count)
    wanted = sum(len(group.rows) * len(group.models) for group in groups) * NEAREST
    if wanted > MOST_PICTURES:  # many runs: fewer queries of each group
        count = max(1, count * MOST_PICTURES // wanted)
        groups = choices([(run.name, run.evaluation) for run in runs], before, name, count)
    shown = "".join(_group(group, models, sides) for group in groups)
    return f'{LEGEND}<div class="tabs" data-name="queries">\n{shown}</div>\n'


def _group(group: Choice, models: Mapping[str, Evaluation], sides: tuple[Side, Side]) -> str:
    those = {name: models[name] for name in group.models}
    articles = "\n".join(article(question(those, *sides, row, NEAREST)) for row in group.rows.tolist())
    title, about = escape(group.title), escape(group.about)
    return (
        f'<section class="panel"><h3 class="title">{title}</h3>\n<p class="about">{about}</p>\n{articles}</section>\n'
    )


def _about(runs: Sequence[Material]) -> str:
    """What the page is about, in a sentence."""
    evaluation = runs[0].evaluation
    asked, held = len(evaluation.labels), len(evaluation.gallery_labels)
    alone = evaluation.facts.get("data", {}).get("gallery") is None
    where = "search one another" if alone else f"search a gallery of {held:,}"
    classes = evaluation.facts.get("data", {}).get("classes")
    of = f" of {classes:,} classes" if classes else ""
    return f"{runs[0].test}: {asked:,} test pictures{of} {where}."


def _framed(title: str, about: str, notes: str, parts: Sequence[tuple[str, str, str]]) -> str:
    script = resources.files("roadmap.report").joinpath("page.js").read_text(encoding="utf-8")
    style = STYLE + resources.files("roadmap.report").joinpath("page.css").read_text(encoding="utf-8")
    allowed = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'sha256-{allowed}'"
    links = "".join(f'<a href="#{name}">{escape(words)}</a>' for name, words, _ in parts)
    body = "".join(
        f'<section id="{name}">\n<h2>{escape(words)}</h2>\n{inside}</section>\n' for name, words, inside in parts
    )
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{escape(policy)}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta name="referrer" content="no-referrer">
<title>{escape(title)}</title>
<style>{style}</style>
</head>
<body class="report">
<header>
<h1>{escape(title)}</h1>
<p>{escape(about)}</p>
<nav aria-label="Parts of this page">{links}</nav>
</header>
<main>
{notes}{body}</main>
<script>{script}</script>
</body>
</html>
"""
