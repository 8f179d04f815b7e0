"""`roadmap embed`: pictures through a model into a file of vectors."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from roadmap.cli import options
from roadmap.cli.options import MODEL, THE_PICTURES, Asked, errors_told, readable_size

if TYPE_CHECKING:
    from roadmap.cli.sources import Source
    from roadmap.data import Records

ENDINGS = (".npz", ".safetensors")


def embed(
    model: Annotated[str, typer.Argument(metavar="MODEL", help=f"{MODEL[0].upper()}{MODEL[1:]}.")],
    out: Annotated[Path, typer.Option(help="The file to write: .npz or .safetensors.")],
    data: options.Data = None,
    root: options.Root = None,
    split: Annotated[
        str | None,
        typer.Option(
            help="test, train, val, query, gallery or all; test by default, all where nothing is split.",
            rich_help_panel=THE_PICTURES,
        ),
    ] = None,
    weights: options.Weights = None,
    image: options.Image = None,
    resize: options.Resize = None,
    pooling: options.Pooling = None,
    dim: options.Dim = None,
    device: options.Device = "auto",
    precision: options.Precision = "auto",
    batch: options.Batch = 256,
    pack: options.Pack = "auto",
    on_error: options.OnError = "raise",
) -> None:
    """Write the vectors of pictures, with their labels and names, to a file.

    The file holds `vectors` (N, D) of length 1, `labels` (N,) and `ids` (N,), the paths of the pictures.
    `roadmap evaluate FILE` measures them; numpy.load reads them.

    roadmap embed runs/first --out vectors.npz

    roadmap embed resnet50 --weights resnet50.pth --data folder --root PICTURES --out vectors.npz
    """
    asked = Asked(model, data, root, weights, image, resize, pooling, dim, device, precision, batch, pack, on_error)
    with errors_told():
        if out.suffix not in ENDINGS:
            raise ValueError(f"--out {out} must end in {' or '.join(ENDINGS)}")
        from roadmap.cli.sources import source

        found = source(asked)
        part = _part(found, split)
        found.announce(part)
        vectors = found.embeddings(part)
        out.parent.mkdir(parents=True, exist_ok=True)
        vectors.save(out)
        found.report()
        size = readable_size(out.stat().st_size)
        typer.echo(f"wrote      {out}: {len(vectors):,} vectors of {vectors.vectors.shape[1]} dimensions, {size}")
        typer.echo(f"next       {_next(out, split)}")


def _part(found: Source, split: str | None) -> Records:
    """The pictures of a split; of published datasets the test set, of undivided ones all, where nothing was said."""
    names = found.records.split_names()
    chosen = split or ("test" if found.divided else "all")
    if chosen == "all":
        return found.records
    found.notes += found.division
    if chosen not in names:
        there = ", ".join([*names, "all"])
        raise ValueError(f"{found.records.name} has no split {chosen!r}; choose --split from: {there}")
    return found.records.split(chosen)


def _next(out: Path, split: str | None) -> str:
    if split in ("query", "gallery"):
        return "roadmap evaluate QUERY_FILE --gallery GALLERY_FILE, once both splits are embedded"
    return f"roadmap evaluate {out}"
