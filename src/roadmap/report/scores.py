"""How the scores of positive and negative pairs are spread: exact counts in fixed bins, in tiles of bounded memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from roadmap.data.records import Floats, Ints
from roadmap.kernels.precision import full_float32
from roadmap.progress import bar

BINS = 200  # from -1 to 1: a hundredth each
ALPHA, BETA = 0.9, 0.6  # of the paper, where a loss has none of its own
THRESHOLDS = ("roadmap", "calibration")  # losses whose alpha and beta are thresholds of scores
TILE = 4 << 20  # scores that are counted at once


@dataclass(frozen=True, eq=False)
class ScoreCounts:
    """Of all pairs of a query and another item.

    Attributes:
        positives, negatives: (BINS,) pairs of one class and of two; bin b holds edges[b] <= score < edges[b + 1], and
            the last one its upper edge too.
        alpha, beta: thresholds.
        below: positive pairs with a score below alpha.
        above: negative pairs with a score above beta.
    """

    positives: Ints
    negatives: Ints
    alpha: float
    beta: float
    below: int
    above: int

    def as_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON."""
        return {name: v.tolist() if isinstance(v, np.ndarray) else v for name, v in vars(self).items()}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> ScoreCounts:
        """What `as_dict` described."""
        arrays = {name: np.asarray(values[name], dtype=np.int64) for name in ("positives", "negatives")}
        return cls(**{**values, **arrays})

    def shares(self) -> dict[str, float]:
        """Of the positive pairs below alpha, and of the negative pairs above beta: those that calibration moves."""
        pairs = {"below": int(self.positives.sum()), "above": int(self.negatives.sum())}
        return {name: getattr(self, name) / count if count else float("nan") for name, count in pairs.items()}


def edges() -> Floats:
    """(BINS + 1,) of the bins."""
    found: Floats = np.arange(-BINS // 2, BINS // 2 + 1) / (BINS // 2)
    return found


def thresholds(loss: Mapping[str, Any]) -> tuple[float, float, bool]:
    """Alpha and beta of a loss, and whether they are its own; else those of the paper."""
    own = loss.get("name") in THRESHOLDS
    return float(loss.get("alpha", ALPHA)) if own else ALPHA, float(loss.get("beta", BETA)) if own else BETA, own


def score_counts(
    queries: Tensor,
    gallery: Tensor,
    own: Tensor,
    classes: tuple[Tensor, Tensor],
    alpha: float = ALPHA,
    beta: float = BETA,
    progress: bool | None = None,
) -> ScoreCounts:
    """The counts over all pairs, but of a query with itself. No more than TILE scores are there at a time.

    Args:
        queries: (M, D) of length 1.
        gallery: (N, D) of length 1.
        own: (M,) where each query stands in the gallery, -1 for nowhere.
        classes: (M,) and (N,); equal numbers are one class.
        alpha: positives below it are counted.
        beta: negatives above it are counted.
        progress: show a bar; None: where a person watches and it takes long.
    """
    width = min(len(gallery), 1 << 14)
    height = max(1, TILE // width)
    bounds = torch.from_numpy(edges()).to(queries)
    counts = torch.zeros(2 * BINS, dtype=torch.int64, device=queries.device)
    beyond = torch.zeros(2, dtype=torch.int64, device=queries.device)
    with bar(len(queries), "scores", " queries", progress, delay=2.0, leave=False) as shown:
        for top in range(0, len(queries), height):
            rows = slice(top, top + height)
            for left in range(0, len(gallery), width):
                columns = slice(left, left + width)
                with full_float32():
                    scores = queries[rows] @ gallery[columns].T
                same = classes[0][rows, None] == classes[1][None, columns]
                others = torch.arange(left, left + scores.shape[1], device=own.device)[None] != own[rows, None]
                place = torch.bucketize(scores, bounds, right=True).sub_(1).clamp_(0, BINS - 1)
                counts += torch.bincount((place + BINS * same)[others], minlength=2 * BINS)
                wrong = torch.stack(
                    [(same & (scores < alpha) & others).sum(), (~same & (scores > beta) & others).sum()]
                )
                beyond += wrong
            shown.update(len(queries[rows]))
    negatives, positives = counts.view(2, BINS).cpu().numpy()
    return ScoreCounts(positives, negatives, alpha, beta, *beyond.tolist())


def precisions_at_ranks(neighbours: Tensor, right: Tensor, positives: Tensor) -> NDArray[np.float64]:
    """(2, K) mean precision among the first 1..K answers, and the best there could be with so many to find.

    Args:
        neighbours: (M, K) gallery places, nearest first, -1 where there are fewer.
        right: (M, K) which of them are of the query's class.
        positives: (M,) how many there are to find; queries without any are not counted.
    """
    asked = positives > 0
    places = torch.arange(1, neighbours.shape[1] + 1, dtype=torch.float64)
    found = (right & (neighbours >= 0))[asked].cumsum(1).double() / places
    possible = torch.minimum(positives[asked, None].double(), places) / places
    return torch.stack([found.mean(0), possible.mean(0)]).numpy()
