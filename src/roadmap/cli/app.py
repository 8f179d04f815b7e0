"""The `roadmap` command: parse, call, print. What a verb needs is imported when it runs."""

from __future__ import annotations

import atexit
import os
import sys
import threading
from contextlib import suppress
from typing import Annotated

import typer

from roadmap import __version__
from roadmap.cli.compare import compare
from roadmap.cli.data import app as data_app
from roadmap.cli.embed import embed
from roadmap.cli.evaluate import evaluate
from roadmap.cli.export import export
from roadmap.cli.gap import gap
from roadmap.cli.index import index
from roadmap.cli.report import report
from roadmap.cli.reproduce import reproduce
from roadmap.cli.search import search
from roadmap.cli.serve import serve
from roadmap.cli.telling import INTERRUPTED, help_text, say_error

app = typer.Typer(
    name="roadmap",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(data_app, name="data")


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"roadmap {__version__}")
        raise typer.Exit


@app.callback()
def roadmap(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Train, evaluate and serve image-retrieval models by optimising average precision directly."""


# Everything after the verb is Hydra's: settings, groups, sweeps, and a help text of its own.
@app.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []},
    add_help_option=False,
)
def train(context: typer.Context) -> None:
    """Train a model; `roadmap train --help` explains recipes and every setting."""
    try:
        from roadmap.cli.train import train as trained
    except ModuleNotFoundError as missing:
        if missing.name not in ("hydra", "omegaconf"):
            raise
        say_error(f"training needs {missing.name}: pip install 'roadmap-retrieval[train]'")
        raise typer.Exit(1) from missing
    raise typer.Exit(trained(context.args))


for verb in (embed, evaluate, report, index, search, export, compare, gap, reproduce, serve):
    app.command(help=help_text(verb))(verb)


def main() -> None:
    """The command. It leaves without taking the interpreter and the GPU's libraries apart, which takes seconds."""
    try:
        app(prog_name="roadmap")
        code: object = 0
    except SystemExit as leaving:
        code = leaving.code
    except KeyboardInterrupt:
        code = INTERRUPTED
    if isinstance(code, str):
        print(code, file=sys.stderr)
    # as the interpreter does: threads end their work, and whoever asked to be called at the end is
    try:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
    except KeyboardInterrupt:  # somebody does not want to wait for that
        code = INTERRUPTED
    for stream in (sys.stdout, sys.stderr):
        with suppress(BrokenPipeError):  # nobody reads it any more, as behind `| head`
            stream.flush()
    os._exit(code if isinstance(code, int) else int(code is not None))
