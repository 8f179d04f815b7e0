"""Reading published pickles without running what they say.

A pickle is a program for a small machine. The ground truth of the revisited landmarks and the lists of SfM-120k are
published as pickles that hold only lists, dicts, strings, numbers and numpy arrays. The machine of this package knows
those and nothing else: it imports no name, calls no function that the file names, and makes an array only from a kind
of number, a shape and as many bytes as the two need. What could grow without end is limited.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from roadmap.plain_pickle.arrays import MAX_BYTES, Hollow, RefusedError
from roadmap.plain_pickle.machine import PLAIN, Machine

MAX_DEPTH = 64  # lists in lists; published files have 4
MAX_EXPANDED = 1 << 29  # bytes that the value would take if nothing in it were shared

__all__ = ["plain_content"]


def plain_content(path: str | Path) -> Any:
    """The lists, dicts, strings, numbers and numpy arrays of a pickle.

    Raises:
        ValueError: naming the file, when it holds anything else, is damaged, nested too deeply, cyclic or too large.
    """
    with open(path, "rb") as file:
        raw = file.read(MAX_BYTES + 1)
    try:
        if len(raw) > MAX_BYTES:
            raise RefusedError(f"it has more than the {MAX_BYTES:,} bytes allowed")
        value = Machine().run(raw)
        _check(value)
    except (ValueError, LookupError, TypeError, OverflowError) as error:
        raise ValueError(f"{path} is not a plain pickle: {error}") from error
    return value


def _check(value: Any) -> None:
    """Refuses cycles, depth, and a value that is small in the file and vast to whoever walks through it.

    Parts may be shared, and shared parts may hold shared parts: each is looked at once, whatever its weight.
    """
    measured: dict[int, tuple[int, int]] = {}  # of a finished container: its weight in bytes, its depth
    unfinished: set[int] = set()
    todo: list[tuple[Any, bool]] = [(value, False)]
    while todo:
        part, entered = todo.pop()
        if (inner := _inner(part)) is None or id(part) in measured:
            continue
        if entered:
            sizes = [measured[id(x)] if _inner(x) is not None else (_weight(x), 0) for x in inner]
            weight, depth = 8 + sum(size for size, _ in sizes), 1 + max((d for _, d in sizes), default=0)
            if depth > MAX_DEPTH:
                raise RefusedError(f"refused: nested more than {MAX_DEPTH} deep")
            if weight > MAX_EXPANDED:
                raise RefusedError(f"refused: it stands for more than {MAX_EXPANDED:,} bytes")
            measured[id(part)] = weight, depth
            unfinished.discard(id(part))
        elif id(part) in unfinished:
            raise RefusedError("refused: a list or dict that holds itself")
        else:
            unfinished.add(id(part))
            todo.append((part, True))
            todo += [(x, False) for x in inner]
    if _inner(value) is None:
        _weight(value)


def _inner(value: Any) -> Iterable[Any] | None:
    """The parts of a container; None of what is none. The keys of dicts are strings."""
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, (list, tuple)) else None


def _weight(value: Any) -> int:
    if isinstance(value, (str, bytes)):
        return 8 + len(value)
    if isinstance(value, (np.ndarray, np.generic)):
        return 8 + value.nbytes
    if value is None or isinstance(value, (int, float)):
        return 8
    if isinstance(value, Hollow):
        raise RefusedError("refused an array that is never filled")
    raise RefusedError(f"refused a {type(value).__name__}; {PLAIN}")
