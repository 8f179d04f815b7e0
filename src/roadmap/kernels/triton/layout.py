"""Where a rank kernel leaves what the reduction and the backward read, by name."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from roadmap.kernels import rules

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

# Entries of the factors that the reduction leaves: what ∂AP_i and the two calibration terms are multiplied by, the
# power of two that brings the largest score gradient near the top of float16, and the bound of ∂AP_i it came from.
AP_FACTOR = tl.constexpr(0)
POS_FACTOR = tl.constexpr(1)
NEG_FACTOR = tl.constexpr(2)
HALF_SCALE = tl.constexpr(3)
AP_BOUND = tl.constexpr(4)
FACTORS = 5

# The terms of a loss, in the order of kernels/rules.py.
AP_SUM = tl.constexpr(rules.AP_SUM)
AP_COUNT = tl.constexpr(rules.AP_COUNT)
POS_TERM_SUM = tl.constexpr(rules.POS_SUM)
POS_TERM_COUNT = tl.constexpr(rules.POS_COUNT)
NEG_TERM_SUM = tl.constexpr(rules.NEG_SUM)
NEG_TERM_COUNT = tl.constexpr(rules.NEG_COUNT)

# How a kernel learns where the query of a row stands in the gallery.
NOWHERE = tl.constexpr(0)  # in no gallery item
AT_ROW = tl.constexpr(1)  # the gallery is the batch: at the place of its row
GIVEN = tl.constexpr(2)  # at Own[row], -1 for nowhere


@triton.jit
def own_column(Own, row, OWN: tl.constexpr):
    """Where the query of a row stands in the gallery; -1 for nowhere."""
    own = row * 0 - 1
    if OWN == AT_ROW:
        own = row
    if OWN == GIVEN:
        own = tl.load(Own + row).to(row.dtype)
    return own


def own_mode(gallery: Tensor | None, own: Tensor | None) -> int:
    """The `OWN` of a call."""
    if own is not None:
        return int(GIVEN.value)
    return int(AT_ROW.value if gallery is None else NOWHERE.value)
