"""Exact search on a GPU: 1,000 queries in many half-precision vectors.

    python benchmarks/bench_search_gpu.py --items 10000000

Random unit vectors of 384 dimensions, made on the GPU. Seconds: the best of five calls after one that is not counted,
from queries in the processor's memory to slots in it. recall@10: of 20 queries against float32 products of the same
stored vectors. Results go to benchmarks/results/search_cuda.csv.
"""

from __future__ import annotations

import argparse
import csv
import sys
import time
from pathlib import Path

import numpy as np
import torch
from measure import provenance

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "src"))
DIM, K, QUERIES = 384, 10, 1000


def measured(items: int) -> dict[str, object]:
    from roadmap.search.engines.exact import Snapshot

    generator = torch.Generator("cuda").manual_seed(0)
    kept = torch.empty(items, DIM, dtype=torch.float16, device="cuda")
    for rows in torch.split(kept, 1 << 20):
        rows.copy_(torch.nn.functional.normalize(torch.randn(rows.shape, generator=generator, device="cuda"), dim=1))
    held = Snapshot(0, (kept,), np.ones(items, np.bool_), kept.device)
    queries = torch.nn.functional.normalize(torch.randn(QUERIES, DIM), dim=1).numpy()
    seconds = []
    for _ in range(6):
        began = time.perf_counter()
        found = held.search(queries, K)[1]
        seconds.append(time.perf_counter() - began)
    hits = 0
    for row in range(20):
        query = torch.from_numpy(queries[row]).cuda()
        scores = torch.cat([rows.float() @ query for rows in torch.split(kept, 1 << 20)])
        hits += len(set(scores.topk(K).indices.tolist()) & set(found[row].tolist()))
    return {
        "items": items,
        "queries": QUERIES,
        "storage": "float16",
        "seconds": round(min(seconds[1:]), 4),
        "recall@10": hits / (20 * K),
        "peak_MiB": round(torch.cuda.max_memory_allocated() / (1 << 20), 1),
        **provenance("cuda"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--items", type=int, nargs="+", default=[10_000_000])
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results", help="folder of the CSV")
    arguments = parser.parse_args()
    rows = []
    for items in arguments.items:
        rows.append(measured(items))
        print(rows[-1], flush=True)
    arguments.out.mkdir(parents=True, exist_ok=True)
    with open(arguments.out / "search_cuda.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    main()
