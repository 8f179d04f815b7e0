"""Who is relevant to whom, and by what degree: by a tree of labels, by sets of labels, or pair by pair.

A tree says it class by class (`roadmap.metrics.relevance`). The other two are tables of queries against the gallery,
of which no more than a tile exists at a time: once to count the positives, once more for each chunk of queries.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from roadmap.metrics.grades import Gain, SetGrades, TreeGrades, common_labels, set_grades, tree_grades
from roadmap.metrics.levels import coarsest_nodes, shared_levels
from roadmap.metrics.relevance import Exclusions, Relevance, chunks_of_tables, relevance

ROWS_AT_ONCE = 1024
# The largest grades whose gains, added up, are still numbers.
MOST = {"exponential": 900.0, "linear": 1e100}


class DegreeTables(NamedTuple):
    """The positives of n queries, with their degrees; rows are filled up with -1, and degrees with 0."""

    columns: Tensor  # (n, P) gallery indices
    excluded: Tensor  # (n, E) gallery indices that leave the ranking
    closeness: Tensor  # (n, P) float64, by NDCG and ASI
    relevance: Tensor  # (n, P) float64, by H-AP

    def by_degree(self) -> DegreeTables:
        """The least close first, and of those the least relevant, whatever the order of the gallery."""
        order = self.relevance.sort(dim=1, stable=True).indices
        order = order.gather(1, self.closeness.gather(1, order).sort(dim=1, stable=True).indices)
        columns, closeness, rel = (some.gather(1, order) for some in (self.columns, self.closeness, self.relevance))
        return DegreeTables(columns, self.excluded, closeness, rel)


class Degrees(Protocol):
    @property
    def positives(self) -> Tensor:
        """(M,) how many each query has."""

    def chunks(self, cells: int, queries: int) -> Iterator[Tensor]:
        """Indices of the queries that have positives, in chunks of tables with few empty places."""

    def tables(self, queries: Tensor) -> DegreeTables: ...


@dataclass(frozen=True)
class TreeDegrees:
    """By the finest level shared: the paths (M, L) and (N, L) are numbered, `weights` those of the levels in `kind`."""

    queries: Tensor
    gallery: Tensor
    kind: TreeGrades
    weights: Sequence[float]
    wanted: Relevance

    @classmethod
    def of(
        cls, queries: Tensor, gallery: Tensor, kind: TreeGrades, weights: Sequence[float], excluded: Exclusions
    ) -> TreeDegrees:
        return cls(queries, gallery, kind, weights, relevance(*coarsest_nodes(queries, gallery), excluded))

    @property
    def positives(self) -> Tensor:
        return self.wanted.positives

    def chunks(self, cells: int, queries: int) -> Iterator[Tensor]:
        return self.wanted.chunks(cells, queries)

    def tables(self, queries: Tensor) -> DegreeTables:
        columns, excluded = self.wanted.columns(queries)
        levels = shared_levels(self.queries[queries], self.gallery, columns)
        rel = tree_grades(levels, self.kind, self.weights, torch.float64)
        return DegreeTables(columns, excluded, levels.double(), rel)


@dataclass(frozen=True)
class LabelSets:
    """Labels that queries (M, C) and items (N, C) have in common; `sets` None: as the losses take them unless told."""

    queries: Tensor
    items: Tensor
    sets: SetGrades | None

    @property
    def width(self) -> int:
        return self.queries.shape[1]

    def tile(self, queries: Tensor, items: slice) -> Tensor:
        """(n, t) a table of its own: above 0 for positives, below 0 for those that are in no ranking."""
        return common_labels(self.queries[queries], self.items[items])

    def degrees(self, queries: Tensor, columns: Tensor, common: Tensor) -> tuple[Tensor, Tensor]:
        """Closeness and relevance from what the tiles said, (n, P)."""
        mine, others = self.queries.sum(1)[queries, None], self.items.sum(1)[columns]
        by_count, by_iou = (set_grades(common, mine, others, kind) for kind in ("count", "iou"))
        return by_iou if self.sets == "iou" else by_count, by_count if self.sets == "count" else by_iou


@dataclass(frozen=True)
class GivenGrades:
    """Grades that came pair by pair, (M, N), on any device."""

    grades: Tensor
    gain: Gain
    device: torch.device
    width: int = 1

    def tile(self, queries: Tensor, items: slice) -> Tensor:
        """(n, t) a table of its own: above 0 for positives, below 0 for those that are in no ranking."""
        found = self.grades[:, items][queries.to(self.grades.device)].to(self.device, torch.float64)
        strange = found[~(found <= MOST[self.gain]) | found.isinf()]
        if len(strange):
            raise ValueError(
                f"grades must be finite and at most {MOST[self.gain]:g} with gain={self.gain!r}, got {strange[0]:g}; "
                "an item that is in no ranking has a grade below 0"
            )
        return found

    def degrees(self, queries: Tensor, columns: Tensor, grades: Tensor) -> tuple[Tensor, Tensor]:
        """Closeness and relevance from what the tiles said, (n, P)."""
        return grades, grades


@dataclass(frozen=True)
class PairDegrees:
    """By a table of every query against N items, of which one tile at a time has `cells` places."""

    table: LabelSets | GivenGrades
    items: int
    excluded: Exclusions
    cells: int
    positives: Tensor  # (M,)
    negative: Tensor  # (M,) how many the table leaves out of each ranking, beside those excluded

    @classmethod
    def of(cls, table: LabelSets | GivenGrades, items: int, excluded: Exclusions, cells: int) -> PairDegrees:
        count = excluded.counts()
        found = cls(table, items, excluded, cells, torch.zeros_like(count), torch.zeros_like(count))
        height = max(1, min(ROWS_AT_ONCE, cells // max(int(count.max()) + 1, table.width)))
        for some in torch.split(torch.arange(len(count), device=count.device), height):
            for _, tile in found.tiles(some, excluded.table(some)):
                found.positives[some] += (tile > 0).sum(1)
                found.negative[some] += (tile < 0).sum(1)
        return found

    def tiles(self, queries: Tensor, excluded: Tensor) -> Iterator[tuple[int, Tensor]]:
        """The table of n queries from left to right, and where each part begins; 0 where an item is excluded."""
        width = max(1, self.cells // max(len(queries), self.table.width))
        for first in range(0, self.items, width):
            tile = self.table.tile(queries, slice(first, first + width))
            at = excluded - first
            row, place = ((at >= 0) & (at < tile.shape[1])).nonzero(as_tuple=True)
            tile[row, at[row, place]] = 0
            yield first, tile

    def chunks(self, cells: int, queries: int) -> Iterator[Tensor]:
        relevant = (self.positives > 0).nonzero()[:, 0]
        order = relevant[self.positives[relevant].argsort(stable=True)]
        beside = self.negative + self.excluded.counts()
        yield from chunks_of_tables(order, self.positives[order], beside[order], cells, queries)

    def tables(self, queries: Tensor) -> DegreeTables:
        excluded = self.excluded.table(queries)
        positives, negative = list[tuple[Tensor, ...]](), list[tuple[Tensor, ...]]()
        for first, tile in self.tiles(queries, excluded):
            for found, some in ((positives, tile > 0), (negative, tile < 0)):
                row, column = some.nonzero(as_tuple=True)
                found.append((row, column + first, tile[row, column].double()))
        columns, values = _tables(positives, len(queries))
        excluded = torch.cat([excluded, _tables(negative, len(queries))[0]], dim=1)
        return DegreeTables(columns, excluded, *self.table.degrees(queries, columns, values))


def _tables(parts: Sequence[tuple[Tensor, ...]], rows: int) -> tuple[Tensor, Tensor]:
    """Columns and values (rows, P) from lists of rows, columns and values, filled up with -1 and 0."""
    row, column, value = (torch.cat(some) for some in zip(*parts, strict=True))
    order = row.argsort(stable=True)
    row = row[order]
    count = torch.bincount(row, minlength=rows)
    place = torch.arange(len(row), device=row.device) - (count.cumsum(0) - count)[row]
    columns, values = row.new_full((rows, int(count.max())), -1), value.new_zeros(rows, int(count.max()))
    columns[row, place], values[row, place] = column[order], value[order]
    return columns, values
