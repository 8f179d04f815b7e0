"""Where the time of a loss goes on a GPU: every kernel of one step, and what the step takes from the host's side.

    python benchmarks/profile_losses.py                          # ROADMAP at 4,096 and 16,384
    python benchmarks/profile_losses.py --loss SmoothAP --sizes 4096 --per-class 64
    python benchmarks/profile_losses.py --loss HierarchicalAP --per-genus 4      # labels are paths of two levels

Prints the median time of a step, how much of it the GPU works, and the kernels by the time they take.
"""

from __future__ import annotations

import argparse

import torch
from bench_losses import batch, milliseconds, step_of, tree_batch
from measure import provenance
from torch.profiler import ProfilerActivity, profile

from roadmap import losses

STEPS = 20


def print_kernels(loss: torch.nn.Module, x: torch.Tensor, labels: torch.Tensor, seconds: float) -> None:
    step = step_of(loss, x, labels)
    whole = milliseconds(step, "cuda", seconds)
    for _ in range(3):
        step()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as recorded:
        for _ in range(STEPS):
            step()
        torch.cuda.synchronize()
    rows = [row for row in recorded.key_averages() if row.self_device_time_total > 0]
    busy = sum(row.self_device_time_total for row in rows) / STEPS / 1000
    each = len(x) / len(labels.unique(dim=0))
    print(f"\n{type(loss).__name__}, batch {len(x)}, {each:.0f} in a class: {whole:.3f} ms, the GPU works {busy:.3f}")
    print(f"{'ms a step':>10} {'launches':>9} {'us each':>9}  kernel")
    for row in sorted(rows, key=lambda row: -row.self_device_time_total):
        total = row.self_device_time_total
        print(f"{total / STEPS / 1000:10.4f} {row.count / STEPS:9.1f} {total / row.count:9.1f}  {row.key[:90]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--loss", default="ROADMAP", help="a loss of roadmap.losses that takes no arguments")
    parser.add_argument("--sizes", type=int, nargs="*", default=[4096, 16384], help="batch sizes")
    parser.add_argument("--per-class", type=int, default=4, help="items of a class")
    parser.add_argument("--per-genus", type=int, help="classes of a genus, 4 items each: labels of a tree")
    parser.add_argument("--seconds", type=float, default=0.5, help="time spent on each measurement")
    args = parser.parse_args()
    print(" | ".join(f"{k}: {v}" for k, v in provenance("cuda").items()))
    for size in args.sizes:
        tree = args.per_genus is not None
        x, labels = tree_batch(size, "cuda", args.per_genus) if tree else batch(size, "cuda", args.per_class)
        print_kernels(getattr(losses, args.loss)(), x, labels, args.seconds)


if __name__ == "__main__":
    main()
