"""`roadmap embed`: pictures through a model into a file of vectors."""

from __future__ import annotations

import time
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated

import typer

from roadmap.cli.options import Asked, about_models
from roadmap.cli.telling import say
from roadmap.locations import MODEL

if TYPE_CHECKING:
    from roadmap.data import Records

ENDINGS = (".npz", ".safetensors")
OWN = ("folder", "table")  # datasets that are somebody's own pictures


@about_models
def embed(
    asked: Asked,
    model: Annotated[str, typer.Argument(metavar="MODEL", help=f"{MODEL[0].upper()}{MODEL[1:]}.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="The file to write: .npz or .safetensors.")],
) -> None:
    """Write the vectors of pictures, with their labels and names, to a file.

    The file holds `vectors` (N, D) of length 1, `labels` (N,), `class_names`, `ids` (N,), the paths of the pictures,
    and in `about` the model, the crop and the folder that they are of. numpy.load reads it. Of your own pictures all
    are taken, of a published dataset its test set, unless --split says otherwise.

    roadmap embed runs/first --out vectors.npz

    roadmap embed resnet50 --weights resnet50.pth --data folder --root PICTURES --out vectors.npz
    """
    if out.suffix not in ENDINGS:
        raise ValueError(f"--out {out} must end in {' or '.join(ENDINGS)}")
    encoder = asked.encoder(model)
    from roadmap.evaluation import records_of_split
    from roadmap.report.text import plan, rate, readable_size

    records = encoder.records(asked.data, asked.root)
    own = (asked.data or encoder.data) in OWN
    part = records_of_split(records, asked.split or ("all" if own else "test"))
    pack, read = asked.pictures(encoder, records)
    say(plan(encoder, records, [part], read))
    began = time.monotonic()
    vectors = encoder.embed(part, pack=pack, on_error=asked.when_damaged(encoder))
    say(rate(len(vectors), time.monotonic() - began, vectors.about["skipped"]))
    out.parent.mkdir(parents=True, exist_ok=True)
    vectors.save(out)
    size = readable_size(out.stat().st_size)
    typer.echo(f"wrote      {out}: {len(vectors):,} vectors of {vectors.vectors.shape[1]} dimensions, {size}")
    typer.echo(f"next       {_next(asked, model, out, part)}")


def _next(asked: Asked, model: str, out: Path, part: Records) -> str:
    """What to do with the vectors; those of training pictures say nothing about how new ones would be found."""
    splits = part.split_names()
    if splits in (("query",), ("gallery",)):
        return "roadmap evaluate QUERY_FILE --gallery GALLERY_FILE, once both splits are embedded"
    if not {"train", "val"} & set(splits):
        return f"roadmap evaluate {quote(str(out))}"
    where = "" if asked.data is None else f" --data {asked.data}"
    where += "" if asked.root is None else f" --root {quote(str(asked.root))}"
    return f"roadmap evaluate {quote(model)}{where}, which tests on pictures that no training saw"
