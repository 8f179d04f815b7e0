"""docs/reproduction.md is what its script writes, and the script shows what results say."""

from __future__ import annotations

import dataclasses
import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

from roadmap.experiments.definitions import experiment
from roadmap.experiments.published import numbers
from roadmap.experiments.reproduction import reasons
from roadmap.experiments.results import outcome_of, save_outcomes

from .worlds import finished

DOCS = Path(__file__).parents[2] / "docs"


def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_reproduction", DOCS / "make_reproduction.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_is_what_the_script_writes() -> None:
    page = (DOCS / "reproduction.md").read_text(encoding="utf-8")
    assert page == script().page(), "run: python docs/make_reproduction.py"
    for number in (number for number in numbers() if number.table != "authors"):  # which are not the paper's
        assert number.text in page


def test_why_rows_were_not_run_is_found_out_when_it_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("ROADMAP_DATA", raising=False)
    script().look(tmp_path / "results", ["table2"])
    told = reasons(tmp_path / "results")
    assert told["sop_resnet50,data.batch_size=64,loss=roadmap"] == "the pictures of sop are not at hand"
    assert len(told) == len(experiment("table2").rows)


def test_results_come_onto_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    outcomes = []
    for row, noise in zip(experiment("table5", "cub", "resnet50").rows[-2:], (1.0, 0.5), strict=True):
        for seed in (0, 1):
            folder = finished(tmp_path / f"{row.name}{seed}", noise, seed, by="test", last=noise + 0.1, name=row.name)
            found = outcome_of(folder)
            about = {**found.about, "key": row.key, "with": ["model=resnet50_v1"]}
            outcomes.append(dataclasses.replace(found, about=about))
    save_outcomes(tmp_path / "results", "cub_resnet50", outcomes)
    module = script()
    monkeypatch.setattr(module, "RESULTS", tmp_path / "results")
    page = module.page()
    told = r"In the paper's own setting 8 of its 491 numbers were measured \((\d OK, )?\d differs\)"
    assert re.search(told, page)  # Table 6 has them too
    assert "What follows is of 4 runs," in page
    table = page.partition("## Table 5")[2].partition("## Table 6")[0]
    mean = 100 * sum(one.tests["cub"]["chosen"].metrics["mAP@R"] for one in outcomes[2:]) / 2
    assert f"| mAP@R | 25.27 ± 0.12 | {mean:.2f} ± " in table
    assert "measured: with model=resnet50_v1" in table
    assert "cub, resnet50, batch 128, the best epoch on the test set:" in table
    assert "cub, resnet50, batch 128, the last epoch:" in table
    assert "| loss=roadmap | 2 | **" in table
    assert "| fastap | cub | resnet50 | 128 | R@1 61.28 ± 0.37, mAP@R 24.11 ± 0.16 | not tried yet |" in table


def world(folder: Path, values: dict[str, tuple[float, ...]], *which: str | None) -> Path:
    """Results of rows of a table: a run for each noise, the seeds being 0, 1, ..."""
    rows = {row.name: row for row in experiment(*which).rows}  # type: ignore[arg-type]
    outcomes = []
    for name, noises in values.items():
        for seed, noise in enumerate(noises):
            made = finished(folder / f"{name}{seed}", noise, seed, by="test", last=noise + 0.1, name=name)
            found = outcome_of(made)
            outcomes.append(dataclasses.replace(found, about={**found.about, "key": rows[name].key, "with": []}))
    save_outcomes(folder / "results", "of_the_test", outcomes)
    return folder / "results"


def test_the_first_screen_answers_and_what_stands_in_is_no_number_of_the_paper(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = world(
        tmp_path,
        {"smoothap": (1.0, 0.9, 1.1), "supap": (0.9, 0.8, 0.95), "roadmap": (0.7, 0.65, 0.8)},
        "table3", "cub", "resnet50_head",
    )  # fmt: skip
    module = script()
    monkeypatch.setattr(module, "RESULTS", results)
    page = module.page()
    assert "**In the paper's own setting 0 of its 491 numbers were measured.**" in page
    first = page.partition("## How to read it")[0]
    assert len(first.splitlines()) < 50
    (row,) = [line for line in first.splitlines() if line.startswith("| cub |")]
    assert "| resnet50_head in place of resnet50 | 64 | 3 |" in row
    assert row.count(", p ") == 3
    told = re.search(r"Of 3: holds (\d), not shown (\d), reversed (\d)\.", first)
    assert told is not None
    assert sum(map(int, told.groups())) == 3


def test_the_first_screen_has_the_other_losses_of_table_5_and_the_gain_by_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = {"fastap": (1.0, 0.9, 1.1), "roadmap": (0.7, 0.65, 0.8)}
    module = script()
    monkeypatch.setattr(module, "RESULTS", world(tmp_path, values, "table5", "cub", "resnet50_head"))
    first = module.page().partition("## How to read it")[0]
    assert "| seeds | roadmap over fastap | roadmap over softbinap | roadmap over blackboxap |" in first
    assert re.search(r"\| cub \| resnet50_head in place of resnet50 \| 128 \| 3 \| .*, p .* \| - \| - \|", first)
    written = (DOCS / "reproduction.md").read_text(encoding="utf-8").partition("## How to read it")[0]
    assert re.search(r"It is [+-][\d.]+ %\s+at\s+batch\s+32\s+and\s+[+-][\d.]+\s+%\s+at\s+384", written)


def test_one_run_of_each_loss_is_told_and_not_tested(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = script()
    results = world(tmp_path, {"smoothap": (1.0,), "roadmap": (0.7,)}, "ablation_vits")
    monkeypatch.setattr(module, "RESULTS", results)
    page = module.page()
    first = page.partition("## How to read it")[0]
    assert "**One run each** (cub, vits, batch 128)" in first
    assert "The order of the losses" not in first
    assert "0 of its 491" in first  # what is compared with the yardstick was not published
    assert "With vits in place of resnet50: the runs of [ablation_vits" in page
    assert "### Table 5, vits" not in page
    ablation = page.partition("\n## ablation_vits")[2].partition("\n## ")[0]
    assert "| metric | yardstick | best epoch |" in ablation
    assert "| metric | published |" not in ablation


def test_the_anchors_of_the_page_are_there() -> None:
    page = (DOCS / "reproduction.md").read_text(encoding="utf-8")
    slug = script().slug
    headings = {slug(line.lstrip("# ")) for line in page.splitlines() if line.startswith("#")}
    found = re.findall(r"\]\(#([^)]*)\)", page)
    assert found
    assert set(found) <= headings
