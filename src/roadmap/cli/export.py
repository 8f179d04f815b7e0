"""`roadmap export`: a model as one ONNX file, compared with torch."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from shlex import quote
from typing import Annotated

import typer

from roadmap.cli.options import Asked, about_models
from roadmap.cli.telling import say
from roadmap.locations import MODEL

CHECKED = 512


@about_models
def export(
    asked: Asked,
    model: Annotated[str, typer.Argument(metavar="MODEL", help=f"{MODEL[0].upper()}{MODEL[1:]}.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="The file to write: .onnx.")],
    int8: Annotated[bool, typer.Option("--int8", help="Whole numbers of 8 bits; prints their cost in R@1.")] = False,
    pictures: Annotated[int, typer.Option(min=2, help="How many pictures to compare both on.")] = CHECKED,
) -> None:
    """Write a model as an ONNX file that needs no torch, and compare both on real pictures.

    The file says how pictures are cut and normalised, and which model it is: roadmap index, search, embed and evaluate
    take it in the place of a run. It takes any number of pictures at once. In float32 its vectors are those of the
    model, and an index of the one is searched with the other.

    roadmap export runs/first -o first.onnx

    roadmap export runs/first -o small.onnx --int8 --pictures 2000
    """
    if out.suffix != ".onnx":
        raise ValueError(f"--out {out} must end in .onnx")
    for library in ("onnx", "onnxruntime"):  # before a model is opened; torch has words of its own for it
        if importlib.util.find_spec(library) is None:
            raise ModuleNotFoundError(name=library)
    encoder = asked.encoder(model)
    from roadmap.encoder.exporting import export as exported
    from roadmap.evaluation import evaluate, records_to_search
    from roadmap.report.text import readable_size

    queries, _ = records_to_search(encoder.records(asked.data, asked.root), asked.split).evaluation()
    done = exported(encoder, out, queries.select(even_places(len(queries), pictures)), int8=int8)
    say([f"compared   {len(done.torch):,} pictures: components differ by at most {done.difference:.2g}, "
         f"the lowest cosine is {done.cosine:.5f}"])  # fmt: skip
    before, after = (100 * evaluate(found, nearest=0).metrics["R@1"] for found in (done.torch, done.onnx))
    say([f"R@1        torch {before:.2f}, {'int8' if int8 else 'ONNX'} {after:.2f} ({after - before:+.2f}) among them"])
    size = readable_size(out.stat().st_size)
    say([f"wrote      {out}: {size}, digest {done.onnx.about['model'][:12]}"])
    say([f"next       roadmap index {quote(str(out))} PICTURES -o INDEX"])


def even_places(count: int, most: int) -> list[int]:
    """At most `most` of `count` places, as far apart as they can be in steps: whole classes stay together."""
    if count <= most:
        return list(range(count))
    runs = max(1, most // 8)  # eight neighbours at a time, so that classes keep several pictures
    starts = [i * (count - 8) // max(1, runs - 1) if runs > 1 else 0 for i in range(runs)]
    return sorted({start + j for start in starts for j in range(8)})[:most]
