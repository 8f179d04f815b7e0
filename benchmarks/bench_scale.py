"""What scale costs: step time and memory against batch, memory of earlier batches, and number of GPUs.

    python benchmarks/bench_scale.py                       # all parts, on the GPU at hand: minutes on an H200
    python benchmarks/bench_scale.py --part two_pass       # one of: two_pass, memory, resnet, gpus
    python benchmarks/bench_scale.py --small --device cpu  # tiny sizes and networks: whether it runs, not how fast

Each part writes benchmarks/results/scale_PART_DEVICE.csv and says whether its bar is met:

    two_pass  ViT-S, bfloat16: one step of two passes in chunks of 128 beside one pass over the same batch, and beside
              as many ordinary steps of 128. Bar: batch 8,192 in 1.4 times the time of 64 steps of 128, and 1.2 times
              the memory of one.
    memory    a call of ROADMAP with a memory of earlier batches, beside pytorch-metric-learning's CrossBatchMemory.
              Bar: 384 x 60,000, 57 positives, in 2 ms.
    resnet    ResNet-50, bfloat16, channels_last, eager and compiled: a step with a memory of 60,000 beside the same
              step without, taking turns. Bar: 5 % more.
    gpus      what one of W processes computes and gathers; the loss is measured at its true shapes on this GPU, the
              wires are not: their rates are given (--wires), and times on them are computed.

Pictures are random and made on the device, so reading and decoding are not in it. Every step has its optimiser's.
"""

from __future__ import annotations

import argparse
import csv
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from measure import MEBIBYTE, memory_mib, memory_peak_mib, provenance
from scale_parts import DIMENSIONS, Sizes, Trainer, embeddings, memory_step, peer_step, shares
from torch import Tensor

from roadmap.losses import ROADMAP, TwoPass

Row = dict[str, Any]
BARS = {"two_pass time": 1.4, "two_pass memory": 1.2, "memory ms": 2.0, "resnet": 1.05}
PARTS = ("two_pass", "memory", "resnet", "gpus")


def seconds(work: Callable[[], Any], device: str, repeats: int = 1) -> float:
    """Median of `repeats`; the device is idle before and after."""
    taken = []
    for _ in range(repeats):
        synchronise(device)
        began = time.perf_counter()
        work()
        synchronise(device)
        taken.append(time.perf_counter() - began)
    return statistics.median(taken)


def synchronise(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def measured(work: Callable[[], Any], device: str, repeats: int, steps: int = 1) -> Row:
    """Milliseconds of `steps` steps of `work` and the most memory in use during one, or why there are none."""
    try:
        work()
        memory_mib(device)
        work()
        peak = memory_peak_mib(device)
        taken = seconds(lambda: [work() for _ in range(steps)], device, repeats)
    except (torch.OutOfMemoryError, RuntimeError) as error:
        if "out of memory" not in str(error) and "CUDA error" not in str(error):
            raise
        if device == "cuda":
            torch.cuda.empty_cache()
        return {"ms": "", "peak_mib": "", "status": "out of memory"}
    return {"ms": round(1000 * taken, 3), "peak_mib": round(peak, 1), "status": "ok"}


def two_pass(sizes: Sizes, device: str) -> Iterator[Row]:
    """One pass and two, batch by batch; the ordinary steps of one chunk are what both are compared with."""
    trainer = Trainer(sizes.vit, sizes.image, device)
    chunk = sizes.chunk
    loss = TwoPass(ROADMAP(), trainer.model, chunk)

    def one(batch: int) -> Callable[[], None]:
        labels = torch.arange(batch, device=device) // 4
        return lambda: trainer.step(lambda: ROADMAP()(trainer.model(trainer.pictures(batch, 0)), labels))

    def two(batch: int) -> Callable[[], None]:
        labels = torch.arange(batch, device=device) // 4
        chunks = lambda: (trainer.pictures(chunk, i) for i in range(batch // chunk))  # noqa: E731
        return lambda: trainer.step(lambda: loss(chunks, labels))

    for batch in sizes.batches:
        steps = batch // chunk
        repeats = 3 if batch <= sizes.many * chunk else 1
        facts = {"batch": batch, "chunk": chunk}
        yield {"way": "steps of one chunk", **facts} | measured(one(chunk), device, repeats, steps)
        yield {"way": "two passes", **facts} | measured(two(batch), device, repeats)
        if batch <= sizes.one_pass:
            yield {"way": "one pass", "batch": batch, "chunk": ""} | measured(one(batch), device, repeats)


def memory(sizes: Sizes, device: str) -> Iterator[Row]:
    """A call, forwards and backwards, by queries and memory; ours and the peer's, on the same vectors."""
    for queries in sizes.queries:
        for size in sizes.memories:
            made = {"ROADMAP": memory_step(queries, size, device), "pml contrastive": peer_step(queries, size, device)}
            for name, step in made.items():
                if step is None or (name != "ROADMAP" and size > sizes.peer):
                    continue
                steps = sizes.steps if size <= 60_000 and name == "ROADMAP" else 2
                row = measured(step, device, sizes.rounds if steps == sizes.steps else 1, steps)
                row["ms"] = round(row["ms"] / steps, 4) if row["ms"] else ""
                yield {"loss": name, "queries": queries, "memory": size} | row


def resnet(sizes: Sizes, device: str) -> Iterator[Row]:
    """Rounds of steps without and with a memory, taking turns; the share is the median over the rounds."""
    for mode in sizes.modes:
        trainer = Trainer(sizes.resnet, sizes.image, device, compiled=mode == "compiled", channels_last=True)
        for batch in sizes.resnet_batches:
            steps = {size: trainer.memory_step(batch, size) for size in (0, sizes.resnet_memory)}
            peaks = {}
            for size, step in steps.items():
                for _ in range(3):  # compiles, chooses convolutions
                    step()
                memory_mib(device)
                step()
                peaks[size] = memory_peak_mib(device)
            rounds: list[dict[int, float]] = []
            for _ in range(sizes.rounds):
                taken = {n: seconds(lambda s=s: [s() for _ in range(sizes.steps)], device) for n, s in steps.items()}
                rounds.append({size: value / sizes.steps for size, value in taken.items()})
            ratios = [taken[sizes.resnet_memory] / taken[0] for taken in rounds]
            for size in steps:
                yield {
                    "step": mode, "batch": batch, "memory": size,
                    "ms": round(1000 * statistics.median(taken[size] for taken in rounds), 3),
                    "peak_mib": round(peaks[size], 1),
                    "of the step without": round(statistics.median(ratios), 4) if size else 1.0,
                    "lowest": round(min(ratios), 4) if size else 1.0,
                    "highest": round(max(ratios), 4) if size else 1.0,
                }  # fmt: skip


def gpus(sizes: Sizes, device: str, wires: dict[str, float]) -> Iterator[Row]:
    """Rows of one process against all that is gathered; and what gathering takes on given wires."""
    trainer = Trainer(sizes.vit, sizes.image, device)
    labels = torch.arange(sizes.chunk, device=device) // 4
    images = trainer.pictures(sizes.chunk, 0)
    step = lambda: trainer.step(lambda: ROADMAP()(trainer.model(images), labels))  # noqa: E731
    ordinary = measured(step, device, 3, 5)["ms"] / 5 / sizes.chunk  # of a picture
    for rows in sizes.rows:
        model = rows * ordinary * (1 if rows <= sizes.chunk else 4 / 3)  # one more pass forwards
        for processes in sizes.processes:
            batch = rows * processes
            if rows * batch > sizes.pairs:
                continue
            names = torch.arange(batch, device=device) // 4
            everything = embeddings(names).requires_grad_()
            own = torch.arange(rows, device=device)

            def work(everything: Tensor = everything, names: Tensor = names, own: Tensor = own) -> None:
                everything.grad = None
                ROADMAP()(everything[: len(own)], names[: len(own)], None, everything, names, own).backward()

            row = measured(work, device, 3, 3)
            row["ms"] = round(row["ms"] / 3, 4) if row["ms"] else ""
            moved = 2 * (processes - 1) * rows * DIMENSIONS * 4  # vectors forwards, their gradients back
            facts = {"rows": rows, "gpus": processes, "batch": batch, "loss_ms": row["ms"], "peak_mib": row["peak_mib"]}
            facts |= {"model_ms": round(model, 3), "moved_mib": round(moved / MEBIBYTE, 2), "status": row["status"]}
            yield facts | shares(moved, model + (row["ms"] or 0.0), wires)


def say_bars(part: str, rows: list[Row], sizes: Sizes) -> None:
    """Whether the part's bar is met, from its own rows."""
    if part == "two_pass":
        batch = sizes.many * sizes.chunk
        found = {row["way"]: row for row in rows if row["batch"] == batch}
        if {"two passes", "steps of one chunk"} <= set(found):
            ours, steps = found["two passes"], found["steps of one chunk"]
            for name, column in (("time", "ms"), ("memory", "peak_mib")):
                say(f"batch {batch:,}, {name}", ours[column] / steps[column], BARS[f"two_pass {name}"], "x")
    elif part == "memory":
        for row in rows:
            if (row["queries"], row["memory"], row["loss"]) == (384, 60_000, "ROADMAP"):
                say("384 x 60,000", row["ms"], BARS["memory ms"], " ms")
    elif part == "resnet":
        for row in rows:
            if row["memory"]:
                say(f"{row['step']}, batch {row['batch']}, memory", row["of the step without"], BARS["resnet"], "x")


def say(what: str, value: float, bar: float, unit: str) -> None:
    print(f"  {what}: {value:.3f}{unit}, bar {bar}{unit}: {'met' if value <= bar else 'MISSED'}", flush=True)


def write(path: Path, rows: list[Row], facts: dict[str, str]) -> None:
    columns = list(dict.fromkeys(name for row in rows for name in row))
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, [*columns, *facts], restval="")
        writer.writeheader()
        writer.writerows({**row, **facts} for row in rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=PARTS, nargs="*", default=list(PARTS))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--small", action="store_true", help="tiny sizes, to see that it runs")
    parser.add_argument(
        "--wires", type=float, nargs=2, default=[450.0, 50.0], metavar=("INSIDE", "BETWEEN"),
        help="GB/s that a GPU sends within a machine and between machines (NVLink 4, 400 Gbit/s)",
    )  # fmt: skip
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args()
    sizes = Sizes.small() if options.small else Sizes()
    wires = dict(zip(("inside", "between"), options.wires, strict=True))
    facts = provenance(options.device)
    print(" | ".join(f"{name}: {value}" for name, value in facts.items()))
    options.out.mkdir(parents=True, exist_ok=True)
    work = {
        "two_pass": lambda: two_pass(sizes, options.device),
        "memory": lambda: memory(sizes, options.device),
        "resnet": lambda: resnet(sizes, options.device),
        "gpus": lambda: gpus(sizes, options.device, wires),
    }
    for part in options.part:
        rows: list[Row] = []
        began = time.perf_counter()
        for row in work[part]():
            rows.append(row)
            print(f"  {part}: {', '.join(f'{name} {value}' for name, value in row.items())}", flush=True)
            # after each row: a stopped run keeps them
            write(options.out / f"scale_{part}_{options.device}.csv", rows, facts)
        say_bars(part, rows, sizes)
        print(f"  {part} took {time.perf_counter() - began:.0f} s")


if __name__ == "__main__":
    main()
