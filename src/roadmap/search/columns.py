"""Columns of metadata in memory, for filters: one pass of numpy over a column for each test."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from roadmap.search.filters import Every, Filter, Not, Test

Mask = NDArray[np.bool_]
_TYPES = {"integer": np.int64, "real": np.float64, "boolean": np.bool_}
_COMPARE: dict[str, Callable[[Any, Any], Any]] = {
    "==": np.equal,
    "<": np.less,
    "<=": np.less_equal,
    ">": np.greater,
    ">=": np.greater_equal,
}


class Column:
    """The values of one column in the order of the slots; None where missing. Grows at the end, while others read."""

    def __init__(self, kind: str, values: Iterable[Any] = ()) -> None:
        self.kind = kind
        self._codes: dict[str, int] = {}  # text: every distinct one has a number
        self._now: tuple[NDArray[Any], Mask] = (  # values, and which are known: changed in one step
            np.empty(0, np.int32 if kind == "text" else _TYPES[kind]),
            np.empty(0, np.bool_),
        )
        self.extend(list(values))

    def __len__(self) -> int:
        return len(self._now[0])

    def extend(self, values: Sequence[Any]) -> None:
        known = np.array([value is not None for value in values], np.bool_)
        if self.kind == "text":
            codes = self._codes
            found = [-1 if value is None else codes.setdefault(value, len(codes)) for value in values]
        else:
            found = [0 if value is None else value for value in values]
        held, which = self._now
        self._now = np.concatenate([held, np.array(found, held.dtype)]), np.concatenate([which, known])

    def mask(self, test: Test, count: int) -> Mask:
        """Which of the first `count` slots pass the test."""
        values, known = (part[:count] for part in self._now)
        if self.kind == "text":
            # each distinct text is tested once; code -1, a missing one, takes the verdict at the end
            verdicts = np.array([*map(test.holds, list(self._codes)), test.holds(None)], np.bool_)
            return np.asarray(verdicts[values])
        if test.test == "in":
            wanted = np.array([value for value in test.value if value is not None], values.dtype)
            found = np.isin(values, wanted) & known
            return np.asarray(found | ~known if None in test.value else found)
        if test.value is None:
            return np.asarray(~known)
        return np.asarray(_COMPARE[test.test](values, test.value) & known)


def mask_of(condition: Filter, column: Callable[[str], Column], count: int) -> Mask:
    """Which of the first `count` slots pass; `column` gives a column by its name, which may have grown beyond."""
    if isinstance(condition, Test):
        return column(condition.column).mask(condition, count)
    if isinstance(condition, Not):
        return ~mask_of(condition.part, column, count)
    joined = np.full(count, isinstance(condition, Every))
    for part in condition.parts:
        found = mask_of(part, column, count)
        joined = joined & found if isinstance(condition, Every) else joined | found
    return joined
