"""`roadmap evaluate`: retrieval metrics of saved vectors, or of a model on a dataset."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer

from roadmap.cli import options
from roadmap.cli.options import MODEL, Asked, device_named, errors_told
from roadmap.cli.results import Evaluation, sizes


class Ties(str, Enum):
    pessimistic = "pessimistic"
    mean = "mean"


SAVED = "Saved vectors"  # panel of the help text


def evaluate(
    what: Annotated[
        str, typer.Argument(metavar="WHAT", help=f"Vectors with labels (.npz or .safetensors), or {MODEL}.")
    ],
    ks: Annotated[str | None, typer.Option(help="The k of Recall@k, with commas; the dataset's, or 1,2,4,8.")] = None,
    out: Annotated[Path | None, typer.Option("--json", help="Write the values to this file as well.")] = None,
    page: Annotated[
        Path | None, typer.Option(help="Of a model: write an HTML page with queries and what they retrieve.")
    ] = None,
    gallery: Annotated[
        Path | None,
        typer.Option(
            help="Search in these instead of among the vectors; ids tell who is the query.", rich_help_panel=SAVED
        ),
    ] = None,
    ties: Annotated[
        Ties | None,
        typer.Option(help="Equal scores: against the query, or the mean over orders.", rich_help_panel=SAVED),
    ] = None,
    revisited: Annotated[
        Path | None,
        typer.Option(
            help="A gnd_*.pkl file: the revisited Oxford/Paris protocol; needs --gallery.", rich_help_panel=SAVED
        ),
    ] = None,
    memory: Annotated[
        str | None, typer.Option(help="Working memory, such as 2GB; 512MB by default.", rich_help_panel=SAVED)
    ] = None,
    data: options.Data = None,
    root: options.Root = None,
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
    """Print retrieval metrics of saved vectors, or of a model on a dataset, and write them as JSON.

    Files of vectors hold `vectors` (N, D), `labels` (N,) and, if you like, `ids` (N,); `embeddings`, `features`,
    `targets` and the like are understood.

    A model is evaluated as the literature does on that dataset: R@k, mAP@R and mAP over the test set, queries against a
    gallery (inshop), or Easy, Medium and Hard (roxford5k, rparis6k). A run is evaluated on its own test set.

    roadmap evaluate vectors.npz --json metrics.json

    roadmap evaluate runs/first --page retrievals.html

    roadmap evaluate vit_small_patch14_dinov2 --data cub --root CUB_200_2011
    """
    asked = Asked(what, data, root, weights, image, resize, pooling, dim, device, precision, batch, pack, on_error)
    with errors_told():
        numbers = None if ks is None else _numbers(ks)
        if _holds_vectors(asked):
            _refuse({**_typed(asked), "page": page}, f"{what} holds vectors")
            order = (ties or Ties.pessimistic).value
            saved = _of_vectors(Path(what), gallery, numbers, order, revisited, device, _bytes(memory or "512MB"))
            saved.show()
            if out is not None:
                saved.write_json(out)
            return
        of_vectors = {"gallery": gallery, "ties": ties, "revisited": revisited, "memory": memory}
        _refuse(of_vectors, f"{what} is a model, and its dataset says what searches in what")
        from roadmap.cli.evaluate_model import evaluate_model

        evaluate_model(asked, numbers, out, page)


def _holds_vectors(asked: Asked) -> bool:
    """Whether WHAT is a file of vectors; a .safetensors file may also be a checkpoint."""
    path = Path(asked.model)
    if path.suffix != ".safetensors" or not path.is_file():
        return path.suffix == ".npz"
    from safetensors import SafetensorError, safe_open

    from roadmap.embeddings import NAMES

    try:
        with safe_open(path, framework="pt") as content:
            return not set(NAMES["vectors"]).isdisjoint(content.keys())
    except SafetensorError:  # damaged: whoever names a dataset means a model
        return asked.data is None


def _typed(asked: Asked) -> dict[str, object]:
    """The options about a model and its pictures that have no default."""
    return {f.name: getattr(asked, f.name) for f in dataclasses.fields(asked) if f.default is None}


def _refuse(given: Mapping[str, object], why: str) -> None:
    names = [f"--{name}" for name, value in given.items() if value is not None]
    if names:
        raise ValueError(f"{', '.join(names)} cannot be used: {why}; leave {'it' if len(names) == 1 else 'them'} out")


def _of_vectors(
    path: Path,
    gallery: Path | None,
    ks: tuple[int, ...] | None,
    ties: Any,
    revisited: Path | None,
    device: str,
    memory: int,
) -> Evaluation:
    from roadmap.embeddings import Embeddings
    from roadmap.evaluation import retrieval_evaluation, revisited_evaluation
    from roadmap.metrics import load_ground_truth

    chosen = device_named(device)
    queries = Embeddings.load(path).to(chosen)
    items = None if gallery is None else Embeddings.load(gallery).to(chosen)
    if revisited is None:
        values = retrieval_evaluation(queries, items, (1, 2, 4, 8) if ks is None else ks, ties, memory)
    elif items is None:
        raise ValueError("--revisited needs --gallery: the queries are not among the database images")
    else:
        values = revisited_evaluation(queries, items, load_ground_truth(revisited))
    facts = {
        "embeddings": str(path),
        "gallery": None if gallery is None else str(gallery),
        "vectors": len(queries),
        "dimensions": queries.vectors.shape[1],
        "ties": ties,
    }
    return Evaluation(f"{path.name}: {sizes(queries, items)}", values, facts)


def _numbers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(",") if part.strip())
    except ValueError:
        raise ValueError(f"--ks must be whole numbers with commas between, such as 1,10,100, got {text!r}") from None


def _bytes(text: str) -> int:
    units = {"KB": 1 << 10, "MB": 1 << 20, "GB": 1 << 30, "B": 1}
    for unit, size in units.items():
        number = text.upper().strip().removesuffix(unit)
        if number != text.upper().strip():
            try:
                return int(float(number) * size)
            except ValueError:
                break
    raise ValueError(f"--memory must be a number with B, KB, MB or GB, such as 512MB, got {text!r}")
