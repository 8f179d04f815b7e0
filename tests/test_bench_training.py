"""The benchmarks of the loop of training run, with a small network on the CPU; how fast is not looked at."""

from __future__ import annotations

import csv
import importlib
import sys
from pathlib import Path

import pytest

from .engine.worlds import write_classes

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.mark.parametrize(("name", "ways"), [("bench_training", 1), ("bench_streaming", 4)])
def test_it_runs(name: str, ways: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.setenv("ROADMAP_CACHE", str(tmp_path / "cache"))
    bench = importlib.import_module(name)
    for module in (bench, importlib.import_module("bench_training")):
        monkeypatch.setattr(module, "MODELS", {"small_cnn": {}})
    root = tmp_path / "pictures"
    for split in ("train", "test"):
        write_classes(root / split, range(8), each=2)
    out = tmp_path / "out.csv"
    typed = [name, "--root", str(root), "--dataset", "folder", "--models", "small_cnn", "--batches", "8"]
    typed += ["--compile", "no", "--device", "cpu", "--steps", "2", "--rounds", "1", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", typed)
    bench.main()
    rows = list(csv.DictReader(out.open()))
    assert len(rows) == ways
    rates = [value for row in rows for key, value in row.items() if key.endswith("pictures/s")]
    assert rates
    assert all(int(rate) > 0 for rate in rates)
