"""The benchmark of scale runs, part by part, at tiny sizes; how fast is not looked at."""

from __future__ import annotations

import csv
import os
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
KEYS = {
    "two_pass": ("way", "batch", "ms", "peak_mib"),
    "memory": ("loss", "memory", "ms", "peak_mib"),
    "resnet": ("step", "batch", "memory", "ms", "of the step without"),
    "gpus": ("rows", "gpus", "loss_ms", "moved_mib", "between_share"),
}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("scale")
    command = [sys.executable, str(BENCHMARKS / "bench_scale.py"), "--small", "--device", "cpu", "--out", str(out)]
    run = subprocess.run(
        command, capture_output=True, text=True, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert run.returncode == 0, run.stderr
    assert "bar 1.4x" in run.stdout
    assert "bar 1.2x" in run.stdout
    assert "bar 1.05x" in run.stdout
    return out


@pytest.mark.parametrize("part", list(KEYS))
def test_a_part_writes_its_rows_with_where_they_came_from(part: str, results: Path) -> None:
    with (results / f"scale_{part}_cpu.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) >= 2
    for row in rows:
        assert all(row[key] != "" for key in (*KEYS[part], "hardware", "torch", "commit"))


def test_bytes_that_are_gathered_are_counted(results: Path) -> None:
    """Three others send 8 vectors of 512 float32 each, and get their gradients back."""
    with (results / "scale_gpus_cpu.csv").open(newline="") as file:
        row = next(row for row in csv.DictReader(file) if (row["rows"], row["gpus"]) == ("8", "4"))
    assert float(row["moved_mib"]) == round(2 * 3 * 8 * 512 * 4 / 2**20, 2)
    assert float(row["between_ms"]) == round(2 * 3 * 8 * 512 * 4 / 50e6, 4)
