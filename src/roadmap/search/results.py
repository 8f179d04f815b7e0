"""What a search gives."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from roadmap.search.rows import Rows
from roadmap.search.vectors import Floats, Slots


@dataclass(frozen=True)
class Results:
    """For each query, what was found, best first; fewer than k where there are no more.

    Attributes:
        ids: ids[q][r] is the r-th result of query q.
        scores: their cosines with the query, in the same places.
        metadata: their columns, `id` and `label` among them.
    """

    ids: list[list[str]]
    scores: list[list[float]]
    metadata: list[list[dict[str, Any]]]

    def __len__(self) -> int:
        return len(self.ids)

    @classmethod
    def of(cls, scores: Floats, slots: Slots, rows: Rows) -> Results:
        """Slots are looked up; one that was removed in the meantime is left out."""
        wanted = slots.tolist()
        known = rows.metadata([*{slot for row in wanted for slot in row if slot >= 0}])
        ids, kept, metadata = [], [], []
        for row, values in zip(wanted, scores.tolist(), strict=True):
            here = [(known[slot], value) for slot, value in zip(row, values, strict=True) if slot in known]
            metadata.append([found for found, _ in here])
            ids.append([found["id"] for found, _ in here])
            kept.append([value for _, value in here])
        return cls(ids, kept, metadata)


@dataclass(frozen=True)
class Rank:
    """Where one expected row stands in the answer to a query.

    Attributes:
        rank: 1 for the best; among the rows that may be found, counting this one.
        score: its cosine with the query.
        among: how many rows may be found.
        passes: whether the filter lets it pass; where it does not, the rank is the one it would have.
    """

    rank: int
    score: float
    among: int
    passes: bool
