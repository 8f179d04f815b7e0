"""The toy example of supplementary A.1: where each loss moves two positives that a negative outranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import torch
from matplotlib import pyplot as plt
from matplotlib.figure import Figure
from torch import Tensor

from roadmap.losses import average_precision, saturation_point
from roadmap.losses.rank_ap import h_minus, heaviside, plain_average_precision

HERE = Path(__file__).parent
TAU, RHO = 0.01, 100.0
SCORES = [0.50, 0.51, 0.64]  # two positives, one negative
POSITIVES = torch.tensor([[True, True, False]])
GREEN, RED = "#009E73", "#D55E00"


def sigmoid(t: Tensor) -> Tensor:
    return torch.sigmoid(t / TAU)


def steep(t: Tensor) -> Tensor:
    return h_minus(t, TAU, RHO, saturation_point(TAU))


PANELS: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "SmoothAP": (sigmoid, sigmoid),
    "SmoothAP with H⁺": (heaviside, sigmoid),
    "SupAP": (heaviside, steep),
}


def loss_and_gradient(panel: str) -> tuple[float, list[float]]:
    """1 - AP with the H⁺ and H⁻ of `panel`, and its gradient with respect to the three scores."""
    h_pos, h_neg = PANELS[panel]
    s = torch.tensor([SCORES], dtype=torch.float64, requires_grad=True)
    loss = 1 - plain_average_precision(s, POSITIVES, ~POSITIVES, h_pos, h_neg).sum()
    (gradient,) = torch.autograd.grad(loss, s)
    return float(loss.detach()), gradient[0].tolist()


def exact_loss() -> float:
    return 1 - float(average_precision(torch.tensor([SCORES], dtype=torch.float64), POSITIVES, ~POSITIVES))


def figure() -> Figure:
    plt.style.use(HERE / "roadmap.mplstyle")
    drawing, axes = plt.subplots(1, 3, figsize=(14, 4.3), sharex=True, sharey=True)
    for axis, panel in zip(axes, PANELS, strict=True):
        _draw_panel(axis, panel)
    axes[0].set_yticks([2, 1, 0], ["x₁  positive", "x₂  positive", "x₃  negative"])
    drawing.tight_layout(w_pad=2)
    return drawing


def _power_of_ten(x: float) -> str:
    """-3.7e-05 as −4·10⁻⁵."""
    digits, power = f"{x:+.0e}".split("e-")
    return digits.replace("-", "−") + "·10⁻" + "⁰¹²³⁴⁵⁶⁷⁸⁹"[int(power)]


def _draw_panel(axis: plt.Axes, panel: str) -> None:
    loss, gradient = loss_and_gradient(panel)
    for row, (score, slope) in enumerate(zip(SCORES, gradient, strict=True)):
        y, colour = 2 - row, RED if row == 2 else GREEN
        wanted = slope > 0 if row == 2 else slope < 0
        axis.plot(score, y, "s" if row == 2 else "o", ms=13, color=colour, zorder=3)
        if abs(slope) > 1e-3:
            end = (score - slope * 0.13, y)
            axis.annotate("", end, (score, y), arrowprops={"arrowstyle": "-|>", "lw": 2.6, "color": "#202020"})
        words = "no push" if abs(slope) < 1e-3 else "right way" if wanted else "wrong way"
        value = f"{-slope:+.3f}".replace("-", "−") if abs(slope) > 1e-3 else _power_of_ten(-slope)
        ink = "#B00020" if words == "wrong way" else "#404040"
        axis.text(score, y + 0.24, f"{value}  {words}", ha="center", va="bottom", fontsize=10.5, color=ink)
    sign = "≥" if loss >= exact_loss() else "<"
    subtitle = f"loss {loss:.6f} {sign} {exact_loss():.6f} = 1 − AP"
    axis.set_title(panel, pad=26)
    axis.text(0, 1.03, subtitle, transform=axis.transAxes, fontsize=10.5, color="#404040", va="bottom")
    axis.set_xlabel("score; the arrow is −∂L/∂s")
    axis.set_xlim(0.36, 0.74)
    axis.set_ylim(-0.5, 2.75)
    axis.grid(visible=False, axis="y")


if __name__ == "__main__":
    figure().savefig(HERE / "toy_gradients.svg", metadata={"Date": None})
