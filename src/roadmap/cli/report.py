"""`roadmap report`: runs as one page that needs nothing beside itself, and figures for a paper."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from roadmap.cli.evaluate import PAGES
from roadmap.cli.telling import say, say_start, tell_errors
from roadmap.locations import check_run


def report(
    runs: Annotated[
        list[Path], typer.Argument(metavar="RUN [RUN2 ...]", help="Run folders, tested on the same pictures.")
    ],
    out: Annotated[Path, typer.Option("--out", "-o", help="The page to write.")] = Path("report.html"),
    figures: Annotated[Path | None, typer.Option(help="A folder for figures, as PNG and PDF, light and dark.")] = None,
    test: Annotated[str | None, typer.Option(help="Which test set, where the runs have several.")] = None,
    title: Annotated[str | None, typer.Option(help="Title of the page; by default the names of the runs.")] = None,
    queries: Annotated[int, typer.Option(min=1, help="Queries in each group of the page.")] = 8,
    embed: Annotated[
        bool, typer.Option(help="Embed the test pictures for scores and map, where they are not kept already.")
    ] = True,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, mps; auto: as in the run.")] = "auto",
) -> None:
    """Write a page about one run, or several side by side: it works offline, on a phone and on paper.

    Curves, results, scores before and after training, precision by rank, classes from worst to best, queries with
    their nearest, a map of the test set, settings, pictures, code and hardware. The first run is compared with each of
    the others.

    The test pictures are embedded once, before and after training, and what comes of it is kept in RUN/report. What
    cannot be had (pictures that have moved, weights that are not here) is left out, and the page says why.

    roadmap report runs/first

    roadmap report runs/roadmap runs/smoothap -o comparison.html --figures figures
    """
    with tell_errors():
        if out.suffix.lower() not in PAGES:
            raise ValueError(f"--out {out} must end in .html")
        for run in runs:
            check_run(run)
        say_start(f"reading    {', '.join(map(str, runs))}")
        from roadmap.report import report as written
        from roadmap.report.text import readable_size

        found = written(runs, out, figures=figures, test=test, title=title, queries=queries, embed=embed, device=device)
        say(f"missing    {run.name}: {why}" for run in found for why in run.missing)
        say([f"wrote      {out}: {readable_size(out.stat().st_size)}, for a browser; it needs nothing beside itself"])
        if figures is not None and found[0].records is not None:
            say([f"wrote      {figures}: figures as PNG and PDF"])
