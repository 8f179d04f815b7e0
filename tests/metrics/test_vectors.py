"""Unit vectors: correctly rounded, whatever the scale and the place of a row."""

from __future__ import annotations

import math

import pytest
import torch

from roadmap.kernels.directions import directions, has_direction
from roadmap.metrics.vectors import fixed_order_sum, unit_vectors


@pytest.mark.parametrize("scale", [1.0, 1e-30, 3e30])
def test_float32_rows_are_the_rounded_float64_quotients(scale: float) -> None:
    vectors = torch.randn(300, 37) * scale
    norms = torch.tensor([math.sqrt(math.fsum(x * x for x in row)) for row in vectors.tolist()], dtype=torch.float64)
    assert torch.equal(unit_vectors(vectors, "x"), (vectors.double() / norms[:, None]).float())


@pytest.mark.parametrize("scale", [1e-300, 1e300])
def test_float64_rows_neither_overflow_nor_vanish(scale: float) -> None:
    unit = unit_vectors(torch.tensor([[3.0, 4.0]], dtype=torch.float64) * scale, "x")
    torch.testing.assert_close(unit, torch.tensor([[0.6, 0.8]], dtype=torch.float64))


def test_sums_do_not_see_trailing_zeros_or_neighbours() -> None:
    terms = torch.randn(50, 13, dtype=torch.float64)
    wide = torch.cat([terms, torch.zeros(50, 30, dtype=torch.float64)], dim=1)
    assert torch.equal(fixed_order_sum(terms), fixed_order_sum(wide))
    assert torch.equal(fixed_order_sum(terms)[7:9], fixed_order_sum(terms[7:9]))
    torch.testing.assert_close(fixed_order_sum(terms), terms.sum(1))


def test_a_bad_row_is_named_where_it_stands() -> None:
    vectors = torch.ones(9, 4)
    vectors[6, 2] = torch.nan
    with pytest.raises(ValueError, match="x row 6 holds NaN or infinity, so its cosine score is undefined"):
        unit_vectors(vectors, "x")


@pytest.mark.parametrize(
    ("value", "what"),
    [(0.0, "is zero"), (5e-324, "is too short"), (torch.inf, "holds NaN or infinity"), (torch.nan, "holds NaN or inf")],
)
def test_rows_without_a_direction_are_those_of_the_losses(value: float, what: str) -> None:
    vectors = torch.full((2, 3), value, dtype=torch.float64)
    with pytest.raises(ValueError, match=f"x row 0 {what}.*2 such rows among rows 0 to 1"):
        unit_vectors(vectors, "x")
    assert not has_direction(directions(vectors)[1]).any()
