"""How many of the true nearest an approximate engine finds, measured on vectors of its own."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from roadmap.search.columns import Mask
from roadmap.search.engines import NOTHING
from roadmap.search.engines.exact import Gallery
from roadmap.search.vectors import Floats, Slots, VectorFile

ASKED = 200  # queries
NEAREST = 10


class Questions:
    """Stored vectors as queries, and their true nearest; the query itself, which is in the index, does not count."""

    def __init__(self, vectors: VectorFile, live: Mask) -> None:
        slots = np.flatnonzero(live)
        self.own = np.sort(np.random.default_rng(0).choice(slots, min(ASKED, len(slots)), replace=False))
        self.queries = vectors.rows(self.own)
        gallery = Gallery(vectors, torch.device("cpu"))
        gallery.grow(len(live))
        gallery.remove(np.flatnonzero(~live))
        self.truth = gallery.search(self.queries, NEAREST + 1)[1]

    def recall(self, search: Callable[[Floats, int], tuple[Floats, Slots]]) -> float:
        """The part of the true 10 nearest that `search` finds."""
        found = search(self.queries, NEAREST + 1)[1]
        hits = total = 0
        for row, right, me in zip(found.tolist(), self.truth.tolist(), self.own.tolist(), strict=True):
            wanted = [slot for slot in right if slot not in (me, NOTHING)][:NEAREST]
            hits += len(set(wanted) & set(row))
            total += len(wanted)
        return round(hits / total, 4) if total else 1.0
