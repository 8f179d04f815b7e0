"""`roadmap data`: check a dataset, pack its pictures, draw the built-in one. Imports wait until a verb runs."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from roadmap.cli.telling import SKIP, help_text, say, say_error, tell_errors
from roadmap.data.datasets import READERS
from roadmap.data.datasets.sources import GLYPH_SIZE

if TYPE_CHECKING:
    from roadmap.data.pictures.shards import OnError as Mode
    from roadmap.data.records import Records

app = typer.Typer(help="Datasets and pictures: check, pack, draw.", no_args_is_help=True)

NOT_USABLE, NOT_FOUND = 1, 2
NAMES = tuple(READERS)


class OnError(str, Enum):
    """What to do with a picture that cannot be decoded."""

    stop = "raise"
    skip = "skip"


Name = Annotated[str, typer.Argument(help=f"One of: {', '.join(NAMES)}.")]
Root = Annotated[Path, typer.Argument(help="Folder of the unpacked dataset; for `table`, the file.")]
Workers = Annotated[int | None, typer.Option(help="Processes; by default as many as cores.")]


@app.command()
@tell_errors()
def check(
    name: Name,
    root: Root,
    decode: Annotated[bool, typer.Option(help="Decode every picture; --no-decode only looks for the files.")] = True,
    workers: Workers = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress bar.")] = False,
) -> None:
    """Compare a dataset with its published counts and look at every file.

    Exit code 0: usable. 1: counts differ, files are missing or unreadable, or there are too few classes to compare. 2:
    not found.
    """
    from roadmap.data.checking import dataset_report
    from roadmap.data.datasets import SOURCES, explanation

    published = SOURCES[name].published if name in SOURCES else {}
    report = dataset_report(_read(name, root), decode, workers, False if quiet else None, published)
    say(report.lines())
    if not report.usable:
        if name in SOURCES:
            typer.echo(explanation(name))
        if report.unreadable:
            typer.echo("next       repair or remove them, or leave them out: data.on_error=skip in roadmap train, "
                       "--on-error skip elsewhere")  # fmt: skip
        raise typer.Exit(NOT_USABLE)


@app.command()
@tell_errors("stopped; the same command goes on with what is left")
def pack(
    name: Name,
    root: Root,
    side: Annotated[int, typer.Option(help="Shorter side in pixels.", min=1)] = 256,
    out: Annotated[
        Path | None, typer.Option(help="Folder of the pack; by default where training looks for it.")
    ] = None,
    workers: Workers = None,
    on_error: Annotated[
        OnError, typer.Option(help="A picture that cannot be decoded: stop, or leave it out.")
    ] = OnError.stop,
    compressed: Annotated[
        bool, typer.Option("--compressed", help="Keep JPEGs: a seventh of the disk, decoded when read, and lossy.")
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress bar.")] = False,
) -> None:
    """Decode every picture once to memory-mapped uint8, so that training never decodes again.

    With --compressed, small files are kept as they are and larger ones become JPEGs of that --side, whose pixels differ
    a little from those of the file. Training reads such a pack with data.pack=compressed.

    An interrupted pack continues where it stopped; changed files are packed again.
    """
    from roadmap.data.pictures.images import PictureError
    from roadmap.data.pictures.packing import pack as packed
    from roadmap.data.pictures.policy import drawn_pack

    records = _read(name, root)
    if drawn_pack(records) is not None:
        typer.echo(f"{records.name} is kept as a pack already: {records.root}")
        return
    mode: Mode = "skip" if on_error is OnError.skip else "raise"
    try:
        made = packed(records, side, out, workers, mode, False if quiet else None, compressed)
    except PictureError as error:
        say_error(f"{error}. {SKIP}")
        raise typer.Exit(NOT_USABLE) from None
    size = sum(shard.nbytes for shard in made.shards)
    typer.echo(f"packed {len(made) - len(made.failures):,} pictures, {size / 1e9:.2f} GB, in {made.folder}")
    if made.lossy:
        typer.echo(made.lossy)
    for key, reason in made.failures.items():
        typer.echo(f"skipped {key}: {reason}")


@app.command("glyphs")
@tell_errors()
def draw(
    out: Annotated[Path, typer.Argument(help="Folder for train/SCRIPT/CHARACTER/FACE.png and test/...")],
    size: Annotated[int, typer.Option(help="Side of the pictures in pixels.", min=16)] = GLYPH_SIZE,
) -> None:
    """Write the built-in dataset as PNG files in a folder per class, to try what you would do with your own."""
    from roadmap.data.datasets.glyphs import export, glyph_records

    records = glyph_records(size=size)
    export(records, out)
    typer.echo(f"wrote {len(records):,} pictures of {len(records.class_names):,} characters to {out}")


for command in app.registered_commands:
    command.help = help_text(command.callback)  # as of all verbs: paragraphs that a terminal of any width breaks


def _read(name: str, root: Path) -> Records:
    from roadmap.data.datasets import dataset

    try:
        return dataset(name, root)
    except FileNotFoundError as error:
        say_error(str(error))
        raise typer.Exit(NOT_FOUND) from None
    except (ValueError, ImportError) as error:
        say_error(str(error))
        raise typer.Exit(NOT_FOUND if name not in NAMES else NOT_USABLE) from None
