"""Batches that are perfect one by one and wrong together (paper, Fig. 1b; supplementary A.2, the worst case)."""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import torch
from matplotlib import pyplot as plt
from matplotlib.figure import Figure
from torch import Tensor

from roadmap.losses import average_precision, calibration

HERE = Path(__file__).parent
ALPHA, BETA = 0.9, 0.6
GREEN, RED = "#009E73", "#D55E00"
POSITIVES = torch.tensor([True, True, False, False])  # of one query, in every batch

SETTINGS = {
    "Each batch in order, scores of their own": torch.tensor(
        [[0.95, 0.91, 0.80, 0.74], [0.68, 0.63, 0.53, 0.47], [0.40, 0.34, 0.24, 0.18]]
    ),
    "Calibrated: positives above α, negatives below β": torch.tensor(
        [[0.97, 0.93, 0.56, 0.50], [0.95, 0.91, 0.42, 0.36], [0.96, 0.92, 0.30, 0.21]]
    ),
}


def ap(scores: Tensor, positives: Tensor) -> float:
    return float(average_precision(scores[None], positives[None], ~positives[None]))


def calibration_loss(scores: Tensor) -> float:
    return float(calibration(scores[None], POSITIVES[None], ~POSITIVES[None], ALPHA, BETA))


def gap(batches: Tensor) -> float:
    """DG_AP of Eq. (6): mean AP inside the batches minus AP of their union."""
    inside = sum(ap(b, POSITIVES) for b in batches) / len(batches)
    return inside - ap(batches.flatten(), POSITIVES.repeat(len(batches)))


def figure() -> Figure:
    plt.style.use(HERE / "roadmap.mplstyle")
    drawing, axes = plt.subplots(1, 2, figsize=(15, 4.4), sharex=True, sharey=True)
    for axis, (title, batches) in zip(axes, SETTINGS.items(), strict=True):
        _draw_setting(axis, title, batches)
    drawing.tight_layout(w_pad=3)
    return drawing


def _draw_setting(axis: plt.Axes, title: str, batches: Tensor) -> None:
    rows = [*batches, batches.flatten()]
    for row, scores in enumerate(rows):
        y = len(rows) - 1 - row - 0.35 * (row == len(rows) - 1)
        positives = POSITIVES.repeat(len(scores) // len(POSITIVES))
        axis.plot([0.12, 1.0], [y, y], color="#BFBFBF", linewidth=1.2, zorder=1)
        for chosen, colour, marker in ((positives, GREEN, "o"), (~positives, RED, "s")):
            axis.scatter(scores[chosen], [y] * int(chosen.sum()), s=120, color=colour, marker=marker, zorder=3)
        words = f"AP = {ap(scores, positives):.3f}"
        if row < len(batches):
            words += f"    $L_{{calibr.}}$ = {calibration_loss(scores):.3f}"
        else:
            words += f"    gap = {gap(batches):.3f}"
        axis.text(1.03, y, words, va="center", fontsize=11, fontweight="bold" if row == len(batches) else "normal")
    for x, label in ((BETA, "β"), (ALPHA, "α")):
        axis.axvline(x, ymax=0.93, color="#5A5A5A", linestyle="--", linewidth=1.1)
        axis.text(x, 3.62, label, ha="center", va="center", fontsize=12)
    axis.set_title(title)
    axis.set_yticks([3, 2, 1, -0.35], ["batch 1", "batch 2", "batch 3", "whole set"])
    axis.set_xticks([0.2, 0.4, 0.6, 0.8, 1.0])
    axis.set_xlim(0.12, 1.42)
    axis.set_ylim(-0.85, 3.75)
    axis.spines["bottom"].set_bounds(0.12, 1.0)
    axis.set_xlabel("score with the query (● positive, ■ negative)", loc="left")
    axis.grid(visible=False)


if __name__ == "__main__":
    figure().savefig(HERE / "juxtaposed_batches.svg", metadata={"Date": None})
