"""The options of better answers, which `evaluate` and `search` share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from roadmap.refinement import Refinement


def _option(text: str) -> Any:
    return typer.Option(help=text, rich_help_panel="Better answers from the same vectors")


WHITEN = Annotated[
    str | None,
    _option("PCA whitening: own (fitted to what is searched), own:DIM, or a file of Whitening.save."),
]
AUGMENT = Annotated[int, _option("Mix every vector that is searched with this many of its nearest; 0 for none.")]
EXPAND = Annotated[int, _option("Mix the query with this many of its nearest, and search again; 0 for none.")]
RERANK = Annotated[int, _option("Re-rank this many of the first answers by k-reciprocal neighbours; 0 for none.")]


def refinement_of(whiten: str | None, augment: int, expand: int, rerank: int) -> Callable[[], Refinement]:
    """What was asked for, once it is needed; what is wrong with it is told now, before torch is imported.

    Raises:
        ValueError: a number below 0, or a whitening that is neither "own" nor a file.
    """
    for name, value in (("augment", augment), ("expand", expand), ("rerank", rerank)):
        if value < 0:
            raise ValueError(f"--{name} must be 0 or more, got {value}")
    kind, _, size = (whiten or "").partition(":")
    if kind != "own" and whiten is not None and not Path(whiten).is_file():
        raise ValueError(f"--whiten must be own, own:DIM or a file, got {whiten!r}")
    if kind == "own" and size and (not size.isdigit() or int(size) < 1):
        raise ValueError(f"--whiten own:DIM needs a whole number of at least 1, got {size!r}")

    def refinement() -> Refinement:
        from roadmap.refinement import Refinement, Whitening

        fitted = Whitening.load(whiten) if whiten is not None and kind != "own" else whiten
        return Refinement(fitted, augment, expand, rerank)

    return refinement
