"""Better answers from the same vectors: query expansion, database augmentation, whitening, re-ranking.

Pure functions of vectors, for evaluation and for search alike. All of them take vectors of any length and give unit
vectors or cosine-like scores, higher is nearer; float64 stays float64, everything else becomes float32.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import normalize

from roadmap.atomic import NPZ_DAMAGE, whole_file
from roadmap.metrics.vectors import unit_vectors

# Scores held at a time.
AT_ONCE = 1 << 25
OWN = "own"  # a whitening fitted to what is searched


def expanded_queries(
    queries: Tensor, gallery: Tensor, k: int = 10, alpha: float = 3.0, own: Tensor | None = None
) -> Tensor:
    """Alpha query expansion (Radenovic et al. 2018): q + sum over its k nearest g of max(s, 0)^alpha g, unit length.

    Args:
        own: (Q,) where each query stands in the gallery, -1 for nowhere: it is not one of its own neighbours. None:
            such a query finds itself first, which only lengthens its own part of the sum.
    """
    queries, gallery = unit_vectors(queries, "queries"), unit_vectors(gallery, "gallery")
    _check_count(k, len(gallery) - (own is not None))
    scores, near = _nearest(queries, gallery, k, own)
    return normalize(queries + _weighted_sum(scores, near, gallery, alpha), dim=1)


def augmented_gallery(gallery: Tensor, k: int = 10, alpha: float = 3.0) -> Tensor:
    """Database-side augmentation (Arandjelovic and Zisserman 2012): each vector takes in its k nearest others.

    x + sum over its k nearest others y of max(s, 0)^alpha y, unit length; all sums are of the vectors as they came.
    """
    gallery = unit_vectors(gallery, "gallery")
    _check_count(k, len(gallery) - 1)
    scores, near = _nearest(gallery, gallery, k + 1)
    # a vector that is not among its own nearest has so many copies there that one more does not turn their sum
    own = near == torch.arange(len(near), device=near.device)[:, None]
    return normalize(gallery + _weighted_sum(scores.masked_fill(own, 0.0), near, gallery, alpha), dim=1)


@dataclass(frozen=True)
class Whitening:
    """PCA whitening (Jegou and Chum 2012): centred, turned to the principal axes, each brought to variance one.

    Attributes:
        mean: (D,).
        axes: (D, dim): columns are principal axes, largest variance first, divided by their standard deviation.
    """

    mean: Tensor
    axes: Tensor

    @classmethod
    def fit(cls, vectors: Tensor, dim: int | None = None) -> Whitening:
        """From unit vectors of pictures like those to be searched; `dim` keeps the first axes only.

        Axes along which the vectors hardly vary (1e-6 of the largest deviation, or by rounding alone) are noise, and
        are left out.
        """
        vectors = unit_vectors(vectors, "vectors")
        rounding = 4 * torch.finfo(vectors.dtype).eps  # by which vectors differ that are equal but for their length
        vectors = vectors.double()
        if len(vectors) < 2 or (dim is not None and not 1 <= dim <= vectors.shape[1]):
            raise ValueError(
                f"whitening needs at least 2 vectors and dim in 1..{vectors.shape[1]}, got {len(vectors)} and dim={dim}"
            )
        mean = vectors.mean(0)
        centred = vectors - mean
        variances, axes = torch.linalg.eigh(centred.T @ centred / (len(vectors) - 1))
        variances, axes = variances.flip(0), axes.flip(1)
        # an axis may point either way; its largest part points up, so that every machine finds the same
        axes = axes * axes.gather(0, axes.abs().argmax(0, keepdim=True)).sign()
        kept = int((variances > max(1e-12 * float(variances[0]), rounding**2)).sum())
        kept = kept if dim is None else min(dim, kept)
        if kept == 0:
            raise ValueError("whitening needs vectors that differ from each other; these are all equal")
        return cls(mean, axes[:, :kept] / variances[:kept].sqrt())

    def apply(self, vectors: Tensor) -> Tensor:
        """Whitened unit vectors, (N, dim)."""
        unit = unit_vectors(vectors, "vectors")
        if unit.shape[1] != len(self.mean):
            raise ValueError(f"the whitening is for vectors of {len(self.mean)} dimensions, got {unit.shape[1]}")
        turned = (unit.double() - self.mean.to(unit.device)) @ self.axes.to(unit.device)
        return normalize(turned, dim=1).to(unit.dtype)

    def save(self, path: str | Path) -> None:
        """Write a .npz file, whole or not at all."""
        with whole_file(Path(path)) as temporary, open(temporary, "wb") as file:
            np.savez(file, allow_pickle=False, mean=self.mean.cpu().numpy(), axes=self.axes.cpu().numpy())

    @classmethod
    def load(cls, path: str | Path) -> Whitening:
        try:
            with np.load(path, allow_pickle=False) as content:
                mean, axes = (torch.from_numpy(content[name]).double() for name in ("mean", "axes"))
            if mean.ndim != 1 or axes.ndim != 2 or len(axes) != len(mean):
                raise ValueError(f"mean {tuple(mean.shape)} and axes {tuple(axes.shape)} do not fit each other")
            return cls(mean, axes)
        except FileNotFoundError:
            raise
        except (*NPZ_DAMAGE, AttributeError) as error:
            raise ValueError(f"{path} is no whitening that this program wrote: {error}") from error


@dataclass(frozen=True)
class Refinement:
    """Which refinements, in the order in which they are done; nothing where nothing is asked for.

    Attributes:
        whiten: a `Whitening`, or "own": one that is fitted to what is searched; "own:64" keeps 64 dimensions.
        augment: neighbours that each vector of the gallery takes in; 0 for none.
        expand: neighbours that each query takes in; 0 for none.
        rerank: how many of the nearest are re-ranked by their k-reciprocal neighbours; 0 for none.
        alpha: the exponent of the weights in `augment` and `expand`.
    """

    whiten: Whitening | str | None = None
    augment: int = 0
    expand: int = 0
    rerank: int = 0
    alpha: float = 3.0

    def __post_init__(self) -> None:
        if isinstance(self.whiten, str) and not re.fullmatch(rf"{OWN}(:[1-9]\d*)?", self.whiten):
            raise ValueError(f"whiten must be a Whitening, {OWN!r} or {OWN + ':DIM'!r}, got {self.whiten!r}")
        for name in ("augment", "expand", "rerank"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must be 0 or more, got {getattr(self, name)}")

    def __bool__(self) -> bool:
        return bool(self.whiten or self.augment or self.expand or self.rerank)

    def vectors(self, queries: Tensor, gallery: Tensor, own: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Queries and gallery after whitening, augmentation and expansion.

        Args:
            own: (Q,) where each query stands in the gallery, -1 for nowhere; its neighbours are others.
        """
        if (whiten := self.whitening(gallery)) is not None:
            queries, gallery = whiten.apply(queries), whiten.apply(gallery)
        if self.augment:
            gallery = augmented_gallery(gallery, self.augment, self.alpha)
        if self.expand:
            queries = expanded_queries(queries, gallery, self.expand, self.alpha, own)
        return queries, gallery

    def whitening(self, gallery: Tensor) -> Whitening | None:
        """The one that was given, or one that is fitted to the gallery."""
        if not isinstance(self.whiten, str):
            return self.whiten
        size = self.whiten.partition(":")[2]
        return Whitening.fit(gallery, int(size) if size else None)

    def words(self) -> str:
        """What is done, in a line."""
        dimensions = "" if not isinstance(self.whiten, Whitening) else f" to {self.whiten.axes.shape[1]} dimensions"
        parts = (
            (self.whiten, f"vectors whitened{dimensions}"),
            (self.augment, f"every vector of the gallery augmented by its {self.augment} nearest"),
            (self.expand, f"queries expanded by their {self.expand} nearest"),
            (self.rerank, f"the first {self.rerank} re-ranked by k-reciprocal neighbours"),
        )
        return ", ".join(words for wanted, words in parts if wanted)


def reranked(
    queries: Tensor,
    gallery: Tensor,
    count: int = 100,
    k1: int = 20,
    k2: int = 6,
    lam: float = 0.3,
    own: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The `count` nearest of each query, re-ranked by k-reciprocal neighbours (Zhong et al. 2017), best first.

    Neighbours are looked for among the query and its `count` candidates only, so that no query depends on another and
    the cost does not grow with the gallery; with `count` the size of the gallery it is the paper's method for one
    query. d = 1 - cosine. N(p, k): p and its k nearest. R(p, k): those of N(p, k) that have p among theirs. R* adds
    R(q, k1/2) for q in R(p, k1) where at least 2/3 of it lies in R(p, k1). V_p = exp(-d) on R*(p), averaged over the
    k2 nearest of p, itself first. Score: 1 - (1 - lam) Jaccard distance(V) - lam d.

    Args:
        own: (Q,) where each query stands in the gallery, -1 for nowhere: it is no candidate of its own.

    Returns:
        scores (Q, count) and indices into the gallery (Q, count).
    """
    queries, gallery = unit_vectors(queries, "queries"), unit_vectors(gallery, "gallery")
    _check_count(count, len(gallery) - (own is not None))
    if k1 < 1 or k2 < 1 or not 0 <= lam <= 1:
        raise ValueError(f"k1 and k2 must be at least 1 and lam in 0..1, got k1={k1}, k2={k2}, lam={lam}")
    scores, indices = _nearest(queries, gallery, count, own)
    better = torch.empty_like(scores)
    height = max(1, AT_ONCE // (count + 1) ** 2 // 8)
    for top in range(0, len(queries), height):
        near = gallery[indices[top : top + height]]
        group = torch.cat([queries[top : top + height, None], near], dim=1)  # (B, 1 + count, D)
        better[top : top + height] = _reciprocal_scores(group @ group.transpose(1, 2), k1, k2, lam)
    order = better.argsort(dim=1, descending=True, stable=True)
    return better.gather(1, order), indices.gather(1, order)


def _reciprocal_scores(cosines: Tensor, k1: int, k2: int, lam: float) -> Tensor:
    """(B, n, n) cosines of groups whose first is the query -> (B, n - 1) scores of the others."""
    n = cosines.shape[1]
    distance = 1 - cosines
    ahead = distance.masked_fill(torch.eye(n, dtype=torch.bool, device=distance.device), -torch.inf)  # itself first
    rank = ahead.argsort(dim=2, stable=True).argsort(dim=2)
    mutual, half = _mutual(rank, k1), _mutual(rank, (k1 + 1) // 2)
    shared = mutual @ half.transpose(1, 2)  # |R(p, k1) and R(q, k1/2)|
    takes_in = mutual * (3 * shared >= 2 * half.sum(2)[:, None])
    wide = (mutual + takes_in @ half) > 0
    weights = torch.exp(-distance) * wide
    weights = (rank < k2).to(weights) @ weights / min(k2, n)
    least = torch.minimum(weights[:, :1], weights[:, 1:]).sum(2)
    most = torch.maximum(weights[:, :1], weights[:, 1:]).sum(2)
    return 1 - (1 - lam) * (1 - least / most) - lam * distance[:, 0, 1:]


def _mutual(rank: Tensor, k: int) -> Tensor:
    near = rank <= k
    return (near & near.transpose(1, 2)).to(torch.float32)


def _nearest(queries: Tensor, gallery: Tensor, k: int, own: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Scores and indices of the k nearest, best first, a block of queries at a time; without the query itself."""
    found, height = [], max(1, AT_ONCE // len(gallery))
    for top in range(0, len(queries), height):
        scores = queries[top : top + height] @ gallery.T
        if own is not None:
            mine = own[top : top + height].to(scores.device)
            rows = (mine >= 0).nonzero()[:, 0]
            scores[rows, mine[rows]] = -torch.inf
        found.append(scores.topk(k, dim=1))
    return torch.cat([scores for scores, _ in found]), torch.cat([near for _, near in found])


def _weighted_sum(scores: Tensor, near: Tensor, gallery: Tensor, alpha: float) -> Tensor:
    weights = scores.clamp(min=0) ** alpha * (scores > 0)
    total = torch.zeros(len(scores), gallery.shape[1], dtype=gallery.dtype, device=gallery.device)
    for place in range(near.shape[1]):  # a neighbour at a time: memory stays that of the queries
        total += weights[:, place, None] * gallery[near[:, place]]
    return total


def _check_count(k: int, most: int) -> None:
    if not 1 <= k <= most:
        raise ValueError(f"between 1 and {most} neighbours can be taken from this gallery, got {k}")
