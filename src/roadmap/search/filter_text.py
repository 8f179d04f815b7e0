"""Filters as a person types them: label=owl, year>=2020, place!=, or a JSON object for everything else."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from roadmap.names import did_you_mean

_TEST = re.compile(r"\s*(.+?)\s*(>=|<=|!=|==|=|<|>)\s*(.*?)\s*", re.DOTALL)


def filter_of_texts(texts: Sequence[str], kinds: Mapping[str, str]) -> dict[str, Any]:
    """The filter that all of these texts make together, for `Index.search`.

    Args:
        texts: each `COLUMN=VALUE`, also with !=, <, <=, >, >=, several values by commas after = (one of them), nothing
            after = for a missing value; or a JSON object as `roadmap.search.filters` describes it.
        kinds: name -> kind of the index's columns.

    Raises:
        ValueError: a text that is neither, an unknown column, or a value that its column cannot hold; says which.
    """
    parts = [_object(text) if text.lstrip().startswith("{") else _test(text, kinds) for text in texts]
    return {} if not parts else parts[0] if len(parts) == 1 else {"and": parts}


def _object(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"the filter {text!r} is no JSON: {error}") from error
    assert isinstance(found, dict)  # it begins with a brace
    return found


def _test(text: str, kinds: Mapping[str, str]) -> dict[str, Any]:
    found = _TEST.fullmatch(text)
    if found is None:
        raise ValueError(f"a filter is COLUMN=VALUE, such as label=owl or year>=2020, or a JSON object; got {text!r}")
    column, test, value = found.groups()
    if column not in kinds:
        raise ValueError(f"there is no column {column!r} among {', '.join(kinds)}{did_you_mean(column, kinds)}")
    test = "==" if test == "=" else test
    values = [_value(part.strip(), kinds[column], column) for part in value.split(",")]
    if test in ("==", "!=") and len(values) > 1 and not _quoted(value):
        return {column: {"in": values}} if test == "==" else {"not": {column: {"in": values}}}
    return {column: {test: _value(value, kinds[column], column)}}


def _quoted(text: str) -> bool:
    return len(text) >= 2 and text[0] == text[-1] == '"'


def _value(text: str, kind: str, column: str) -> Any:
    if text == "":
        return None
    if kind == "text":
        return text[1:-1] if _quoted(text) else text
    wanted = {"integer": "a whole number", "real": "a number", "boolean": "true or false"}[kind]
    try:
        if kind == "boolean":
            return {"true": True, "false": False}[text.lower()]
        return int(text) if kind == "integer" else float(text)
    except (ValueError, KeyError):
        raise ValueError(f"column {column!r} needs {wanted}, got {text!r}") from None
