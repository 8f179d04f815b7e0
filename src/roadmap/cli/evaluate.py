"""`roadmap evaluate`: retrieval metrics of saved vectors, or of a model on a dataset."""

from __future__ import annotations

import dataclasses
import re
import time
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from roadmap.cli.options import Asked, about_models
from roadmap.locations import MODEL

if TYPE_CHECKING:
    from roadmap.data import Pack, Records
    from roadmap.evaluation import Evaluation


class Ties(str, Enum):
    pessimistic = "pessimistic"
    mean = "mean"


UNITS = {"B": 1, "KB": 1 << 10, "MB": 1 << 20, "GB": 1 << 30}


def _saved(text: str) -> Any:
    return typer.Option(help=text, rich_help_panel="Saved vectors")


@about_models
def evaluate(
    asked: Asked,
    what: Annotated[
        str, typer.Argument(metavar="WHAT", help=f"Vectors with labels (.npz or .safetensors), or {MODEL}.")
    ],
    ks: Annotated[str | None, typer.Option(help="The k of Recall@k, with commas; the dataset's, or 1,2,4,8.")] = None,
    ties: Annotated[
        Ties, typer.Option(help="Equal scores: against the query, or the mean over orders.")
    ] = Ties.pessimistic,
    out: Annotated[Path | None, typer.Option("--json", help="Write the values to this file as well.")] = None,
    page: Annotated[
        Path | None, typer.Option(help="Of a model: write an HTML page with queries and what they retrieve.")
    ] = None,
    gallery: Annotated[
        Path | None, _saved("Search in these instead of among the vectors; ids tell who is the query.")
    ] = None,
    revisited: Annotated[
        Path | None, _saved("A gnd_*.pkl file: the revisited Oxford/Paris protocol; needs --gallery.")
    ] = None,
    memory: Annotated[str | None, _saved("Working memory, such as 2GB; 512MB by default.")] = None,
) -> None:
    """Print retrieval metrics of saved vectors, or of a model on a dataset, and write them as JSON.

    Files of vectors hold `vectors` (N, D), `labels` (N,) and, if you like, `ids` (N,); `embeddings`, `features`,
    `targets` and the like are understood.

    A model is evaluated as the literature does on that dataset: R@k, mAP@R and mAP over the test set, queries against a
    gallery (inshop), or Easy, Medium and Hard (roxford5k, rparis6k). A run is evaluated on the very pictures that it
    kept for its test, in its own precision and batch size: the numbers are those of its summary.json. With --split, the
    pictures of that split search one another.

    roadmap evaluate vectors.npz --json metrics.json

    roadmap evaluate runs/first --page retrievals.html

    roadmap evaluate vit_small_patch14_dinov2 --data cub --root CUB_200_2011
    """
    numbers = None if ks is None else _numbers(ks)
    if _holds_vectors(what, asked):
        _refuse({**asked.typed(), "page": page}, f"{what} holds vectors")
        _show(_of_vectors(Path(what), asked.device, gallery, numbers, ties.value, revisited, memory or "512MB"), out)
        return
    of_vectors = {"gallery": gallery, "revisited": revisited, "memory": memory}
    _refuse(of_vectors, f"{what} is a model, and its dataset says what searches in what")
    result, records, pictures = _of_model(what, asked, numbers, ties.value, page)
    _show(result, out)
    if page is not None:
        _write_page(page, result, records, pictures)
    elif not records.ground_truth:
        typer.echo("next       add --page FILE.html to see queries and what they retrieve")


def _of_model(
    what: str, asked: Asked, ks: tuple[int, ...] | None, ties: Any, page: Path | None
) -> tuple[Evaluation, Records, Pack | None]:
    encoder = asked.encoder(what)
    from roadmap.cli.printing import dataset_name, print_rate, print_start
    from roadmap.data import pack_for
    from roadmap.evaluation import evaluate as evaluation_of
    from roadmap.evaluation import recall_ks, records_to_search

    everything, damaged = encoder.records(asked.data, asked.root), asked.when_damaged
    records = records_to_search(everything, asked.split)
    if records.ground_truth and (ks is not None or page is not None):
        raise ValueError(f"{records.name} has easy, hard and junk answers and no classes: leave --ks and --page out")
    pack, read = pack_for(everything, encoder.side, asked.pack, on_error=damaged, make=asked.pack == "yes")
    print_start(encoder, records, [part for part in records.evaluation() if part is not None], read)
    began = time.monotonic()
    ks = recall_ks(dataset_name(encoder, asked.data)) if ks is None else ks
    result = evaluation_of(encoder, records, ks=ks, ties=ties, pack=pack, on_error=damaged)
    about = result.facts["data"]
    print_rate(about["queries"] + (about["gallery"] or 0), time.monotonic() - began, about["skipped"])
    return result, records, pack


def _of_vectors(
    path: Path,
    device: str,
    gallery: Path | None,
    ks: tuple[int, ...] | None,
    ties: Any,
    truth: Path | None,
    memory: str,
) -> Evaluation:
    room = _bytes(memory)
    if truth is not None and gallery is None:
        raise ValueError("--revisited needs --gallery: the queries are not among the database images")
    from roadmap.embeddings import Embeddings
    from roadmap.evaluation import evaluate as evaluation_of
    from roadmap.hardware import device_of
    from roadmap.metrics import load_ground_truth

    place = device_of(device)
    queries = Embeddings.load(path).to(place)
    items = None if gallery is None else Embeddings.load(gallery).to(place)
    answers = None if truth is None else load_ground_truth(truth)
    found = evaluation_of(queries, items, ks=ks, ties=ties, truth=answers, memory=room, nearest=0)
    files = {"embeddings": str(path), "gallery": None if gallery is None else str(gallery)}
    title = f"{path.name}: {found.title.rpartition(': ')[2]}"
    return dataclasses.replace(found, facts={**found.facts, **files, "title": title})


def _show(result: Evaluation, out: Path | None) -> None:
    from roadmap.cli.printing import print_metrics

    for note in result.facts.get("notes", ()):
        typer.echo(f"  - {note}")
    print_metrics(result.title, result.metrics)
    if out is not None:
        result.write_json(out)
        typer.echo(f"wrote      {out}")


def _write_page(path: Path, result: Evaluation, records: Records, pictures: Pack | None) -> None:
    from roadmap.report import Album, retrieval_page

    asked, gallery = records.evaluation()
    path.parent.mkdir(parents=True, exist_ok=True)
    name = result.facts["model"]["name"]
    searched = None if gallery is None else Album(gallery, pictures)
    retrieval_page(path, f"{name} on {records.name}", {name: result}, Album(asked, pictures), searched)
    typer.echo(f"wrote      {path}: queries and what they retrieve, for a browser")


def _holds_vectors(what: str, asked: Asked) -> bool:
    """Whether WHAT is a file of vectors; a .safetensors file may also be a checkpoint."""
    path = Path(what)
    if path.suffix != ".safetensors" or not path.is_file():
        return path.suffix == ".npz"
    from safetensors import SafetensorError, safe_open

    from roadmap.embeddings import NAMES

    try:
        with safe_open(path, framework="np") as content:
            return not set(NAMES["vectors"]).isdisjoint(content.keys())
    except SafetensorError:  # damaged: whoever names a dataset means a model
        return asked.data is None


def _refuse(given: Mapping[str, object], why: str) -> None:
    names = [f"--{name}" for name, value in given.items() if value is not None]
    if names:
        raise ValueError(f"{', '.join(names)} cannot be used: {why}; leave {'it' if len(names) == 1 else 'them'} out")


def _numbers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(",") if part.strip())
    except ValueError:
        raise ValueError(f"--ks must be whole numbers with commas between, such as 1,10,100, got {text!r}") from None


def _bytes(text: str) -> int:
    found = re.fullmatch(r"\s*([\d.]+)\s*([KMG]?B)\s*", text, re.IGNORECASE)
    try:
        return int(float(found[1]) * UNITS[found[2].upper()])  # type: ignore[index]
    except (TypeError, ValueError):
        said = f"--memory must be a number with B, KB, MB or GB, such as 512MB, got {text!r}"
        raise ValueError(said) from None
