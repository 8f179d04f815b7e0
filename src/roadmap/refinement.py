"""Better answers from the same vectors: query expansion, database augmentation, whitening, re-ranking.

Pure functions of vectors, for evaluation and for search alike. All of them take vectors of any length and give unit
vectors or cosine-like scores, higher is nearer; float64 stays float64, everything else becomes float32.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from zipfile import BadZipFile

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import normalize

from roadmap.atomic import whole_file
from roadmap.metrics.vectors import unit_vectors

# Scores held at a time.
AT_ONCE = 1 << 25


def expanded_queries(queries: Tensor, gallery: Tensor, k: int = 10, alpha: float = 3.0) -> Tensor:
    """Alpha query expansion (Radenovic et al. 2018): q + sum over its k nearest g of max(s, 0)^alpha g, unit length.

    A query that stands in the gallery finds itself first, which only lengthens its own part of the sum.
    """
    queries, gallery = unit_vectors(queries, "queries"), unit_vectors(gallery, "gallery")
    _check_count(k, len(gallery))
    scores, near = _nearest(queries, gallery, k)
    return normalize(queries + _weighted_sum(scores, near, gallery, alpha), dim=1)


def augmented_gallery(gallery: Tensor, k: int = 10, alpha: float = 3.0) -> Tensor:
    """Database-side augmentation (Arandjelovic and Zisserman 2012): each vector takes in its k nearest others.

    x + sum over its k nearest others y of max(s, 0)^alpha y, unit length; all sums are of the vectors as they came.
    """
    gallery = unit_vectors(gallery, "gallery")
    _check_count(k, len(gallery) - 1)
    scores, near = _nearest(gallery, gallery, k + 1)
    own = near == torch.arange(len(near), device=near.device)[:, None]
    # where so many equal vectors came before it that it is not among its own nearest, the last of them gives way
    own[:, -1] |= ~own.any(1)
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

        Axes along which the vectors hardly vary (1e-6 of the largest deviation) are noise, and are left out.
        """
        vectors = unit_vectors(vectors, "vectors").double()
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
        kept = int((variances > 1e-12 * variances[0]).sum())
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
                return cls(torch.from_numpy(content["mean"]), torch.from_numpy(content["axes"]))
        except (ValueError, KeyError, BadZipFile, AttributeError) as error:
            raise ValueError(f"{path} is no whitening that this program wrote: {error}") from error


def reranked(
    queries: Tensor, gallery: Tensor, count: int = 100, k1: int = 20, k2: int = 6, lam: float = 0.3
) -> tuple[Tensor, Tensor]:
    """The `count` nearest of each query, re-ranked by k-reciprocal neighbours (Zhong et al. 2017), best first.

    Neighbours are looked for among the query and its `count` candidates only, so that no query depends on another and
    the cost does not grow with the gallery; with `count` the size of the gallery it is the paper's method for one
    query. d = 1 - cosine. N(p, k): p and its k nearest. R(p, k): those of N(p, k) that have p among theirs. R* adds
    R(q, k1/2) for q in R(p, k1) where at least 2/3 of it lies in R(p, k1). V_p = exp(-d) on R*(p), averaged over the
    k2 nearest of p, itself first. Score: 1 - (1 - lam) Jaccard distance(V) - lam d.

    Returns:
        scores (Q, count) and indices into the gallery (Q, count).
    """
    queries, gallery = unit_vectors(queries, "queries"), unit_vectors(gallery, "gallery")
    _check_count(count, len(gallery))
    if k1 < 1 or k2 < 1 or not 0 <= lam <= 1:
        raise ValueError(f"k1 and k2 must be at least 1 and lam in 0..1, got k1={k1}, k2={k2}, lam={lam}")
    scores, indices = _nearest(queries, gallery, count)
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


def _nearest(queries: Tensor, gallery: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Scores and indices of the k nearest, best first, a block of queries at a time."""
    blocks = [(block @ gallery.T).topk(k, dim=1) for block in torch.split(queries, max(1, AT_ONCE // len(gallery)))]
    return torch.cat([scores for scores, _ in blocks]), torch.cat([near for _, near in blocks])


def _weighted_sum(scores: Tensor, near: Tensor, gallery: Tensor, alpha: float) -> Tensor:
    weights = scores.clamp(min=0) ** alpha * (scores > 0)
    total = torch.zeros(len(scores), gallery.shape[1], dtype=gallery.dtype, device=gallery.device)
    for place in range(near.shape[1]):  # a neighbour at a time: memory stays that of the queries
        total += weights[:, place, None] * gallery[near[:, place]]
    return total


def _check_count(k: int, most: int) -> None:
    if not 1 <= k <= most:
        raise ValueError(f"between 1 and {most} neighbours can be taken from this gallery, got {k}")
