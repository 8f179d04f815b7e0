"""Time and peak memory of the rank losses against the batch, as benchmarks/bench_losses.py measured them."""

from __future__ import annotations

import csv
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

HERE = Path(__file__).parent
RESULTS = HERE.parents[1] / "benchmarks" / "results"
OURS, OTHERS = ("SmoothAP", "ROADMAP"), ("plain ROADMAP", "pml SmoothAP", "pml FastAP")
# Per line: colour, marker, and where its name stands in either panel (batch, value).
LOOKS = {
    "SmoothAP": ("C5", "s", (140, 0.085), (4700, 13)),
    "ROADMAP": ("C0", "o", (21000, 4.4), (30000, 110)),
    "plain ROADMAP": ("C1", "^", (125, 1.55), (3000, 300)),
    "pml SmoothAP": ("C3", "D", (112, 900), (112, 6000)),
    "pml FastAP": ("C4", "v", (2600, 100), (2300, 14500)),
}
NAMES = {
    "ROADMAP": "ROADMAP, here",
    "SmoothAP": "SmoothAP, here",
    "plain ROADMAP": "the equations by autograd",
    "pml SmoothAP": "pml SmoothAP",
    "pml FastAP": "pml FastAP",
}
BOTTOM = {"ms": 0.02, "peak_mib": 0.4}
TOP = {"ms": 5000.0, "peak_mib": 150_000.0}

Row = dict[str, str]


def measured_rows() -> dict[str, list[Row]]:
    """The rows of each loss, by batch."""
    with (RESULTS / "losses_cuda.csv").open(newline="", encoding="utf-8") as file:
        rows = sorted(csv.DictReader(file), key=lambda row: int(row["batch"]))
    return {name: [row for row in rows if row["loss"] == name] for name in (*OURS, *OTHERS)}


def points(rows: list[Row], column: str) -> tuple[list[int], list[float]]:
    """Batches and values; a peak memory of 0.0 is a fault of the measurement and no point."""
    kept = [(int(row["batch"]), float(row[column])) for row in rows if row[column] and float(row[column]) > 0]
    return [batch for batch, _ in kept], [value for _, value in kept]


def draw(axes: Axes, column: str, label: int) -> None:
    for name, rows in measured_rows().items():
        colour, marker, *places = LOOKS[name]
        batches, values = points(rows, column)
        axes.loglog(batches, values, color=colour, marker=marker, ms=6, zorder=4 if name in OURS else 3)
        axes.text(*places[label], NAMES[name], color=colour, fontsize=10, fontweight="bold" if name in OURS else None)
        for row in rows:
            if row["status"] == "out of memory":
                batch = int(row["batch"])
                axes.plot([batches[-1], batch], [values[-1], TOP[column]], color=colour, linestyle=":", linewidth=1.4)
                axes.plot([batch], [TOP[column]], "X", color=colour, ms=10, clip_on=False, zorder=5)
                axes.annotate(
                    "out of memory", (batch, TOP[column]), xytext=(0, 9), textcoords="offset points",
                    ha="center", fontsize=9, color=colour, annotation_clip=False,
                )  # fmt: skip
    if column == "ms":
        axes.loglog(*points(measured_rows()["ROADMAP"], "floor_ms"), color="#5A5A5A", linestyle="--", linewidth=1.5)
        axes.text(2050, 0.052, "counted floor", color="#5A5A5A", fontsize=10)
    ticks = (128, 384, 1024, 4096, 16384, 131072)
    axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
    axes.minorticks_off()
    axes.set(xlim=(100, 200_000), ylim=(BOTTOM[column], TOP[column]), xlabel="batch")


def figure() -> Figure:
    plt.style.use(HERE / "roadmap.mplstyle")
    drawing, (left, right) = plt.subplots(1, 2, figsize=(13, 5.2))
    draw(left, "ms", 0)
    left.set_yticks([0.1, 1, 10, 100, 1000], ["0.1 ms", "1 ms", "10 ms", "100 ms", "1 s"])
    left.set_title("Time, forward and backward", pad=26)
    draw(right, "peak_mib", 1)
    right.set_yticks([1, 10, 100, 1024, 10240, 102400], ["1 MiB", "10 MiB", "100 MiB", "1 GiB", "10 GiB", "100 GiB"])
    right.set_title("Peak memory beside embeddings and their gradient", pad=26)
    drawing.tight_layout(w_pad=3)
    return drawing


if __name__ == "__main__":
    figure().savefig(HERE / "bench_losses.svg", metadata={"Date": None})
