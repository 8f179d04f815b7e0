"""`roadmap reproduce`: a table or a figure of the paper, run and set beside what was published."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from roadmap.cli.data import NAMES
from roadmap.cli.telling import say, tell_errors
from roadmap.names import did_you_mean

if TYPE_CHECKING:
    from roadmap.experiments.reproduction import Means


def reproduce(
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="NAME...", help="table1 to table10, fig4a, fig5, ...; all: every one of the paper."),
    ] = None,
    dataset: Annotated[
        str | None, typer.Option(help="Only this dataset, or one in place of the paper's: glyphs.")
    ] = None,
    backbone: Annotated[
        str | None, typer.Option(help="Only this network, or in place of the paper's: resnet50, deit, vits.")
    ] = None,
    only: Annotated[
        list[str] | None, typer.Option(metavar="ROW", help="Only this row, such as roadmap; repeat for more rows.")
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, help="How many runs of each row: seeds 0, 1, ...")] = 5,
    root: Annotated[
        list[str] | None,
        typer.Option(metavar="DATASET=FOLDER", help="Where the pictures of a dataset lie; repeat for each."),
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="A setting for every run, such as model.weights=FILE."),
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder for the runs.")] = Path("runs/reproduce"),
    results: Annotated[Path, typer.Option(help="Folder for the small files of results.")] = Path("experiments/results"),
    missing: Annotated[
        bool,
        typer.Option("--missing", help="Leave out runs whose results are there, even where the run folder is gone."),
    ] = False,
    export: Annotated[
        Path | None, typer.Option(help="Write the tables to this folder as well, as Markdown, LaTeX, CSV and HTML.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what can be run and what it costs; run and write nothing.")
    ] = False,
) -> None:
    """Run a table or a figure of the paper, and set published and measured numbers side by side.

    What is finished is not run again: the same command goes on where it was stopped. The table shows
    the best epoch on the test set, which the published numbers are of, and the last one beside it.

    Without a name it lists what there is. `smallest` is a few steps of three losses, to see that everything works;
    with --dataset glyphs nothing need be downloaded.

    roadmap reproduce smallest --seeds 1

    roadmap reproduce table3 --dataset glyphs --seeds 2

    roadmap reproduce table5 --dataset cub --backbone resnet50 --root cub=CUB_200_2011
    """
    with tell_errors("stopped; the same command goes on with what is left"):
        from roadmap.experiments.reproduction import Means

        if dataset is not None and dataset not in NAMES:
            like = did_you_mean(dataset, NAMES)
            raise ValueError(f"--dataset {dataset} is unknown{like} Known: {', '.join(NAMES)}")
        for text in settings or []:
            _pair(text, "--set must be KEY=VALUE, such as epochs=10")
        roots = dict(_pair(text, "--root must be DATASET=FOLDER, such as cub=CUB_200_2011") for text in root or [])
        means = Means(roots, tuple(settings or []), out, results, missing)
        _reproduce(names or [], (dataset, backbone, only or ()), seeds, means, export, dry_run)


def _reproduce(
    names: list[str], which: tuple[str | None, str | None, Sequence[str]], seeds: int, means: Means,
    export: Path | None, dry_run: bool,
) -> None:  # fmt: skip
    from roadmap.experiments.definitions import experiment, experiment_names, paper_names
    from roadmap.experiments.reproduction import prospect_lines, prospects, reasons, run_rows
    from roadmap.experiments.results import all_outcomes
    from roadmap.experiments.verdicts import sheet_of, side_by_side

    if not names:
        width = 2 + max(map(len, experiment_names()))
        say(f"{name:<{width}}{experiment(name).title}" for name in experiment_names())
        return
    wanted = [experiment(name, *which) for name in (paper_names() if names == ["all"] else names)]
    for one in wanted:
        found = prospects(one, seeds, means)
        say(["", one.heading, *prospect_lines(found)])
        if not dry_run:
            run_rows(found, means, typer.echo, one.derived == "gap")
    if dry_run:
        return
    for one in wanted:
        table = sheet_of(one, side_by_side(one, all_outcomes(means.results), reasons(means.results)))
        say(["", table.text()])
        for ending in ("md", "tex", "csv", "html") if export is not None else ():
            table.write(Path(str(export)) / f"{one.name}.{ending}")


def _pair(text: str, rule: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not (name and equals and value):
        raise ValueError(f"{rule}, got {text!r}")
    return name, value
