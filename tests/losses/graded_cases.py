"""Batches with paths, sets and grades that are awkward in one way each, and the comparison with the loops."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from . import literal
from .cases import drawn, gridded

Grades = Callable[["GradedCase", bool], literal.Matrix]
Transcription = Callable[[literal.Matrix, literal.Matrix], literal.ValueAndGradient]


@dataclass(frozen=True)
class GradedCase:
    """Vectors in float64 with rows of labels; a gallery or, without one, every item against the batch."""

    name: str
    vectors: Tensor
    labels: Tensor
    gallery: Tensor | None = None
    gallery_labels: Tensor | None = None

    def __repr__(self) -> str:
        return self.name

    @property
    def own(self) -> list[int]:
        return list(range(len(self.vectors))) if self.gallery is None else [-1] * len(self.vectors)

    @property
    def both(self) -> tuple[Tensor, Tensor]:
        """Labels of the queries and of the items."""
        return self.labels, self.labels if self.gallery_labels is None else self.gallery_labels

    @property
    def scores(self) -> literal.Matrix:
        return literal.cosines(self.vectors.tolist(), (self.vectors if self.gallery is None else self.gallery).tolist())


# kingdom, genus, species: numbered over the whole tree, uneven, one species alone, one genus alone
SPECIES = [(0, 0, 0), (0, 0, 1), (0, 1, 2), (0, 1, 3), (1, 2, 4), (1, 2, 5), (2, 3, 6)]


def paths(*species: int) -> Tensor:
    return torch.tensor([SPECIES[i] for i in species]).reshape(-1, 3)


def sets(*rows: str) -> Tensor:
    """Multi-hot rows of 5 labels, from strings such as "024"."""
    return torch.tensor([[str(label) in row for label in range(5)] for row in rows])


UNKNOWN = paths(0, 0, 1, 1, 2, 4, 4, 5, 6)
UNKNOWN[1, 1] = UNKNOWN[3, 0] = UNKNOWN[4, 2] = UNKNOWN[6, 2] = UNKNOWN[7, 2] = -1
UNKNOWN[8] = -1

TREES = [
    GradedCase("uneven tree", drawn(13, 3, 0), paths(0, 0, 0, 1, 2, 2, 3, 4, 4, 5, 5, 5, 6)),
    GradedCase("not sorted", drawn(9, 3, 1), paths(4, 0, 2, 1, 6, 0, 5, 2, 4)),
    GradedCase("two levels", drawn(8, 3, 2), paths(0, 0, 1, 2, 2, 3, 4, 5)[:, 1:]),
    GradedCase("one level", drawn(8, 3, 3), paths(0, 0, 1, 2, 2, 3, 2, 5)[:, 2:]),
    GradedCase("all of one kingdom", drawn(6, 3, 4), paths(0, 1, 2, 3, 0, 0)),
    GradedCase("one item", drawn(1, 3, 5), paths(0)),
    GradedCase("not known", drawn(9, 3, 6), UNKNOWN),
    GradedCase("ties and duplicates", gridded(12, 7), paths(0, 0, 1, 1, 2, 2, 3, 4, 4, 5, 0, 6)),
    GradedCase("all equal", torch.full((5, 4), 2.0, dtype=torch.float64), paths(0, 0, 1, 2, 4)),
    GradedCase("gallery", drawn(4, 3, 8), paths(0, 2, 4, 6), drawn(9, 3, 9), paths(0, 1, 1, 2, 3, 4, 5, 5, 0)),
    GradedCase(
        "gallery with ties", gridded(4, 10), paths(0, 1, 4, 5), gridded(10, 11), paths(0, 0, 1, 2, 3, 4, 5, 6, 4, 1)
    ),
    GradedCase("square gallery", drawn(4, 3, 12), paths(0, 1, 2, 4), drawn(4, 3, 13), paths(0, 1, 2, 4)),
    GradedCase("nothing in the gallery", drawn(2, 3, 14), paths(4, 6), drawn(3, 3, 15), paths(0, 1, 2)),
]
SETS = [
    GradedCase("sets", drawn(8, 3, 20), sets("0", "01", "012", "34", "3", "", "024", "01")),
    GradedCase("sets with ties", gridded(8, 21), sets("0", "01", "012", "34", "3", "4", "024", "01")),
    GradedCase(
        "sets and a gallery",
        drawn(4, 3, 22),
        sets("01", "2", "34", ""),
        drawn(6, 3, 23),
        sets("0", "01", "12", "3", "", "4"),
    ),
]


def check_graded(
    loss: nn.Module, transcription: Transcription, graded: literal.Matrix, case: GradedCase, **options: Tensor
) -> None:
    """Value and gradients, at queries and gallery, of a loss called on embeddings."""
    vectors = case.vectors.clone().requires_grad_()
    gallery = None if case.gallery is None else case.gallery.clone().requires_grad_()
    value = loss(vectors, case.labels, ref_emb=gallery, ref_labels=case.gallery_labels, **options)
    value.backward()
    queries = case.vectors.tolist()
    items = queries if case.gallery is None else case.gallery.tolist()
    expected, ds = transcription(case.scores, graded)
    dq, dg = (torch.tensor(d, dtype=torch.float64) for d in literal.gradient_of_cosines(ds, queries, items))
    near = {"rtol": 1e-9, "atol": 1e-10}
    assert value.dtype == torch.float64
    torch.testing.assert_close(value, torch.tensor(expected, dtype=torch.float64), **near)
    if gallery is None:  # each vector was both a query and an item
        torch.testing.assert_close(vectors.grad, dq + dg, **near)
    else:
        torch.testing.assert_close(vectors.grad, dq, **near)
        torch.testing.assert_close(gallery.grad, dg, **near)


def graded_table(seed: int, queries: int = 4, items: int = 9, ties: bool = False) -> tuple[Tensor, Tensor]:
    """Scores in float64, and grades 0 to 3 or left out; the first query has no positive."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.rand(queries, items, dtype=torch.float64, generator=generator) * 0.4 + 0.45
    if ties:
        scores = torch.tensor([0.5, 0.52, 0.53, 0.625, 0.75], dtype=torch.float64)[
            torch.randint(5, (queries, items), generator=generator)
        ]
    grades = torch.randint(-1, 4, (queries, items), generator=generator).double()
    grades[0] = grades[0].clamp(max=0)
    return scores, grades


def check_on_scores(
    loss: Callable[[Tensor, Tensor], Tensor], transcription: Transcription, table: tuple[Tensor, Tensor]
) -> None:
    """Value and gradient of a functional loss."""
    scores, grades = table
    leaf = scores.clone().requires_grad_()
    value = loss(leaf, grades)
    value.backward()
    expected, gradient = transcription(scores.tolist(), grades.tolist())
    assert abs(value.item() - expected) <= 1e-12, f"value {value.item()} is not {expected}"
    torch.testing.assert_close(leaf.grad, torch.tensor(gradient, dtype=torch.float64), rtol=1e-9, atol=1e-10)
