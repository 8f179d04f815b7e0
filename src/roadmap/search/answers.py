"""Better answers from an index: its nearest are fetched and refined among themselves.

With a pool as large as the index this is exactly what `roadmap evaluate` measures for a query that is not in it. A
smaller one costs the same whatever the size of the index.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from roadmap.refinement import Refinement, reranked
from roadmap.search.index import Index, Queries
from roadmap.search.results import Results

POOL = 1000
SAMPLE = 50_000  # vectors of the index that a whitening of its own is fitted to


def refined_search(
    index: Index,
    vectors: Queries,
    k: int = 10,
    refinement: Refinement | None = None,
    where: Mapping[str, Any] | None = None,
    offset: int = 0,
    pool: int = POOL,
) -> Results:
    """As `Index.search`, with a refinement: the `pool` nearest of each query are taken, and ordered anew.

    Scores are those of the refined vectors, or of the re-ranking. Neighbours are looked for in the pool; a refinement
    that asks for more of them than there are takes all.
    """
    if not refinement:
        return index.search(vectors, k, where, offset)
    if isinstance(refinement.whiten, str):
        refinement = replace(refinement, whiten=refinement.whitening(sample_of(index)))
    found = index.search(vectors, max(pool, k + offset, refinement.rerank), where)
    queries = torch.from_numpy(index._queries(vectors))
    ids, scores, metadata = [], [], []
    for query, names, rows in zip(queries, found.ids, found.metadata, strict=True):
        order, values = _ordered(query, torch.from_numpy(index.vectors_of(names)), refinement)
        places = order[offset : offset + k].tolist()
        ids.append([names[i] for i in places])
        metadata.append([rows[i] for i in places])
        scores.append(values[offset : offset + k].tolist())
    return Results(ids, scores, metadata)


def sample_of(index: Index) -> Tensor:
    """The vectors of an index, or so many of them that a whitening can be fitted to."""
    names = index.ids()
    if len(names) > SAMPLE:
        names = [names[i] for i in np.sort(np.random.default_rng(0).choice(len(names), SAMPLE, replace=False))]
    return torch.from_numpy(index.vectors_of(names))


def _ordered(query: Tensor, near: Tensor, refinement: Refinement) -> tuple[Tensor, Tensor]:
    """Places in the pool from the best down, and their scores."""
    if len(near) < 2:
        return torch.arange(len(near)), near @ query
    fitting = replace(
        refinement,
        augment=min(refinement.augment, len(near) - 1),
        expand=min(refinement.expand, len(near)),
        rerank=min(refinement.rerank, len(near)),
    )
    asked, held = fitting.vectors(query[None], near)
    scores, order = (asked @ held.T)[0].sort(descending=True, stable=True)
    if not fitting.rerank:
        return order, scores
    better, first = reranked(asked, held, fitting.rerank)
    rest = order[~torch.isin(order, first[0])]
    # those that were not re-ranked come after, by their cosines, and never above the last that was
    after = (asked @ held[rest].T)[0].clamp(max=float(better[0, -1]))
    return torch.cat([first[0], rest]), torch.cat([better[0], after])
