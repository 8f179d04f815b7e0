"""Retrieval metrics, ours beside pytorch-metric-learning's AccuracyCalculator (+ faiss): time and memory in one run.

    python benchmarks/bench_metrics.py --device cpu --scale 20000
    python benchmarks/bench_metrics.py --device cuda --scale all        # sop, inat, million

Every measurement has a process of its own. Seconds: the best of several calls, after one that is not counted; beside
them the processor seconds of all threads. Memory: the most that the call takes beside its arguments (resident set on
the CPU, torch's allocator on the GPU). Peers that are not installed are skipped, and said so. Results go to
benchmarks/results/metrics_<device>.csv, after every measurement: a run that is stopped keeps what it has.
"""

from __future__ import annotations

import argparse
import csv
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from measure import memory_mib, memory_peak_mib, provenance
from torch import Tensor

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "src"))

# name: items, dimensions, items in a class
SCALES = {"sop": (60_502, 512, 5), "inat": (136_093, 512, 58), "million": (1_000_000, 128, 10)}
WHO = {
    "roadmap": "R@1/10/100/1000, P@1, R-precision, mAP@R, mAP",
    "roadmap ties=mean": "the same, ties averaged",
    "pml k=max_bin_count": "P@1, R-precision, mAP@R",
    "pml k=1000": "P@1, R-precision, mAP@R (R@1000 needs 1000 neighbours)",
    "pml k=None": "P@1, R-precision, mAP@R, mAP (needs the whole ranking)",
    "scores": "float32 scores in blocks, nothing more",
    "scores, top 1000": "float32 scores in blocks and their 1000 largest",
}
RUN_BY = {
    "cpu": ["roadmap", "roadmap ties=mean", "pml k=max_bin_count", "pml k=1000", "pml k=None"],
    "cuda": ["scores", "scores, top 1000", "roadmap", "roadmap ties=mean"],
}


def data(items: int, dim: int, per_class: int, device: str) -> tuple[Tensor, Tensor]:
    """Unit vectors around class centres, hard enough that positives are spread over the ranking."""
    generator = torch.Generator(device).manual_seed(0)
    labels = torch.arange(items, device=device) % (items // per_class)
    vectors = torch.randn(items // per_class, dim, generator=generator, device=device)[labels]
    vectors.add_(torch.randn(items, dim, generator=generator, device=device), alpha=2.5)
    vectors /= vectors.norm(dim=1, keepdim=True)
    return vectors, labels


def call(who: str, vectors: Tensor, labels: Tensor) -> Callable[[], dict[str, float]]:
    if who.startswith("roadmap"):
        from roadmap.metrics import retrieval_metrics

        ties = "mean" if "mean" in who else "pessimistic"
        return lambda: retrieval_metrics(vectors, labels, ks=(1, 10, 100, 1000), ties=ties, progress=False)
    if who.startswith("scores"):
        return lambda: blocked_scores(vectors, 1000 if "top" in who else 0)
    import faiss  # noqa: F401 - the calculator needs it; better to fail here
    from pytorch_metric_learning.utils.accuracy_calculator import AccuracyCalculator

    include = ["precision_at_1", "r_precision", "mean_average_precision_at_r"]
    k = {"max_bin_count": "max_bin_count", "1000": 1000, "None": None}[who.split("=")[1]]
    calculator = AccuracyCalculator(include=include + ["mean_average_precision"] * (k is None), k=k)
    return lambda: dict(calculator.get_accuracy(vectors, labels, vectors, labels, ref_includes_query=True))


def blocked_scores(vectors: Tensor, top: int) -> dict[str, float]:
    for block in vectors.split(4096):
        scores = block @ vectors.T
        if top:
            scores.topk(top, dim=1)
    return {}


def measure(who: str, device: str, items: int, dim: int, per_class: int, repeats: int) -> dict[str, Any]:
    vectors, labels = data(items, dim, per_class, device)
    work = call(who, vectors, labels)
    before = memory_mib(device)
    seconds, processor = [], []
    for _ in range(repeats + 1):
        start, spent = time.perf_counter(), time.process_time()
        values = work()
        if device == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
        processor.append(time.process_time() - spent)
    peak = memory_peak_mib(device)
    return {
        "seconds": round(min(seconds[1:] or seconds), 4),
        "cpu_seconds": round(min(processor[1:] or processor), 4),
        "extra_MiB": round(peak - before, 1),
        "peak_MiB": round(peak, 1),
        "mAP@R": round(values.get("mAP@R", values.get("mean_average_precision_at_r", float("nan"))), 6),
        "mAP": round(values.get("mAP", values.get("mean_average_precision", float("nan"))), 6),
    }


def measured_apart(who: str, device: str, size: tuple[int, int, int], repeats: int, limit: float) -> dict[str, Any]:
    """`measure` in a fresh process; a dict with the reason when it gives none."""
    arguments = [sys.executable, __file__, "--measure", json.dumps([who, device, *size, repeats])]
    try:
        done = subprocess.run(arguments, capture_output=True, text=True, timeout=limit, check=False)
    except subprocess.TimeoutExpired:
        return {"skipped": f"not done in {limit:.0f} s"}
    if done.returncode:
        killed = "killed: it needs more memory than there is"
        return {"skipped": killed if done.returncode == -9 else (done.stderr.strip().splitlines() or ["died"])[-1]}
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def versions() -> dict[str, str]:
    found = {}
    for package in ("triton", "numpy", "pytorch-metric-learning", "faiss-cpu"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "absent"
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--scale", default="20000", help="a number of items, or sop, inat, million, all")
    parser.add_argument("--dim", type=int, default=512, help="dimensions where --scale is a number")
    parser.add_argument("--rounds", type=int, default=2, help="processes for each contender, taking turns")
    parser.add_argument("--repeats", type=int, default=3, help="timed calls in each process")
    parser.add_argument("--limit", type=float, default=540.0, help="seconds for one measurement")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results", help="folder of the CSV")
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(measure(*json.loads(options.measure))))
        return
    path = options.out / f"metrics_{options.device}.csv"
    about = provenance(options.device) | versions()
    finished: list[dict[str, Any]] = []
    for scale in list(SCALES) if options.scale == "all" else [options.scale]:
        rows: list[dict[str, Any]] = []
        for rows in measured_scale(scale, options):
            write([row | about for row in [*finished, *rows]], path)
        finished += rows
        for row in rows:
            print_row(row)
    print(f"wrote {path}")


def measured_scale(scale: str, options: argparse.Namespace) -> Iterator[list[dict[str, Any]]]:
    """Rows of the contenders at one scale, again after every measurement."""
    size = SCALES[scale] if scale in SCALES else (int(scale), options.dim, 5)
    contenders = ["roadmap"] if scale == "million" else RUN_BY[options.device]
    best: dict[str, dict[str, Any]] = {}
    for _ in range(options.rounds):  # in turn, so that a busy minute of the machine meets them all
        for who in contenders:
            if "skipped" in best.get(who, {}) or (who in best and who == "pml k=None"):
                continue
            repeats = 0 if who == "pml k=None" else options.repeats
            found = measured_apart(who, options.device, size, repeats, options.limit)
            best[who] = found if who not in best else better(best[who], found)
            what = {"scale": scale, "items": size[0], "dim": size[1]}
            yield [what | {"who": name, "computes": WHO[name]} | best[name] for name in contenders if name in best]


def better(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """The least time and the most memory of two measurements."""
    if "skipped" in other:
        return one
    least, most = ("seconds", "cpu_seconds"), ("extra_MiB", "peak_MiB")
    return other | {key: min(one[key], other[key]) for key in least} | {key: max(one[key], other[key]) for key in most}


def print_row(row: dict[str, Any]) -> None:
    head = f"{row['scale']:>8} {row['items']:>9,} x {row['dim']:<4} {row['who']:<20}"
    if "skipped" in row:
        print(f"{head} skipped: {row['skipped']}", flush=True)
    else:
        print(f"{head} {row['seconds']:>9.3f} s  {row['extra_MiB']:>9.1f} MiB  {row['computes']}", flush=True)


def write(rows: list[dict[str, Any]], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    columns = list(dict.fromkeys(name for row in sorted(rows, key=len, reverse=True) for name in row))
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    main()
