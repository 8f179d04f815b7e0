"""What the kernels compute, as plain values: how a rank is counted, what is made of it, how scores are calibrated.

Every argument a kernel needs beyond its tensors travels in these, checked once by the losses that build them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

MeasureKind = Literal["ap", "ndcg", "recall"]


@dataclass(frozen=True)
class Measure:
    """What is made of the ranks r = rank⁺ + rank⁻ of the positives k of a query.

    "ap"      1/|P_i| Σ_k rank⁺ / r, Eq. (1)
    "ndcg"    Σ_k 1 / log2(1 + r), divided by what it is when the positives come first: Σ_{j ≤ |P_i|} 1 / log2(1 + j)
    "recall"  1/|P_i| Σ_k sigmoid((K - r) / T), the mean of it over the cuts K of `ks`, each with its temperature T;
              `reachable` divides by min(K, |P_i|) instead, by what K places can hold
    """

    kind: MeasureKind = "ap"
    ks: tuple[float, ...] = ()
    temperatures: tuple[float, ...] = ()
    reachable: bool = False

    @property
    def flat(self) -> FlatMeasure:
        """The measure as the plain arguments that an operator takes: `measure_of(*flat)` is the same."""
        return self.kind, [float(k) for k in self.ks], [float(t) for t in self.temperatures], self.reachable


AP = Measure()
NDCG = Measure("ndcg")
FlatMeasure = tuple[str, list[float], list[float], bool]
MEASURE_SCHEMA = "str measure, float[] ks, float[] temperatures, bool reachable"


def measure_of(kind: str, ks: Sequence[float], temperatures: Sequence[float], reachable: bool) -> Measure:
    return Measure(cast(MeasureKind, kind), tuple(ks), tuple(temperatures), reachable)


@dataclass(frozen=True)
class RankRule:
    """Which H⁺ and H⁻ count the ranks: "supap" (step and Eq. 4) or "smoothap" (two sigmoids); and what is made of them.

    `start` is what Eq. (4) adds to the sigmoid from t = 0 on, `offset` where its linear part begins.
    """

    kind: Literal["supap", "smoothap"]
    tau: float
    rho: float = 0.0
    delta: float = 0.0
    start: float = 0.5
    offset: float | None = None
    measure: Measure | None = None  # AP; torch.compile cannot follow a default that is an object

    @property
    def top(self) -> float:
        """Where the linear part of Eq. (4) begins: H⁻(delta), unless an offset says otherwise."""
        return 1 / (1 + math.exp(-self.delta / self.tau)) + self.start if self.offset is None else self.offset

    @property
    def flat(self) -> FlatRanks:
        """How it counts, as the plain arguments that an operator takes: `RankRule(*flat)` counts the same. What is made
        of the ranks is in `measure_or_ap.flat`."""
        return self.kind, self.tau, self.rho, self.delta, self.start, self.top

    @property
    def measure_or_ap(self) -> Measure:
        return AP if self.measure is None else self.measure

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
    """ap_weight · (1 - mean AP) + calibration_weight · calibration; a term whose rule is None is absent.

    AP stands for whatever the ranks' measure makes of them.
    """

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
            *(AP if ranks is None else ranks.measure_or_ap).flat,
            *(("", 0.0, 0.0) if calibration is None else (calibration.average, calibration.alpha, calibration.beta)),
            self.ap_weight,
            self.calibration_weight,
            self.include_self,
        )


FlatRanks = tuple[str, float, float, float, float, float]
RANKS_SCHEMA = "str ranks, float tau, float rho, float delta, float start, float top"
FlatRule = tuple[
    str, float, float, float, float, float, str, list[float], list[float], bool, str, float, float, float, float, bool
]
FLAT_SCHEMA = (
    f"{RANKS_SCHEMA}, {MEASURE_SCHEMA}, str average, float alpha, float beta, "
    "float ap_weight, float calibration_weight, bool include_self"
)


def ranks_of(*flat: Any) -> RankRule:
    """From `RankRule.flat` and `Measure.flat`."""
    kind, tau, rho, delta, start, top, *measure = flat
    return RankRule(kind, tau, rho, delta, start, top, measure_of(*measure))


def rule_of(flat: FlatRule) -> LossRule:
    *counted, average, alpha, beta, ap_weight, calibration_weight, include_self = flat
    ranks = ranks_of(*counted) if counted[0] else None
    averaged = cast(Literal["violating", "all"], average)
    calibration = CalibrationRule(alpha, beta, averaged) if average else None
    return LossRule(ranks, calibration, ap_weight, calibration_weight, include_self)


# A rank loss is sums over pairs and queries, and how many each is a sum of: these add up over rows, however the rows
# are shared out. The terms of a loss are six numbers in this order: [0::2] are the sums, [1::2] the counts.
AP_SUM, AP_COUNT, POS_SUM, POS_COUNT, NEG_SUM, NEG_COUNT = range(6)
TERMS = 6
