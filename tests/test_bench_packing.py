"""The benchmark of packing: ratios are of the same round, and every method runs; how fast is not looked at."""

from __future__ import annotations

import csv
import subprocess
import sys
from pathlib import Path

import pytest

TURNS = ["in turns: decode", "in turns: decode and write"]
TURNS += [f"part: {name}" for name in ("bytes of the pixels", "checksum", "decode", "write")]
BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


def test_a_round_is_compared_with_what_the_cores_decode_at_that_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounds of a machine that becomes three times slower: the ratio is as if it had not."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    from bench_packing import Run, mean, row

    runs = []
    for slower in (1, 2, 3):
        before, after = Run(9.0 * slower, 18.0, 1000), Run(11.0 * slower, 22.0, 1000)
        runs.append((Run(12.5 * slower, 25.0, 1000, start=2.5 * slower), mean(before, after)))
    found = row("pack", runs, {"pack": 123.4})
    assert found["pictures_per_second"] == 40  # 1000 / 25
    assert (found["slowest_round"], found["fastest_round"]) == (27, 80)
    assert [found[name] for name in ("ratio_to_decode", "lowest_ratio", "highest_ratio")] == [0.8, 0.8, 0.8]
    assert (found["without_start"], found["cpu_ratio"], found["cpu_ms_per_picture"]) == (1.0, 0.8, 25.0)
    assert (found["rounds"], found["bytes_per_picture"]) == (3, 123)


def test_every_method_runs(tmp_path: Path) -> None:
    out = tmp_path / "packing.csv"
    command = [sys.executable, str(BENCHMARKS / "bench_packing.py"), "--pictures", "70", "--made-side", "64"]
    told = ["--rounds", "2", "--workers", "2", "--folder", str(tmp_path), "--out", str(out)]
    done = subprocess.run([*command, *told], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    rows = {row["method"]: row for row in csv.DictReader(out.open())}
    assert list(rows) == [*TURNS, "decode only", "pack", "pack, compressed", "read compressed", "write and sync"]
    # decoding stands around all others
    assert [rows[name]["rounds"] for name in rows] == [*("1" for _ in TURNS), "8", "2", "2", "2", "2"]
    whole, *parts = (float(rows[name]["cpu_ms_per_picture"]) for name in TURNS[1:])
    assert 0 < min(parts) <= max(parts) < whole * 2  # a part is not more than the whole; clocks of cores are coarse
    for name in ("pack", "pack, compressed", "read compressed"):
        assert float(rows[name]["lowest_ratio"]) <= float(rows[name]["ratio_to_decode"])
    assert int(rows["pack"]["bytes_per_picture"]) > int(rows["pack, compressed"]["bytes_per_picture"]) > 0
    assert list(tmp_path.iterdir()) == [out]


def test_only_a_compressed_pack_beside_what_was_measured_of_other_pictures(tmp_path: Path) -> None:
    out = tmp_path / "packing.csv"
    held = ["pack,80,cut to side 64", "write and sync,70,as they are", "write and sync,70,cut to side 64"]
    out.write_text("\n".join(["method,pictures,files", *held, ""]))
    command = [sys.executable, str(BENCHMARKS / "bench_packing.py"), "--pictures", "70", "--made-side", "64"]
    told = ["--kinds", "compressed", "--rounds", "1", "--workers", "2", "--folder", str(tmp_path), "--out", str(out)]
    done = subprocess.run([*command, *told], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    rows = [(row["method"], row["pictures"], row["files"]) for row in csv.DictReader(out.open())]
    methods = [*TURNS, "decode only", "pack, compressed", "read compressed", "write and sync"]
    assert rows[:2] == [("pack", "80", "cut to side 64"), ("write and sync", "70", "as they are")]
    assert rows[2:] == [(name, "70", "cut to side 64") for name in methods]
