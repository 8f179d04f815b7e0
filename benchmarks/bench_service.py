"""The service under load on loopback, beside the model's own embedding rate, in turns in one run.

    python benchmarks/bench_service.py                                     # 32 clients, 60 s, a ViT-S of 224 pixels
    python benchmarks/bench_service.py --seconds 10 --model resnet18 --weights random

Rounds of two turns: (1) `embed`: the model alone goes through pictures that are decoded and shrunk, in the service's
batch size; (2) the clients, in a process of their own on the same cores, each send a picture by HTTP and wait for its
answer. The service is a process of its own too, so neither waits for the other's interpreter. `ratio` is the service's
rate over the model's, each over all its turns; the bar is 0.80. p50, p99: of a whole request, as a client sees it;
with 32 clients that wait in line it is mostly the line. `first result`: in Chromium, from the moment that a picture is
chosen to the first result drawn on the page, of a warm service and one client; the bar is 150 ms above the embedding
that the service reports for the same query. Results are appended to benchmarks/results/service_cpu.csv.
"""

from __future__ import annotations

import argparse
import csv
import http.client
import io
import multiprocessing
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import torch
from measure import provenance
from PIL import Image

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "src"))
TOGETHER, PICTURES = 16, 64


def pictures_of(folder: Path, count: int) -> list[Path]:
    """Photograph-like JPEGs of 500 x 375: smooth shapes and noise, about 40 KB each."""
    random = np.random.default_rng(0)
    found = []
    for number in range(count):
        coarse = random.integers(0, 255, (12, 16, 3)).astype(np.uint8)
        image = np.asarray(Image.fromarray(coarse).resize((500, 375), Image.Resampling.BICUBIC), np.int16)
        noisy = np.clip(image + random.normal(0, 6, image.shape), 0, 255).astype(np.uint8)
        found.append(folder / f"{number}.jpg")
        Image.fromarray(noisy).save(found[-1], "JPEG", quality=88)
    return found


def embed_rate(encoder: Any, images: list[Image.Image], seconds: float) -> tuple[int, float]:
    """(pictures, seconds) of the model alone."""
    began, count = time.perf_counter(), 0
    while time.perf_counter() - began < seconds:
        encoder.embed([images[(count + i) % len(images)] for i in range(TOGETHER)])
        count += TOGETHER
    return count, time.perf_counter() - began


def _form(content: bytes) -> dict[str, Any]:
    return {"pictures": ("p.jpg", content, "image/jpeg"), "k": (None, "10")}


def clients(address: str, contents: list[bytes], count: int, seconds: float, out: Any) -> None:
    """In a process: so many clients at once, each with its own connection; latencies and errors."""
    latencies: list[float] = []
    errors: list[str] = []
    end = time.perf_counter() + seconds

    host, port = address.removeprefix("http://").split(":")
    requests = [httpx.Request("POST", address, files=_form(content)) for content in contents]
    ready = [(request.read(), dict(request.headers)) for request in requests]  # made once: the clients cost little

    def one(number: int) -> None:
        connection = http.client.HTTPConnection(host, int(port), timeout=60)
        turn = number
        while time.perf_counter() < end:
            body, headers = ready[turn % len(ready)]
            turn += 1
            began = time.perf_counter()
            try:
                connection.request("POST", "/api/indexes/pictures/search/pictures", body, headers)
                answer = connection.getresponse()
                content = answer.read()
                if answer.status != 200 or content.count(b'"score"') != 10:
                    errors.append(content.decode())
            except (OSError, http.client.HTTPException) as error:
                errors.append(repr(error))
                connection.close()
            latencies.append(time.perf_counter() - began)
        connection.close()

    began = time.perf_counter()
    threads = [threading.Thread(target=one, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    out.put((latencies, errors, time.perf_counter() - began))


def load_turn(address: str, contents: list[bytes], count: int, seconds: float) -> tuple[list[float], list[str], float]:
    context = multiprocessing.get_context("fork")
    out = context.Queue()
    process = context.Process(target=clients, args=(address, contents, count, seconds, out))
    process.start()
    found: tuple[list[float], list[str], float] = out.get(timeout=seconds + 120)
    process.join()
    return found


def first_results(address: str, files: list[Path], tries: int) -> list[tuple[float, float]]:
    """(milliseconds to the first result that is drawn, milliseconds of embedding), of one client in Chromium."""
    from playwright.sync_api import sync_playwright

    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        return []
    script = """() => { window.began = 0; window.drawn = 0;
        document.getElementById("file").addEventListener("change", () => {
            window.began = performance.now(); window.drawn = 0; }, true);
        new MutationObserver(() => requestAnimationFrame(() => setTimeout(() => {
            if (window.began && !window.drawn && document.querySelector(".card .score"))
                window.drawn = performance.now(); }))).observe(document.getElementById("columns"), {childList: true});
    }"""
    found = []
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page()
        page.goto(address)
        page.wait_for_selector(".card")
        page.evaluate(script)
        for number in range(tries):
            with page.expect_response("**/search/pictures") as answer:
                page.set_input_files("#file", files[number % len(files)])
            embed = answer.value.json()["took"]["embed"]
            while not page.evaluate("window.drawn"):
                page.wait_for_timeout(5)
            found.append((page.evaluate("window.drawn - window.began"), embed))
            page.wait_for_load_state("networkidle")
        browser.close()
    return found[2:]  # the first two warm the browser


def start_service(index: Path) -> tuple[subprocess.Popen[str], str]:
    command = [sys.executable, "-m", "roadmap", "serve", str(index), "--port", "0", "--rate", "0", "--device", "cpu"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    process = subprocess.Popen(
        [*command, "--together", str(TOGETHER)], stdout=subprocess.PIPE, text=True, env=environment
    )
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("page"):
            address = line.split()[1]
            break
    while True:
        try:
            httpx.get(f"{address}/ready").raise_for_status()
            return process, address
        except httpx.HTTPError:
            time.sleep(0.1)


def make_index(encoder: Any, folder: Path, rows: int) -> list[Path]:
    """An index of the pictures and of strangers, so that the search costs something; the files of the pictures."""
    from roadmap.embeddings import Embeddings
    from roadmap.search import Index, index_pictures

    (folder / "pictures").mkdir()
    files = pictures_of(folder / "pictures", PICTURES)
    index_pictures(encoder, folder / "pictures", folder / "pictures.index", engine="faiss", progress=False)
    with Index.open(folder / "pictures.index", write=True) as index:
        vectors = torch.randn(rows, index.manifest.dim, generator=torch.Generator().manual_seed(0))
        ids = tuple(f"stranger{i}" for i in range(rows))
        labels = torch.zeros(rows, dtype=torch.int64)
        index.add(Embeddings(vectors, labels, ids, ("stranger",), dict(index.manifest.about)))
        index.build()
    return files


def measured(given: argparse.Namespace, encoder: Any, files: list[Path], address: str) -> dict[str, Any]:
    """The rates, in turns."""
    from roadmap.data.pictures.images import thumbnail

    # shrunk already, as the service's decoding threads hand them to the model: the model's rate is the model's alone
    images = [thumbnail(Image.open(io.BytesIO(file.read_bytes())).convert("RGB"), encoder.side) for file in files]
    contents = [file.read_bytes() for file in files]
    embed_rate(encoder, images, 2.0)
    load_turn(address, contents, given.clients, 3.0)
    embedded, spent, lasted = 0, 0.0, 0.0
    latencies: list[float] = []
    errors: list[str] = []
    for _ in range(given.rounds):
        count, took = embed_rate(encoder, images, given.seconds / given.rounds)
        embedded, spent = embedded + count, spent + took
        some, wrong, took = load_turn(address, contents, given.clients, given.seconds / given.rounds)
        latencies, errors, lasted = latencies + some, errors + wrong, lasted + took
    for error in errors[:3]:
        print("error:", error[:300])
    own, served = embedded / spent, (len(latencies) - len(errors)) / lasted
    return {
        "seconds": round(lasted, 1),
        "queries": len(latencies),
        "errors": len(errors),
        "model pictures/s": round(own, 2),
        "service queries/s": round(served, 2),
        "ratio": round(served / own, 3),
        "p50 ms": round(1e3 * float(np.percentile(latencies, 50)), 1),
        "p99 ms": round(1e3 * float(np.percentile(latencies, 99)), 1),
    }


def first_facts(first: list[tuple[float, float]]) -> dict[str, Any]:
    """Medians; empty where there is no browser."""
    parts = {
        "first result ms": [total for total, _ in first],
        "of it embedding ms": [embed for _, embed in first],
        "above embedding ms": [total - embed for total, embed in first],
    }
    return {name: round(float(np.median(values)), 1) if values else "" for name, values in parts.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="vit_small_patch16_224")
    parser.add_argument("--weights", default="random")
    parser.add_argument("--rows", type=int, default=20_000)
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=60, help="Of load, in all.")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--tries", type=int, default=22)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "service_cpu.csv")
    given = parser.parse_args()
    from roadmap.encoder import Encoder

    with tempfile.TemporaryDirectory() as name:
        encoder = Encoder.open(given.model, device="cpu", weights=given.weights, batch=TOGETHER)
        files = make_index(encoder, Path(name), given.rows)
        process, address = start_service(Path(name) / "pictures.index")
        try:
            found = measured(given, encoder, files, address)
            first = first_facts(first_results(address, files, given.tries))
        finally:
            process.terminate()
            process.wait(60)
    asked = {"model": given.model, "rows": given.rows + PICTURES, "clients": given.clients}
    row = {**asked, **found, **first, "load": round(os.getloadavg()[0], 1), **provenance("cpu")}
    for key, value in row.items():
        print(f"{key:20s} {value}")
    fresh = not given.out.exists()
    with given.out.open("a", newline="") as file:
        writer = csv.DictWriter(file, row.keys())
        if fresh:
            writer.writeheader()
        writer.writerow(row)


if __name__ == "__main__":
    main()
