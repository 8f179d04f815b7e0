"""Every loss trained in the same setting: R@1 and mAP@R, and by the tree of labels H-AP, NDCG and the level above.

    python benchmarks/bench_family.py                                                     # Glyphs, on a CPU
    python benchmarks/bench_family.py --recipe cub_vits --set data.root=CUB_200_2011 --set model.weights=FILE
    python benchmarks/bench_family.py --recipe cub_vits ... --only roadmap happier --seeds 0 1 2

The same command goes on where it was stopped: a run is kept below --out and is not trained again, and a row of
benchmarks/results/family_RECIPE.csv, which is there as soon as it is measured, is not measured again. Percent, of the
epoch that the recipe chooses. One seed says nothing of small differences.
"""

from __future__ import annotations

import argparse
import csv
import sys
from collections.abc import Mapping
from pathlib import Path

import torch
from measure import provenance

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "src"))

from roadmap.atomic import whole_file  # noqa: E402
from roadmap.config.composition import settings_from  # noqa: E402
from roadmap.data import pack_for  # noqa: E402
from roadmap.encoder import Encoder  # noqa: E402
from roadmap.engine import Stopped, fit_or_resume  # noqa: E402
from roadmap.evaluation import evaluate  # noqa: E402
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
RAN = ("device", "hardware", "torch", "commit", "date")  # `provenance`
SHOWN = ("R@1", "mAP@R", "H-AP", "ASI", "NDCG")


def row_of(name: str, seed: int, arguments: argparse.Namespace) -> dict[str, str]:
    """Trains, or finds what was trained, and measures."""
    run = folder_of(name, seed, arguments)
    own = [f"recipe={arguments.recipe}", f"loss={name}", *ROWS[name], f"seed={seed}", f"run={run}"]
    fit_or_resume(settings_from([*own, *arguments.set]), quiet=True)
    found = metrics_of(run)
    shown = [key for key in found if key in SHOWN or key.endswith((" R@1", " mAP@R"))]
    minutes = Run(run).summary()["training seconds"] / 60
    row = {"loss": name, "also": " ".join(ROWS[name]), **{key: f"{100 * found[key]:.2f}" for key in shown}}
    return row | {"training minutes": f"{minutes:.1f}", "seed": str(seed)}


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
    ends = ("training minutes", "seed", *RAN)
    names = [*(name for name in found if name not in ends), *ends]
    with whole_file(path) as temporary, open(temporary, "w", newline="") as file:
        table = csv.DictWriter(file, names, restval="", lineterminator="\n")
        table.writeheader()
        table.writerows(rows)


def is_done(name: str, seed: int, rows: list[dict[str, str]], arguments: argparse.Namespace) -> bool:
    here = (folder_of(name, seed, arguments) / "summary.json").is_file()
    return here and any((row["loss"], row["seed"]) == (name, str(seed)) for row in rows)


def main() -> int:
    arguments = arguments_given()
    arguments.results.mkdir(parents=True, exist_ok=True)  # before anything is trained
    path = arguments.results / f"family_{arguments.recipe}.csv"
    ran = provenance("cuda" if torch.cuda.is_available() else "cpu")  # now: the code that was loaded is this commit's
    failed = []
    for seed in arguments.seeds:
        for name in arguments.only:
            rows = rows_of(path)
            if is_done(name, seed, rows, arguments):
                continue
            torch.compiler.reset()  # what was compiled for the model of one run would be guarded against the next
            try:
                new = row_of(name, seed, arguments) | ran
            except (ValueError, TypeError, RuntimeError, OSError, ArithmeticError) as error:
                print(f"{name}, seed {seed}: {error}", file=sys.stderr, flush=True)
                failed.append(f"{name} {seed}")
                continue
            print("  ".join(f"{key} {value}" for key, value in new.items() if value), flush=True)
            write(path, [row for row in rows if [row[key] for key in KEYS] != [new[key] for key in KEYS]] + [new])
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return int(bool(failed))


def arguments_given() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="glyphs")
    parser.add_argument("--only", nargs="+", choices=ROWS, default=list(ROWS), metavar="LOSS", help="of the losses")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a setting of every run")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0], help="every loss with the first, then the next")
    parser.add_argument("--out", default="runs/family", help="where the runs are kept")
    parser.add_argument("--results", type=Path, default=Path(__file__).parent / "results")
    return parser.parse_args()


if __name__ == "__main__":
    try:
        sys.exit(main())
    except Stopped as stopped:  # told to end: what was trained is saved, and every row that was measured is written
        print(stopped, file=sys.stderr)
        sys.exit(stopped.exit_code)
