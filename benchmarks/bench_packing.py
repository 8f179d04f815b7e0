"""Packing beside decoding: pictures a second that the cores decode, and that a pack takes, decoded and compressed.

    python benchmarks/bench_packing.py --root CUB_200_2011                     # its own files
    python benchmarks/bench_packing.py --root CUB_200_2011 --pictures 120000   # so many, cut out of them (SOP's size)
    python benchmarks/bench_packing.py --pictures 30000                        # cut out of noise

Rounds alternate between the methods and the median is kept. "decode only" decodes and resizes in the same processes
as packing and drops the result; the time they take to start is taken off, and stands in start_seconds. "decode only,
plain pool" (--plain-pool) does so in a multiprocessing.Pool, whose processes are up when the clock starts. "pack" and
"pack, compressed" are whole calls, with all that reaches the disk. "write and sync" is what the disk takes of the
pack's bytes, without decoding: where it is not well above "decode only", packing waits for the disk. ratio_to_decode
is of the median rates, each to "decode only". cpu_ms_per_picture is the time on a core, of all processes together: on
a machine with other things to do, that says more than the rates. Writes benchmarks/results/packing_<cores>_cores.csv.
"""

from __future__ import annotations

import argparse
import csv
import functools
import multiprocessing
import os
import resource
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from measure import provenance

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

from many_pictures import decoded_and_dropped, made_pictures, nothing

from roadmap.data import Records, dataset
from roadmap.data.pictures.packing import SHARD, pack
from roadmap.data.pictures.processes import answers

TASK = 32  # pictures that a process is given to decode at a time
WRITTEN = 4 << 30  # bytes at most that are written to measure the disk
Chunks = list[tuple[tuple[str, tuple[float, float, float, float] | None], ...]]


def chunks_of(records: Records) -> Chunks:
    pictures = [(str(records.path(i)), records.box(i)) for i in range(len(records))]
    return [tuple(pictures[first : first + TASK]) for first in range(0, len(pictures), TASK)]


def seconds(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def cpu_seconds() -> float:
    """Of this process and of all that it has started and that have ended."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(part.ru_utime + part.ru_stime for part in used)


def start_seconds(workers: int) -> float:
    return seconds(lambda: list(answers(nothing, range(workers), workers)))


def decoding_seconds(chunks: Chunks, workers: int, start: float) -> float:
    return seconds(lambda: list(answers(decoded_and_dropped, chunks, workers))) - start


def pool_seconds(chunks: Chunks, workers: int) -> float:
    context = multiprocessing.get_context("spawn")
    everyone = context.Barrier(workers + 1)
    with context.Pool(workers, initializer=everyone.wait) as pool:
        everyone.wait()
        return seconds(lambda: list(pool.imap_unordered(decoded_and_dropped, chunks)))


def packing_seconds(records: Records, folder: Path, workers: int, compressed: bool) -> float:
    shutil.rmtree(folder, ignore_errors=True)
    return seconds(lambda: pack(records, 256, folder, workers=workers, progress=False, compressed=compressed))


def pack_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("pixels-*"))


def writing_seconds(folder: Path, size: int, each: int) -> float:
    """So many bytes in files of a shard's size, each on the disk before the next."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    content = os.urandom(each)

    def write() -> None:
        for number in range(-(-size // each)):
            with (folder / str(number)).open("wb") as file:
                file.write(content)
                os.fsync(file.fileno())

    taken = seconds(write)
    shutil.rmtree(folder)
    return taken


def measured(records: Records, arguments: argparse.Namespace, folder: Path) -> dict[str, dict[str, object]]:
    chunks, workers, count = chunks_of(records), arguments.workers, len(records)
    rates: dict[str, list[float]] = {}
    costs: dict[str, list[float]] = {}
    sizes: dict[str, float] = {}

    def note(name: str, taking: Callable[[], float], pictures: float = count) -> None:
        used = cpu_seconds()
        rates.setdefault(name, []).append(pictures / taking())
        costs.setdefault(name, []).append(1000 * (cpu_seconds() - used) / pictures)
        print(f"{name:26s} {rates[name][-1]:10,.0f} pictures/s, {costs[name][-1]:.2f} ms of a core", flush=True)

    for _ in range(arguments.rounds):
        start = start_seconds(workers)
        note("decode only", functools.partial(decoding_seconds, chunks, workers, start))
        if arguments.plain_pool:
            note("decode only, plain pool", lambda: pool_seconds(chunks, workers))
        for name, compressed in (("pack", False), ("pack, compressed", True)):
            note(name, functools.partial(packing_seconds, records, folder, workers, compressed))
            sizes[name] = pack_bytes(folder) / count
            if not compressed:
                shutil.rmtree(folder)  # before the disk is measured: there may be room for one
                size = min(WRITTEN, int(sizes[name] * count))
                each = max(1, int(sizes[name] * min(SHARD, count)))
                note("write and sync", functools.partial(writing_seconds, folder, size, each), size / sizes[name])
    base = statistics.median(rates["decode only"])
    return {name: row(name, values, costs[name], base, sizes) for name, values in rates.items()}


def row(name: str, values: list[float], costs: list[float], base: float, sizes: dict[str, float]) -> dict[str, object]:
    median = statistics.median(values)
    return {
        "method": name,
        "pictures_per_second": round(median),
        "slowest_round": round(min(values)),
        "fastest_round": round(max(values)),
        "ratio_to_decode": round(median / base, 3),
        "cpu_ms_per_picture": round(statistics.median(costs), 3),
        "rounds": len(values),
        "bytes_per_picture": round(sizes[name]) if name in sizes else "",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, help="folder of the dataset; noise without")
    parser.add_argument("--dataset", default="cub")
    parser.add_argument("--pictures", type=int, help="how many, cut out of those of the dataset")
    parser.add_argument("--made-side", type=int, default=320, help="shorter side of those")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--plain-pool", action="store_true", help="decode in a multiprocessing.Pool too")
    parser.add_argument("--folder", type=Path, help="where files and packs are written; a temporary folder by default")
    parser.add_argument("--out", type=Path, help="CSV file")
    arguments = parser.parse_args()
    if arguments.root is None and arguments.pictures is None:
        parser.error("--root or --pictures is needed")
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(dir=arguments.folder) as temporary:
        records = None if arguments.root is None else dataset(arguments.dataset, arguments.root)
        if arguments.pictures is not None:
            sources = [] if records is None else [str(records.path(i)) for i in range(len(records))]
            began = time.perf_counter()
            records = made_pictures(
                Path(temporary) / "made", arguments.pictures, sources, arguments.made_side, arguments.workers
            )
            print(f"{len(records):,} pictures made in {time.perf_counter() - began:.1f} s", flush=True)
        rows = measured(records, arguments, Path(temporary) / "pack")
        start = start_seconds(arguments.workers)
    made = f"cut to side {arguments.made_side}" if arguments.pictures else "as they are"
    about = {"pictures": len(records), "files": made, "workers": arguments.workers, "start_seconds": round(start, 2)}
    about |= {"cores": os.cpu_count(), "load_before": round(load, 1), "load_after": round(os.getloadavg()[0], 1)}
    out = arguments.out or Path(__file__).parent / "results" / f"packing_{os.cpu_count()}_cores.csv"
    with out.open("w", newline="") as file:
        first = next(iter(rows.values())) | about | provenance("cpu")
        writer = csv.DictWriter(file, fieldnames=list(first))
        writer.writeheader()
        writer.writerows(found | about | provenance("cpu") for found in rows.values())
    print(out.read_text())


if __name__ == "__main__":
    main()
