"""H⁺, H⁻ and the sigmoid (paper, Fig. 3): what counts a rank in SupAP and in SmoothAP."""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import torch
from matplotlib import pyplot as plt
from matplotlib.figure import Figure

from roadmap.losses import saturation_point
from roadmap.losses.rank_ap import h_minus, heaviside

HERE = Path(__file__).parent
TAU, RHO = 0.01, 100.0
DELTA = saturation_point(TAU)


def figure() -> Figure:
    plt.style.use(HERE / "roadmap.mplstyle")
    drawing, axes = plt.subplots(1, 3, figsize=(13, 4.4), sharex=True, sharey=True)
    for axis in axes:
        _draw_step(axis)
        axis.set_xlabel("t = s$_j$ − s$_k$")
        axis.set_ylim(-0.25, 4.2)
        axis.set_xticks([-0.04, -0.02, 0, 0.02, 0.04, 0.06], ["−.04", "−.02", "0", ".02", ".04", ".06"])
    _title(axes[0], "H⁺ = H, Eq. (3)", "counts rank⁺ in SupAP; no slope, on purpose")
    _title(axes[1], "H⁻, Eq. (4)", "counts rank⁻ in SupAP; nowhere below H")
    _title(axes[2], "The sigmoid of SmoothAP", "counts both ranks; flat where the order is worst")
    axes[0].set_ylabel("what an item adds to the rank")
    axes[0].legend(loc="upper left")
    _draw_h_minus(axes[1])
    _draw_sigmoid(axes[2])
    drawing.tight_layout(w_pad=2)
    return drawing


def _title(axis: plt.Axes, title: str, subtitle: str) -> None:
    axis.set_title(title, pad=26)
    axis.text(0, 1.03, subtitle, transform=axis.transAxes, fontsize=10.5, color="#404040", va="bottom")


def _draw_step(axis: plt.Axes) -> None:
    for start, end in ((-0.05, 0.0), (0.0, 0.07)):
        t = torch.tensor([start, end - 1e-9 if end == 0 else end])
        axis.plot(t, heaviside(t), color="black", linewidth=1.6, label="H, the step" if end == 0 else None)
    axis.plot(0, 0, "o", mfc="white", mec="black", ms=6)
    axis.plot(0, 1, "o", color="black", ms=6)


def _draw_h_minus(axis: plt.Axes) -> None:
    below = torch.linspace(-0.05, -1e-9, 200, dtype=torch.float64)
    sigmoid = torch.linspace(0, DELTA, 200, dtype=torch.float64)
    linear = torch.linspace(DELTA + 1e-9, 0.07, 50, dtype=torch.float64)
    parts = ((below, "C0", "σ(t/τ)"), (sigmoid, "C2", "σ(t/τ) + ½"), (linear, "C1", "slope ρ"))
    for t, colour, label in parts:
        axis.plot(t, h_minus(t, TAU, RHO, DELTA), color=colour, label=label, linewidth=2.8)
    axis.plot(0, 0.5, "o", mfc="white", mec="C0", ms=6)
    axis.plot(0, 1, "o", color="C2", ms=6)
    axis.axvline(DELTA, color="#8C8C8C", linestyle=":", linewidth=1.4)
    axis.text(DELTA + 0.002, 0.3, f"δ = {DELTA:.3f}", color="#5A5A5A", fontsize=10)
    axis.legend(loc="upper left")


def _draw_sigmoid(axis: plt.Axes) -> None:
    t = torch.linspace(-0.05, 0.07, 400, dtype=torch.float64)
    axis.plot(t, torch.sigmoid(t / TAU), color="C3", label="σ(t/τ)", linewidth=2.8)
    below = (t >= 0) & (t < 0.03)
    axis.fill_between(t[below], torch.sigmoid(t[below] / TAU), 1, color="C3", alpha=0.3, linewidth=0, label="below H")
    axis.legend(loc="upper left")


if __name__ == "__main__":
    figure().savefig(HERE / "rank_functions.svg", metadata={"Date": None})
