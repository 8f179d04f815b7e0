"""What the kernels compute, as plain values: how a rank is counted and how scores are calibrated.

Every argument a kernel needs beyond its tensors travels in these, checked once by the losses that build them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class RankRule:
    """Which H⁺ and H⁻ count the ranks: "supap" (step and Eq. 4) or "smoothap" (two sigmoids)."""

    kind: Literal["supap", "smoothap"]
    tau: float
    rho: float = 0.0
    delta: float = 0.0

    @property
    def top(self) -> float:
        """H⁻(delta), where the linear part of Eq. (4) begins."""
        return 1 / (1 + math.exp(-self.delta / self.tau)) + 0.5

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
