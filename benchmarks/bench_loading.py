"""Pictures a second, delivered as normalised 224-pixel crops: torchvision's ImageFolder + DataLoader beside a pack.

    python benchmarks/bench_loading.py --root CUB_200_2011          # CPU, or the GPU if there is one
    python benchmarks/bench_loading.py --root DIR --dataset folder

    python benchmarks/bench_loading.py --pictures 16384             # pictures made of noise

The same pictures, crops (scale 0.16-1, ratio 3/4-4/3), flips and normalisation for all. Rounds alternate between
the methods and the median is kept; ratio_to_baseline is to the first of them; start_seconds is until the first batch.
"rows gathered" is what the host does for a streamed pack, without a device: copies of the rows that the crops need.
"decoded by the GPU" is what torchvision's nvJPEG takes for the whole pictures, without a crop; it is here to be
compared. "from disk": the system was told to forget the pack's files before. How fast a pack is made is measured by
bench_packing.py, what streaming costs the whole loop of training by bench_streaming.py. Writes
benchmarks/results/loading_<device>.csv.
"""

from __future__ import annotations

import argparse
import csv
import functools
import itertools
import mmap
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from measure import provenance

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

from many_pictures import made_pictures

from roadmap.colours import IMAGENET_MEAN, IMAGENET_STD
from roadmap.data import Batches, MPerClass, Pack, RandomCrop, Records, dataset, training_batches
from roadmap.data.batches.delivery import Buffer, Order, Streamed, ahead_of_use
from roadmap.data.pictures.packing import pack

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


def dropped(pack: Pack) -> None:
    """The system forgets what it has read of the pack's files, so that the next reader waits for the disk."""
    for shard in pack.shards:
        mapped = getattr(shard, "_mmap", None)
        if mapped is not None:
            mapped.madvise(mmap.MADV_DONTNEED)
    for path in pack.folder.glob("pixels-*"):
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def gathered(records: Records, pack: Pack, batch: int, threads: int) -> Iterator[object]:
    """What a streamed pack does on the host: the rows of the crops are copied into one buffer for each batch."""
    sampler, crop = MPerClass(records.labels, batch), RandomCrop(SIZE)
    source = Streamed(pack, crop, torch.device("cpu"), threads)
    buffers = [Buffer(pinned=False) for _ in range(4 * threads)]

    def orders() -> Iterator[tuple[Order, Buffer]]:
        for position in itertools.count():
            epoch, number = divmod(position, sampler.batches)
            if number == 0:
                batches = list(sampler.epoch_batches(epoch))
            draws = crop.draws(batch, 0, position)
            yield Order(position, batches[number], draws), buffers[position % len(buffers)]

    with ThreadPoolExecutor(threads) as pool:
        yield from ahead_of_use(pool, lambda asked: source.fill(*asked), orders(), 2 * threads)


def decoded_on_gpu(records: Records, pack: Pack, batch: int, device: torch.device) -> Iterator[object]:
    """JPEGs of a compressed pack, whole and uncut, by nvJPEG. Its pixels are not Pillow's: nothing uses it."""
    from torchvision.io import ImageReadMode, decode_jpeg

    sampler = MPerClass(records.labels, batch)
    for epoch in itertools.count():
        for indices in sampler.epoch_batches(epoch):
            files = [torch.from_numpy(pack.kept_bytes(int(i)).copy()) for i in indices]
            yield decode_jpeg(files, mode=ImageReadMode.RGB, device=device)


def ways_of(
    arguments: argparse.Namespace, records: Records, packs: dict[str, Pack], device: torch.device
) -> dict[str, Callable[[], Iterator[object]]]:
    batch, workers = arguments.batch, arguments.workers

    def read(kind: str, place: str) -> Callable[[], Iterator[object]]:
        return lambda: endless(packed(records, packs[kind], place, batch, workers, device))

    def from_disk(way: Callable[[], Iterator[object]]) -> Callable[[], Iterator[object]]:
        def run() -> Iterator[object]:
            dropped(packs["pack"])
            return way()

        return run

    ways: dict[str, Callable[[], Iterator[object]]] = {}
    ways["ImageFolder + DataLoader"] = functools.partial(image_folder, arguments.folder, batch, workers, device)
    if device.type == "cpu":
        ways |= {f"{kind}, CPU threads": read(kind, "auto") for kind in packs}
    else:
        ways |= {f"{kind}, resident on GPU": read(kind, "resident") for kind in packs}
        ways |= {f"{kind}, streamed": read(kind, "streamed") for kind in packs}
        ways["pack, streamed from disk"] = from_disk(read("pack", "streamed"))
        ways["compressed pack, decoded by the GPU"] = functools.partial(
            decoded_on_gpu, records, packs["compressed pack"], batch, device
        )
    for threads in sorted({1, min(workers, 8), workers}):
        compressed = functools.partial(gathered, records, packs["compressed pack"], batch, threads)
        ways[f"rows of compressed pack, {threads} threads"] = compressed
        gather = functools.partial(gathered, records, packs["pack"], batch, threads)
        ways |= {f"rows gathered, {threads} threads": gather, f"rows from disk, {threads} threads": from_disk(gather)}
    return ways


def measured(arguments: argparse.Namespace, records: Records, folder: Path) -> tuple[Rates, Seconds]:
    device, batch, workers = torch.device(arguments.device), arguments.batch, arguments.workers
    packs = {
        name: pack(records, SIDE, folder / name, workers=workers, progress=False, compressed=name != "pack").of(records)
        for name in ("pack", "compressed pack")
    }
    ways = ways_of(arguments, records, packs, device)
    found: Rates = {name: [] for name in ways}
    starts: Seconds = {}
    for _ in range(arguments.rounds):
        for name, way in ways.items():
            # the faster ways need more batches for a timing as long
            slow = "DataLoader" in name or "compressed" in name
            few = arguments.batches * (1 if slow else 4 if device.type == "cpu" else 20)
            if "disk" in name:  # each picture once: the second time it is in memory
                few = max(1, min(few, len(records) // batch - 6))
            began = time.perf_counter()
            batches = way()
            next(batches)  # of a resident pack: it is in GPU memory then
            starts[name] = time.perf_counter() - began
            found[name].append(rate(batches, few, batch, device))
            print(f"{name:32s} {found[name][-1]:12,.0f} pictures/s, first after {starts[name]:.2f} s", flush=True)
            del batches
    return found, starts


def write(path: Path, rates: Rates, starts: Seconds, arguments: argparse.Namespace, pictures: int) -> None:
    median = {name: statistics.median(values) for name, values in rates.items()}
    baseline = median[next(iter(median))]
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
            ratio = f"{median[name] / baseline:.2f}"
            start = f"{starts[name]:.2f}" if name in starts else ""
            where = [about["hardware"], *load, about["torch"], about["commit"], about["date"]]
            writer.writerow([name, *speed, ratio, *facts, *where, start])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, help="folder of the dataset")
    parser.add_argument("--pictures", type=int, default=8192, help="made of noise, without --root")
    parser.add_argument("--dataset", default="cub", help="cub, or folder for a folder per class")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument(
        "--batches", type=int, default=20, help="timed batches of the DataLoader; packs take 4 x (GPU 20 x)"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--pack", type=Path, help="folder to pack in; that of temporary files by default")
    parser.add_argument("--out", type=Path, help="CSV file")
    arguments = parser.parse_args()
    arguments.load = os.getloadavg()[0]  # a busy machine slows the baseline and the pack alike, but not equally
    device = torch.device(arguments.device).type
    out = arguments.out or Path(__file__).parent / "results" / f"loading_{device}.csv"
    with tempfile.TemporaryDirectory(dir=arguments.pack) as temporary:
        if arguments.root is None:
            records = made_pictures(Path(temporary) / "made", arguments.pictures, [], SIDE, arguments.workers)
            arguments.folder = records.root
        else:
            records = dataset(arguments.dataset, arguments.root)
            arguments.folder = records.root / "images" if arguments.dataset == "cub" else records.root
        rates, starts = measured(arguments, records, Path(temporary) / "packs")
    write(out, rates, starts, arguments, len(records))
    print(out.read_text())


if __name__ == "__main__":
    main()
