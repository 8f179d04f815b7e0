"""The exact engine: every vector is compared, in tiles, on the GPU where there is one.

On a GPU the scores of a tile are reduced to the largest of each group of neighbours, and only the groups that can hold
a result are looked at again, in float32. The first pass runs in half precision where vectors are stored so, and finds
the right groups all the same: a vector outside them scores at most the lowest group that was taken, plus what the first
pass can be wrong by; where the k-th result does not clear that, more groups are taken until it does.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from roadmap.kernels.precision import full_float32
from roadmap.search.columns import Mask
from roadmap.search.engines import Mark, Place, Selection, merged, no_results, passing
from roadmap.search.vectors import Floats, Slots, VectorFile

# Where groups pay: a GPU makes scores faster than it can sort them.
GROUPED = {"cuda"}
# Scores held at a time. Small enough for a processor's cache to help, large enough to fill a GPU.
AT_ONCE = {"cpu": 1 << 22, "cuda": 1 << 31}
# Numbers gathered at a time for the second pass.
GATHERED = {"cpu": 1 << 24, "cuda": 1 << 29}
# How far the first pass can lie from float32 for unit vectors. GPU: query and score rounded to half precision, 2^-12
# each, or both vectors to TF32, 2^-11 each. CPU: float32 sums in another order.
ERROR = {"cpu": 2.0**-18, "cuda": 2.0**-10}
UPLOAD = 1 << 24
# Rows looked at again for one query, at most: beyond, so many vectors are equal that any of them is an answer.
MOST_RESCORED = 1 << 16


class ExactEngine:
    name = "exact"

    def __init__(self, place: Place, device: str | None = None) -> None:
        wanted = device or place.options.get("device", "auto")
        gpu = wanted == "cuda" or (wanted == "auto" and torch.cuda.is_available())
        self.gallery = Gallery(place.vectors, torch.device("cuda" if gpu else "cpu"))

    def load(self) -> Mark:
        return Mark()

    def add(self, start: int, stop: int) -> None:
        self.gallery.grow(stop)

    def remove(self, slots: Slots) -> None:
        self.gallery.remove(slots)

    def search(self, vectors: Floats, k: int, selection: Selection | None = None) -> tuple[Floats, Slots]:
        return self.gallery.search(vectors, k, None if selection is None else selection.mask)

    def build(self) -> dict[str, Any]:
        return self.facts()

    def save(self, mark: Mark) -> None:
        """The index's own vectors are all there is."""

    def facts(self) -> dict[str, Any]:
        return {"kind": "exact", "device": str(self.gallery.device), "recall@10": 1.0}

    def close(self) -> None:
        self.gallery = Gallery(self.gallery.vectors, self.gallery.device)

    def __len__(self) -> int:
        return self.gallery.live_count


class Gallery:
    """Rows of a file of vectors, from `start` on, that can be searched exactly; some of them may be removed.

    On the CPU the rows are those of the file, mapped; on a GPU they are copied there, as they are stored. A change
    makes a new snapshot: a search that is under way in another thread goes on with its own.
    """

    def __init__(self, vectors: VectorFile, device: torch.device, start: int = 0) -> None:
        self.vectors, self.device = vectors, device
        self.now = Snapshot(start, (), np.empty(0, np.bool_), device)

    @property
    def live_count(self) -> int:
        return int(self.now.live.sum())

    def grow(self, stop: int) -> None:
        """Take the rows up to `stop`."""
        start, end = self.now.start, self.now.start + len(self.now.live)
        if stop <= end:
            return
        if self.device.type == "cpu":
            blocks: tuple[Tensor, ...] = (self.vectors.tensor(start, stop),)
        else:
            blocks = self._uploaded(end, stop)
        self.now = Snapshot(start, blocks, np.append(self.now.live, np.ones(stop - end, np.bool_)), self.device)

    def _uploaded(self, begin: int, stop: int) -> tuple[Tensor, ...]:
        # Rows that come a few at a time are put together with those before, so that there are few blocks.
        kept = list(self.now.blocks)
        while kept and len(kept[-1]) < 2 * (stop - begin):
            begin -= len(kept.pop())
        for top in range(begin, stop, UPLOAD):
            kept.append(self.vectors.tensor(top, min(top + UPLOAD, stop)).to(self.device))
        return tuple(kept)

    def remove(self, slots: Slots) -> None:
        live = self.now.live.copy()
        inside = slots - self.now.start
        live[inside[(inside >= 0) & (inside < len(live))]] = False
        self.now = Snapshot(self.now.start, self.now.blocks, live, self.device)

    def search(self, queries: Floats, k: int, mask: Mask | None = None) -> tuple[Floats, Slots]:
        """As `Engine.search`; `mask` is over all slots of the file."""
        return self.now.search(queries, k, mask)


@dataclass(frozen=True)
class Snapshot:
    """Rows as they are at one moment: `blocks` together are rows start.. of the file, `live` says which count."""

    start: int
    blocks: tuple[Tensor, ...]
    live: Mask
    device: torch.device

    def search(self, queries: Floats, k: int, mask: Mask | None = None) -> tuple[Floats, Slots]:
        """As `Engine.search`; `mask` is over all slots of the file."""
        scores, slots = no_results(len(queries), k)
        allowed = self._allowed(mask)
        found = min(k, len(self.live) if allowed is None else int(allowed.sum()))
        if found == 0:
            return scores, slots
        if self.device.type not in GROUPED:
            scores[:, :found], slots[:, :found] = self._search_tiles(queries, found, allowed)
            return scores, slots
        hidden = None if allowed is None else torch.from_numpy(~allowed).to(self.device)
        size = 64 if k <= 64 else 8 if k <= 512 else 1
        block = max(1, AT_ONCE[self.device.type] * size // len(self.live))
        for top in range(0, len(queries), block):
            part = torch.from_numpy(np.ascontiguousarray(queries[top : top + block])).to(self.device)
            best, places = self._search(part, found, hidden, size)
            scores[top : top + block, :found] = best.cpu().numpy()
            slots[top : top + block, :found] = places.cpu().numpy() + self.start
        return scores, slots

    def _allowed(self, mask: Mask | None) -> Mask | None:
        """(N,): the rows that may be found; None for all."""
        if mask is None:
            return None if self.live.all() else self.live
        return passing(self.live, mask[self.start :])

    def _search_tiles(self, queries: Floats, k: int, allowed: Mask | None) -> tuple[Floats, Slots]:
        """Scores of a tile and their k best, tile by tile: on a processor this is all there is to do."""
        height, parts, row = max(1, GATHERED["cpu"] // queries.shape[1]), [], 0
        asked = torch.from_numpy(np.ascontiguousarray(queries))
        for tile in (tile for block in self.blocks for tile in torch.split(block, height)):
            rows = tile.float()
            with full_float32():  # a matrix and one vector go through memory once
                scores = (rows @ asked[0])[None] if len(asked) == 1 else asked @ rows.T
            if allowed is not None:
                scores[:, torch.from_numpy(~allowed[row : row + len(rows)])] = -torch.inf
            best, places = first_best(scores, min(k, len(rows)))
            parts.append((best.numpy(), places.numpy() + row + self.start))
            row += len(rows)
        return merged(parts, k)

    def _search(self, queries: Tensor, k: int, hidden: Tensor | None, size: int) -> tuple[Tensor, Tensor]:
        tops = self._group_tops(queries, hidden, size)
        most = min(tops.shape[1], max(4 * k, MOST_RESCORED // size))
        taken = min(tops.shape[1], k + 16)
        lowest, groups = tops.topk(taken, dim=1)
        scores, rows = self._rescored(queries, groups, size, hidden, k)
        while taken < most:
            unsure = (scores[:, -1] < lowest[:, -1].float() + ERROR[self.device.type]).nonzero()[:, 0]
            if len(unsure) == 0:
                break
            taken = min(most, 4 * taken)
            again, groups = tops[unsure].topk(taken, dim=1)
            lowest = lowest[:, -1:].index_put((unsure,), again[:, -1:])
            better = self._rescored(queries[unsure], groups, size, hidden, k)
            scores[unsure], rows[unsure] = better
        return scores, rows

    def _group_tops(self, queries: Tensor, hidden: Tensor | None, size: int) -> Tensor:
        """The largest score of every group of `size` rows, (Q, G). A group does not reach over the end of a block."""
        height = AT_ONCE[self.device.type] // len(queries)
        if self.device.type == "cpu":
            height = min(height, GATHERED["cpu"] // queries.shape[1])  # half precision is widened a tile at a time
        height = max(size, height // size * size)
        parts, row = [], 0
        for block in self.blocks:
            given = queries.to(block.dtype) if block.is_cuda else queries
            for tile in torch.split(block, height):
                scores = given @ (tile if block.is_cuda else tile.float()).T
                if hidden is not None:
                    scores.masked_fill_(hidden[row : row + len(tile)], -torch.inf)
                row += len(tile)
                parts.append(_group_max(scores, size))
        return torch.cat(parts, dim=1)

    def _group_rows(self, size: int) -> Tensor:
        """The first row of every group, and its end: (G, 2)."""
        spans, row = [], 0
        for block in self.blocks:
            first = torch.arange(row, row + len(block), size, device=self.device)
            row += len(block)
            spans.append(torch.stack([first, (first + size).clamp(max=row)], dim=1))
        return torch.cat(spans)

    def _rescored(
        self, queries: Tensor, groups: Tensor, size: int, hidden: Tensor | None, k: int
    ) -> tuple[Tensor, Tensor]:
        """The k best rows of the chosen groups by float32 scores; of equal scores the lower row first."""
        spans = self._group_rows(size)[groups.sort(dim=1).values]  # rows in rising order: ties keep it
        rows = spans[..., :1] + torch.arange(size, device=self.device)
        beyond = rows >= spans[..., 1:]
        rows, beyond = rows.flatten(1), beyond.flatten(1)
        scores = torch.empty(rows.shape, device=self.device)
        height = max(1, GATHERED[self.device.type] // (rows.shape[1] * queries.shape[1]))
        for top in range(0, len(queries), height):
            part = rows[top : top + height].clamp(max=len(self.live) - 1)
            near = self._gather(part.flatten()).view(*part.shape, -1)
            # products and a sum: no setting of the process can make them less than float32
            scores[top : top + height] = (near * queries[top : top + height, None]).sum(2)
        scores.masked_fill_(beyond, -torch.inf)
        if hidden is not None:
            scores.masked_fill_(hidden[rows.clamp(max=len(self.live) - 1)], -torch.inf)
        order = scores.argsort(dim=1, descending=True, stable=True)[:, :k]
        return scores.gather(1, order), rows.gather(1, order)

    def _gather(self, rows: Tensor) -> Tensor:
        """Rows by their number, float32."""
        if len(self.blocks) == 1:
            return self.blocks[0][rows].float()
        found = torch.empty(len(rows), self.blocks[0].shape[1], device=self.device)
        row = 0
        for block in self.blocks:
            here = ((rows >= row) & (rows < row + len(block))).nonzero()[:, 0]
            found[here] = block[rows[here] - row].float()
            row += len(block)
        return found


def _group_max(scores: Tensor, size: int) -> Tensor:
    if size == 1:
        return scores
    whole = scores.shape[1] // size * size
    tops = scores[:, :whole].reshape(len(scores), -1, size).amax(2)
    rest = scores[:, whole:]
    return tops if rest.shape[1] == 0 else torch.cat([tops, rest.amax(1, keepdim=True)], dim=1)


def first_best(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest of each row and their places, in no order; of equal ones the first: else copies of a picture would
    come twice, or not at all, when one page of results follows another."""
    best, places = scores.topk(k, dim=1)
    lowest = best.amin(1, keepdim=True)
    more = ((scores == lowest).sum(1) > (best == lowest).sum(1)) & (lowest[:, 0] > -torch.inf)
    for row in more.nonzero()[:, 0].tolist():
        above = (scores[row] > lowest[row]).nonzero()[:, 0]
        places[row] = torch.cat([above, (scores[row] == lowest[row]).nonzero()[: k - len(above), 0]])
    return scores.gather(1, places), places


def exact_among(vectors: VectorFile, queries: Floats, k: int, slots: Slots) -> tuple[Floats, Slots]:
    """The k best of a few slots (rising), compared one by one."""
    nothing = no_results(len(queries), k)
    if len(slots) == 0:
        return nothing
    rows = vectors.tile(int(slots[0]), int(slots[-1]) + 1)[slots - slots[0]].astype(np.float32, copy=False)
    best, places = first_best(torch.from_numpy(queries @ rows.T), min(k, len(slots)))
    return merged([(best.numpy(), slots[places.numpy()]), nothing], k)
