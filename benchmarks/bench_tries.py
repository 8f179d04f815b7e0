"""What might better a recipe: tries beside it, on training classes that are held out, over several seeds.

    python benchmarks/bench_tries.py --set data.root=CUB_200_2011 --set model.weights=FILE
    python benchmarks/bench_tries.py ... --only base biases larger_504 --seeds 0 1 2 --minutes 50
    python benchmarks/bench_tries.py --table         # Markdown of what is measured; trains nothing
    python benchmarks/bench_tries.py --recipe glyphs --only base lam_03 --set epochs=2     # on a CPU

Every try trains on four fifths of the training classes and is measured on the others, after its last epoch, so that the
test set has no part in the choice: it is in no row. R@1 and mAP@R are in percent, also for vectors that are the mean of
a picture's and its mirror image's ("flip"), which no try is ordered by. Differences are those from `base`, paired over
the seeds that both have, with Student's interval, and p corrected for as many tries as there are (Holm).

The same command goes on where it was stopped, on another machine too: a try and seed that has a row in
benchmarks/results/tries_RECIPE.csv, which is there as soon as it is measured, is not run again (delete the row for
that), and a run that was stopped goes on from its folder below --out.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import sys
import threading
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "src"))

from run_rows import RAN, Row, Rows, told  # noqa: E402

from roadmap.config.composition import settings_from  # noqa: E402
from roadmap.data import pack_for  # noqa: E402
from roadmap.encoder import Encoder  # noqa: E402
from roadmap.engine import Stopped, fit_or_resume  # noqa: E402
from roadmap.evaluation import evaluate, records_to_search  # noqa: E402
from roadmap.experiments.sheet import Cell, Sheet  # noqa: E402
from roadmap.experiments.statistics import Difference, estimate, holm, paired_t  # noqa: E402
from roadmap.runs import Run  # noqa: E402


@dataclass(frozen=True)
class Try:
    """Settings beside those of the recipe.

    Attributes:
        settings: of the run.
        then: of a second run, if there is one, which begins with the weights that the first ended with.
        apart: its vectors are not like the recipe's, such as twice as wide: it stands in a table of its own.
    """

    settings: tuple[str, ...] = ()
    then: tuple[str, ...] = ()
    apart: bool = False

    def __str__(self) -> str:
        first, then = " ".join(self.settings), " ".join(self.then)
        return f"{first or 'the recipe'}, then {then}" if then else first


# Only the last epoch is measured: tries of more epochs would have more of them to choose from.
HELD_OUT = ("select=held_out", "select.fraction=0.2", "select.every=1000000")
BASE = "base"
PROXIES = "optim.loss_lr=1e-2"
# Larger batches take fewer steps, which higher rates make up for in part; 80 classes fill 2,048 with 32 pictures of 64.
TRIES = {
    BASE: Try(),
    "clustered_01": Try(("loss=clustered", PROXIES)),
    "clustered_03": Try(("loss=clustered", "loss.lam=0.3", PROXIES)),
    "recall_at_k": Try(("loss=recall_at_k",)),
    "simix": Try(("loss=recall_at_k", "loss.mix=true")),
    "batch_512": Try(("data.batch_size=512", "data.per_class=8", "data.chunk=128", "optim.lr=2e-5")),
    "batch_1024": Try(("data.batch_size=1024", "data.per_class=16", "data.chunk=128", "optim.lr=3e-5")),
    "batch_2048": Try(("data.batch_size=2048", "data.per_class=32", "data.chunk=128", "optim.lr=4e-5")),
    "biases": Try(("model.learns=biases", "optim.lr=1e-4")),
    "biases_fast": Try(("model.learns=biases", "optim.lr=1e-3")),
    "upper_half": Try(("model.freeze_layers=7",)),
    "layer_decay": Try(("optim.layer_decay=0.8", "optim.lr=2e-5", "optim.warmup=2")),
    "lam_03": Try(("loss.lam=0.3",)),
    "lam_07": Try(("loss.lam=0.7",)),
    "alpha_08": Try(("loss.alpha=0.8",)),
    "beta_05": Try(("loss.beta=0.5",)),
    "beta_07": Try(("loss.beta=0.7",)),
    "long_average": Try(("epochs=40", "optim.ema=0.999")),
    "larger_504": Try(("epochs=18",), ("data.image=504", "data.resize=576", "epochs=2", "optim.lr=3e-6")),
    "larger_560": Try(("epochs=18",), ("data.image=560", "data.resize=640", "epochs=2", "optim.lr=3e-6")),
    "both_tokens": Try(("model.pooling=both",), apart=True),
}
MEASURES = ("R@1", "mAP@R")
ASKED = ("recipe", "set", "seed", "epochs", "classes")
ENDS = ("training seconds", *ASKED, *RAN)


def row_of(name: str, seed: int, arguments: argparse.Namespace) -> Row:
    """Trains, or finds what was trained, and measures."""
    tried, seconds = TRIES[name], 0.0
    begins: list[str] = []
    for phase, own in enumerate((tried.settings, tried.then) if tried.then else (tried.settings,)):
        folder = Path(arguments.out) / f"{arguments.recipe}_{name}_{seed}{'_then' * phase}"
        words = [f"recipe={arguments.recipe}", *HELD_OUT, f"seed={seed}", f"run={folder}", *arguments.set]
        run = Run(fit_or_resume(settings_from([*words, *own, *begins]), quiet=True))
        seconds += run.summary()["training seconds"]
        begins = [f"model.weights={run.folder}"]
    row = {"try": name, "settings": str(tried)} | {key: f"{value:.2f}" for key, value in measures_of(run).items()}
    row |= {"training seconds": f"{seconds:.0f}", "recipe": arguments.recipe, "set": told(arguments.set)}
    row |= {"seed": str(seed), "epochs": str(run.summary()["epochs"]), "classes": "held out"}
    return row | {"commit": json.loads((run.folder / "environment.json").read_text())["commit"] or "unknown"}


def measures_of(run: Run) -> dict[str, float]:
    """In percent, of the classes that the run held out: with its own vectors, and with mirror images."""
    summary = run.summary()
    if summary["chosen by"] != "held_out" or summary["best epoch"] != summary["epochs"]:
        raise ValueError(f"{run.folder} was not measured on held-out classes after its last epoch; delete it")
    found = {key: 100 * summary["validation"][key] for key in MEASURES}
    mirrored = Encoder.open(run.folder, flip=True)
    records = mirrored.records()
    pack, _ = pack_for(records, mirrored.side, "auto", make=False)
    held = records_to_search(records, "val")
    flipped = evaluate(mirrored, held, pack=pack, nearest=0, progress=False).metrics
    return found | {f"flip {key}": 100 * flipped[key] for key in MEASURES}


def sheets_of(rows: list[Row], name: str) -> list[Sheet]:
    """The tries from the best mAP@R to the worst, and in a table of their own those that stand apart."""
    together: dict[str, list[Row]] = {}
    for row in rows:
        together.setdefault(row["try"], []).append(row)
    order = sorted(together, key=lambda tried: -mean_of(together[tried], "mAP@R"))
    against = differences_of(together)
    sheets = []
    for title, apart in ((name, False), (f"{name}: other vectors", True)):
        names = [tried for tried in order if TRIES[tried].apart == apart]
        if names:
            columns = ("try", "settings", *MEASURES, *(f"{key} less {BASE}" for key in MEASURES), "p", "flip mAP@R")
            lines = tuple(line_of(together[tried], against.get(tried)) for tried in names)
            sheets.append(Sheet(title, (*columns, "seeds", "training minutes"), lines, notes_of(rows)))
    return sheets


def notes_of(rows: list[Row]) -> tuple[str, ...]:
    """What is to be known of all rows."""
    kinds = dict.fromkeys(
        ", ".join(f"{key} {row[key]}" for key in ("recipe", "set", "hardware", "commit") if key in row) for row in rows
    )
    said = (
        f"on held-out training classes; ± standard deviation over seeds; differences from {BASE} are paired over them"
    )
    return (f"{said}, p is that of mAP@R, corrected for all tries", *kinds)


def differences_of(together: dict[str, list[Row]]) -> dict[str, tuple[dict[str, Difference], float]]:
    """Of each try its differences from the base, where they have two seeds in common; and p of mAP@R, corrected."""
    base = {row["seed"]: row for row in together.get(BASE, [])}
    found = {}
    for tried, rows in together.items():
        pairs = [(base[row["seed"]], row) for row in rows if row["seed"] in base]
        if tried != BASE and len(pairs) > 1:
            both = {key: [[float(row[key]) for row in side] for side in zip(*pairs, strict=True)] for key in MEASURES}
            found[tried] = {key: paired_t(*sides) for key, sides in both.items()}
    corrected = holm([tests["mAP@R"].p for tests in found.values()])
    return {tried: (tests, p) for (tried, tests), p in zip(found.items(), corrected, strict=True)}


def line_of(rows: list[Row], against: tuple[dict[str, Difference], float] | None) -> tuple[Cell, ...]:
    tests, p = against or ({}, math.nan)
    values = [rows[0]["try"], rows[0].get("settings", ""), *(told_mean(rows, key) for key in MEASURES)]
    values += [told_difference(tests.get(key)) for key in MEASURES] + ["" if math.isnan(p) else f"{p:.3f}"]
    seconds = mean_of(rows, "training seconds")
    values += [told_mean(rows, "flip mAP@R"), ", ".join(row["seed"] for row in rows), f"{seconds / 60:.1f}"]
    return tuple(Cell(value, bold=p < 0.05 and key == 0) for key, value in enumerate(values))


def mean_of(rows: list[Row], key: str) -> float:
    return estimate([float(row[key]) for row in rows]).mean


def told_mean(rows: list[Row], key: str) -> str:
    found = estimate([float(row[key]) for row in rows])
    return f"{found.mean:.2f}" if found.n == 1 else f"{found.mean:.2f} ± {found.sd:.2f}"


def told_difference(found: Difference | None) -> str:
    if found is None:
        return ""
    interval = "" if math.isnan(found.low) else f" ({found.low:+.2f} to {found.high:+.2f})"
    return f"{found.difference:+.2f}{interval}"


def main() -> int:
    arguments = arguments_given()
    arguments.results.mkdir(parents=True, exist_ok=True)  # before anything is trained
    rows = Rows(arguments.results / f"tries_{arguments.recipe}.csv", "try", list(TRIES), ENDS)
    if arguments.table:
        print("\n\n".join(sheet.markdown() for sheet in sheets_of(rows.read(), rows.path.name)))
        return 0
    if arguments.minutes is not None:
        leave_after(arguments.minutes)

    def is_done(row: Row) -> bool:
        """With the same settings, here or on another machine."""
        return row.get("set", "") == told(arguments.set) and row.get("settings", "") == str(TRIES[row["try"]])

    asked = [(name, seed) for seed in arguments.seeds for name in arguments.only]
    failed = rows.fill(asked, is_done, lambda name, seed: row_of(name, seed, arguments))
    for sheet in sheets_of(rows.read(), rows.path.name):
        print(sheet.text(), end="\n\n")
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return int(bool(failed))


def leave_after(minutes: float) -> None:
    """A run that is under way then saves itself, as at any signal; what it told before is told this."""

    def leave(number: int, frame: object) -> None:
        print(f"{minutes:g} minutes are over; the same command goes on", file=sys.stderr, flush=True)
        raise SystemExit(0)

    signal.signal(signal.SIGUSR2, leave)
    timer = threading.Timer(60 * minutes, os.kill, (os.getpid(), signal.SIGUSR2))
    timer.daemon = True
    timer.start()


def arguments_given() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="cub_vits_best")
    parser.add_argument("--only", nargs="+", choices=TRIES, default=list(TRIES), metavar="TRY", help="of the tries")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a setting of every run")
    parser.add_argument(
        "--seeds", nargs="+", type=int, default=[0, 1, 2], help="every try with the first, then the next"
    )
    parser.add_argument("--minutes", type=float, help="stop in time, with what is under way saved")
    parser.add_argument("--out", default="runs/tries", help="where the runs are kept")
    parser.add_argument("--table", action="store_true", help="print the rows as Markdown, and train nothing")
    parser.add_argument("--results", type=Path, default=Path(__file__).parent / "results")
    return parser.parse_args()


if __name__ == "__main__":
    try:
        sys.exit(main())
    except Stopped as stopped:  # told to end: what was trained is saved, and every row that was measured is written
        print(stopped, file=sys.stderr)
        sys.exit(stopped.exit_code)
