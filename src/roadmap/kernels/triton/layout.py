"""Where a rank kernel leaves what the reduction and the backward read, by name."""

from __future__ import annotations

import triton.language as tl

# Rows of the (STATISTICS, M) array that the rank kernels fill, one column per query.
AP_LOSS = tl.constexpr(0)
COUNTED = tl.constexpr(1)
POS_SUM = tl.constexpr(2)
POS_COUNT = tl.constexpr(3)
NEG_SUM = tl.constexpr(4)
NEG_COUNT = tl.constexpr(5)
POS_SHARE = tl.constexpr(6)
NEG_SHARE = tl.constexpr(7)
BOUND = tl.constexpr(8)  # of any entry of the row of score gradients
LOWEST = tl.constexpr(9)  # score of a positive
STATISTICS = 10

# Entries of the factors that the reduction leaves: what ∂AP_i and the two calibration terms are multiplied by, and the
# power of two that brings the largest score gradient near the top of float16.
AP_FACTOR = tl.constexpr(0)
POS_FACTOR = tl.constexpr(1)
NEG_FACTOR = tl.constexpr(2)
HALF_SCALE = tl.constexpr(3)
FACTORS = 4
