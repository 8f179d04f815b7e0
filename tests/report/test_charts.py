"""Where the ticks of an axis stand."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from roadmap.report.charts import Line, line_chart, ticks


@given(st.floats(-1e6, 1e6), st.floats(1e-3, 1e6), st.booleans())
def test_ticks_are_round_few_and_inside(low: float, length: float, whole: bool) -> None:
    found = ticks(low, low + length, whole=whole)
    assert len(found) <= 7
    assert all(low - 1e-6 * length <= value <= low + length * (1 + 1e-6) for value in found)
    if whole:
        assert all(float(value).is_integer() for value in found)


@pytest.mark.parametrize(("low", "high", "shown"), [(1, 12, [5, 10]), (1, 3, [1, 2, 3]), (0, 60, [0, 20, 40, 60])])
def test_what_is_counted_has_no_halves(low: int, high: int, shown: list[int]) -> None:
    assert ticks(low, high, whole=True) == shown
    drawn = line_chart([Line("a", [low, high], [0.1, 0.2])], "epoch", "loss")
    assert all(f">{value}</text>" in drawn for value in shown)


def test_what_is_measured_may_have_halves() -> None:
    assert ticks(1, 12) == [2.5, 5, 7.5, 10]
