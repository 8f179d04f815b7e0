"""Every loss trained once in the same setting: R@1 and mAP@R, and by the tree of labels H-AP, NDCG and the level above.

    python benchmarks/bench_family.py                                                     # Glyphs, on a CPU
    python benchmarks/bench_family.py --recipe cub_vits --set data.root=CUB_200_2011 --set model.weights=FILE

A run is kept below --out, and is not trained again. Results go to benchmarks/results/family_RECIPE.csv, a row as soon
as it is there; percent, of the epoch that the recipe chooses. One seed says nothing of small differences.
"""

from __future__ import annotations

import argparse
import csv
import sys
from pathlib import Path

import torch
from measure import provenance

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "src"))

from roadmap.config.composition import settings_from  # noqa: E402
from roadmap.data import pack_for  # noqa: E402
from roadmap.encoder import Encoder  # noqa: E402
from roadmap.engine import fit_or_resume  # noqa: E402
from roadmap.evaluation import evaluate  # noqa: E402
from roadmap.runs import Run  # noqa: E402

# A name is the loss; what else it needs stands beside it.
ROWS = {
    "smoothap": [],
    "supap": [],
    "roadmap": [],
    "supndcg": [],
    "recall_at_k": [],
    "suprank": [],
    "hierarchical_ap": [],
    "happier": [],
    "graded_ndcg": [],
    "triplet_sct": [],
    "sec": ["loss.of=multi_similarity", "model.normalise=false"],
    "proxy_gml": [],
    "proxy_nca_pp": [],
    "normalised_softmax": [],
    "contrastive_horde": ["auxiliary=horde"],
    "margin_distance_weighted": ["auxiliary=mic"],
    "contrastive_irt": ["memory=all"],
    "contrastive_xbm": ["memory=xbm"],
}


def row_of(name: str, arguments: argparse.Namespace) -> dict[str, str]:
    """Trains, or finds what was trained, and measures."""
    run = Path(arguments.out) / f"{arguments.recipe}_{name}_{arguments.seed}"
    own = [f"recipe={arguments.recipe}", f"loss={name}", *ROWS[name], f"seed={arguments.seed}", f"run={run}"]
    encoder = Encoder.open(fit_or_resume(settings_from([*own, *arguments.set]), quiet=True))
    pack, _ = pack_for(encoder.records(), encoder.side, "auto", make=False)
    found = evaluate(encoder, pack=pack, nearest=0, levels=True, progress=False).metrics
    shown = [key for key in found if key in ("R@1", "mAP@R", "H-AP", "ASI", "NDCG") or key.endswith((" R@1", " mAP@R"))]
    minutes = Run(run).summary()["training seconds"] / 60
    row = {"loss": name, "also": " ".join(ROWS[name]), **{key: f"{100 * found[key]:.2f}" for key in shown}}
    return row | {"training minutes": f"{minutes:.1f}", "seed": str(arguments.seed)}


def write(path: Path, rows: list[dict[str, str]]) -> None:
    names = list(dict.fromkeys(key for row in rows for key in row))
    with path.open("w", newline="") as file:
        table = csv.DictWriter(file, names, restval="", lineterminator="\n")
        table.writeheader()
        table.writerows(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="glyphs")
    parser.add_argument("--losses", nargs="+", choices=ROWS, default=list(ROWS))
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a setting of every run")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", default="runs/family", help="where the runs are kept")
    parser.add_argument("--results", type=Path, default=Path(__file__).parent / "results")
    arguments = parser.parse_args()
    path, rows = arguments.results / f"family_{arguments.recipe}.csv", []
    ran = provenance("cuda" if torch.cuda.is_available() else "cpu")  # now: the code that was loaded is this commit's
    for name in arguments.losses:
        rows.append(row_of(name, arguments) | ran)
        print("  ".join(f"{key} {value}" for key, value in rows[-1].items() if value), flush=True)
        write(path, rows)


if __name__ == "__main__":
    main()
