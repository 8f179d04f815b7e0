"""`roadmap gap`: how far AP in batches is from AP over everything, for a model or two."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from roadmap.cli.options import Asked, about_models
from roadmap.cli.telling import say, say_start
from roadmap.locations import MODEL

if TYPE_CHECKING:
    from roadmap.experiments.gap import BatchChoice, Gap


@about_models
def gap(
    asked: Asked,
    what: Annotated[
        list[str], typer.Argument(metavar="RUN [RUN2]", help=f"Vectors with labels (.npz), or {MODEL}; two to compare.")
    ],
    size: Annotated[int, typer.Option("--size", min=1, help="Items in a batch.")] = 128,
    sampler: Annotated[str, typer.Option(help="m_per_class, as in training, or random.")] = "m_per_class",
    per_class: Annotated[int, typer.Option(min=1, help="Items of a class, for m_per_class.")] = 4,
    draws: Annotated[int, typer.Option(min=1, help="Partitions into batches; the gap is their mean.")] = 5,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the draws.")] = 0,
    queries: Annotated[int, typer.Option(min=0, help="Queries to compute the bounds for; 0: no bounds.")] = 200,
    alpha: Annotated[float, typer.Option(help="alpha of the calibration, for its bound.")] = 0.9,
    beta: Annotated[float, typer.Option(help="beta of the calibration, for its bound.")] = 0.6,
    out: Annotated[Path | None, typer.Option("--json", help="Write the values to this file as well.")] = None,
) -> None:
    """Print the decomposability gap (Eq. 6): mean AP in batches less AP of the whole test set, and what bounds it.

    With two runs it also prints how far the gap decreases from the first to the second, as in Table 10.

    roadmap gap runs/supap runs/roadmap --size 128
    """
    if len(what) > 2:
        raise ValueError(f"give one model or two to compare, got {len(what)}")
    if len({Path(one).resolve() for one in what}) < len(what):
        raise ValueError(f"{what[0]} is named twice; name it once, or another beside it")
    say_start(f"comparing  batches with the whole: {', '.join(what)}")
    from roadmap.experiments.gap import BatchChoice, decrease, sheets

    choice = BatchChoice(size, sampler, per_class, draws, seed)
    gaps = [_gap(one, asked, choice, queries, alpha, beta) for one in what]
    if len({gap.name for gap in gaps}) < len(set(what)):  # such as a/best.npz and b/best.npz
        gaps = [dataclasses.replace(gap, name=one) for gap, one in zip(gaps, what, strict=True)]
    say([sheets(gaps)])
    if out is not None:
        values = {gap.name: gap.as_dict() for gap in gaps}
        relative = decrease(*gaps).relative if len(gaps) == 2 else math.nan
        compared = {"decrease in %": None if math.isnan(relative) else relative} if len(gaps) == 2 else {}
        from roadmap.atomic import whole_file

        out.parent.mkdir(parents=True, exist_ok=True)
        with whole_file(out) as temporary:
            Path(temporary).write_text(json.dumps({**values, **compared}, indent=2) + "\n")
        say([f"wrote      {out}"])


def _gap(what: str, asked: Asked, choice: BatchChoice, queries: int, alpha: float, beta: float) -> Gap:
    if what.endswith(".npz") or (what.endswith(".safetensors") and _holds_vectors(what)):
        from roadmap.embeddings import Embeddings
        from roadmap.experiments.gap import gap_of

        return gap_of(Embeddings.load(what), choice, Path(what).stem, queries, alpha, beta)
    encoder = asked.encoder(what)
    from roadmap.experiments.gap import embeddings_of_test, gap_of

    pack, _ = asked.pictures(encoder, encoder.records(asked.data, asked.root))
    found = embeddings_of_test(encoder, pack, asked.when_damaged(encoder), data=asked.data, root=asked.root)
    return gap_of(found, choice, encoder.name, queries, alpha, beta)


def _holds_vectors(what: str) -> bool:
    from roadmap.embeddings import holds_vectors

    return Path(what).is_file() and holds_vectors(what)
