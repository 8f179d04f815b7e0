"""`roadmap index`: a folder of pictures into an index that can be searched."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated, Any

import typer

from roadmap.cli.options import COMPUTING, MODEL
from roadmap.cli.telling import say, say_start, tell_errors
from roadmap.locations import MODEL as MODELS
from roadmap.locations import checkpoint_of

if TYPE_CHECKING:
    from roadmap.encoder import Encoder
    from roadmap.search import Indexed, Pictures

ENGINE = "The engine"


def _option(panel: str, text: str, **more: Any) -> Any:
    return typer.Option(help=text, rich_help_panel=panel, **more)


def index(
    model: Annotated[str, typer.Argument(metavar="MODEL", help=f"{MODELS[0].upper()}{MODELS[1:]}.")],
    pictures: Annotated[Path, typer.Argument(metavar="PICTURES", help="A folder, or a table (.csv, .parquet).")],
    out: Annotated[Path, typer.Option("--out", "-o", metavar="INDEX", help="The folder of the index.")],
    table: Annotated[
        Path | None, typer.Option(help="A table with a column path, and more columns about the pictures.")
    ] = None,
    engine: Annotated[
        str | None, _option(ENGINE, "exact, faiss, milvus or auto; by default the index's own, if it has one.")
    ] = None,
    option: Annotated[
        list[str] | None, _option(ENGINE, "NAME=VALUE for the engine, such as kind=hnsw, recall=0.99 or uri=...")
    ] = None,
    storage: Annotated[
        str, _option(ENGINE, "Vectors of a new index: float32, or float16 for half the space.")
    ] = "float32",
    step: Annotated[int | None, _option(COMPUTING, "Save after every so many pictures.", min=1)] = None,
    weights: Annotated[str | None, _option(MODEL, "Weights of a timm model: hub, random, or a file.")] = None,
    pooling: Annotated[str | None, _option(MODEL, "Pooling of a timm model.")] = None,
    image: Annotated[int | None, _option(MODEL, "Side of what the model sees.", min=1)] = None,
    resize: Annotated[int | None, _option(MODEL, "Shorter side before the centre is cut out.", min=1)] = None,
    flip: Annotated[bool, _option(MODEL, "Average each vector with that of the mirror image.")] = False,
    device: Annotated[str, _option(COMPUTING, "auto, cpu, cuda, cuda:1, mps.")] = "auto",
    precision: Annotated[str | None, _option(COMPUTING, "auto, 32, bf16, fp16; by default the run's.")] = None,
    batch: Annotated[int | None, _option(COMPUTING, "Pictures that go through the model at once.", min=1)] = None,
) -> None:
    """Embed a folder of pictures and build an index of them, or bring one up to date.

    The next time only new and changed files are embedded, and deleted ones are removed. It can be interrupted at any
    moment; the same command goes on from there. Folders give the labels; the columns of a table become metadata that a
    search can filter by.

    roadmap index runs/first PICTURES -o pictures.index

    roadmap index runs/first PICTURES -o pictures.index --table about.csv --engine faiss
    """
    with tell_errors("stopped; the same command goes on with what is left"):
        checkpoint_of(model)
        if not pictures.exists():
            raise FileNotFoundError(f"{pictures} is not a folder or a table that exists")
        options = engine_options(option or ())
        say_start(f"opening    {model}")
        from roadmap.encoder import Encoder
        from roadmap.search import index_pictures, pictures_of
        from roadmap.search.engines import check_engine

        if engine not in (None, "auto"):
            check_engine(engine, options or {})  # before a model is opened, which may take long
        asked: dict[str, Any] = {"weights": weights, "pooling": pooling, "image": image, "resize": resize, "flip": flip}
        encoder = Encoder.open(model, device=device, precision=precision, batch=batch, **asked)
        found = pictures_of(pictures, table)
        say(_plan(encoder, found))
        began = time.monotonic()
        done = index_pictures(encoder, found, out, engine=engine, options=options, storage=storage, at_once=step)
        say(_told(done, out, time.monotonic() - began))
        say([f"next       roadmap search {quote(str(out))} QUERY.jpg, or roadmap serve {quote(str(out))}"])


def engine_options(texts: Sequence[str]) -> dict[str, Any] | None:
    """NAME=VALUE; numbers are numbers. None where nothing was given."""
    found: dict[str, Any] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise ValueError(f"--option must be NAME=VALUE, such as recall=0.99, got {text!r}")
        try:
            number = json.loads(value)
        except ValueError:
            number = value
        found[name] = number if isinstance(number, int | float) else value
    return found or None


def _plan(encoder: Encoder, found: Pictures) -> Iterator[str]:
    yield f"model      {encoder.name}: {encoder.model.dim} dimensions, {encoder.weights}"
    classes = len(found.records.class_names)
    yield f"pictures   {len(found.ids):,}{f' of {classes:,} classes' if classes else ''}, in {found.records.root}"
    if found.columns:
        yield f"columns    {', '.join(f'{name} ({kind})' for name, kind in found.columns.items())}"
    yield f"computed   {encoder.crop.size} pixels, on {encoder.device}, precision {encoder.precision}"
    for note in found.notes:
        yield f"  - {note}"


def _told(done: Indexed, out: Path, seconds: float) -> Iterator[str]:
    from roadmap.report.text import readable_size

    changes, facts = done.changes, done.facts
    counts = {
        "new": len(changes.new),
        "changed": len(changes.changed),
        "deleted": len(changes.deleted),
        "the same": len(changes.same) + len(changes.touched),
        "described anew": done.described,
    }
    said = ", ".join(f"{count:,} {what}" for what, count in counts.items() if count)
    yield f"done       {said or 'no pictures'}, in {seconds:.1f} s"
    if done.skipped:
        name, why = next(iter(done.skipped.items()))
        yield f"left out   {len(done.skipped):,} that could not be read, first {name}: {why}"
    engine = {name: value for name, value in facts["engine"].items() if name in ("kind", "device", "recall@10")}
    told = ", ".join(f"{name} {value}" for name, value in engine.items())
    yield f"engine     {facts['engine']['name']}: {told}"
    size = readable_size(facts["bytes"])
    yield f"wrote      {out}: {facts['vectors']:,} vectors of {facts['dim']} dimensions, {size}"
