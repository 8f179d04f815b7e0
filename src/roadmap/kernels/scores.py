"""Cosine scores by plain torch, on any device: equal vectors get equal scores, wherever they stand.

BLAS rounds the last columns of a product differently from the others, so that two copies of one picture would get
unequal scores and no longer tie. Copies are few and cheap to find (a hash of their bits, then a comparison), and take
the column of the first of them. The product itself stays an ordinary one.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from roadmap.kernels.directions import directions
from roadmap.kernels.precision import at_least_float32

HASHED_AT_ONCE = 1 << 20  # numbers: bounds the memory beside the vectors


@dataclass(frozen=True)
class Units:
    """Unit vectors (N, D), the lengths (N,) they had, and which are copies of an earlier one."""

    vectors: Tensor
    lengths: Tensor
    copies: Tensor
    originals: Tensor


def units_of(queries: Tensor, gallery: Tensor | None, find_copies: bool = True) -> tuple[Units, Units]:
    """Both sides of a comparison, in the wider of their types and at least float32. No gallery: the queries again.

    Copies are looked for in the gallery alone, and only where scores are to be computed.
    """
    wide = at_least_float32(queries)
    if gallery is None:
        both = _units(wide, find_copies)
        return both, both
    other = at_least_float32(gallery)
    wider = torch.promote_types(wide.dtype, other.dtype)
    return _units(wide.to(wider), False), _units(other.to(wider), find_copies)


def score_rows(queries: Tensor, gallery: Units, out: Tensor | None = None) -> Tensor:
    """s_ij = q_i · g_j of some unit vectors with a whole gallery."""
    scores = torch.mm(queries, gallery.vectors.T, out=out)
    if len(gallery.copies):
        scores[:, gallery.copies] = scores[:, gallery.originals]
    return scores


def embedding_gradient(grad: Tensor, units: Units, like: Tensor) -> Tensor:
    """∂L/∂x = (g - (g·u) u) / |x| for x = |x| u, in the type of the embeddings `like`."""
    along = (grad * units.vectors).sum(1, keepdim=True)
    return ((grad - along * units.vectors) / units.lengths[:, None]).to(like.dtype)


def _units(x: Tensor, find_copies: bool) -> Units:
    vectors, lengths = directions(x)
    if find_copies:
        return Units(vectors, lengths, *_copies(vectors))
    none = torch.empty(0, dtype=torch.int64, device=x.device)
    return Units(vectors, lengths, none, none)


def _copies(vectors: Tensor) -> tuple[Tensor, Tensor]:
    """Which rows equal an earlier row, and the first such row of each."""
    # -0.0 becomes 0.0: they are equal and must hash alike. Bits are read row by row, also of what came transposed.
    vectors = (vectors + 0.0).contiguous()
    copies, originals = _repeats(_hashes(vectors))
    if torch.equal(vectors[copies], vectors[originals]):
        return copies, originals
    return _repeats(torch.unique(vectors, dim=0, return_inverse=True)[1])  # two vectors met in one hash


def _repeats(keys: Tensor) -> tuple[Tensor, Tensor]:
    """Where a key occurs again, and where it first occurred."""
    order = torch.sort(keys, stable=True)
    fresh = torch.ones_like(keys, dtype=torch.bool)
    fresh[1:] = order.values[1:] != order.values[:-1]
    # in the sorted order, where the run of equal keys begins that each lies in
    begins = torch.where(fresh, torch.arange(len(keys), device=keys.device), 0).cummax(0).values
    return order.indices[~fresh], order.indices[begins[~fresh]]


def _hashes(vectors: Tensor) -> Tensor:
    """(N,) int32, equal for equal rows: sums that wrap around, in which no order of adding matters."""
    bits = vectors.view(torch.int32)
    weights = _weights(bits.shape[1], vectors.device)
    hashes = torch.empty(len(bits), dtype=torch.int32, device=vectors.device)
    height = max(1, HASHED_AT_ONCE // bits.shape[1])
    for top in range(0, len(bits), height):
        hashes[top : top + height] = (bits[top : top + height] * weights).sum(1, dtype=torch.int32)
    return hashes


@lru_cache(maxsize=16)
def _weights(numbers: int, device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(numbers)
    odd = torch.randint(-(2**30), 2**30, (numbers,), generator=generator) * 2 + 1
    return odd.to(device=device, dtype=torch.int32)
