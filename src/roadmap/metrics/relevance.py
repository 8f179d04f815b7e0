"""Who is relevant to whom, from labels alone: no (M, N) mask.

The gallery is listed class by class, small classes first, so that the positives of a query are one range of that list
and queries with like numbers of positives come together.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

Ignored = Sequence[ArrayLike | Tensor]


@dataclass(frozen=True)
class Exclusions:
    """Gallery items that are not in the ranking of a query: the query itself, and junk. Distinct within a query."""

    items: Tensor  # (X,) int64 gallery indices, query after query
    offsets: Tensor  # (M + 1,) int64: those of query i are items[offsets[i] : offsets[i + 1]]

    def counts(self) -> Tensor:
        """(M,) how many each query has."""
        return self.offsets[1:] - self.offsets[:-1]

    def table(self, queries: Tensor) -> Tensor:
        """(n, E) items of the given queries, filled up with -1."""
        start, count = self.offsets[queries], self.offsets[queries + 1] - self.offsets[queries]
        longest = int(count.max()) if len(count) else 0
        place = torch.arange(longest, device=start.device)
        inside = place < count[:, None]
        return torch.where(inside, self.items[torch.where(inside, start[:, None] + place, 0)], -1)


@dataclass(frozen=True)
class Relevance:
    """The positives of M queries in a gallery of N items."""

    order: Tensor  # (N,) gallery indices, class by class
    place: Tensor  # (N,) the inverse: place[order[j]] = j
    start: Tensor  # (M,) where the query's class begins in `order`
    size: Tensor  # (M,) items of that class, excluded ones among them
    positives: Tensor  # (M,) items of that class that are not excluded
    excluded: Exclusions

    def columns(self, queries: Tensor) -> tuple[Tensor, Tensor]:
        """The positives (n, P) and the excluded items (n, E) of the given queries, filled up with -1."""
        start, size = self.start[queries, None], self.size[queries, None]
        place = torch.arange(int(size.max()), device=start.device)
        inside = place < size
        columns = torch.where(inside, self.order[torch.where(inside, start + place, 0)], -1)
        excluded = self.excluded.table(queries)
        at = self.place[excluded.clamp(min=0)] - start
        row, column = ((excluded >= 0) & (at >= 0) & (at < size)).nonzero(as_tuple=True)
        columns[row, at[row, column]] = -1
        return columns, excluded

    def chunks(self, cells: int, queries: int) -> Iterator[Tensor]:
        """Indices of the queries that have positives, in chunks of tables with few empty places.

        Args:
            cells: places in the tables of positives and excluded items of one chunk, kept unless one query has more.
            queries: most queries in a chunk.
        """
        relevant = (self.positives > 0).nonzero()[:, 0]
        if not len(relevant):
            return
        by_place = relevant[self.start[relevant].argsort(stable=True)]  # small classes first, a class together
        yield from chunks_of_tables(by_place, self.size[by_place], self.excluded.counts()[by_place], cells, queries)


def chunks_of_tables(order: Tensor, size: Tensor, excluded: Tensor, cells: int, queries: int) -> Iterator[Tensor]:
    """`order`, a list of queries, in chunks of at most so many, whose tables have so many `cells`, unless one query has
    more. `size` and `excluded` say how wide the rows of these queries are; sizes ascend."""
    wide, beside = size.cpu().numpy(), excluded.cpu().numpy()
    first = 0
    while first < len(wide):
        # a table is as wide as its widest row: at most about twice the narrowest
        alike = np.searchsorted(wide, 2 * wide[first] + 8, side="right") - first
        reach = slice(first, first + min(int(alike), queries))
        width = np.maximum.accumulate(wide[reach]) + np.maximum.accumulate(beside[reach])
        taken = max(1, int((width * np.arange(1, len(width) + 1) <= cells).sum()))
        yield order[first : first + taken]
        first += taken


def relevance(query_labels: Tensor, gallery_labels: Tensor, excluded: Exclusions) -> Relevance:
    """Positives of each query: the gallery items of its class that are not excluded. Labels: int64, any values."""
    labels, group, count = torch.unique(gallery_labels, return_inverse=True, return_counts=True)
    by_size = count.argsort(stable=True)
    rank = torch.empty_like(by_size).scatter_(0, by_size, torch.arange(len(by_size), device=by_size.device))
    order = rank[group].argsort(stable=True)
    place = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
    group_start = torch.zeros_like(count).scatter_(0, rank, count)  # count by rank ...
    group_start = (group_start.cumsum(0) - group_start)[rank]  # ... where it begins, by label

    found = torch.searchsorted(labels, query_labels).clamp(max=len(labels) - 1)
    known = labels[found] == query_labels
    start = torch.where(known, group_start[found], 0)
    size = torch.where(known, count[found], 0)

    repeats = excluded.counts()
    owner = torch.repeat_interleave(torch.arange(len(repeats), device=repeats.device), repeats)
    at = place[excluded.items]
    lost = (at >= start[owner]) & (at < start[owner] + size[owner])
    positives = size - torch.zeros_like(size).index_add_(0, owner[lost], torch.ones_like(owner[lost]))
    return Relevance(order, place, start, size, positives, excluded)


def exclusions(
    queries: int, gallery: int, query_index: Tensor | None, ignore: Ignored | None, device: torch.device
) -> Exclusions:
    """The query itself (its index in the gallery; -1: not there) and the items to ignore, each once."""
    owners: list[Tensor] = []
    items: list[Tensor] = []
    if query_index is not None:
        own = _indices(query_index, "query_index", gallery, device, least=-1)
        if own.shape != (queries,):
            raise ValueError(f"query_index must have shape ({queries},), one for each query, got {tuple(own.shape)}")
        owners.append((own >= 0).nonzero()[:, 0])
        items.append(own[own >= 0])
    if ignore is not None:
        if len(ignore) != queries:
            raise ValueError(
                f"ignore must hold one list of gallery indices for each of {queries} queries, got {len(ignore)}"
            )
        lists = [_indices(some, f"ignore[{i}]", gallery, device) for i, some in enumerate(ignore)]
        lengths = torch.tensor([len(some) for some in lists], device=device)
        owners.append(torch.repeat_interleave(torch.arange(queries, device=device), lengths))
        items.extend(lists)
    offsets = torch.zeros(queries + 1, dtype=torch.int64, device=device)
    if not items:
        return Exclusions(offsets[:0], offsets)
    pair = torch.unique(torch.cat(owners) * gallery + torch.cat(items))
    owner = torch.div(pair, gallery, rounding_mode="floor")
    offsets[1:] = torch.bincount(owner, minlength=queries).cumsum(0)
    return Exclusions(pair % gallery, offsets)


def _indices(given: ArrayLike | Tensor, name: str, gallery: int, device: torch.device, least: int = 0) -> Tensor:
    found = given if isinstance(given, Tensor) else torch.as_tensor(np.asarray(given))
    if found.numel() == 0:
        return torch.empty(0, dtype=torch.int64, device=device)
    if found.is_floating_point() or found.dtype == torch.bool:
        raise TypeError(f"{name} must hold integer gallery indices, got {found.dtype}")
    found = found.to(device=device, dtype=torch.int64).flatten()
    if int(found.min()) < least or int(found.max()) >= gallery:
        raise ValueError(
            f"{name} must hold gallery indices from {least} to {gallery - 1}, "
            f"got values from {int(found.min())} to {int(found.max())}"
        )
    return found
