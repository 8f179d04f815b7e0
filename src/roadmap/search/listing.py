"""Rows by their metadata alone, without a query."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from roadmap.search.index import Index


def rows_where(
    index: Index, where: Mapping[str, Any] | None = None, k: int = 10, offset: int = 0
) -> tuple[list[dict[str, Any]], int]:
    """The metadata of k rows that pass a filter, in the order they came, after `offset` that are left out; and how many
    pass in all."""
    if k < 1 or offset < 0:
        raise ValueError(f"k must be at least 1 and offset at least 0, got k={k}, offset={offset}")
    rows = index.storage.rows
    selection = index.selection(where)
    allowed = np.ones(rows.slot_count(), np.bool_) if selection is None else selection.mask.copy()
    removed = rows.removed_since(0)
    allowed[removed[removed < len(allowed)]] = False
    slots = np.flatnonzero(allowed)
    known = rows.metadata(slots[offset : offset + k].tolist())
    return [known[slot] for slot in sorted(known)], len(slots)
