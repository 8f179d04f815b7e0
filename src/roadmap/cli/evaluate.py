"""`roadmap evaluate`: retrieval metrics of saved vectors, or of a model on a dataset."""

from __future__ import annotations

import dataclasses
import re
import time
from collections.abc import Callable, Iterator, Mapping
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from roadmap.cli.options import Asked, about_models
from roadmap.cli.refining import AUGMENT, EXPAND, RERANK, WHITEN, refinement_of
from roadmap.cli.telling import say, say_start
from roadmap.locations import MODEL

if TYPE_CHECKING:
    from roadmap.evaluation import Evaluation
    from roadmap.refinement import Refinement


class Ties(str, Enum):
    pessimistic = "pessimistic"
    mean = "mean"


PAGES = (".html", ".htm")
UNITS = {"B": 1, "KB": 1 << 10, "MB": 1 << 20, "GB": 1 << 30}


def _saved(text: str) -> Any:
    return typer.Option(help=text, rich_help_panel="Saved vectors")


@about_models
def evaluate(
    asked: Asked,
    what: Annotated[
        str, typer.Argument(metavar="WHAT", help=f"Vectors with labels (.npz or .safetensors), or {MODEL}.")
    ],
    ks: Annotated[
        str | None, typer.Option(help="Each k of R@k, with commas; by default the dataset's, or 1,2,4,8.")
    ] = None,
    ties: Annotated[
        Ties, typer.Option(help="How equal scores rank: against the query, or the mean over all orders.")
    ] = Ties.pessimistic,
    levels: Annotated[
        bool | None,
        typer.Option(
            help="Measure by the tree of labels and by tags too: H-AP, ASI, NDCG, levels; by default as in the run."
        ),
    ] = None,
    dims: Annotated[
        str | None,
        typer.Option(help="Measure with so many first dimensions too, such as 64,128; by default as in the run."),
    ] = None,
    out: Annotated[Path | None, typer.Option("--json", help="Write the values to this file as well.")] = None,
    page: Annotated[
        Path | None, typer.Option(help="Write an HTML page with queries and what the model finds for them.")
    ] = None,
    gallery: Annotated[
        Path | None, _saved("Search in the vectors of this file instead; ids keep a query from finding itself.")
    ] = None,
    revisited: Annotated[
        Path | None, _saved("A gnd_*.pkl file: the revisited Oxford/Paris protocol; needs --gallery.")
    ] = None,
    memory: Annotated[str | None, _saved("Working memory, such as 2GB; 512MB by default.")] = None,
    whiten: WHITEN = None,
    augment: AUGMENT = 0,
    expand: EXPAND = 0,
    rerank: RERANK = 0,
) -> None:
    """Print retrieval metrics of saved vectors, or of a model on a dataset, and write them as JSON.

    Files of vectors hold `vectors` (N, D), `labels` (N,) and, if you like, `ids` (N,); `embeddings`, `features`,
    `targets` and the like are understood. With `tree` (N, L) or `tags` (N, C) in them, --levels measures by degrees.

    A model is evaluated as the literature does on that dataset: R@k, mAP@R and mAP over the test set, queries against a
    gallery (inshop), or Easy, Medium and Hard (roxford5k, rparis6k). A run is evaluated on the very pictures that it
    kept for its test, in its own precision and batch size: the numbers are those of its summary.json. With --split, the
    pictures of that split search one another.

    roadmap evaluate vectors.npz --json metrics.json

    roadmap evaluate runs/first --page retrievals.html

    roadmap evaluate vit_small_patch14_dinov2 --data cub --root CUB_200_2011

    roadmap evaluate runs/first --flip --expand 10 --rerank 100

    roadmap evaluate runs/first --levels --dims 64,128
    """
    if page is not None and page.suffix.lower() not in PAGES:
        raise ValueError(f"--page {page} must end in {PAGES[0]}")
    numbers = None if ks is None else _numbers(ks, "--ks")
    more = {"levels": levels, "dims": None if dims is None else _numbers(dims, "--dims")}
    better = refinement_of(whiten, augment, expand, rerank)
    if _are_vectors(what, asked):
        _refuse({**asked.typed(), "page": page}, f"{what} holds vectors")
        room = _bytes(memory or "512MB")
        say_start(f"reading    {what}")
        result = _of_vectors(Path(what), asked.device, gallery, numbers, ties.value, revisited, room, better(), more)
        show = None
    else:
        of_vectors = {"gallery": gallery, "revisited": revisited, "memory": memory}
        _refuse(of_vectors, f"{what} is a model, and its dataset says what searches in what")
        result, show = _of_model(what, asked, numbers, ties.value, page is not None, better, more)
    from roadmap.report.text import metrics_table

    say([metrics_table(result), *(f"remark     {said}" for said in _remarks(result, gallery is not None))])
    if out is not None:
        result.write_json(out)
        say([f"wrote      {out}"])
    if page is not None and show is not None:
        show(page)
        say([f"wrote      {page}: queries and what they retrieve, for a browser"])
    elif show is not None:
        say(["next       add --page FILE.html to see queries and what they retrieve"])


def _remarks(result: Evaluation, searched: bool) -> Iterator[str]:
    """What a person should know before believing the numbers; `searched`: in a file of its own."""
    asked, lost = (result.metrics.get(name, 0) for name in ("queries", "queries_without_positives"))
    if lost:
        yield f"{lost:,} of {asked:,} queries have nothing of their class to find, and count in no mean"
    if searched and (result.ids is None or result.gallery_ids is None):
        yield "without ids in both files, a query that is in the gallery too finds itself"
    told = any("of one class" in note for note in result.facts.get("data", result.facts).get("notes", ()))
    if "mAP@R" in result.metrics and len(set(result.gallery_labels.tolist())) == 1 and not told:
        yield "all that is searched is of one class: every answer is right, which says nothing of the model"


def _of_model(
    what: str,
    asked: Asked,
    ks: tuple[int, ...] | None,
    ties: Any,
    paged: bool,
    better: Callable[[], Refinement],
    more: Mapping[str, Any],
) -> tuple[Evaluation, Callable[[Path], None] | None]:
    """The evaluation, and what writes its page; landmarks have none."""
    encoder = asked.encoder(what)
    from roadmap.evaluation import evaluate as evaluation_of
    from roadmap.evaluation import recall_ks, records_to_search
    from roadmap.report import Album, retrieval_page
    from roadmap.report.text import plan, rate

    everything = encoder.records(asked.data, asked.root)
    records = records_to_search(everything, asked.split)
    if records.ground_truth and (ks is not None or paged):
        raise ValueError(f"{records.name} has easy, hard and junk answers and no classes: leave --ks and --page out")
    pack, read = asked.pictures(encoder, everything)
    parts = [part for part in records.evaluation() if part is not None]
    say(plan(encoder, records, parts, read))
    began = time.monotonic()
    ks = recall_ks(asked.data or encoder.data or "") if ks is None else ks
    result = evaluation_of(
        encoder, records, ks=ks, ties=ties, pack=pack, on_error=asked.when_damaged(encoder), refinement=better(), **more
    )
    about = result.facts["data"]
    say(rate(about["queries"] + (about["gallery"] or 0), time.monotonic() - began, about["skipped"]))

    def write_page(path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        albums = [Album(part, pack) for part in parts]
        retrieval_page(path, f"{encoder.name} on {records.name}", {encoder.name: result}, *albums)

    return result, None if records.ground_truth else write_page


def _of_vectors(
    path: Path,
    device: str,
    gallery: Path | None,
    ks: Any,
    ties: Any,
    revisited: Path | None,
    memory: int,
    better: Refinement,
    more: Mapping[str, Any],
) -> Evaluation:
    if revisited is not None and gallery is None:
        raise ValueError("--revisited needs --gallery: the queries are not among the database images")
    from roadmap.embeddings import Embeddings
    from roadmap.evaluation import evaluate as evaluation_of
    from roadmap.hardware import device_of
    from roadmap.metrics import load_ground_truth

    place = device_of(device)
    queries = Embeddings.load(path).to(place)
    items = None if gallery is None else Embeddings.load(gallery).to(place)
    truth = None if revisited is None else load_ground_truth(revisited)
    found = evaluation_of(
        queries, items, ks=ks, ties=ties, truth=truth, memory=memory, nearest=0, refinement=better, **more
    )
    files = {"embeddings": str(path), "gallery": None if gallery is None else str(gallery)}
    title = f"{path.name}: {found.title.rpartition(': ')[2]}"
    return dataclasses.replace(found, facts={**found.facts, **files, "title": title})


def _are_vectors(what: str, asked: Asked) -> bool:
    if not what.endswith(".safetensors"):
        return what.endswith(".npz")
    from roadmap.embeddings import holds_vectors

    try:
        return holds_vectors(what)
    except ValueError:  # damaged: whoever names a dataset means a model
        return asked.data is None


def _refuse(given: Mapping[str, object], why: str) -> None:
    names = [f"--{name}" for name, value in given.items() if value is not None]
    if names:
        raise ValueError(f"{', '.join(names)} cannot be used: {why}; leave {'it' if len(names) == 1 else 'them'} out")


def _numbers(text: str, option: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.strip().rstrip(",").split(","))
    except ValueError:
        raise ValueError(
            f"{option} must be whole numbers with commas between, such as 1,10,100, got {text!r}"
        ) from None


def _bytes(text: str) -> int:
    found = re.fullmatch(r"\s*(\d+\.?\d*)\s*([KMG]?B)\s*", text, re.IGNORECASE)
    if found is None:
        raise ValueError(f"--memory must be a number with B, KB, MB or GB, such as 512MB, got {text!r}")
    return int(float(found[1]) * UNITS[found[2].upper()])
