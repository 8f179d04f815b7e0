"""Every loss trained in the same setting: R@1 and mAP@R, and by the tree of labels H-AP, NDCG and the level above.

    python benchmarks/bench_family.py                                                     # Glyphs, on a CPU
    python benchmarks/bench_family.py --recipe cub_vits --set data.root=CUB_200_2011 --set model.weights=FILE
    python benchmarks/bench_family.py --recipe cub_vits ... --only roadmap happier --seeds 0 1 2
    python benchmarks/bench_family.py --recipe cub_resnet50_head ...    # what a frozen backbone permits; says what not
    python benchmarks/bench_family.py --recipe cub_vits --table         # Markdown of what is measured; trains nothing

The same command goes on where it was stopped, on another machine too: what has a row in
benchmarks/results/family_RECIPE.csv, which is there as soon as it is measured, is neither trained nor measured again
(delete the row for that), and a run that was stopped goes on from its folder below --out. Percent, of the epoch that
the recipe chooses, which each row names. One seed says nothing of small differences.
"""

from __future__ import annotations

import argparse
import csv
import json
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from statistics import mean, stdev

import torch
from measure import provenance

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "src"))

from roadmap.atomic import whole_file  # noqa: E402
from roadmap.config.composition import settings_from  # noqa: E402
from roadmap.config.settings import SettingError, Settings  # noqa: E402
from roadmap.data import pack_for  # noqa: E402
from roadmap.encoder import Encoder  # noqa: E402
from roadmap.engine import Stopped, fit_or_resume  # noqa: E402
from roadmap.engine.auxiliary import check_auxiliary  # noqa: E402
from roadmap.evaluation import evaluate  # noqa: E402
from roadmap.experiments.sheet import Cell, Sheet  # noqa: E402
from roadmap.runs import Run  # noqa: E402

# A name is the loss; what else it needs stands beside it. What a loss learns itself starts at random, where a network
# is only refined, and has a rate of its own: that of its authors, where theirs suits this kind of optimiser; else
# PROXIES, which is ours and was not tuned.
PROXIES = "optim.loss_lr=1e-2"
ROWS = {
    "roadmap": [],
    "supap": [],
    "smoothap": [],
    "happier": [PROXIES],
    "hierarchical_ap": [],
    "graded_ndcg": [],
    "suprank": [],
    "supndcg": [],
    "recall_at_k": [],
    "proxy_nca_pp": [PROXIES],
    "normalised_softmax": [PROXIES],
    "proxy_gml": ["optim.loss_lr=3e-2", "optim.loss_weight_decay=1e-4"],
    "contrastive_xbm": ["memory=xbm"],
    "contrastive_irt": ["memory=all"],
    "triplet_sct": [],
    "sec": ["loss.of=multi_similarity", "model.normalise=false"],
    "margin_distance_weighted": ["auxiliary=mic", "optim.loss_lr=5e-4", "optim.auxiliary_lr=1e-5"],
    "contrastive_horde": ["auxiliary=horde", "optim.auxiliary_lr=1e-5"],
}
KEYS = ("loss", "seed")  # of a row
ASKED = ("recipe", "set", "seed", "epochs", "epoch", "select")
RAN = ("device", "hardware", "torch", "commit", "date")  # `provenance`; the commit is that of the run
SHOWN = ("R@1", "mAP@R", "H-AP", "ASI", "NDCG")
OF_THE_MACHINE = ("data.root", "data.workers", "data.pack", "hardware")


def settings_of(name: str, seed: int, arguments: argparse.Namespace) -> Settings:
    own = [f"recipe={arguments.recipe}", f"loss={name}", *ROWS[name], f"seed={seed}"]
    return settings_from([*own, f"run={folder_of(name, seed, arguments)}", *arguments.set])


def told(arguments: argparse.Namespace) -> str:
    """What was set for every run and means something elsewhere; of a file only its name."""
    kept = (text for text in arguments.set if not text.startswith(OF_THE_MACHINE))
    return " ".join(sorted(re.sub(r"=.*/", "=", text) for text in kept))


def reason_against(name: str, arguments: argparse.Namespace) -> str:
    """Why the recipe cannot train with this loss at all, such as a module that looks at feature maps which a frozen
    backbone does not give; empty where it can."""
    try:
        settings = settings_of(name, 0, arguments)
    except (ValueError, TypeError):
        return ""  # a setting that is wrong, which is a failure and not a reason
    try:
        check_auxiliary(settings, None)
    except SettingError as error:
        return str(error)
    return ""


def row_of(name: str, seed: int, arguments: argparse.Namespace) -> dict[str, str]:
    """Trains, or finds what was trained, and measures."""
    run = Run(fit_or_resume(settings_of(name, seed, arguments), quiet=True))
    summary, found = run.summary(), metrics_of(run.folder)
    shown = [key for key in found if key in SHOWN or key.endswith((" R@1", " mAP@R"))]
    row = {"loss": name, "also": " ".join(ROWS[name]), **{key: f"{100 * found[key]:.2f}" for key in shown}}
    row |= {"training minutes": f"{summary['training seconds'] / 60:.1f}", "recipe": arguments.recipe}
    row |= {"set": told(arguments), "seed": str(seed), "epochs": str(summary["epochs"])}
    row |= {"epoch": str(summary["best epoch"]), "select": str(summary["chosen by"])}
    ran = json.loads((run.folder / "environment.json").read_text())
    return row | {"commit": ran["commit"] or "unknown"}


def folder_of(name: str, seed: int, arguments: argparse.Namespace) -> Path:
    return Path(arguments.out) / f"{arguments.recipe}_{name}_{seed}"


def metrics_of(run: Path) -> Mapping[str, float]:
    """A run whose loss knows the tree was measured by it when it ended; others are embedded once more."""
    (own,) = Run(run).summary()["after"].values()
    if "H-AP" in own:
        return dict(own)
    encoder = Encoder.open(run)
    pack, _ = pack_for(encoder.records(), encoder.side, "auto", make=False)
    return evaluate(encoder, pack=pack, nearest=0, levels=True, progress=False).metrics


def rows_of(path: Path) -> list[dict[str, str]]:
    """That a former command wrote; none where there was none."""
    if not path.is_file():
        return []
    with path.open(newline="") as file:
        return [{name: value for name, value in row.items() if value} for row in csv.DictReader(file)]


def write(path: Path, rows: list[dict[str, str]]) -> None:
    """Whole or not at all, in the order of ROWS, the seeds of a loss together."""
    rows.sort(key=lambda row: (list(ROWS).index(row["loss"]), int(row["seed"])))
    found = dict.fromkeys(key for row in rows for key in row)
    ends = ("training minutes", *ASKED, *RAN)
    names = [*(name for name in found if name not in ends), *ends]
    with whole_file(path) as temporary, open(temporary, "w", newline="") as file:
        table = csv.DictWriter(file, names, restval="", lineterminator="\n")
        table.writeheader()
        table.writerows(rows)


def is_done(name: str, seed: int, rows: list[dict[str, str]], arguments: argparse.Namespace) -> bool:
    """Measured with the same settings, here or on another machine; the oldest rows do not say which those were."""
    found = (row for row in rows if (row["loss"], row["seed"]) == (name, str(seed)))
    return any("recipe" not in row or row.get("set", "") == told(arguments) for row in found)


def sheet_of(rows: list[dict[str, str]], title: str) -> Sheet:
    """A row for each loss, means ± standard deviations where it has several seeds; what all rows have in common stands
    below, and what differs between them beside."""
    together: dict[str, list[dict[str, str]]] = {}
    for row in rows:
        together.setdefault(row["loss"], []).append(row)
    names = dict.fromkeys(key for row in rows for key in row if key not in ("also", "torch", "date", "seed"))
    alike = [key for key in (*ASKED, *RAN) if len({row.get(key, "") for row in rows}) == 1 and rows[0].get(key)]
    columns = [key for key in names if key not in alike]
    seeds = {loss: ", ".join(row["seed"] for row in found) for loss, found in together.items()}
    cells = [[Cell(told_of(found, key)) for key in columns] for found in together.values()]
    if "seed" not in alike:
        columns.append("seeds")
        cells = [[*line, Cell(seeds[loss])] for loss, line in zip(together, cells, strict=True)]
    common = [", ".join(f"{key} {rows[0][key]}" for key in alike)] if alike else []
    common += ["± standard deviation over the seeds"] if any("," in told for told in seeds.values()) else []
    return Sheet(title, tuple(columns), tuple(map(tuple, cells)), tuple(common))


def told_of(rows: list[dict[str, str]], key: str) -> str:
    """One value of a loss: as it stands, of several seeds the mean of numbers, and every word that occurs."""
    values = [row.get(key, "") for row in rows]
    if len(values) == 1 or key in (*ASKED, *RAN, "loss"):
        return ", ".join(dict.fromkeys(values))
    numbers = [float(value) for value in values if value]
    return f"{mean(numbers):.2f} ± {stdev(numbers):.2f}" if len(numbers) == len(values) else "-"


def main() -> int:
    arguments = arguments_given()
    arguments.results.mkdir(parents=True, exist_ok=True)  # before anything is trained
    path = arguments.results / f"family_{arguments.recipe}.csv"
    if arguments.table:
        print(sheet_of(rows_of(path), path.name).markdown())
        return 0
    against = {name: reason_against(name, arguments) for name in arguments.only}
    for name in (name for name, why in against.items() if why):
        print(f"left out  {name}: {against[name]}", flush=True)
    failed = measure([name for name, why in against.items() if not why], path, arguments)
    if rows := rows_of(path):
        print(sheet_of(rows, path.name).text())
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return int(bool(failed))


def measure(names: list[str], path: Path, arguments: argparse.Namespace) -> list[str]:
    """Writes a row for each loss and seed that has none; gives those that failed."""
    ran = provenance("cuda" if torch.cuda.is_available() else "cpu")
    failed = []
    for seed in arguments.seeds:
        for name in names:
            rows = rows_of(path)
            if is_done(name, seed, rows, arguments):
                continue
            torch.compiler.reset()  # what was compiled for the model of one run would be guarded against the next
            try:
                new = ran | row_of(name, seed, arguments)
            except (ValueError, TypeError, RuntimeError, OSError, ArithmeticError) as error:
                print(f"{name}, seed {seed}: {error}", file=sys.stderr, flush=True)
                failed.append(f"{name} {seed}")
                continue
            print("  ".join(f"{key} {value}" for key, value in new.items() if value), flush=True)
            write(path, [row for row in rows if [row[key] for key in KEYS] != [new[key] for key in KEYS]] + [new])
    return failed


def arguments_given() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="glyphs")
    parser.add_argument("--only", nargs="+", choices=ROWS, default=list(ROWS), metavar="LOSS", help="of the losses")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a setting of every run")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0], help="every loss with the first, then the next")
    parser.add_argument("--out", default="runs/family", help="where the runs are kept")
    parser.add_argument("--table", action="store_true", help="print the rows as Markdown, and train nothing")
    parser.add_argument("--results", type=Path, default=Path(__file__).parent / "results")
    return parser.parse_args()


if __name__ == "__main__":
    try:
        sys.exit(main())
    except Stopped as stopped:  # told to end: what was trained is saved, and every row that was measured is written
        print(stopped, file=sys.stderr)
        sys.exit(stopped.exit_code)
