"""The benchmark of tries beside a recipe: rows that are kept, held-out classes alone, differences paired over seeds."""

from __future__ import annotations

import csv
import importlib
import json
import os
import subprocess
import sys
from argparse import Namespace
from pathlib import Path
from types import ModuleType

import pytest

from roadmap.runs import Run

from .test_bench_family import SHORT, TINY, birds  # noqa: F401 - a fixture

FOLDER = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture
def tries(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.setattr(sys, "path", [str(FOLDER), *sys.path])
    return importlib.import_module("bench_tries")


def bench(home: Path, root: Path, *words: str) -> subprocess.CompletedProcess[str]:
    settings = [f"--set={text}" for text in (f"data.root={root}", *TINY, *SHORT)]
    command = [sys.executable, str(FOLDER / "bench_tries.py"), "--out", str(home / "runs"), *settings, *words]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "ROADMAP_CACHE": str(home / "cache")}
    command += ["--results", str(home)]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment)


def rows_of(home: Path) -> dict[tuple[str, str], dict[str, str]]:
    with (home / "tries_cub_vits_best.csv").open(newline="") as file:
        return {(row["try"], row["seed"]): row for row in csv.DictReader(file)}


@pytest.mark.slow
def test_tries_are_measured_on_held_out_classes_and_once(birds: Path, tmp_path: Path) -> None:  # noqa: F811
    first = bench(tmp_path, birds, "--only", "base", "lam_03", "--seeds", "0")
    assert first.returncode == 0, first.stderr
    kept = rows_of(tmp_path)
    both = bench(tmp_path, birds, "--only", "base", "lam_03", "--seeds", "0", "1")
    assert both.returncode == 0, both.stderr
    rows = rows_of(tmp_path)
    assert list(rows) == [("base", "0"), ("base", "1"), ("lam_03", "0"), ("lam_03", "1")]
    assert {key: rows[key] for key in kept} == kept
    for (name, seed), row in rows.items():
        run = tmp_path / "runs" / f"cub_vits_best_{name}_{seed}"
        summary = json.loads((run / "summary.json").read_text())
        assert (summary["chosen by"], summary["best epoch"]) == ("held_out", summary["epochs"])
        told = {key: f"{100 * summary['validation'][key]:.2f}" for key in ("R@1", "mAP@R")}
        assert {key: row[key] for key in told} == told
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        assert [line["split"] for line in lines if line["kind"] == "evaluation"] == ["validation"]  # after the last
        assert row["settings"] == ("" if name == "base" else "loss.lam=0.3")
        assert (row["classes"], row["recipe"], row["epochs"]) == ("held out", "cub_vits_best", "1")
        assert row["hardware"]
        assert float(row["training seconds"]) >= 0
        assert 0 <= float(row["flip mAP@R"]) <= 100
    assert "mAP@R less base" in both.stdout
    other = bench(tmp_path, birds, "--only", "base", "--seeds", "0", "--set", "optim.weight_decay=0.5")
    assert other.returncode == 1
    assert "already holds a run with optim.weight_decay=0.0004, not 0.5" in other.stderr


@pytest.mark.slow
def test_it_stops_in_time(birds: Path, tmp_path: Path) -> None:  # noqa: F811
    found = bench(tmp_path, birds, "--only", "base", "--seeds", "0", "--set", "epochs=100000", "--minutes", "0.2")
    assert found.returncode == 0, found.stderr
    assert "0.2 minutes are over; the same command goes on" in found.stderr
    assert not (tmp_path / "tries_cub_vits_best.csv").exists()


@pytest.mark.slow
def test_a_try_of_two_runs_is_measured_after_the_second(
    tries: ModuleType,
    birds: Path,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("ROADMAP_CACHE", str(tmp_path / "cache"))
    monkeypatch.setitem(tries.TRIES, "larger_504", tries.Try((), ("data.image=48", "data.resize=48", "epochs=2")))
    given = [f"data.root={birds}", *TINY, *SHORT]
    row = tries.row_of("larger_504", 0, Namespace(recipe="cub_vits_best", set=given, out=str(tmp_path)))
    first, second = (Run(tmp_path / f"cub_vits_best_larger_504_0{end}") for end in ("", "_then"))
    assert [run.settings().data.image for run in (first, second)] == [32, 48]
    assert second.settings().model.weights == str(first.folder)
    assert second.summary()["before"] != first.summary()["before"]
    assert row["mAP@R"] == f"{100 * second.summary()['validation']['mAP@R']:.2f}"
    assert (row["settings"], row["epochs"]) == ("the recipe, then data.image=48 data.resize=48 epochs=2", "2")
    seconds = sum(run.summary()["training seconds"] for run in (first, second))
    assert row["training seconds"] == f"{seconds:.0f}"


def made(name: str, seed: int, value: float, **more: str) -> dict[str, str]:
    numbers = {"R@1": f"{value + 40:.2f}", "mAP@R": f"{value:.2f}", "flip mAP@R": "1.00", "training seconds": "60"}
    return {"try": name, "seed": str(seed), **numbers, **more}


def test_the_table_is_in_the_order_of_map_and_paired_over_seeds(tries: ModuleType) -> None:
    """By hand: the differences of lam_03 are 1, 2, 3: mean 2, sd 1, t = 2 sqrt(3), p 0.0742; half-width 2.484."""
    rows = [made("base", seed, value) for seed, value in enumerate((40.0, 44.0, 42.0))]
    rows += [made("lam_03", seed, value) for seed, value in enumerate((41.0, 46.0, 45.0))]
    rows += [made("biases", 7, 50.0), made("both_tokens", 0, 60.0), made("lam_07", 0, 30.0)]
    ours, apart = tries.sheets_of(rows, "x.csv")
    assert [line[0].text for line in ours.rows] == ["biases", "lam_03", "base", "lam_07"]
    assert [line[0].text for line in apart.rows] == ["both_tokens"]
    table = {line[0].text: dict(zip(ours.columns, (cell.text for cell in line), strict=True)) for line in ours.rows}
    assert table["lam_03"]["mAP@R"] == "44.00 ± 2.65"
    assert table["lam_03"]["mAP@R less base"] == table["lam_03"]["R@1 less base"] == "+2.00 (-0.48 to +4.48)"
    assert table["lam_03"]["p"] == "0.074"
    assert [table[name]["mAP@R less base"] for name in ("base", "biases", "lam_07")] == [
        ""
    ] * 3  # no two seeds in common
    assert table["biases"]["seeds"] == "7"


def test_many_tries_are_corrected_for(tries: ModuleType) -> None:
    rows = [made("base", seed, 40.0 + seed) for seed in range(3)]
    for name in ("lam_03", "lam_07"):
        rows += [made(name, seed, 40.0 + seed + gain) for seed, gain in enumerate((1.0, 2.0, 3.0))]
    found = tries.differences_of(
        {name: [row for row in rows if row["try"] == name] for name in ("base", "lam_03", "lam_07")}
    )
    assert [round(p, 4) for _, p in found.values()] == [0.1484, 0.1484]  # twice that of one


def test_every_try_is_a_run_that_can_be(tries: ModuleType) -> None:
    """Its settings compose, and its batches can be made of 80 classes of 41 pictures or more."""
    from roadmap.config.composition import check_loss, settings_from

    seen = set()
    for tried in tries.TRIES.values():
        for own in (tried.settings, tried.then):
            settings = settings_from(["recipe=cub_vits_best", "data.root=x", *tries.HELD_OUT, *own])
            check_loss(settings)
            assert settings.select.by == "held_out"
            assert settings.select.every > settings.epochs
            assert settings.data.batch_size // settings.data.per_class <= 80
            assert settings.data.per_class <= 41
            assert settings.data.image % 14 == 0
        seen.add(str(tried))
    assert len(seen) == len(tries.TRIES)
