"""Filters in the language of Milvus.

Texts are kept as the hexadecimal digits of their UTF-8: no value can then break out of an expression, and their order
is that of the texts. A column that may miss values has a second field that says where it is known, because older
servers have no missing values.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from roadmap.search.filters import Every, Filter, Not, Some, Test


def expression(condition: Filter, fields: Mapping[str, str]) -> str:
    """A filter in Milvus's language; true and false only, whatever is missing."""
    if isinstance(condition, Not):
        return f"(not {expression(condition.part, fields)})"
    if isinstance(condition, Every | Some):
        if not condition.parts:
            return "(id >= 0)" if isinstance(condition, Every) else "(id < 0)"
        joint = " and " if isinstance(condition, Every) else " or "
        return f"({joint.join(expression(part, fields) for part in condition.parts)})"
    return _test(condition, fields[condition.column])


def _test(test: Test, field: str) -> str:
    known, missing = f"({field}_known == true)", f"({field}_known == false)"
    if test.test == "in":
        values = [_literal(value) for value in test.value if value is not None]
        # each by itself: a list of equal tests is the one form that every version takes for every kind
        among = f"({known} and ({' or '.join(f'{field} == {value}' for value in values)}))" if values else "(id < 0)"
        return f"({among} or {missing})" if None in test.value else among
    if test.value is None:
        return missing
    return f"({known} and {field} {test.test} {_literal(test.value)})"


def kept_value(value: Any) -> Any:
    """A value as Milvus keeps it."""
    return value.encode().hex() if isinstance(value, str) else value


def _literal(value: Any) -> str:
    """A value in an expression. Hexadecimal digits and numbers: nothing that could end it early."""
    if isinstance(value, bool):
        return "true" if value else "false"
    return f'"{kept_value(value)}"' if isinstance(value, str) else repr(value)
