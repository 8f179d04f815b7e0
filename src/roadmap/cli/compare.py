"""`roadmap compare`: runs side by side, with the statistics that say what is more than chance."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from roadmap.cli.telling import say, say_start, tell_errors


def compare(
    runs: Annotated[
        list[Path],
        typer.Argument(metavar="RUNS...", help="Run folders, folders of runs, files of results (.jsonl)."),
    ],
    test: Annotated[str | None, typer.Option(help="Which test set, where runs have several.")] = None,
    epoch: Annotated[str, typer.Option(help="Which epoch: chosen (by each run) or last.")] = "chosen",
    metrics: Annotated[
        str | None, typer.Option(help="Metrics to compare, with commas between; by default R@1,mAP@R.")
    ] = None,
    draws: Annotated[int, typer.Option(min=100, help="Draws of the bootstrap over classes.")] = 10_000,
    out: Annotated[
        list[Path] | None, typer.Option(help="Write the table to this file: .txt, .md, .tex, .csv or .html.")
    ] = None,
) -> None:
    """Compare runs: grouped by what differs in their settings, with seeds as repetitions.

    Means, standard deviations and intervals over seeds; p-values by paired tests over seeds, or over the queries where
    there is one seed. What is not worse than the best is in bold. Runs that cannot be compared are refused.

    roadmap compare runs/sweep_2026-01-31_12-00-00

    roadmap compare runs/a runs/b --out table.tex --out table.html
    """
    with tell_errors():
        say_start(f"reading    {', '.join(map(str, runs))}")
        from roadmap.experiments import compare as standings_of
        from roadmap.experiments.sheet import check_ending

        for path in out or []:
            check_ending(path)
        names = None if metrics is None else [name.strip() for name in metrics.split(",")]
        found = standings_of(runs, test, epoch, names, draws)
        say([str(found)])
        for path in out or []:
            found.sheet.write(path)
            say([f"wrote      {path}"])
