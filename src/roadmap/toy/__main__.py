"""python -m roadmap.toy: train, draw, and say what is seen."""

from __future__ import annotations

import argparse
import importlib.util
import sys
import textwrap
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from roadmap.progress import bar
from roadmap.toy.courses import FAINT, LOSSES, OPTIMIZERS, Course, course
from roadmap.toy.picture import draw


def table(courses: dict[str, Course]) -> str:
    lines = [
        "              AP, whole set    AP in batches      gap           loss      outranked positives at the start",
        "              start     end    start     end      end     start     end   pushed up     left   pushed down",
    ]
    for name, c in courses.items():
        ap, inside, gap, loss = (x.mean(0) for x in (c.ap, c.batch_ap, c.gap, c.loss))
        lines.append(
            f"{name:<11}   {ap[0]:>5.3f}   {ap[-1]:>5.3f}    {inside[0]:>5.3f}   {inside[-1]:>5.3f}   {gap[-1]:>6.3f}"
            f"    {loss[0]:>6.3f}  {loss[-1]:>6.3f}"
            f"   {c.pushes.up:>9.1%}   {c.pushes.none:>6.1%}   {c.pushes.down:>11.1%}"
        )
    lines.append(f"(left: a push weaker than {FAINT:g} of the loss's strongest; means over the seeds)")
    return "\n".join(lines)


def findings(courses: dict[str, Course]) -> list[str]:
    """What the numbers say, in words written from them, whichever way they fell."""
    smooth, sup = courses["SmoothAP"].pushes, courses["SupAP"].pushes
    end = {name: float(c.ap[:, -1].mean()) for name, c in courses.items()}
    inside = {name: float(c.batch_ap[:, -1].mean()) for name, c in courses.items()}
    gap = {name: inside[name] - end[name] for name in courses}
    change = "falls" if gap["ROADMAP"] < gap["SupAP"] else "does not fall: it goes"
    return [
        f"Robustness. Of the positives that a negative outranks, SmoothAP leaves {smooth.none:.0%} without a push and "
        f"pushes {smooth.down:.0%} further down; SupAP leaves {sup.none:.0%} and pushes {sup.down:.0%} down. "
        f"The AP of the whole set ends at {end['SmoothAP']:.3f} and {end['SupAP']:.3f}.",
        f"Decomposability. SupAP ends at {inside['SupAP']:.3f} inside batches but {end['SupAP']:.3f} over the whole "
        f"set, a gap of {gap['SupAP']:.3f} that no batch shows. With calibration (ROADMAP) the gap {change} to "
        f"{gap['ROADMAP']:.3f}; the AP of the whole set ends at {end['ROADMAP']:.3f}.",
        f"A caution. Calibration alone ends at {end['Calibration']:.3f}, ROADMAP at {end['ROADMAP']:.3f}: do not "
        "choose between losses on a toy, whose free embeddings can meet every threshold and whose order of SmoothAP, "
        "SupAP and the binned losses turns with the optimiser and the step (docs/maths.md). With a network on pictures "
        "(iNaturalist) the paper reports mAP@R 23.8 for calibration alone, 26.1 for SupAP alone, 27.7 for both.",
    ]


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m roadmap.toy", description="Optimise free embeddings of a hard toy set under each loss."
    )
    parser.add_argument("--out", type=Path, default=Path("toy"), help="folder for the picture (default: toy)")
    parser.add_argument("--epochs", type=int, default=40, help="passes over the classes (default: 40)")
    parser.add_argument("--seeds", type=int, default=3, help="how many toy sets to average over (default: 3)")
    parser.add_argument("--seed", type=int, default=0, help="the first seed (default: 0)")
    parser.add_argument("--learning-rate", type=float, default=0.5, help="the same for every loss (default: 0.5)")
    parser.add_argument("--optimizer", choices=sorted(OPTIMIZERS), default="sgd", help="default: sgd, without momentum")
    options = parser.parse_args(argv)
    if options.epochs < 1 or options.seeds < 1:
        parser.error(f"--epochs and --seeds must be at least 1, got {options.epochs} and {options.seeds}")
    if not options.learning_rate > 0:
        parser.error(f"--learning-rate must be > 0, got {options.learning_rate}")
    if importlib.util.find_spec("matplotlib") is None:
        parser.error("the picture needs matplotlib; run: pip install '.[figures]'")
    return options


def main(argv: Sequence[str] | None = None) -> int:
    options = _options(argv)
    began = time.perf_counter()
    torch.set_num_threads(1)  # tensors this small only lose by being shared out
    seeds = range(options.seed, options.seed + options.seeds)
    courses = {}
    with bar(len(LOSSES) * len(seeds) * options.epochs, "training", " epochs", leave=False) as shown:
        for name in LOSSES:
            shown.name(name)
            courses[name] = course(name, seeds, options.epochs, options.learning_rate, shown.update, options.optimizer)
    picture = options.out / "toy.png"
    draw(courses, picture)
    print(table(courses))
    for finding in findings(courses):
        print("\n" + textwrap.fill(finding, width=104))
    print(f"\nDone in {time.perf_counter() - began:.0f} s. The picture: {picture}")
    print("Next: README.md shows the loss in a training loop of your own, docs/maths.md what each curve is made of.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
