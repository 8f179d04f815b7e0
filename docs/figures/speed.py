"""Draws docs/figures/speed.svg and speed_dark.svg: where the seconds of a command and the milliseconds of a step go."""

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
DARK = dict.fromkeys(("figure.facecolor", "savefig.facecolor", "axes.facecolor"), "#0d1117")
DARK |= dict.fromkeys(
    ("axes.edgecolor", "axes.labelcolor", "axes.titlecolor", "text.color", "xtick.color", "ytick.color"), "#e6edf3"
)
COLOURS = ["#4878A8", "#E8833A", "#2A9D7C", "#C9A227", "#8F6BB0", "#5AAFC9", "#A0A0A0"]
COMMANDS = {"train, cold, before": "before", "train, cold": "now"}
STEPS = {"no": "not\ncompiled", "blocks": "blocks,\nrecorded"}
EPOCHS = 20
Bars = dict[str, dict[str, float]]


def rows(name: str) -> list[dict[str, str]]:
    with (RESULTS / f"{name}_cuda.csv").open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def command_bars() -> Bars:
    """Bar -> part -> seconds, for 20 epochs: where fewer were run, at their pace."""
    bars: Bars = {name: {} for name in COMMANDS.values()}
    for row in rows("command"):
        if row["command"] in COMMANDS and row["part"] != "all":
            share = EPOCHS / int(row["epochs"]) if row["part"] == "training" else 1.0
            bars[COMMANDS[row["command"]]][row["part"]] = share * float(row["seconds"])
    return bars


def step_bars() -> Bars:
    """Bar -> kind of kernel -> milliseconds, of the ViT."""
    bars: Bars = {name: {} for name in STEPS.values()}
    for row in rows("step"):
        if row["model"].startswith("vit"):
            bars[STEPS[row["compile"]]][row["kind"]] = float(row["ms"])
    return bars


def table() -> str:
    """The command's parts, before and now, as the page has them."""
    before, now = command_bars().values()
    lines = [f"| {part} | {before[part]:.1f} s | {now[part]:.1f} s |" for part in now]
    lines.append(f"| **all** | **{sum(before.values()):.1f} s** | **{sum(now.values()):.1f} s** |")
    return "\n".join(["| part | before | now |", "|---|---|---|", *lines])


def start_table() -> str:
    """What starting takes on a core, as the page has it: modules, and whole commands beside them."""
    with (RESULTS / "start_cpu.csv").open(newline="", encoding="utf-8") as file:
        found = [(row["what"], float(row["core_seconds"])) for row in csv.DictReader(file)]
    commands = [(name, taken) for name, taken in found if name.startswith("roadmap ")]
    modules = [(name, taken) for name, taken in found if not name.startswith("roadmap ") and name != "interpreter"]
    cells = [f"{name} | {taken:.1f} s" for name, taken in modules]
    beside = [f"`{name}` | {taken:.1f} s" if "," not in name else f"`{name.replace(', ', '`, ', 1)} | {taken:.1f} s"
              for name, taken in commands]  # fmt: skip
    beside += [" | "] * (len(cells) - len(beside))
    lines = [f"| {left} | {right} |" for left, right in zip(cells, beside, strict=True)]
    return "\n".join(["| imports | | whole commands | |", "|---|---|---|---|", *lines])


def stack(axes: Axes, bars: Bars, unit: str, title: str) -> None:
    parts = list(dict.fromkeys(part for bar in bars.values() for part in bar))
    left = dict.fromkeys(bars, 0.0)
    for part, colour in zip(parts, COLOURS, strict=False):
        lengths = [bar.get(part, 0.0) for bar in bars.values()]
        axes.barh(list(bars), lengths, left=list(left.values()), color=colour, label=part, height=0.55)
        left = {name: left[name] + length for name, length in zip(bars, lengths, strict=True)}
    for name, total in left.items():
        axes.text(total, name, f" {total:.3g} {unit}", va="center")
    axes.invert_yaxis()
    axes.grid(False)
    axes.set_title(title, loc="left", fontsize=10)
    axes.set_xlim(0, 1.14 * max(left.values()))
    axes.set_xlabel(unit)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="upper center", bbox_to_anchor=(0.45, -0.28), ncols=3, fontsize=8, frameon=False)


def figure(dark: bool = False) -> Figure:
    plt.style.use(HERE / "roadmap.mplstyle")
    plt.rcParams.update(DARK if dark else {})
    drawn, (above, below) = plt.subplots(2, 1, figsize=(8.4, 6.2), layout="constrained")
    stack(above, command_bars(), "s", "roadmap train recipe=cub_vits from a cold start, 20 epochs")
    stack(below, step_bars(), "ms", "a step of its ViT-S: 128 pictures, forward, backward, AdamW")
    drawn.draw_without_rendering()
    drawn.set_layout_engine("none")  # laid out once: drawn again, legends below the axes would move
    return drawn


def write_table() -> None:
    page = HERE.parent / "speed.md"
    text = page.read_text(encoding="utf-8")
    before, _, rest = text.partition("| part | before | now |")
    page.write_text(before + table() + "\n\n" + rest.partition("\n\n")[2], encoding="utf-8")


if __name__ == "__main__":
    write_table()
    for dark in (False, True):
        with plt.rc_context():
            figure(dark).savefig(HERE / f"speed{'_dark' if dark else ''}.svg", metadata={"Date": None})
