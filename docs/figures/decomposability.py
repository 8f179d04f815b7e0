"""Draws docs/figures/decomposability.svg: juxtaposed batches, the gap they make, and what calibration does to it."""

from __future__ import annotations

from itertools import permutations
from pathlib import Path

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt
import numpy as np
import torch
from matplotlib.axes import Axes

from roadmap.metrics.decomposability import DecomposabilityGap, ThresholdCounts, eq9_bound, worst_gap

POSITIVE, NEGATIVE = "#1b7837", "#c2a5cf"
BATCHES, POSITIVES, NEGATIVES = 4, 4, 12
ALPHA, BETA = 0.9, 0.6


def draw_juxtaposition(axes: Axes) -> None:
    """Three batches of 2 positives and 3 negatives, and the whole ranking they make at worst."""
    order = [True, True, False, False, False]
    for b in range(3):
        for place, hit in enumerate(order):
            _square(axes, place + 5.5 * b - 0.5, 1.6, hit)
        axes.text(5.5 * b + 1.5, 2.75, f"batch {b + 1}: AP = 1", ha="center", fontsize=8)
    for place, hit in enumerate(order * 3):
        _square(axes, place, 0.0, hit)
    axes.text(
        7,
        -1.15,
        f"the whole, from the first place: AP = {1 - worst_gap([2] * 3, [3] * 3):.2f}",
        ha="center",
        fontsize=8,
    )
    axes.set(xlim=(-1, 15), ylim=(-1.8, 3.4), title="Worst case: juxtaposed batches")
    axes.axis("off")


def _square(axes: Axes, x: float, y: float, hit: bool) -> None:
    axes.add_patch(plt.Rectangle((x - 0.45, y - 0.1), 0.9, 0.8, color=POSITIVE if hit else NEGATIVE))
    axes.text(x, y + 0.3, "+" if hit else "−", ha="center", va="center", color="white", fontsize=9)


def draw_growth(axes: Axes) -> None:
    """Eq 8 (corrected) against the number of batches, for some shares of positives."""
    ks = np.unique(np.logspace(0, 2.5, 40).astype(int))
    for p, n in ((16, 16), (4, 28), (4, 124)):
        axes.semilogx(ks, [worst_gap([p] * k, [n] * k) for k in ks], label=f"{p} positives, {n} negatives a batch")
    axes.set(xlabel="batches K", ylabel="largest gap", ylim=(0, 1), title="Eq 8, corrected")
    axes.legend(fontsize=7, loc="lower right")


def perfect_scores(rng: np.random.Generator, calibrated: float) -> torch.Tensor:
    """Scores of one perfect batch, positives first; `calibrated` is the chance that a score keeps its threshold."""
    while True:
        low, high = np.sort(rng.uniform(0, 1, 2)) if rng.random() > calibrated else (BETA, ALPHA)
        positives = rng.uniform(high, 1, POSITIVES)
        negatives = rng.uniform(0, low, NEGATIVES)
        if positives.min() > negatives.max():
            return torch.tensor(np.concatenate([positives, negatives]))


def worst_eq9(counts: ThresholdCounts) -> float:
    columns = list(vars(counts).values())
    return max(
        eq9_bound(ThresholdCounts(*(tuple(column[b] for b in order) for column in columns)))
        for order in permutations(range(BATCHES))
    )


def draw_calibration(axes: Axes) -> None:
    rng = np.random.default_rng(0)
    relevant = torch.tensor(([True] * POSITIVES + [False] * NEGATIVES) * BATCHES)
    batches = torch.arange(BATCHES).repeat_interleave(POSITIVES + NEGATIVES)
    shares = np.linspace(0, 1, 11)
    curves: dict[str, list[float]] = {"Eq 8": [], "Eq 9, worst order": [], "calibrated worst gap": [], "measured": []}
    for share in shares:
        some = [
            DecomposabilityGap(
                torch.cat([perfect_scores(rng, share) for _ in range(BATCHES)]), relevant, batches, ALPHA, BETA
            )
            for _ in range(60)
        ]
        curves["Eq 8"].append(float(np.mean([gap.eq8 for gap in some])))
        curves["Eq 9, worst order"].append(float(np.mean([worst_eq9(gap.threshold_counts) for gap in some])))
        curves["calibrated worst gap"].append(float(np.mean([gap.calibrated_worst for gap in some])))
        curves["measured"].append(float(np.mean([gap.gap for gap in some])))
    for (name, values), style in zip(curves.items(), ("--", "-.", "-", "k-"), strict=True):
        axes.plot(shares, values, style, label=name)
    axes.set(xlabel="share of calibrated batches", ylabel="gap", ylim=(0, None), title="What calibration does")
    axes.legend(fontsize=7)


def main() -> None:
    plt.style.use(Path(__file__).with_name("roadmap.mplstyle"))
    plt.rcParams["svg.hashsalt"] = "roadmap"  # the same file on every run
    shape = {"figsize": (13, 3.4), "width_ratios": (1.3, 1, 1), "layout": "constrained"}
    figure, (left, middle, right) = plt.subplots(1, 3, **shape)
    draw_juxtaposition(left)
    draw_growth(middle)
    draw_calibration(right)
    figure.savefig(Path(__file__).with_suffix(".svg"), metadata={"Date": None})


if __name__ == "__main__":
    main()
