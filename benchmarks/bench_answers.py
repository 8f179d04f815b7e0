"""Better answers from the same model: what query expansion, augmentation, whitening, flips and re-ranking gain.

    python benchmarks/bench_answers.py vit_small_patch14_dinov2 --weights WEIGHTS --data cub --root CUB_200_2011
    python benchmarks/bench_answers.py runs/first

The test pictures are embedded once as they are and once averaged with their mirror images; every row is measured on
these. The whitening is fitted to the pictures that are searched, without their labels. Results go to
benchmarks/results/answers.csv, in the place of what is there of the same model; R@1 and mAP@R in percent, and the gain
over the plain search in points.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import sys
import time
from pathlib import Path

from measure import provenance

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "src"))

from roadmap.data import pack_for  # noqa: E402
from roadmap.embeddings import Embeddings  # noqa: E402
from roadmap.encoder import Encoder  # noqa: E402
from roadmap.evaluation import evaluate, records_to_search  # noqa: E402
from roadmap.refinement import Refinement  # noqa: E402

OPTIONS = {
    "plain": Refinement(),
    "expand 5": Refinement(expand=5),
    "expand 10": Refinement(expand=10),
    "augment 5": Refinement(augment=5),
    "augment 10": Refinement(augment=10),
    "whiten": Refinement(whiten="own"),
    "rerank 100": Refinement(rerank=100),
    "augment 10, expand 10": Refinement(augment=10, expand=10),
    "augment 10, expand 10, rerank 100": Refinement(augment=10, expand=10, rerank=100),
}
SHOWN = ("R@1", "mAP@R")


def both_embeddings(arguments: argparse.Namespace) -> dict[str, Embeddings]:
    """The test pictures as they are, and averaged with their mirror images."""
    names = ("device", "precision", "weights", "image")
    encoder = Encoder.open(arguments.model, **{name: getattr(arguments, name) for name in names})
    records = records_to_search(encoder.records(arguments.data, arguments.root))
    queries, gallery = records.evaluation()
    if gallery is not None:
        raise SystemExit(f"{records.name} has a gallery of its own; this compares test pictures among themselves")
    if arguments.limit:
        queries = queries.select(range(min(arguments.limit, len(queries))))
    pack, _ = pack_for(records, encoder.side, "auto", make=False)
    found = {}
    for flip in (False, True):
        began = time.monotonic()
        mirrored = dataclasses.replace(encoder, flip=flip)
        found["flip" if flip else ""] = mirrored.embed(queries, pack=pack, on_error="skip")
        print(f"embedded {len(queries):,} pictures in {time.monotonic() - began:.1f} s", flush=True)
    return found


def rows_of(found: dict[str, Embeddings]) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = []
    plain: dict[str, float] = {}
    for flip, embeddings in found.items():
        for option, refinement in OPTIONS.items():
            began = time.monotonic()
            metrics = evaluate(embeddings, refinement=refinement, nearest=0, progress=False).metrics
            seconds = time.monotonic() - began
            plain = plain or metrics
            row: dict[str, object] = {"option": ", ".join(filter(None, (flip, option if option != "plain" else "")))}
            row["option"] = row["option"] or "plain"
            for name in SHOWN:
                row |= {
                    name: f"{100 * metrics[name]:.2f}",
                    f"{name} gain": f"{100 * (metrics[name] - plain[name]):+.2f}",
                }
            rows.append(row | {"seconds": f"{seconds:.2f}"})
            print(rows[-1], flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a run, a checkpoint, or the name of a timm model")
    parser.add_argument("--weights", help="of a timm model: a file")
    parser.add_argument("--data", help="a dataset, such as cub; by default that of the run")
    parser.add_argument("--root", type=Path, help="where it lies")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--precision")
    parser.add_argument("--image", type=int, help="side of what a timm model sees")
    parser.add_argument("--limit", type=int, default=0, help="the first so many of the pictures only")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results", help="folder of the CSV")
    arguments = parser.parse_args()
    found = both_embeddings(arguments)
    about = found[""].about
    origin = {
        "model": about["name"],
        "digest": about["model"][:12],
        "image": about["crop"]["image"],
        "dataset": about["dataset"],
        "pictures": len(found[""]),
    }
    rows = [row | origin | provenance(found[""].vectors.device.type) for row in rows_of(found)]
    arguments.out.mkdir(parents=True, exist_ok=True)
    path = arguments.out / "answers.csv"
    kept = list(csv.DictReader(path.open())) if path.is_file() else []
    mine = (origin["digest"], origin["dataset"])
    kept = [row for row in kept if (row["digest"], row["dataset"]) != mine]
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows([*kept, *rows])


if __name__ == "__main__":
    main()
