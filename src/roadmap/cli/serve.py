"""`roadmap serve`: indexes as a service, with a page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from roadmap.cli.telling import tell_errors

ACCESS, LIMITS = "Who may ask", "Limits"  # panels of the help text
MEBIBYTE = 1 << 20


def _access(text: str, *names: str, **more: Any) -> Any:
    return typer.Option(*names, help=text, rich_help_panel=ACCESS, **more)


def _limit(text: str, least: float = 1) -> Any:
    return typer.Option(help=text, min=least, rich_help_panel=LIMITS)


def serve(
    indexes: Annotated[list[Path], typer.Argument(metavar="INDEX...", help="Folders of indexes; two are compared.")],
    model: Annotated[
        list[str] | None,
        typer.Option(help="A run, a checkpoint or a timm model; once for all indexes, or once for each."),
    ] = None,
    pictures: Annotated[Path | None, typer.Option(help="Where the pictures lie, if they have moved.")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, mps; auto: a GPU where there is one.")] = "auto",
    host: Annotated[str, _access("Address to listen on; only this machine reaches the default.")] = "127.0.0.1",
    port: Annotated[int, _access("Port to listen on; 0 takes any that is free.", min=0, max=65_535)] = 8000,
    key: Annotated[
        str | None,
        _access("A secret that requests must carry; ROADMAP_KEY hides it from other users.", envvar="ROADMAP_KEY"),
    ] = None,
    allow_host: Annotated[list[str] | None, _access("Another name of the service, such as search.example.org.")] = None,
    write: Annotated[bool, _access("Let requests add and remove rows.", "--write")] = False,
    upload: Annotated[int, _limit("Largest request, in MiB.")] = 20,
    pixels: Annotated[int, _limit("Largest picture, in million pixels.")] = 50,
    rate: Annotated[float, _limit("Queries a second of one client, on average; 0 for no limit.", 0)] = 100.0,
    burst: Annotated[int, _limit("Queries of one client at once.")] = 200,
    seconds: Annotated[float, _limit("Time for a request to arrive, to be answered, and to be taken.", 0.1)] = 30.0,
    queue: Annotated[int, _limit("Queries that may wait; further ones must come back later.")] = 256,
    together: Annotated[int, _limit("Pictures that go through the model at once.")] = 16,
) -> None:
    """Open a search page and an interface for programs over an index, until Ctrl-C.

    roadmap serve birds.index

    roadmap serve old.index new.index --port 8080

    ROADMAP_KEY=secret roadmap serve birds.index --host 0.0.0.0 --write
    """
    with tell_errors():
        try:
            from roadmap.search.service import Limits
            from roadmap.search.service import serve as serve_indexes
        except ModuleNotFoundError as missing:
            if (missing.name or "").startswith("roadmap"):
                raise
            raise RuntimeError(f"serving needs {missing.name}: pip install 'roadmap-retrieval[serve]'") from missing
        models = model or [None]  # type: ignore[list-item]
        serve_indexes(
            indexes,
            models[0] if len(models) == 1 else models,
            host=host,
            port=port,
            key=key,
            hosts=allow_host or (),
            pictures=pictures,
            write=write,
            device=device,
            limits=Limits(
                upload=upload * MEBIBYTE,
                pixels=pixels * 1_000_000,
                rate=rate,
                burst=burst,
                seconds=seconds,
                queue=queue,
                together=together,
            ),
            say=lambda line: typer.echo(line),
        )
