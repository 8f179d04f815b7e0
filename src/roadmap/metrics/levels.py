"""Paths through a tree of labels: how many levels a query and an item share; no (M, N) table."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from roadmap.metrics.grades import UNKNOWN, finest_shared_level
from roadmap.metrics.labels import as_int64

Paths = Tensor | ArrayLike


def node_numbers(
    query_paths: Paths, queries: int, gallery_paths: Paths | None, gallery: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Paths of both as (M, L) and (N, L) int64 on `device`: nodes of a level numbered from 0, UNKNOWN where negative.

    Without a gallery the same tensor twice.

    Raises:
        TypeError: not integers.
        ValueError: not one path for each vector, other levels in the gallery, or no tree.
    """
    q = _integers(query_paths, queries, "query_labels")
    g = q if gallery_paths is None else _integers(gallery_paths, gallery, "gallery_labels")
    if q.shape[1] != g.shape[1]:
        raise ValueError(f"query_labels have {q.shape[1]} levels and gallery_labels {g.shape[1]}; they must agree")
    both = (q if gallery_paths is None else torch.cat([q, g])).to(device)
    numbers = torch.stack([_numbers(column) for column in both.T], dim=1)
    _check_tree(numbers)
    return numbers[:queries], numbers[-gallery:]


def _integers(given: Paths, count: int, name: str) -> Tensor:
    found = given.detach() if isinstance(given, Tensor) else torch.as_tensor(np.asarray(given))
    if found.is_floating_point() or found.is_complex() or found.dtype == torch.bool:
        raise TypeError(f"{name} must hold integers, got {found.dtype}")
    if found.ndim != 2 or len(found) != count or found.shape[1] == 0:
        raise ValueError(
            f"{name} must have shape ({count}, levels), a path from the coarsest level to the class for each vector, "
            f"got {tuple(found.shape)}"
        )
    return as_int64(found, name)


def _numbers(column: Tensor) -> Tensor:
    """Nodes of a level by their place among the known ones."""
    known = torch.unique(column[column >= 0])
    return torch.where(column < 0, UNKNOWN, torch.searchsorted(known, column.contiguous()))


def _check_tree(paths: Tensor) -> None:
    """A node has one parent."""
    for depth in range(1, paths.shape[1]):
        known = paths[paths[:, depth] >= 0]
        node, rows = known[:, depth], torch.arange(len(known), device=paths.device)
        nodes = int(node.max()) + 1 if len(node) else 0
        first = rows.new_full((nodes,), len(rows)).scatter_reduce_(0, node, rows, "amin")
        strange = (known[first[node], :depth] != known[:, :depth]).any(1)
        if bool(strange.any()):
            raise ValueError(
                f"the paths are no tree: {int(strange.sum())} items share a node of level {depth + 1} with others, and "
                "not the levels above it; a node must have one parent"
            )


def coarsest_nodes(queries: Tensor, gallery: Tensor) -> tuple[Tensor, Tensor]:
    """(M,) and (N,) labels that are equal where a query and an item share anything: their coarsest known nodes.

    Who knows no level is alone: below zero, even among queries and odd in the gallery, so that the two never meet.
    """
    depth, sizes = queries.shape[1], 1 + torch.maximum(queries.amax(0), gallery.amax(0))
    offsets = sizes.cumsum(0) - sizes
    found = []
    for side, paths in enumerate((queries, gallery)):
        alone = -2 - side - 2 * torch.arange(len(paths), device=paths.device)
        for level in reversed(range(depth)):
            alone = torch.where(paths[:, level] >= 0, offsets[level] + paths[:, level], alone)
        found.append(alone)
    return found[0], found[1]


def shared_levels(queries: Tensor, gallery: Tensor, columns: Tensor) -> Tensor:
    """(n, P) the finest level, from 1, that each query (n, L) shares with the items (N, L) it names; 0 for none."""
    found = finest_shared_level(queries[:, None], gallery[columns.clamp(min=0)])
    return torch.where(columns >= 0, found, 0)
