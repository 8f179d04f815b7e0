"""What the kernels compute, as plain values: how a rank is counted and how scores are calibrated.

Every argument a kernel needs beyond its tensors travels in these, checked once by the losses that build them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, cast


@dataclass(frozen=True)
class RankRule:
    """Which H⁺ and H⁻ count the ranks: "supap" (step and Eq. 4) or "smoothap" (two sigmoids).

    `start` is what Eq. (4) adds to the sigmoid from t = 0 on, `offset` where its linear part begins.
    """

    kind: Literal["supap", "smoothap"]
    tau: float
    rho: float = 0.0
    delta: float = 0.0
    start: float = 0.5
    offset: float | None = None

    @property
    def top(self) -> float:
        """Where the linear part of Eq. (4) begins: H⁻(delta), unless an offset says otherwise."""
        return 1 / (1 + math.exp(-self.delta / self.tau)) + self.start if self.offset is None else self.offset

    @property
    def flat(self) -> FlatRanks:
        """The rule as the plain arguments that an operator takes: `RankRule(*flat)` counts the same."""
        return self.kind, self.tau, self.rho, self.delta, self.start, self.top

    @property
    def negligible(self) -> float:
        """Below this t, H⁻(t) <= e⁻³⁴: a million such items move a rank by less than float32 can hold."""
        return -34 * self.tau

    @property
    def steepest(self) -> float:
        """The largest slope of H⁻, for bounds."""
        return max(0.25 / self.tau, self.rho)


@dataclass(frozen=True)
class CalibrationRule:
    """Thresholds of Eq. (7) and over what its two terms are averaged."""

    alpha: float
    beta: float
    average: Literal["violating", "all"]


@dataclass(frozen=True)
class LossRule:
    """ap_weight · (1 - mean AP) + calibration_weight · calibration; a term whose rule is None is absent."""

    ranks: RankRule | None
    calibration: CalibrationRule | None
    ap_weight: float = 1.0
    calibration_weight: float = 1.0
    include_self: bool = True

    @property
    def is_supap(self) -> bool:
        return self.ranks is not None and self.ranks.kind == "supap"

    @property
    def rank_numbers(self) -> tuple[float, float, float, float, float]:
        """1 / tau, rho · tau, delta, start and top, as the kernels take them; zeros where no ranks are counted."""
        r = self.ranks
        return (0.0, 0.0, 0.0, 0.0, 0.0) if r is None else (1 / r.tau, r.rho * r.tau, r.delta, r.start, r.top)

    @property
    def flat(self) -> FlatRule:
        """The rule as the plain arguments that an operator takes; see `rule_of`."""
        ranks, calibration = self.ranks, self.calibration
        return (
            *(("", 1.0, 0.0, 0.0, 0.0, 0.0) if ranks is None else ranks.flat),
            *(("", 0.0, 0.0) if calibration is None else (calibration.average, calibration.alpha, calibration.beta)),
            self.ap_weight,
            self.calibration_weight,
            self.include_self,
        )


FlatRanks = tuple[str, float, float, float, float, float]
RANKS_SCHEMA = "str ranks, float tau, float rho, float delta, float start, float top"
FlatRule = tuple[str, float, float, float, float, float, str, float, float, float, float, bool]
FLAT_SCHEMA = (
    f"{RANKS_SCHEMA}, str average, float alpha, float beta, "
    "float ap_weight, float calibration_weight, bool include_self"
)


def rule_of(flat: FlatRule) -> LossRule:
    kind, tau, rho, delta, start, top, average, alpha, beta, ap_weight, calibration_weight, include_self = flat
    ranks = RankRule(cast(Literal["supap", "smoothap"], kind), tau, rho, delta, start, top) if kind else None
    averaged = cast(Literal["violating", "all"], average)
    calibration = CalibrationRule(alpha, beta, averaged) if average else None
    return LossRule(ranks, calibration, ap_weight, calibration_weight, include_self)


# A rank loss is sums over pairs and queries, and how many each is a sum of: these add up over rows, however the rows
# are shared out. The terms of a loss are six numbers in this order: [0::2] are the sums, [1::2] the counts.
AP_SUM, AP_COUNT, POS_SUM, POS_COUNT, NEG_SUM, NEG_COUNT = range(6)
TERMS = 6
