"""The benchmark of all losses runs, goes on and leaves its rows, at a tiny size; how good they are is not looked at."""

from __future__ import annotations

import csv
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from .data.layouts import write_picture

BENCHMARK = Path(__file__).parents[1] / "benchmarks" / "bench_family.py"
BIRDS = ("Albatross", "Auk", "Auk", "Gull")
TINY = ("model.name=test_vit", "model.weights=random", "data.image=32", "data.resize=32", "data.batch_size=8")
SHORT = ("data.batches=2", "data.workers=0", "data.pack=no", "epochs=1", "hardware=cpu")


@pytest.fixture(scope="module")
def birds(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """CUB's layout with four training and four test classes of eight pictures, in three groups each."""
    root = tmp_path_factory.mktemp("birds")
    names = {first + i: f"{first + i:03d}.Kind{i}_{bird}" for first in (1, 101) for i, bird in enumerate(BIRDS)}
    rows = [(number, c) for number, c in enumerate((c for c in names for _ in range(8)), start=1)]
    for number, c in rows:
        write_picture(root / "images" / names[c] / f"{number}.jpg", number, (40, 36))
    (root / "images.txt").write_text("".join(f"{number} {names[c]}/{number}.jpg\n" for number, c in rows))
    (root / "image_class_labels.txt").write_text("".join(f"{number} {c}\n" for number, c in rows))
    return root


def bench(home: Path, root: Path, *words: str, recipe: str = "cub_vits") -> subprocess.CompletedProcess[str]:
    settings = [f"--set={text}" for text in (f"data.root={root}", *TINY, *SHORT)]
    command = [sys.executable, str(BENCHMARK), "--recipe", recipe, "--out", str(home / "runs"), *settings, *words]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "ROADMAP_CACHE": str(home / "cache")}
    command += ["--results", str(home)]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment)


def rows_of(home: Path, recipe: str = "cub_vits") -> dict[tuple[str, str], dict[str, str]]:
    with (home / f"family_{recipe}.csv").open(newline="") as file:
        return {(row["loss"], row["seed"]): row for row in csv.DictReader(file)}


@pytest.mark.slow
def test_every_loss_trains_on_cub_and_is_measured_by_the_tree(birds: Path, tmp_path: Path) -> None:
    run = bench(tmp_path, birds)
    assert run.returncode == 0, run.stderr
    rows = rows_of(tmp_path)
    assert len(rows) == 19
    for row in rows.values():
        assert all(0 <= float(row[key]) <= 100 for key in ("R@1", "mAP@R", "H-AP", "ASI", "NDCG", "group mAP@R"))


@pytest.mark.slow
def test_a_row_is_kept_and_a_failed_one_leaves_the_others(birds: Path, tmp_path: Path) -> None:
    first = bench(tmp_path, birds, "--only", "roadmap")
    assert first.returncode == 0, first.stderr
    kept = rows_of(tmp_path)["roadmap", "0"]
    again = bench(tmp_path, birds, "--only", "roadmap", "happier", "--seeds", "0", "1")
    assert again.returncode == 0, again.stderr
    assert rows_of(tmp_path)["roadmap", "0"] == kept
    assert list(rows_of(tmp_path)) == [("roadmap", "0"), ("roadmap", "1"), ("happier", "0"), ("happier", "1")]
    # a row of other settings is not taken for these
    other = bench(tmp_path, birds, "--only", "roadmap", "--set", "loss.lam=1.0")
    assert other.returncode == 1
    assert "roadmap, seed 0: " in other.stderr
    assert "already holds a run with loss.lam=0.5, not 1;" in other.stderr
    wrong = bench(tmp_path, birds, "--only", "recall_at_k", "supap", "--set", "loss.rho=50")
    assert wrong.returncode == 1
    assert "recall_at_k, seed 0" in wrong.stderr
    assert ("supap", "0") in rows_of(tmp_path)


def test_a_row_is_enough_where_the_run_is_not_at_hand(birds: Path, tmp_path: Path) -> None:
    """The table is finished on another machine; the oldest rows do not say their settings."""
    settings = "data.batch_size=8 data.batches=2 data.image=32 data.resize=32 epochs=1 model.name=test_vit "
    lines = [
        "loss,seed,recipe,set,R@1",
        "roadmap,0,,,81.21",
        f"happier,0,cub_vits,{settings}model.weights=random,80.77",
    ]
    (tmp_path / "family_cub_vits.csv").write_text("\n".join(lines) + "\n")
    again = bench(tmp_path, birds, "--only", "roadmap", "happier")
    assert again.returncode == 0, again.stderr
    assert not (tmp_path / "runs").exists()
    assert [row["R@1"] for row in rows_of(tmp_path).values()] == ["81.21", "80.77"]


@pytest.mark.slow
def test_a_frozen_backbone_leaves_out_what_it_cannot_give_and_rows_say_what_they_are(
    birds: Path, tmp_path: Path
) -> None:
    none = ("margin_distance_weighted", "contrastive_horde")
    some = ("roadmap", "roadmap_matryoshka", "happier", "proxy_nca_pp", "sec")
    run = bench(tmp_path, birds, "--only", *none, *some, recipe="cub_resnet50_head")
    assert run.returncode == 0, run.stderr
    rows = rows_of(tmp_path, "cub_resnet50_head")
    assert len(rows) == len(some)
    for name in none:
        (said,) = re.findall(rf"^left out  {name}: (.*)$", run.stdout, re.MULTILINE)
        assert said.startswith("model.freeze_backbone=true keeps the pooled features alone")
        assert (name, "0") not in rows
    for row in rows.values():
        made = tmp_path / "runs" / f"cub_resnet50_head_{row['loss']}_0" / "environment.json"
        expected = {
            "recipe": "cub_resnet50_head", "seed": "0", "epochs": "1", "epoch": "1", "select": "last",
            "set": "data.batch_size=8 data.batches=2 data.image=32 data.resize=32 epochs=1 model.name=test_vit "
            "model.weights=random",
            "commit": json.loads(made.read_text())["commit"] or "unknown",
        }  # fmt: skip
        assert {key: row[key] for key in expected} == expected
        assert row["hardware"]
        assert bool(row["64-d mAP@R"]) == row["loss"].startswith("roadmap")
    table = run.stdout[run.stdout.index("family_cub_resnet50_head.csv") :]
    assert all(re.search(rf"^{name} .*{row['mAP@R']}", table, re.MULTILINE) for (name, _), row in rows.items())
    told = " ".join(table.split())
    assert "recipe cub_resnet50_head, set data.batch_size=8" in told
    assert "seed 0, epochs 1, epoch 1, select last" in told
    shown = bench(tmp_path, birds, "--table", recipe="cub_resnet50_head")
    assert shown.stdout.startswith("| loss | R@1 | mAP@R |")
    assert len(shown.stdout.splitlines()) == 2 + len(some) + 2


def test_tables_of_the_family_are_those_of_their_files() -> None:
    """docs/training.md: every number of a table is of the file that is named above it, or a mean of its seeds."""
    root = BENCHMARK.parents[1]
    page = (root / "docs" / "training.md").read_text()
    for name in ("glyphs", "cub_vits", "cub_vits_84", "cub_resnet50_head"):
        with (root / "benchmarks" / "results" / f"family_{name}.csv").open(newline="") as file:
            rows = list(csv.DictReader(file))
        after = page[page.index(f"family_{name}.csv") :]
        table = re.search(r"\n\n((?:\|.*\n)+)", after)
        assert table is not None
        head, _, *lines = ([cell.strip() for cell in line.strip("| \n").split("|")] for line in table[1].splitlines())
        assert [line[0] for line in lines] == list(dict.fromkeys(row["loss"] for row in rows))
        for line in lines:
            of_loss = [row for row in rows if row["loss"] == line[0]]
            for key, told in zip(head[1:], line[1:], strict=True):
                values = [row[key.removesuffix("s") if key == "seeds" else key] for row in of_loss]
                if key == "seeds" or len(values) == 1:
                    assert told == ", ".join(values)
                else:
                    numbers = [float(value) for value in values]
                    assert told == f"{np.mean(numbers):.2f} ± {np.std(numbers, ddof=1):.2f}"
