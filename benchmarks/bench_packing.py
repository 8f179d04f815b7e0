"""Packing beside decoding: pictures a second that the cores decode, and that a pack takes, decoded and compressed.

    python benchmarks/bench_packing.py --root CUB_200_2011                     # its own files
    python benchmarks/bench_packing.py --root CUB_200_2011 --pictures 120000   # so many, cut out of them (SOP's size)
    python benchmarks/bench_packing.py --pictures 30000                        # cut out of noise

"decode only" decodes and resizes in the same processes as packing and drops the result; the time that they take to
start is taken off, and stands in start_seconds. "pack" and "pack, compressed" are whole calls, with their start and all
that reaches the disk; "read compressed" decodes the pictures of the latter again, in the same processes. Each of these
stands in its round between two runs of "decode only", and ratio_to_decode is to the mean of their times: the median of
the rounds, with the lowest and the highest, so that a machine with other things to do slows both sides. without_start
is the same where the start is taken off on both sides, as it hardly counts for many pictures. cpu_ratio is that of the
times on a core, of all processes together (cpu_ms_per_picture), which says more where the machine is shared.
"decode only, plain pool" (--plain-pool) decodes in a multiprocessing.Pool, whose processes are up when it begins.
"write and sync" is what the disk takes of the pack's bytes, without decoding: where it is not well above "decode only",
packing waits for the disk. "in turns" is the same work on a core, shard after shard in one process: what writing costs
beside decoding, and each "part" of it, whatever else the machine does; --rounds 0 measures nothing else. --kinds
compressed leaves out the pack of pixels, where that would not fit the disk. Results go to
benchmarks/results/packing_<cores>_cores.csv after each round; rows of other methods and other pictures are kept.
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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from measure import provenance

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

from many_pictures import decoded_and_dropped, made_pictures, nothing, parts_of_packing, read_and_dropped

from roadmap.data import Records, dataset
from roadmap.data.pictures.packing import _shards, pack, shard_length
from roadmap.data.pictures.processes import answers

TASK = 32  # pictures that a process is given to decode at a time
WRITTEN = 4 << 30  # bytes at most that are written to measure the disk
KINDS = {"decoded": ("pack", False), "compressed": ("pack, compressed", True)}
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
    return seconds(lambda: pack(records, 256, folder, workers=workers, progress=False, compressed=compressed))


def reading_seconds(folder: Path, count: int, workers: int) -> float:
    tasks = [(str(folder), first, min(first + TASK, count)) for first in range(0, count, TASK)]
    return seconds(lambda: list(answers(read_and_dropped, tasks, workers)))


def pack_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("pixels-*"))


def writing_seconds(folder: Path, size: int, each: int) -> float:
    """So many bytes in files of a shard's size, each on the disk before the next."""
    folder.mkdir(parents=True)
    content = (os.urandom(1 << 20) * (each // (1 << 20) + 1))[:each]

    def write() -> None:
        for number in range(-(-size // each)):
            with (folder / str(number)).open("wb") as file:
                file.write(content)
                os.fsync(file.fileno())

    return seconds(write)


@dataclass(frozen=True)
class Run:
    """What one method took for so many pictures: seconds of the clock, of all cores, and of the clock to start."""

    seconds: float
    cpu: float
    pictures: float
    start: float = 0.0


def empty(folder: Path) -> None:
    """Removed, and the disk is done with it and with what came before, so that no method pays for another."""
    shutil.rmtree(folder, ignore_errors=True)
    os.sync()


def run(name: str, taking: Callable[[], float], pictures: float, start: float = 0.0) -> Run:
    used = cpu_seconds()
    taken = taking()
    found = Run(taken, cpu_seconds() - used, pictures, start)
    print(
        f"{name:26s} {pictures / taken:10,.0f} pictures/s, {1000 * found.cpu / pictures:.2f} ms of a core", flush=True
    )
    return found


def mean(before: Run, after: Run) -> Run:
    return Run((before.seconds + after.seconds) / 2, (before.cpu + after.cpu) / 2, before.pictures)


def measured(records: Records, arguments: argparse.Namespace, folder: Path) -> Iterator[list[dict[str, object]]]:
    """After each round, the rows of all rounds so far."""
    chunks, workers, count = chunks_of(records), arguments.workers, len(records)
    runs: dict[str, list[tuple[Run, Run | None]]] = {"decode only": []}  # with what the cores decode at that time
    sizes: dict[str, float] = {}

    def decode() -> Run:
        start = start_seconds(workers)
        found = run("decode only", functools.partial(decoding_seconds, chunks, workers, start), count)
        runs["decode only"].append((found, None))
        return found

    def beside(name: str, before: Run, work: Callable[[], float]) -> Run:
        begun = start_seconds(workers)
        taken = run(name, work, count, begun)
        after = decode()
        runs.setdefault(name, []).append((taken, mean(before, after)))
        return after

    for _ in range(arguments.rounds):
        before = decode()
        for name, compressed in (KINDS[kind] for kind in arguments.kinds):
            empty(folder)
            before = beside(name, before, functools.partial(packing_seconds, records, folder, workers, compressed))
            sizes[name] = pack_bytes(folder) / count
        if "compressed" in arguments.kinds:
            beside("read compressed", before, functools.partial(reading_seconds, folder, count, workers))
        empty(folder)
        runs.setdefault("write and sync", []).append((disk(folder, count, sizes[name]), None))
        if arguments.plain_pool:
            name = "decode only, plain pool"
            runs.setdefault(name, []).append((run(name, lambda: pool_seconds(chunks, workers), count), None))
        yield [row(name, found, sizes) for name, found in runs.items()]


def in_turns(records: Records, workers: int, folder: Path) -> list[dict[str, object]]:
    """A row for each part of the work of packing, in milliseconds of a core."""
    folder.mkdir()
    taken: dict[str, float] = {}
    shards = [(shard, str(folder)) for shard in _shards(records, 256, compressed=False)]
    for _, parts in answers(parts_of_packing, shards, workers):
        taken = {name: taken.get(name, 0.0) + seconds for name, seconds in parts.items()}
    shutil.rmtree(folder)
    blank = row("", [(Run(1.0, 1.0, 1.0), None)], {})
    rows = []
    for name, seconds in sorted(taken.items()):
        ratio = taken["in turns: decode"] / seconds
        about = {"cpu_ratio": round(ratio, 3) if name == "in turns: decode and write" else ""}
        about |= {"cpu_ms_per_picture": round(1000 * seconds / len(records), 3), "rounds": 1}
        rows.append(dict.fromkeys(blank, "") | {"method": name} | about)
        print(f"{name:26s} {1000 * seconds / len(records):.3f} ms of a core", flush=True)
    return rows


def disk(folder: Path, count: int, each: float) -> Run:
    """What the disk takes, of a pack with so many bytes a picture."""
    size, shard = min(WRITTEN, int(each * count)), max(1, int(each * min(shard_length(count), count)))
    return run("write and sync", functools.partial(writing_seconds, folder, size, shard), size / each)


def row(name: str, runs: Sequence[tuple[Run, Run | None]], sizes: Mapping[str, float]) -> dict[str, object]:
    """The medians of rounds, each beside what the cores decoded at that time."""
    rates = [taken.pictures / taken.seconds for taken, _ in runs]
    pairs = [(taken, base) for taken, base in runs if base is not None]
    ratios = [base.seconds / taken.seconds for taken, base in pairs]
    later = [base.seconds / (taken.seconds - taken.start) for taken, base in pairs]
    cpu = [base.cpu / taken.cpu for taken, base in pairs]
    costs = [1000 * taken.cpu / taken.pictures for taken, _ in runs]
    return {
        "method": name,
        "pictures_per_second": round(statistics.median(rates)),
        "slowest_round": round(min(rates)),
        "fastest_round": round(max(rates)),
        "ratio_to_decode": round(statistics.median(ratios), 3) if ratios else "",
        "lowest_ratio": round(min(ratios), 3) if ratios else "",
        "highest_ratio": round(max(ratios), 3) if ratios else "",
        "without_start": round(statistics.median(later), 3) if later else "",
        "cpu_ratio": round(statistics.median(cpu), 3) if cpu else "",
        "cpu_ms_per_picture": round(statistics.median(costs), 3),
        "rounds": len(runs),
        "bytes_per_picture": round(sizes[name]) if name in sizes else "",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, help="folder of the dataset; noise without")
    parser.add_argument("--dataset", default="cub")
    parser.add_argument("--pictures", type=int, help="how many, cut out of those of the dataset")
    parser.add_argument("--made-side", type=int, default=320, help="shorter side of those")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS), help="of packs; both by default")
    parser.add_argument("--plain-pool", action="store_true", help="decode in a multiprocessing.Pool too")
    parser.add_argument("--folder", type=Path, help="where files and packs are written; a temporary folder by default")
    parser.add_argument("--out", type=Path, help="CSV file")
    arguments = parser.parse_args()
    if arguments.root is None and arguments.pictures is None:
        parser.error("--root or --pictures is needed")
    if arguments.folder is not None:
        arguments.folder.mkdir(parents=True, exist_ok=True)
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
        made = f"cut to side {arguments.made_side}" if arguments.pictures else "as they are"
        about: dict[str, object] = {"pictures": len(records), "files": made, "workers": arguments.workers}
        about |= {"start_seconds": round(start_seconds(arguments.workers), 2), "cores": os.cpu_count()}
        about |= {"load_before": round(load, 1)}
        out = arguments.out or Path(__file__).parent / "results" / f"packing_{os.cpu_count()}_cores.csv"
        about["load_after"] = about["load_before"]
        turns = in_turns(records, arguments.workers, Path(temporary) / "turns")
        write(out, [found | about | provenance("cpu") for found in turns])
        for rows in measured(records, arguments, Path(temporary) / "pack"):
            about["load_after"] = round(os.getloadavg()[0], 1)
            write(out, [found | about | provenance("cpu") for found in rows])
    print(out.read_text())


def write(out: Path, rows: Sequence[Mapping[str, object]]) -> None:
    """Beside the rows that are there of something else. A stopped run keeps the rounds that it has."""
    what = {(row["method"], str(row["pictures"]), row["files"]) for row in rows}
    before = list(csv.DictReader(out.open(newline=""))) if out.is_file() else []
    others = [row for row in before if (row["method"], row["pictures"], row["files"]) not in what]
    with out.open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows([*others, *rows])


if __name__ == "__main__":
    main()
