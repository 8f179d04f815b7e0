"""Losses of label trees beside the same by loops, and the batches on which they are compared."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from roadmap.kernels.graded import GradedRule
from roadmap.losses import GradedNDCG, HierarchicalAP
from roadmap.losses.comparison import Comparison
from roadmap.losses.graded_terms import takes_trees

from ..losses import graded_literal as loops
from ..losses import literal
from ..losses.cases import drawn, gridded
from ..losses.graded_cases import GradedCase, paths
from .interpreting import DEVICE

SOFT: dict[str, Any] = {"tau": 0.1, "rho": 10.0}
PULL: dict[str, Any] = {"pull": True, "beta": 2.0, "gamma": 0.5, "leak": 1.0}
STEPS = loops.Steps(tau=0.1, rho=10.0, pull=(2.0, 0.5, 1.0))


@dataclass(frozen=True)
class Kind:
    """A loss, and the same by loops."""

    loss: nn.Module
    grades: str = "shared"
    alpha: float = 1.0
    include_self: bool = True
    steps: loops.Steps = loops.PAPER
    gain: str = ""  # of NDCG

    def transcription(self, scores: literal.Matrix, queries: Any, items: Any, own: list[int]) -> Any:
        grades = loops.tree_grades(queries, items, own, self.include_self, self.grades, self.alpha)
        if not self.gain:
            return loops.h_ap_loss(scores, grades, self.steps)
        return loops.ndcg_loss(scores, loops.gains(grades) if self.gain == "exponential" else grades, self.steps)


KINDS = {
    "H-AP": Kind(HierarchicalAP()),
    "H-AP without self": Kind(HierarchicalAP(include_self=False), include_self=False),
    "levels": Kind(HierarchicalAP("levels", 2.0), "levels", 2.0),
    "nested": Kind(HierarchicalAP("nested", 0.5, include_self=False), "nested", 0.5, False),
    # a sigmoid that is not yet nothing a few units off: what was struck out of a row must lie far below
    "blunt": Kind(HierarchicalAP(tau=2.0, rho=1.0), steps=loops.Steps(2.0, 1.0)),
    "pull": Kind(HierarchicalAP(**SOFT, **PULL), steps=STEPS),
    "pull without self": Kind(
        HierarchicalAP("nested", include_self=False, **SOFT, **PULL), "nested", 1.0, False, STEPS
    ),
    "NDCG": Kind(GradedNDCG(), "levels", gain="exponential"),
    "linear NDCG without self": Kind(GradedNDCG("linear", include_self=False), "levels", 1.0, False, gain="linear"),
}


def wide(items: int, seed: int, depth: int = 3) -> GradedCase:
    """A batch of more rows, columns and positives than one tile, one part or one list of the interpreter has."""
    generator = torch.Generator().manual_seed(seed)
    species = torch.randint(0, 7, (items,), generator=generator)
    return GradedCase("wide", drawn(items, 21, seed), paths(*species.tolist())[:, -depth:])


# A batch that stands in its gallery, behind 31 other items.
WIDE = wide(19, 30)
IN_GALLERY = replace(wide(4, 31), name="in its gallery", gallery=torch.cat([drawn(31, 21, 32), wide(4, 31).vectors]))
IN_GALLERY = replace(IN_GALLERY, gallery_labels=torch.cat([wide(31, 33).labels, IN_GALLERY.labels]))
# Six of a class and three more of its genus: 2/6 and 1/3 are one grade, in which no item is less relevant.
ONE_GRADE = GradedCase("grades that tie", drawn(11, 5, 35), paths(*[0] * 6, *[1] * 3, 4, 4)[:, 1:])
TIED = GradedCase("ties", gridded(20, 34), paths(*[k % 7 for k in range(20)]))


def check(kind: Kind, case: GradedCase) -> None:
    """Value and gradients at both sides; float32 against float64."""
    own = case.own if case is not IN_GALLERY else list(range(31, 35))
    places = {"own": torch.tensor(own, device=DEVICE)} if case is IN_GALLERY else {}
    queries, items = (labels.tolist() for labels in case.both)
    x = case.vectors.float().to(DEVICE).requires_grad_()
    gallery = None if case.gallery is None else case.gallery.float().to(DEVICE).requires_grad_()
    labels, others = (None if some is None else some.to(DEVICE) for some in (case.labels, case.gallery_labels))
    assert labels is not None
    c = Comparison.of(x, labels, None, gallery, others, graded=True)
    assert takes_trees(c, getattr(kind.loss, "relevance"), GradedRule("h_ap"))  # noqa: B009
    value = kind.loss(x, labels, ref_emb=gallery, ref_labels=others, **places)
    value.backward()
    # the loops see the float32 vectors, widened
    rows = x.tolist()
    columns = rows if gallery is None else gallery.tolist()
    expected, ds = kind.transcription(literal.cosines(rows, columns), queries, items, own)
    dq, dg = (torch.tensor(d, dtype=torch.float64) for d in literal.gradient_of_cosines(ds, rows, columns))
    assert x.grad is not None
    sides = [(x.grad, dq + dg if gallery is None else dq)] + ([] if gallery is None else [(gallery.grad, dg)])
    assert abs(value.item() - expected) < 1e-6
    for found, truth in sides:
        assert found is not None
        assert found.dtype == torch.float32
        error, largest = float((found.cpu().double() - truth).abs().max()), float(truth.abs().max())
        assert error <= 2e-5 * largest + 1e-9, f"error {error:.1e} where the largest entry is {largest:.1e}"


def tree_batch(items: int, dims: int, genera: int, spread: float = 1.2, gallery: int = 0) -> GradedCase:
    """Overlapping clusters in clusters, shuffled; 4 species in a genus, uneven; with a gallery of its own or not."""
    generator = torch.Generator().manual_seed(items * 31 + dims)
    weight = torch.rand(4 * genera, generator=generator) ** 2
    genus, species = (torch.randn(count, dims, generator=generator) for count in (genera, 4 * genera))

    def some(count: int) -> tuple[Tensor, Tensor]:
        drawn_species = torch.multinomial(weight, count, replacement=True, generator=generator)
        centres = 0.7 * genus[drawn_species // 4] + species[drawn_species]
        x = centres + spread * torch.randn(count, dims, generator=generator)
        return x.double(), torch.stack([drawn_species // 8, drawn_species // 4, drawn_species], 1)

    x, labels = some(items)
    return GradedCase("", x, labels, *(some(gallery) if gallery else (None, None)))


PLACES = 100  # of a ranking in which a rank more or less shows in the measure


def near_ties(case: GradedCase, within: float = 1e-7) -> tuple[Tensor, Tensor]:
    """Queries, and gallery items that follow another among the first of their ranking more closely than float32 tells
    apart: it may tie the two or turn them round, however exact everything else is."""
    assert case.gallery is not None
    queries, items = (nn.functional.normalize(x.float().double()) for x in (case.vectors, case.gallery))
    scores, order = (queries @ items.T).topk(PLACES, dim=1)
    rows, places = (scores[:, :-1] - scores[:, 1:] < within).nonzero(as_tuple=True)
    return rows, order[rows, places + 1]


def apart(case: GradedCase) -> GradedCase:
    """The case without its near ties."""
    assert case.gallery is not None
    assert case.gallery_labels is not None
    kept = torch.ones(len(case.gallery), dtype=torch.bool)
    kept[near_ties(case)[1]] = False
    found = replace(case, gallery=case.gallery[kept], gallery_labels=case.gallery_labels[kept])
    return apart(found) if len(near_ties(found)[0]) else found


NEARLY_TIED = partial(tree_batch, 200, 512, 15, gallery=5000)
LARGE: dict[str, Callable[[], GradedCase]] = {
    "batch 384": lambda: tree_batch(384, 512, 24),
    "batch 1500": lambda: tree_batch(1500, 512, 100),
    "few roots": lambda: tree_batch(700, 50, 2),
    "gallery 5000": lambda: apart(NEARLY_TIED()),
    "near neighbours": lambda: tree_batch(512, 64, 10, spread=0.05),
}
