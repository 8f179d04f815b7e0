"""The whole loop of training with its pictures in GPU memory beside the same loop with a pack that is not.

    python benchmarks/bench_streaming.py --models vit_small_patch14_dinov2             # pictures cut out of noise
    python benchmarks/bench_streaming.py --root CUB_200_2011 --models resnet50

The loop is that of bench_training.py, which is what `roadmap train` runs. The same model, compiled once, takes turns
with

- "resident": the decoded pack lies in GPU memory;
- "streamed": it stays in files that the system has in memory, as of a pack larger than the GPU's memory and smaller
  than the host's: threads copy the rows of the crops to pinned memory, ahead of use;
- "streamed from disk": the system was told to forget the files before each round, as of a pack larger than the host's
  memory; a round shows no picture twice;
- "compressed": a compressed pack whose pictures are decoded by processes on the host, each time.

A compressed pack that fits decoded into GPU memory is decoded once into it, and is "resident" from then on;
decoding_seconds is what that took. ratio is to "resident" of the same round, the median of rounds. One row for each,
in benchmarks/results/streaming_<device>.csv.
"""

from __future__ import annotations

import argparse
import csv
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from measure import provenance

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

from bench_loading import dropped
from bench_training import MODELS, job, loop, rate, synchronise
from many_pictures import made_pictures

from roadmap.data import Batches, Pack, Records, dataset, pack_for, training_batches
from roadmap.data.batches.delivery import Resident
from roadmap.engine.job import Job

WAYS = {
    "resident": ("yes", "resident"),
    "streamed": ("yes", "streamed"),
    "streamed from disk": ("yes", "streamed"),
    "compressed": ("compressed", "streamed"),
}


def batches_of(work: Job, pack: Pack, place: str, workers: int | None) -> Batches:
    train, settings = work.splits.train, work.settings
    return training_batches(
        train,
        work.sampler,
        work.pictures.random,
        pack.of(train),
        work.arithmetic.device,
        settings.seed,
        workers,
        place=place,  # type: ignore[arg-type]
        side=settings.data.side,
    )


def decoding_seconds(work: Job, pack: Pack) -> float:
    """Until a compressed pack lies in the memory of the device, decoded."""
    began = time.perf_counter()
    Resident(pack.of(work.splits.train), work.pictures.random, work.arithmetic.device, os.cpu_count() or 1)
    synchronise(work.arithmetic.device)
    return time.perf_counter() - began


def measured(
    name: str, batch: int, options: argparse.Namespace, records: Records, packs: dict[str, Pack], folder: Path
) -> list[dict[str, object]]:
    work = job(name, batch, options.compile, options, records, folder)
    device = work.arithmetic.device
    # on the CPU there is one place: the ways are run, not compared
    contenders: dict[str, Callable[[], int]] = {
        way: loop(work, batches_of(work, packs[kind], place, options.workers)) for way, (kind, place) in WAYS.items()
    }
    decoding = decoding_seconds(work, packs["compressed"]) if device.type == "cuda" else float("nan")
    rates: dict[str, list[float]] = {way: [] for way in contenders}
    for way in reversed(contenders):  # compiles and records while processes and threads prepare batches, as a run does
        contenders[way]()
    for _ in range(options.rounds):
        for way, run in contenders.items():
            if way == "streamed from disk":
                dropped(packs["yes"])
            rates[way].append(rate(run, device))
            print(f"{name}, batch {batch}: {way:20s} {rates[way][-1]:8,.0f} pictures/s", flush=True)
    work.run.close()
    rows = []
    for way, values in rates.items():
        ratios = [value / base for value, base in zip(values, rates["resident"], strict=True)]
        row: dict[str, object] = {"model": name, "batch": batch, "compile": options.compile, "pictures are": way}
        row |= {"pictures/s": round(statistics.median(values)), "ratio": round(statistics.median(ratios), 3)}
        row |= {"lowest": round(min(ratios), 3), "highest": round(max(ratios), 3), "rounds": len(values)}
        row |= {"pictures": len(work.splits.train), "steps": options.steps}
        row |= {"pack bytes": sum(shard.nbytes for shard in packs[WAYS[way][0]].shards)}
        rows.append(row | {"decoding_seconds": round(decoding, 1) if way == "compressed" else ""})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, help="folder of the dataset; pictures made of noise without")
    parser.add_argument("--dataset", default="cub")
    parser.add_argument("--pictures", type=int, default=16384, help="made of noise, without --root")
    parser.add_argument("--weights", help="file of the ViT's weights; random without")
    parser.add_argument("--models", nargs="*", default=list(MODELS))
    parser.add_argument("--batches", type=int, nargs="*", default=[384], help="pictures in a batch")
    parser.add_argument("--compile", default="default", help="mode of torch.compile")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--workers", type=int, help="threads or processes on the host; one per core by default")
    parser.add_argument("--steps", type=int, default=30, help="steps in a round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="where files and packs are written; a temporary folder by default")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    cuda = options.device != "cpu" and torch.cuda.is_available()
    out = options.out or Path(__file__).parent / "results" / f"streaming_{'cuda' if cuda else 'cpu'}.csv"
    rows: list[dict[str, object]] = []
    with tempfile.TemporaryDirectory(dir=options.folder) as temporary:
        folder = Path(temporary)
        os.environ["ROADMAP_CACHE"] = str(folder / "cache")
        if options.root is None:
            records = made_pictures(folder / "made", options.pictures, [], 256, options.workers)
            options.root = records.root
        else:
            records = dataset(options.dataset, options.root)
        packs: dict[str, Pack] = {}
        for kind in ("yes", "compressed"):
            began = time.perf_counter()
            found, said = pack_for(records, 256, kind, progress=False)
            assert found is not None
            packs[kind] = found
            print(f"{said}, {time.perf_counter() - began:.1f} s", flush=True)
        for name in options.models:
            for batch in options.batches:
                rows += measured(name, batch, options, records, packs, folder)
                write(out, rows, "cuda" if cuda else "cpu")
    print(out.read_text())


def write(out: Path, rows: list[dict[str, object]], device: str) -> None:
    about: dict[str, object] = {"cores": os.cpu_count()} | provenance(device)
    with out.open("w", newline="") as file:  # after each model: a stopped run keeps them
        writer = csv.DictWriter(file, fieldnames=list(rows[0] | about))
        writer.writeheader()
        writer.writerows(row | about for row in rows)


if __name__ == "__main__":
    main()
