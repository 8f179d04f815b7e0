"""Pictures a second, delivered as normalised 224-pixel crops: torchvision's ImageFolder + DataLoader beside a pack.

    python benchmarks/bench_loading.py --root CUB_200_2011          # CPU, or the GPU if there is one
    python benchmarks/bench_loading.py --root DIR --dataset folder

The same pictures, crops (scale 0.16-1, ratio 3/4-4/3), flips and normalisation for all. Rounds alternate between
the methods and the median is kept. "decode only" is the rate of processes that are running already; start_seconds says
what starting them took. "pack" is the whole call, and its start_seconds is the part that starting processes takes in
it. Writes benchmarks/results/loading_<device>.csv.
"""

from __future__ import annotations

import argparse
import csv
import functools
import multiprocessing
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import torch
from measure import provenance

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

from roadmap.colours import IMAGENET_MEAN, IMAGENET_STD
from roadmap.data import Batches, Pack, Records, dataset, training_batches
from roadmap.data.batches.samplers import MPerClass
from roadmap.data.checking import decoding_failures
from roadmap.data.pictures.images import Box, thumbnail, upright
from roadmap.data.pictures.packing import pack
from roadmap.data.pictures.processes import answers

SIZE = 224
SIDE = 256  # of a pack
COLUMNS = ["method", "pictures_per_second", "slowest_round", "fastest_round", "ratio_to_baseline", "rounds", "pictures"]
COLUMNS += ["batch", "size", "workers", "device", "hardware", "load_before", "load_after", "torch", "commit", "date"]
COLUMNS += ["start_seconds"]
Rates = dict[str, list[float]]
Seconds = dict[str, float]


def rate(batches: Iterable[object], count: int, batch: int, device: torch.device, warm: int = 4) -> float:
    """Pictures a second over `count` batches after `warm` of them; the device has finished at both ends."""
    started = 0.0
    for done, _ in enumerate(batches):
        if done in (warm, warm + count):
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            if done > warm:
                return count * batch / (time.perf_counter() - started)
            started = time.perf_counter()
    raise SystemExit(f"too few pictures for {warm + count} batches of {batch}; use a smaller --batch or --batches")


def endless(batches: Batches) -> Iterator[object]:
    while True:
        yield from batches


def image_folder(root: Path, batch: int, workers: int, device: torch.device) -> Iterator[object]:
    """The plain way: decode every file every time, in worker processes."""
    from torchvision import transforms as tv
    from torchvision.datasets import ImageFolder

    steps = [tv.RandomResizedCrop(SIZE, scale=(0.16, 1.0)), tv.RandomHorizontalFlip(), tv.ToTensor()]
    folder = ImageFolder(str(root), tv.Compose([*steps, tv.Normalize(IMAGENET_MEAN, IMAGENET_STD)]))
    loader = torch.utils.data.DataLoader(
        folder,
        batch,
        shuffle=True,
        num_workers=workers,
        pin_memory=device.type == "cuda",
        drop_last=True,
        persistent_workers=True,
    )
    while True:
        for images, labels in loader:
            yield images.to(device, non_blocking=True), labels.to(device, non_blocking=True)


def packed(records: Records, pictures: Pack, place: str, batch: int, workers: int, device: torch.device) -> Batches:
    sampler = MPerClass(records.labels, batch)
    return training_batches(
        records,
        sampler,
        pictures=pictures,
        device=device,
        workers=workers,
        place=place,  # type: ignore[arg-type]
    )


def packing_rates(records: Records, folder: Path, workers: int, rounds: int) -> tuple[Rates, Seconds, Pack]:
    """What the cores decode when they do nothing else, what packing makes of it, and what starting processes takes.

    Pictures a second. "decode only" counts from when all its processes are there; "pack" is the whole call.
    """
    found: Rates = {"decode only": [], "pack": []}
    starts: dict[str, list[float]] = {"decode only": [], "pack": []}
    for number in range(rounds):
        shutil.rmtree(folder, ignore_errors=True)
        decoded, start = decoding_rate(records, workers)
        found["decode only"].append(decoded)
        starts["decode only"].append(start)
        started = time.perf_counter()
        list(answers(decoding_failures, [()] * workers, workers))  # processes that come up, decode nothing, and go
        starts["pack"].append(time.perf_counter() - started)
        started = time.perf_counter()
        pictures = pack(records, SIDE, folder, workers=workers, progress=False)
        found["pack"].append(len(records) / (time.perf_counter() - started))
        for name, values in found.items():
            print(f"{name:32s} {values[number]:12,.0f} pictures/s, start-up {starts[name][number]:.2f} s", flush=True)
    return found, {name: statistics.median(values) for name, values in starts.items()}, pictures


def decoding_rate(records: Records, workers: int) -> tuple[float, float]:
    """Pictures a second that `workers` running processes decode and drop, and the seconds it took to start them."""
    pictures = [(str(records.path(i)), records.box(i)) for i in range(len(records))]
    context = multiprocessing.get_context("spawn")
    started = time.perf_counter()
    everyone = context.Barrier(workers + 1)
    with context.Pool(workers, initializer=everyone.wait) as pool:
        everyone.wait()
        ready = time.perf_counter()
        count = sum(pool.imap_unordered(decoded_and_dropped, pictures, chunksize=16))
        return count / (time.perf_counter() - ready), ready - started


def decoded_and_dropped(picture: tuple[str, Box | None]) -> int:
    """What packing does to a picture, without keeping it."""
    thumbnail(upright(*picture), SIDE)
    return 1


def measured(arguments: argparse.Namespace, records: Records, folder: Path) -> tuple[Rates, Seconds]:
    device, batch, workers = torch.device(arguments.device), arguments.batch, arguments.workers
    rates, starts, pictures = packing_rates(records, folder, workers, arguments.rounds)
    pictures = pictures.of(records)
    ways: dict[str, Callable[[], Iterator[object]]] = {
        "ImageFolder + DataLoader": functools.partial(image_folder, arguments.folder, batch, workers, device)
    }
    if device.type == "cpu":
        ways["pack, CPU threads"] = lambda: endless(packed(records, pictures, "auto", batch, workers, device))
    else:
        ways["pack, resident on GPU"] = lambda: endless(packed(records, pictures, "resident", batch, workers, device))
        ways["pack, streamed"] = lambda: endless(packed(records, pictures, "streamed", batch, workers, device))
    found: Rates = {name: [] for name in ways}
    for _ in range(arguments.rounds):
        for name, way in ways.items():
            # the faster ways need more batches for a timing as long
            few = arguments.batches * (1 if "DataLoader" in name else 4 if device.type == "cpu" else 20)
            found[name].append(rate(way(), few, batch, device))
            print(f"{name:32s} {found[name][-1]:12,.0f} pictures/s", flush=True)
    return rates | found, starts


def write(path: Path, rates: Rates, starts: Seconds, arguments: argparse.Namespace, pictures: int) -> None:
    median = {name: statistics.median(values) for name, values in rates.items()}
    baseline = dict.fromkeys(rates, median["ImageFolder + DataLoader"])
    baseline |= {"pack": median["decode only"], "decode only": median["decode only"]}
    about = provenance(arguments.device)
    about["hardware"] = f"{about['hardware']}, {os.cpu_count()} cores"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(COLUMNS)
        for name, values in rates.items():
            speed = [f"{v:.0f}" for v in (median[name], min(values), max(values))]
            facts = [len(values), pictures, arguments.batch, SIZE, arguments.workers, arguments.device]
            load = [f"{arguments.load:.1f}", f"{os.getloadavg()[0]:.1f}"]
            ratio = f"{median[name] / baseline[name]:.2f}"
            start = f"{starts[name]:.2f}" if name in starts else ""
            where = [about["hardware"], *load, about["torch"], about["commit"], about["date"]]
            writer.writerow([name, *speed, ratio, *facts, *where, start])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, required=True, help="folder of the dataset")
    parser.add_argument("--dataset", default="cub", help="cub, or folder for a folder per class")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument(
        "--batches", type=int, default=20, help="timed batches of the DataLoader; packs take 4 x (GPU 20 x)"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--pack", type=Path, help="where to pack; a temporary folder by default")
    parser.add_argument("--out", type=Path, help="CSV file")
    arguments = parser.parse_args()
    arguments.load = os.getloadavg()[0]  # a busy machine slows the baseline and the pack alike, but not equally
    records = dataset(arguments.dataset, arguments.root)
    arguments.folder = records.root / "images" if arguments.dataset == "cub" else records.root
    device = torch.device(arguments.device).type
    out = arguments.out or Path(__file__).parent / "results" / f"loading_{device}.csv"
    with tempfile.TemporaryDirectory() as temporary:
        rates, starts = measured(arguments, records, arguments.pack or Path(temporary) / "pack")
    write(out, rates, starts, arguments, len(records))
    print(out.read_text())


if __name__ == "__main__":
    main()
