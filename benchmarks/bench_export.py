"""What an ONNX file costs and gains beside torch: R@1, mAP@R, size and speed, in float32 and in int8.

    python benchmarks/bench_export.py runs/first
    python benchmarks/bench_export.py efficientnet_lite0 --weights WEIGHTS --data cub --root CUB_200_2011

All test pictures are embedded by torch, by the file in float32 and by the one in int8, and each is evaluated by itself.
Pictures a second: a batch of 32 through the model, nothing else, the three in turn, the median of the turns; `load`:
processes that wanted a core meanwhile. Results go to benchmarks/results/export.csv, in the place of what is there of
the same model.
"""

from __future__ import annotations

import argparse
import csv
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from measure import provenance

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "src"))

from roadmap.embeddings import Embeddings  # noqa: E402
from roadmap.encoder import Encoder  # noqa: E402
from roadmap.encoder.exporting import export  # noqa: E402
from roadmap.evaluation import evaluate, records_to_search  # noqa: E402

BATCH, TURNS = 32, 15


def row_of(found: Embeddings, plain: dict[str, float], right: torch.Tensor) -> dict[str, Any]:
    """Metrics in percent, what they lose against torch in points, and how near the vectors are."""
    metrics = evaluate(found, nearest=0, progress=False).metrics
    plain.update(metrics if not plain else {})
    cosines = (found.vectors * right).sum(1)
    row: dict[str, Any] = {
        "lowest cosine": f"{float(cosines.min()):.4f}",
        "median cosine": f"{float(cosines.median()):.4f}",
    }
    for name in ("R@1", "mAP@R"):
        row |= {name: f"{100 * metrics[name]:.2f}", f"{name} change": f"{100 * (metrics[name] - plain[name]):+.2f}"}
    return row


def speeds(encoders: dict[str, Encoder]) -> dict[str, float]:
    """Pictures a second of each model, taking turns."""
    side = encoders["torch"].crop.size
    images, spent = torch.randn(BATCH, 3, side, side), {name: [] for name in encoders}  # type: ignore[var-annotated]
    with torch.inference_mode():
        for _ in range(TURNS + 1):  # the first warms up
            for name, encoder in encoders.items():
                began = time.perf_counter()
                encoder.model(images)
                spent[name].append(time.perf_counter() - began)
    return {name: BATCH / float(np.median(times[1:])) for name, times in spent.items()}


def measured(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    names = ("weights", "image")
    encoder = Encoder.open(arguments.model, device="cpu", **{name: getattr(arguments, name) for name in names})
    queries, gallery = records_to_search(encoder.records(arguments.data, arguments.root)).evaluation()
    if gallery is not None:
        raise SystemExit(f"{queries.name} has a gallery of its own; this compares test pictures among themselves")
    if arguments.limit:
        queries = queries.select(range(min(arguments.limit, len(queries))))
    rows: list[dict[str, Any]] = []
    plain: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        files = {name: Path(folder) / f"{name}.onnx" for name in ("float32", "int8")}
        encoder.model.eval()
        for name, path in files.items():
            done = export(encoder, path, queries, int8=name == "int8")
            kinds = {"torch": done.torch} if not rows else {}
            for kind, found in {**kinds, name: done.onnx}.items():
                size = "" if kind == "torch" else f"{path.stat().st_size / 1e6:.1f}"
                rows.append({"form": kind, **row_of(found, plain, done.torch.vectors), "MB": size})
                print(rows[-1], flush=True)
        rates = speeds({"torch": encoder, **{name: Encoder.open(path) for name, path in files.items()}})
    origin = {
        "model": encoder.name,
        "digest": encoder.digest[:12],
        "image": encoder.crop.size,
        "dataset": queries.name,
        "pictures": len(queries),
        "load": round(os.getloadavg()[0], 1),
    }
    return [row | {"pictures a second": f"{rates[row['form']]:.0f}"} | origin | provenance("cpu") for row in rows]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a run, a checkpoint, or the name of a timm model")
    parser.add_argument("--weights", help="of a timm model: a file")
    parser.add_argument("--image", type=int, help="side of what a timm model sees")
    parser.add_argument("--data", help="a dataset, such as cub; by default that of the run")
    parser.add_argument("--root", type=Path, help="where it lies")
    parser.add_argument("--limit", type=int, default=0, help="the first so many of the pictures only")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results", help="folder of the CSV")
    arguments = parser.parse_args()
    rows = measured(arguments)
    arguments.out.mkdir(parents=True, exist_ok=True)
    path = arguments.out / "export.csv"
    kept = list(csv.DictReader(path.open())) if path.is_file() else []
    mine = (rows[0]["digest"], rows[0]["dataset"])
    kept = [row for row in kept if (row["digest"], row["dataset"]) != mine]
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows([*kept, *rows])


if __name__ == "__main__":
    main()
