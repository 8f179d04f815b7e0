"""Checks of what the user passes, in one place, so that every loss refuses the same things in the same words.

Shapes, types and devices are checked everywhere. Values (NaN, zero vectors, overlapping masks) are checked where
looking at them is free: on the CPU, outside `torch.compile` and `torch.func`. On a GPU reading a value back would stall
the stream at every step, so there a zero or non-finite vector makes the loss NaN instead (`Comparison.loss_or_nan`),
which any training loop that looks at its loss will notice.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from roadmap.kernels.directions import has_direction
from roadmap.metrics import scores as table

Average = Literal["violating", "all"]
GRADED = ("HierarchicalAP", "HAPPIER", "GradedNDCG")  # the losses that take paths, sets and grades


def values_are_free_to_read(x: Tensor) -> bool:
    watched = torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active()
    return x.device.type == "cpu" and not watched


def check_number(name: str, value: float, *, above: float | None = None, at_least: float | None = None) -> None:
    """`value` must be a finite real number, > `above` and >= `at_least`."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} must be a number, got {type(value).__name__} {value!r}")
    if not math.isfinite(value):
        raise ValueError(f"{name} must be finite, got {value}")
    if above is not None and not value > above:
        raise ValueError(f"{name} must be > {above:g}, got {value}")
    if at_least is not None and not value >= at_least:
        raise ValueError(f"{name} must be >= {at_least:g}, got {value}")


def check_count(name: str, value: int, *, at_least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an int, got {type(value).__name__} {value!r}")
    if value < at_least:
        raise ValueError(f"{name} must be >= {at_least}, got {value}")


def check_flag(name: str, value: bool) -> None:
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, got {type(value).__name__} {value!r}")


def check_share(lam: float, parts: str) -> None:
    """The share of the second of two `parts`, such as "SupAP + lam calibration", of which the first has 1 - lam."""
    check_number("lam", lam, at_least=0)
    if lam > 1:
        raise ValueError(f"lam must be <= 1: the loss is (1 - lam) {parts}, got {lam}")


def check_thresholds(alpha: float, beta: float) -> None:
    """Eq. (7) asks positives for a score above alpha and negatives for one below beta < alpha."""
    check_number("alpha", alpha)
    check_number("beta", beta)
    if not beta < alpha:
        raise ValueError(
            f"beta must be < alpha (negatives are pushed below beta, positives above alpha), "
            f"got alpha={alpha}, beta={beta}"
        )
    if not (beta >= -1 and alpha <= 1):
        raise ValueError(f"alpha and beta are cosine scores in [-1, 1], got alpha={alpha}, beta={beta}")


def check_average(average: str) -> None:
    if average not in ("violating", "all"):
        raise ValueError(f"average must be 'violating' or 'all', got {average!r}")


def check_embeddings(name: str, x: Tensor) -> None:
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(x).__name__}")
    if x.ndim != 2:
        raise ValueError(f"{name} must have shape (items, dimensions), got {tuple(x.shape)}")
    if not x.is_floating_point():
        raise TypeError(f"{name} must be floating point (float16, bfloat16, float32 or float64), got {x.dtype}")
    if x.shape[1] == 0:
        raise ValueError(f"{name} has no dimensions: its shape is {tuple(x.shape)}")


def check_labels(name: str, labels: Tensor, of: str, x: Tensor, graded: bool = False) -> None:
    """One integer per row of `x`; for a loss of graded relevance also a path in a tree (integers) or a set (bool)."""
    if not isinstance(labels, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor of integers, got {type(labels).__name__}")
    table = labels.ndim == 2 and graded
    if labels.ndim != 1 and not table:
        raise ValueError(_dimensions_wanted(name, labels, of, graded))
    if labels.is_floating_point() or labels.is_complex() or (labels.dtype == torch.bool and not table):
        also = f", or bool for sets of labels: {name}.bool()" if table else ""
        raise TypeError(f"{name} must hold integers (int64), got {labels.dtype}; use {name}.long(){also}")
    if table and labels.shape[1] == 0:
        raise ValueError(f"{name} has no columns: its shape is {tuple(labels.shape)}; each is a level of the tree")
    if labels.shape[0] != x.shape[0]:
        raise ValueError(f"{name} has {labels.shape[0]} entries but {of} has {x.shape[0]} rows")
    if labels.device != x.device:
        raise ValueError(f"{name} is on {labels.device} but {of} is on {x.device}; move one with .to(...)")


def plain(labels: Tensor) -> Tensor:
    """Labels as int64, whose comparisons with any number are exact; sets of labels as they are."""
    return labels if labels.dtype == torch.bool else labels.long()


def outside_classes(classes: Tensor, count: int, least: int = 0) -> Tensor:
    """Which of them are none of [least, count), (M,) bool. Where looking is free such a one is refused."""
    outside = (classes < least) | (classes >= count)
    if values_are_free_to_read(classes) and bool(outside.any()):
        raise ValueError(
            f"labels must lie in [0, {count}), the classes this loss has weights for, got "
            f"{int(classes[outside][0])}; number the training classes from 0 and pass num_classes"
        )
    return outside


def _dimensions_wanted(name: str, labels: Tensor, of: str, graded: bool) -> str:
    came = f"got shape {tuple(labels.shape)}"
    if graded:
        return (
            f"{name} must be 1-D, one integer per row of {of}, or 2-D: integers for paths in a tree, coarse to fine; "
            f"bool for sets of labels; {came}"
        )
    said = (
        f"{name} must be 1-D, one integer per row of {of}, {came}; "
        "use labels.flatten() if it is a column, labels.argmax(1) if it is one-hot"
    )
    if labels.ndim != 2 or name == "own":
        return said
    return f"{said}. Paths in a tree and sets of labels are for losses of graded relevance: {', '.join(GRADED)}"


def label_kind(labels: Tensor) -> str:
    """What labels are, in words that are equal where the kinds are."""
    if labels.ndim == 1:
        return "plain labels"
    columns = labels.shape[1]
    return f"sets of {columns} labels" if labels.dtype == torch.bool else f"paths of {columns} levels"


def check_grades(grades: Tensor, rows: int, columns: int, device: torch.device) -> None:
    """Relevance given pair by pair: above 0 for positives, 0 for negatives, below 0 for who is in no ranking."""
    if not isinstance(grades, Tensor) or grades.is_complex():
        came = grades.dtype if isinstance(grades, Tensor) else type(grades).__name__
        raise TypeError(f"grades must be a torch.Tensor of real numbers, got {came}")
    if grades.shape != (rows, columns):
        raise ValueError(
            f"grades must have shape (queries, gallery), here ({rows}, {columns}), got {tuple(grades.shape)}"
        )
    if grades.device != device:
        raise ValueError(
            f"grades is on {grades.device} but scores and embeddings are on {device}; move one with .to(...)"
        )
    if values_are_free_to_read(grades) and not bool(grades.isfinite().all()):
        raise ValueError("grades must be finite; an item that is in no ranking has a grade below 0")


def check_norms(name: str, x: Tensor, norms: Tensor) -> None:
    """Name the first row that has no direction. Call only where `values_are_free_to_read`."""
    usable = has_direction(norms)
    if bool(usable.all()):
        return
    row = int((~usable).nonzero()[0])
    values = x[row].detach()
    if not bool(values.isfinite().all()):
        what = "holds NaN or infinity"
    elif float(norms[row]) == 0:
        what = "is a zero vector, which has no direction and so no cosine"
    else:
        long = not math.isfinite(norms[row])
        what = "has a norm that overflows" if long else "is so short that its gradient overflows"
    bad = int((~usable).sum())
    raise ValueError(f"{name}[{row}] {what} ({bad} of {x.shape[0]} rows are unusable); look at what the model put out")


def check_scores(scores: Tensor, positives: Tensor, negatives: Tensor) -> None:
    """As the metrics check them; the values only where looking at them is free."""
    free = isinstance(scores, Tensor) and values_are_free_to_read(scores)
    table.check_scores(scores, positives, negatives, values=free)


def check_graded_scores(scores: Tensor, grades: Tensor) -> None:
    """A (queries, gallery) table of scores, with a grade for each."""
    if not isinstance(scores, Tensor) or not scores.is_floating_point():
        came = scores.dtype if isinstance(scores, Tensor) else type(scores).__name__
        raise TypeError(f"scores must be a torch.Tensor of floating point, got {came}")
    if scores.ndim != 2:
        raise ValueError(
            f"scores must have shape (queries, gallery), got {tuple(scores.shape)}; use scores[None] for one query"
        )
    check_grades(grades, scores.shape[0], scores.shape[1], scores.device)
    if values_are_free_to_read(scores) and not bool(scores.isfinite().all()):
        raise ValueError("scores must be finite")
