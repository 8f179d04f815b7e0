"""`roadmap search`: the pictures of an index that are nearest to one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from roadmap.cli.refining import AUGMENT, EXPAND, RERANK, WHITEN, refinement_of
from roadmap.cli.telling import say, tell_errors
from roadmap.locations import check_index

if TYPE_CHECKING:
    from roadmap.search import Index, Results

ENDINGS = (".html", ".png", ".jpg", ".jpeg", ".webp")


def search(
    folder: Annotated[Path, typer.Argument(metavar="INDEX", help="The folder that roadmap index wrote.")],
    query: Annotated[Path, typer.Argument(metavar="QUERY", help="A picture.")],
    box: Annotated[
        str | None, typer.Option(metavar="X,Y,W,H", help="Search by this part of the query, in pixels.")
    ] = None,
    where: Annotated[
        list[str] | None,
        typer.Option("--filter", help="label=owl, year>=2020, place=a,b (one of), or JSON; several: all must hold."),
    ] = None,
    top: Annotated[int, typer.Option(min=1, help="How many pictures to show.")] = 10,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Draw the answers: .html, .png, .jpg or .webp.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="Where the index's model is now, if it has moved.")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, mps.")] = "auto",
    pool: Annotated[
        int, typer.Option(min=1, help="How many of the nearest the better answers are chosen from.")
    ] = 1000,
    whiten: WHITEN = None,
    augment: AUGMENT = 0,
    expand: EXPAND = 0,
    rerank: RERANK = 0,
) -> None:
    """Print the pictures of an index that are nearest to one, best first, and draw them.

    roadmap search pictures.index query.jpg --box 40,10,200,200 --filter label=owl -o found.html

    roadmap search pictures.index query.jpg --expand 10 --rerank 100
    """
    with tell_errors(damaged="Search by another picture" if box is None else "Choose another --box or picture"):
        edges = None if box is None else edges_of(box)
        better = refinement_of(whiten, augment, expand, rerank)
        if out is not None and out.suffix.lower() not in ENDINGS:
            raise ValueError(f"--out {out} must end in one of {', '.join(ENDINGS)}")
        check_index(folder)
        if not query.is_file():
            raise FileNotFoundError(f"{query} is not a picture that exists")
        from roadmap.data.pictures.images import upright
        from roadmap.search import Index, draw_results, encoder_of, filter_of_texts, refined_search

        image = upright(query, edges)
        with Index.open(folder, verify=False) as index:
            condition = filter_of_texts(where or (), index.manifest.columns)
            encoder = encoder_of(index, device, model=model)
            vectors = encoder.embed([image])
            found = refined_search(index, vectors, top, better(), condition, pool=pool)
            say(_told(index, found, better().words()))
            if out is not None:
                draw_results(out, index, image, found, f"{query.name} in {folder.name}")
                say([f"wrote      {out}"])


def edges_of(box: str) -> tuple[float, float, float, float]:
    """Left, top, right, bottom from "x,y,w,h"."""
    try:
        x, y, width, height = (float(part) for part in box.split(","))
    except ValueError:
        raise ValueError(f"--box must be X,Y,W,H in pixels, such as 40,10,200,200, got {box!r}") from None
    if not (width > 0 and height > 0):
        raise ValueError(f"--box must have a width and a height above 0, got {box!r}")
    return x, y, x + width, y + height


def _told(index: Index, found: Results, better: str) -> Iterator[str]:
    if better:
        yield f"refined    {better}"
    if not found.ids[0]:
        yield "nothing was found: no picture passes the filter" if len(index) else "nothing was found: it is empty"
    shown = [name for name in index.manifest.columns if name not in ("id", "label", "path")]
    for rank, (score, row) in enumerate(zip(found.scores[0], found.metadata[0], strict=True), start=1):
        more = ", ".join(f"{name} {row[name]}" for name in shown if row[name] is not None)
        yield f"{rank:>4}  {score:.4f}  {row['label'] or '-'}  {row['id']}{f'  ({more})' if more else ''}"
