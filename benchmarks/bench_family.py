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
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from statistics import mean, stdev

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "src"))

from run_rows import RAN, Row, Rows, told  # noqa: E402

from roadmap.config.composition import settings_from  # noqa: E402
from roadmap.config.settings import SettingError, Settings  # noqa: E402
from roadmap.data import pack_for  # noqa: E402
from roadmap.encoder import Encoder  # noqa: E402
from roadmap.engine import Stopped, fit_or_resume  # noqa: E402
from roadmap.engine.auxiliary import check_auxiliary  # noqa: E402
from roadmap.evaluation import evaluate  # noqa: E402
from roadmap.experiments.sheet import Cell, Sheet  # noqa: E402
from roadmap.runs import Run  # noqa: E402

# A name is the loss, or the settings name it; what else it needs stands beside it. What a loss learns itself starts at
# random, where a network is only refined, and has a rate of its own: that of its authors, where theirs suits this kind
# of optimiser; else PROXIES, which is ours and was not tuned.
PROXIES = "optim.loss_lr=1e-2"
ROWS = {
    "roadmap": [],
    "roadmap_matryoshka": ["loss=roadmap", "dims=[32,64]"],
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
CUT = {"roadmap": (32, 64), "roadmap_matryoshka": (32, 64)}  # measured with so many dimensions alone, too
ASKED = ("recipe", "set", "seed", "epochs", "epoch", "select")
ENDS = ("training minutes", *ASKED, *RAN)
SHOWN = ("R@1", "mAP@R", "H-AP", "ASI", "NDCG")


def settings_of(name: str, seed: int, arguments: argparse.Namespace) -> Settings:
    loss = [] if any(text.startswith("loss=") for text in ROWS[name]) else [f"loss={name}"]
    own = [f"recipe={arguments.recipe}", *loss, *ROWS[name], f"seed={seed}"]
    return settings_from([*own, f"run={folder_of(name, seed, arguments)}", *arguments.set])


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


def row_of(name: str, seed: int, arguments: argparse.Namespace) -> Row:
    """Trains, or finds what was trained, and measures."""
    run = Run(fit_or_resume(settings_of(name, seed, arguments), quiet=True))
    summary, found = run.summary(), metrics_of(run.folder, CUT.get(name, ()))
    shown = [key for key in found if key in SHOWN or key.endswith((" R@1", " mAP@R"))]
    row = {"loss": name, "also": " ".join(ROWS[name]), **{key: f"{100 * found[key]:.2f}" for key in shown}}
    row |= {"training minutes": f"{summary['training seconds'] / 60:.1f}", "recipe": arguments.recipe}
    row |= {"set": told(arguments.set), "seed": str(seed), "epochs": str(summary["epochs"])}
    row |= {"epoch": str(summary["best epoch"]), "select": str(summary["chosen by"])}
    ran = json.loads((run.folder / "environment.json").read_text())
    return row | {"commit": ran["commit"] or "unknown"}


def folder_of(name: str, seed: int, arguments: argparse.Namespace) -> Path:
    return Path(arguments.out) / f"{arguments.recipe}_{name}_{seed}"


def metrics_of(run: Path, dims: tuple[int, ...]) -> Mapping[str, float]:
    """A run whose loss knows the tree was measured by it when it ended; others are embedded once more."""
    (own,) = Run(run).summary()["after"].values()
    if "H-AP" in own:
        return dict(own)
    encoder = Encoder.open(run)
    pack, _ = pack_for(encoder.records(), encoder.side, "auto", make=False)
    return evaluate(encoder, pack=pack, nearest=0, levels=True, dims=dims, progress=False).metrics


def rows_at(arguments: argparse.Namespace) -> Rows:
    """The rows of a recipe, where they are kept."""
    return Rows(arguments.results / f"family_{arguments.recipe}.csv", "loss", list(ROWS), ENDS)


def sheet_of(rows: list[Row], title: str) -> Sheet:
    """A row for each loss, means ± standard deviations where it has several seeds; what all rows have in common stands
    below, and what differs between them beside."""
    together: dict[str, list[Row]] = {}
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
    common += ["± standard deviation over the seeds"] if any("," in many for many in seeds.values()) else []
    return Sheet(title, tuple(columns), tuple(map(tuple, cells)), tuple(common))


def told_of(rows: list[Row], key: str) -> str:
    """One value of a loss: as it stands, of several seeds the mean of numbers, and every word that occurs."""
    values = [row.get(key, "") for row in rows]
    if len(values) == 1 or key in (*ASKED, *RAN, "loss"):
        return ", ".join(dict.fromkeys(values))
    numbers = [float(value) for value in values if value]
    return f"{mean(numbers):.2f} ± {stdev(numbers):.2f}" if len(numbers) == len(values) else "-"


def main() -> int:
    arguments = arguments_given()
    arguments.results.mkdir(parents=True, exist_ok=True)  # before anything is trained
    rows = rows_at(arguments)
    if arguments.table:
        print(sheet_of(rows.read(), rows.path.name).markdown())
        return 0
    against = {name: reason_against(name, arguments) for name in arguments.only}
    for name in (name for name, why in against.items() if why):
        print(f"left out  {name}: {against[name]}", flush=True)
    names = [name for name, why in against.items() if not why]

    def is_done(row: Row) -> bool:
        """With the same settings, here or on another machine; the oldest rows do not say which those were."""
        return "recipe" not in row or row.get("set", "") == told(arguments.set)

    asked = [(name, seed) for seed in arguments.seeds for name in names]
    failed = rows.fill(asked, is_done, lambda name, seed: row_of(name, seed, arguments))
    if found := rows.read():
        print(sheet_of(found, rows.path.name).text())
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
    parser.add_argument("--table", action="store_true", help="print the rows as Markdown, and train nothing")
    parser.add_argument("--results", type=Path, default=Path(__file__).parent / "results")
    return parser.parse_args()


if __name__ == "__main__":
    try:
        sys.exit(main())
    except Stopped as stopped:  # told to end: what was trained is saved, and every row that was measured is written
        print(stopped, file=sys.stderr)
        sys.exit(stopped.exit_code)
