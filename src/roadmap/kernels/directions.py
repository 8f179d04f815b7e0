"""Vectors as directions: which have one, how long they are, and the unit vectors."""

from __future__ import annotations

import torch
from torch import Tensor


def has_direction(lengths: Tensor) -> Tensor:
    """Whether vectors of these lengths have a direction, and a gradient through it: neither zero nor NaN nor infinite,
    nor so short that 1 / length is infinite."""
    return lengths.isfinite() & lengths.reciprocal().isfinite()


def directions(x: Tensor) -> tuple[Tensor, Tensor]:
    """Unit vectors (N, D) and lengths (N,) of `x`, float32 or float64. No gradient.

    Squares of a vector near 1e-22 vanish in float32, and those near 1e22 overflow: each vector is first brought near 1
    by a power of two, which changes no bit of an ordinary one.
    """
    x = x.detach()
    scale = _scale(x)
    near = x * scale
    norms = torch.linalg.vector_norm(near, dim=1, keepdim=True)
    return near / norms, (norms / scale)[:, 0]


def _scale(x: Tensor) -> Tensor:
    """(N, 1): the power of two that brings the largest component of each vector near 1."""
    _, exponent = torch.frexp(x.abs().amax(1, keepdim=True))
    most = 126 if x.dtype == torch.float32 else 1022
    return torch.ldexp(torch.ones_like(x[:, :1]), -exponent.clamp(-most, most))
