"""Where δ lies on the slope of the sigmoid, and the push that a wrongly ranked pair gets (supplementary A.3)."""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import torch
from matplotlib import pyplot as plt
from matplotlib.figure import Figure
from torch import Tensor

from roadmap.losses import saturation_point, smoothap, supap

HERE = Path(__file__).parent
TAU, EPSILON = 0.01, 1e-2
DELTA = saturation_point(TAU, EPSILON)


def slope(t: Tensor) -> Tensor:
    """dσ(t/τ)/dt, by autograd."""
    t = t.clone().requires_grad_()
    (derivative,) = torch.autograd.grad(torch.sigmoid(t / TAU).sum(), t)
    return derivative


def push(t: Tensor, loss: str) -> Tensor:
    """-∂L/∂s of a lone positive with one negative t above it, for each t."""
    scores = torch.stack([torch.zeros_like(t), t], dim=1).requires_grad_()
    positives = torch.tensor([[True, False]]).expand(len(t), 2)
    value = {"SmoothAP": smoothap, "SupAP": supap}[loss](scores, positives, ~positives)
    (gradient,) = torch.autograd.grad(value * len(t), scores)
    return -gradient[:, 0]


def figure() -> Figure:
    plt.style.use(HERE / "roadmap.mplstyle")
    drawing, (left, right) = plt.subplots(1, 2, figsize=(13, 4.4))
    t = torch.linspace(-0.08, 0.08, 641, dtype=torch.float64)
    at_delta = float(slope(torch.tensor([DELTA], dtype=torch.float64)))
    left.plot(t, slope(t), color="C3")
    left.plot([DELTA], [at_delta], "o", color="C1", ms=8, zorder=3)
    left.annotate(
        f"δ = τ ln((1−ε)/ε) = {DELTA:.4f}\nσ(δ/τ) = 1 − ε = {1 - EPSILON:.2f}\nslope in t: ε(1−ε)/τ = {at_delta:.2f}",
        (DELTA, at_delta),
        xytext=(0.0165, 16.5),
        arrowprops={"arrowstyle": "-", "color": "#5A5A5A"},
        linespacing=1.5,
    )
    left.set(title="Slope of the sigmoid, τ = 0.01", xlabel="t = s$_j$ − s$_k$", ylabel="dσ(t/τ) / dt")
    left.set_xlim(-0.08, 0.08)
    left.set_xticks([-0.08, -0.04, 0, 0.04, 0.08])
    t = torch.linspace(-0.1, 0.3, 801, dtype=torch.float64)
    right.semilogy(t, push(t, "SmoothAP"), color="C3", linestyle="--")
    right.semilogy(t, push(t, "SupAP"), color="C5")
    right.axvline(DELTA, color="#8C8C8C", linestyle=":", linewidth=1.4)
    right.text(DELTA + 0.004, 2.2e-7, "δ", color="#5A5A5A")
    right.text(0.08, 6.5, "SupAP: weaker with t, as 1/t², never gone", fontsize=10, color="#2277AA")
    right.text(0.128, 1e-4, "SmoothAP: gone, as e$^{−t/τ}$", fontsize=10, color="#A87400")
    right.set(title="Push on a positive below one negative", xlabel="t = s$_j$ − s$_k$", ylabel="−∂L / ∂s$_k$")
    right.set_ylim(1e-7, 60)
    right.set_xlim(-0.1, 0.3)
    drawing.tight_layout(w_pad=3)
    return drawing


if __name__ == "__main__":
    figure().savefig(HERE / "delta_choice.svg", metadata={"Date": None})
