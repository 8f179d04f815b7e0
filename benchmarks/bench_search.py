"""Search engines: ours beside plain faiss and plain milvus-lite, in one run.

    python benchmarks/bench_search.py --items 20000 200000
    python benchmarks/bench_search.py --items 1000000 --who "roadmap faiss" "faiss flat" "faiss ivfpq"

Every contender builds in one process and searches in another, which opens what the first saved. recall@10: of the true
10 nearest of 500 queries that are not in the index. p50, p99: one query at a time. queries a second: 32 at a time.
Memory: what the searching process holds above what it held before it opened the index, after all searches; `resident`
counts mapped pages of files, which the system may take back, `anonymous` does not. Overhead: our engine's call beside
faiss's own on the very same index, taking turns. Vectors resemble embeddings: class centres and spread around them,
both Gaussian with deviations that fall as 1 / sqrt(axis), 100 vectors a class, unit length. Peers that are not
installed are skipped, and said so. `load`: processes that wanted a core, ours among them; times mean little where it is
well above the number of cores. Results go to benchmarks/results/search_cpu.csv after every measurement.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from measure import provenance

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "src"))

DIM, K, QUERIES = 384, 10, 500
WHO = {
    "roadmap exact": "every vector compared, mapped from disk",
    "roadmap faiss": "the kind that suits the size",
    "roadmap milvus": "a Milvus file, HNSW",
    "faiss flat": "IndexFlatIP, in memory",
    "faiss hnsw": "HNSW32, efConstruction 80, ef 64",
    "faiss ivfpq": "IVF, PQ192x4fs, refined from float32 in memory, 128 lists of 2 sqrt(N)",
    "milvus-lite": "HNSW, M 16, ef 128, through pymilvus",
}
MOST = {"roadmap milvus": 400_000, "milvus-lite": 400_000}  # a file is built by one process, in its memory
Search = Callable[[np.ndarray, int], np.ndarray]


def make_data(items: int, folder: Path) -> None:
    """vectors.npy, queries.npy and truth.npy: the same for every contender."""
    random = np.random.default_rng(0)
    spread = ((1 + np.arange(DIM)) ** -0.5).astype(np.float32)
    centres = random.standard_normal((max(10, items // 100), DIM), dtype=np.float32) * spread
    every = np.empty((items + QUERIES, DIM), np.float32)
    for top in range(0, len(every), 100_000):
        labels = random.integers(0, len(centres), min(100_000, len(every) - top))
        noise = random.standard_normal((len(labels), DIM), dtype=np.float32) * spread
        every[top : top + len(labels)] = centres[labels] + 0.7 * noise
    every /= np.linalg.norm(every, axis=1, keepdims=True)
    gallery, queries = torch.from_numpy(every[:items]), torch.from_numpy(every[items:])
    parts = [(queries @ tile.T).topk(K, dim=1) for tile in torch.split(gallery, 1 << 17)]
    scores = torch.cat([part.values for part in parts], dim=1)
    places = torch.cat([part.indices + i * (1 << 17) for i, part in enumerate(parts)], dim=1)
    truth = places.gather(1, scores.topk(K, dim=1).indices)
    np.save(folder / "vectors.npy", every[:items])
    np.save(folder / "queries.npy", every[items:])
    np.save(folder / "truth.npy", truth.numpy())


def build(who: str, data: Path, folder: Path) -> dict[str, Any]:
    vectors = np.load(data / "vectors.npy", mmap_mode="r")
    began = time.perf_counter()
    if who.startswith("roadmap"):
        from roadmap.embeddings import Embeddings
        from roadmap.search import Index

        with Index.create(folder / "index", {}, DIM, engine=who.split()[1]) as index:
            for top in range(0, len(vectors), 50_000):
                part = torch.from_numpy(np.array(vectors[top : top + 50_000]))
                names = tuple(str(top + i) for i in range(len(part)))
                index.add(Embeddings(part, torch.full((len(part),), -1), names))
            facts = index.build()["engine"]
        return {"build_s": round(time.perf_counter() - began, 1), "kind": facts.get("kind"), "step": facts.get("step")}
    if who == "milvus-lite":
        build_milvus(vectors, folder)
    else:
        import faiss

        lists = int(2 * len(vectors) ** 0.5)
        recipe = {"flat": "Flat", "hnsw": "HNSW32,Flat", "ivfpq": f"IVF{lists},PQ{DIM // 2}x4fs,RFlat"}[who.split()[1]]
        index = faiss.index_factory(DIM, recipe, faiss.METRIC_INNER_PRODUCT)
        if "HNSW" in recipe:
            index.hnsw.efConstruction = 80
        sample = np.sort(np.random.default_rng(0).choice(len(vectors), min(len(vectors), 64 * lists), replace=False))
        index.train(np.array(vectors[sample]))
        for top in range(0, len(vectors), 1 << 16):
            index.add(np.array(vectors[top : top + (1 << 16)]))
        faiss.write_index(index, str(folder / "plain.faiss"))
    return {"build_s": round(time.perf_counter() - began, 1)}


def build_milvus(vectors: np.ndarray, folder: Path) -> None:
    from pymilvus import DataType, MilvusClient

    # without this a call that takes 40 s is broken off and repeated, and the second finds the index of the first
    client = MilvusClient(str(folder / "plain.db"), grpc_options={"grpc.keepalive_time_ms": 2**31 - 1})
    schema = MilvusClient.create_schema(auto_id=False)
    schema.add_field("id", DataType.INT64, is_primary=True)
    schema.add_field("vector", DataType.FLOAT_VECTOR, dim=DIM)
    client.create_collection("plain", schema=schema)  # its index is made once, when everything is in
    for top in range(0, len(vectors), 4096):
        rows = np.array(vectors[top : top + 4096])
        client.insert("plain", [{"id": top + i, "vector": row} for i, row in enumerate(rows)])
    client.flush("plain")
    index = client.prepare_index_params()
    index.add_index("vector", index_type="HNSW", metric_type="IP", params={"M": 16, "efConstruction": 200})
    client.create_index("plain", index, sync=False)
    client.load_collection("plain")
    client.close()


def searcher(who: str, folder: Path) -> tuple[Search, Any]:
    """The contender's search, (Q, D), k -> places, over what was saved; and what it holds."""
    if who.startswith("roadmap"):
        from roadmap.search import Index

        index = Index.open(folder / "index", verify=False)
        return lambda q, k: np.array([[int(name) for name in row] for row in index.search(q, k).ids]), index
    if who == "milvus-lite":
        from pymilvus import MilvusClient

        client = MilvusClient(str(folder / "plain.db"))
        client.load_collection("plain")

        def ask(queries: np.ndarray, k: int) -> np.ndarray:
            params = {"metric_type": "IP", "params": {"ef": 128}}
            found = client.search("plain", data=list(queries), limit=k, output_fields=["id"], search_params=params)
            return np.array([[hit["id"] for hit in hits] for hits in found])

        return ask, client
    import faiss

    plain = faiss.read_index(str(folder / "plain.faiss"))
    if who == "faiss hnsw":
        plain.hnsw.efSearch = 64
    if who == "faiss ivfpq":
        plain.k_factor = 10
        faiss.ParameterSpace().set_index_parameter(plain, "nprobe", 128)
    return lambda q, k: plain.search(q, k)[1], plain


def search(who: str, data: Path, folder: Path) -> dict[str, Any]:
    queries, truth = np.load(data / "queries.npy"), np.load(data / "truth.npy")
    if "roadmap" in who:
        import roadmap.search.engines.exact  # noqa: F401 - not counted as memory of the index
    before = memory()
    ask, held = searcher(who, folder)
    found = ask(queries, K)
    recall = recall_of(found, truth)
    singles = timed([lambda row=row: ask(queries[row : row + 1], K) for row in range(QUERIES)])
    batches = timed([lambda top=top: ask(queries[top : top + 32], K) for top in range(0, QUERIES - 32, 32)] * 3)
    after = memory()
    return {
        "recall@10": recall,
        "p50_ms": round(float(np.percentile(singles, 50)) * 1e3, 3),
        "p99_ms": round(float(np.percentile(singles, 99)) * 1e3, 3),
        "queries_a_second": round(32 / float(np.median(batches)), 1),
        "resident_MiB": round(after["VmRSS"] - before["VmRSS"], 1),
        "anonymous_MiB": round(after["RssAnon"] - before["RssAnon"], 1),
        "load": round(os.getloadavg()[0], 1),
        **(overhead(held, queries) if who == "roadmap faiss" else {}),
    }


def overhead(index: Any, queries: np.ndarray) -> dict[str, Any]:
    """How much longer our engine's call takes than faiss's own on the same index, in parts of one."""
    base = index.engine._now[0]
    if base.facts["kind"] == "ivfpq":  # faiss alone does not look at the vectors again
        return {}
    found = {}
    for size in (1, 32):
        parts = [queries[top : top + size] for top in range(0, QUERIES - size, size)]
        # in turn, and each on queries that the other has not just brought into the processor's cache
        spent: tuple[list[float], list[float]] = ([], [])
        calls = (lambda part: index.engine.search(part, K), lambda part: base.index.search(part, K))
        for turn in range(6):
            for i, part in enumerate(parts):
                who = (i + turn) % 2
                began = time.perf_counter()
                calls[who](part)
                spent[who].append(time.perf_counter() - began)
        ours, plain = spent
        found[f"overhead_{size}"] = round(float(np.median(ours) / np.median(plain)) - 1, 4)
    return found


def timed(calls: list[Callable[[], Any]]) -> list[float]:
    seconds = []
    for call in calls:
        began = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - began)
    return seconds


def recall_of(found: np.ndarray, truth: np.ndarray) -> float:
    hits = [len(set(row) & set(right)) for row, right in zip(found.tolist(), truth.tolist(), strict=True)]
    return round(sum(hits) / truth.size, 4)


def memory() -> dict[str, float]:
    """MiB resident, and the part that is no file's."""
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return {name: int(fields[name].split()[0]) / 1024 for name in ("VmRSS", "RssAnon")}


def apart(limit: float, *arguments: Any) -> dict[str, Any]:
    """A phase in a fresh process; a dict with the reason when it gives none."""
    command = [sys.executable, __file__, "--phase", json.dumps([str(a) for a in arguments])]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit, check=False)
    except subprocess.TimeoutExpired:
        return {"skipped": f"{arguments[0]}: not done in {limit:.0f} s"}
    if done.returncode:
        # the last line of a traceback that begins at the margin; what follows belongs to a message of several lines
        lines = [line for line in done.stderr.splitlines() if re.match(r"[\w.]*(Error|Exception)\b", line)]
        return {"skipped": (lines or [f"ended with {done.returncode}"])[-1].strip()[:200]}
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def run_phase(phase: str, *arguments: str) -> dict[str, Any]:
    if phase == "data":
        make_data(int(arguments[0]), Path(arguments[1]))
        return {}
    return {"build": build, "search": search}[phase](arguments[0], Path(arguments[1]), Path(arguments[2]))


COLUMNS = ["who", "items", "recall@10", "p50_ms", "p99_ms", "queries_a_second", "resident_MiB", "anonymous_MiB",
           "build_s", "disk_MiB", "overhead_1", "overhead_32", "kind", "step", "load", "skipped"]  # fmt: skip


def replaced(rows: list[dict[str, Any]], row: dict[str, Any]) -> list[dict[str, Any]]:
    """With a new row in the place of an earlier one of the same contender and size."""
    return [old for old in rows if (old["who"], str(old["items"])) != (row["who"], str(row["items"]))] + [row]


def write(rows: list[dict[str, Any]], path: Path) -> None:
    names = [*COLUMNS, *provenance("cpu")]
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, names)
        writer.writeheader()
        writer.writerows(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--items", type=int, nargs="+", default=[20_000])
    parser.add_argument("--who", nargs="+", choices=list(WHO), default=list(WHO))
    parser.add_argument("--limit", type=float, default=1200.0, help="seconds for one phase of one contender")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results", help="folder of the CSV")
    parser.add_argument("--phase", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.phase:
        print(json.dumps(run_phase(*json.loads(arguments.phase))))
        return
    arguments.out.mkdir(parents=True, exist_ok=True)
    target, origin = arguments.out / "search_cpu.csv", provenance("cpu")
    rows = list(csv.DictReader(open(target))) if target.is_file() else []  # noqa: SIM115 - read at once
    for items in arguments.items:
        with tempfile.TemporaryDirectory() as place:
            data = Path(place)
            if any(items <= MOST.get(who, items) for who in arguments.who):
                apart(arguments.limit, "data", items, data)
            for who in arguments.who:
                row = {"who": who, "items": items, **origin}
                if items > MOST.get(who, items):
                    row["skipped"] = (
                        f"not run above {MOST[who]:,}: a file is built in one process; a server is for more"
                    )
                    rows = replaced(rows, row)
                    write(rows, target)
                    continue
                with tempfile.TemporaryDirectory(dir=data) as folder:
                    row |= apart(arguments.limit, "build", who, data, folder)
                    if "skipped" not in row:
                        row |= apart(arguments.limit, "search", who, data, folder)
                    size = sum(path.stat().st_size for path in Path(folder).rglob("*") if path.is_file())
                    row["disk_MiB"] = round(size / (1 << 20), 1)
                rows = replaced(rows, row)
                print({name: row[name] for name in COLUMNS if name in row}, flush=True)
                write(rows, target)


if __name__ == "__main__":
    main()
