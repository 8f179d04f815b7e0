"""The picture of the toy demonstration."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from roadmap.toy.courses import BATCH_CLASSES, BATCH_ITEMS, CLASSES, ITEMS, Course

# Okabe and Ito's colours, which remain apart for colour-blind eyes; dashes tell the baselines from the paper's losses.
LOOKS = {
    "SmoothAP": ("#E69F00", "--"),
    "BlackBoxAP": ("#000000", ":"),
    "FastAP": ("#CC79A7", "-."),
    "SoftBinAP": ("#8C8C8C", (0, (5, 1, 1, 1, 1, 1))),
    "SupAP": ("#56B4E9", "-"),
    "Calibration": ("#009E73", "-"),
    "ROADMAP": ("#D55E00", "-"),
}
STYLE: dict[Any, Any] = {
    "font.family": "DejaVu Sans",
    "font.size": 10,
    "axes.titlesize": 11.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#E6E6E6",
    "axes.axisbelow": True,
}


def draw(courses: dict[str, Course], path: Path) -> None:
    """Save the picture of all `courses` as `path`."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(2, 3, figsize=(15, 8.6))
        for axis, kind in zip(axes[0], ("ap", "gap", "loss"), strict=True):
            _draw_curves(axis, courses, kind)
        _draw_pushes(axes[1, 0], courses)
        for axis, name in zip(axes[1, 1:], ("SupAP", "ROADMAP"), strict=True):
            _draw_scores(axis, courses[name], name)
        seeds = len(courses["ROADMAP"].ap)
        handles, names = axes[0, 0].get_legend_handles_labels()
        figure.legend(handles, names, loc="upper center", ncols=len(names), frameon=False, bbox_to_anchor=(0.5, 0.955))
        figure.suptitle(
            f"Free embeddings under each loss: {CLASSES * ITEMS} items, {CLASSES} classes, batches of "
            f"{BATCH_CLASSES * BATCH_ITEMS}; mean of {seeds} seed{'s' * (seeds > 1)}, bands from lowest to highest",
            fontsize=14,
            y=0.985,
        )
        figure.tight_layout(rect=(0, 0, 1, 0.925), h_pad=2.5, w_pad=2)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=130)
        plt.close(figure)


def _draw_curves(axis: Any, courses: dict[str, Course], kind: str) -> None:
    titles = {
        "ap": ("Exact AP over the whole set", "average precision"),
        "gap": ("Decomposability gap", "AP in batches − AP of the set"),
        "loss": ("Loss, relative to the start", "loss / loss at the start"),
    }
    for name, c in courses.items():
        curve = c.loss / c.loss[:, :1] if kind == "loss" else getattr(c, kind)
        colour, dashes = LOOKS[name]
        epochs = range(curve.shape[1])
        width = 2.8 if name == "ROADMAP" else 1.8
        axis.plot(epochs, curve.mean(0), color=colour, linestyle=dashes, linewidth=width, label=name)
        if kind != "loss":  # measured on fewer batches: the lines tell enough
            axis.fill_between(epochs, curve.amin(0), curve.amax(0), color=colour, alpha=0.12, linewidth=0)
    title, label = titles[kind]
    axis.set(title=title, ylabel=label, xlabel="epoch")
    axis.margins(x=0.01)


def _draw_pushes(axis: Any, courses: dict[str, Course]) -> None:
    names = list(courses)[::-1]
    left = [0.0] * len(names)
    parts = (("up", "pushed up", "#0072B2"), ("none", "left alone", "#D9D9D9"), ("down", "pushed down", "#D55E00"))
    for kind, label, colour in parts:
        shares = [100 * getattr(courses[name].pushes, kind) for name in names]
        axis.barh(names, shares, left=left, color=colour, label=label, height=0.66)
        for y, (start, share) in enumerate(zip(left, shares, strict=True)):
            if share >= 6:
                ink = "black" if kind == "none" else "white"
                axis.text(start + share / 2, y, f"{share:.0f}", ha="center", va="center", color=ink, fontsize=9)
        left = [a + b for a, b in zip(left, shares, strict=True)]
    axis.set(title="Outranked positives, at the start", xlabel="% of the positives that a negative outranks")
    axis.set_xlim(0, 100)
    axis.grid(visible=False)
    axis.legend(loc="lower center", bbox_to_anchor=(0.42, 0.985), ncols=3, frameon=False, fontsize=9)
    axis.set_title(axis.get_title("left"), pad=24)


def _draw_scores(axis: Any, c: Course, name: str) -> None:
    bins = [k / 40 for k in range(-40, 41)]
    for scores, label, colour in ((c.negatives, "negatives", "#D55E00"), (c.positives, "positives", "#0072B2")):
        axis.hist(scores.tolist(), bins=bins, density=True, color=colour, alpha=0.65, label=label)
    for x, label in ((0.6, "β"), (0.9, "α")):
        axis.axvline(x, color="black", linewidth=1, linestyle="--")
        axis.text(x, 1.01, label, transform=axis.get_xaxis_transform(), ha="center", va="bottom")
    axis.set(title=f"Scores after {name}", xlabel="cosine of a pair, over the whole set", ylabel="density")
    axis.set_xlim(-1, 1)
    above = f"{(c.positives > 0.9).float().mean():.0%} of the positives above α"
    below = f"{(c.negatives < 0.6).float().mean():.1%} of the negatives below β"
    axis.text(0.03, 0.73, f"{above}\n{below}", transform=axis.transAxes, va="top", linespacing=1.5)
    axis.legend(loc="upper left", frameon=False)
