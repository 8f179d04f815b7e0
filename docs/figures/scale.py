"""Draws docs/figures/scale.svg and scale_dark.svg, and writes the tables of docs/scale.md, from what was measured."""

from __future__ import annotations

import csv
import itertools
import re
from collections.abc import Callable
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

HERE = Path(__file__).parent
RESULTS = HERE.parents[1] / "benchmarks" / "results"
PAGE = HERE.parent / "scale.md"
DARK = {
    "figure.facecolor": "#0d1117", "savefig.facecolor": "#0d1117", "axes.facecolor": "#0d1117",
    "axes.edgecolor": "#8b949e", "axes.labelcolor": "#e6edf3", "axes.titlecolor": "#e6edf3", "text.color": "#e6edf3",
    "xtick.color": "#e6edf3", "ytick.color": "#e6edf3", "grid.color": "#30363d",
    # the same colours, lighter: they must stand out from black
    "axes.prop_cycle": plt.cycler(color=["#56B4E9", "#E8833A", "#2CC29B", "#F0C060", "#E5A3C5", "#8CCBF0", "#FFFFFF"]),
}  # fmt: skip
TENTH = 0.1  # of a step, above which sending is worth hiding
Row = dict[str, str]


def rows(part: str) -> list[Row]:
    with (RESULTS / f"scale_{part}_cuda.csv").open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def line(axes: Axes, points: list[tuple[float, float]], name: str, marker: str, colour: str) -> None:
    axes.loglog(*zip(*points, strict=True), marker=marker, color=colour, label=name)


def draw_batch(axes: Axes, column: str, scale: float) -> None:
    looks = {"two passes": ("o", "C0"), "steps of one chunk": ("s", "C2"), "one pass": ("^", "C1")}
    names = {"two passes": "two passes", "steps of one chunk": "as many steps of 128", "one pass": "one pass"}
    for way, (marker, colour) in looks.items():
        found = [row for row in rows("two_pass") if row["way"] == way]
        points = [(int(row["batch"]), float(row[column]) * scale) for row in found if row["status"] == "ok"]
        line(axes, points, names[way], marker, colour)
        for row in found:
            if row["status"] != "ok":
                axes.plot(int(row["batch"]), points[-1][1], "X", color=colour, ms=10)
                axes.annotate("out of memory", (int(row["batch"]), points[-1][1]), xytext=(0, -16),
                              textcoords="offset points", ha="center", fontsize=9, color=colour)  # fmt: skip
    ticks = sorted({int(row["batch"]) for row in rows("two_pass")})
    axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
    axes.minorticks_off()
    axes.set_xlabel("batch")
    axes.legend()


def draw_memory(axes: Axes) -> None:
    looks = {("ROADMAP", 384): ("o", "C0"), ("ROADMAP", 128): ("s", "C5"), ("pml contrastive", 384): ("D", "C3")}
    for (loss, queries), (marker, colour) in looks.items():
        found = [r for r in rows("memory") if r["loss"] == loss and int(r["queries"]) == queries]
        points = [(int(r["memory"]), float(r["ms"])) for r in found if r["status"] == "ok" and int(r["memory"])]
        if points:
            name = "ROADMAP, here" if loss == "ROADMAP" else "pml's memory, contrastive"
            line(axes, points, f"{name}, batch {queries}", marker, colour)
    axes.set(xlabel="vectors in memory", ylabel="ms, forward and backward")
    axes.legend(loc="upper left", fontsize=9)


def draw_gpus(axes: Axes) -> None:
    looks = dict(zip(sorted({int(row["rows"]) for row in rows("gpus")}), ("o", "s", "^"), strict=False))
    for number, (count, marker) in enumerate(looks.items()):
        for wire, style in (("between", "-"), ("inside", ":")):
            found = [r for r in rows("gpus") if int(r["rows"]) == count and int(r["gpus"]) > 1 and r["status"] == "ok"]
            points = [(int(row["gpus"]), 100 * float(row[f"{wire}_share"])) for row in found]
            label = f"{count:,} pictures each, {'network' if wire == 'between' else 'NVLink'}"
            axes.loglog(*zip(*points, strict=True), style, marker=marker, color=f"C{number}", label=label)
    axes.axhline(100 * TENTH, color="C6", linewidth=1)
    axes.set(xlabel="GPUs", ylabel="gathering, % of the computing")
    axes.legend(fontsize=8)


GIBIBYTES = (5, 10, 20, 50, 100)  # less than two powers of ten: the ticks of a logarithm would be one


def figure(dark: bool = False) -> Figure:
    plt.style.use(HERE / "roadmap.mplstyle")
    plt.rcParams.update(DARK if dark else {})
    drawing, ((first, second), (third, fourth)) = plt.subplots(2, 2, figsize=(13, 9))
    draw_batch(first, "ms", 1e-3)
    first.set(title="Time of a step, ViT-S", ylabel="seconds")
    draw_batch(second, "peak_mib", 1 / 1024)
    second.set(title="Memory of a step, ViT-S", ylabel="GiB")
    second.set_yticks(GIBIBYTES, map(str, GIBIBYTES))
    second.minorticks_off()
    draw_memory(third)
    third.set_title("A call of the loss with a memory")
    draw_gpus(fourth)
    fourth.set_title("What gathering adds to a step (computed)")
    drawing.tight_layout(w_pad=3, h_pad=3)
    return drawing


def table(head: list[str], body: list[list[str]]) -> str:
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (head, ["---"] * len(head), *body))


def number(text: str, scale: float = 1.0, digits: int = 3) -> str:
    if text == "":
        return "out of memory"
    value = float(text) * scale
    return f"{value:,.0f}" if value >= 100 else f"{value:.{digits}g}"


def two_pass_table() -> str:
    found = {(row["way"], int(row["batch"])): row for row in rows("two_pass")}
    body = []
    for batch in sorted({batch for _, batch in found}):
        two, steps, one = (found.get((way, batch)) for way in ("two passes", "steps of one chunk", "one pass"))
        assert two is not None
        assert steps is not None
        body.append([
            f"{batch:,}", f"{number(two['ms'], 1e-3)} s, {number(two['peak_mib'], 1 / 1024)} GiB",
            f"{number(steps['ms'], 1e-3)} s, {number(steps['peak_mib'], 1 / 1024)} GiB",
            "" if one is None else "out of memory" if one["ms"] == "" else
            f"{number(one['ms'], 1e-3)} s, {number(one['peak_mib'], 1 / 1024)} GiB",
            f"{float(two['ms']) / float(steps['ms']):.2f} x",
            f"{float(two['peak_mib']) / float(steps['peak_mib']):.2f} x",
        ])  # fmt: skip
    return table(["batch", "two passes", "as many steps of 128", "one pass", "time", "memory"], body)


def memory_table() -> str:
    found = {(row["loss"], int(row["queries"]), int(row["memory"])): row for row in rows("memory")}
    columns = sorted({(loss, queries) for loss, queries, _ in found}, key=lambda c: (c[0] != "ROADMAP", c[1]))
    body = []
    for size in sorted({size for _, _, size in found}):
        cells = [found.get((*column, size)) for column in columns]
        body.append(
            [f"{size:,}", *("" if c is None else f"{number(c['ms'])} ms" if c["ms"] else c["status"] for c in cells)]
        )
    return table(["in memory", *(f"{loss}, batch {queries}" for loss, queries in columns)], body)


def resnet_table() -> str:
    body = []
    for row in rows("resnet"):
        if int(row["memory"]):
            share, lowest, highest = (100 * (float(row[c]) - 1) for c in ("of the step without", "lowest", "highest"))
            body.append(
                [
                    row["step"],
                    row["batch"],
                    f"{number(row['ms'])} ms",
                    f"{share:+.1f} % ({lowest:+.1f} to {highest:+.1f})",
                ]
            )
    return table(["step", "batch", "with a memory of 60,000", "more than without"], body)


def gpus_table() -> str:
    """By pictures each: what is computed and moved at the most GPUs measured, and where a tenth is passed."""
    body = []
    for count in sorted({int(row["rows"]) for row in rows("gpus")}):
        found = [row for row in rows("gpus") if int(row["rows"]) == count and row["status"] == "ok"]
        last = max(found, key=lambda row: int(row["gpus"]))
        body.append([
            f"{count:,}", f"{int(last['gpus']):,}", f"{int(last['batch']):,}", f"{number(last['model_ms'])} ms",
            f"{number(last['loss_ms'])} ms", f"{number(last['moved_mib'])} MiB",
            f"{number(last['inside_ms'])} / {number(last['between_ms'])} ms",
            f"{crossing(found, 'inside')} / {crossing(found, 'between')}",
        ])  # fmt: skip
    head = [
        "pictures each",
        "GPUs",
        "batch",
        "model",
        "loss",
        "gathered",
        "on NVLink / network",
        "a tenth is passed at",
    ]
    return table(head, body)


def crossing(found: list[Row], wire: str) -> str:
    """The number of GPUs from which sending takes a tenth of the computing, between two that were measured."""
    found = sorted((row for row in found if int(row["gpus"]) > 1), key=lambda row: int(row["gpus"]))
    for before, after in itertools.pairwise(found):
        low, high = float(before[f"{wire}_share"]), float(after[f"{wire}_share"])
        if low < TENTH <= high:
            share = (TENTH - low) / (high - low)
            return f"about {int(before['gpus']) + share * (int(after['gpus']) - int(before['gpus'])):,.0f} GPUs"
    if float(found[0][f"{wire}_share"]) >= TENTH:
        return f"{found[0]['gpus']} GPUs"
    return f"more than {int(found[-1]['gpus']):,}"


TABLES: dict[str, Callable[[], str]] = {
    "two_pass": two_pass_table, "memory": memory_table, "resnet": resnet_table, "gpus": gpus_table
}  # fmt: skip


def page() -> str:
    """docs/scale.md with its tables written anew."""
    text = PAGE.read_text(encoding="utf-8")
    for part, made in TABLES.items():
        facts = rows(part)[0]
        said = f"*{facts['hardware']}, torch {facts['torch']}, commit {facts['commit']}, {facts['date']}.*"
        marks = f"<!-- {part} -->", f"<!-- /{part} -->"
        text = re.sub(f"{marks[0]}.*?{marks[1]}", f"{marks[0]}\n{made()}\n\n{said}\n{marks[1]}", text, flags=re.DOTALL)
    return text


if __name__ == "__main__":
    for dark in (False, True):
        with plt.rc_context():
            figure(dark).savefig(HERE / f"scale{'_dark' if dark else ''}.svg", metadata={"Date": None})
    PAGE.write_text(page(), encoding="utf-8")
