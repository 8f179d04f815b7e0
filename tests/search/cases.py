"""Vectors, rows and filters that the tests of the search share, and a literal search to compare with."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor

from roadmap.search import Index
from roadmap.search.filters import filter_from, passes

ABOUT = {"model": "a" * 64, "crop": {"size": 224}, "precision": "32"}
COLUMNS = {"kind of bird": "text", "year": "integer", "size": "real", "seen": "boolean"}
ALL = {"id": "text", "label": "text", **COLUMNS}
TEXTS = [
    "owl",
    "Owl",
    "",
    'say "hoo"',
    "it's",
    "a\\b",
    "\\",
    "é☃🦉",
    "new\nline",
    "100%",
    "_",
    "zebra",
    "' or 1 == 1 or '",
]


@dataclass(frozen=True)
class Vectors:
    """As `roadmap.embeddings.Embeddings`."""

    vectors: Tensor
    labels: Tensor
    ids: tuple[str, ...] | None = None
    class_names: tuple[str, ...] = ()
    about: Mapping[str, Any] = field(default_factory=lambda: ABOUT)


def made(count: int, dim: int = 16, seed: int = 0, first: int = 0) -> Vectors:
    generator = torch.Generator().manual_seed(seed)
    names = tuple(f"p{first + i}.jpg" for i in range(count))
    return Vectors(torch.randn(count, dim, generator=generator), torch.arange(count) % 3, names, ("owl", "tit", "jay"))


def table(count: int, seed: int = 0) -> dict[str, list[Any]]:
    """Values of every kind, missing ones among them."""
    random = np.random.default_rng(seed)
    pools: dict[str, list[Any]] = {
        "kind of bird": [*TEXTS, None],
        "year": [2019, 2020, 2021, -3, 0, 2**53 + 1, 2**53, 2**63 - 1, -(2**63) + 1, None],
        "size": [0.0, 0.5, 1 / 3, -1e-300, 1e308, -2.5, 7.0, None],
        "seen": [True, False, None],
    }
    return {name: [pool[i] for i in random.integers(0, len(pool), count)] for name, pool in pools.items()}


def rows_of(vectors: Vectors, rows: Sequence[int]) -> Vectors:
    names = tuple((vectors.ids or ())[i] for i in rows)
    return Vectors(vectors.vectors[list(rows)], vectors.labels[list(rows)], names, vectors.class_names, vectors.about)


def new_index(folder: Path, engine: str = "exact", dim: int = 16, **more: Any) -> Index:
    return Index.create(folder, ABOUT, dim, engine=engine, columns=COLUMNS, **more)


def literal_search(
    vectors: Vectors, rows: Mapping[str, Sequence[Any]], query: Tensor, where: Mapping[str, Any] | None = None
) -> list[tuple[str, float]]:
    """(id, cosine) of every row that passes, best first: a loop in float64."""
    found = []
    condition = filter_from(where or {}, ALL)
    for i, name in enumerate(vectors.ids or ()):
        row = {"id": name, "label": vectors.class_names[int(vectors.labels[i])], **{c: rows[c][i] for c in COLUMNS}}
        if passes(condition, row):
            a, b = vectors.vectors[i].tolist(), query.tolist()
            dot = math.fsum(x * y for x, y in zip(a, b, strict=True))
            found.append((name, dot / math.sqrt(math.fsum(x * x for x in a) * math.fsum(y * y for y in b))))
    return sorted(found, key=lambda item: -item[1])


ANY_TEXT = st.text(st.characters(exclude_categories=["Cs"], min_codepoint=1), max_size=4)
VALUES: dict[str, st.SearchStrategy[Any]] = {
    "id": st.sampled_from(["p0.jpg", "p7.jpg", "none"]),
    "label": st.sampled_from(["owl", "tit", "x"]),
    "kind of bird": st.sampled_from(TEXTS)
    | st.text(st.characters(exclude_categories=["Cs"], min_codepoint=1), max_size=4),
    "year": st.sampled_from([2019, 2020, 2**53, 2**53 + 1, 2**63 - 1, -(2**63) + 1]) | st.integers(-5, 5),
    "size": st.sampled_from([0.5, 1 / 3, 7, -0.0, 1e308, -1e-300]) | st.floats(-3, 3, allow_subnormal=False),
    "seen": st.booleans(),
}


@st.composite
def tests(draw: st.DrawFn) -> dict[str, Any]:
    column = draw(st.sampled_from(list(ALL)))
    value = VALUES[column]
    maybe = value | st.none()
    forms = [maybe, maybe.map(lambda v: {"!=": v}), st.lists(maybe, max_size=3).map(lambda v: {"in": v})]
    if column != "seen":
        forms.append(st.dictionaries(st.sampled_from(["<", "<=", ">", ">="]), value, min_size=1, max_size=2))
    return {column: draw(st.one_of(forms))}


filters = st.recursive(
    tests(),
    lambda inner: st.one_of(
        inner.map(lambda f: {"not": f}),
        st.lists(inner, max_size=3).map(lambda f: {"and": f}),
        st.lists(inner, max_size=3).map(lambda f: {"or": f}),
        st.tuples(inner, inner).map(lambda pair: {**pair[0], **pair[1]}),
    ),
    max_leaves=5,
)
