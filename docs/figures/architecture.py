"""Draws docs/figures/architecture.svg: the floors of the house, and the seven values that pass between them."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
# What a part is for, in a few words; the floor of each is read from tests/test_architecture.py.
PURPOSE = {
    "cli": "verbs: parse, call, print",
    "demo": "make demo",
    "toy": "make toy",
    "report": "tables, figures, pages",
    "search": "index, engines, service",
    "experiments": "tables, statistics",
    "config": "settings from YAML",
    "engine": "state, step, fit",
    "evaluation": "protocols",
    "encoder": "a model ready for pictures",
    "embeddings": "vectors with names",
    "runs": "a run's folder",
    "models": "backbone, pooling, head",
    "data": "datasets, pictures, batches",
    "metrics": "exact R@k, mAP@R, mAP",
    "losses": "what is minimised",
    "kernels": "ranks, counted fast",
    "hardware": "device, precision",
}
# Value, the part that is its home, and who makes it of what.
VALUES = [
    ("Records", "data", "a dataset, read"),
    ("Batch", "data", "crops of some of them"),
    ("Encoder", "encoder", "weights, crop, precision"),
    ("Embeddings", "embeddings", "vectors, classes, names"),
    ("Comparison", "losses", "who against whom"),
    ("TrainState", "engine", "all that changes"),
    ("Evaluation", "evaluation", "metrics, query by query"),
]
PART, VALUE, EDGE, INK = "#E8F1F8", "#FBE9DD", "#0072B2", "#222222"


def floors() -> list[list[str]]:
    """The parts that have a purpose here, floor by floor, from the top."""
    spec = importlib.util.spec_from_file_location("architecture_rules", ROOT / "tests" / "test_architecture.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    levels = sorted({module.FLOORS[part] for part in PURPOSE if part in module.FLOORS}, reverse=True)
    return [[part for part in PURPOSE if module.FLOORS.get(part) == level] for level in levels]


def box(axes: Axes, x: float, y: float, width: float, height: float, colour: str) -> None:
    shape = FancyBboxPatch(
        (x, y),
        width,
        height,
        boxstyle="round,pad=0,rounding_size=0.08",
        facecolor=colour,
        edgecolor=EDGE,
        linewidth=0.8,
    )
    axes.add_patch(shape)


def draw_floors(axes: Axes) -> None:
    levels = floors()
    height, step = 0.72, 1.0
    for i, parts in enumerate(levels):
        y = (len(levels) - 1 - i) * step
        width = 8.0 / len(parts)
        for j, part in enumerate(parts):
            box(axes, j * width + 0.05, y, width - 0.1, height, PART)
            axes.text((j + 0.5) * width, y + 0.45, part, ha="center", va="center", weight="bold", fontsize=9, color=INK)
            axes.text((j + 0.5) * width, y + 0.19, PURPOSE[part], ha="center", va="center", fontsize=6.6, color=INK)
    axes.set(xlim=(-0.1, 8.1), ylim=(-0.3, len(levels)), title="A part knows only the floors below it")
    axes.axis("off")


def draw_values(axes: Axes) -> None:
    step = len(floors()) / len(VALUES)
    for i, (value, home, meaning) in enumerate(VALUES):
        y = (len(VALUES) - 1 - i) * step
        box(axes, 0.05, y, 3.9, 0.74 * step, VALUE)
        axes.text(2.0, y + 0.5 * step, value, ha="center", va="center", weight="bold", fontsize=9, color=INK)
        axes.text(2.0, y + 0.22 * step, f"{home}: {meaning}", ha="center", va="center", fontsize=6.6, color=INK)
        if i:
            arrow = {"arrowstyle": "-|>", "color": EDGE, "linewidth": 1.0}
            axes.annotate("", (2.0, y + 0.76 * step), (2.0, y + step), arrowprops=arrow)
    axes.set(xlim=(-0.1, 4.1), ylim=(-0.3, len(floors())), title="Seven values pass between them")
    axes.axis("off")


def figure() -> Figure:
    plt.style.use(HERE / "roadmap.mplstyle")
    drawing, (left, right) = plt.subplots(1, 2, figsize=(11, 6.2), width_ratios=(2.1, 1), layout="constrained")
    draw_floors(left)
    draw_values(right)
    return drawing


if __name__ == "__main__":
    figure().savefig(HERE / "architecture.svg", metadata={"Date": None})
