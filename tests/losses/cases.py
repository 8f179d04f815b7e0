"""Batches that are awkward in one way each, and the comparison of a loss with its literal transcription on them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from . import literal

Literal = Callable[[literal.Matrix, literal.Mask, literal.Mask], literal.ValueAndGradient]


@dataclass(frozen=True)
class Case:
    """Vectors in float64 with their labels; a gallery or, without one, every item against the batch."""

    name: str
    vectors: Tensor
    labels: list[int]
    gallery: Tensor | None = None
    gallery_labels: list[int] | None = None

    def __repr__(self) -> str:
        return self.name


def drawn(items: int, dimensions: int, seed: int) -> Tensor:
    """Vectors of different lengths, near enough to each other that all branches of H- are met."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(items, dimensions, dtype=torch.float64, generator=generator)
    return (x + 1.5) * torch.rand(items, 1, dtype=torch.float64, generator=generator).add(0.5)


def gridded(items: int, seed: int) -> Tensor:
    """Unit vectors whose cosines are exactly 0, +-1/2 or +-1 in any precision and any order of summation.

    The 24 are +-e_d and (+-1/2, +-1/2, +-1/2, +-1/2): ties everywhere, duplicates and opposites among more than 24.
    """
    generator = torch.Generator().manual_seed(seed)
    corners = torch.cartesian_prod(*[torch.tensor([-0.5, 0.5], dtype=torch.float64)] * 4)
    axes = torch.eye(4, dtype=torch.float64)
    return torch.cat([corners, axes, -axes])[torch.randint(24, (items,), generator=generator)]


HUGE = [2**62 + 1, 2**62, -(2**62), -(2**62) - 1]  # equal to one another as float64

CASES = [
    Case("even classes", drawn(12, 3, 0), [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3]),
    Case("uneven classes and a singleton", drawn(11, 3, 1), [5, 2, 2, 9, 2, 5, 2, 2, 9, 2, 7]),
    Case("all singletons", drawn(6, 3, 2), [3, 1, 4, 15, 9, 26]),
    Case("one class only", drawn(6, 3, 3), [7] * 6),
    Case("one item", drawn(1, 3, 4), [0]),
    Case("huge and negative labels", drawn(8, 3, 5), [HUGE[i] for i in (0, 1, 2, 3, 3, 1, 0, 2)]),
    Case("ties and duplicates", gridded(14, 6), [0, 1, 2, 0, 1, 2, 0, 1, 0, 1, 0, 0, 1, 2]),
    Case("all equal", torch.full((4, 4), 2.0, dtype=torch.float64), [0, 1, 0, 1]),
    Case("gallery", drawn(5, 3, 8), [0, 1, 2, 1, 0], drawn(9, 3, 9), [1, 0, 0, 1, 2, 2, 0, 1, 1]),
    Case("square gallery", drawn(6, 3, 10), [0, 0, 1, 1, 2, 2], drawn(6, 3, 11), [0, 0, 1, 1, 2, 2]),
    Case("labels absent from the gallery", drawn(4, 3, 12), [0, 8, 1, -9], drawn(7, 3, 13), [1, 0, 0, 1, 2, 2, 0]),
    Case("no label in the gallery", drawn(3, 3, 14), [0, 1, 2], drawn(4, 3, 15), [3, 4, 5, 6]),
    Case("gallery of one class", drawn(3, 3, 16), [0, 1, 0], drawn(4, 3, 17), [0, 0, 0, 0]),
    Case("gallery with ties", gridded(5, 18), [0, 1, 2, 1, 0], gridded(11, 19), [1, 0, 0, 1, 2, 2, 0, 1, 1, 2, 0]),
    Case("one query, one item", drawn(1, 3, 20), [0], drawn(1, 3, 21), [0]),
]


def check_agrees(loss: nn.Module, transcription: Literal, case: Case, include_self: bool, atol: float = 1e-11) -> None:
    """Value and gradients, with respect to queries and gallery, of a loss called on embeddings."""
    vectors = case.vectors.clone().requires_grad_()
    labels = torch.tensor(case.labels)
    gallery = None if case.gallery is None else case.gallery.clone().requires_grad_()
    gallery_labels = None if case.gallery_labels is None else torch.tensor(case.gallery_labels)
    value = loss(vectors, labels, ref_emb=gallery, ref_labels=gallery_labels)
    value.backward()

    P, N = literal.masks(case.labels, case.gallery_labels, include_self)
    queries = case.vectors.tolist()
    items = queries if case.gallery is None else case.gallery.tolist()
    expected, ds = transcription(literal.cosines(queries, items), P, N)
    dq, dg = (torch.tensor(d, dtype=torch.float64) for d in literal.gradient_of_cosines(ds, queries, items))
    assert value.dtype == torch.float64
    assert value.shape == ()
    assert abs(value.item() - expected) <= atol, f"value {value.item()} is not {expected}"
    assert vectors.grad is not None
    if gallery is None:  # each vector was both a query and an item
        torch.testing.assert_close(vectors.grad, dq + dg, rtol=1e-8, atol=100 * atol)
    else:
        torch.testing.assert_close(vectors.grad, dq, rtol=1e-8, atol=100 * atol)
        torch.testing.assert_close(gallery.grad, dg, rtol=1e-8, atol=100 * atol)


def score_table(seed: int, queries: int = 4, items: int = 9, ties: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """Scores in float64 and masks for the functional calls; some items are in neither mask, one query has no P."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.rand(queries, items, dtype=torch.float64, generator=generator) * 0.4 + 0.45
    if ties:
        scores = torch.tensor([0.5, 0.52, 0.53, 0.625, 0.75], dtype=torch.float64)[
            torch.randint(5, (queries, items), generator=generator)
        ]
    kind = torch.randint(3, (queries, items), generator=generator)
    kind[0] = kind[0].clamp(min=1)
    return scores, kind == 0, kind == 1


def check_agrees_on_scores(
    loss: Callable[[Tensor, Tensor, Tensor], Tensor],
    transcription: Literal,
    table: tuple[Tensor, Tensor, Tensor],
    atol: float = 1e-12,
) -> None:
    """Value and gradient of a functional loss."""
    scores, positives, negatives = table
    leaf = scores.clone().requires_grad_()
    value = loss(leaf, positives, negatives)
    value.backward()
    expected, gradient = transcription(scores.tolist(), positives.tolist(), negatives.tolist())
    assert abs(value.item() - expected) <= atol, f"value {value.item()} is not {expected}"
    torch.testing.assert_close(leaf.grad, torch.tensor(gradient, dtype=torch.float64), rtol=1e-9, atol=100 * atol)


def differences(call: Callable[[literal.Matrix], float], at: literal.Matrix, step: float = 1e-6) -> literal.Matrix:
    """The gradient of a function of a matrix, by central differences."""
    gradient = literal.zeros(at)
    for i, row in enumerate(at):
        for d in range(len(row)):
            before = row[d]
            row[d] = before + step
            above = call(at)
            row[d] = before - step
            gradient[i][d] = (above - call(at)) / (2 * step)
            row[d] = before
    return gradient
