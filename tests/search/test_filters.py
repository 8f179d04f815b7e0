"""Filters: what they mean, and the words with which others are refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given

from roadmap.search.columns import Column, mask_of
from roadmap.search.filters import DEEPEST, checked_value, filter_from, passes

from .cases import ALL, filters, table

ROWS = 40
TABLE = {"id": [f"p{i}.jpg" for i in range(ROWS)], "label": ["owl", None] * (ROWS // 2), **table(ROWS, seed=3)}


@given(filters)
def test_the_mask_is_the_literal_loop(where: dict[str, Any]) -> None:
    condition = filter_from(where, ALL)
    expected = [passes(condition, {name: TABLE[name][i] for name in ALL}) for i in range(ROWS)]
    columns = {name: Column(kind, TABLE[name][:25]) for name, kind in ALL.items()}
    for name, column in columns.items():
        column.extend(TABLE[name][25:])  # columns grow
    assert mask_of(condition, columns.__getitem__, ROWS).tolist() == expected
    assert mask_of(condition, columns.__getitem__, 25).tolist() == expected[:25]  # while a search goes on


MEANINGS: list[tuple[dict[str, Any], list[int]]] = [
    # rows: (cat, 2019), (dog, 2020), (None, None), (cat, 2021)
    ({}, [0, 1, 2, 3]),
    ({"label": "cat"}, [0, 3]),
    ({"label": "cat", "year": 2021}, [3]),
    ({"year": {">=": 2020}}, [1, 3]),
    ({"year": {">": 2019, "<": 2021}}, [1]),
    ({"year": {"<=": 2020}}, [0, 1]),
    ({"label": {"!=": "cat"}}, [1, 2]),  # a missing one is not a cat
    ({"not": {"year": {"<": 2021}}}, [2, 3]),
    ({"label": None}, [2]),
    ({"label": {"!=": None}}, [0, 1, 3]),
    ({"label": {"in": ["dog", None]}}, [1, 2]),
    ({"year": {"in": []}}, []),
    ({"or": [{"label": "dog"}, {"year": 2019}]}, [0, 1]),
    ({"and": [{"label": "cat"}, {"not": {"year": 2019}}]}, [3]),
    ({"or": []}, []),
    ({"and": []}, [0, 1, 2, 3]),
    ({"label": {">": "cat"}}, [1]),
    ({"label": {">=": "Z"}}, [0, 1, 3]),  # by code points: capitals first
]


@pytest.mark.parametrize(("where", "expected"), MEANINGS)
def test_meaning(where: dict[str, Any], expected: list[int]) -> None:
    rows = [("cat", 2019), ("dog", 2020), (None, None), ("cat", 2021)]
    condition = filter_from(where, {"label": "text", "year": "integer"})
    assert [i for i, (label, year) in enumerate(rows) if passes(condition, {"label": label, "year": year})] == expected


WRONG: list[tuple[Any, str]] = [
    ({"yaer": 2020}, "there is no column 'yaer' among id, label, kind of bird, year, size, seen, did you mean 'year'?"),
    ({"year": "2020"}, r"column 'year' holds whole numbers, got '2020' \(str\)"),
    ({"year": 2020.0}, "column 'year' holds whole numbers"),
    ({"year": True}, "column 'year' holds whole numbers"),
    ({"year": 2**63}, "column 'year': 9223372036854775808 does not fit into 64 bits"),
    ({"size": 10**400}, "column 'size': a number of 401 digits is too large"),
    ({"size": {"in": [-(10**400)]}}, "column 'size': a number of 401 digits is too large"),
    ({"size": float("nan")}, "column 'size': nan is no number; use None for a missing value"),
    ({"seen": 1}, "column 'seen' holds true or false"),
    ({"label": 3}, "column 'label' holds text"),
    ({"label": "\ud800"}, "is not valid text"),
    ({"label": "a\0b"}, "holds a NUL character"),
    ({"label": "x" * 40_000}, "a text of 40000 bytes; at most 32000 are allowed"),
    ({"year": {"=>": 2020}}, "column 'year': unknown test '=>'; one of ==, !=, <, <=, >, >=, in"),
    ({"year": {}}, "column 'year': an empty test"),
    ({"year": {"<": None}}, "'<' does not order a missing value"),
    ({"seen": {"<": True}}, "'<' does not order true and false"),
    ({"label": {"in": "owl"}}, "'in' takes a list of values, got 'owl'"),
    ({"label": {"in": ["x"] * 20_000}}, "'in' takes at most 10000 values, got 20000"),
    ({"or": {"label": "owl"}}, "'or' takes a list of filters"),
    ("label", r"a filter is a mapping such as \{'label': 'cat'\}, got 'label'"),
    ({"or": ["label"]}, "a filter is a mapping"),
    ({"or": [{"year": 1}] * 201}, "the filter has 201 tests; at most 200 are allowed"),
]


@pytest.mark.parametrize(("where", "message"), WRONG)
def test_what_cannot_be_meant_is_refused_in_words(where: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        filter_from(where, ALL)


def test_a_filter_can_be_too_deep() -> None:
    where: dict[str, Any] = {"year": 1}
    for _ in range(DEEPEST):
        where = {"not": where}
    with pytest.raises(ValueError, match=f"nested more than {DEEPEST} deep"):
        filter_from(where, ALL)


def test_there_is_one_zero() -> None:
    assert str(checked_value(-0.0, "real", "size")) == str(checked_value(0, "real", "size")) == "0.0"


def test_scalars_of_numpy_are_values() -> None:
    assert filter_from({"year": np.int64(3)}, ALL) == filter_from({"year": 3}, ALL)
