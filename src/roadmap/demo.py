"""make demo: three losses learn to find characters they have never seen. Run: python -m roadmap.demo --out demo

Each loss trains the same small network on the built-in Glyphs, from the same weights, through the same batches, as
`roadmap train recipe=glyphs loss=NAME` does. Half of the characters are never shown in training; they are the test.
"""

from __future__ import annotations

import argparse
import math
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from roadmap.config.composition import settings_from
from roadmap.config.settings import Settings
from roadmap.data import drawn_pack
from roadmap.data.datasets.glyphs import export
from roadmap.encoder import Encoder
from roadmap.engine import fit
from roadmap.evaluation import evaluate
from roadmap.hardware import device_of, in_layout
from roadmap.models import retriever
from roadmap.report import Album, retrieval_page
from roadmap.runs import Run
from roadmap.search import index_pictures

LOSSES = {"smoothap": "SmoothAP", "supap": "SupAP", "roadmap": "ROADMAP"}
UNTRAINED = "untrained"
SHOWN = ("R@1", "mAP@R")
Metrics = Mapping[str, Mapping[str, float]]  # of each model
SERVE = """Search these characters in a browser: drop one, or drag a box on a picture of your own.
    .venv/bin/roadmap serve {index}"""
OWN_PICTURES = """With your own pictures, in a folder per class:
    .venv/bin/roadmap train data=folder data.root=PICTURES
    docs/guides/own-pictures.md walks from there to a page of results, docs/guides/search.md to a search of them."""


def settings_of(loss: str, out: Path, overrides: Sequence[str]) -> Settings:
    """What `roadmap train recipe=glyphs loss=NAME` would do, in a folder of the demonstration's."""
    folder = out / "runs" / loss
    if (folder / "config.yaml").is_file():  # of an earlier demonstration
        shutil.rmtree(folder)
    settings = settings_from(["recipe=glyphs", f"loss={loss}", *overrides])
    settings.run = str(folder)
    return settings


def write_page(path: Path, settings: Settings, runs: Mapping[str, Run]) -> None:
    """The same queries, and what the network before training and each loss retrieve for them."""
    encoders = {name: Encoder.open(run.folder) for name, run in runs.items()}
    records = next(iter(encoders.values())).records()
    torch.manual_seed(settings.seed)
    device = device_of(settings.hardware.device)
    first = in_layout(retriever(settings.model, settings.data.image).to(device), settings.hardware)
    encoders = {UNTRAINED: Encoder.of(first, settings, device), **encoders}
    pack = drawn_pack(records)
    found = {name: evaluate(encoder, records, pack=pack, progress=False) for name, encoder in encoders.items()}
    retrieval_page(path, "Characters never seen in training", found, Album(records.split("test"), pack))


def write_index(out: Path, run: Run) -> Path:
    """The test pictures as files, and an index of them by one model, in place of an earlier demonstration's."""
    encoder, pictures, folder = Encoder.open(run.folder), out / "pictures", out / "index"
    for earlier in (pictures, folder):
        shutil.rmtree(earlier, ignore_errors=True)
    export(encoder.records().split("test"), pictures)
    index_pictures(encoder, pictures, folder, engine="exact", progress=False)
    return folder


def print_table(metrics: Metrics) -> None:
    table = Table(title="Never seen in training, %", title_justify="left")
    table.add_column("")
    for name in SHOWN:
        table.add_column(name, justify="right")
    for model, values in metrics.items():
        cells = [values.get(name, math.nan) for name in SHOWN]
        table.add_row(model, *("-" if math.isnan(value) else f"{100 * value:.1f}" for value in cells))
    Console().print(table)


def demonstrate(out: Path, overrides: Sequence[str]) -> None:
    """Train, compare, show; it prints what it does and what to do next."""
    began, runs = time.monotonic(), dict[str, Run]()
    metrics: dict[str, dict[str, float]] = {}
    for number, (loss, name) in enumerate(LOSSES.items(), start=1):
        settings = settings_of(loss, out, overrides)
        print(f"\n{number} of {len(LOSSES)}: {name}, as by: roadmap train recipe=glyphs loss={loss}\n", flush=True)
        runs[name] = Run.open(fit(settings))
        summary = runs[name].summary()
        (before,), (metrics[name],) = summary["before"].values(), summary["after"].values()
        metrics = {UNTRAINED: before} | metrics
    page = out / "retrievals.html"
    write_page(page, settings, runs)
    print()
    print_table(metrics)
    print(f"\nQueries and what each model finds for them, right in green, wrong in red: open {page}")
    print(f"It took {time.monotonic() - began:.0f} s. Runs, with weights and logs: {out / 'runs'}\n")
    print(SERVE.format(index=write_index(out, runs["ROADMAP"])), end="\n\n")
    print(OWN_PICTURES)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m roadmap.demo", description="Train three losses on the built-in characters and compare them."
    )
    parser.add_argument("--out", type=Path, default=Path("demo"), help="folder for runs and page (default: demo)")
    parser.add_argument("overrides", nargs="*", help="settings, as for roadmap train, such as epochs=2")
    options = parser.parse_args(argv)
    try:
        demonstrate(options.out, options.overrides)
    except KeyboardInterrupt as stop:
        print("\nstopped; the same command begins anew", file=sys.stderr)
        sys.exit(getattr(stop, "exit_code", 130))
    except (ValueError, OSError) as error:  # what was typed, or a disk; anything else is a fault of ours
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
