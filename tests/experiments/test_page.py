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
    assert re.search(
        r"Measured so far: 8 of 497 numbers \((\d OK, )?\d differs\); 4 runs,", page
    )  # Table 6 has them too
    table = page.partition("## Table 5")[2].partition("## Table 6")[0]
    mean = 100 * sum(one.tests["cub"]["chosen"].metrics["mAP@R"] for one in outcomes[2:]) / 2
    assert f"| mAP@R | 25.27 ± 0.12 | {mean:.2f} ± " in table
    assert "measured: with model=resnet50_v1" in table
    assert "cub, resnet50, batch 128, the best epoch on the test set:" in table
    assert "cub, resnet50, batch 128, the last epoch:" in table
    assert "| loss=roadmap | 2 | **" in table
    assert "| fastap | cub | resnet50 | 128 | R@1 61.28 ± 0.37, mAP@R 24.11 ± 0.16 | not tried yet |" in table
