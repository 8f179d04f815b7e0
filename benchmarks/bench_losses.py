"""Rank losses side by side: time and peak memory of forward + backward against batch size.

    python benchmarks/bench_losses.py                  # the device at hand
    python benchmarks/bench_losses.py --device cpu
    python benchmarks/bench_losses.py --only graded    # losses of graded relevance beside SupAP, at 4,096 and 16,384
    python benchmarks/bench_losses.py --only measures  # other measures of the ranks, likewise

Runs ours, the plain version (the equations by autograd) and pytorch-metric-learning's SmoothAP and FastAP in one
process on the same embeddings, prints the README's table, and writes benchmarks/results/losses_<device>.csv. The floor
of each of our rows is counted from rates measured in the same run (docs/kernels.md).
"""

from __future__ import annotations

import argparse
import csv
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

import torch
from measure import peak_mib, provenance
from torch import Tensor

from roadmap.losses import (
    HAPPIER,
    ROADMAP,
    GradedNDCG,
    HierarchicalAP,
    RecallAtK,
    SmoothAP,
    SupAP,
    SupNDCG,
    SupRank,
    calibration,
)
from roadmap.losses.comparison import Comparison
from roadmap.losses.rank_ap import h_minus, heaviside, mean_ap_loss, plain_average_precision, saturation_point

DIMENSIONS = 512
PER_CLASS = 4
MEASURES_AT = (4096, 16384)  # where other measures of the ranks stand beside SupAP; on a CPU at every size
Loss = Callable[[Tensor, Tensor], Tensor]


def plain_roadmap(embeddings: Tensor, labels: Tensor) -> Tensor:
    """ROADMAP by autograd over the equations as written."""
    c = Comparison.of(embeddings, labels)
    unit = torch.nn.functional.normalize(c.embeddings)
    scores, positives, negatives = unit @ unit.T, c.positives(include_self=True), c.negatives
    ap = plain_average_precision(
        scores, positives, negatives, heaviside, lambda t: h_minus(t, 0.01, 100.0, saturation_point(0.01))
    )
    pairs = c.positives(include_self=False)
    return 0.5 * mean_ap_loss(ap, positives) + 0.5 * calibration(scores, pairs, negatives)


def peers() -> dict[str, Loss]:
    try:
        from pytorch_metric_learning.losses import FastAPLoss, SmoothAPLoss
    except ImportError:
        print("pytorch-metric-learning is not installed: its rows are left out")
        return {}
    return {"pml SmoothAP": SmoothAPLoss(), "pml FastAP": FastAPLoss()}


def measures(size: int, device: str) -> dict[str, Loss]:
    """Other measures of the ranks that SupAP counts; a step should take at most 1.5 times as long as SupAP's."""
    if device != "cpu" and size not in MEASURES_AT:
        return {}
    classes = size // PER_CLASS + 1
    proxies = {
        f"SupRank {name}": SupRank(classes, DIMENSIONS, measure=name).to(device) for name in ("ap", "ndcg", "recall")
    }
    return {"SupNDCG": SupNDCG(), "RecallAtK": RecallAtK(), **proxies}


def graded(size: int, device: str) -> dict[str, Loss]:
    """Losses of graded relevance; a step should take at most 1.5 times as long as SupAP's over the classes alone."""
    happier = HAPPIER(size // PER_CLASS + 1, DIMENSIONS).to(device)
    return {"HierarchicalAP": HierarchicalAP(), "HAPPIER": happier, "GradedNDCG": GradedNDCG()}


def tree_batch(size: int, device: str, per_genus: int) -> tuple[Tensor, Tensor]:
    """As `batch`, but the classes of a genus share half of their centre: their members score 0.2 on each other. Paths
    of two levels, (B, 2)."""
    generator = torch.Generator().manual_seed(size)
    labels = torch.arange(size) // PER_CLASS
    genera = labels // per_genus
    genus = torch.randn(int(genera[-1]) + 1, DIMENSIONS, generator=generator)
    species = torch.randn(int(labels[-1]) + 1, DIMENSIONS, generator=generator)
    x = 0.5**0.5 * (genus[genera] + species[labels]) + 1.2 * torch.randn(size, DIMENSIONS, generator=generator)
    order = torch.randperm(size, generator=generator)
    paths = torch.stack([genera, labels], 1)
    return x[order].to(device).contiguous(), paths[order].to(device).contiguous()


def batch(size: int, device: str, per_class: int = PER_CLASS, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Half-trained embeddings: members of a class score 0.4 on each other, others 0 give or take 0.04. Shuffled."""
    generator = torch.Generator().manual_seed(
        seed
    )  # on the CPU, where the first centres do not hang on how many follow
    centres = torch.randn(size // per_class + 1, DIMENSIONS, generator=generator).to(device)
    generator.manual_seed(seed + size)
    labels = torch.arange(size, device=device) // per_class
    x = centres[labels] + 1.2 * torch.randn(size, DIMENSIONS, generator=generator).to(device)
    order = torch.randperm(size, generator=generator).to(device)
    return x[order].contiguous(), labels[order]


def step_of(loss: Loss, x: Tensor, *rest: Tensor, **named: Tensor) -> Callable[[], None]:
    x = x.detach().requires_grad_()

    def step() -> None:
        x.grad = None
        loss(x, *rest, **named).backward()  # type: ignore[no-untyped-call]

    return step


def milliseconds(step: Callable[[], None], device: str, budget: float) -> float:
    step()
    if device == "cuda":
        from triton.testing import do_bench

        torch.cuda.synchronize()
        return float(do_bench(step, warmup=50, rep=1000 * budget, return_mode="median"))
    times = []
    began = time.perf_counter()
    while len(times) < 3 or (time.perf_counter() - began < budget and len(times) < 200):
        start = time.perf_counter()
        step()
        times.append(1000 * (time.perf_counter() - start))
    return median(times)


def measured(name: str, step: Callable[[], None], size: int, device: str, budget: float) -> dict[str, Any]:
    row: dict[str, Any] = {"loss": name, "batch": size, "ms": "", "peak_mib": "", "status": "ok"}
    try:
        row["ms"] = round(milliseconds(step, device, budget), 4)
        row["peak_mib"] = round(peak_mib(step, device), 1)
    except torch.OutOfMemoryError:
        row["status"] = "out of memory"
        torch.cuda.empty_cache()
    except (RuntimeError, ValueError) as error:
        row["status"] = str(error).split("\n")[0][:80]
    print(f"  {name:22s} {size:>7d} {row['ms']!s:>10} ms {row['peak_mib']!s:>9} MiB  {row['status']}", flush=True)
    return row


def rates() -> dict[str, float]:
    """What this GPU reaches here and now: float32 scores per second by each route, and sigmoids per second."""
    from gpu_rates import measured_rates

    found = measured_rates()
    for name, value in found.items():
        print(f"  {name:42s} {value / 1e12:8.1f} T/s")
    return found


def floor_ms(M: int, N: int, pairs: int, found: dict[str, float], products: int) -> float:
    """Matrix work at the rate of the best product of float32 accuracy, or the sigmoids: whichever takes longer.

    `products` counts (M, N, D) products: scores forward and again backward, and one for each side with a gradient: 4.
    Within one batch, where scores are symmetric, half of them is enough, and one product with G + Gᵀ: 2.
    """
    matrix = products * 2 * M * N * DIMENSIONS / max(found["float32 matmul (cuBLAS)"], found["split float16 matmul"])
    sigmoids = 2 * pairs * N / found["sigmoids"]
    return 1000 * max(matrix, sigmoids)


def run(device: str, sizes: list[int], budget: float) -> Iterator[dict[str, Any]]:
    ours: dict[str, Loss] = {"ROADMAP": ROADMAP(), "SupAP": SupAP(), "SmoothAP": SmoothAP()}
    others: dict[str, Loss] = {"plain ROADMAP": plain_roadmap, **peers()}
    found = rates() if device == "cuda" else {}
    limit: dict[str, int] = {}
    for size in sizes:
        x, labels = batch(size, device)
        more = measures(size, device)
        for name, loss in {**ours, **more, **others}.items():
            if size > limit.get(name, size) or (
                name == "pml SmoothAP" and device == "cpu" and size > 512
            ):  # 5 N³ floats
                continue
            row = measured(name, step_of(loss, x, labels), size, device, budget)
            if (name in ours or name in more) and found:
                row["floor_ms"], row["symmetric_floor_ms"] = (
                    round(floor_ms(size, size, size * PER_CLASS, found, products), 4) for products in (4, 2)
                )
            if row["status"] != "ok" or (row["ms"] and row["ms"] > 20_000):
                limit[name] = size
            yield row


def beside_supap(only: str, device: str, sizes: list[int], budget: float, per_genus: int) -> Iterator[dict[str, Any]]:
    """One family of losses beside SupAP, and how many times as long each takes."""
    for size in sizes:
        x, paths = tree_batch(size, device, per_genus) if only == "graded" else batch(size, device)
        classes = paths[:, -1].contiguous() if only == "graded" else paths
        others = graded(size, device) if only == "graded" else measures(size, device)
        supap = measured("SupAP", step_of(SupAP(), x, classes), size, device, budget)
        yield supap
        for name, loss in others.items():
            row = measured(name, step_of(loss, x, paths), size, device, budget)
            if row["ms"] and supap["ms"]:
                print(f"  {'':22s} {row['ms'] / supap['ms']:.2f} times SupAP")
            yield row


def memory_rows(device: str, budget: float) -> Iterator[dict[str, Any]]:
    """384 queries against 60,000 remembered vectors without gradient, 57 positives each."""
    queries, gallery, each = (384, 60_000, 57) if device == "cuda" else (64, 2_000, 8)
    x, labels = batch(queries, device)  # the centres of its classes are the first of the gallery's
    remembered, ref_labels = batch(gallery, device, per_class=each)
    step = step_of(ROADMAP(), x, labels, ref_emb=remembered, ref_labels=ref_labels)
    yield measured(f"ROADMAP x {gallery} memory", step, queries, device, budget)


def print_table(rows: list[dict[str, Any]]) -> None:
    names = list(dict.fromkeys(r["loss"] for r in rows))
    sizes = list(dict.fromkeys(r["batch"] for r in rows))
    print("\n| batch | " + " | ".join(names) + " |\n|---" * 1 + "|---" * len(names) + "|")
    for size in sizes:
        cells = []
        for name in names:
            row = next((r for r in rows if r["loss"] == name and r["batch"] == size), None)
            if row is None:
                cells.append("")
            elif row["status"] == "ok":
                cells.append(f"{row['ms']:.3g} ms, {row['peak_mib']:.0f} MiB")
            else:
                cells.append(row["status"])
        print(f"| {size} | " + " | ".join(cells) + " |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--sizes", type=int, nargs="*", help="batch sizes (default: a range that fits the device)")
    parser.add_argument("--seconds", type=float, default=0.5, help="time spent on each measurement")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--only", choices=["graded", "measures"], help="one family beside SupAP, at 4096 and 16384")
    parser.add_argument("--per-genus", type=int, default=4, help="classes in a genus, for --only graded")
    args = parser.parse_args()
    default = [128, 384, 1024, 2048, 4096, 16384, 65536, 131072] if args.device == "cuda" else [64, 128, 384, 1024]
    facts = provenance(args.device)
    print(" | ".join(f"{k}: {v}" for k, v in facts.items()))
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / f"losses_{f'{args.only}_' if args.only else ''}{args.device}.csv"
    rows: list[dict[str, Any]] = []
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # a time limit: then what was measured is kept too
    try:
        if args.only:
            sizes = args.sizes or list(MEASURES_AT)
            for row in beside_supap(args.only, args.device, sizes, args.seconds, args.per_genus):
                rows.append(row)
        else:
            rows.extend(memory_rows(args.device, args.seconds))
            for row in run(args.device, args.sizes or default, args.seconds):
                rows.append(row)
    finally:  # what was measured is kept, whatever stops the rest
        with path.open("w", newline="") as file:
            columns = ["loss", "batch", "ms", "floor_ms", "symmetric_floor_ms", "peak_mib", "status", *facts]
            writer = csv.DictWriter(file, columns, restval="")
            writer.writeheader()
            writer.writerows({**row, **facts} for row in rows)
    print_table(rows)
    print(f"\nwritten: {path}")


if __name__ == "__main__":
    main()
