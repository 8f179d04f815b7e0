"""Labels of queries and gallery: classes as integers, as they are or strings numbered together; and sets of labels."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

Labels = Tensor | ArrayLike


def class_numbers(
    query_labels: Labels, queries: int, gallery_labels: Labels | None, gallery: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Labels of both as int64 on `device`, equal where the labels are; without a gallery the same tensor twice.

    Raises:
        TypeError: floats (large ids would merge), a mixture of strings and integers, or anything else.
        ValueError: not one label for each vector.
    """
    q = _labels(query_labels, queries, "query_labels")
    if gallery_labels is None:
        numbers = torch.from_numpy(np.unique(q, return_inverse=True)[1]) if isinstance(q, np.ndarray) else q
        alone = numbers.to(device)
        return alone, alone
    g = _labels(gallery_labels, gallery, "gallery_labels")
    if isinstance(q, np.ndarray) and isinstance(g, np.ndarray):
        numbers = torch.from_numpy(np.unique(np.concatenate([q, g]), return_inverse=True)[1])
        q, g = numbers[: len(q)], numbers[len(q) :]
    if isinstance(q, np.ndarray) or isinstance(g, np.ndarray):
        kinds = ["strings" if isinstance(some, np.ndarray) else "integers" for some in (q, g)]
        raise TypeError(
            f"query_labels are {kinds[0]} and gallery_labels are {kinds[1]}, which never match; give both as one kind"
        )
    return q.to(device), g.to(device)


def _labels(given: Labels, count: int, name: str) -> Tensor | NDArray[np.str_]:
    """One label for each vector: integers as a tensor, strings as an array."""
    found = given.detach() if isinstance(given, Tensor) else np.asarray(given)
    if isinstance(found, np.ndarray) and found.dtype.kind in "biuf":
        found = torch.as_tensor(found)
    if isinstance(found, Tensor) and (found.is_floating_point() or found.is_complex()):
        raise TypeError(f"{name} must be integers or strings, got {found.dtype}: large ids would merge in floats")
    if tuple(found.shape) != (count,):
        raise ValueError(f"{name} must have shape ({count},), one for each vector, got {tuple(found.shape)}")
    return as_int64(found, name) if isinstance(found, Tensor) else _strings(given, found, name)


def as_int64(numbers: Tensor, name: str) -> Tensor:
    """The same whole numbers; those of uint64 beyond would become negative, and so other labels."""
    found = numbers.to(torch.int64)
    if numbers.dtype == torch.uint64 and bool((found < 0).any()):
        raise ValueError(f"{name} must be below 2^63, got {int(found.min()) + 2**64}; number them anew")
    return found


def _strings(given: Labels, found: NDArray[np.generic], name: str) -> NDArray[np.str_]:
    # As they were given: numpy makes "1" of a 1 among strings, and so one class of two.
    items = given if isinstance(given, (list, tuple)) else found.tolist()
    others = [item for item in items if not isinstance(item, str)]
    if others:
        raise TypeError(
            f"{name} must be all integers or all strings, got {type(others[0]).__name__} {others[0]!r} among them"
        )
    return found.astype(np.str_)


def are_sets(labels: Labels) -> bool:
    """Whether labels are sets of them, (N, C) bool, and not numbers or names."""
    return (labels.dtype if isinstance(labels, Tensor) else np.asarray(labels).dtype) in (torch.bool, np.bool_)


def label_sets(
    query_labels: Labels, queries: int, gallery_labels: Labels | None, gallery: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Sets of both as (M, C) and (N, C) bool on `device`; without a gallery the same tensor twice."""
    q = _sets(query_labels, queries, "query_labels")
    g = q if gallery_labels is None else _sets(gallery_labels, gallery, "gallery_labels")
    if q.shape[1] != g.shape[1]:
        raise ValueError(f"query_labels are of {q.shape[1]} labels and gallery_labels of {g.shape[1]}; they must agree")
    return q.to(device), g.to(device)


def _sets(given: Labels, count: int, name: str) -> Tensor:
    found = given.detach() if isinstance(given, Tensor) else torch.as_tensor(np.asarray(given))
    if found.ndim != 2 or len(found) != count or found.shape[1] == 0:
        raise ValueError(
            f"{name} must have shape ({count}, labels), a set for each vector, got {tuple(found.shape)} of bool"
        )
    return found
