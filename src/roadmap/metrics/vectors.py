"""Checked, L2-normalised vectors whose bits do not depend on where they stand."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from roadmap.kernels.directions import has_direction

Vectors = Tensor | ArrayLike

# Numbers normalised at a time, in float64: bounds the memory beside the result.
AT_ONCE = 1 << 18


def unit_vectors(vectors: Vectors, name: str) -> Tensor:
    """`vectors` (N, D) divided by their L2 norms: float64 stays float64, every other float becomes float32.

    Raises:
        TypeError: not floating point.
        ValueError: not (N, D), or a row that has no direction (zero, NaN, infinite); says which row.
    """
    given = _checked_vectors(vectors, name)
    return _unit_rows(given, name, torch.float64 if given.dtype == torch.float64 else torch.float32)


def unit_queries_and_gallery(queries: Vectors, gallery: Vectors, name: str = "gallery") -> tuple[Tensor, Tensor]:
    """Both as unit vectors of one type, float64 if one of them came so, else float32; checked to fit each other.

    Args:
        name: what the gallery is called in errors.
    """
    q, g = _checked_vectors(queries, "queries"), _checked_vectors(gallery, name)
    if q.shape[1] != g.shape[1]:
        raise ValueError(f"queries have {q.shape[1]} dimensions and the {name} {g.shape[1]}; they must agree")
    if q.device != g.device:
        raise ValueError(f"queries are on {q.device} and the {name} on {g.device}; move them to one device")
    dtype = torch.float64 if torch.float64 in (q.dtype, g.dtype) else torch.float32
    return _unit_rows(q, "queries", dtype), _unit_rows(g, name, dtype)


def _checked_vectors(vectors: Vectors, name: str) -> Tensor:
    given = vectors if isinstance(vectors, Tensor) else torch.as_tensor(np.asarray(vectors))
    if not given.is_floating_point():
        raise TypeError(f"{name} must be floating-point vectors, got {given.dtype}")
    if given.ndim != 2 or given.shape[0] == 0 or given.shape[1] == 0:
        raise ValueError(f"{name} must have shape (N, D) with N and D at least 1, got {tuple(given.shape)}")
    return given.detach()


def _unit_rows(given: Tensor, name: str, dtype: torch.dtype) -> Tensor:
    unit = torch.empty(given.shape, dtype=dtype, device=given.device)
    height = max(1, (AT_ONCE if given.device.type == "cpu" else 8 * AT_ONCE) // given.shape[1])
    for top in range(0, len(given), height):
        rows = given[top : top + height].to(torch.float64)
        largest = rows.abs().amax(1)
        _check_direction(largest, name, top)
        rows = rows / largest[:, None]  # squares neither overflow nor vanish
        unit[top : top + height] = rows / fixed_order_sum(rows * rows).sqrt()[:, None]
    return unit


def fixed_order_sum(terms: Tensor) -> Tensor:
    """Sum over the last dimension by halving: (n, D) -> (n,).

    `torch.sum` adds in an order that depends on the shape and on a row's place in it; here the order is that of a
    binary tree over the next power of two, so that equal rows have equal sums, whatever zeros follow them.
    """
    while (width := terms.shape[1]) > 1:
        half = 1 << (width - 1).bit_length() - 1  # the largest power of two below the width
        folded = terms[:, :half].clone()
        folded[:, : width - half] += terms[:, half:]
        terms = folded
    return terms[:, 0]


def _check_direction(largest: Tensor, name: str, top: int) -> None:
    """`largest`: the largest magnitude in each row, which is finite and not zero where the length is."""
    bad = ~has_direction(largest)
    if not bad.any():
        return
    row = int(bad.nonzero()[0])
    finite = bool(largest[row].isfinite())
    what = ("is zero" if largest[row] == 0 else "is too short") if finite else "holds NaN or infinity"
    raise ValueError(
        f"{name} row {top + row} {what}, so its cosine score is undefined "
        f"({int(bad.sum())} such rows among rows {top} to {top + len(largest) - 1}); remove or repair it"
    )
