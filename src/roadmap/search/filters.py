"""Which rows a search may find: a small language of plain values, with one meaning in every engine.

    {"label": "cat"}                                  equal
    {"year": {">=": 2020, "<": 2024}}                 several tests of a column: all of them
    {"label": {"in": ["cat", "dog"]}, "year": 2020}   several columns: all of them
    {"or": [{"label": "cat"}, {"not": {"year": 2020}}]}      also "and"
    {"year": None}                                    the value is missing

A missing value equals None and nothing else, and is neither below nor above anything. `!=` is exactly "not `==`", so
that a row without a label passes {"label": {"!=": "cat"}}. Text is ordered by code points. {} lets every row pass.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from roadmap.names import did_you_mean

KINDS = ("text", "integer", "real", "boolean")
TESTS = ("==", "!=", "<", "<=", ">", ">=", "in")
JOINTS = ("and", "or", "not")
ORDERS: dict[str, Callable[[Any, Any], bool]] = {
    "<": lambda a, b: a < b,
    "<=": lambda a, b: a <= b,
    ">": lambda a, b: a > b,
    ">=": lambda a, b: a >= b,
}
# Of what a stranger may send: deeper or longer than a person writes, shallow enough for every engine's parser.
DEEPEST, MOST_TESTS, MOST_VALUES = 16, 200, 10_000
LARGEST_INTEGER = (1 << 63) - 1
LARGEST_REAL = int(sys.float_info.max)
LONGEST_TEXT = 32_000  # bytes of UTF-8; Milvus keeps 65,535, and we keep two for each


@dataclass(frozen=True)
class Test:
    """One test of one column: `value` is a value, None, or for "in" a tuple of them. Tests are ==, in, <, <=, >, >=."""

    column: str
    kind: str
    test: str
    value: Any

    def holds(self, value: Any) -> bool:
        """Whether a row with this value (None: missing) passes: the definition that every engine is tested against."""
        if self.test == "in":
            return value in self.value
        if self.test == "==":
            return bool(value == self.value)
        return value is not None and ORDERS[self.test](value, self.value)


@dataclass(frozen=True)
class Every:
    """Every one of the parts holds; with no part, always."""

    parts: tuple[Filter, ...]


@dataclass(frozen=True)
class Some:
    """At least one of the parts holds; with no part, never."""

    parts: tuple[Filter, ...]


@dataclass(frozen=True)
class Not:
    part: Filter


Filter = Test | Every | Some | Not


def filter_from(where: Mapping[str, Any], kinds: Mapping[str, str]) -> Filter:
    """The filter that plain values describe, checked against the columns there are (name -> kind).

    Raises:
        ValueError: an unknown column or test, a value that the column cannot hold, or a filter too large; says which.
    """
    found = _filter(where, kinds, 1)
    if (count := _size(found)) > MOST_TESTS:
        raise ValueError(f"the filter has {count} tests; at most {MOST_TESTS} are allowed")
    return found


def passes(condition: Filter, row: Mapping[str, Any]) -> bool:
    """Whether one row (column -> value, None where missing) passes."""
    if isinstance(condition, Every):
        return all(passes(part, row) for part in condition.parts)
    if isinstance(condition, Some):
        return any(passes(part, row) for part in condition.parts)
    if isinstance(condition, Not):
        return not passes(condition.part, row)
    return condition.holds(row[condition.column])


def checked_value(value: Any, kind: str, column: str) -> Any:
    """`value` as its column keeps it; None stays None.

    Raises:
        ValueError: it is of another kind, or out of range; says what the column takes.
    """
    if value is None:
        return None
    if hasattr(value, "item") and not isinstance(value, str):  # numpy's and torch's scalars
        value = value.item()
    if kind == "text" and isinstance(value, str):
        return _checked_text(value, column)
    if kind == "boolean" and isinstance(value, bool):
        return value
    if kind == "integer" and isinstance(value, int) and not isinstance(value, bool):
        if abs(value) > LARGEST_INTEGER:
            raise ValueError(f"column {column!r}: {value} does not fit into 64 bits")
        return value
    if kind == "real" and isinstance(value, int | float) and not isinstance(value, bool):
        if isinstance(value, int) and abs(value) > LARGEST_REAL:
            raise ValueError(f"column {column!r}: a number of {len(str(abs(value)))} digits is too large")
        if not math.isfinite(value):
            raise ValueError(f"column {column!r}: {value} is no number; use None for a missing value")
        return float(value) + 0.0  # one zero, not two
    wanted = {"text": "text", "integer": "whole numbers", "real": "numbers", "boolean": "true or false"}[kind]
    raise ValueError(f"column {column!r} holds {wanted}, got {value!r} ({type(value).__name__})")


def _checked_text(value: str, column: str) -> str:
    try:
        size = len(value.encode())
    except UnicodeEncodeError as error:
        raise ValueError(f"column {column!r}: {value!r} is not valid text: {error.reason}") from error
    if "\0" in value:
        raise ValueError(f"column {column!r}: {value!r} holds a NUL character; remove it")
    if size > LONGEST_TEXT:
        raise ValueError(f"column {column!r}: a text of {size} bytes; at most {LONGEST_TEXT} are allowed")
    return value


def _filter(where: Any, kinds: Mapping[str, str], depth: int) -> Filter:
    if not isinstance(where, Mapping):
        raise ValueError(f"a filter is a mapping such as {{'label': 'cat'}}, got {where!r}")
    if depth > DEEPEST:
        raise ValueError(f"the filter is nested more than {DEEPEST} deep")
    parts: list[Filter] = []
    for name, value in where.items():
        if name in ("and", "or"):
            if not isinstance(value, Sequence) or isinstance(value, str):
                raise ValueError(f"{name!r} takes a list of filters, got {value!r}")
            inner = tuple(_filter(part, kinds, depth + 1) for part in value)
            parts.append(Every(inner) if name == "and" else Some(inner))
        elif name == "not":
            parts.append(Not(_filter(value, kinds, depth + 1)))
        elif name in kinds:
            parts += _tests(name, kinds[name], value)
        else:
            raise ValueError(f"there is no column {name!r} among {', '.join(kinds)}{did_you_mean(str(name), kinds)}")
    return parts[0] if len(parts) == 1 else Every(tuple(parts))


def _tests(column: str, kind: str, value: Any) -> list[Filter]:
    if not isinstance(value, Mapping):
        return [_test(column, kind, "==", value)]
    if not value:
        raise ValueError(f"column {column!r}: an empty test; one of {', '.join(TESTS)} is needed")
    return [_test(column, kind, test, wanted) for test, wanted in value.items()]


def _test(column: str, kind: str, test: str, value: Any) -> Filter:
    if test not in TESTS:
        raise ValueError(f"column {column!r}: unknown test {test!r}; one of {', '.join(TESTS)}")
    if test == "in":
        if not isinstance(value, Sequence | set | frozenset) or isinstance(value, str):
            raise ValueError(f"column {column!r}: 'in' takes a list of values, got {value!r}")
        if len(value) > MOST_VALUES:
            raise ValueError(f"column {column!r}: 'in' takes at most {MOST_VALUES} values, got {len(value)}")
        return Test(column, kind, test, tuple(checked_value(v, kind, column) for v in value))
    wanted = checked_value(value, kind, column)
    if test in ORDERS and (wanted is None or kind == "boolean"):
        what = "a missing value" if wanted is None else "true and false"
        raise ValueError(f"column {column!r}: {test!r} does not order {what}; use '==', '!=' or 'in'")
    if test == "!=":
        return Not(Test(column, kind, "==", wanted))
    return Test(column, kind, test, wanted)


def _size(condition: Filter) -> int:
    if isinstance(condition, Every | Some):
        return sum(map(_size, condition.parts))
    return _size(condition.part) if isinstance(condition, Not) else 1
